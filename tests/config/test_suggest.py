"""Did you mean? Only what is near."""

from __future__ import annotations

import pytest

from nemo_aligner.config.describe import list_keys
from nemo_aligner.config.suggest import suggestion
from nemo_aligner.config.training import TrainConfig

KEYS = [key.name for key in list_keys(TrainConfig)]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.global_batchsize", "model.global_batch_size"),
        ("trainer.max_steps", "trainer.rm.max_steps"),
        ("model.lr", "model.optim.lr"),
        ("lr", "model.optim.lr"),
        ("model.precision", "trainer.precision"),
        ("model.data.add_eoss", "model.data.add_eos"),
        ("model.data.num_workers", None),
        ("trainer.devices", None),
        ("exp_manager.name", None),
        ("exp_manager.checkpoint_callback_params.model_parallel_size", None),
        ("model.output_sequence", None),
    ],
)
def test_a_setting(key: str, meant: str | None) -> None:
    assert suggestion(key, KEYS) == meant


def test_a_plain_word() -> None:
    assert suggestion("trian", ["train", "plan"]) == "train"
    assert suggestion("deploy", ["train", "plan"]) is None
