"""Sizes of quantized weights (``models.quantized``), and which models can have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_aligner.config.model import BasePrecision
from nemo_aligner.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_aligner.models.shapes.decoder import ModelShape

# nf4 has one scale for each block of values of a row. The scales are 8-bit numbers, and each group
# of blocks has an fp32 factor and mean (QLoRA, arXiv:2305.14314, section 3).
NF4_BLOCK, NF4_GROUP = 64, 256
_GROUP_BYTES = 2 * 4
# Elements that are converted at a time, so that the fp32 copies of a weight stay small.
CHUNK_ELEMENTS = 2**22
_KEY = "model.lora.base_precision"


def quantized_bytes(
    outputs: int, inputs: int, precision: BasePrecision, scale_bytes: int, *, splits_inputs: bool
) -> int:
    """Count the bytes of a quantized weight ``[outputs, inputs]``.

    Args:
        scale_bytes: bytes of an element in the model's dtype, in which int8 and fp8 keep scales.
        splits_inputs: the groups of nf4's scales are columns of blocks, rather than rows.
    """
    if precision is not BasePrecision.nf4:
        return outputs * (inputs + scale_bytes)
    blocks = inputs // NF4_BLOCK
    rows, length = (blocks, outputs) if splits_inputs else (outputs, blocks)
    groups = rows * -(-length // NF4_GROUP)
    return outputs * inputs // 2 + outputs * blocks + _GROUP_BYTES * groups


def check_quantizable(shape: ModelShape, tp: int) -> None:
    """Check that the linear layers of a model can be quantized, if LoRA's settings want that.

    Raises:
        ConfigError: the model has another kind of layers, or nf4's blocks do not divide the inputs
            of a linear layer on each tensor parallel rank.
    """
    precision = None if shape.lora is None else shape.lora.base_precision
    if precision is None:
        return
    kinds = {
        "experts": shape.experts,
        "latent attention": shape.latent_attention,
        "linear attention": shape.linear_attention,
        "Gemma 4's layers": shape.gemma4,
        "a hybrid pattern": shape.hybrid_pattern,
    }
    for name, part in kinds.items():
        if part is not None:
            raise ConfigError(
                f"{_KEY}: got {precision.value} for a model with {name}, which is not supported. "
                "Set it to null"
            )
    attended = shape.num_attention_heads * shape.kv_channels
    ranks = f" on one of {tp} tensor parallel ranks" if tp > 1 else ""
    widths = {
        "hidden size": (shape.hidden_size, False),
        f"width of the heads{ranks}": (attended // tp, tp > 1),
        f"width of the MLP{ranks}": (shape.ffn_hidden_size // tp, tp > 1),
    }
    for name, (width, is_split) in widths.items():
        if precision is BasePrecision.nf4 and width % NF4_BLOCK:
            raise ConfigError(
                f"{_KEY}: got nf4 for a {name} of {width}, wanted a multiple of {NF4_BLOCK}, "
                f"nf4's block. Use int8 or fp8{', or fewer tensor parallel ranks' * is_split}"
            )
