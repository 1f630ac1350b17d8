"""Weighted sums of reward models of one kind.

An average of runs that started from one head scores better than each of them, and is more robust
to distribution shift (WARM, Rame et al. 2024, arXiv:2401.12187). With weights beyond 1 it
extrapolates what training has changed (ExPO, Zheng et al. 2024, arXiv:2404.16792):
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
from nemo_aligner.checkpoint.nemo.archive import open_nemo, scratch_beside
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.load_weights import (
    head_names,
    model_shape,
    unread,
    unread_decoder,
)
from nemo_aligner.checkpoint.nemo.reward_model import contract_of
from nemo_aligner.checkpoint.nemo.write import write_lazy_nemo
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import describe_differences
from nemo_aligner.distributed.launch import single_process
from nemo_aligner.models.shape import ModelShape, with_lora
from nemo_aligner.utils.errors import CheckpointError, ConfigError

_SUM_TOLERANCE = 1e-6
# Contract fields whose weighted sum the merged model has.
_SUMMED_FIELDS = ("label_means",)
# Contract fields that training on from a model may change.
_HEAD_FIELDS = ("reward_model_type", "attributes", "aggregate")
# Cosine of two heads; 1.00 of runs from one head, 0.02 of runs that drew their own.
_ALIKE = 0.5


@dataclass(frozen=True)
class _Input:
    """An opened reward model and its weight in the sum."""

    folder: NemoFolder
    shape: ModelShape
    contract: ScoringContract
    weight: float


def merge_checkpoints(
    sources: Sequence[str | Path], weights: Sequence[float], output: str | Path
) -> str:
    """Write ``sum(weight * source)`` as the archive ``output``; returns a summary.

    Builds no model: tensors are read one after the other, summed in float64 and rounded once, to
    the dtype of the last source. LoRA is folded into the weights. One process calls it.

    Args:
        sources: reward models of this package, of one shape and one scoring contract.
        weights: one per source, with sum 1, so that rewards keep their scale.

    Raises:
        ConfigError: there are fewer than two sources, or the weights are unfit.
        CheckpointError: a source cannot be read, or is another kind of model than the last.
    """
    _check_weights(sources, weights)
    return _write(sources, weights, Path(output), _SUMMED_FIELDS)


def extrapolate(base: str | Path, trained: str | Path, alpha: float, output: str | Path) -> str:
    """Write ``trained + alpha * (trained - base)``, as ``merge_checkpoints`` does.

    ``base`` is the model that ``trained`` was trained from. Its head may be of another kind, as if
    a ranking model goes on from a regression of one attribute; the result is of ``trained``'s kind.
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
        inputs = [_opened(*each) for each in zip(folders, weights, strict=True)]
        last = inputs[-1]
        for other in inputs[:-1]:
            _check_alike(last, other, may_differ)
        tensors, layers = _merged(inputs)
        tokenizer = last.folder.load_tokenizer()
        tokenizer.save(scratch / "tokenizer")
        contract = _merged_contract(inputs)
        config = with_lora(last.folder.config, None)
        write_lazy_nemo(output, config, tensors, layers, scratch, contract)
        parts = [f"  {each.weight:+.6g} x {each.folder.source}" for each in inputs]
        parts += _heads_apart(inputs)
    return "\n".join([f"{output}: scoring contract {contract.hash}", *parts])


def _heads_apart(inputs: Sequence[_Input]) -> list[str]:
    """A warning where heads to be averaged have nothing to do with each other."""
    if min(each.weight for each in inputs) < 0:
        return []  # an extrapolation, from a head that may be of another kind
    last, *others = [_head(each.folder) for each in reversed(inputs)]
    cosine = min(float(torch.cosine_similarity(last, other, dim=0)) for other in others)
    if cosine >= _ALIKE:
        return []
    return [
        f"warning: the heads are unlike each other (cosine {cosine:.2f}), and so are the bodies "
        "under them: the average is probably worse than each model. Start the runs from one head "
        "(pretrained_checkpoint.load_rm_head_weights), or average rewards (ensemble.files)"
    ]


def _head(folder: NemoFolder) -> Tensor:
    names = sorted(head_names(folder))
    return torch.cat([unread(folder, HEAD_PREFIX + name).read().flatten() for name in names])


def _check_weights(sources: Sequence[str | Path], weights: Sequence[float]) -> None:
    if len(sources) < 2:
        raise ConfigError(f"got {len(sources)} reward models to merge, wanted two or more")
    if len(weights) != len(sources):
        raise ConfigError(
            f"got {len(weights)} weights, wanted {len(sources)}, one for each reward model"
        )
    if not all(map(math.isfinite, weights)) or abs(sum(weights) - 1) > _SUM_TOLERANCE:
        raise ConfigError(
            f"weights: got {list(weights)}, which sum to {sum(weights):g}, wanted a sum of 1: else "
            "rewards would have another scale"
        )


def _opened(folder: NemoFolder, weight: float) -> _Input:
    contract = contract_of(folder)
    if contract is None or HEAD not in folder.tensors:
        raise CheckpointError(
            f"{folder.source}: it is no reward model of this package (no head, or no scoring "
            "contract), so its weights cannot be merged with those of one"
        )
    return _Input(folder, model_shape(folder), contract, weight)


def _check_alike(last: _Input, other: _Input, may_differ: Sequence[str]) -> None:
    where = f"{other.folder.source}: it cannot be merged with {last.folder.source}"
    # LoRA may differ, because it is folded into the weights.
    mine, theirs = (
        dataclasses.asdict(dataclasses.replace(each.shape, lora=None)) for each in (last, other)
    )
    if mine != theirs:
        differing = [
            f"{name}: {mine[name]} -> {theirs[name]}" for name in mine if mine[name] != theirs[name]
        ]
        raise CheckpointError(f"{where}: another model: {'; '.join(differing)}")
    differences = last.contract.differences(other.contract)
    if len(last.contract.attributes) != len(other.contract.attributes):
        may_differ = ()
    of_rules = {name: each for name, each in differences.items() if name not in may_differ}
    if of_rules:
        raise CheckpointError(
            f"{where}: another scoring contract: {describe_differences(of_rules)}"
        )


def _merged(
    inputs: Sequence[_Input],
) -> tuple[dict[str, LazyTensor], dict[str, list[LazyTensor]]]:
    opened = [unread_decoder(each.folder, each.shape) for each in inputs]
    weights = [each.weight for each in inputs]

    def summed(parts: Sequence[LazyTensor]) -> LazyTensor:
        last = parts[-1]
        return LazyTensor(last.shape, last.dtype, partial(_sum, parts, weights))

    # A reward model does not use the output layer of its base.
    outside = [key for key in opened[0][0] if key != PREFIX + OUTPUT_LAYER]
    tensors = {key: summed([own[key] for own, _ in opened]) for key in outside}
    for name in head_names(inputs[-1].folder):
        tensors[PREFIX + HEAD_PREFIX + name] = summed(
            [unread(each.folder, HEAD_PREFIX + name) for each in inputs]
        )
    layers = {
        key: [summed(parts) for parts in zip(*(own[key] for _, own in opened), strict=True)]
        for key in opened[0][1]
    }
    return tensors, layers


def _sum(parts: Sequence[LazyTensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros(parts[-1].shape, dtype=torch.float64)
    for part, weight in zip(parts, weights, strict=True):
        # float64: with weights of -1 and 2 the parts are larger than their sum.
        total.add_(part.read().double(), alpha=weight)
    return total.to(parts[-1].dtype)


def _merged_contract(inputs: Sequence[_Input]) -> ScoringContract:
    """Copy the last contract with summed offsets and without statistics that no longer hold."""
    offsets = [
        math.fsum(each.weight * each.contract.label_means[column] for each in inputs)
        for column in range(len(inputs[-1].contract.attributes))
    ]
    contract = inputs[-1].contract.with_label_means(offsets)
    return dataclasses.replace(contract, reward_mean=None, reward_std=None, measured_on=None)
