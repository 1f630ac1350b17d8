"""Batch invariance: a sample's reward is bit-identical in every batch.

A GEMM picks its kernel, and with it the order of its sums, by its number of rows. So matmuls run in
chunks with a fixed number of rows. Everything else is batch invariant in evaluation mode anyway:
attention runs in blocks at fixed positions, packs are padded to whole vectors, and each thread gets
whole rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.config.model import ROWS_BY_DEVICE
from nemo_aligner.cpu.matmuls import (
    BATCH_INVARIANT_ROWS,
    reordered_for_matmuls,
    try_all_sizes,
)
from nemo_aligner.distributed import gpu_matmuls
from nemo_aligner.distributed.collectives import max_over_model_ranks
from nemo_aligner.models.experts import ExpertLinear, MixtureOfExperts
from nemo_aligner.models.gemma4 import PerLayerEmbedding
from nemo_aligner.models.internals import engine_layers
from nemo_aligner.models.layers import ColumnLinear, RowLinear, in_chunks, rows_now
from nemo_aligner.models.quantized_layers import QuantizedLayer, use_dense_layer
from nemo_aligner.models.reward_head import HeadLayer, RewardHead
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.router import Router
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)


def make_batch_invariant(model: GPTRewardModel, rows: int | None) -> None:
    """Make a model in evaluation mode compute its matmuls in chunks of ``rows`` rows; collective.

    On a GPU it also tries out which other chunk sizes give bit-identical results, so that the first
    requests do not wait for these trials.

    Args:
        rows: rows of a chunk. ``ROWS_BY_DEVICE`` chooses the number by device; None switches batch
            invariance off.
    """
    is_on_gpu = next(model.parameters()).is_cuda
    engine = engine_layers(model)
    if rows == ROWS_BY_DEVICE:
        # With TransformerEngine's layers no other chunk sizes are tried, so short packs are padded
        # to one chunk.
        has_trial = is_on_gpu and not engine
        rows = gpu_matmuls.default_rows() if has_trial else BATCH_INVARIANT_ROWS
    if rows is not None and engine and model.config.sequence_parallel:
        if is_main():
            logger.warning(
                "model.batch_invariant does not hold: under sequence parallelism "
                "TransformerEngine's matmuls cannot run in chunks. Set "
                "model.sequence_parallel=false."
            )
        return
    if rows is not None and engine and model.config.tensor_model_parallel_size > 2 and is_main():
        logger.warning(
            "model.batch_invariant may not hold: NCCL chooses the order of TransformerEngine's "
            "sums over more than two tensor parallel ranks. Set "
            "model.tensor_model_parallel_size to at most 2."
        )
    in_chunks_of_rows = ColumnLinear | RowLinear | RewardHead | MixtureOfExperts | PerLayerEmbedding
    for layer in model.modules():
        if isinstance(layer, in_chunks_of_rows):
            layer.invariant_rows = rows
    for layer in engine:
        layer.invariant_rows = rows
        if "forward" not in vars(layer):
            layer.forward = _wrap_in_chunks(layer)  # type: ignore[method-assign]
    model.smallest_chunk = None
    if is_on_gpu and rows is not None:
        model.smallest_chunk = _try_on_gpu(model, rows)


def _try_on_gpu(model: GPTRewardModel, rows: int) -> int:
    """Try the chunk sizes of all matmuls on this GPU; return the multiple to which to pad packs.

    Every layer has a smallest chunk size. The result is the largest of them over all layers and all
    ranks of the model.
    """
    for weight, bias in _list_matmuls(model):
        gpu_matmuls.chunk_sizes(weight, bias, rows)
    smallest = [
        min(gpu_matmuls.chunk_sizes(layer.weight, _multiplied_bias(layer), rows))
        for layer in _invariant_layers(model)
    ]
    # TransformerEngine's layers are not in the list, as they have a single chunk size. The maximum
    # is used because all ranks of the model have to make the same packs.
    return max_over_model_ranks(max(smallest, default=rows))


def _list_matmuls(model: GPTRewardModel) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield weight ``[o, i]`` and bias of every matmul.

    The experts of a layer have equal shapes, so only those of its first expert are yielded.
    """
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear | HeadLayer | torch.nn.Linear):
            yield module.weight, _multiplied_bias(module)
        elif isinstance(module, Router):
            yield module.weight.float(), None
            if module.shared_gate is not None:
                yield module.shared_gate.float(), None
        elif isinstance(module, ExpertLinear):
            yield module.weight[0].flatten(0, -2), None


def _multiplied_bias(layer: torch.nn.Module) -> Tensor | None:
    """Return the bias that a layer's matmul adds; RowLinear adds its bias to the ranks' sum."""
    return None if isinstance(layer, RowLinear) else layer.bias  # type: ignore[return-value]


def freeze_for_scoring(model: GPTRewardModel) -> None:
    """On a CPU, convert the weights of linear layers to the layout in which it multiplies fastest.

    Call it only for a batch invariant model that is neither trained nor saved afterwards. At most
    one layer's weight exists in both layouts at a time. Quantized weights are dequantized for good,
    because that would take longer on a CPU than the matmuls. A model on a GPU stays as it is: its
    quantized weights may be the only ones that fit into the GPU's memory.
    """
    if not next(model.parameters()).is_cpu:
        return
    for layer in _invariant_layers(model):
        if isinstance(layer, QuantizedLayer):
            use_dense_layer(layer, reordered_for_matmuls)
            continue
        weight = reordered_for_matmuls(layer.weight.detach())
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def try_all_matmuls(model: GPTRewardModel) -> None:
    """Try now, on a CPU, which chunk sizes give bit-identical results, so that no request waits."""
    for layer in _invariant_layers(model):
        try_all_sizes(layer.weight, getattr(layer, "bias", None), layer.invariant_rows)


def _invariant_layers(model: GPTRewardModel) -> list[Any]:
    """List the decoder's linear layers that run in chunks with a fixed number of rows."""
    layers = [layer for layer in model.modules() if isinstance(layer, ColumnLinear | RowLinear)]
    return [layer for layer in layers if layer.invariant_rows is not None]


def _wrap_in_chunks(layer: Any) -> Any:
    """Wrap a TransformerEngine layer's ``forward`` to run in chunks of its ``invariant_rows``."""
    forward = layer.forward

    @wraps(forward)
    def in_chunks_of_rows(x: Tensor) -> tuple[Tensor, None]:
        rows = rows_now(layer)
        if rows is None:
            return forward(x)
        # The second output is a bias for the caller to add. These layers have already added
        # their bias.
        return in_chunks(lambda piece: forward(piece)[0], x, rows), None

    return in_chunks_of_rows
