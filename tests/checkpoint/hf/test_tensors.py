"""A checkpoint has exactly the tensors of its config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.hf.conversion import (
    convert,
    edit,
    edit_tensors,
    refused,
)

pytestmark = pytest.mark.usefixtures("layout")


def test_a_tied_output_layer_is_no_part_of_it(changed_reward: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(changed_reward, add)
    assert convert(changed_reward, tmp_path / "rm.nemo").contract is not None
    edit(changed_reward, tie_word_embeddings=False)
    refused(
        changed_reward, tmp_path, r"have no place in a llama model, the first is lm_head\.weight"
    )


def replace_tensor(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("score.bias", torch.zeros(1), r"score\.bias: got a head with a bias"),
        ("score.weight", torch.tensor(1.0), r"score\.weight: got shape \[\], wanted \[1, 64\]"),
        ("score.weight", None, r"LlamaForSequenceClassification without score\.weight"),
        ("score.weight", torch.zeros(2, 64), r"score\.weight: got shape \[2, 64\], wanted \[1, 64"),
        ("v_head.weight", torch.zeros(1, 64), r"no place in a llama model.* v_head\.weight"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            torch.zeros(64, 64),
            r"layers\.1\.self_attn\.k_proj\.weight: got shape \[64, 64\], wanted \[32, 64\]",
        ),
        (
            "model.layers.3.mlp.up_proj.weight",
            torch.zeros(128, 64, dtype=torch.int8),
            r"layers\.3\.mlp\.up_proj\.weight: got I8 numbers",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, value: Tensor | None, message: str, changed_reward: Path, tmp_path: Path
) -> None:
    edit_tensors(changed_reward, replace_tensor(name, value))
    refused(changed_reward, tmp_path, message)
