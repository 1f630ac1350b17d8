"""Find out how a checkpoint's weights are quantized, and dequantize them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nemo_aligner.checkpoint.hf.quantized import (
    bitsandbytes,
    block_fp8,
    compressed_tensors,
    integers,
    mxfp4,
)
from nemo_aligner.checkpoint.hf.quantized.stored import (
    WHAT_TO_DO,
    Options,
    QuantizedFormat,
    Tensors,
    UnreadableTensor,
    find_dtype,
)
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.config.dtypes import format_of, safetensors_dtypes
from nemo_aligner.utils.errors import CheckpointError, short, shown

_READERS: dict[str, Callable[[Options, torch.dtype | None], QuantizedFormat]] = {
    bitsandbytes.METHOD: bitsandbytes.read_format,
    integers.GPTQ: integers.read_gptq,
    integers.AWQ: integers.read_awq,
    compressed_tensors.METHOD: compressed_tensors.read_format,
    block_fp8.METHOD: block_fp8.read_format,
    mxfp4.METHOD: mxfp4.read_format,
}
_MODEL_OF_MXFP4 = "gpt_oss"
# A model that transformers loaded from a GGUF file and saved unquantized keeps this method.
_UNQUANTIZED = "gguf"
# Options that list modules with unquantized weights.
_SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules")


def read_format(config: Mapping[str, Any]) -> QuantizedFormat | None:
    """Return the format of a checkpoint's weights; None if they are not quantized.

    Args:
        config: content of ``config.json``.

    Raises:
        CheckpointError: the method or one of its options is not supported.
    """
    fields = config.get("quantization_config")
    if fields is None:
        return None
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if method is None and isinstance(fields, dict) and _is_old_bitsandbytes(fields):
        method = bitsandbytes.METHOD
    if method == _UNQUANTIZED:
        return None
    reader = _READERS.get(method) if isinstance(method, str) else None
    is_other_mxfp4 = method == mxfp4.METHOD and config.get("model_type") != _MODEL_OF_MXFP4
    if reader is None or is_other_mxfp4:
        raise CheckpointError(
            f"quantization_config: got {shown(fields)}; quantized weights are supported with the "
            f"quant_method {', '.join(_READERS)} ({mxfp4.METHOD} only for gpt-oss). {WHAT_TO_DO}"
        )
    return reader(Options(fields), read_dtype(config))


def _is_old_bitsandbytes(fields: Mapping[str, Any]) -> bool:
    """Tell if these are options that transformers wrote before it had ``quant_method``."""
    return any(fields.get(name) is True for name in ("load_in_4bit", "load_in_8bit"))


def read_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the model's dtype in a ``config.json``, also of a decoder in a larger model."""
    inside = config.get("text_config")
    for fields in (config, inside if isinstance(inside, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if (dtype := find_dtype(fields.get(name))) is not None:
                return dtype
    return None


def with_dequantized(
    tensors: Mapping[str, LazyTensor], quantized: QuantizedFormat, config: Mapping[str, Any]
) -> tuple[Tensors, list[str]]:
    """Replace the stored tensors of each quantized weight by one lazy tensor.

    Returns:
        All tensors by name, and notes for the user: none if no weight is quantized, as after
        merging QLoRA. Tensors in a quantized dtype outside modules with a weight, such as masks of
        bytes, are ``UnreadableTensor``.

    Raises:
        CheckpointError: a weight's tensors are incomplete or do not fit each other, or belong to a
            module that the config lists as unquantized.
    """
    plain = dict(tensors)
    names = quantized.dequantize(plain)
    for option in _SKIPPED:
        _check_skipped(option, config["quantization_config"].get(option), names)
    dtypes = set(safetensors_dtypes().values())
    for name, tensor in plain.items():
        if tensor.dtype not in dtypes and not isinstance(tensor, UnreadableTensor):
            problem = (
                f"tensor {short(name)}: got {tensor.dtype} without the other tensors of a weight "
                f"in {quantized.name}. Download the checkpoint again"
            )
            if f"{name.rpartition('.')[0]}.weight" in plain:
                raise CheckpointError(problem)
            plain[name] = UnreadableTensor.of(tensor.shape, problem)
    kinds = sorted({format_of(plain[name].dtype).precision.value for name in names})
    note = f"dequantised: {len(names)} tensors of {quantized.name}, to {' and '.join(kinds)}"
    return plain, [note] if names else []


def _check_skipped(option: str, modules: object, names: Sequence[str]) -> None:
    """Check that no dequantized weight is in a module that the config lists as unquantized."""
    if modules is None:
        return
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise CheckpointError(
            f"quantization_config: got {option}={shown(modules)}, wanted a list of modules' names. "
            f"{WHAT_TO_DO}"
        )
    for weight in names:
        name = weight.removesuffix(".weight")
        for module in modules:
            # The module, one that contains it, or the last part of its name.
            if f"{name}.".startswith(f"{module}.") or name.endswith(f".{module}"):
                raise CheckpointError(
                    f"tensor {short(weight)}: it is quantized, but {option} lists the module "
                    f"{shown(module)} as unquantized. Correct config.json, or download the "
                    "checkpoint again"
                )
