"""What a save writes is not copied again, and is written as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_aligner.checkpoint.weights.own_storage import with_own_storage


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    from nemo_aligner.parallel.launch import launch

    with launch():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_part_of_a_tensor_gets_a_storage_of_its_own_over_the_same_memory(
    dtype: torch.dtype,
) -> None:
    whole = torch.arange(24).to(dtype)
    part = whole[6:18].view(3, 4)
    own = with_own_storage(part)
    assert own.untyped_storage().size() == part.nbytes
    assert own.data_ptr() == part.data_ptr()
    assert own.dtype is dtype
    assert torch.equal(own, part)
    whole.zero_()
    assert not own.any()


def test_the_memory_outlives_the_tensor_that_it_was_a_part_of() -> None:
    own = with_own_storage(torch.arange(2**16)[7:])
    taken = [torch.full((2**16,), -1) for _ in range(8)]
    assert len(taken) == 8
    assert torch.equal(own, torch.arange(7, 2**16))


def test_a_whole_tensor_and_one_with_holes_are_left_as_they_are() -> None:
    whole = torch.zeros(3, 4)
    scalar = torch.tensor(1.0)
    column = whole[:, 1]
    assert all(with_own_storage(tensor) is tensor for tensor in (whole, scalar, column))


def test_a_save_of_parts_of_flat_memory_clones_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from nemo_aligner.checkpoint.weights.save import save_weights
    from nemo_aligner.checkpoint.weights.store import load_weights

    flat = torch.arange(60.0)
    parts = {f"part_{index}": flat[20 * index :][:20].view(4, 5) for index in range(3)}
    cloned = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda self: cloned.append(self) or clone(self))
    save_weights(
        {key: ShardedTensor.from_rank_offsets(key, part) for key, part in parts.items()},
        tmp_path / "weights",
    )
    assert not cloned
    monkeypatch.undo()
    request = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(4, 5)) for key in parts}
    loaded = load_weights(request, tmp_path / "weights")
    assert all(torch.equal(loaded[key], part) for key, part in parts.items())
