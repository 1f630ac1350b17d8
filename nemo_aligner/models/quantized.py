"""Quantized weights of the frozen linear layers under LoRA (QLoRA, Dettmers et al. 2023).

A weight is stored in 4 or 8 bits, and dequantized for each matmul, in the forward and again in the
backward pass (arXiv:2305.14314). All operations are elementwise, or sums that do not depend on
their order, so the values are bit-identical on a CPU and a GPU. They are also the same for every
parallel layout:

- nf4 has blocks of 64 inputs in one row, and its second quantization groups the blocks along the
  axis that tensor parallelism does not split.
- int8 and fp8 have one scale for each output row, the maximum over the tensor parallel ranks.

bitsandbytes quantizes a weight as one flat list and subtracts one mean from all block scales. Both
would depend on the tensor parallel size, so this module has its own quantizer; for the same groups
its values are those of bitsandbytes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.config.kernels import PointwiseChoice
from nemo_aligner.config.model import BasePrecision
from nemo_aligner.distributed.collectives import gpu_computes_bf16
from nemo_aligner.models.pointwise.choice import why_unavailable
from nemo_aligner.models.shapes.quantized import CHUNK_ELEMENTS, NF4_BLOCK, NF4_GROUP
from nemo_aligner.utils.errors import one_line

logger = logging.getLogger(__name__)

# The values of NormalFloat 4 (QLoRA, appendix E): quantiles of N(0, 1), scaled to [-1, 1].
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_INT8_LIMIT, _FP8_LIMIT = 127.0, 448.0


class QuantizedWeight(ABC):
    """A matrix ``[out, in]`` in few bits.

    Attributes:
        dtype: dtype of the dequantized values, to which the scales are rounded, too. So a
            dequantized matrix has its scales among its values, and can be packed again losslessly.
    """

    dtype: torch.dtype

    def dequantize(self) -> Tensor:
        """Return the matrix ``[out, in]`` in ``dtype``."""
        is_by_triton = uses_triton(self.tensors()[0].device)
        return self.dequantize_by_triton() if is_by_triton else self.dequantize_by_torch()

    @abstractmethod
    def dequantize_by_torch(self) -> Tensor:
        """Dequantize by torch's operations, on any device."""

    @abstractmethod
    def dequantize_by_triton(self) -> Tensor:
        """Dequantize by one Triton kernel, with the bits of torch's operations."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of this weight."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """List the tensors that store this weight."""


@dataclass(frozen=True)
class _BlockScales:
    """Scales of nf4's blocks in 8 bits: ``table[codes] * largest + mean`` in each group.

    Attributes:
        codes: ``[rows, blocks]`` uint8, indices into ``_dynamic_table``.
        largest, means: ``[rows, groups]`` fp32.
        is_transposed: the rows are the columns of blocks, as in a row-parallel layer.
    """

    codes: Tensor
    largest: Tensor
    means: Tensor
    is_transposed: bool

    @classmethod
    def quantize(cls, scales: Tensor, is_transposed: bool) -> _BlockScales:
        """Quantize ``scales [out, blocks]`` fp32 in groups of up to ``NF4_GROUP``."""
        rows = scales.t().contiguous() if is_transposed else scales
        table = _dynamic_table(rows.device)
        middles = (table[1:] + table[:-1]) / 2
        codes, largest, means = [], [], []
        for group in rows.split(NF4_GROUP, dim=1):
            # Sum in float64, where the order of a sum changes nothing after rounding to fp32.
            mean = group.double().mean(1, keepdim=True).float()
            centred = group - mean
            limit = centred.abs().amax(1, keepdim=True)
            codes.append(torch.bucketize(centred / _not_zero(limit), middles, out_int32=True))
            largest.append(limit)
            means.append(mean)
        stored = torch.cat(codes, 1).to(torch.uint8)
        return cls(stored, torch.cat(largest, 1), torch.cat(means, 1), is_transposed)

    def dequantize(self) -> Tensor:
        """Return the scales ``[out, blocks]`` fp32."""
        values = _dynamic_table(self.codes.device).index_select(0, self.codes.int().flatten())
        values = values.view(self.codes.shape)
        for group, largest, mean in zip(
            values.split(NF4_GROUP, dim=1), self.largest.t(), self.means.t(), strict=True
        ):
            group.mul_(largest[:, None]).add_(mean[:, None])
        return values.t() if self.is_transposed else values


class Nf4Weight(QuantizedWeight):
    """NormalFloat 4: two values in a byte, one scale for a block of 64 values of a row."""

    def __init__(self, codes: Tensor, scales: _BlockScales | Tensor, dtype: torch.dtype) -> None:
        self._codes, self._scales, self.dtype = codes, scales, dtype

    @classmethod
    def quantize(cls, weight: Tensor, is_transposed: bool) -> Nf4Weight:
        """Quantize ``weight [out, in]``, and its blocks' scales to 8 bits.

        Args:
            is_transposed: group the scales of a column of blocks, rather than those of a row.
        """
        largest = _by_blocks(weight).abs().amax(-1)
        codes = _nf4_codes(weight, largest)
        return cls(codes, _BlockScales.quantize(largest.float(), is_transposed), weight.dtype)

    @classmethod
    def pack(cls, weight: Tensor) -> Nf4Weight:
        """Pack the dequantized ``weight``, with the largest value of each block as its scale."""
        largest = _by_blocks(weight).abs().amax(-1)
        return cls(_nf4_codes(weight, largest), largest, weight.dtype)

    def dequantize_by_torch(self) -> Tensor:
        scales = self._dense_scales()
        rows, columns = self._codes.size(0), 2 * self._codes.size(1)
        weight = torch.empty(rows, columns, dtype=self.dtype, device=self._codes.device)
        pairs = _nf4_pairs(weight.device)
        for chunk in _row_chunks(rows, columns):
            values = F.embedding(self._codes[chunk].int(), pairs)
            values = values.view(-1, columns // NF4_BLOCK, NF4_BLOCK)
            weight[chunk] = values.mul_(scales[chunk].float()[..., None]).view(-1, columns)
        return weight

    def dequantize_by_triton(self) -> Tensor:
        table = _nf4_values(self._codes.device)
        return _triton_kernels().look_up_pairs(self._codes, self._dense_scales(), table, self.dtype)

    def _dense_scales(self) -> Tensor:
        """Return the scales ``[out, blocks]``."""
        scales = self._scales
        return scales if isinstance(scales, Tensor) else scales.dequantize().to(self.dtype)

    def tensors(self) -> list[Tensor]:
        scales = self._scales
        if isinstance(scales, Tensor):
            return [self._codes, scales]
        return [self._codes, scales.codes, scales.largest, scales.means]


class RowScaledWeight(QuantizedWeight):
    """A byte for each value, int8 or fp8 (e4m3), and one scale for each row."""

    def __init__(self, values: Tensor, largest: Tensor) -> None:
        self._values, self._largest, self.dtype = values, largest, largest.dtype

    @classmethod
    def quantize(cls, weight: Tensor, dtype: torch.dtype, group: Any) -> RowScaledWeight:
        """Quantize ``weight [out, in]``; collective if ``group`` splits the rows over ranks.

        Args:
            dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
            group: the process group that splits the inputs; None if each rank has whole rows.
        """
        largest = weight.abs().amax(1)
        if group is not None and group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        limit = _limit_of(dtype, weight.device)
        values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        for chunk in _row_chunks(*weight.shape):
            scaled = weight[chunk].float() / _not_zero(largest[chunk].float())[:, None] * limit
            values[chunk] = (scaled.round() if dtype is torch.int8 else scaled).to(dtype)
        return cls(values, largest)

    def dequantize_by_torch(self) -> Tensor:
        values_type, device = self._values.dtype, self._values.device
        weight = torch.empty(self._values.shape, dtype=self.dtype, device=device)
        for chunk in _row_chunks(*weight.shape):
            # Divide by a tensor: CUDA multiplies by the rounded inverse of a number instead.
            values = self._values[chunk].float().div_(_limit_of(values_type, device))
            weight[chunk] = values.mul_(self._largest[chunk].float()[:, None])
        return weight

    def dequantize_by_triton(self) -> Tensor:
        codes = self._values.view(torch.uint8)
        table = _values_of(self._values.dtype, self._values.device)
        return _triton_kernels().look_up_rows(codes, self._largest, table)

    def tensors(self) -> list[Tensor]:
        return [self._values, self._largest]


def quantize(
    weight: Tensor, precision: BasePrecision, *, splits_inputs: bool, group: Any = None
) -> QuantizedWeight:
    """Quantize this rank's part of a frozen weight ``[out, in]``; collective for int8 and fp8.

    Args:
        splits_inputs: tensor parallelism splits the inputs of this linear layer, not its outputs.
        group: the tensor parallel process group; None if one rank has the whole weight.
    """
    if precision is BasePrecision.nf4:
        return Nf4Weight.quantize(weight, splits_inputs)
    return _quantize_rows(weight, precision, group if splits_inputs else None)


def pack(
    weight: Tensor, precision: BasePrecision, *, splits_inputs: bool, group: Any = None
) -> QuantizedWeight | None:
    """Quantize a dequantized weight without changing a value; None if that is not possible.

    It is not possible for values that were rounded after dequantization, as in a model that is
    loaded in another precision than that of its training.
    """
    packed: QuantizedWeight
    if precision is BasePrecision.nf4:
        if weight.size(1) % NF4_BLOCK:  # this rank has parts of blocks
            return None
        packed = Nf4Weight.pack(weight)
    else:
        packed = _quantize_rows(weight, precision, group if splits_inputs else None)
    return packed if torch.equal(packed.dequantize(), weight) else None


def _quantize_rows(weight: Tensor, precision: BasePrecision, group: Any) -> RowScaledWeight:
    dtype = torch.int8 if precision is BasePrecision.int8 else torch.float8_e4m3fn
    return RowScaledWeight.quantize(weight, dtype, group)


def _by_blocks(weight: Tensor) -> Tensor:
    return weight.view(weight.size(0), -1, NF4_BLOCK)


def _nf4_codes(weight: Tensor, largest: Tensor) -> Tensor:
    """Return the nearest NF4 codes, two in a byte ``[out, in / 2]``, the first in the high bits."""
    table = _nf4_values(weight.device)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.empty(weight.size(0), weight.size(1) // 2, dtype=torch.uint8, device=table.device)
    for chunk in _row_chunks(*weight.shape):
        scales = _not_zero(largest[chunk].float())[..., None]
        nearest = torch.bucketize(_by_blocks(weight[chunk]).float() / scales, middles)
        first, second = nearest.to(torch.uint8).view(-1, weight.size(1) // 2, 2).unbind(-1)
        codes[chunk] = first << 4 | second
    return codes


# The tables are made once for each device: a weight reads them in every matmul, and copying them to
# a GPU each time would make the host wait.


@cache
def _nf4_values(device: torch.device) -> Tensor:
    return torch.tensor(NF4_VALUES, device=device)


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """Return ``[256, 2]`` fp32: the two values that each byte stands for."""
    table = _nf4_values(device)
    return torch.cartesian_prod(table, table)


@cache
def _dynamic_table(device: torch.device) -> Tensor:
    """Return the 256 values of signed dynamic 8-bit quantization, in ascending order.

    Each decade up to 1 has twice as many values as the one below it (Dettmers et al. 2022,
    "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).
    """
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1)
        middles = 10.0 ** (decade - 6) * (bounds[1:] + bounds[:-1]) / 2
        values += [middles, -middles]
    return torch.cat(values).sort().values.to(device)


@cache
def _limit_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``[]`` fp32: the largest int8 or fp8 value, which a row's largest value becomes."""
    return torch.tensor(_INT8_LIMIT if dtype is torch.int8 else _FP8_LIMIT, device=device)


@cache
def _values_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``[256]`` fp32: the value of each int8 or fp8 byte, at most 1."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    return codes.float().div_(_limit_of(dtype, device))


@cache
def uses_triton(device: torch.device) -> bool:
    """Tell if weights on ``device`` are dequantized by Triton: on a GPU, if a trial succeeds."""
    if why_unavailable(PointwiseChoice.triton, device) is not None:
        return False
    try:
        try_triton(device)
    except Exception as error:
        logger.warning(
            "Triton's kernels cannot dequantize weights here, so torch does, which is slower: %s",
            one_line(error),
        )
        return False
    return True


def try_triton(device: torch.device) -> None:
    """Dequantize a small weight of each precision by Triton, and compare it with torch's.

    Raises:
        RuntimeError: a value has other bits, or a kernel failed.
    """
    has_bf16 = device.type != "cuda" or gpu_computes_bf16()
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    weight = torch.linspace(-1, 1, 4 * 2 * NF4_BLOCK).view(4, -1).to(device, dtype)
    for precision in BasePrecision:
        stored = quantize(weight, precision, splits_inputs=False)
        if not torch.equal(stored.dequantize_by_triton(), stored.dequantize_by_torch()):
            raise RuntimeError(f"a value of {precision.value} has other bits than torch's")


def _triton_kernels() -> Any:
    # Imported only where it can be used: a CPU build of torch comes without Triton.
    from nemo_aligner.models.pointwise import triton_dequantize

    return triton_dequantize


def _not_zero(scales: Tensor) -> Tensor:
    return scales.masked_fill(scales == 0, 1.0)


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)
