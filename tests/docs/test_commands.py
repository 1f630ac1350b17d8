"""Every command of the pages runs: here with tiny data, or in the test that ``ELSEWHERE`` names.

``NEEDS`` names commands that need what no test machine has, and says what. A training on more
processes than this machine has cores is checked only up to its first step. The ranks of one on two
are forks of prepared processes; ``tests/paths/test_quickstart.py`` has ``--processes`` start them.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from nemo_aligner.utils.cache import VARIABLE, cache_folder
from tests.docs.pages import PAGES, blocks, every_block, name_of, shell_commands, split_verb
from tests.docs.workplace import RUN, build_workplace, first_run
from tests.harness import tiny
from tests.harness.launching import ROOT, free_port
from tests.harness.once import Once
from tests.serving.servers import Server, running

TRACKING = "tests/training/test_tracking.py"  # wandb and mlflow run in a separate environment
ELSEWHERE = {
    "bash scripts/quickstart.sh": "tests/paths/test_quickstart.py",
    "bash scripts/gpu_first_hour.sh": "tests/benchmarks/test_gpu_first_hour.py",
    "curl http://127.0.0.1:5555": "tests/serving/test_page.py",
    "nemo-aligner serve rm_model_file=megatron_gpt.nemo server.triton_port": (
        "tests/paths/serving/test_triton_server.py"
    ),
    "nemo-aligner train --config conf/train_reward_model.yaml pretrained": TRACKING,
    "nemo-aligner check": "tests/paths/distributed/test_check.py",
    "nemo-aligner import": "tests/checkpoint/test_importing.py",
    "python -m nemo_aligner.integrations.nemo_gym": "tests/integrations/test_page.py",
    "python benchmarks/": "tests/paths/test_benchmarks.py",
    "python examples/rl/": "tests/examples/test_rl.py",
    "sbatch": "tests/paths/slurm/test_scripts.py",
}
NEEDS = {
    "MODEL=$PWD/megatron_gpt.nemo docker": "docker; tests/deploy reads the file",
    "bash scripts/gpu_wheels.sh": "packages of the network; a GPU without internet is given them",
    "bash scripts/run_tests.sh": "this is it",
    "docker": "docker; tests/deploy reads the file",
    "curl localhost:8080/rerank": "llama.cpp; tests/checkpoint/hf has its server in a process",
    "kubectl": "a cluster; tests/deploy holds the files to the schemas",
    "nemo-aligner data fetch": "the hub; tests/data reads one that is made of files",
    "pip": "packages of the network, by the hundreds of megabytes",
    "python3.11 -m venv vllm": "the same",
    "source .venv/bin/activate": "an environment, which the tests run in",
    "vllm/bin/pip": "packages of the network, by the hundreds of megabytes",
}
# Commands that come before a page's own, after the common files are made.
BEFORE = {
    "docs/tasks.md": [
        "nemo-aligner data split pairs.jsonl --output data --heldout 0.1",
        "nemo-aligner train model.data.data_prefix.train=data/train.jsonl"
        " model.data.data_prefix.validation=data/heldout.jsonl"
        " pretrained_checkpoint.restore_from_path=base.nemo"
        " exp_manager.explicit_log_dir=results/first",
    ],
    "docs/evaluation.md": [
        "cp -r results/second results/first",
        "nemo-aligner serve rm_model_file=megatron_gpt.nemo",
        "nemo-aligner gateway 'backends=[http://127.0.0.1:5555]'",
    ],
}
# NeMo-Aligner's own files are for long runs on long texts, unlike those here.
SHORT = ["model.optim.sched.constant_steps=0", "model.encoder_seq_length=512"]
SERVERS = {"serve": "5555", "gateway": "8000", "serve-critic": "5556"}
PORTS = {
    **{port: port for port in SERVERS.values()},
    "5000": "8000",
}  # OpenRLHF is served by the gateway
# Other tests run these.
WITH_PYTHON = (
    "README.md",
    "docs/cookbook/best_of_n.md",
    "docs/getting_started.md",
    "docs/python.md",
)
IN_PROCESS = "import nemo_aligner as na"  # the lines after it on a page belong to the same program
PROCESSES = "--processes"
MOST_PROCESSES = 2
COLUMNS = 100  # from the log of a training
# The base model has four layers; the pages describe SmolLM2, which has thirty.
FREEZE = "model.freeze_layers="
FROZEN = f"{FREEZE}2"
RECOMPUTED = "model.activations_checkpoint_num_layers=2"  # long_dialogues_8b.yaml has 7
FEW_PAIRS = {"data demo": "200"}  # a later argument overrides the page's
MODULE = re.compile(r"# (\w+\.py)\n")
LAUNCHED = re.compile(r"torchrun --standalone --nproc-per-node (\d) (\w+\.py)")
EXPORT = re.compile(r"export (\w+)=(.*)")


def is_run_here(command: str) -> bool:
    return not command.startswith((*ELSEWHERE, *NEEDS))


def is_server(step: str) -> bool:
    words = step.split()
    return words[0] == "nemo-aligner" and words[1] in SERVERS


def asks_a_server(step: str) -> bool:
    is_python = step.startswith("PYTHON") and "127.0.0.1" in step
    return is_python or step.startswith(
        ("curl ", "nemo-aligner score ", "nemo-aligner evaluate server=")
    )


def steps(page: Path) -> list[str]:
    """The page's commands and Python code in order, after its preparations."""
    commands = list(BEFORE.get(name_of(page), []))
    for language, text in every_block(page):
        if language in ("", "bash"):
            commands += [command for command in shell_commands(text) if is_run_here(command)]
        elif language == "python" and name_of(page) in WITH_PYTHON and not MODULE.match(text):
            commands.append(f"PYTHON\n{text}")
    return _joined(commands)


def _joined(commands: list[str]) -> list[str]:
    """Join a program that trains with the page's next block, unless a command is between them."""
    joined: list[str] = []
    for step in commands:
        if joined and IN_PROCESS in joined[-1] and step.startswith("PYTHON"):
            joined[-1] += step.removeprefix("PYTHON")
        else:
            joined.append(step)
    return joined


def steps_of_all() -> dict[Path, list[str]]:
    """Run every page that has commands; a server without requests is started on one page only."""
    every = {page: steps(page) for page in PAGES}
    asking = [page for page in PAGES if any(map(asks_a_server, every[page]))]
    started = {step for page in asking for step in every[page] if is_server(step)}
    for page in PAGES:
        if page not in asking:
            every[page] = [step for step in every[page] if step not in started]
            started.update(filter(is_server, every[page]))
    return {page: of_page for page, of_page in every.items() if of_page}


STEPS = steps_of_all()


def split_ranks(arguments: list[str]) -> tuple[int, list[str]]:
    """Return the number of ranks that are started here, and the arguments of each.

    A training on more than ``MOST_PROCESSES`` is one dry run that knows how many they are.
    """
    if PROCESSES not in arguments:
        return 1, arguments
    at = arguments.index(PROCESSES)
    ranks = int(arguments[at + 1])
    if ranks > MOST_PROCESSES:
        return 1, ["--dry-run", *arguments]
    return ranks, arguments[:at] + arguments[at + 2 :]


class Page:
    """A page whose commands are run, in a folder of its own."""

    def __init__(self, page: Path, folder: Path, logs: Path, stack: ExitStack) -> None:
        self._folder, self._logs, self._stack = folder, logs, stack
        self._servers: dict[str, ExitStack] = {}
        modules = [text for text in blocks(page, "python") if MODULE.match(text)]
        for text in modules:
            (folder / MODULE.findall(text)[0]).write_text(text)
        self._env = {VARIABLE: f"{folder}/cache"}
        # All pages share the compiled kernels, which take longer to compile than many commands.
        shared = cache_folder() / "kernels"
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "cache").mkdir()
        (folder / "cache" / "kernels").symlink_to(shared)
        if modules:
            self._env["PYTHONPATH"] = f"{ROOT}:{folder}"
        self._ports = {port: str(free_port()) for port in SERVERS.values()}
        self._trainings = 0

    def follow(self, step: str) -> None:
        for port, stands_for in PORTS.items():
            step = step.replace(f"127.0.0.1:{port}", f"127.0.0.1:{self._ports[stands_for]}")
        if step.startswith("PYTHON\n") and IN_PROCESS in step:
            self._run_program(step.removeprefix("PYTHON\n"))
        elif step.startswith("PYTHON\n"):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(self._folder)
                exec(compile(step.removeprefix("PYTHON"), "a page", "exec"), {})
        elif launched := LAUNCHED.fullmatch(step):
            script, ranks = str(self._folder / launched[2]), int(launched[1])
            tiny.run_script(script, processes=ranks, folder=self._folder)
        elif exported := EXPORT.fullmatch(step):
            self._env[exported[1]] = self._run_in_bash(f"printf %s {exported[2]}")
        elif is_server(step):
            self._serve(*split_verb(shlex.split(step)[1:]))
        elif "nemo-aligner " in step:
            words = shlex.split(step, comments=True)
            self._run(*split_verb(words[words.index("nemo-aligner") + 1 :]))
        else:
            self._run_in_bash(step)

    def _run_program(self, text: str) -> None:
        program = self._folder / "program.py"
        program.write_text(text)
        tiny.run_script(str(program), folder=self._folder, env=self._env)

    def _run_in_bash(self, step: str) -> str:
        """Run a command and return its output."""
        path = f"{Path(sys.executable).parent}:{tiny.environment()['PATH']}"
        return subprocess.run(
            ["bash", "-ec", step],
            cwd=self._folder,
            env=tiny.environment(PATH=path),
            check=True,
            timeout=120,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def _run(self, verb: str, arguments: list[str]) -> None:
        if "--output" in arguments:
            self._remove(self._folder / arguments[arguments.index("--output") + 1])
        ranks, arguments = split_ranks(arguments)
        if verb == "train":
            arguments = self._small(arguments)
        elif verb == "score":
            arguments += ["--url", f"http://127.0.0.1:{self._ports['5555']}"]
        elif verb == "probe":
            arguments += ["--steps", "10", "model.optim.lr=3e-3", *RUN]
        elif verb in FEW_PAIRS:
            arguments += ["--pairs", FEW_PAIRS[verb]]
        done = tiny.run_verb(verb, *arguments, processes=ranks, folder=self._folder, env=self._env)
        if verb == "train" and "--dry-run" not in arguments:
            lines = [line for line in done.stdout.splitlines() if ": in the cache as " not in line]
            assert [line for line in lines if len(line) > COLUMNS] == []

    def _small(self, arguments: list[str]) -> list[str]:
        """The same training on little data, with a base model where the page omits it."""
        self._trainings += 1
        named = " ".join(arguments)
        added = [
            setting
            for setting in first_run(f"results/unnamed{self._trainings}")
            if setting.partition("=")[0] not in named and "data_prefix={" not in named
        ]
        if "data_prefix.validation" not in named:  # a file of the data that the page names
            added = [setting for setting in added if "validation" not in setting]
        short = SHORT if "training_rm.yaml" in named else []
        frozen = [FROZEN] if FREEZE in named or "train_reward_model_cpu" in named else []
        recomputed = [RECOMPUTED] if "long_dialogues_8b" in named else []
        return [*arguments, *added, *short, *frozen, *recomputed, *RUN]

    def _serve(self, verb: str, arguments: list[str]) -> None:
        prefix = "gateway" if verb == "gateway" else "server"
        here = [f"{prefix}.host=127.0.0.1", f"{prefix}.port={self._ports[SERVERS[verb]]}"]
        if any(FREEZE in argument for argument in arguments):
            here.append(FROZEN)
        if verb in self._servers:
            self._servers[verb].close()
        self._servers[verb] = self._stack.enter_context(ExitStack())
        logs = Path(tempfile.mkdtemp(prefix=verb, dir=self._logs))
        server = running(
            logs,
            "nemo_aligner/__main__.py",
            verb,
            *arguments,
            *here,
            current=self._folder,
            variables=self._env,
        )
        started: Server = self._servers[verb].enter_context(server)
        assert started.url.endswith(f":{self._ports[SERVERS[verb]]}")

    def _remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def workplace(once: Once) -> Path:
    return once("workplace", build_workplace)


@pytest.mark.parametrize("page", STEPS, ids=name_of)
def test_a_page_can_be_followed(page: Path, workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(workplace, folder, symlinks=True)
    with ExitStack() as stack:
        followed = Page(page, folder, tmp_path, stack)
        for step in STEPS[page]:
            followed.follow(step)


def test_every_command_is_run_or_has_its_reason() -> None:
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
        "export ",
        "nemo-aligner ",
        "python examples/data/",
        "for part in ",
        "torchrun --standalone ",
        "OMP_NUM_THREADS=2 nemo-aligner ",
    )
    left = [command for command in every if is_run_here(command)]
    assert [command for command in left if not command.startswith(runners)] == []


@pytest.mark.parametrize("start", ELSEWHERE)
def test_the_test_that_runs_a_command_is_there(start: str) -> None:
    assert (ROOT / ELSEWHERE[start]).is_file()
