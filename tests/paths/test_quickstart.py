"""The quickstart with a tiny model and custom data, from the first command to the last."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_aligner.tools import quickstart
from nemo_aligner.utils.processes import show_command
from tests.harness import tiny
from tests.harness.once import TURNS

VERBS = ("convert", "data split", "train", "evaluate", "serve", "score")
SETTINGS = ("trainer.rm.max_steps=2", "model.freeze_layers=0", "model.optim.lr=1e-3")
PROCESSES = "--processes="


@pytest.fixture
def home() -> Iterator[Path]:
    """A home for the server: a short path, because a socket's path has at most 108 characters."""
    with tempfile.TemporaryDirectory(prefix="triton") as folder:
        yield Path(folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.write_base_nemo(tmp_path / "base.nemo").with_suffix(".hf")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return tiny.write_pairs(tmp_path / "pairs.jsonl", 60)


@pytest.mark.smoke
def test_quickstart_shows_and_does_every_step(
    tmp_path: Path,
    home: Path,
    base: Path,
    pairs: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the quick tier its commands run in prepared processes."""
    output = tmp_path / "out"
    if pytestconfig.getoption("quick"):
        steps = quickstart.Quickstart(output, pairs, base, SETTINGS)
        run_prepared(steps, home, monkeypatch)
        shown = capsys.readouterr().out
    else:
        arguments = [f"--data={pairs}", f"--base={base}", f"--output={output}", *SETTINGS]
        environment = {"PYTRITON_HOME": str(home)}
        # It starts ranks and a server, which ranks of another test would starve.
        with TURNS.one():
            shown = tiny.run_verb("quickstart", *arguments, timeout=600, env=environment).stdout
    for verb in VERBS:
        assert f"$ nemo-aligner {verb} " in shown
    assert "step 2/2" in shown
    assert "held-out accuracy, " in shown
    assert "the server has stopped" in shown
    model = output / "run" / "checkpoints" / "megatron_gpt.nemo"
    assert f"nemo-aligner serve rm_model_file={model}" in shown
    report = json.loads((output / "evaluation.json").read_text())
    assert 0 <= report["metrics"]["accuracy"] <= 1


def run_prepared(steps: quickstart.Quickstart, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(verb: str, *arguments: str) -> None:
        print(show_command(verb, arguments, "$ "))
        counts = [
            int(argument[len(PROCESSES) :])
            for argument in arguments
            if argument.startswith(PROCESSES)
        ]
        remaining = [argument for argument in arguments if not argument.startswith(PROCESSES)]
        print(tiny.run_verb(verb, *remaining, processes=max(counts, default=1)).stdout)

    monkeypatch.setattr(quickstart, "run", run)
    for name, value in tiny.environment(PYTRITON_HOME=str(home)).items():
        monkeypatch.setenv(name, value)
    quickstart.run_quickstart(steps)
