"""LoRA: adapter matrices beside the linear layers, their dropout, and folding them into the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn.utils import skip_init

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.models.backbone import LastLayer
from nemo_aligner.models.linear import ColumnLinear, RowLinear, invariant_linear, sum_partial
from nemo_aligner.models.shape import LINEARS, LoraShape
from nemo_aligner.utils.host_transfer import to_device

# LoRA's matrices beside the linear layers of a model: drawn, trained, folded into the weights.
#
# Tensor parallelism splits them as it does the layer's own weight: of a layer that is split by its
# outputs B, of one that is split by its inputs A. What is between them, ``[T, rank]``, is all that
# the ranks send each other.

_ParallelLinear = ColumnLinear | RowLinear


class LoraAdapter(torch.nn.Module):
    """``x [T, 1, in]`` -> ``scale * B A x``, split and summed as the linear layer beside it has it.

    It has the layer's own group, and its way with sequence parallelism.
    """

    def __init__(self, layer: _ParallelLinear, lora: LoraShape) -> None:
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
        self._dropout: LoraDropout | None = None
        split, whole = self.linear_in.weight, self.linear_out.weight
        if self._is_by_outputs:
            split, whole = whole, split
        set_tensor_model_parallel_attributes(split, True, 0 if self._is_by_outputs else 1, 1)
        # It sees a rank's tokens alone, so its gradient has to be summed over the ranks.
        whole.sequence_parallel = layer.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, rows: int | None) -> Tensor:
        """``rows`` as the layer has them now (``rows_now``)."""
        scale = self.scale
        if self._dropout is not None and self.training:
            scale /= 1 - self._dropout.rate
            x = self._dropped(x, self._dropout)
        low = _product(x, self.linear_in, rows) * scale
        if not self._is_by_outputs:
            low = sum_partial(low, self._group, self._is_split, rows)
        elif self._is_split:
            low = gather_from_sequence_parallel_region(low, group=self._group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self._group)
        return _product(low, self.linear_out, rows)

    def drop_out(self, dropout: LoraDropout, number: int, reads_rows: bool) -> None:
        """Have ``dropout`` in training, as the linear layer ``number``; see ``LoraDropout``."""
        self._dropout, self._number, self._reads_rows = dropout, number, reads_rows

    def _dropped(self, x: Tensor, dropout: LoraDropout) -> Tensor:
        tokens = channels = 0
        if not self._is_by_outputs:
            channels = self._group.rank() * x.size(-1)
        elif self._is_split:
            tokens = self._group.rank() * x.size(0)
        return dropout.apply(x, self._number, self._reads_rows, tokens, channels)


def _product(x: Tensor, linear: torch.nn.Linear, rows: int | None) -> Tensor:
    # Called as a module, as Megatron waits there for weights that are still on their way.
    return linear(x) if rows is None else invariant_linear(x, linear.weight, None, rows)


def attach_adapters(model: Any, lora: LoraShape) -> None:
    """Give the linear layers of ``model``'s decoder their adapters, all zero."""
    for layer in model.decoder.layers:
        for name in lora.linears:
            linear = layer.get_submodule(name)
            linear.adapter = LoraAdapter(linear, lora)


def _adapted(model: Any) -> Iterator[tuple[int, _ParallelLinear]]:
    """Every linear layer that has an adapter, and a number of its own in the whole model."""
    for layer in model.decoder.layers:
        for index, name in enumerate(LINEARS.values()):
            linear = layer.get_submodule(name)
            if linear.adapter is not None:
                yield len(LINEARS) * layer.layer_number + index, linear


@torch.no_grad()
def draw_adapters(model: torch.nn.Module, seed: int) -> None:
    """A from a normal distribution of variance ``1 / in``, B zero: nothing is added yet.

    The same at any layout: each A is drawn whole, on the CPU, by a generator of its own. Inputs
    that a row-parallel weight has only zeros for get zeros: query groups that were added for tensor
    parallelism stay without effect. A column-parallel layer's A is the same on every rank, also
    where a rank's own outputs are such groups alone.
    """
    for number, linear in _adapted(model):
        weight = linear.adapter.linear_in.weight
        generator = torch.Generator().manual_seed((seed * 2**20 + number) % 2**63)
        whole = torch.empty(weight.size(0), linear.input_size)
        whole.normal_(std=linear.input_size**-0.5, generator=generator)
        if isinstance(linear, RowLinear):
            begin = linear.tp_group.rank() * weight.size(1)
            whole = whole[:, begin : begin + weight.size(1)]
            whole[:, (linear.weight == 0).all(0).cpu()] = 0.0
        weight.copy_(whole)
        linear.adapter.linear_out.weight.zero_()


def train_adapters_alone(model: Any, dropout: LoraDropout | None = None) -> None:
    """Freeze all of ``model`` but the adapters and the reward head; these have ``dropout``."""
    model.requires_grad_(False)
    for _, linear in _adapted(model):
        linear.adapter.requires_grad_(True)
    if model.post_process:
        model.rm_head.requires_grad_(True)
    if dropout is not None:
        _drop_out(model, dropout)


def _drop_out(model: Any, dropout: LoraDropout) -> None:
    model.lora_dropout = dropout
    # Past attention the last layer has the rows that the head reads, and no others.
    past = [
        layer.get_submodule(name)
        for layer in model.decoder.layers
        if isinstance(layer, LastLayer)
        for name in list(LINEARS.values())[1:]
    ]
    for number, linear in _adapted(model):
        linear.adapter.drop_out(dropout, number, reads_rows=linear in past)
    for layer in model.decoder.layers:
        # Again where a layer is computed again: then another pack's may have been the last.
        layer.register_forward_pre_hook(partial(_enter, dropout), with_kwargs=True)


def _enter(dropout: LoraDropout, layer: Any, inputs: Any, options: dict[str, Any]) -> None:
    if layer.training:
        dropout.enter(options["packed_seq_params"])


@torch.no_grad()
def fold_adapters(model: torch.nn.Module) -> None:
    """Add what the adapters add to the weights, rounded once, and leave them out from now on."""
    for _, linear in _adapted(model):
        adapter = linear.adapter
        low, high = adapter.linear_in.weight, adapter.linear_out.weight
        linear.weight.copy_(folded(linear.weight, low, high, adapter.scale))
        linear.adapter = None


def folded(weight: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """``W + scale * B A`` in the dtype of ``weight [out, in]``, added in fp32.

    ``low [rank, in]`` is A, ``high [out, rank]`` is B.
    """
    added = scale * (high.float() @ low.float())
    return (weight.float() + added).to(weight.dtype)


# Dropout of what LoRA reads, without a generator's state.
#
# Whether a number is left out is a function of the seed, the step, the token's record and position,
# the linear layer and the channel. So it is the same at any layout, for a layer that is computed
# again, and for a run that goes on.

_KEYS = "dropout keys"
_MASK = 2**64 - 1
# Odd, and without a pattern in their bits: those of SplitMix64 (Steele et al. 2014), and two of
# 31 bits by the same measure.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHORT_FIRST, _SHORT_SECOND = 0x2C1B3C6D, 0x297A2D39


class LoraDropout:
    """Sets a share ``rate`` of what every A reads to zero, in training (Srivastava et al. 2014).

    ``step`` is the trainer's.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rate = rate
        self.step = 0
        self._seed = seed
        self._keys = self._keys_of_rows = torch.zeros(0, dtype=torch.int32)

    def begin(self, batch: PackedBatch, segments: Any) -> None:
        """Before a pack's forward pass; ``segments`` are its ``PackedSegments``."""
        segments.remembered(_KEYS, lambda: self._token_keys(batch))

    def enter(self, segments: Any) -> None:
        """Before a layer's forward pass on a pack: others may be between that and its backward."""
        self._keys = segments.remembered(_KEYS, _not_begun)
        self._keys_of_rows = self._keys[segments.last_token]

    def apply(
        self, x: Tensor, linear: int, reads_rows: bool, first_token: int, first_channel: int
    ) -> Tensor:
        """``x [T, 1, in]`` without what is left out; the rest is not scaled up.

        Args:
            linear: a number of the linear layer's own in the model.
            reads_rows: T are the rows that the head reads, and not the pack's tokens.
            first_token: which of them all ``x`` begins with, where the ranks share them.
            first_channel: the same of channels.
        """
        keys = self._keys_of_rows if reads_rows else self._keys
        keys = keys[first_token : first_token + x.size(0)]
        numbers = torch.arange(first_channel, first_channel + x.size(-1), device=x.device)
        channels = _mixed(numbers, _mixed_number(self._seed, linear))
        bits = keys[:, None] + channels
        for shift, factor in ((15, _SHORT_FIRST), (12, _SHORT_SECOND)):
            bits ^= _shifted(bits, shift, 32)
            bits *= factor
        left_out = bits < int(-(2**31) + self.rate * 2**32)
        return x.masked_fill(left_out[:, None], 0.0)

    def _token_keys(self, batch: PackedBatch) -> Tensor:
        """``[T]`` int32 of every token, on its device."""
        lengths = batch.cu_seqlens.diff()
        prefixes = batch.prefixes.tolist()
        records = batch.records
        sizes = records.sizes.tolist()
        owners = [
            (record, place)
            for record, size in zip(records.ids.tolist(), sizes, strict=True)
            for place in range(size)
        ]
        # Sequences end with segments that none begins with, in order; then there may be a filler.
        begun = set(prefixes)
        ends = [number for number in range(len(prefixes)) if number not in begun]
        of_segment = [0] * len(prefixes)
        for number, (record, place) in reversed(list(zip(ends, owners, strict=False))):
            key = _mixed_number(self._seed, self.step, record, place)
            of_segment[number] = key
            if prefixes[number] >= 0:  # the first that begins with it gives it its key
                of_segment[prefixes[number]] = _mixed_number(key)
        keys = torch.tensor(of_segment, dtype=torch.int64).repeat_interleave(lengths)
        return _mixed(batch.position_ids, to_device(keys, batch.position_ids.device))


def _not_begun() -> Tensor:
    raise RuntimeError("a layer with dropout was run on a pack that the model has not begun")


def _mixed_number(*numbers: int) -> int:
    """An int64 in which every bit of every number counts, by SplitMix64."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) + _STEP) & _MASK
        mixed = ((mixed ^ mixed >> 30) * _FIRST) & _MASK
        mixed = ((mixed ^ mixed >> 27) * _SECOND) & _MASK
        mixed ^= mixed >> 31
    return _signed(mixed)


def _mixed(numbers: Tensor, keys: Tensor | int) -> Tensor:
    """int32 of int64 ``numbers`` and their ``keys``, in the same way."""
    mixed = numbers * _signed(_STEP) + keys
    mixed = (mixed ^ _shifted(mixed, 30, 64)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27, 64)) * _signed(_SECOND)
    return (mixed >> 32).to(torch.int32)


def _shifted(numbers: Tensor, by: int, bits: int) -> Tensor:
    """``numbers >> by`` as if they had no sign, of which torch would fill in copies."""
    return (numbers >> by).bitwise_and_((1 << (bits - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
