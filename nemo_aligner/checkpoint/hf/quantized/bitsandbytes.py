"""Weights of bitsandbytes: nf4, fp4 and LLM.int8.

A 4-bit weight ``NAME`` is one flat list of codes, two in a byte, the first one in the high bits.
``NAME.absmax`` has a scale for each block of the list. With double quantization, the scales have 8
bits each: indices into ``NAME.nested_quant_map``, to be multiplied by the scale of their own block
(``NAME.nested_absmax``); then ``nested_offset`` is added. The tensor
``NAME.quant_state.bitsandbytes__nf4`` (or ``fp4``) is JSON with the sizes.

An 8-bit weight has one scale for each row, the largest absolute value, in ``SCB`` (LLM.int8,
arXiv:2208.07339).
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_aligner.checkpoint.hf.quantized.stored import (
    Options,
    QuantizedFormat,
    Tensors,
    compute_lazily,
    find_dtype,
    pop_tensor,
    put_weight,
)
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.models.quantized import NF4_VALUES
from nemo_aligner.utils.errors import CheckpointError, short, shown

METHOD = "bitsandbytes"
_DTYPES = {"U8": torch.uint8, "I8": torch.int8}
# fp4 has a sign, two bits of exponent and one of mantissa; its largest value, 12, becomes 1.
_FP4 = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_VALUES = {
    "nf4": torch.tensor(NF4_VALUES),
    "fp4": torch.tensor([*_FP4, *(-value for value in _FP4)]),
}
_STATE = ".quant_state.bitsandbytes__"
_INT8_LIMIT = 127
_ROWS = 0  # ``weight_format`` of a matrix that is stored row by row


def read_format(options: Options, dtype: torch.dtype | None) -> QuantizedFormat:
    """Choose between 4 and 8 bits; ``dtype`` is that of dequantized 8-bit weights.

    Raises:
        CheckpointError: an option is not supported.
    """
    is_4_bit = options.choose("load_in_4bit", True, False, default=False)
    options.choose("load_in_8bit", not is_4_bit, default=False)
    if not is_4_bit:
        # The format does not store the dtype; LLM.int8 computes in fp16.
        dequantize = partial(_dequantize_int8, dtype=dtype or torch.float16)
        return QuantizedFormat("int8 (bitsandbytes)", _DTYPES, dequantize)
    kind = options.choose("bnb_4bit_quant_type", "nf4", "fp4", default="fp4")
    options.choose("bnb_4bit_quant_storage", "uint8", default="uint8")
    return QuantizedFormat(f"{kind} (bitsandbytes)", _DTYPES, _dequantize_4_bits)


def _dequantize_4_bits(tensors: Tensors) -> list[str]:
    states = [name for name in tensors if _STATE in name]
    weights = []
    for name in states:
        weight, _, kind = name.partition(_STATE)
        state = _read_state(name, kind, tensors.pop(name))
        put_weight(tensors, weight, _open_4_bits(weight, _VALUES[kind], state, tensors))
        weights.append(weight)
    return weights


def _read_state(name: str, kind: str, stored: LazyTensor) -> Options:
    try:
        fields = json.loads(stored.read().numpy().tobytes())
    except ValueError as error:
        raise CheckpointError(
            f"tensor {short(name)}: it is not JSON ({short(error)}). Download the checkpoint again"
        ) from error
    if not isinstance(fields, dict) or kind not in _VALUES:
        raise CheckpointError(
            f"tensor {short(name)}: got {shown(fields)} of the type {short(kind)}, wanted the "
            f"settings of {' or '.join(_VALUES)}. Download the checkpoint again"
        )
    return Options(fields, f"tensor {short(name)}")


def _open_4_bits(name: str, values: Tensor, state: Options, tensors: Tensors) -> LazyTensor:
    size, dtype = state.fields.get("shape"), find_dtype(state.fields.get("dtype"))
    are_sizes = isinstance(size, list) and all(
        type(length) is int and length > 0 for length in size
    )
    if dtype is None or not isinstance(size, list) or not are_sizes:
        raise CheckpointError(
            f"{state.place}: got shape={shown(size)} and "
            f"dtype={shown(state.fields.get('dtype'))}, wanted a list of sizes, and float32, "
            "bfloat16 or float16. Download the checkpoint again"
        )
    count, block = math.prod(size), state.count("blocksize")
    codes = pop_tensor(tensors, name, torch.uint8, -(-count // 2), 1)
    scales = _open_scales(name, -(-count // block), state, tensors)
    tensors.pop(f"{name}.quant_map", None)  # a copy of ``values``

    def compute() -> Tensor:
        packed = codes.read().flatten()
        pairs = torch.stack([packed >> 4, packed & 0x0F], 1).flatten()[:count]
        return _scale_blocks(values[pairs.int()], scales(), block).view(size)

    return compute_lazily(name, tuple(size), dtype, compute)


def _open_scales(name: str, count: int, state: Options, tensors: Tensors) -> Any:
    """Return a function that reads the fp32 scales of ``count`` blocks."""
    if f"{name}.nested_absmax" not in tensors:
        return pop_tensor(tensors, f"{name}.absmax", torch.float32, count).read
    block, offset = state.count("nested_blocksize"), state.fields.get("nested_offset")
    if type(offset) is not float or not math.isfinite(offset):
        raise CheckpointError(
            f"{state.place}: got nested_offset={shown(offset)}, wanted a finite number. Download "
            "the checkpoint again"
        )
    codes = pop_tensor(tensors, f"{name}.absmax", torch.uint8, count)
    table = pop_tensor(tensors, f"{name}.nested_quant_map", torch.float32, 256)
    largest = pop_tensor(tensors, f"{name}.nested_absmax", torch.float32, -(-count // block))

    def read_scales() -> Tensor:
        return _scale_blocks(table.read()[codes.read().int()], largest.read(), block) + offset

    return read_scales


def _scale_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of a flat list of values by its scale; the last may be shorter."""
    blocks = pad(values, (0, -len(values) % block)).view(-1, block)
    return blocks.mul_(scales[:, None]).flatten()[: len(values)]


def _dequantize_int8(tensors: Tensors, dtype: torch.dtype) -> list[str]:
    modules = [name.removesuffix("SCB") for name in tensors if name.endswith(".SCB")]
    for module in modules:
        name, order = f"{module}weight", tensors.pop(f"{module}weight_format", None)
        if order is not None and (number := order.read().flatten().tolist()) != [_ROWS]:
            raise CheckpointError(
                f"tensor {short(module)}weight_format: got {shown(number)}, wanted {_ROWS} (row by "
                "row). Save the model again with a newer bitsandbytes"
            )
        stored = tensors.get(name)
        rows, columns = stored.shape if stored and len(stored.shape) == 2 else (0, 0)
        weight = pop_tensor(tensors, name, torch.int8, rows, columns)
        largest = pop_tensor(tensors, f"{module}SCB", torch.float32, rows)
        read = partial(_read_int8, weight, largest)
        put_weight(tensors, name, compute_lazily(name, (rows, columns), dtype, read))
    return [f"{module}weight" for module in modules]


def _read_int8(weight: LazyTensor, largest: LazyTensor) -> Tensor:
    return weight.read() * largest.read()[:, None] / _INT8_LIMIT
