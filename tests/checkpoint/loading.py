"""Helpers to load, compare and damage checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from nemo_aligner.config.common import Precision
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import Tensors
from tests.harness import tiny

SEQUENCES = [list(range(3, 3 + length)) for length in (5, 40, 1, 17)]
# Writes a checkpoint of another program to a folder; see the fixture ``theirs``.
Theirs = Callable[..., Path]


class Bomb:
    """Unpickling one creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


def refuse(path: Path, layout: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(path, layout)


def edit(unpacked: Path, **changes: Any) -> None:
    path = unpacked / "model_config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


def load(path: Path, layout: Any, attributes: int = 1) -> Any:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

    return load_pretrained(path, layout, num_attributes=attributes, precision=Precision.fp32)


def scores(model: Any, layout: Any) -> Tensor:
    """Score the token lists SEQUENCES with a model."""
    from nemo_aligner.batch.packed import PackedBatch
    from nemo_aligner.models.step import infer

    return infer(model, [PackedBatch.pack(SEQUENCES)], layout)


def check(model: Any, tensors: Tensors) -> None:
    """Check that every parameter equals the tensor written for it, without padding."""
    metadata = {"non_homogeneous_layers": True}
    expected = foreign.per_layer(tensors)
    seen = set()
    for entry in model.sharded_state_dict(metadata=metadata).values():
        if "rm_head" in entry.key or "_extra_state" in entry.key:
            continue
        rows = tiny.SHAPE["vocab_size"] if "embedding" in entry.key else None
        torch.testing.assert_close(entry.data[:rows], expected[entry.key][:rows], rtol=0, atol=0)
        seen.add(entry.key)
    assert seen == expected.keys() - {"output_layer.weight", "rm_head.weight", "rm_head.bias"}


def head_of(attributes: int) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {
        "rm_head.weight": torch.randn(attributes, 64, generator=generator) * 0.1,
        "rm_head.bias": torch.randn(attributes, generator=generator),
    }
