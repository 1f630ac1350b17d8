"""``nemo-aligner`` finds the verb, or says what may have been meant."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import nemo_aligner
from nemo_aligner.cli.main import VERBS, main
from tests.tiny import ROOT

Captured = pytest.CaptureFixture[str]
BARE = [sys.executable, "-S", "-E"]  # without site-packages, as a Python of the system


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb(argv: list[str], capsys: Captured) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert all(f"  {verb} " in shown for verb in VERBS)
    assert max(map(len, shown.splitlines())) < 80 + 10


def test_a_group_lists_its_verbs(capsys: Captured) -> None:
    assert main(["data"]) == main(["data", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "data inspect" in shown
    assert "train" not in shown.replace("training", "")


def test_the_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nemo-aligner {nemo_aligner.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "trian is no verb; did you mean train?"),
        (["data", "inspct", "x"], "data inspct is no verb; did you mean data inspect?"),
        (["xyzzy"], "xyzzy is no verb"),
        (["--wrong"], "--wrong is no verb"),
    ],
)
def test_a_wrong_verb_is_told(argv: list[str], said: str, capsys: Captured) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[0] == f"nemo-aligner: {said}"


def test_the_command_is_installed() -> None:
    (entry,) = entry_points(group="console_scripts", name="nemo-aligner")
    assert entry.value == "nemo_aligner.cli.main:main"


def test_the_reader_of_a_pipe_may_leave() -> None:
    """As ``nemo-aligner plan ... | head`` does."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "nemo_aligner", "plan", "--params=8B", "--gpus=8"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["train_reward_model", "evaluate_reward_model", "score"])
def test_an_example_outside_the_environment_says_what_to_do(name: str, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / f"{name}.py")
    done = subprocess.run([*BARE, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "No module named 'nemo_aligner': activate its environment (source .venv/bin/activate) "
        "or pip install -e .\n"
    )


def test_a_python_without_the_dependencies_says_what_to_do() -> None:
    done = subprocess.run(
        [*BARE, "-m", "nemo_aligner", "train"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the module omegaconf is not installed in ")
    assert "source .venv/bin/activate" in done.stderr


def complete(line: str) -> list[str]:
    """What the shell is offered at the end of a line, by argcomplete's protocol."""
    command = f"{sys.executable} -m nemo_aligner 8>&1 9>/dev/null"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "_ARGCOMPLETE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        },
    )
    return [word.strip() for word in done.stdout.split("\013") if word]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("nemo-aligner tr", "train"),
        ("nemo-aligner data sp", "split"),
        ("nemo-aligner convert --tensor", "--tensor-parallel"),
        ("nemo-aligner train model.optim.l", "model.optim.lr="),
        ("nemo-aligner train trainer.precision=b", "trainer.precision=bf16"),
    ],
)
def test_the_shell_completes(line: str, offered: str) -> None:
    assert offered in complete(line)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_code(shell: str, capsys: Captured) -> None:
    assert main(["completion", shell]) == 0
    assert "nemo-aligner" in capsys.readouterr().out
