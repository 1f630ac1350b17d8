"""The small parts of a step that can be looked at without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.training import ExpManagerConfig, MonitorMode
from nemo_aligner.data.packing import pack_records
from nemo_aligner.errors import ConfigError
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.masked_mse import MaskedMse
from nemo_aligner.training.learner import as_one_pack, validation_metric_names
from nemo_aligner.training.resume import changed_settings
from nemo_aligner.training.run import open_checkpoints
from tests.data.test_packing import dataset


class Data:
    def __init__(self, *names: str) -> None:
        self.objective = BradleyTerry()
        self.validation = [replace(dataset([2, 3] * 4), name=name) for name in names]


def test_monitor_is_one_of_the_metrics() -> None:
    config = ExpManagerConfig()
    assert open_checkpoints(config, Data("validation-c")).monitor == "validation-c/accuracy"  # type: ignore[arg-type]
    two = Data("validation-a", "validation-b")
    assert open_checkpoints(config, two).monitor == "validation-a/accuracy"  # type: ignore[arg-type]
    assert open_checkpoints(config, Data()).monitor is None  # type: ignore[arg-type]
    config.checkpoint_callback_params.monitor = "loss"
    assert open_checkpoints(config, two).monitor == "validation-a/loss"  # type: ignore[arg-type]
    config.checkpoint_callback_params.monitor = "val_loss"
    with pytest.raises(ConfigError, match=r"got 'val_loss', wanted one of validation-c/loss, "):
        open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no validation data"):
        open_checkpoints(config, Data())  # type: ignore[arg-type]
    rated = replace(dataset([2, 3], RecordKind.rating), name="validation-c", sources=["x", "y"])
    names = validation_metric_names(MaskedMse(("x", "y")), [rated])
    assert {
        "validation-c/pearson/x",
        "validation-c/pearson_mean",
        "validation-c/length_correlation/y",
        "validation-c/by_source/x/loss",
    } <= set(names)


def test_work_of_a_step_is_that_of_its_packs() -> None:
    data = dataset([30, 12, 55, 7, 41, 9])
    record_ids = [2, 0, 1]
    packs = pack_records(data, record_ids, 100)
    assert len(packs) > 1
    counted = as_one_pack(data, record_ids)
    assert counted.tokens == sum(pack.num_tokens for pack in packs)
    assert counted.sequences == sum(pack.rows.numel() for pack in packs)
    # A token sees those before it in its sequence, and itself.
    keys = sum(int((pack.position_ids + 1).sum()) for pack in packs)
    assert counted.keys * counted.tokens == pytest.approx(keys)


def test_monitor_mode_suits_the_metric_unless_it_is_set() -> None:
    config = ExpManagerConfig()
    better = {"loss": 0.1, "accuracy": 0.9, "ece": 0.1, "reward_margin_p05": 0.9}
    for name, value in better.items():
        config.checkpoint_callback_params.monitor = f"validation-c/{name}"
        checkpoints = open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]
        keys = [checkpoints._sort_key({f"validation-c/{name}": number}) for number in (value, 0.5)]
        assert keys[0] < keys[1], name  # type: ignore[operator]
    # Where neither is better it may be said; against a metric's own it is an error.
    settings = config.checkpoint_callback_params
    settings.monitor, settings.mode = "validation-c/reward_margin_p05", MonitorMode.min
    checkpoints = open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]
    assert checkpoints._sort_key({settings.monitor: 0.9})[0] == 0.9  # type: ignore[index]
    for monitor, mode, other in (("loss", "max", "min"), ("accuracy", "min", "max")):
        settings.monitor, settings.mode = monitor, MonitorMode[mode]
        with pytest.raises(ConfigError, match=f"mode: got {mode}, .*{monitor}.* wanted {other}"):
            open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]


def test_changed_settings_name_the_key_and_both_values() -> None:
    before = {"model": {"seed": 1, "optim": {"lr": 1e-3}}, "gone": 1}
    now = {"model": {"seed": 1, "optim": {"lr": 1e-4}}}
    assert changed_settings(before, now) == ["model.optim.lr: 0.001 -> 0.0001", "gone: 1 -> None"]
