"""LoRA as settings and model_config.yaml have it: read, written, or refused in a sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nemo_aligner.config.lora import LoraConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.errors import CheckpointError, SettingsError
from nemo_aligner.models.lora import LoraShape, check_lora, is_of_adapter, read_lora, with_lora

LORA = LoraShape(8, 16.0, ("linear_qkv", "linear_fc2"))


def test_lora_is_read_as_it_was_written_and_as_settings_have_it() -> None:
    config = {"num_layers": 2}
    assert read_lora(with_lora(config, LORA)) == LORA
    assert with_lora(with_lora(config, LORA), None) == config
    assert read_lora(config) is None
    # Targets in any order; rank 0 is none.
    settings = LoraConfig(rank=8, alpha=16, targets=["linear_fc2", "linear_qkv"])
    assert LoraShape.from_settings(settings) == LORA
    assert LoraShape.from_settings(LoraConfig()) is None
    assert LORA.scale == 2.0


def test_lora_matrices_stand_beside_the_weights_that_they_fit() -> None:
    weights = {"self_attention.linear_qkv.weight": (96, 64), "mlp.linear_fc2.weight": (64, 128)}
    tensors = LORA.tensors(weights)
    assert tensors == {
        "self_attention.linear_qkv.adapter.linear_in.weight": (8, 64),
        "self_attention.linear_qkv.adapter.linear_out.weight": (96, 8),
        "mlp.linear_fc2.adapter.linear_in.weight": (8, 128),
        "mlp.linear_fc2.adapter.linear_out.weight": (64, 8),
    }
    assert all(map(is_of_adapter, tensors))
    assert not any(map(is_of_adapter, weights))


# The key of model.lora, and what was got and wanted.
REFUSED = [
    ({"rank": -1}, "rank: got -1, wanted 0 or more"),
    ({"alpha": 0.0}, "alpha: got 0.0, wanted a number above 0"),
    ({"dropout": 1.0}, "dropout: got 1.0, wanted 0 or more, and less than 1"),
    ({"targets": ["q_proj"]}, "targets: got ['q_proj'], wanted at least one of"),
    ({"targets": []}, "targets: got [], wanted at least one of linear_qkv"),
    ({"targets": ["linear_qkv"] * 2}, "each once"),
]


def test_lora_settings_that_cannot_be_are_refused() -> None:
    for settings, said in REFUSED:
        with pytest.raises(SettingsError, match=re.escape(said)) as caught:
            LoraConfig(**settings)  # type: ignore[arg-type]
        assert str(caught.value).startswith("model.lora.")
    with pytest.raises(SettingsError, match=r"freeze_layers: got 1, wanted 0, as .*lora\.rank"):
        ModelConfig(lora=LoraConfig(rank=4), freeze_layers=1)


# A section of model_config.yaml, the key in it, and what was got and wanted.
DAMAGED: list[tuple[Any, str]] = [
    ("16", ": got '16', wanted rank, alpha and targets"),
    ({"rank": 8}, ": got {'rank': 8}, wanted rank, alpha and targets"),
    ({**LORA.to_config(), "rank": 0}, ".rank: got 0, wanted a whole number above 0"),
    ({**LORA.to_config(), "rank": True}, ".rank: got True"),
    ({**LORA.to_config(), "alpha": float("nan")}, ".alpha: got nan, wanted a number"),
    ({**LORA.to_config(), "targets": "linear_qkv"}, ".targets: got 'linear_qkv'"),
    ({**LORA.to_config(), "targets": ["linear_qkv", "x"]}, "each once"),
    ({**LORA.to_config(), "targets": [["linear_qkv"]]}, ".targets: got"),
]


def test_lora_section_that_is_damaged_is_one_clear_error() -> None:
    for section, said in DAMAGED:
        with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
            read_lora({"lora": section})
        assert "model_config.yaml: lora" in str(caught.value)


def test_lora_of_another_shape_than_the_archive_s_is_refused() -> None:
    other = LoraShape(4, 16.0, ("linear_qkv",))
    check_lora(LORA, LORA, "rm.nemo")
    check_lora(None, LORA, "rm.nemo")
    check_lora(LORA, None, "rm.nemo")
    with pytest.raises(CheckpointError) as caught:
        check_lora(LORA, other, "rm.nemo")
    theirs, ours = "rank 8, alpha 16, on linear_qkv, linear_fc2", "rank 4, alpha 16, on linear_qkv"
    said = str(caught.value)
    assert said.startswith("rm.nemo: ")
    assert theirs in said.split("; ")[0]
    assert "model.lora" in said.split("; ")[1]
    assert ours in said.split("; ")[1]
