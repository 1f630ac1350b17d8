"""Weights of compressed-tensors, the library with which llm-compressor stores models.

- ``pack-quantized``: signed integers of 4 or 8 bits, which are packed along the inputs after half
  their range was added. ``NAME.weight_packed [out, in / 8]``, ``weight_scale [out, groups]``,
  ``weight_shape``, for asymmetric weights ``weight_zero_point`` (packed along the outputs), and
  with ``actorder: group`` the group of each input in ``weight_g_idx``.
- ``float-quantized``: fp8 (E4M3) with a scale for the matrix, each row, a group of inputs, or a
  block, in ``NAME.weight_scale``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.quantized import block_fp8
from nemo_aligner.checkpoint.hf.quantized.integers import (
    SCALE_DTYPES,
    WORD_BITS,
    read_groups,
    scale_groups,
    unpack,
)
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
from nemo_aligner.utils.errors import CheckpointError, shown

METHOD = "compressed-tensors"
_PACKED, _FLOAT = "pack-quantized", "float-quantized"
_DTYPES = {"I32": torch.int32, "I64": torch.int64, **block_fp8.DTYPES}
# Scales of inputs, which are quantized only while the model runs.
_OF_INPUTS = (".input_scale", ".input_zero_point")


@dataclass(frozen=True)
class _Weights:
    """The options of all quantized weights of a checkpoint.

    Attributes:
        bits: bits of an element.
        is_symmetric: the weights have no zero points.
        strategy: which elements share a scale: those of the matrix ("tensor"), of a row
            ("channel"), of some inputs of a row ("group"), or of a block.
        group: inputs in a group.
        block: rows and columns of a block.
        dtype: dtype of the dequantized weights; None for that of their scales.
    """

    bits: int
    is_symmetric: bool
    strategy: str
    group: int
    block: block_fp8.Block
    dtype: torch.dtype | None

    def dequantize_integers(self, tensors: Tensors) -> list[str]:
        """Implement ``QuantizedFormat.dequantize`` for ``pack-quantized``."""
        ending = "_packed"
        names = [name.removesuffix(ending) for name in tensors if name.endswith(f".weight{ending}")]
        for name in names:
            put_weight(tensors, name, self._open_integers(name, tensors))
        return names

    def dequantize_floats(self, tensors: Tensors) -> list[str]:
        """Implement ``QuantizedFormat.dequantize`` for ``float-quantized``."""
        for name in [name for name in tensors if name.endswith(_OF_INPUTS)]:
            del tensors[name]
        fp8 = torch.float8_e4m3fn
        names = [name for name, tensor in tensors.items() if tensor.dtype is fp8]
        for name in names:
            put_weight(tensors, name, self._open_floats(name, tensors))
        return names

    def _open_integers(self, name: str, tensors: Tensors) -> LazyTensor:
        sizes = pop_tensor(tensors, f"{name}_shape", torch.int64, 2).read().tolist()
        rows, columns = sizes
        per_word = WORD_BITS // self.bits
        packed = pop_tensor(tensors, f"{name}_packed", torch.int32, rows, -(-columns // per_word))
        block = self._block_of(rows, columns)
        groups = -(-columns // block[1])
        scales = pop_tensor(tensors, f"{name}_scale", SCALE_DTYPES, rows, groups)
        zeros = index = None
        if not self.is_symmetric:
            words = -(-rows // per_word)
            zeros = pop_tensor(tensors, f"{name}_zero_point", torch.int32, words, groups)
        if f"{name}_g_idx" in tensors:
            index = pop_tensor(tensors, f"{name}_g_idx", torch.int32, columns)

        def compute() -> Tensor:
            # Half the range was added to the integers and to their zero points.
            zero_points = torch.full((groups, rows), 1 << self.bits - 1)
            if zeros is not None:
                zero_points = unpack(zeros.read(), self.bits, axis=0)[:rows].t()
            integers = unpack(packed.read(), self.bits, axis=1)[:, :columns].t()
            group_of_input = read_groups(f"{name}_g_idx", index, columns, block[1])
            return scale_groups(integers, zero_points, scales.read().t(), group_of_input)

        return compute_lazily(name, (rows, columns), self.dtype or scales.dtype, compute)

    def _open_floats(self, name: str, tensors: Tensors) -> LazyTensor:
        stored = tensors[name]
        rows, columns = stored.shape if len(stored.shape) == 2 else (0, 0)
        pop_tensor(tensors, name, stored.dtype, rows, columns)
        block = self._block_of(rows, columns)
        size = (-(-rows // block[0]), -(-columns // block[1]))
        expected: tuple[int, ...] = size
        if self.strategy == "tensor":
            is_scalar = f"{name}_scale" in tensors and tensors[f"{name}_scale"].shape == ()
            expected = () if is_scalar else (1,)
        scales = pop_tensor(tensors, f"{name}_scale", SCALE_DTYPES, *expected)

        def compute() -> Tensor:
            return block_fp8.dequantize(stored.read(), scales.read().view(size), block)

        return compute_lazily(name, (rows, columns), self.dtype or scales.dtype, compute)

    def _block_of(self, rows: int, columns: int) -> block_fp8.Block:
        """Return how many rows and columns of a matrix share a scale."""
        return {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "group": (1, self.group),
            "block": self.block,
        }[self.strategy]


def read_format(options: Options, dtype: torch.dtype | None) -> QuantizedFormat:
    """Read the options; the weights become ``dtype``, or the dtype of their scales.

    Raises:
        CheckpointError: an option is not supported.
    """
    name = options.choose("format", _PACKED, _FLOAT)
    options.choose("kv_cache_scheme", None)
    sparsity = options.fields.get("sparsity_config") or {}
    options.inside("sparsity_config", sparsity).choose("format", "dense", default="dense")
    fields = _read_weights(options.fields.get("config_groups"))
    weights = options.inside("config_groups: weights", fields)
    is_float = name == _FLOAT
    weights.choose("type", "float" if is_float else "int", default="int")
    strategies = ["channel", "group", *(["tensor", "block"] if is_float else [])]
    strategy = weights.choose("strategy", *strategies)
    stored = _Weights(
        bits=weights.choose("num_bits", *((8,) if is_float else (4, 8))),
        is_symmetric=weights.choose("symmetric", True, *(() if is_float else (False,))),
        strategy=strategy,
        group=weights.count("group_size") if strategy == "group" else 1,
        block=_read_block(weights) if strategy == "block" else (1, 1),
        dtype=dtype,
    )
    if is_float:
        return QuantizedFormat("fp8 (compressed-tensors)", _DTYPES, stored.dequantize_floats)
    kind = f"{stored.bits} bits (compressed-tensors)"
    return QuantizedFormat(kind, _DTYPES, stored.dequantize_integers)


def _read_weights(groups: object) -> dict[str, Any]:
    """Return the options of weights, which must be the same in all groups of modules."""
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    options = [fields for fields in weights if isinstance(fields, dict)]
    if not options or any(fields != options[0] for fields in options):
        raise CheckpointError(
            f"quantization_config: got config_groups={shown(groups)}, wanted groups whose weights "
            f"have the same options. {WHAT_TO_DO}"
        )
    return options[0]


def _read_block(weights: Options) -> block_fp8.Block:
    value = weights.fields.get("block_structure")
    block = block_fp8.read_block(value)
    if block is None:
        raise CheckpointError(
            f"{weights.place}: got block_structure={shown(value)}, wanted the rows and columns of "
            f"a block. {WHAT_TO_DO}"
        )
    return block
