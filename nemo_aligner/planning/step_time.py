"""Formulas for the time of a training step: computation, kernel launches and transfers.

The time of matmuls and attention follows from their FLOPs. The time of pointwise kernels, sums of
gradients and the optimizer follows from the bytes that they read and write. Each kind of work
reaches a certain share of the GPU's peak speed, which was measured (docs/benchmarks.md).
``cost.py`` explains the letters. A table of the peak speeds of GPUs is at the end of this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.planning.cost import (
    FP32_BYTES,
    Plan,
    has_backward,
    is_recomputed,
    optimizer_parameters,
    pack_flops,
    parameters,
    stage_attention_flops,
    stage_layers,
    traffic,
    widths,
)
from nemo_aligner.planning.memory import offloaded_bytes

# The share of its peak speed that an H100 reaches in each kind of work (docs/benchmarks.md). The
# peaks are 989 TFLOP/s in bf16 and 3.35 TB/s of memory. The shares of matmuls and pointwise kernels
# were fitted to measured steps with hidden sizes of 2,048 and 4,096, with eager and fused kernels.
# The share of updates was fitted to AdamW alone, and the share of attention to steps with sequences
# of 512 to 8,192 tokens on an H200.
MATMUL_SHARE = 0.79
ATTENTION_SHARE = 0.275
POINTWISE_SHARE = 0.36
UPDATE_SHARE = 0.78
# Seconds that the host takes to launch the kernels of a layer's forward and backward pass. It was
# measured with a hidden size of 1,024, where the GPU waits for the host.
HOST_SECONDS_PER_LAYER = 2.55e-3
# The share of the forward pass in the work of forward and backward pass.
_FORWARD = 1 / 3

# How often the pointwise kernels of a layer read or write a channel of a token, in forward and
# backward pass together. The keys say whether kernels are fused (``models/pointwise``). The
# channels are those of a hidden state (norms, residual sums and sums of their gradients), of the
# queries (RoPE and copies), and of the MLP with or without a gate.
_HIDDEN_PASSES = {False: 26, True: 22}
_QUERY_PASSES = {False: 18, True: 8}
_GATED_PASSES = {False: 16, True: 8}
_UNGATED_PASSES = 10
# Bytes of memory traffic per trained parameter. For each pack, the matmul that computes a weight's
# gradient reads and writes the fp32 sum of gradients (8 bytes). Once in a step, the sums are
# cleared and scaled, and AdamW reads and writes weights and moments (54 bytes).
_GRADIENT_BYTES, _UPDATE_BYTES = 8, 54


@dataclass(frozen=True)
class Machine:
    """Speed of one rank's GPU and of its connections.

    Attributes:
        flops: peak FLOP/s.
        efficiency: share of ``flops`` that computation reaches as a whole. None uses the measured
            share of each kind of work, and the time that the host needs to launch kernels.
        intra_node, inter_node: bytes/s to ranks in the same node, and to ranks in other nodes.
        ranks_per_node: GPUs of a node.
        host: bytes/s to host memory.
        memory: bytes/s of the GPU's own memory.
    """

    flops: float
    efficiency: float | None
    intra_node: float
    inter_node: float
    ranks_per_node: int = 8
    host: float = 50e9
    memory: float = 3.35e12


@dataclass(frozen=True)
class StepTime:
    """Seconds that each part of a step adds to it.

    Transfers that overlap with computation add nothing.

    Attributes:
        compute: forward and backward passes.
        update: the optimizer's step.
        bubble: time for which a pipeline stage waits for other stages.
        tensor, context, expert, pipeline, data: transfers of each kind of parallelism.
        host: transfers to and from host memory.
    """

    compute: float
    update: float
    bubble: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    host: float

    @property
    def total(self) -> float:
        return self.compute + self.update + self.bubble + self.sending

    @property
    def sending(self) -> float:
        ranks = self.tensor + self.context + self.expert + self.pipeline + self.data
        return ranks + self.host


def step_time(shape: ModelShape, plan: Plan, machine: Machine) -> StepTime:
    """Estimate the seconds of a step on ``machine``.

    In the 1F1B schedule, a stage is idle for ``(p - 1) / m`` of the time that it takes for its m
    packs (Narayanan et al. 2021, section 2.2). Only these transfers overlap with computation:

    - The reduction of gradients overlaps with the backward pass of the last pack.
    - The all-gather of weights overlaps with the forward pass of the first pack.
    - Offloaded activations travel to the host during the forward pass and back during the backward
      pass.

    With ``cpu_offload``, Adam's two fp32 moments travel to the GPU and back, which is 16 bytes per
    parameter.
    """
    stages = range(plan.pp)
    per_pack = max(pack_time(shape, plan, stage, machine) for stage in stages)
    sent = [traffic(shape, plan, stage) for stage in stages]

    def bandwidth(ranks: int) -> float:
        return machine.intra_node if ranks <= machine.ranks_per_node else machine.inter_node

    tensor = max(stage.tensor for stage in sent) / bandwidth(plan.tp)
    # Megatron-core numbers ranks with tensor parallelism innermost, then context and data
    # parallelism, then pipeline stages.
    context = max(stage.context for stage in sent) / bandwidth(plan.tp * plan.cp)
    expert = max(stage.expert for stage in sent) / bandwidth(plan.tp * plan.ep)
    data = max(stage.data for stage in sent) / bandwidth(plan.tp * plan.replicas)
    pipeline = max(stage.pipeline for stage in sent) / bandwidth(plan.num_ranks)
    idle = (plan.pp - 1) / plan.packs.count
    compute = per_pack * plan.packs.count
    updated = max(optimizer_parameters(shape, plan, stage) for stage in stages)
    moments = 4 * FP32_BYTES * updated if plan.cpu_offload else 0.0
    copies = max(_copies_not_hidden(shape, plan, stage, machine) for stage in stages)
    return StepTime(
        compute,
        update=max(_update_time(shape, plan, stage, machine) for stage in stages),
        bubble=idle * (compute + tensor + context + expert),
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
        data=max(0.0, data - per_pack),
        host=moments / machine.host + plan.packs.count * copies,
    )


def pack_time(shape: ModelShape, plan: Plan, stage: int, machine: Machine) -> float:
    """Estimate the seconds of a stage's forward and backward pass of one pack, without transfers.

    The GPU computes while the host launches the next kernels, so the slower of the two counts.
    """
    ranks = plan.tp * plan.cp
    total = pack_flops(shape, plan, stage).total / ranks
    if machine.efficiency is not None:
        return total / (machine.flops * machine.efficiency)
    attention = stage_attention_flops(shape, plan, stage) / ranks
    matmuls = (total - attention) / (machine.flops * MATMUL_SHARE)
    computed = matmuls + attention / (machine.flops * ATTENTION_SHARE)
    trained = parameters(shape, plan, stage, trainable=True)
    moved = pointwise_bytes(shape, plan, stage) / POINTWISE_SHARE
    moved += _GRADIENT_BYTES * trained / UPDATE_SHARE
    launched = HOST_SECONDS_PER_LAYER * sum(
        _passes(shape, plan, stage, layer) for layer in stage_layers(shape, plan, stage)
    )
    return max(computed + moved / machine.memory, launched)


def pointwise_bytes(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Count the bytes that the pointwise kernels on a rank of a stage read and write for one pack.

    The MLP of the model's last layer computes only the few tokens that the head reads, and is not
    counted.
    """
    h, _, q, _ = widths(shape)
    split = plan.tp if plan.sequence_parallel else 1
    norms = 2 if shape.pre_layernorms and shape.post_layernorms else 1
    fused = plan.fused_kernels
    mlp_passes = _GATED_PASSES[fused] if shape.is_gated else _UNGATED_PASSES
    passes_per_token = 0.0
    for layer in stage_layers(shape, plan, stage):
        is_last = layer == shape.num_layers - 1
        hidden = _HIDDEN_PASSES[fused] * h * norms / split / (2 if is_last else 1)
        of_layer = shape.of_layer(layer + 1)
        hidden *= (of_layer.has_mixer + of_layer.has_mlp) / 2
        width = 0 if is_last else of_layer.active_mlp_width
        queries = _QUERY_PASSES[fused] * q * of_layer.has_mixer
        per_layer = hidden + (queries + mlp_passes * width) / plan.tp
        passes_per_token += _passes(shape, plan, stage, layer) * per_layer
    return plan.tokens * passes_per_token * ELEMENT_BYTES[plan.precision]


def _passes(shape: ModelShape, plan: Plan, stage: int, layer: int) -> float:
    """Return the work of a layer, where one forward and one backward pass together count as 1."""
    if not has_backward(plan, stage, layer):
        return _FORWARD
    return 1 + _FORWARD * is_recomputed(shape, plan, layer)


def _update_time(shape: ModelShape, plan: Plan, stage: int, machine: Machine) -> float:
    """Estimate the seconds of the optimizer's step on a rank.

    The step reads all gradients, and updates the rank's shard of the state. The result is 0 if
    ``machine.efficiency`` is set, because a user who sets it means the whole step.
    """
    if machine.efficiency is not None:
        return 0.0
    trained = parameters(shape, plan, stage, trainable=True)
    updated = optimizer_parameters(shape, plan, stage)
    moved = _GRADIENT_BYTES * trained + _UPDATE_BYTES * updated
    return moved / (machine.memory * UPDATE_SHARE)


def _copies_not_hidden(shape: ModelShape, plan: Plan, stage: int, machine: Machine) -> float:
    """Estimate the seconds for which a stage waits for copies of a pack's offloaded activations.

    A copy overlaps with the forward or the backward pass, so only the time beyond it counts.
    """
    copied = offloaded_bytes(shape, plan, stage) / machine.host
    flops, seconds = pack_flops(shape, plan, stage), pack_time(shape, plan, stage, machine)
    forward = seconds * flops.forward / flops.total
    return max(0.0, copied - forward) + max(0.0, copied - (seconds - forward))


# Peak speeds of GPUs.

# Part of the device's name, dense TFLOP/s in 16 bits, dense TFLOP/s in fp32 without TF32, and GB/s
# of memory, from NVIDIA's data sheets. Figures that a data sheet states "with sparsity" are halved.
# None means that the GPU is not meant for training in fp32. The first row whose name occurs in the
# device's name is used, so a longer name must come before its prefix.
_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    # The data sheet has 360 PFLOP/s "with sparsity" for the 72 GPUs of an NVL72.
    ("GB200", 2500.0, None, 8000.0),
    ("B200", 2250.0, None, 8000.0),
    ("H200 NVL", 835.0, 60.0, 4800.0),
    ("H200", 989.0, 67.0, 4800.0),
    ("H100 NVL", 835.0, 60.0, 3900.0),
    ("H100 PCIe", 756.0, 51.0, 2000.0),
    ("H100", 989.0, 67.0, 3350.0),
    ("A100", 312.0, 19.5, 2039.0),
    ("L40S", 362.0, 91.6, 864.0),
)


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a GPU, by its name as torch reports it.

    The result is None if the GPU is not in the table, or not meant for this precision.
    """
    for name, half, single, _ in _PEAKS:
        if name in device_name:
            peak = single if precision is Precision.fp32 else half
            return None if peak is None else peak * 1e12
    return None


def peak_bandwidth(device_name: str) -> float | None:
    """Return the peak bytes/s of a GPU's own memory, by its name as torch reports it.

    The result is None if the GPU is not in the table.
    """
    peaks = (bandwidth * 1e9 for name, *_, bandwidth in _PEAKS if name in device_name)
    return next(peaks, None)
