"""Formulas for the cost of a training step: parameters, FLOPs and bytes sent between ranks.

They follow the modules in ``nemo_aligner/models`` and the schedules and optimizer of megatron-core
0.16. ``memory.py`` counts the bytes in memory and ``step_time.py`` the time.

The terms are those of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM". The letters in docstrings are:

- h, f, q and kv: width of a hidden state, of the MLP, of all queries and of all keys
- t, c, p, d and e: sizes of tensor, context, pipeline, data and expert parallelism
- m: packs of a data parallel rank in a step
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import LayoutSizes
from nemo_aligner.models.layer_shape import CHUNK_TOKENS, LinearAttentionShape
from nemo_aligner.models.shape import HeadShape, ModelShape
from nemo_aligner.utils.errors import ConfigError

FP32_BYTES = 4


@dataclass(frozen=True)
class Packs:
    """The work of one data parallel rank in a step: ``count`` packs of equal size.

    Attributes:
        tokens: tokens of a pack.
        sequences: sequences of a pack. The head reads one token of each.
        keys: mean number of keys that a token attends to.
        count: packs of the rank in a step.
        kept_keys: keys per token that attention keeps for the backward pass: 1, or more if a
            shared prefix is copied for each sequence that has it.
        longest: tokens of the longest segment if attention's backward pass computes one segment at
            a time, as on a CPU; None if a kernel computes the whole pack.
    """

    tokens: int
    sequences: int
    keys: float
    count: int = 1
    kept_keys: float = 1.0
    longest: int | None = None


@dataclass(frozen=True)
class Plan(LayoutSizes):
    """Everything but the model's shape that the cost of a step depends on.

    The fields of ``LayoutSizes`` are the parallel layout. Fields that are named like a setting of
    training mean the same.

    Attributes:
        packs: the work of a data parallel rank.
        recompute_layers: number of layers that ``Recompute.full`` recomputes in each pipeline
            stage, counted from its first layer; None means all.
        equal_heads: attention copies keys and values for every query head, because no kernel
            supports grouped heads, as in fp32 on GPUs (``models/attention``).
        fused_kernels: norms and RoPE use the fused GPU kernels of ``models/pointwise`` instead of
            torch's.
        expert_load: rows of the busiest expert parallel rank, relative to the mean.
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
        """Tokens of a pack that one context parallel rank computes."""
        return self.packs.tokens / self.cp

    @property
    def replicas(self) -> int:
        """Ranks that reduce gradients with each other and shard the optimizer's state."""
        return self.dp * self.cp


@dataclass(frozen=True)
class Flops:
    """Floating point operations for one pack, summed over the ranks of a stage that share it."""

    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, by the kind of parallelism that sends them."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float


def even_packs(pairs: int, length: int, budget: int, prefix: int = 0) -> Packs:
    """Split ``pairs`` evenly into packs; each pair has two sequences that share a prefix.

    The packs are those that ``data/packing.py`` makes: as few as the token budget allows, with even
    work. Attention is that of a GPU, whose kernel gets the prefix once by itself and once with each
    sequence.

    Args:
        pairs: number of pairs.
        length: tokens of each sequence, prefix included.
        budget: most tokens of a pack.
        prefix: tokens that both sequences of a pair share.

    Raises:
        ConfigError: a single pair is larger than the budget.
    """
    size = 2 * length - prefix
    if size > budget:
        raise ConfigError(
            f"model.micro_batch_tokens: got {budget}, wanted at least {size}, a pair of two "
            f"sequences of {length} tokens"
        )
    count = -(-pairs // (budget // size))
    fullest = -(-pairs // count)
    kept_keys = (2 * length + prefix) / size
    return Packs(fullest * size, 2 * fullest, attended_keys(length, prefix), count, kept_keys)


def attended_keys(length: int, prefix: int = 0, sequences: int = 2) -> float:
    """Mean keys per token of ``sequences`` of ``length`` tokens that share ``prefix`` tokens.

    Attention is causal: token i (from 1) of a sequence has i keys. A pack holds the prefix once.
    """
    suffix = length - prefix
    prefix_keys = prefix * (prefix + 1) / 2
    suffix_keys = suffix * prefix + suffix * (suffix + 1) / 2
    return (prefix_keys + sequences * suffix_keys) / (prefix + sequences * suffix)


def widths(shape: ModelShape) -> tuple[int, int, int, int]:
    """Return h, f, q and kv (see the module's docstring)."""
    return (
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_attention_heads * shape.kv_channels,
        shape.num_query_groups * shape.kv_channels,
    )


def mixer_widths(shape: ModelShape) -> tuple[int, int]:
    """Return the outputs of a layer's first projection, and the inputs of its second one.

    Args:
        shape: ``ModelShape.of_layer`` of a layer with attention or linear attention.
    """
    if shape.linear_attention is not None:
        return shape.linear_attention.projection_width, shape.linear_attention.value_width
    _, _, q, kv = widths(shape)
    return (1 + shape.attention_output_gate) * q + 2 * kv, q


def stage_layers(shape: ModelShape, plan: Plan, stage: int) -> range:
    """Layers of a pipeline stage, counted from 0."""
    num_layers = shape.num_layers // plan.pp
    return range(stage * num_layers, (stage + 1) * num_layers)


def has_backward(plan: Plan, stage: int, layer: int) -> bool:
    """Return True if gradients flow through a layer.

    No gradient flows through the frozen layers of the first stage, except with full recomputation,
    which needs an input that requires a gradient. In later stages the hidden states that arrive
    require a gradient.
    """
    return layer >= plan.freeze_layers or stage > 0 or plan.recompute is Recompute.full


def is_recomputed(shape: ModelShape, plan: Plan, layer: int) -> bool:
    """Return True if a layer keeps only its input for the backward pass."""
    if plan.recompute is not Recompute.full:
        return False
    num_layers = shape.num_layers // plan.pp
    num_recomputed = num_layers if plan.recompute_layers is None else plan.recompute_layers
    return layer % num_layers < num_recomputed


def parameters(shape: ModelShape, plan: Plan, stage: int, *, trainable: bool = False) -> int:
    """Count the parameters on one rank of a stage; with ``trainable`` only those that train.

    Linear layers and the embedding's rows are split over tensor parallel ranks; norms are on every
    rank. The first stage has the embedding, the last one the final norm and the head. With LoRA
    only the adapters and the head are trained.
    """
    layers = stage_layers(shape, plan, stage)
    adapters = sum(_adapter_size(shape.of_layer(layer + 1), plan) for layer in layers)
    if trainable and shape.lora is not None:
        return adapters + (head_size(shape, plan) if stage == plan.pp - 1 else 0)
    frozen = plan.freeze_layers if trainable else 0
    sizes = (_layer_size(shape.of_layer(layer + 1), plan) for layer in layers if layer >= frozen)
    count = sum(sizes) + adapters
    if stage == 0 and not frozen:
        count += embedding_size(shape, plan)
    if stage == plan.pp - 1:
        count += shape.norm_parameters(shape.hidden_size) + head_size(shape, plan)
    return count


def _layer_size(shape: ModelShape, plan: Plan) -> int:
    """Count a layer's parameters on a rank, without adapters."""
    split, replicated = shape.layer_parameters()
    experts = _experts_of_layer(shape)
    return (split - experts) // plan.tp + experts // (plan.tp * plan.ep) + replicated


def _experts_of_layer(shape: ModelShape) -> int:
    """Count the parameters of a layer's experts, which expert parallelism splits."""
    if shape.experts is None:
        return 0
    return shape.experts.parameters(shape.hidden_size, 3)[0]


def expert_parameters(shape: ModelShape, plan: Plan, stage: int) -> int:
    """Count the trained expert parameters on one rank, whose optimizer state has fewer shards."""
    layers = stage_layers(shape, plan, stage)
    if shape.lora is not None:
        return len(layers) * _adapter_size(shape, plan, of_experts=True)
    experts = _experts_of_layer(shape) // (plan.tp * plan.ep)
    return experts * sum(layer >= plan.freeze_layers for layer in layers)


def optimizer_parameters(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Count the trained parameters whose optimizer state one rank of a stage holds and updates.

    The distributed optimizer (Rajbhandari et al. 2020, "ZeRO", stage 1) splits the state of a
    parameter over the ranks that have a copy of it. These are d c ranks. For an expert's parameters
    they are d c / e, because expert parallelism has split the experts over e ranks already.
    """
    trained = parameters(shape, plan, stage, trainable=True)
    experts = expert_parameters(shape, plan, stage)
    return (trained - experts + experts * plan.ep) / plan.replicas


def mlp_width(shape: ModelShape) -> int:
    """Number of MLP channels that compute each token."""
    return shape.ffn_hidden_size if shape.experts is None else shape.experts.active_width


def adapter_widths(shape: ModelShape, layer: int) -> dict[str, tuple[int, int]]:
    """Input and output widths of a layer's linear layers that have LoRA adapters, by name.

    In the model's last layer only ``linear_qkv`` is listed, because it reads every token. The other
    linear layers of the last layer compute only the tokens that the head reads.
    """
    if shape.lora is None:
        return {}
    h, f, _, _ = widths(shape)
    outputs, inputs = mixer_widths(shape.of_layer(layer + 1))
    f = f if shape.experts is None else shape.experts.width
    fc1_outputs = (2 if shape.is_gated else 1) * f
    all_widths = {
        "linear_qkv": (h, outputs),
        "linear_proj": (inputs, h),
        "linear_fc1": (h, fc1_outputs),
        "linear_fc2": (f, h),
    }
    names = ("linear_qkv",) if layer == shape.num_layers - 1 else tuple(all_widths)
    return {name: all_widths[name] for name in names if name in shape.lora.targets}


def keeps_input(shape: ModelShape, plan: Plan, layer: int, linear: str) -> bool:
    """Return True if a linear layer keeps its input, for the gradient of its weight or LoRA's A."""
    if shape.lora is not None:
        return linear in shape.lora.targets
    return layer >= plan.freeze_layers


def is_of_experts(shape: ModelShape, linear: str) -> bool:
    """Return True if each expert has its own copy of the linear layer."""
    return shape.experts is not None and linear in ("linear_fc1", "linear_fc2")


def _adapter_size(shape: ModelShape, plan: Plan, of_experts: bool = False) -> int:
    """Count a layer's adapter parameters on a rank; with ``of_experts`` only those of experts.

    Tensor parallelism splits the one of LoRA's matrices A and B that lies on the split side of the
    linear layer. Both matrices of an expert are split.
    """
    rank = 0 if shape.lora is None else shape.lora.rank
    count = 0
    for name, (inputs, outputs) in adapter_widths(shape, layer=-1).items():
        if shape.experts is not None and is_of_experts(shape, name):
            count += shape.experts.count // plan.ep * rank * (inputs + outputs) // plan.tp
            continue
        if of_experts:
            continue
        split, replicated = outputs, inputs
        if name in ("linear_proj", "linear_fc2"):
            split, replicated = inputs, outputs
        count += rank * (split // plan.tp + replicated)
    return count


def embedding_size(shape: ModelShape, plan: Plan) -> int:
    """Count the parameters of a rank's rows of the embedding."""
    return shape.padded_vocab_size(plan.tp) // plan.tp * shape.hidden_size


def head_size(shape: ModelShape, plan: Plan) -> int:
    """Count the parameters of the reward head."""
    head = shape.head or HeadShape()
    sizes = head.tensors(plan.num_attributes, shape.hidden_size).values()
    return sum(map(math.prod, sizes))


def _layer_flops(shape: ModelShape, plan: Plan, *, last: bool) -> tuple[float, float]:
    """FLOPs of one pack's forward pass in a layer: linear layers, and attention's matmuls."""
    h, _, q, _ = widths(shape)
    outputs, inputs = mixer_widths(shape)
    packs = plan.packs
    rows = packs.sequences if last else packs.tokens
    mlp = (3 if shape.is_gated else 2) * h * mlp_width(shape)
    if shape.experts is not None:
        mlp += h * shape.experts.count
    linear = 2.0 * packs.tokens * h * outputs + 2.0 * rows * (inputs * h + mlp)
    if shape.linear_attention is not None:
        return linear, packs.tokens * _linear_attention_flops(shape.linear_attention)
    return linear, 4.0 * packs.tokens * packs.keys * q


def _linear_attention_flops(linear: LinearAttentionShape) -> float:
    """FLOPs of a token in the chunks of the gated delta rule (``models/gated_delta.py``).

    They are two products of each key head in the chunk, half a square for the triangular system,
    the values that a token reads in the chunk, and three products with the state.
    """
    k, v = linear.key_head_dim, linear.value_head_dim
    in_chunk = 4.0 * CHUNK_TOKENS * linear.num_key_heads * k
    of_values = CHUNK_TOKENS * (k + v) + 2.0 * CHUNK_TOKENS * v + 6.0 * k * v
    return in_chunk + linear.num_value_heads * of_values


def _adapter_flops(shape: ModelShape, plan: Plan, layer: int) -> float:
    """FLOPs of one pack's forward pass through a layer's adapters."""
    rank = 0 if shape.lora is None else shape.lora.rank
    read_by_all = adapter_widths(shape, layer)
    all_widths = adapter_widths(shape.of_layer(layer + 1), -1)
    packs = plan.packs
    return sum(
        2.0
        * (packs.tokens if name in read_by_all else packs.sequences)
        * (shape.experts.top_k if shape.experts and is_of_experts(shape, name) else 1)
        * rank
        * sum(sides)
        for name, sides in all_widths.items()
    )


def pack_flops(shape: ModelShape, plan: Plan, stage: int) -> Flops:
    """Floating point operations of a stage for one pack, summed over the ranks that share it.

    A multiplication and an addition count as two operations. A linear layer takes
    ``2 * inputs * outputs`` per token, and attention ``4 * q`` per pair of query and key. Narayanan
    et al. 2021 (appendix) count all keys; here only the keys count that a causal query attends to.

    The backward pass takes twice as many, or none if all weights below are frozen. LoRA adds
    ``2 * rank * (inputs + outputs)`` per token, and the frozen weights get no gradient. Full
    recomputation repeats the forward pass, selective recomputation that of attention. The formula
    ignores norms, biases, RoPE and softmax. It ignores attention windows, too: a layer with a
    window counts as if it saw all tokens.
    """
    forward = backward = recomputed = 0.0
    for layer in stage_layers(shape, plan, stage):
        of_layer = shape.of_layer(layer + 1)
        linear, attention = _layer_flops(of_layer, plan, last=layer == shape.num_layers - 1)
        adapters = _adapter_flops(shape, plan, layer)
        forward += linear + attention + adapters
        if not has_backward(plan, stage, layer):
            continue
        # A frozen layer passes the gradient on but computes none for its weights.
        is_trained = layer >= plan.freeze_layers and shape.lora is None
        backward += linear * (2 if is_trained else 1) + 2 * (attention + adapters)
        if is_recomputed(shape, plan, layer):
            recomputed += linear + attention + adapters
        elif plan.recompute is Recompute.selective or of_layer.linear_attention is not None:
            recomputed += attention
    return Flops(forward, backward, recomputed)


def stage_attention_flops(shape: ModelShape, plan: Plan, stage: int) -> float:
    """FLOPs of attention's two matmuls with queries and keys, which ``pack_flops`` includes."""
    total = 0.0
    for layer in stage_layers(shape, plan, stage):
        of_layer = shape.of_layer(layer + 1)
        _, attention = _layer_flops(of_layer, plan, last=layer == shape.num_layers - 1)
        passes = 3 if has_backward(plan, stage, layer) else 1
        is_selective = (
            plan.recompute is Recompute.selective or of_layer.linear_attention is not None
        )
        is_repeated = is_recomputed(shape, plan, layer) or is_selective
        total += attention * (passes + (is_repeated and passes == 3))
    return total


def step_flops(shape: ModelShape, plan: Plan) -> float:
    """FLOPs of the whole model on all packs of a step, without recomputation."""
    stages = [pack_flops(shape, plan, stage) for stage in range(plan.pp)]
    return plan.packs.count * plan.dp * sum(flops.forward + flops.backward for flops in stages)


def traffic(shape: ModelShape, plan: Plan, stage: int) -> Traffic:
    """Bytes that one rank of a stage sends in a step, by ring algorithms.

    - Tensor parallelism (Narayanan et al. 2021, section 3.2) all-reduces the hidden states after
      attention and after the MLP, and in the backward pass the gradients of their inputs. A ring
      all-reduce sends ``2 * (t - 1) / t`` of the tensor.
    - Sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather of half
      its bytes. It gathers the inputs of two linear layers again for the gradients of their
      weights.
    - Context parallelism all-gathers a layer's keys and values in both passes and reduce-scatters
      their gradients, ``(c - 1) / c`` of each. In a ring, gradients go all the way round.
    - Expert parallelism sends a token's hidden state to each of its experts, of which
      ``(e - 1) / e`` are on other ranks, and back. The gradients go the same way.
    - A pipeline sends hidden states forward and their gradients back.
    - Data and context parallelism reduce-scatter fp32 gradients and all-gather updated weights,
      ``(d * c - 1) / (d * c)`` of each. Those of experts go among fewer ranks, ``d * c / e``.
    """
    size = ELEMENT_BYTES[plan.precision]
    states = plan.tokens * shape.hidden_size * size
    ring = (plan.tp - 1) / plan.tp * states
    *_, kv = widths(shape)
    keys = (plan.cp - 1) / plan.cp * plan.packs.tokens * 2 * kv * size / plan.tp
    gathers, exchanges = 0.0, 0
    home = plan.ring / (plan.cp - 1) if plan.cp > 1 else 0.0
    reductions = 1.0 if stage == 0 else 0.0  # the embedding's, whose rows are split over t
    for layer in stage_layers(shape, plan, stage):
        # In the last layer, the MLP computes only the tokens that the head reads: too few to count.
        forward = 1 if layer == shape.num_layers - 1 else 2
        reductions += forward
        gathers += 1
        exchanges += 2 * (forward - 1)
        if has_backward(plan, stage, layer):
            passes = 2 if is_recomputed(shape, plan, layer) else 1
            gathers += passes + 1 + home
            exchanges += 2 * (forward - 1) * passes
            has_weights = layer >= plan.freeze_layers and shape.lora is None
            gathered_again = 0.5 * 2 if plan.sequence_parallel and has_weights else 0
            reductions += forward * (2 if is_recomputed(shape, plan, layer) else 1) + gathered_again
    trained = parameters(shape, plan, stage, trainable=True)
    experts = expert_parameters(shape, plan, stage)
    rows = 0.0 if shape.experts is None else shape.experts.top_k * states * (1 - 1 / plan.ep)
    adjacent_stages = (stage > 0) + (stage < plan.pp - 1)
    split = plan.tp if plan.sequence_parallel else 1
    return Traffic(
        tensor=plan.packs.count * reductions * 2 * ring,
        context=plan.packs.count * gathers * keys,
        expert=plan.packs.count * exchanges * rows,
        pipeline=plan.packs.count * adjacent_stages * states / split,
        data=(
            _reduced_elements(trained - experts, plan.replicas)
            + _reduced_elements(experts, plan.replicas // plan.ep)
        )
        * (FP32_BYTES + size),
    )


def _reduced_elements(parameters: int, ranks: int) -> float:
    """Elements that each of ``ranks`` sends to reduce-scatter ``parameters`` elements in a ring."""
    return (ranks - 1) / ranks * parameters
