"""Memory of a quantized base under LoRA (``models.quantized_layers``), in bytes on one rank."""

from __future__ import annotations

from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import BasePrecision
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.quantized import CHUNK_ELEMENTS, NF4_BLOCK, quantized_bytes
from nemo_aligner.planning.cost import Plan, mixer_widths, stage_layers, widths

# Bytes per element of the temporary tensors of a dequantization by torch: fp32 values and, for nf4,
# half an int32 index.
_CHUNK_BYTES = {BasePrecision.nf4: 6, BasePrecision.int8: 4, BasePrecision.fp8: 4}


def base_precision(shape: ModelShape) -> BasePrecision | None:
    """Return how the frozen linear layers are quantized; None if they are not."""
    return None if shape.lora is None else shape.lora.base_precision


def _linears(shape: ModelShape, plan: Plan) -> dict[str, tuple[int, int, bool]]:
    """Return outputs and inputs of a layer's linear layers on one rank, and if TP splits inputs."""
    h, f, _, _ = widths(shape)
    outputs, inputs = mixer_widths(shape)
    f //= plan.tp
    return {
        "linear_qkv": (outputs // plan.tp, h, False),
        "linear_proj": (h, inputs // plan.tp, True),
        "linear_fc1": ((2 if shape.is_gated else 1) * f, h, False),
        "linear_fc2": (h, f, True),
    }


def saved_by_quantization(shape: ModelShape, plan: Plan, stage: int) -> int:
    """Count the bytes by which quantized weights are smaller than dense ones; 0 if all are dense.

    Embeddings, norms, biases, adapters and the head are not quantized.
    """
    precision, size = base_precision(shape), ELEMENT_BYTES[plan.precision]
    if precision is None:
        return 0
    saved = sum(
        outputs * inputs * size
        - quantized_bytes(outputs, inputs, precision, size, splits_inputs=splits_inputs)
        for outputs, inputs, splits_inputs in _linears(shape, plan).values()
    )
    return saved * len(stage_layers(shape, plan, stage))


def matmul_bytes(shape: ModelShape, plan: Plan, linear: str, result: float) -> float:
    """Count the bytes of a matmul with a quantized weight: the dequantized weight and ``result``.

    The temporary tensors of the dequantization are freed before the matmul allocates its result.

    Args:
        shape: a model with a quantized base.
        linear: name of the linear layer.
        result: bytes of the matmul's result.
    """
    precision = base_precision(shape)
    assert precision is not None
    outputs, inputs, _ = _linears(shape, plan)[linear]
    elements = outputs * inputs
    size = ELEMENT_BYTES[plan.precision]
    temporary: float = _CHUNK_BYTES[precision] * min(elements, CHUNK_ELEMENTS)
    if plan.fused_dequantization:  # one kernel needs only the scales of nf4's blocks
        temporary = size * elements / NF4_BLOCK if precision is BasePrecision.nf4 else 0
    return size * elements + max(temporary, result)
