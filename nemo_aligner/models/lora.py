"""LoRA adapters of linear layers: forward pass, initialisation, dropout, and folding into weights.

Tensor parallelism splits B of a column-parallel layer and A of a row-parallel one, like the layer's
own weight. Ranks exchange only A's output, ``[T, rank]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.utils import skip_init

from nemo_aligner.batch.packed import PackedBatch, Records
from nemo_aligner.config.model import LoraConfig
from nemo_aligner.models.decoder_layer import LastLayer
from nemo_aligner.models.expert_rows import RowCounts
from nemo_aligner.models.experts import ExpertLinear, MixtureOfExperts
from nemo_aligner.models.layers import ColumnLinear, RowLinear, invariant_linear, sum_partial
from nemo_aligner.models.pack_context import PackContext
from nemo_aligner.models.quantized_layers import use_quantized_layers
from nemo_aligner.models.shapes.lora import EXPERT_LINEARS, LINEARS, LoraShape
from nemo_aligner.utils.host_transfer import to_device

# LoRA's adapters.

_ParallelLinear = ColumnLinear | RowLinear


class LoraAdapter(torch.nn.Module):
    """Computes ``scale * B A x`` for ``x [T, 1, in]``, sharded like the adapted linear layer.

    The linear layer adds the result to its own output. The adapter uses the layer's TP group and
    sequence parallelism.

    Args:
        number: number of the linear layer in the whole model, on which dropout's masks depend.
        reads_rows: ``layer`` gets only the rows that the head reads, rather than all tokens of a
            pack.
    """

    def __init__(
        self,
        layer: _ParallelLinear,
        lora: LoraShape,
        number: int,
        dropout: LoraDropout | None = None,
        *,
        reads_rows: bool = False,
    ) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape
        kind = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        self.linear_in = skip_init(torch.nn.Linear, inputs, lora.rank, **kind)
        self.linear_out = skip_init(torch.nn.Linear, lora.rank, outputs, **kind)
        torch.nn.init.zeros_(self.linear_in.weight)
        torch.nn.init.zeros_(self.linear_out.weight)
        self.scale = lora.scale
        self._group, self._is_split = layer.tp_group, layer.sequence_parallel
        self._is_by_outputs = isinstance(layer, ColumnLinear)
        self._number, self._dropout, self._reads_rows = number, dropout, reads_rows
        split, replicated = self.linear_in.weight, self.linear_out.weight
        if self._is_by_outputs:
            split, replicated = replicated, split
        set_tensor_model_parallel_attributes(split, True, 0 if self._is_by_outputs else 1, 1)
        # This matrix is replicated, but each rank uses it only for its own tokens. With this mark
        # Megatron sums its gradient over TP.
        replicated.sequence_parallel = layer.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, rows: int | None, context: PackContext | None = None) -> Tensor:
        """Compute ``scale * B A x``, which the linear layer adds to its output.

        Args:
            rows: fixed number of rows of a matmul, from ``rows_now``; None means no fixed number.
            context: the pack's context, whose dropout keys are needed in training with dropout.
        """
        scale = self.scale
        if self._dropout is not None and self.training:
            scale /= 1 - self._dropout.rate
            x = self._drop_inputs(x, self._dropout, context)
        # Scale A's output, which has ``rank`` values a token, rather than B's, which has ``out``.
        low = _multiply(x, self.linear_in, rows) * scale
        if not self._is_by_outputs:
            low = sum_partial(low, self._group, self._is_split, rows)
        elif self._is_split:
            low = gather_from_sequence_parallel_region(low, group=self._group)
        else:
            # This call changes nothing in the forward pass. Its backward pass sums gradients over
            # the TP ranks, each of which has a part of the outputs.
            low = copy_to_tensor_model_parallel_region(low, group=self._group)
        return _multiply(low, self.linear_out, rows)

    def _drop_inputs(self, x: Tensor, dropout: LoraDropout, context: PackContext | None) -> Tensor:
        keys = None
        if context is not None:
            is_last = self._reads_rows
            keys = context.dropout_keys_of_read_rows if is_last else context.dropout_keys
        if keys is None:
            raise RuntimeError(
                "a LoRA adapter with dropout got no dropout keys in training. Pass it the "
                "PackContext of its pack, made with LoraDropout.token_keys."
            )
        tokens = channels = 0
        if not self._is_by_outputs:
            channels = self._group.rank() * x.size(-1)
        elif self._is_split:
            tokens = self._group.rank() * x.size(0)
        return dropout.apply(x, keys[tokens : tokens + x.size(0)], self._number, channels)


def _multiply(x: Tensor, linear: torch.nn.Linear, rows: int | None) -> Tensor:
    # Call the module: in its pre-hook Megatron waits for weights that are still being gathered.
    return linear(x) if rows is None else invariant_linear(x, linear.weight, None, rows)


class ExpertAdapter(MegatronModule):
    """LoRA adapters of experts: each has matrices A ``[rank, in]`` and B ``[..., rank]``.

    Tensor parallelism splits both matrices: one along the same axis as ``linear``, the other along
    LoRA's rank. So every process gets the whole gradient of its part, and the shapes of an expert's
    inputs and outputs are the same as without LoRA. The tensor parallel size must divide LoRA's
    rank (``check_expert_rank``).
    """

    def __init__(self, config: TransformerConfig, linear: ExpertLinear, lora: LoraShape) -> None:
        super().__init__(config)
        self.count = linear.weight.size(0) * parallel_state.get_expert_model_parallel_world_size()
        *outputs, inputs = linear.size
        axis = 1 if linear.splits_outputs else 2
        self.linear_in = ExpertLinear(config, (lora.rank, inputs), self.count, axis)
        self.linear_out = ExpertLinear(config, (*outputs, lora.rank), self.count, linear.axis)
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)
        self.scale = lora.scale

    def forward(self, inputs: Tensor, counts: RowCounts, rows: int | None) -> Tensor:
        low = self.linear_in(inputs, counts, rows) * self.scale
        group = self.linear_in.group
        if group.size() > 1 and self.linear_in.splits_outputs:
            # The backward pass of these two calls sums gradients over the TP ranks, each of which
            # has a part of the outputs, and then takes this rank's part of the sum.
            low = gather_from_tensor_model_parallel_region(low, group=group)
            low = copy_to_tensor_model_parallel_region(low, group=group)
        elif group.size() > 1:
            low = sum_partial(low, group, False, rows)
            low = scatter_to_tensor_model_parallel_region(low, group=group)
        return self.linear_out(low, counts, rows)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return the parts of A and B whose product updates this rank's part of the weight.

        Collective: one of the two matrices is gathered from the TP ranks.
        """
        low, high = self.linear_in, self.linear_out
        if low.splits_outputs:
            return low.gather(), high.weight
        return low.weight, high.gather()


def attach_adapters(model: Any, lora: LoraShape, dropout: LoraDropout | None = None) -> None:
    """Attach adapters to the target linear layers of ``model``'s decoder.

    Their A and B are all zeros until ``draw_adapters`` or a checkpoint fills them. If ``lora`` has
    a base precision, all linear layers become quantized ones, which wait for a checkpoint. Adapters
    of experts have no dropout (``check_dropout``).
    """
    for layer in model.decoder.layers:
        for number, name, linear in _number_linears(layer):
            if isinstance(linear, ExpertLinear) and name in lora.linears:
                linear.adapter = ExpertAdapter(model.config, linear, lora)
            elif name in lora.linears:
                # After its attention the last layer computes only the rows that the head reads.
                reads_rows = isinstance(layer, LastLayer) and name != LINEARS["linear_qkv"]
                linear.adapter = LoraAdapter(linear, lora, number, dropout, reads_rows=reads_rows)
    if lora.base_precision is not None:
        use_quantized_layers(model, lora.base_precision)


def _number_linears(layer: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield the number (in the whole model), name and module of a layer's linear layers."""
    is_mixture = isinstance(layer.mlp, MixtureOfExperts)
    names = {**LINEARS, **EXPERT_LINEARS} if is_mixture else LINEARS
    for index, name in enumerate(names.values()):
        # A layer of a hybrid model lacks attention or the MLP.
        if not isinstance(layer.get_submodule(name.partition(".")[0]), IdentityOp):
            yield len(LINEARS) * layer.layer_number + index, name, layer.get_submodule(name)


def _list_adapted(model: Any) -> Iterator[tuple[int, Any]]:
    """Yield the linear layers that have an adapter, each with its number in the whole model."""
    for layer in model.decoder.layers:
        for number, _, linear in _number_linears(layer):
            if linear.adapter is not None:
                yield number, linear


@torch.no_grad()
def draw_adapters(model: torch.nn.Module, seed: int) -> None:
    """Initialise A from N(0, ``1 / in``) and B with zeros, so that nothing is added at first.

    The result does not depend on the parallel layout: the full A of each layer is drawn on the CPU
    by its own generator, and every rank takes its part. Query groups of zeros, which may have been
    added for tensor parallelism, continue to have no effect: where a row-parallel weight has an
    input column of zeros, so does A. A column-parallel layer's A is the same on every rank, even on
    a rank that has only such groups.
    """
    for number, linear in _list_adapted(model):
        weight = linear.adapter.linear_in.weight
        generator = torch.Generator().manual_seed((seed * 2**20 + number) % 2**63)
        linear.adapter.linear_out.weight.zero_()
        if isinstance(linear, ExpertLinear):
            drawn = linear.adapter.linear_in
            full = torch.empty(linear.adapter.count, *drawn.size)
            full.normal_(std=drawn.size[-1] ** -0.5, generator=generator)
            weight.copy_(drawn.take_part(full))
            continue
        full = torch.empty(weight.size(0), linear.input_size)
        full.normal_(std=linear.input_size**-0.5, generator=generator)
        if isinstance(linear, RowLinear):
            begin = linear.tp_group.rank() * weight.size(1)
            full = full[:, begin : begin + weight.size(1)]
            full[:, (linear.weight == 0).all(0).cpu()] = 0.0
        weight.copy_(full)


def train_adapters_alone(model: Any) -> None:
    """Freeze all of ``model`` except its adapters and its reward head."""
    model.requires_grad_(False)
    for _, linear in _list_adapted(model):
        linear.adapter.requires_grad_(True)
    if model.post_process:
        model.rm_head.requires_grad_(True)


@torch.no_grad()
def fold_adapters(model: torch.nn.Module) -> None:
    """Add each adapter's ``scale * B A`` to its layer's weight, and remove the adapter.

    The sum is computed in fp32, and rounded only once, to the weight's dtype.
    """
    for _, linear in _list_adapted(model):
        adapter = linear.adapter
        if isinstance(adapter, ExpertAdapter):
            low, high = adapter.matrices()
        else:
            low, high = adapter.linear_in.weight, adapter.linear_out.weight
        linear.weight.copy_(fold_into_weight(linear.weight, low, high, adapter.scale))
        linear.adapter = None


def fold_into_weight(weight: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """Compute ``W + scale * B A`` in fp32, and return it in the dtype of ``weight [out, in]``.

    ``low [rank, in]`` is A, ``high [out, rank]`` is B. Tensors of experts have one more axis in
    front, for the expert.
    """
    low = low.float() if high.dim() < 4 else low.float().unsqueeze(1)
    added = scale * (high.float() @ low)
    return (weight.float() + added).to(weight.dtype)


# Dropout that needs no state of a random generator.
#
# Each bit of a mask is a hash of the seed, the step, the token's record and position, the linear
# layer and the channel. So masks are the same for every parallel layout, when activations are
# recomputed, and after a resume.

_MASK = 2**64 - 1
# Odd multipliers without a regular bit pattern: those of SplitMix64 (Steele et al. 2014), and two
# of 31 bits that are chosen by the same rule.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHORT_FIRST, _SHORT_SECOND = 0x2C1B3C6D, 0x297A2D39


@dataclass(frozen=True)
class LoraDropout:
    """Dropout of the inputs of LoRA's A in training (Srivastava et al. 2014).

    Attributes:
        rate: fraction of the elements that are zeroed.
        seed: the run's seed; every seed gives different masks.
    """

    rate: float
    seed: int

    @classmethod
    def from_settings(cls, settings: LoraConfig, seed: int) -> LoraDropout | None:
        """Create dropout from the settings; None if the dropout rate or LoRA's rank is 0."""
        drops = settings.rank > 0 and settings.dropout > 0
        return cls(settings.dropout, seed) if drops else None

    def apply(self, x: Tensor, keys: Tensor, linear: int, first_channel: int) -> Tensor:
        """Zero the dropped elements of ``x [T, 1, in]``; the caller scales up the rest.

        Args:
            keys: ``[T]`` int32 from ``token_keys``.
            linear: number of the linear layer in the model.
            first_channel: index of ``x``'s first channel in the layer's whole input, which TP ranks
                may split.
        """
        numbers = torch.arange(first_channel, first_channel + x.size(-1), device=x.device)
        channels = _hash_tensor(numbers, _hash_numbers(self.seed, linear))
        bits = keys[:, None] + channels
        for shift, factor in ((15, _SHORT_FIRST), (12, _SHORT_SECOND)):
            bits ^= _shift_right(bits, shift, 32)
            bits *= factor
        is_dropped = bits < int(-(2**31) + self.rate * 2**32)
        return x.masked_fill(is_dropped[:, None], 0.0)

    def token_keys(self, batch: PackedBatch, step: int) -> Tensor:
        """Compute the hash key ``[T]`` int32 of every token of a pack, on its device.

        Args:
            step: training step, counted from 0; every step draws different masks.
        """
        lengths = batch.cu_seqlens.diff()
        prefixes = batch.prefixes.tolist()
        # A segment that is no other segment's prefix ends a sample, except the filler at the end.
        shared = set(prefixes)
        ends = [number for number in range(len(prefixes)) if number not in shared]
        if batch.filled:
            ends.pop()
        samples = _number_samples(batch.records)
        of_segment = [0] * len(prefixes)
        if samples:  # empty packs only keep expert parallel ranks in step
            for number, (record, place) in reversed(list(zip(ends, samples, strict=True))):
                key = _hash_numbers(self.seed, step, record, place)
                of_segment[number] = key
                if prefixes[number] >= 0:  # derive a shared prefix's key from its first sample
                    of_segment[prefixes[number]] = _hash_numbers(key)
        keys = torch.tensor(of_segment, dtype=torch.int64).repeat_interleave(lengths)
        return _hash_tensor(batch.position_ids, to_device(keys, batch.position_ids.device))


def _number_samples(records: Records) -> list[tuple[int, int]]:
    """List for each sample the id of its record, and the sample's number in the record."""
    bounds = records.sample_bounds.tolist()
    return [
        (record, place)
        for record, (start, end) in zip(records.ids.tolist(), pairwise(bounds), strict=True)
        for place in range(end - start)
    ]


def _hash_numbers(*numbers: int) -> int:
    """Hash integers into an int64 with SplitMix64."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) + _STEP) & _MASK
        mixed = ((mixed ^ mixed >> 30) * _FIRST) & _MASK
        mixed = ((mixed ^ mixed >> 27) * _SECOND) & _MASK
        mixed ^= mixed >> 31
    return _as_signed(mixed)


def _hash_tensor(numbers: Tensor, keys: Tensor | int) -> Tensor:
    """Hash int64 ``numbers`` together with ``keys`` into int32, by SplitMix64's finaliser."""
    mixed = numbers * _as_signed(_STEP) + keys
    mixed = (mixed ^ _shift_right(mixed, 30, 64)) * _as_signed(_FIRST)
    mixed = (mixed ^ _shift_right(mixed, 27, 64)) * _as_signed(_SECOND)
    return (mixed >> 32).to(torch.int32)


def _shift_right(numbers: Tensor, by: int, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's shift of signed integers repeats the sign bit."""
    return (numbers >> by).bitwise_and_((1 << (bits - by)) - 1)


def _as_signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
