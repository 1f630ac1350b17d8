"""Formulas for the time of a training step: computation, kernel launches and transfers.

Computation is matmuls and attention, by their FLOPs, and passes over memory by pointwise kernels,
sums of gradients and the optimizer. Each kind of work reaches a share of the GPU's peak, which was
measured (docs/gpu.md). ``cost.py`` explains the letters. The end of the file holds a table of the
peak speeds of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.cost import (
    FP32_BYTES,
    Plan,
    has_backward,
    is_recomputed,
    mlp_width,
    optimizer_parameters,
    pack_flops,
    parameters,
    stage_attention_flops,
    stage_layers,
    traffic,
    widths,
)
from nemo_aligner.planning.memory import offloaded_bytes

# Shares of an H100's peak speeds that each kind of work reaches: 989 TFLOP/s in bf16, 3.35 TB/s of
# memory (docs/gpu.md). The shares of matmuls and pointwise kernels fit measured steps with hidden
# sizes of 2,048 and 4,096, with eager and fused kernels. The share of updates fits AdamW measured
# by itself, and the share of attention fits steps of 512 to 8,192 tokens on an H200.
MATMUL_SHARE = 0.79
ATTENTION_SHARE = 0.275
POINTWISE_SHARE = 0.36
UPDATE_SHARE = 0.78
# Seconds that the host takes to launch the forward and the backward pass of a layer. Measured with
# a hidden size of 1,024, where the GPU waits for the host.
HOST_SECONDS_PER_LAYER = 2.55e-3
_FORWARD = 1 / 3  # the forward pass's part of these seconds

# How often the pointwise kernels of a layer read or write memory in both passes, with eager and
# with fused kernels (``models/pointwise``): per channel of a hidden state (norms, residual sums and
# sums of their gradients), of the queries (RoPE and copies), and of the MLP with or without a gate.
_HIDDEN_PASSES = {False: 26, True: 22}
_QUERY_PASSES = {False: 18, True: 8}
_GATED_PASSES = {False: 16, True: 8}
_UNGATED_PASSES = 10
# Bytes per parameter. The matmuls that compute a weight's gradient read and write its fp32 sum in
# each pack. Once in a step the sums are cleared and scaled, and AdamW reads and writes its state.
_GRADIENT_BYTES, _UPDATE_BYTES = 8, 54


@dataclass(frozen=True)
class Machine:
    """Speed of one rank's GPU and of its connections.

    Attributes:
        flops: peak FLOP/s.
        efficiency: share of ``flops`` that all computation reaches. None uses the measured share of
            each kind of work, and the time that the host needs to launch it.
        intra_node, inter_node: bytes/s to ranks in the same node, and to other nodes.
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
    """Seconds of a step by cause, without transfers that overlap with computation.

    Attributes:
        compute: forward and backward passes.
        update: the optimizer's step.
        bubble: idle time of a pipeline stage.
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

    1F1B leaves a stage idle for ``(p - 1) / m`` of the time of its m packs (Narayanan et al. 2021,
    section 2.2). These transfers overlap with computation, and no others:

    - The reduction of gradients overlaps with the backward pass of the last pack.
    - The all-gather of weights overlaps with the forward pass of the first pack.
    - Offloaded activations travel to the host during the forward pass and back during the backward
      pass.

    Offloaded moments travel to the GPU and back: two fp32 values each way, 16 bytes per parameter.
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
    """Seconds of a stage's forward and backward pass of one pack, without transfers.

    It is the maximum of the GPU's time and the host's time to launch the kernels, which overlap.
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
    """Bytes that the pointwise kernels on a rank of a stage read and write for one pack.

    After its attention, the model's last layer computes only the tokens that the head reads: too
    few to count.
    """
    h, _, q, _ = widths(shape)
    split = plan.tp if plan.sequence_parallel else 1
    norms = 2 if shape.pre_layernorms and shape.post_layernorms else 1
    fused = plan.fused_kernels
    mlp = (_GATED_PASSES[fused] if shape.is_gated else _UNGATED_PASSES) * mlp_width(shape) / plan.tp
    passes_per_token = 0.0
    for layer in stage_layers(shape, plan, stage):
        is_last = layer == shape.num_layers - 1
        hidden = _HIDDEN_PASSES[fused] * h * norms / split / (2 if is_last else 1)
        per_layer = hidden + _QUERY_PASSES[fused] * q / plan.tp + (0.0 if is_last else mlp)
        passes_per_token += _passes(shape, plan, stage, layer) * per_layer
    return plan.tokens * passes_per_token * ELEMENT_BYTES[plan.precision]


def _passes(shape: ModelShape, plan: Plan, stage: int, layer: int) -> float:
    """Work of a layer, in units of one forward plus one backward pass."""
    if not has_backward(plan, stage, layer):
        return _FORWARD
    return 1 + _FORWARD * is_recomputed(shape, plan, layer)


def _update_time(shape: ModelShape, plan: Plan, stage: int, machine: Machine) -> float:
    """Seconds of the optimizer's step on a rank: all gradients, and the rank's shard of the state.

    It is 0 where the user states one efficiency for everything.
    """
    if machine.efficiency is not None:
        return 0.0
    trained = parameters(shape, plan, stage, trainable=True)
    updated = optimizer_parameters(shape, plan, stage)
    moved = _GRADIENT_BYTES * trained + _UPDATE_BYTES * updated
    return moved / (machine.memory * UPDATE_SHARE)


def _copies_not_hidden(shape: ModelShape, plan: Plan, stage: int, machine: Machine) -> float:
    """Seconds by which copying a pack's activations takes longer than the pass that hides it."""
    copied = offloaded_bytes(shape, plan, stage) / machine.host
    flops, seconds = pack_flops(shape, plan, stage), pack_time(shape, plan, stage, machine)
    forward = seconds * flops.forward / flops.total
    return max(0.0, copied - forward) + max(0.0, copied - (seconds - forward))


# Peaks of GPUs, by name.

# Dense TFLOP/s in 16 bits and in fp32 without TF32, and GB/s of memory, from NVIDIA's data sheets.
# Figures that a data sheet states "with sparsity" are halved. None: the GPU is not meant for
# training in fp32. The first name that occurs in the device's name is used, so longer names come
# first.
_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    ("GB200", 2500.0, None, 8000.0),  # 360 PFLOP/s of an NVL72 "with sparsity": 5 of each GPU
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
    """Peak FLOP/s of one GPU by the device name that torch reports; None if it is not listed."""
    for name, half, single, _ in _PEAKS:
        if name in device_name:
            peak = single if precision is Precision.fp32 else half
            return None if peak is None else peak * 1e12
    return None


def peak_bandwidth(device_name: str) -> float | None:
    """Peak bytes/s of a GPU's own memory by the name that torch reports; None if not listed."""
    peaks = (bandwidth * 1e9 for name, *_, bandwidth in _PEAKS if name in device_name)
    return next(peaks, None)
