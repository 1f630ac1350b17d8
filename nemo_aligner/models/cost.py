"""What a training step costs, by arithmetic alone: FLOPs, bytes in memory, bytes sent.

Counted from the modules in ``nemo_aligner/models`` and from megatron-core 0.16's data parallel
wrapper, distributed optimizer and 1F1B schedule. The terms are those of Narayanan et al. 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", and Korthikanti
et al. 2022, "Reducing Activation Recomputation in Large Transformer Models". h, f, q and kv are the
widths of a hidden state, of the MLP, of all queries and of all keys; t, p and d the sizes of tensor,
pipeline and data parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.schema import Precision, Recompute
from nemo_aligner.models.shape import ModelShape

ELEMENT_BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp16: 2}
_FP32 = 4


@dataclass(frozen=True)
class Packs:
    """What one data parallel rank computes in a step: ``count`` packs, each of this size.

    ``keys`` is the mean number of keys that a token attends to; ``sequences`` are those of one
    pack, of each of which the head reads one row.
    """

    tokens: int
    sequences: int
    keys: float
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """All that a step's cost depends on, beside the model's shape."""

    packs: Packs
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    precision: Precision = Precision.bf16
    recompute: Recompute = Recompute.none
    freeze_layers: int = 0
    num_attributes: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sequence = "+SP" if self.sequence_parallel else ""
        return f"TP={self.tp}{sequence} PP={self.pp} DP={self.dp}"


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    ``activations`` are what the backward pass needs of all packs in flight; ``transient`` is the
    most that is there beside all else for a moment.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one pack, over all ranks of a stage's tensor parallel group."""

    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step."""

    tensor: float
    pipeline: float
    data: float


@dataclass(frozen=True)
class Machine:
    """``flops`` FLOP/s of one rank, of which matrix products reach ``efficiency``; bytes/s of one
    rank to others on its node and beyond it."""

    flops: float
    efficiency: float
    intra_node: float
    inter_node: float
    ranks_per_node: int = 8


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on; nothing of it overlaps."""

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    data: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.tensor + self.pipeline + self.data


def attended_keys(length: int, shared: int = 0, sequences: int = 2) -> float:
    """Mean keys of a token where ``sequences`` of ``length`` tokens begin with the same ``shared``.

    Attention is causal: token i of a sequence has i keys. The shared tokens are there once.
    """
    own = length - shared
    beginning = shared * (shared + 1) / 2
    rest = own * shared + own * (own + 1) / 2
    return (beginning + sequences * rest) / (shared + sequences * own)


def _widths(shape: ModelShape) -> tuple[int, int, int, int]:
    """h, f, q and kv."""
    return (
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_attention_heads * shape.kv_channels,
        shape.num_query_groups * shape.kv_channels,
    )


def _stage_layers(shape: ModelShape, plan: Plan, stage: int) -> range:
    """The layers of a stage, counted from 0."""
    each = shape.num_layers // plan.pp
    return range(stage * each, (stage + 1) * each)


def _has_backward(plan: Plan, stage: int, layer: int) -> bool:
    """Whether gradients flow through a layer.

    Frozen ones have none on the first stage; later stages receive states that ask for a gradient.
    """
    return layer >= plan.freeze_layers or stage > 0


def parameters(shape: ModelShape, plan: Plan, stage: int, *, trainable: bool = False) -> int:
    """Parameters of one rank of a stage.

    Counted from the modules: linear layers and the embedding's rows are split over t, norms are on
    every rank; the first stage has the embedding, the last one the final norm and the head.
    """
    frozen = plan.freeze_layers if trainable else 0
    h, f, q, kv = _widths(shape)
    layer = (h * (2 * q + 2 * kv) + 3 * h * f) // plan.tp + 2 * h
    count = layer * sum(index >= frozen for index in _stage_layers(shape, plan, stage))
    if stage == 0 and not frozen:
        count += shape.padded_vocab_size(plan.tp) // plan.tp * h
    if stage == plan.pp - 1:
        count += h + _head(shape, plan)
    return count


def _head(shape: ModelShape, plan: Plan) -> int:
    return plan.num_attributes * shape.hidden_size


def memory(shape: ModelShape, plan: Plan, stage: int) -> Memory:
    """Bytes of one rank of a stage at the fullest moment of a step.

    Weights are in the precision of training (the head in fp32). Megatron's wrapper keeps gradients
    in fp32. The distributed optimizer (Rajbhandari et al. 2020, "ZeRO", stage 1) splits Adam's two
    fp32 moments over d, and an fp32 copy of weights that are not.
    """
    size = ELEMENT_BYTES[plan.precision]
    head = _head(shape, plan) if stage == plan.pp - 1 else 0
    trained = parameters(shape, plan, stage, trainable=True)
    copies = trained - head if size < _FP32 else 0
    return Memory(
        weights=size * (parameters(shape, plan, stage) - head) + _FP32 * head,
        gradients=_FP32 * trained,
        optimizer=_FP32 * (2 * trained + copies) / plan.dp,
        activations=_packs_in_flight(plan, stage) * pack_activations(shape, plan, stage),
        transient=transient(shape, plan, stage),
    )


def fullest_stage(shape: ModelShape, plan: Plan) -> Memory:
    """The memory of the stage that needs the most."""
    return max((memory(shape, plan, stage) for stage in range(plan.pp)), key=lambda m: m.total)


def _packs_in_flight(plan: Plan, stage: int) -> int:
    """1F1B (Narayanan et al. 2021, section 2.2): stage s of p has run p - s packs forward when the
    first of them comes back."""
    return min(plan.packs.count, plan.pp - stage)


def _token_layer_bytes(shape: ModelShape, plan: Plan, *, last: bool) -> float:
    """What a layer keeps of a token for its backward pass, nothing recomputed in full.

    Counted from the modules (compare Korthikanti et al. 2022, equations 1 to 4, for GPT): the
    input of each norm and its output, 2h each; rotated queries, keys and values, q + 2 kv; the
    attention's output, q; the gated MLP's two products, 2 f, and what it makes of them, f. In fp32
    one number of each norm, and the log-sum-exp of every head, which selective recomputation finds
    anew. Sequence parallelism splits what norms read and write over t, too. Of the last model layer
    only the head's rows are computed past attention.
    """
    h, f, q, kv = _widths(shape)
    size = ELEMENT_BYTES[plan.precision]
    split = plan.tp if plan.sequence_parallel else 1
    norms = 1 if last else 2
    heads = 0 if plan.recompute is Recompute.selective else shape.num_attention_heads
    inner = 2 * q + 2 * kv + (0 if last else 3 * f)
    return norms * (2 * h * size + _FP32) / split + (inner * size + heads * _FP32) / plan.tp


def pack_activations(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Bytes that a stage's rank keeps of one pack between its forward and its backward pass.

    With full recomputation that is each layer's input. A stage that is not the last one keeps its
    output, too, until it has been sent and its gradient is back.
    """
    last_layer = shape.num_layers - 1
    split = plan.tp if plan.sequence_parallel else 1
    state = shape.hidden_size * ELEMENT_BYTES[plan.precision] / split
    kept = [
        state
        if plan.recompute is Recompute.full
        else _token_layer_bytes(shape, plan, last=layer == last_layer)
        for layer in _stage_layers(shape, plan, stage)
        if _has_backward(plan, stage, layer)
    ]
    sent = state if stage < plan.pp - 1 else 0.0
    return plan.packs.tokens * (sum(kept) + sent)


def transient(shape: ModelShape, plan: Plan, stage: int) -> float:
    return 0.0


def _layer_flops(shape: ModelShape, plan: Plan, *, last: bool) -> tuple[float, float]:
    """Of one pack's forward pass: linear layers, and attention's two products."""
    h, f, q, kv = _widths(shape)
    packs = plan.packs
    rows = packs.sequences if last else packs.tokens
    linear = 2.0 * packs.tokens * h * (q + 2 * kv) + 2.0 * rows * (q * h + 3 * h * f)
    return linear, 4.0 * packs.tokens * packs.keys * q


def pack_flops(shape: ModelShape, plan: Plan, stage: int) -> Flops:
    """A stage's floating point operations for one pack, over its tensor parallel ranks.

    A multiplication and an addition are two. A linear layer has ``2 in out`` per token; attention
    ``4 q`` per query and key that it attends to (Narayanan et al. 2021, appendix, where all keys
    are counted; here a causal pass has its own). The backward pass has twice as many; where all
    weights are frozen below, none. Full recomputation repeats the forward pass, selective that of
    attention. Norms, rotation and softmax are left out.
    """
    forward = backward = recomputed = 0.0
    for layer in _stage_layers(shape, plan, stage):
        linear, attention = _layer_flops(shape, plan, last=layer == shape.num_layers - 1)
        forward += linear + attention
        if not _has_backward(plan, stage, layer):
            continue
        # A frozen layer passes the gradient on, and makes none for its weights.
        backward += linear * (2 if layer >= plan.freeze_layers else 1) + 2 * attention
        if plan.recompute is Recompute.full:
            recomputed += linear + attention
        elif plan.recompute is Recompute.selective:
            recomputed += attention
    return Flops(forward, backward, recomputed)


def step_flops(shape: ModelShape, plan: Plan) -> float:
    """Of the whole model, on all packs of a step, without what is recomputed."""
    stages = [pack_flops(shape, plan, stage) for stage in range(plan.pp)]
    return plan.packs.count * plan.dp * sum(flops.forward + flops.backward for flops in stages)


def traffic(shape: ModelShape, plan: Plan, stage: int) -> Traffic:
    """Bytes that one rank of a stage sends in a step, by ring algorithms.

    Tensor parallelism (Narayanan et al. 2021, section 3.2): after attention and after the MLP the
    states are summed, and in the backward pass the gradients of their inputs. A ring's all-reduce
    sends ``2 (t - 1) / t`` of the tensor; sequence parallelism makes it a reduce-scatter and an
    all-gather, half each, and gathers the inputs of two linear layers once more for their weights'
    gradients. Pipeline: the states forward, their gradients back. Data parallelism: fp32 gradients
    are reduce-scattered, updated weights all-gathered, ``(d - 1) / d`` of each.
    """
    size = ELEMENT_BYTES[plan.precision]
    states = plan.packs.tokens * shape.hidden_size * size
    ring = (plan.tp - 1) / plan.tp * states
    reductions = 1.0 if stage == 0 else 0.0  # the embedding's rows
    for layer in _stage_layers(shape, plan, stage):
        # The head's rows of the last layer are too few to count.
        forward = 1 if layer == shape.num_layers - 1 else 2
        reductions += forward
        if _has_backward(plan, stage, layer):
            again = 0.5 * 2 if plan.sequence_parallel else 0
            reductions += forward * (2 if plan.recompute is Recompute.full else 1) + again
    neighbours = (stage > 0) + (stage < plan.pp - 1)
    split = plan.tp if plan.sequence_parallel else 1
    trained = parameters(shape, plan, stage, trainable=True)
    return Traffic(
        tensor=plan.packs.count * reductions * 2 * ring,
        pipeline=plan.packs.count * neighbours * states / split,
        data=(plan.dp - 1) / plan.dp * trained * (_FP32 + size),
    )


def step_time(shape: ModelShape, plan: Plan, machine: Machine) -> StepTime:
    """Seconds of a step on ``machine``: a model of what has to be done, not a measurement.

    1F1B leaves a stage idle for ``(p - 1) / m`` of its m packs' time (Narayanan et al. 2021,
    section 2.2). Communication is not overlapped with anything: megatron-core would have to be
    asked to.
    """
    stages = range(plan.pp)
    slowest = max(pack_flops(shape, plan, stage).total for stage in stages)
    per_pack = slowest / plan.tp / (machine.flops * machine.efficiency)
    sent = [traffic(shape, plan, stage) for stage in stages]
    inside = machine.ranks_per_node

    def bandwidth(ranks: int) -> float:
        return machine.intra_node if ranks <= inside else machine.inter_node

    tensor = max(each.tensor for each in sent) / bandwidth(plan.tp)
    # Tensor parallel ranks are neighbours, then data parallel ones; stages are the furthest apart.
    data = max(each.data for each in sent) / bandwidth(plan.tp * plan.dp)
    pipeline = max(each.pipeline for each in sent) / bandwidth(plan.num_ranks)
    idle = (plan.pp - 1) / plan.packs.count
    compute = per_pack * plan.packs.count
    return StepTime(compute, idle * (compute + tensor), tensor, pipeline, data)
