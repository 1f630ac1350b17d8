"""What a run's checkpoints have of a model with LoRA, and what tells its other weights apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.weights.run_weights import frozen_digest, put_weights, sharded_weights
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.head_shape import HeadShape
from nemo_aligner.models.lora import is_of_adapter
from tests.models.test_adapters import LORA, build, perturb


def test_only_adapters_and_head_are_saved(layout: Any) -> None:
    model = build(layout, LORA)
    names = set(sharded_weights(model))
    assert "model.rm_head.weight" in names
    assert all(is_of_adapter(name) for name in names - {"model.rm_head.weight"})
    assert len(names) == 1 + 2 * 4 * 4
    plain = build(layout, None)
    assert {name for name, _ in plain.named_parameters()} <= {
        name.removeprefix("model.") for name in sharded_weights(plain)
    }


def test_all_of_a_head_is_saved_and_none_of_it_is_frozen(layout: Any) -> None:
    model = build(layout, LORA, head=HeadShape(bias=True, mlp_size=8))
    model.rm_head.learn_beside([1.0])
    before = frozen_digest(model)
    of_head = {f"model.rm_head.{name}" for name, _ in model.rm_head.named_parameters()}
    assert len(of_head) == 5
    assert of_head < set(sharded_weights(model))
    with torch.no_grad():
        for parameter in model.rm_head.parameters():
            parameter.add_(1)
    assert frozen_digest(model) == before


def test_what_is_put_back_has_to_be_all_of_it(layout: Any) -> None:
    model, other = build(layout, LORA), build(layout, LORA, seed=6)
    perturb(model)
    state = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    saved = {name: state[name] for name in sharded_weights(model)}
    frozen = frozen_digest(other)
    put_weights(other, saved, Path("step_1"))
    assert frozen_digest(other) == frozen
    for name, value in other.named_parameters():
        assert torch.equal(value, state[f"model.{name}"]) == (f"model.{name}" in saved), name
    (lost, *_) = (name for name in saved if "linear_in" in name)
    with pytest.raises(CheckpointError, match=f"step_1: not loaded: {lost[6:]}"):
        put_weights(other, {name: saved[name] for name in saved if name != lost}, Path("step_1"))


def test_one_bit_of_a_frozen_weight_is_seen(layout: Any) -> None:
    model = build(layout, LORA)
    before = frozen_digest(model)
    perturb(model)
    with torch.no_grad():
        model.rm_head.weight.add_(1)
    assert frozen_digest(model) == before
    bits = model.decoder.layers[2].mlp.linear_fc1.weight.data.view(torch.int32)
    bits[3, 4] ^= 1
    assert frozen_digest(model) != before
    bits[3, 4] ^= 1
    first, second = (model.decoder.layers[index].mlp.linear_fc2.weight.data for index in (0, 1))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    assert frozen_digest(model) != before
