"""A few stored tensors, and state dicts that request them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def sharded(key: str, data: torch.Tensor, *offsets: tuple, **options: Any) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, data, *offsets, **options)


def request(fill: float | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Build a state dict of an embedding, two stacked layers and an opaque object."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def tensor(start: float, *shape: int) -> torch.Tensor:
        numbers = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
        return (numbers if fill is None else torch.full(shape, fill)).to(dtype)

    layers = {
        f"{layer}.weight": sharded(
            "model.layers.weight", tensor(100.0 * layer, 3, 4), (0, layer, 2), prepend_axis_num=1
        )
        for layer in range(2)
    }
    return {
        "model.embedding": sharded("model.embedding", tensor(0.5, 6, 4), allow_shape_mismatch=True),
        **layers,
        "model._extra_state": ShardedObject("model._extra_state", None, (1,), (0,)),
    }


def check_loaded(state: dict[str, Any]) -> None:
    expected = request()
    assert state.keys() == expected.keys() - {"model._extra_state"}
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name].data, rtol=0, atol=0)


def load(folder: Path, requested: dict[str, Any] | None = None) -> dict[str, Any]:
    from nemo_aligner.checkpoint.weights import load_weights

    return load_weights(request(fill=-1.0) if requested is None else requested, folder)
