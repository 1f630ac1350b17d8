"""LoRA as settings and model_config.yaml have it: read, written, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_aligner.config.lora import LoraConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.errors import CheckpointError, SettingsError
from nemo_aligner.models.lora import LoraShape, check_lora, is_of_adapter, read_lora, with_lora

LORA = LoraShape(8, 16.0, ("linear_qkv", "linear_fc2"))


def test_what_is_written_is_read_again() -> None:
    config = {"num_layers": 2}
    assert read_lora(with_lora(config, LORA)) == LORA
    assert with_lora(with_lora(config, LORA), None) == config
    assert read_lora(config) is None


def test_settings_have_targets_in_any_order_and_rank_0_is_none() -> None:
    settings = LoraConfig(rank=8, alpha=16, targets=["linear_fc2", "linear_qkv"])
    assert LoraShape.from_settings(settings) == LORA
    assert LoraShape.from_settings(LoraConfig()) is None
    assert LORA.scale == 2.0


def test_matrices_stand_beside_the_weights_that_they_fit() -> None:
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": -1}, "model.lora.rank: got -1, wanted 0 or more"),
        ({"alpha": 0.0}, "model.lora.alpha: got 0.0, wanted a number above 0"),
        ({"dropout": 1.0}, "model.lora.dropout: got 1.0, wanted 0 or more, and less than 1"),
        ({"targets": ["q_proj"]}, r"model.lora.targets: got \['q_proj'\], wanted at least one of"),
        ({"targets": []}, "model.lora.targets: got .*, wanted at least one of linear_qkv"),
        ({"targets": ["linear_qkv"] * 2}, "model.lora.targets: got .* each once"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        LoraConfig(**settings)


def test_lora_leaves_no_layer_to_be_frozen() -> None:
    with pytest.raises(SettingsError, match=r"freeze_layers: got 1, wanted 0, as model.lora.rank"):
        ModelConfig(lora=LoraConfig(rank=4), freeze_layers=1)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("16", "model_config.yaml: lora: got '16', wanted rank, alpha and targets"),
        ({"rank": 8}, "lora: got {'rank': 8}, wanted rank, alpha and targets"),
        ({**LORA.to_config(), "rank": 0}, "lora.rank: got 0, wanted a whole number above 0"),
        ({**LORA.to_config(), "rank": True}, "lora.rank: got True"),
        ({**LORA.to_config(), "alpha": float("nan")}, "lora.alpha: got nan, wanted a number"),
        ({**LORA.to_config(), "targets": "linear_qkv"}, "lora.targets: got 'linear_qkv'"),
        ({**LORA.to_config(), "targets": ["linear_qkv", "x"]}, "lora.targets: got .*each once"),
        ({**LORA.to_config(), "targets": [["linear_qkv"]]}, "lora.targets: got"),
    ],
)
def test_a_damaged_section_is_one_clear_error(section: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_lora({"lora": section})


def test_another_lora_than_the_archive_s_is_refused_with_both() -> None:
    other = LoraShape(4, 16.0, ("linear_qkv",))
    check_lora(LORA, LORA, "rm.nemo")
    check_lora(None, LORA, "rm.nemo")
    check_lora(LORA, None, "rm.nemo")
    said = "rm.nemo: it comes with LoRA of rank 8, alpha 16, on linear_qkv, linear_fc2; model.lora "
    with pytest.raises(CheckpointError, match=f"{said}has rank 4, alpha 16, on linear_qkv"):
        check_lora(LORA, other, "rm.nemo")
