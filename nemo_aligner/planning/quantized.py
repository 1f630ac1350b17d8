"""Memory of a quantized base under LoRA (``models.quantized_layers``), in bytes on one rank."""

from __future__ import annotations

from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import BasePrecision
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.quantized import CHUNK_ELEMENTS, quantized_bytes
from nemo_aligner.planning.cost import Plan, mixer_widths, stage_layers, widths

# Bytes per element of the temporary tensors of a dequantization: fp32 values and, for nf4, half an
# int32 index.
_CHUNK_BYTES = {BasePrecision.nf4: 6, BasePrecision.int8: 4, BasePrecision.fp8: 4}


def _base_precision(shape: ModelShape) -> BasePrecision | None:
    return None if shape.lora is None else shape.lora.base_precision


def _linears(shape: ModelShape, plan: Plan) -> list[tuple[int, int, bool]]:
    """List outputs and inputs of a layer's linear layers on one rank, and if TP splits inputs."""
    h, f, _, _ = widths(shape)
    outputs, inputs = mixer_widths(shape)
    f //= plan.tp
    return [
        (outputs // plan.tp, h, False),
        (h, inputs // plan.tp, True),
        ((2 if shape.is_gated else 1) * f, h, False),
        (h, f, True),
    ]


def saved_by_quantization(shape: ModelShape, plan: Plan, stage: int) -> int:
    """Count the bytes by which quantized weights are smaller than dense ones; 0 if all are dense.

    Embeddings, norms, biases, adapters and the head are not quantized.
    """
    precision, size = _base_precision(shape), ELEMENT_BYTES[plan.precision]
    if precision is None:
        return 0
    saved = sum(
        outputs * inputs * size
        - quantized_bytes(outputs, inputs, precision, size, splits_inputs=splits_inputs)
        for outputs, inputs, splits_inputs in _linears(shape, plan)
    )
    return saved * len(stage_layers(shape, plan, stage))


def dequantized_bytes(shape: ModelShape, plan: Plan) -> int:
    """Count the bytes of the largest weight while it is dequantized for its matmul."""
    precision = _base_precision(shape)
    if precision is None:
        return 0
    largest = max(outputs * inputs for outputs, inputs, _ in _linears(shape, plan))
    chunk = min(largest, CHUNK_ELEMENTS)
    return ELEMENT_BYTES[plan.precision] * largest + _CHUNK_BYTES[precision] * chunk
