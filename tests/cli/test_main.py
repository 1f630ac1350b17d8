"""``nemo-aligner`` finds the verb or suggests one; every verb has help."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import nemo_aligner
from nemo_aligner.cli.main import VERBS, load, main
from tests.harness.tiny import ROOT

Captured = pytest.CaptureFixture[str]
BARE = [sys.executable, "-S", "-E"]  # without site-packages, like a system Python
HEAVY = ("torch", "megatron", "transformers", "lightning", "pytriton")
HELP_OF_ALL = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None
from nemo_aligner.cli.main import VERBS, main
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
for verb in VERBS:
    try:
        main([*verb.split(), "--help"])
    except SystemExit as end:
        assert not end.code, verb
load_config(TrainConfig, [])
"""


def test_help_lists_every_verb(capsys: Captured) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert [verb for verb in VERBS if f"  {verb} " not in shown] == [], argv
        assert max(map(len, shown.splitlines())) < 80 + 10
    for argv in (["data"], ["data", "--help"]):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert "data inspect" in shown
        assert "train" not in shown.replace("training", "")


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nemo-aligner {nemo_aligner.__version__}\n"
    entries = entry_points(group="console_scripts", name="nemo-aligner")
    assert {entry.value for entry in entries} == {"nemo_aligner.cli.main:main"}


def test_verb_that_is_wrong_is_told(capsys: Captured) -> None:
    wanted = {
        ("trian",): "trian is not a verb; did you mean train?",
        ("data", "inspct", "x"): "data inspct is not a verb; did you mean data inspect?",
        ("xyzzy",): "xyzzy is not a verb",
        ("--wrong",): "--wrong is not a verb",
    }
    for argv, said in wanted.items():
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.splitlines()[0] == f"nemo-aligner: {said}"


def test_former_verb_says_what_replaces_it(capsys: Captured) -> None:
    for argv in (["data", "filter", "--by=model"], ["data", "filter", "--help"]):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        program = re.findall(r"run `python (examples/\S+\.py)` of the repository", error)
        assert (ROOT / program[0]).is_file()


def test_setting_written_as_a_flag_is_shown_as_a_setting(capsys: Captured) -> None:
    wanted = {
        ("train", "--lr", "3"): "model.optim.lr=3",
        ("train", "--lr=3"): "model.optim.lr=3",
        ("train", "--model.optim.lr", "--debug"): "model.optim.lr=VALUE",
        ("evaluate", "--rm-model-file", "a.nemo"): "rm_model_file=a.nemo",
        ("quickstart", "--steps", "5"): "trainer.rm.max_steps=5",
        ("train", "--per-device-train-batch-size", "4"): (
            "model.micro_batch_tokens=4, which counts tokens, not records"
        ),
    }
    for argv, said in wanted.items():
        with pytest.raises(SystemExit):
            main(argv)
        error = capsys.readouterr().err.splitlines()[0]
        assert error.endswith(f"which is not an option; settings have no dashes: {said}"), argv


@pytest.mark.parametrize("arguments", [("plan", "--params=8B", "--gpus=8"), ("--help",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_of_a_pipe_may_leave(arguments: tuple[str, ...], unbuffered: str) -> None:
    """As in ``nemo-aligner plan ... | head``; containers often set PYTHONUNBUFFERED."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "nemo_aligner", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_output_on_a_full_disk_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nemo_aligner", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 1
    assert done.stderr.startswith("an output file cannot be written: ")
    assert done.stderr.count("\n") == 1


def test_python_without_the_dependencies_says_what_to_do(tmp_path: Path) -> None:
    command = [*BARE, "-m", "nemo_aligner", "train"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("the module omegaconf is not installed in ")
    assert "source .venv/bin/activate" in done.stderr
    command = [*BARE, str(ROOT / "examples" / "train_reward_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "'nemo_aligner': activate its environment (source .venv/bin/activate)" in done.stderr
    assert done.stderr.count("\n") == 1


# A Python of Debian without its package for virtual environments.
WITHOUT_VENV = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    ln -s "$0" "$3/bin/python"
    echo "several lines"
    exit 1
fi
exec {python} "$@"
"""


def test_script_names_the_package_without_which_python_makes_no_environment(
    tmp_path: Path,
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "environment.sh", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text(WITHOUT_VENV.format(python=sys.executable))
    python.chmod(0o755)
    variables = {"PATH": "/usr/bin:/bin", "NEMO_ALIGNER_PYTHON": str(python)}
    command = ["bash", "-euc", "source scripts/environment.sh; use_environment serving"]
    for _ in range(2):  # a half-made folder would change the second attempt
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=60
        )
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"on Debian and Ubuntu install {package}" in done.stderr
        assert "several lines" not in done.stdout
        assert not (tmp_path / ".venv").exists()


# A Python as uv makes it: ``-m ensurepip`` ends with the status {status} and, with 0, installs pip.
WITHOUT_PIP = """#!/bin/sh
cd "${{0%/*}}"
case "$1 $2" in
    "-m ensurepip") [ {status} = 0 ] && : > pip; exit {status} ;;
    "-m pip") [ -e pip ] || {{ echo "No module named pip" >&2; exit 1; }}; : > installed ;;
    "- "*) [ -e installed ] ;;
esac
"""


@pytest.mark.parametrize("status", [0, 1])
def test_script_installs_the_pip_that_an_environment_lacks(tmp_path: Path, status: int) -> None:
    python = tmp_path / "python"
    python.write_text(WITHOUT_PIP.format(status=status))
    python.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VIRTUAL_ENV": str(tmp_path)}
    command = ["bash", "-euc", f"source {ROOT}/scripts/environment.sh; use_environment serving"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)
    message = f"error: {python} has no pip, and its module ensurepip cannot install it; "
    assert (done.returncode, done.stderr.partition("install pip there")[0]) == (
        (1, message) if status else (0, "")
    )
    assert done.stderr.count("\n") == status


def test_examples_only_run_their_verb() -> None:
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert examples
    for path in examples:
        document, *_, imported, run = map(ast.unparse, ast.parse(path.read_text()).body)
        start = "try:\n    from nemo_aligner.cli.main import main\nexcept Module"
        assert imported.startswith(start), path.name
        assert run.startswith("if __name__ == '__main__':\n    sys.exit(main(['"), path.name
        assert len(document) > 20, path.name


def complete(line: str) -> list[str]:
    """Return the completions of a line, by argcomplete's protocol."""
    command = f"{sys.executable} -m nemo_aligner 8>&1 9>/dev/null"
    told = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **told},
    )
    return [word.strip() for word in done.stdout.split("\013") if word]


def test_completion_of_verbs_flags_and_settings(capsys: Captured) -> None:
    wanted = {
        "nemo-aligner tr": "train",
        "nemo-aligner data sp": "split",
        "nemo-aligner convert --tensor": "--tensor-parallel",
        "nemo-aligner train model.optim.l": "model.optim.lr=",
        "nemo-aligner train trainer.precision=b": "trainer.precision=bf16",
    }
    offered = {line: complete(line) for line in wanted}
    assert {line: words for line, words in offered.items() if wanted[line] not in words} == {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "nemo-aligner" in capsys.readouterr().out


def test_help_and_settings_wait_for_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert [verb for verb in VERBS if f"usage: nemo-aligner {verb} " not in done.stdout] == []


def test_help_says_what_every_option_is_for() -> None:
    for verb in VERBS:
        for action in load(verb).new_parser()._actions:
            assert action.help, (verb, action.option_strings or action.dest)


def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = [load(verb).new_parser().format_help() for verb in VERBS]
    assert [line for text in shown for line in text.splitlines() if len(line) > 80] == []
