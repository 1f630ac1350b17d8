"""A save without a second copy of what it writes."""

from __future__ import annotations

from io import BytesIO

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem


class InPlaceSavePlanner(MCoreSavePlanner):
    """megatron-core's planner, which hands the writer memory that it need not copy.

    torch's ``FileSystemWriter`` clones every tensor that is a part of a larger storage, and holds
    all clones until its file is written: as much again as the optimizer's flat state.
    """

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        data = super().resolve_data(write_item)
        return with_own_storage(data) if isinstance(data, Tensor) else data


def with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage holds nothing else.

    ``tensor`` itself where that is so already, or where it cannot be had: on a GPU, or with holes.
    """
    is_part = tensor.untyped_storage().size() != tensor.nbytes
    if not is_part or not tensor.is_cpu or not tensor.is_contiguous():
        return tensor
    # As bytes, for numpy has no bf16. A tensor from an array has a storage of just its bytes.
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(tensor.dtype).view(tensor.shape)
