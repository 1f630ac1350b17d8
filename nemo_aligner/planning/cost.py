"""Cost of a training step by arithmetic alone: FLOPs and bytes sent.

Counted from the modules in ``nemo_aligner/models`` and from megatron-core 0.16's schedules and
optimizer; ``memory.py`` has the bytes in memory and ``step_time.py`` the time. The terms are those
of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM". h, f, q and kv are the widths of a hidden state, of the MLP, of all queries and of all
keys; t, c, p and d the sizes of tensor, context, pipeline and data parallelism; m the packs of a
data parallel rank in a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import LayoutSizes
from nemo_aligner.models.shape import HeadShape, ModelShape
from nemo_aligner.utils.errors import ConfigError

FP32_BYTES = 4


@dataclass(frozen=True)
class Packs:
    """Work of one data parallel rank in a step: ``count`` packs, each of this size.

    ``keys`` is the mean number of keys that a token attends to. ``sequences`` is per pack; the head
    reads one row of each. ``kept_keys`` is the number of keys per token that attention keeps for
    the backward pass: 1, or more if a common prefix is copied for the sequences that share it.
    ``longest`` is the longest segment where attention's backward pass takes one at a time, as on a
    CPU; None where a kernel takes the whole pack.
    """

    tokens: int
    sequences: int
    keys: float
    count: int = 1
    kept_keys: float = 1.0
    longest: int | None = None


@dataclass(frozen=True)
class Plan(LayoutSizes):
    """Inputs of a step's cost besides the model's shape.

    ``recompute_layers``: number of layers that ``Recompute.full`` recomputes in a stage, from its
    first; None is all. ``equal_heads``: attention copies keys and values for every query head, as
    in fp32 on GPUs (``models/attention``), because no kernel takes grouped heads there.
    ``fused_kernels``: norms and RoPE are those of a GPU (``models/pointwise``), not torch's.
    """

    packs: Packs
    precision: Precision = Precision.bf16
    recompute: Recompute = Recompute.none
    recompute_layers: int | None = None
    freeze_layers: int = 0
    train_router: bool = False
    cpu_offload: bool = False
    activations_offload: bool = False
    num_attributes: int = 1
    equal_heads: bool = False
    fused_kernels: bool = False
    expert_load: float = 1.0

    @property
    def tokens(self) -> float:
        """Tokens of a pack that one rank computes."""
        return self.packs.tokens / self.cp

    @property
    def replicas(self) -> int:
        """Ranks that reduce gradients with each other, and share out the optimizer's state."""
        return self.dp * self.cp


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one pack, over all ranks of a stage that share it."""

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
    context: float
    expert: float
    pipeline: float
    data: float


def even_packs(pairs: int, length: int, budget: int, prefix: int = 0) -> Packs:
    """Packs of ``pairs`` of two sequences of ``length`` tokens that share ``prefix`` tokens.

    As ``data/packing.py`` makes them: as few as the token budget allows, with even work. Attention
    is that of a GPU, whose kernel gets the prefix by itself and again with each sequence.

    Raises:
        ConfigError: a pair alone is larger than the budget.
    """
    size = 2 * length - prefix
    if size > budget:
        raise ConfigError(
            f"model.micro_batch_tokens: got {budget}, wanted at least {size}, a pair of two "
            f"sequences of {length} tokens"
        )
    count = -(-pairs // (budget // size))
    fullest = -(-pairs // count)
    kept = (2 * length + prefix) / size
    return Packs(fullest * size, 2 * fullest, attended_keys(length, prefix), count, kept)


def attended_keys(length: int, prefix: int = 0, sequences: int = 2) -> float:
    """Mean keys per token of ``sequences`` of ``length`` tokens with a common ``prefix``.

    Attention is causal: token i (from 1) of a sequence has i keys. A pack has the prefix once.
    """
    own = length - prefix
    beginning = prefix * (prefix + 1) / 2
    rest = own * prefix + own * (own + 1) / 2
    return (beginning + sequences * rest) / (prefix + sequences * own)


def widths(shape: ModelShape) -> tuple[int, int, int, int]:
    """h, f, q and kv."""
    return (
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_attention_heads * shape.kv_channels,
        shape.num_query_groups * shape.kv_channels,
    )


def stage_layers(shape: ModelShape, plan: Plan, stage: int) -> range:
    """Layers of a stage, counted from 0."""
    each = shape.num_layers // plan.pp
    return range(stage * each, (stage + 1) * each)


def has_backward(plan: Plan, stage: int, layer: int) -> bool:
    """Return True if gradients flow through a layer.

    They do not through frozen layers of the first stage, except with full recomputation, whose
    input has to require a gradient. In later stages the states that they receive require one.
    """
    return layer >= plan.freeze_layers or stage > 0 or plan.recompute is Recompute.full


def is_recomputed(shape: ModelShape, plan: Plan, layer: int) -> bool:
    """Return True if a layer keeps nothing but its input."""
    if plan.recompute is not Recompute.full:
        return False
    each = shape.num_layers // plan.pp
    return layer % each < (each if plan.recompute_layers is None else plan.recompute_layers)


def parameters(shape: ModelShape, plan: Plan, stage: int, *, trainable: bool = False) -> int:
    """Parameters of one rank of a stage.

    Linear layers and the embedding's rows are split over t; norms are on every rank. The first
    stage has the embedding, the last one the final norm and the head. With LoRA only its matrices
    and the head are trained.
    """
    layers = stage_layers(shape, plan, stage)
    adapters = len(layers) * _adapter_size(shape, plan)
    if trainable and shape.lora is not None:
        return adapters + (head_size(shape, plan) if stage == plan.pp - 1 else 0)
    frozen = plan.freeze_layers if trainable else 0
    split, whole = shape.layer_parameters()
    own = _experts_of_layer(shape)
    layer = (split - own) // plan.tp + own // (plan.tp * plan.ep) + whole
    count = layer * sum(index >= frozen for index in layers) + adapters
    if stage == 0 and not frozen:
        count += embedding_size(shape, plan)
    if stage == plan.pp - 1:
        count += shape.norm_parameters(shape.hidden_size) + head_size(shape, plan)
    return count


def _experts_of_layer(shape: ModelShape) -> int:
    """Parameters of a layer's experts, which expert parallelism splits."""
    if shape.experts is None:
        return 0
    return shape.experts.parameters(shape.hidden_size, 3)[0]


def expert_parameters(shape: ModelShape, plan: Plan, stage: int) -> int:
    """Trained parameters of one rank's experts, whose optimizer is split over fewer ranks."""
    layers = stage_layers(shape, plan, stage)
    if shape.lora is not None:
        return len(layers) * _adapter_size(shape, plan, of_experts=True)
    own = _experts_of_layer(shape) // (plan.tp * plan.ep)
    return own * sum(layer >= plan.freeze_layers for layer in layers)


def optimizer_parameters(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Number of trained parameters whose optimizer state one rank of a stage holds and updates.

    The distributed optimizer (Rajbhandari et al. 2020, "ZeRO", stage 1) splits the state of a
    parameter over the ranks that have a copy of it: d c ranks, or d c / e for those of experts,
    which expert parallelism has split over e ranks already.
    """
    trained = parameters(shape, plan, stage, trainable=True)
    experts = expert_parameters(shape, plan, stage)
    return (trained - experts + experts * plan.ep) / plan.replicas


def mlp_width(shape: ModelShape) -> int:
    """Ffn channels that a token goes through."""
    return shape.ffn_hidden_size if shape.experts is None else shape.experts.active_width


def adapter_widths(shape: ModelShape, layer: int) -> dict[str, tuple[int, int]]:
    """Input and output widths of the linear layers that have LoRA, by name.

    In the model's last layer that is only ``linear_qkv``, which reads every token; the others see
    only the rows that the head reads.
    """
    if shape.lora is None:
        return {}
    h, f, q, kv = widths(shape)
    f = f if shape.experts is None else shape.experts.width
    first = (2 if shape.is_gated else 1) * f
    of_all = {
        "linear_qkv": (h, q + 2 * kv),
        "linear_proj": (q, h),
        "linear_fc1": (h, first),
        "linear_fc2": (f, h),
    }
    names = ("linear_qkv",) if layer == shape.num_layers - 1 else tuple(of_all)
    return {name: of_all[name] for name in names if name in shape.lora.targets}


def keeps_input(shape: ModelShape, plan: Plan, layer: int, linear: str) -> bool:
    """Return True if a linear layer keeps its input, for the gradient of its weight or LoRA's A."""
    if shape.lora is not None:
        return linear in shape.lora.targets
    return layer >= plan.freeze_layers


def is_of_experts(shape: ModelShape, linear: str) -> bool:
    """Return True if each expert has its own such layer."""
    return shape.experts is not None and linear in ("linear_fc1", "linear_fc2")


def _adapter_size(shape: ModelShape, plan: Plan, of_experts: bool = False) -> int:
    """Parameters of a layer's adapters on a rank.

    Of A and B the one on the split side is split; of experts both.
    """
    rank = 0 if shape.lora is None else shape.lora.rank
    count = 0
    for name, (inputs, outputs) in adapter_widths(shape, layer=-1).items():
        if shape.experts is not None and is_of_experts(shape, name):
            count += shape.experts.count // plan.ep * rank * (inputs + outputs) // plan.tp
            continue
        if of_experts:
            continue
        split, whole = outputs, inputs
        if name in ("linear_proj", "linear_fc2"):
            split, whole = inputs, outputs
        count += rank * (split // plan.tp + whole)
    return count


def embedding_size(shape: ModelShape, plan: Plan) -> int:
    """Parameters of a rank's rows of the embedding."""
    return shape.padded_vocab_size(plan.tp) // plan.tp * shape.hidden_size


def head_size(shape: ModelShape, plan: Plan) -> int:
    """Parameters of the reward head."""
    head = shape.head or HeadShape()
    sizes = head.tensors(plan.num_attributes, shape.hidden_size).values()
    return sum(map(math.prod, sizes))


def _layer_flops(shape: ModelShape, plan: Plan, *, last: bool) -> tuple[float, float]:
    """Count FLOPs of one pack's forward pass: linear layers, and attention's two products."""
    h, _, q, kv = widths(shape)
    packs = plan.packs
    rows = packs.sequences if last else packs.tokens
    mlp = (3 if shape.is_gated else 2) * h * mlp_width(shape)
    if shape.experts is not None:
        mlp += h * shape.experts.count
    linear = 2.0 * packs.tokens * h * (q + 2 * kv) + 2.0 * rows * (q * h + mlp)
    return linear, 4.0 * packs.tokens * packs.keys * q


def _adapter_flops(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count FLOPs of one pack's forward pass through a layer's adapters."""
    rank = 0 if shape.lora is None else shape.lora.rank
    of_all, read_by_all = adapter_widths(shape, -1), adapter_widths(shape, layer)
    packs = plan.packs
    return sum(
        2.0
        * (packs.tokens if name in read_by_all else packs.sequences)
        * (shape.experts.top_k if shape.experts and is_of_experts(shape, name) else 1)
        * rank
        * sum(sides)
        for name, sides in of_all.items()
    )


def pack_flops(shape: ModelShape, plan: Plan, stage: int) -> Flops:
    """A stage's floating point operations for one pack, over the ranks that share it.

    A multiplication and an addition count as two. A linear layer has ``2 in out`` per token, and
    attention ``4 q`` per query and key (Narayanan et al. 2021, appendix; they count all keys, here
    only those that a causal query attends to). The backward pass has twice as many, or none if all
    weights below are frozen. LoRA adds ``2 rank (in + out)``, and the weights beside it have no
    gradient. Full recomputation repeats the forward pass, selective recomputation that of
    attention. Norms, biases, rotation and softmax are ignored, and so are windows: such a layer is
    counted as if it saw all tokens.
    """
    forward = backward = recomputed = 0.0
    for layer in stage_layers(shape, plan, stage):
        linear, attention = _layer_flops(shape, plan, last=layer == shape.num_layers - 1)
        adapters = _adapter_flops(shape, plan, layer)
        forward += linear + attention + adapters
        if not has_backward(plan, stage, layer):
            continue
        # A frozen layer passes the gradient on but computes none for its weights.
        is_trained = layer >= plan.freeze_layers and shape.lora is None
        backward += linear * (2 if is_trained else 1) + 2 * (attention + adapters)
        if is_recomputed(shape, plan, layer):
            recomputed += linear + attention + adapters
        elif plan.recompute is Recompute.selective:
            recomputed += attention
    return Flops(forward, backward, recomputed)


def stage_attention_flops(shape: ModelShape, plan: Plan, stage: int) -> float:
    """The part of ``pack_flops`` that attention's two products of queries and keys have."""
    total = 0.0
    for layer in stage_layers(shape, plan, stage):
        _, attention = _layer_flops(shape, plan, last=layer == shape.num_layers - 1)
        passes = 3 if has_backward(plan, stage, layer) else 1
        is_again = is_recomputed(shape, plan, layer) or plan.recompute is Recompute.selective
        total += attention * (passes + (is_again and passes == 3))
    return total


def step_flops(shape: ModelShape, plan: Plan) -> float:
    """Count FLOPs of the whole model on all packs of a step, without recomputation."""
    stages = [pack_flops(shape, plan, stage) for stage in range(plan.pp)]
    return plan.packs.count * plan.dp * sum(flops.forward + flops.backward for flops in stages)


def traffic(shape: ModelShape, plan: Plan, stage: int) -> Traffic:
    """Bytes that one rank of a stage sends in a step, by ring algorithms.

    Tensor parallelism (Narayanan et al. 2021, section 3.2) all-reduces the hidden states after
    attention and after the MLP, and in the backward pass the gradients of their inputs. A ring
    all-reduce sends ``2 (t - 1) / t`` of the tensor. Sequence parallelism replaces it by a
    reduce-scatter and an all-gather of half that each, and gathers the inputs of two linear layers
    again for their weights' gradients. Context parallelism all-gathers a layer's keys and values in
    both passes, and reduce-scatters their gradients, ``(c - 1) / c`` of each; in a ring gradients
    go all the way round. A pipeline sends states forward and their gradients back. Expert
    parallelism sends a token's state to each of its experts, ``(e - 1) / e`` of which are
    elsewhere, and back; and gradients the same way. Data and context parallelism reduce-scatter
    fp32 gradients and all-gather updated weights, ``(d c - 1) / (d c)`` of each; those of experts
    among fewer ranks, ``d c / e``.
    """
    size = ELEMENT_BYTES[plan.precision]
    states = plan.tokens * shape.hidden_size * size
    ring = (plan.tp - 1) / plan.tp * states
    *_, kv = widths(shape)
    keys = (plan.cp - 1) / plan.cp * plan.packs.tokens * 2 * kv * size / plan.tp
    gathers, exchanges = 0.0, 0
    home = plan.ring / (plan.cp - 1) if plan.cp > 1 else 0.0
    reductions = 1.0 if stage == 0 else 0.0  # of the embedding, whose rows are split over t
    for layer in stage_layers(shape, plan, stage):
        # The last layer's MLP has only the rows that the head reads: too few to count.
        forward = 1 if layer == shape.num_layers - 1 else 2
        reductions += forward
        gathers += 1
        exchanges += 2 * (forward - 1)
        if has_backward(plan, stage, layer):
            passes = 2 if is_recomputed(shape, plan, layer) else 1
            gathers += passes + 1 + home
            exchanges += 2 * (forward - 1) * passes
            has_weights = layer >= plan.freeze_layers and shape.lora is None
            again = 0.5 * 2 if plan.sequence_parallel and has_weights else 0
            reductions += forward * (2 if is_recomputed(shape, plan, layer) else 1) + again
    trained = parameters(shape, plan, stage, trainable=True)
    own = expert_parameters(shape, plan, stage)
    rows = 0.0 if shape.experts is None else shape.experts.top_k * states * (1 - 1 / plan.ep)
    adjacent_stages = (stage > 0) + (stage < plan.pp - 1)
    split = plan.tp if plan.sequence_parallel else 1
    return Traffic(
        tensor=plan.packs.count * reductions * 2 * ring,
        context=plan.packs.count * gathers * keys,
        expert=plan.packs.count * exchanges * rows,
        pipeline=plan.packs.count * adjacent_stages * states / split,
        data=(_reduced(trained - own, plan.replicas) + _reduced(own, plan.replicas // plan.ep))
        * (FP32_BYTES + size),
    )


def _reduced(parameters: int, ranks: int) -> float:
    """Numbers that a ring of ``ranks`` has each send to reduce-scatter so many."""
    return (ranks - 1) / ranks * parameters
