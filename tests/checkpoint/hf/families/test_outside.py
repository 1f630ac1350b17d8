"""A model family from another package: one file and a call of ``register_family``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.custom_families import VARIABLE
from nemo_aligner.checkpoint.hf import families
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.hf.families import NAME_KEY, family_of, find_family, register_family
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.hf.exporting import (
    assert_same,
    config_of,
    export,
    save_again,
    tensors_of,
)
from tests.checkpoint.hf.families.test_families import SIZES
from tests.checkpoint.hf.families.toy_llama import TOY_LLAMA
from tests.harness import tiny

TOY_SIZES = {**SIZES, "ffn_dim": SIZES["intermediate_size"], "intermediate_size": None}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a family for one test; the package has no function to remove one."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    monkeypatch.setenv(VARIABLE, "")
    register_family(TOY_LLAMA)


def write_reward_model(folder: Path) -> None:
    """Write a reward model with a tokenizer like transformers does."""
    from tests.checkpoint.hf.families import toy_transformers as toy

    torch.manual_seed(0)
    shape = {**tiny.SHAPE, "initializer_range": 0.1, "num_labels": 1, "pad_token_id": 0}
    model = toy.ToyLlamaForSequenceClassification(toy.ToyLlamaConfig(**shape))
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)


@pytest.mark.usefixtures("registered")
def test_it_converts_and_is_exported_bit_for_bit(layout: Any, tmp_path: Path) -> None:
    write_reward_model(tmp_path / "hf")
    assert config_of(tmp_path / "hf")["ffn_dim"] == SIZES["intermediate_size"]
    assert "model.blocks.3.mlp.w2.weight" in tensors_of(tmp_path / "hf")

    # Query groups of zeros are added by the conversion, and removed by the export.
    summary = convert(tmp_path / "hf", tmp_path / "converted.nemo", tensor_parallel=3)
    assert "toy_llama reward model" in str(summary)
    save_again(tmp_path / "converted.nemo", tmp_path / "trained.nemo", layout)
    summary = export(tmp_path / "trained.nemo", tmp_path / "out", layout)

    assert summary.architecture == "ToyLlamaForSequenceClassification"
    assert_same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))
    there, back = config_of(tmp_path / "hf"), config_of(tmp_path / "out")
    for key in ("model_type", "ffn_dim", "hidden_size", "num_attention_heads", "vocab_size"):
        assert back[key] == there[key], key
    assert "intermediate_size" not in back


@pytest.mark.usefixtures("registered")
def test_a_name_is_that_of_one_family() -> None:
    with pytest.raises(ConfigError, match="model family toy_llama: another family has this name"):
        register_family(dataclasses.replace(TOY_LLAMA))
    same_files = dataclasses.replace(find_family("llama"), name="other")
    with pytest.raises(ConfigError, match="model family other: another family has this name"):
        register_family(same_files)


@pytest.mark.usefixtures("registered")
def test_a_config_names_a_family_that_has_such_decoders() -> None:
    config = find_family("toy_llama").to_nemo(TOY_SIZES)
    assert family_of(config) is TOY_LLAMA
    assert family_of({**config, NAME_KEY: None}).name == "llama"
    with pytest.raises(
        CheckpointError, match="qkv_bias=True, which does not belong to the family toy_llama"
    ):
        family_of({**config, "qkv_bias": True})


@pytest.mark.parametrize("name", ["toy_llama", ["llama"], 7])
def test_a_config_names_a_family_that_is_known(name: Any) -> None:
    config = {**find_family("llama").to_nemo(dict(SIZES)), NAME_KEY: name}
    with pytest.raises(CheckpointError, match=r"hf_model_type: got .*, wanted one of: llama, mist"):
        family_of(config)
