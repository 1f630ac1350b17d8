"""How often the start of a run opens its base checkpoint and lists its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint import run as run_checkpoints
from nemo_aligner.checkpoint.nemo import archive
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.training.dry_run import check_run
from nemo_aligner.training.run import train
from nemo_aligner.training.trainer import SupervisedTrainer
from tests.harness import tiny


class _StartedError(Exception):
    """The first step would come next."""


def test_start_opens_the_base_once_for_the_weights_and_once_for_the_rest(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[Path] = Counter()
    _count(monkeypatch, archive, "_opened", opened)
    listed: Counter[Path] = Counter()
    _count(monkeypatch, run_checkpoints, "_list_saved", listed)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    folder = tmp_path / "run"
    # Nulls that are resolved by the base checkpoint, and LoRA, whose base is compared on resuming.
    nulls = ("trainer.precision=null", "model.optim.lr=null", "model.lora.rank=2")
    settings = [*tiny.training(base, folder, pairs, pairs), *nulls]

    def starts(start: Callable[[TrainConfig], object]) -> tuple[int, int]:
        opened.clear()
        listed.clear()
        start(load_config(TrainConfig, settings))
        return opened[base], listed[folder / "checkpoints"]

    def start_run(config: TrainConfig) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(SupervisedTrainer, "fit", _stop)
            with pytest.raises(_StartedError):
                train(config)

    def check(config: TrainConfig) -> None:
        check_run(config, processes=1)

    assert starts(check) == (1, 1)
    assert starts(start_run) == (2, 1)
    train(load_config(TrainConfig, [*settings, "trainer.rm.max_steps=1"]))
    assert starts(check) == (1, 1)
    assert starts(start_run) == (2, 1)


def _stop(trainer: SupervisedTrainer) -> None:
    raise _StartedError


def _count(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: Counter[Path]) -> None:
    """Count the calls of the function ``name`` by the path that they pass."""
    function = getattr(module, name)

    def counted(path: Path) -> Any:
        calls[path] += 1
        return function(path)

    monkeypatch.setattr(module, name, counted)
