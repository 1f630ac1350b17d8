"""Merge finished reward models into weighted sums of their weights.

The average of runs that started from the same head scores better than each of them, and is more
robust to distribution shift (WARM, Rame et al. 2024, arXiv:2401.12187). With a weight above 1 the
sum extrapolates the change that training made (ExPO, Zheng et al. 2024, arXiv:2404.16792):
``trained + alpha * (trained - base)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import HEAD, HEAD_PREFIX, OUTPUT_LAYER, PREFIX
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.load_weights import (
    head_names,
    lazy_decoder,
    lazy_tensor,
    model_shape,
)
from nemo_aligner.checkpoint.nemo.reward_model import contract_of
from nemo_aligner.checkpoint.nemo.training_data import merge_training_data
from nemo_aligner.checkpoint.nemo.write import scratch_beside, write_lazy_nemo
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import describe_differences, find_conflicts
from nemo_aligner.distributed.launch import single_process
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import with_lora
from nemo_aligner.utils.errors import CheckpointError, ConfigError

_SUM_TOLERANCE = 1e-6
# Fields of the contract that are merged by a weighted sum, like the model's weights.
_SUMMED_FIELDS = ("label_means",)
# Contract fields that may differ in an extrapolation, because the base may be another kind of
# reward model.
_HEAD_FIELDS = ("reward_model_type", "attributes", "aggregate")
# Least cosine of two heads that are worth averaging. The cosine was 1.00 for runs that started from
# the same head, and 0.02 for runs whose heads were drawn at random.
_MIN_HEAD_COSINE = 0.5


@dataclass(frozen=True)
class _Input:
    """A reward model to merge: its opened archive, and its weight in the sum."""

    folder: NemoFolder
    shape: ModelShape
    contract: ScoringContract
    weight: float


def merge_checkpoints(
    sources: Sequence[str | Path], weights: Sequence[float], output: str | Path
) -> str:
    """Write ``sum(weight * source)`` as the archive ``output``, and return a summary.

    It builds no model: tensors are read one after the other, summed in float64 and rounded once, to
    the dtype of the last source. LoRA adapters are folded into the weights. One process calls this.

    Args:
        sources: reward models of this package, all with the same shape and scoring contract.
        weights: one for each source. They sum to 1, so that rewards keep their scale.

    Raises:
        ConfigError: there are fewer than two sources, or the weights are not one finite number for
            each source with a sum of 1.
        CheckpointError: a source cannot be read, or its shape or scoring contract differs from that
            of the last source.
    """
    _check_weights(sources, weights)
    return _write(sources, weights, Path(output), _SUMMED_FIELDS)


def extrapolate(base: str | Path, trained: str | Path, alpha: float, output: str | Path) -> str:
    """Write ``trained + alpha * (trained - base)`` as the archive ``output``; return a summary.

    ``base`` is the model from which ``trained`` was trained. The kind of reward model may differ
    between them, for example when a ranking model was trained from a regression model of one
    attribute; the result has the kind of ``trained``.
    """
    weights = (-alpha, 1 + alpha)
    _check_weights((base, trained), weights)
    return _write((base, trained), weights, Path(output), (*_SUMMED_FIELDS, *_HEAD_FIELDS))


def _write(
    sources: Sequence[str | Path],
    weights: Sequence[float],
    output: Path,
    may_differ: Sequence[str],
) -> str:
    with single_process(), scratch_beside(output) as scratch, ExitStack() as stack:
        folders = [stack.enter_context(open_nemo(source)) for source in sources]
        inputs = [
            _check_input(folder, weight) for folder, weight in zip(folders, weights, strict=True)
        ]
        last = inputs[-1]
        for earlier in inputs[:-1]:
            _check_mergeable(last, earlier, may_differ)
        tensors, layers = _merge_tensors(inputs)
        tokenizer = last.folder.load_tokenizer()
        tokenizer.save(scratch / "tokenizer")
        contract = _merge_contracts(inputs)
        configs = [model.folder.config for model in inputs[:-1]]
        config = merge_training_data(with_lora(last.folder.config, None), configs)
        write_lazy_nemo(output, config, tensors, layers, scratch, contract)
        lines = [f"  {model.weight:+.6g} x {model.folder.source}" for model in inputs]
        if last.contract.base_precision is not None:
            lines.append(
                f"base precision: {last.contract.base_precision}. The weights are dequantized, and "
                "have the adapters folded in, rounded once: `evaluate` measures the difference"
            )
        lines += _warn_of_unrelated_heads(inputs)
    return "\n".join([f"{output}: scoring contract {contract.hash}", *lines])


def _warn_of_unrelated_heads(inputs: Sequence[_Input]) -> list[str]:
    """Return a warning if reward models are averaged whose heads point in unrelated directions.

    The list is empty otherwise.
    """
    if min(model.weight for model in inputs) < 0:
        return []  # an extrapolation: the heads may be of different kinds
    last, *earlier = [_read_flat_head(model.folder) for model in reversed(inputs)]
    cosine = min(float(torch.cosine_similarity(last, head, dim=0)) for head in earlier)
    if cosine >= _MIN_HEAD_COSINE:
        return []
    return [
        f"warning: the heads differ in direction (cosine {cosine:.2f}), and so do the models under "
        "them: the average is probably worse than each model. Start the runs from one head "
        "(pretrained_checkpoint.load_rm_head_weights), or average rewards (ensemble.files)"
    ]


def _read_flat_head(folder: NemoFolder) -> Tensor:
    """Read all tensors of a reward head as one vector, to compare heads by their cosine."""
    names = sorted(head_names(folder))
    return torch.cat([lazy_tensor(folder, HEAD_PREFIX + name).read().flatten() for name in names])


def _check_weights(sources: Sequence[str | Path], weights: Sequence[float]) -> None:
    if len(sources) < 2:
        raise ConfigError(f"got {len(sources)} reward models to merge, wanted at least two")
    if len(weights) != len(sources):
        raise ConfigError(
            f"got {len(weights)} weights, wanted {len(sources)}, one for each reward model"
        )
    if not all(map(math.isfinite, weights)) or abs(sum(weights) - 1) > _SUM_TOLERANCE:
        raise ConfigError(
            f"weights: got {list(weights)}, which sum to {sum(weights):g}, wanted a sum of 1, "
            "because another sum would change the scale of the rewards"
        )


def _check_input(folder: NemoFolder, weight: float) -> _Input:
    """Check that an opened archive is a reward model of this package; read its contract."""
    contract = contract_of(folder)
    if contract is None or HEAD not in folder.tensors:
        raise CheckpointError(
            f"{folder.source}: it is not a reward model of this package (no head, or no scoring "
            "contract). Only reward models that this package trained or imported can be merged"
        )
    return _Input(folder, model_shape(folder), contract, weight)


def _check_mergeable(last: _Input, earlier: _Input, may_differ: Sequence[str]) -> None:
    """Raise CheckpointError if two models differ in their shape or scoring contract.

    ``may_differ`` names the fields of the contract that are not compared.
    """
    problem = f"{earlier.folder.source}: it cannot be merged with {last.folder.source}"
    # LoRA may differ, because lazy_decoder folds the adapters into the weights.
    last_shape, earlier_shape = (
        dataclasses.asdict(dataclasses.replace(model.shape, lora=None)) for model in (last, earlier)
    )
    if last_shape != earlier_shape:
        differing = [
            f"{name}: {value} -> {earlier_shape[name]}"
            for name, value in last_shape.items()
            if value != earlier_shape[name]
        ]
        raise CheckpointError(f"{problem}: the models differ: {'; '.join(differing)}")
    if len(last.contract.attributes) != len(earlier.contract.attributes):
        may_differ = ()
    conflicts = find_conflicts(last.contract, earlier.contract, may_differ)
    if conflicts:
        raise CheckpointError(
            f"{problem}: the scoring contracts differ: {describe_differences(conflicts)}"
        )


def _merge_tensors(
    inputs: Sequence[_Input],
) -> tuple[dict[str, LazyTensor], dict[str, list[LazyTensor]]]:
    """Return lazy tensors of the merged model: each is computed when it is written.

    A tensor of the merged model is the sum of the inputs' tensors, times their weights.

    Returns:
        Tensors outside the layers, by name; and tensors of the layers, by name, with one for each
        layer. Names are those in the archive.
    """
    decoders = [lazy_decoder(model.folder, model.shape) for model in inputs]
    weights = [model.weight for model in inputs]

    def merge(parts: Sequence[LazyTensor]) -> LazyTensor:
        last = parts[-1]
        return LazyTensor(last.shape, last.dtype, partial(_weighted_sum, parts, weights))

    # The output layer of the base model is not merged, because a reward model does not use it.
    outside = [key for key in decoders[0][0] if key != PREFIX + OUTPUT_LAYER]
    tensors = {key: merge([tensors[key] for tensors, _ in decoders]) for key in outside}
    for name in head_names(inputs[-1].folder):
        tensors[PREFIX + HEAD_PREFIX + name] = merge(
            [lazy_tensor(model.folder, HEAD_PREFIX + name) for model in inputs]
        )
    layers = {
        key: [merge(parts) for parts in zip(*(layers[key] for _, layers in decoders), strict=True)]
        for key in decoders[0][1]
    }
    return tensors, layers


def _weighted_sum(parts: Sequence[LazyTensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros(parts[-1].shape, dtype=torch.float64)
    for part, weight in zip(parts, weights, strict=True):
        # Sum in float64: with weights such as -1 and 2 the terms are larger than their sum, so
        # rounding errors would matter.
        total.add_(part.read().double(), alpha=weight)
    return total.to(parts[-1].dtype)


def _merge_contracts(inputs: Sequence[_Input]) -> ScoringContract:
    """Copy the last model's contract, with merged offsets, and without reward statistics.

    The statistics (mean and standard deviation of rewards) were measured on the last model.
    """
    offsets = [
        math.fsum(model.weight * model.contract.label_means[column] for model in inputs)
        for column in range(len(inputs[-1].contract.attributes))
    ]
    contract = inputs[-1].contract.with_label_means(offsets)
    contract = dataclasses.replace(contract, reward_mean=None, reward_std=None, measured_on=None)
    # The adapters are folded, so the weights are no longer those of a quantized base.
    return dataclasses.replace(contract, base_precision=None)
