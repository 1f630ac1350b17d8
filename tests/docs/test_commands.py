"""Every command of the pages is run: here, in tiny, or by the test that ``ELSEWHERE`` names.

What ``NEEDS`` names asks for something that no test machine has; it says what. A training on more
processes than there are cores here is checked as far as its first step.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.docs.pages import PAGES, blocks, every_block, name_of, shell_commands, split_verb
from tests.docs.workplace import RUN, first_run
from tests.launching import ROOT
from tests.serving.servers import running

TRACKING = "tests/training/test_tracking.py"  # wandb and mlflow have an environment of their own
ELSEWHERE = {
    "bash scripts/quickstart.sh": "tests/end_to_end/test_quickstart.py",
    "bash scripts/gpu_first_hour.sh": "tests/benchmarks/test_gpu_first_hour.py",
    "curl http://127.0.0.1:": "tests/docs/test_serving_pages.py",
    "nemo-aligner train --config conf/train_reward_model.yaml pretrained": TRACKING,
    "nemo-aligner import": "tests/checkpoint/test_importing.py",
    "python benchmarks/": "tests/benchmarks/test_benchmarks.py",
    "python examples/rl/": "tests/examples/test_rl.py",
    "sbatch": "tests/slurm/test_scripts.py",
}
NEEDS = {
    "MODEL=$PWD/megatron_gpt.nemo docker": "docker; tests/deploy reads the file",
    "bash scripts/run_tests.sh": "this is it",
    "docker": "docker; tests/deploy reads the file",
    "kubectl": "a cluster; tests/deploy holds the files to the schemas",
    "nemo-aligner data fetch": "the hub; tests/data/test_hub.py has one of files",
    "pip": "packages of the network, by the hundreds of megabytes",
    "python3.11 -m venv vllm": "the same",
    "source .venv/bin/activate": "an environment, which the tests run in",
    "vllm/bin/pip": "packages of the network, by the hundreds of megabytes",
}
# Files of NeMo-Aligner's own are for long runs of long texts, which those here are not.
SHORT = ["model.optim.sched.constant_steps=0", "model.encoder_seq_length=512"]
SERVERS = ("serve", "gateway", "serve-critic")
# Of these a command that differs from one before in its names alone is not run again.
REPEATED = ("convert", "data split", "export", "plan", "report", *SERVERS)
# The others' are run by tests of their own.
WITH_PYTHON = ("README.md", "docs/getting_started.md", "docs/tasks.md")
SEVERAL = re.compile(r"--processes (\d+)")
MOST_PROCESSES = 2
COLUMNS = 100  # that a training's log has
# Of the base model's four layers; pages speak of SmolLM2, which has thirty.
FREEZE = "model.freeze_layers="
FROZEN = f"{FREEZE}2"
SUFFIX = re.compile(r"\.[a-z]{2,}$")
MODULE = re.compile(r"# (\w+\.py)\n")


def is_run_here(command: str) -> bool:
    return not command.startswith((*ELSEWHERE, *NEEDS))


def is_server(step: str) -> bool:
    words = step.split()
    return words[0] == "nemo-aligner" and words[1] in SERVERS


def shape(step: str) -> str:
    """What tells a command from another one: its options and settings, and the kinds of files."""
    if not step.startswith("nemo-aligner "):
        return step
    verb, arguments = split_verb(shlex.split(step, comments=True)[1:])
    if verb not in REPEATED:
        return step
    found = [verb]
    for argument in arguments:
        key, equals, value = argument.rpartition("=")
        if key in ("server.port", "gateway.port"):
            continue
        is_name = not argument.startswith("--") and (not equals or "." in value)
        found.append(key + equals + ("".join(SUFFIX.findall(value)) if is_name else value))
    return " ".join(found)


def steps(page: Path) -> list[str]:
    """The page's commands and its Python, in order."""
    found = []
    for language, text in every_block(page):
        if language in ("", "bash"):
            found += [command for command in shell_commands(text) if is_run_here(command)]
        elif language == "python" and name_of(page) in WITH_PYTHON:
            found.append(f"PYTHON\n{text}")
    return found


def steps_of_all() -> dict[Path, list[str]]:
    """Of every page that has any."""
    # The server and the gateway that all pages ask.
    seen = {
        shape("nemo-aligner serve rm_model_file=first.nemo"),
        shape("nemo-aligner gateway 'backends=[http://127.0.0.1:5555]'"),
    }
    every = {}
    for page in PAGES:
        every[page] = [step for step in steps(page) if shape(step) not in seen]
        seen.update(shape(step) for step in every[page] if shape(step) != step)
    return {page: of_page for page, of_page in every.items() if of_page}


STEPS = steps_of_all()


class Page:
    """A page that is followed, in a folder of its own."""

    def __init__(self, page: Path, folder: Path, logs: Path, served: dict[str, str]) -> None:
        self._folder, self._logs, self._served = folder, logs, served
        modules = [text for text in blocks(page, "python") if MODULE.match(text)]
        for text in modules:
            (folder / MODULE.findall(text)[0]).write_text(text)
        self._env = {"PYTHONPATH": f"{ROOT}:{folder}"} if modules else {}
        self._trainings, self._trained = 0, list[str]()

    def follow(self, step: str) -> None:
        for address, url in self._served.items():
            step = step.replace(address, url)
        if step.startswith("PYTHON\n"):
            exec(compile(step.removeprefix("PYTHON"), "a page", "exec"), {})
        elif is_server(step):
            self._serve(*split_verb(shlex.split(step)[1:]))
        elif "nemo-aligner " in step:
            words = shlex.split(step, comments=True)
            self._run(*split_verb(words[words.index("nemo-aligner") + 1 :]))
        else:
            path = f"{Path(sys.executable).parent}:{tiny.environment()['PATH']}"
            environment = tiny.environment(PATH=path)
            subprocess.run(
                ["bash", "-ec", step], cwd=self._folder, env=environment, check=True, timeout=120
            )

    def _run(self, verb: str, arguments: list[str]) -> None:
        if "--output" in arguments:
            self._remove(self._folder / arguments[arguments.index("--output") + 1])
        if verb == "train":
            arguments = self._small(arguments)
        elif verb == "score":
            arguments += ["--url", self._served["http://127.0.0.1:5555"]]
        elif verb == "probe":
            arguments += ["--steps", "10", "model.optim.lr=3e-3", *RUN]
        done = tiny.run_verb(verb, *arguments, folder=self._folder, env=self._env)
        if verb == "train" and "--dry-run" not in arguments:
            assert [line for line in done.stdout.splitlines() if len(line) > COLUMNS] == []

    def _small(self, arguments: list[str]) -> list[str]:
        """The same training on little data, and of a base model where the page leaves that out."""
        self._trainings += 1
        for argument in arguments:
            key, _, value = argument.partition("=")
            if key == "exp_manager.explicit_log_dir" and value not in self._trained:
                self._remove(self._folder / value)  # else it would go on with what is there
                self._trained.append(value)
        named = " ".join(arguments)
        added = [
            setting
            for setting in first_run(f"results/unnamed{self._trainings}")
            if setting.partition("=")[0] not in named and "data_prefix={" not in named
        ]
        if "data_prefix.validation" not in named:  # of the data that the page names
            added = [setting for setting in added if "validation" not in setting]
        several = SEVERAL.search(named)
        dry = ["--dry-run"] if several and int(several[1]) > MOST_PROCESSES else []
        short = SHORT if "training_rm.yaml" in named else []
        frozen = [FROZEN] if FREEZE in named or "train_reward_model_cpu" in named else []
        return [*dry, *arguments, *added, *short, *frozen, *RUN]

    def _serve(self, verb: str, arguments: list[str]) -> None:
        """Until it is ready."""
        prefix = "gateway" if verb == "gateway" else "server"
        here = [f"{prefix}.host=127.0.0.1", f"{prefix}.port=0"]
        if any(FREEZE in argument for argument in arguments):
            here.append(FROZEN)
        logs = self._logs / verb
        logs.mkdir(exist_ok=True)
        program = "nemo_aligner/__main__.py"
        with running(logs, program, verb, *arguments, *here, current=self._folder):
            pass

    def _remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize("page", STEPS, ids=name_of)
def test_page_can_be_followed(
    page: Path, workplace: Path, served: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(workplace, folder, symlinks=True)
    followed = Page(page, folder, tmp_path, served)
    for step in STEPS[page]:
        followed.follow(step)


def test_commands_of_pages_are_run_or_have_their_reason() -> None:
    every = [
        command
        for page in PAGES
        for language, text in every_block(page)
        if language in ("", "bash")
        for command in shell_commands(text)
    ]
    for start in (*ELSEWHERE, *NEEDS):
        assert any(command.startswith(start) for command in every), f"no page has {start}"
    runners = (
        "nemo-aligner ",
        "python examples/data/",
        "python -m nemo_aligner.integrations.nemo_gym ",
        "for part in ",
        "OMP_NUM_THREADS=2 nemo-aligner ",
    )
    left = [command for command in every if is_run_here(command)]
    assert [command for command in left if not command.startswith(runners)] == []
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).is_file()] == []
