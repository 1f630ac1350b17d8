"""Names that torch, megatron-core and Python keep to themselves: each is used here alone, with why.

One that is gone after an upgrade fails here, when this file is imported.
"""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.utils import _DistWrapper

# The unpickler in C gives no say in what a pickle may change.
PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


def torch_archive(stored: BinaryIO) -> Any:
    """The members of a zip file that ``torch.save`` wrote, as ``torch.load`` finds them.

    Python's zipfile may find another of the same name, and tells not where its content begins.
    """
    stored.seek(0)
    return torch._C.PyTorchFileReader(stored)


def rank_collectives() -> _DistWrapper:
    """All ranks, as torch's own save has them plan and agree: an error of one is raised on each."""
    return _DistWrapper(None, use_dist=True, coordinator_rank=0)


def torch_tensors(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's tensors by stored key, as torch's planner wants them.

    megatron-core does this inside its own save, which would also start processes to write with.
    """
    grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, keep_only_main_replica=True
    )
    return mcore_to_pyt_state_dict(grouped)
