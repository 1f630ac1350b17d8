"""Weights of GPTQ and AWQ: integers of a few bits, packed into int32 words.

Both store a matrix ``[in, out]`` as integers, with a scale and a zero point for each group of
inputs: a value is ``(integer - zero) * scale``. The tensors of a module:

- ``qweight``: the integers. GPTQ (arXiv:2210.17323) packs those of successive inputs into a word,
  the first one in the lowest bits. AWQ (arXiv:2306.00978) packs eight outputs, in another order.
- ``qzeros``: the zero points ``[groups, out]``. GPTQ packs outputs in their order, AWQ as in
  ``qweight``. GPTQ's first format stores zero points minus one, its second one (``gptq_v2``) the
  zero points themselves.
- ``scales [groups, out]``; for GPTQ also ``g_idx [in]``, the group of each input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.quantized.stored import (
    WHAT_TO_DO,
    Options,
    QuantizedFormat,
    Tensors,
    compute_lazily,
    pop_tensor,
    put_weight,
)
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.utils.errors import CheckpointError, short, shown

GPTQ, AWQ = "gptq", "awq"
WORD_BITS = 32
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DTYPES = {"I32": torch.int32}
# Where AWQ puts each of eight outputs: the first one in the lowest bits, the second one in the
# fifth place.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class _Packing:
    """How the modules of a checkpoint are packed.

    Attributes:
        bits: bits of an integer.
        group: inputs in a group; None if all inputs are one group.
        is_awq: AWQ; otherwise GPTQ.
        zero_shift: what to add to each stored zero point.
        dtype: dtype of the dequantized weights; None for that of their scales.
    """

    bits: int
    group: int | None
    is_awq: bool
    zero_shift: int
    dtype: torch.dtype | None

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    def dequantize(self, tensors: Tensors) -> list[str]:
        """Implement ``QuantizedFormat.dequantize``."""
        ending = "qweight"
        modules = [name.removesuffix(ending) for name in tensors if name.endswith(f".{ending}")]
        for module in modules:
            put_weight(tensors, f"{module}weight", self._open(module, tensors))
        return [f"{module}weight" for module in modules]

    def _open(self, module: str, tensors: Tensors) -> LazyTensor:
        size = tensors[f"{module}qweight"].shape
        rows, columns = size if len(size) == 2 else (0, 0)
        packed = pop_tensor(tensors, f"{module}qweight", torch.int32, rows, columns)
        inputs = rows if self.is_awq else rows * self.per_word
        outputs = columns * self.per_word if self.is_awq else columns
        groups = 1 if self.group is None else -(-inputs // self.group)
        num_zero_words = -(-outputs // self.per_word)
        zeros = pop_tensor(tensors, f"{module}qzeros", torch.int32, groups, num_zero_words)
        scales = pop_tensor(tensors, f"{module}scales", SCALE_DTYPES, groups, outputs)
        index = None
        if not self.is_awq and f"{module}g_idx" in tensors:
            index = pop_tensor(tensors, f"{module}g_idx", torch.int32, inputs)

        def compute() -> Tensor:
            group_of_input = read_groups(f"{module}g_idx", index, inputs, self.group or inputs)
            return scale_groups(
                self._unpack(packed.read(), axis=1 if self.is_awq else 0),
                self._unpack(zeros.read() + self._shift_of_word(), axis=1)[:, :outputs],
                scales.read(),
                group_of_input,
            )

        dtype = self.dtype or scales.dtype
        return compute_lazily(f"{module}weight", (outputs, inputs), dtype, compute)

    def _unpack(self, words: Tensor, axis: int) -> Tensor:
        integers = unpack(words, self.bits, axis)
        if self.is_awq:
            integers = integers.view(len(integers), -1, len(_AWQ_PLACES))[..., _AWQ_PLACES]
        return integers.flatten(1)

    def _shift_of_word(self) -> int:
        """Offset of a word of zero points; a carry undoes the borrow of a zero point of 0."""
        return sum(self.zero_shift << place for place in range(0, WORD_BITS, self.bits))


def read_gptq(options: Options, dtype: torch.dtype | None) -> QuantizedFormat:
    """Read the options of GPTQ; the weights become ``dtype``, or the dtype of their scales.

    Raises:
        CheckpointError: an option is not supported.
    """
    bits = options.choose("bits", 2, 4, 8)
    versions = ("gptq", "gptq_v2")
    version = options.choose(
        _first(options, "checkpoint_format", "format"), *versions, default=GPTQ
    )
    _check_dynamic(options.fields.get("dynamic"))
    packing = _Packing(bits, _read_group(options, "group_size"), False, version == GPTQ, dtype)
    return QuantizedFormat(f"{bits} bits (GPTQ)", _DTYPES, packing.dequantize)


def read_awq(options: Options, dtype: torch.dtype | None) -> QuantizedFormat:
    """Read the options of AWQ; the weights become ``dtype``, or the dtype of their scales.

    Raises:
        CheckpointError: an option is not supported.
    """
    bits = options.choose(_first(options, "bits", "w_bit"), 4)
    options.choose("zero_point", True, default=True)
    options.choose("backend", "autoawq", "auto", "gemm", default="auto")
    version = _first(options, "version", "format", "checkpoint_format")
    options.choose(version, "gemm", "GEMM", default="gemm")
    group = _read_group(options, _first(options, "group_size", "q_group_size"))
    packing = _Packing(bits, group, True, False, dtype)
    return QuantizedFormat(f"{bits} bits (AWQ)", _DTYPES, packing.dequantize)


def _first(options: Options, *names: str) -> str:
    """Return the first of an option's names that has a value; the first one if none has."""
    return next((name for name in names if options.fields.get(name) is not None), names[0])


def _read_group(options: Options, name: str) -> int | None:
    return None if options.fields.get(name) == -1 else options.count(name, 128)


def _check_dynamic(dynamic: object) -> None:
    """Reject GPTQModel's options of single modules; those that only exclude modules are fine."""
    if dynamic is None or dynamic is False:
        return
    rules = dynamic if isinstance(dynamic, dict) else {"": dynamic}
    changed = [name for name in rules if not str(name).startswith("-:")]
    if changed:
        raise CheckpointError(
            f"quantization_config: got dynamic={shown(dynamic)}, which sets options of single "
            f"modules ({short(changed[0])}), and is not supported. {WHAT_TO_DO}"
        )


def unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """Unpack int32 ``words [rows, columns]`` along ``axis``, the lowest bits first, to uint8."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    shifts = shifts if axis else shifts[:, None]
    integers = words.unsqueeze(axis + 1) >> shifts & (1 << bits) - 1
    return integers.to(torch.uint8).flatten(axis, axis + 1)


def read_groups(name: str, index: LazyTensor | None, inputs: int, size: int) -> Tensor:
    """Return the group of each input ``[inputs]``: ``index``, or ``size`` inputs after each other.

    Args:
        name: name of ``index``, for errors.

    Raises:
        CheckpointError: a group does not exist.
    """
    if index is None:
        return torch.arange(inputs) // size
    groups, count = index.read(), -(-inputs // size)
    first, last = (int(bound) for bound in groups.aminmax())
    if first < 0 or last >= count:
        raise CheckpointError(
            f"tensor {short(name)}: got groups from {first} to {last}, wanted 0 to {count - 1}. "
            "Download the checkpoint again"
        )
    return groups.long()


def scale_groups(integers: Tensor, zeros: Tensor, scales: Tensor, group_of_input: Tensor) -> Tensor:
    """Return the dequantized matrix ``[out, in]`` in fp32.

    Args:
        integers: ``[in, out]`` uint8.
        zeros, scales: ``[groups, out]``.
        group_of_input: ``[in]``.
    """
    weight = integers.float()
    weight -= zeros.float()[group_of_input]
    weight *= scales.float()[group_of_input]
    return weight.t().contiguous()
