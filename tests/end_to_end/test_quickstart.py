"""The quickstart on a tiny model and data of one's own, from the first command to the last."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_aligner.tools import quickstart
from nemo_aligner.utils.processes import show_command
from tests import tiny
from tests.once import TURNS

VERBS = ("convert", "data split", "train", "evaluate", "serve", "score")
SETTINGS = ("trainer.rm.max_steps=2", "model.freeze_layers=0", "model.optim.lr=1e-3")
PROCESSES = "--processes="


@pytest.fixture
def home() -> Iterator[Path]:
    """Of the server: a short path, as its sockets have at most 108 letters."""
    pytest.importorskip("pytriton")
    with tempfile.TemporaryDirectory(prefix="triton") as folder:
        yield Path(folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.write_base_nemo(tmp_path / "base.nemo").with_suffix(".hf")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return tiny.write_pairs(tmp_path / "pairs.jsonl", 60)


def check(shown: str, output: Path) -> None:
    for verb in VERBS:
        assert f"$ nemo-aligner {verb} " in shown
    assert "step 2/2" in shown
    assert "held-out accuracy, " in shown
    assert "the server has stopped" in shown
    model = output / "run" / "checkpoints" / "megatron_gpt.nemo"
    assert f"nemo-aligner serve rm_model_file={model}" in shown
    report = json.loads((output / "evaluation.json").read_text())
    assert 0 <= report["metrics"]["accuracy"] <= 1


def test_quickstart_shows_and_does_every_step(
    tmp_path: Path, home: Path, base: Path, pairs: Path
) -> None:
    asked = [f"--data={pairs}", f"--base={base}", f"--output={tmp_path / 'out'}"]
    # It starts ranks and a server, which another test's ranks would starve.
    with TURNS.one():
        done = tiny.run_verb(
            "quickstart", *asked, *SETTINGS, timeout=600, env={"PYTRITON_HOME": str(home)}
        )
    check(done.stdout, tmp_path / "out")


@pytest.mark.smoke
def test_quickstart_in_miniature(
    tmp_path: Path,
    home: Path,
    base: Path,
    pairs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same commands, on processes that have imported their libraries; the server is as ever."""

    def run(verb: str, *arguments: str) -> None:
        print(show_command(verb, arguments, "$ "))
        counts = [int(each[len(PROCESSES) :]) for each in arguments if each.startswith(PROCESSES)]
        given = [each for each in arguments if not each.startswith(PROCESSES)]
        print(tiny.run_verb(verb, *given, processes=max(counts, default=1)).stdout)

    monkeypatch.setattr(quickstart, "run", run)
    for name, value in tiny.environment(PYTRITON_HOME=str(home)).items():
        monkeypatch.setenv(name, value)
    quickstart.run_quickstart(quickstart.Quickstart(tmp_path / "out", pairs, base, SETTINGS))
    check(capsys.readouterr().out, tmp_path / "out")
