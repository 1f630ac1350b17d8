"""Batch invariance: a text's reward has the same bits alone and in any company.

Here its products are given fixed shapes. What else it takes is always so in evaluation mode:
attention by blocks at fixed positions, packs filled up to whole vectors, threads that get whole
rows.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

from torch import Tensor

from nemo_aligner.models.heads import RewardHead
from nemo_aligner.models.linear import ColumnLinear, RowLinear, in_pieces, rows_now
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.processes import is_main

logger = logging.getLogger(__name__)

_ENGINE = "megatron.core.extensions.transformer_engine"


def make_batch_invariant(model: GPTRewardModel, rows: int | None) -> None:
    """Have all products of ``model`` computed ``rows`` rows at a time in evaluation mode.

    None leaves them as they come.
    """
    engine = [each for each in model.modules() if type(each).__module__ == _ENGINE]
    if rows is not None and engine and model.config.sequence_parallel:
        if is_main():
            logger.warning(
                "model.batch_invariant does not hold: TransformerEngine gathers what sequence "
                "parallelism has split inside its products; wanted model.sequence_parallel=false"
            )
        return
    if rows is not None and engine and model.config.tensor_model_parallel_size > 2 and is_main():
        logger.warning(
            "model.batch_invariant may not hold: TransformerEngine's sums over more than two "
            "tensor parallel ranks are in an order of NCCL's; wanted at most 2 of them"
        )
    for layer in model.modules():
        if isinstance(layer, ColumnLinear | RowLinear | RewardHead):
            layer.invariant_rows = rows
    for layer in engine:
        layer.invariant_rows = rows
        if "forward" not in vars(layer):
            layer.forward = _by_pieces(layer)  # type: ignore[method-assign]


def _by_pieces(layer: Any) -> Any:
    """Its ``forward``, in pieces of its ``invariant_rows``."""
    forward = layer.forward

    @wraps(forward)
    def by_pieces(x: Tensor) -> tuple[Tensor, None]:
        rows = rows_now(layer)
        if rows is None:
            return forward(x)
        # What comes beside the output is a bias to be added later: these layers add their own.
        return in_pieces(lambda piece: forward(piece)[0], x, rows), None

    return by_pieces
