"""Formulas for the bytes that a training step holds on each rank at its peak.

They follow the modules in ``nemo_aligner/models`` and the data parallel wrapper, the distributed
optimizer and the 1F1B schedule of megatron-core 0.16. The approach is that of Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models". ``cost.py`` explains the
letters. ``tests/planning/test_cost.py`` compares the formulas with real steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import LAYERS_NOT_OFFLOADED, Recompute
from nemo_aligner.models.layer_shape import CHUNK_TOKENS
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.cost import (
    FP32_BYTES,
    Plan,
    adapter_widths,
    embedding_size,
    has_backward,
    head_size,
    is_recomputed,
    keeps_input,
    mixer_widths,
    mlp_width,
    optimizer_parameters,
    parameters,
    stage_layers,
    widths,
)

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step.

    Attributes:
        activations: what the backward pass needs of all packs in flight.
        transient: what exists only at the moment of the peak.
        host: page-locked host memory for offloaded activations, and for Adam's moments with
            ``cpu_offload``. It is no part of ``total``.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


def memory(shape: ModelShape, plan: Plan, stage: int) -> Memory:
    """Bytes on one rank of a stage at the peak of a step.

    Weights are in the precision of training, the head's in fp32. Megatron's wrapper keeps gradients
    in fp32. The distributed optimizer shards Adam's two fp32 moments and the fp32 copies of 16-bit
    weights (``optimizer_parameters``). With ``cpu_offload``, moments come to the GPU in chunks, and
    only when no activations exist.
    """
    size = ELEMENT_BYTES[plan.precision]
    head = head_size(shape, plan) if stage == plan.pp - 1 else 0
    trained = parameters(shape, plan, stage, trainable=True)
    copies = trained - head if size < FP32_BYTES else 0
    moments = 0 if plan.cpu_offload else 2 * trained
    shares = optimizer_parameters(shape, plan, stage)
    # 1F1B: stage s of p has run p - s forward passes when the first gradient arrives.
    packs = min(plan.packs.count, plan.pp - stage)
    moments_on_host = 2 * trained if plan.cpu_offload else 0
    return Memory(
        weights=size * (parameters(shape, plan, stage) - head) + FP32_BYTES * head,
        gradients=FP32_BYTES * trained,
        optimizer=FP32_BYTES * (moments + copies) / trained * shares if trained else 0.0,
        activations=packs * pack_activations(shape, plan, stage),
        transient=transient(shape, plan, stage),
        host=packs * offloaded_bytes(shape, plan, stage)
        + (FP32_BYTES * moments_on_host / trained * shares if trained else 0.0),
    )


def fullest_stage(shape: ModelShape, plan: Plan) -> Memory:
    """Memory of the stage that needs the most; ``host`` is the maximum over all stages."""
    stages = [memory(shape, plan, stage) for stage in range(plan.pp)]
    fullest = max(stages, key=lambda stage: stage.total)
    return replace(fullest, host=max(stage.host for stage in stages))


def pack_activations(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Bytes that a rank keeps of one pack on the GPU between its forward and backward pass.

    These are the activations of layers that are not offloaded, the cosines and sines of RoPE for
    the tokens' positions, and the output that the stage sent to the next one, which megatron keeps
    until its gradient is back. Megatron also keeps the input that the stage received, so that
    this one stays on the GPU even if the stage's first layer is offloaded.
    """
    trained = _trained_layers(shape, plan, stage)
    kept_per_token = sum(
        _layer_bytes(shape, plan, layer)
        for layer in trained
        if not is_offloaded(shape, plan, layer)
    )
    if stage > 0 and any(is_offloaded(shape, plan, layer) for layer in trained):
        kept_per_token += _state(shape, plan)
    rope = shape.kv_channels * shape.rotary_percentage * ELEMENT_BYTES[plan.precision]
    rope *= 1 if shape.rotary_base_local is None else 2
    sent = _state(shape, plan) if stage < plan.pp - 1 else 0.0
    return plan.tokens * (kept_per_token + sent + rope * bool(trained))


def offloaded_bytes(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Bytes of one pack that a rank of a stage copies to host memory and back."""
    layers = _trained_layers(shape, plan, stage)
    offloaded = [layer for layer in layers if is_offloaded(shape, plan, layer)]
    received = _state(shape, plan) if offloaded and stage > 0 else 0.0
    copied = sum(_layer_bytes(shape, plan, layer) for layer in offloaded)
    return plan.tokens * (copied - received)


def is_offloaded(shape: ModelShape, plan: Plan, layer: int) -> bool:
    """Return True if a layer's activations wait in host memory (``models/activation_offload``)."""
    return plan.activations_offload and layer < shape.num_layers - LAYERS_NOT_OFFLOADED


def _trained_layers(shape: ModelShape, plan: Plan, stage: int) -> list[int]:
    """Layers of a stage that have a backward pass."""
    layers = stage_layers(shape, plan, stage)
    return [layer for layer in layers if has_backward(plan, stage, layer)]


def _layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes per token that a layer keeps; with full recomputation, only its input."""
    if is_recomputed(shape, plan, layer):
        return _state(shape, plan)
    return _unrecomputed_layer_bytes(shape, plan, layer)


def _unrecomputed_layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes per token that a layer keeps if it is not fully recomputed.

    Compare equations 1 to 4 of Korthikanti et al. 2022, for GPT. A layer keeps these elements per
    token, in the precision of training:

    - input and output of each norm, 2 h, or h without a norm; sequence parallelism splits them
      over t
    - queries, keys and values after RoPE, q + 2 kv, and the output of attention, q
    - both projections of a gated MLP, 2 f, and their product, f (without a gate f and f)
    - with norms of queries and keys: the queries, q, and the projection before it is split,
      q + 2 kv. Fused kernels keep contiguous copies of queries and keys, q + kv, instead.
    - with norms on the outputs of attention and MLP: their inputs, h each
    - with output gates: the projection of the gates, their sigmoids, and the gated output, q each
    - with linear attention instead of attention: its projection, and the input of the second one;
      the rest is computed again
    - with LoRA: the input of each linear layer that has an adapter, and the r outputs of A

    In fp32 it keeps one statistic of each norm and the log-sum-exp of every head. After attention,
    the model's last layer computes only the tokens that the head reads: too few to count. A frozen
    layer that passes a gradient on does not keep the inputs of its linear layers. Keys and values
    of a shared prefix are kept as often as the kernel receives them.

    Selective recomputation drops the copies after RoPE, the log-sum-exp and attention's output,
    unless the next linear layer needs the output as its input. ``_projection_width`` counts what it
    keeps of grouped queries.

    If no kernel computes a whole pack with grouped heads (``equal_heads``), keys and values are
    kept for every head, 2 q, and the output twice.

    The formula ignores the second statistic of a LayerNorm. If no kernel supports a window or a
    soft cap, it ignores another copy of the output, the masks (one element per query and key of a
    sequence, which all layers share), and in ``transient`` the scores of a block of queries, at
    most 256 MiB in fp32.
    """
    shape = shape.of_layer(layer + 1)
    h, f, _, _ = widths(shape)
    size = ELEMENT_BYTES[plan.precision]
    is_last = layer == shape.num_layers - 1
    keeps = partial(keeps_input, shape, plan, layer)
    places = 1 if is_last else 2
    norms = places * shape.pre_layernorms
    inputs = keeps("linear_qkv") + (not is_last and keeps("linear_fc1") and _reads_norm(shape))
    heads, inner = _kept_of_mixer(shape, plan, layer)
    if not is_last and shape.experts is None:
        inner += ((2 if shape.is_gated else 1) + keeps("linear_fc2")) * f
    elif not is_last:
        inner += (2 + keeps("linear_fc2")) * _rank_width(shape, plan)
    split = plan.tp if plan.sequence_parallel else 1
    states = ((norms + inputs) * h * size + norms * FP32_BYTES) / split
    if shape.post_layernorms and not is_last:
        states += places * (h * size + FP32_BYTES) / split
    states += _low_rank_bytes(shape, plan, layer) + _routed_bytes(shape, plan, layer)
    return states + (inner * size + heads * FP32_BYTES) / plan.tp


def _kept_of_mixer(shape: ModelShape, plan: Plan, layer: int) -> tuple[float, float]:
    """Count what ``_unrecomputed_layer_bytes`` says of attention, or linear attention.

    Args:
        shape: ``of_layer`` of the layer.

    Returns:
        Numbers per token in fp32, and in the precision of training.
    """
    _, _, q, kv = widths(shape)
    is_last = layer == shape.num_layers - 1
    is_output_kept = keeps_input(shape, plan, layer, "linear_proj") and not is_last
    if shape.linear_attention is not None:
        projected, attended = mixer_widths(shape)
        return 0, projected + is_output_kept * attended
    heads, inner = float(shape.num_attention_heads), 2 * q + _key_width(shape, plan)
    is_selective = plan.recompute is Recompute.selective
    if is_selective:
        heads, inner = 0, _projection_width(shape, plan) + is_output_kept * q
    if shape.attention_output_gate:
        inner += (not plan.fused_kernels) * q + (not is_last) * q + is_output_kept * q
    if shape.qk_layernorm:
        # With selective recomputation, ``_projection_width`` includes the unsplit projection.
        inner += q + kv if is_selective or plan.fused_kernels else 2 * q + 2 * kv
        per_head = shape.num_attention_heads + shape.num_query_groups
        heads += 2 * plan.tp if shape.qk_layernorm_across_heads else per_head
    return heads, inner


def _low_rank_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes per token that a layer keeps of the outputs of LoRA's matrices A."""
    rank = 0 if shape.lora is None else shape.lora.rank
    return rank * ELEMENT_BYTES[plan.precision] * len(adapter_widths(shape, layer))


def _projection_width(shape: ModelShape, plan: Plan) -> float:
    """Elements per token that selective recomputation keeps of queries, keys and values.

    Grouped queries are kept twice: in the projection, in one tensor with keys and values, and as a
    contiguous copy. The fused kernel, which splits and applies RoPE at once, makes three tensors
    instead.
    """
    _, _, q, kv = widths(shape)
    is_fused = plan.fused_kernels and not shape.qk_layernorm and shape.experts is None
    return q + 2 * kv + (q if kv < q and not is_fused else 0)


def _rank_width(shape: ModelShape, plan: Plan) -> float:
    """MLP channels per token that a rank's experts compute, at ``plan.expert_load``."""
    assert shape.experts is not None
    excess = shape.experts.top_k * shape.experts.width * (plan.expert_load - 1)
    return mlp_width(shape) + excess


def _reads_norm(shape: ModelShape) -> bool:
    """Return True if a matmul keeps the normed tokens; experts keep copies of them instead."""
    return shape.experts is None or shape.experts.shared_width is not None


def _routed_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes per token that a mixture-of-experts layer keeps in addition to its matmuls.

    These are a copy of the token for each of its k experts and the output of each expert. In fp32
    they are the router's probabilities of all experts and the weights of k experts; the indices and
    positions of k experts take 8 bytes each. The gate of a shared expert keeps its output. Like a
    trained router, it also keeps the token in fp32, which sequence parallelism splits; the shared
    expert's input is not split. Expert parallelism exchanges as many rows on average, and the
    busiest rank receives ``plan.expert_load`` times as many.
    """
    if shape.experts is None or layer == shape.num_layers - 1:
        return 0.0
    k, size = shape.experts.top_k, ELEMENT_BYTES[plan.precision]
    is_input_kept = keeps_input(shape, plan, layer, "linear_fc1")
    rows: float = k * (1 + is_input_kept * plan.expert_load) + shape.experts.shared_gate
    split = plan.tp if plan.sequence_parallel else 1
    if shape.experts.shared_width is not None and is_input_kept:
        rows += 1 - 1 / split
    in_fp32: float = shape.experts.count + 6 * k
    reads_fp32 = shape.experts.shared_gate or plan.train_router
    if reads_fp32 and (size < FP32_BYTES or not _reads_norm(shape)):
        in_fp32 += shape.hidden_size / split
    return rows * shape.hidden_size * size + FP32_BYTES * in_fp32


def _key_width(shape: ModelShape, plan: Plan) -> float:
    """Elements per token that attention keeps of keys and values, per group or per head.

    With a copy for each head (``equal_heads``), attention computes segment by segment and keeps the
    output a second time. With context parallelism only the rank's own keys and values are kept;
    those of other ranks are gathered again in the backward pass.
    """
    _, _, q, kv = widths(shape)
    if plan.cp > 1 and not plan.equal_heads:
        return 2 * kv
    return 2 * q * plan.packs.kept_keys + q if plan.equal_heads else 2 * kv * plan.packs.kept_keys


def transient(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Most bytes that a rank of a stage needs in addition to ``activations`` at any moment.

    It is the maximum of three moments: the forward pass of frozen layers; the backward pass of each
    layer's MLP, or of the whole last layer, when the layers above have freed theirs; and the
    embedding's gradient, when all layers have. Under sequence parallelism megatron-core also keeps
    a buffer for a pack's gathered hidden states.
    """
    tokens, size = plan.tokens, ELEMENT_BYTES[plan.precision]
    trained = _trained_layers(shape, plan, stage)
    kept_bytes = pack_activations(shape, plan, stage)
    moments, freed = [0.0], 0.0
    if len(trained) < len(stage_layers(shape, plan, stage)):
        # Nothing of this pack is kept yet: three tensors of the MLP, five hidden states in flight.
        states = 5 * _state(shape, plan)
        moments.append(tokens * (states + 3 * mlp_width(shape) * size / plan.tp) - kept_bytes)
    for layer in reversed(trained):
        is_last = layer == shape.num_layers - 1
        in_layer = _in_last_layer(shape, plan) if is_last else _in_mlp(shape, plan, layer)
        in_layer = max(in_layer, _in_linear_attention(shape, plan, layer))
        # An offloaded layer returns to the GPU one layer ahead of its backward pass.
        near = [index for index in trained if index in (layer - 1, layer)]
        moving = sum(
            _layer_bytes(shape, plan, index) for index in near if is_offloaded(shape, plan, index)
        )
        moments.append(in_layer + tokens * moving - freed)
        if not is_offloaded(shape, plan, layer):
            freed += tokens * _layer_bytes(shape, plan, layer)
    if stage == 0 and plan.freeze_layers == 0 and shape.lora is None:
        gradient = embedding_size(shape, plan) * size + tokens * shape.hidden_size * size
        moments.append(gradient - kept_bytes)
    buffer = tokens * shape.hidden_size * size if plan.sequence_parallel else 0.0
    return buffer + max(moments)


def _in_linear_attention(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes in addition to kept activations in the backward pass of a layer's linear attention.

    All that the gated delta rule computes of a pack exists then, in fp32: for each token the
    projections, before and after the convolution; for each value head four rows of a chunk's
    squares, and two of them for each key head; keys and values in several forms; and two states
    for each chunk.
    """
    linear = shape.of_layer(layer + 1).linear_attention
    if linear is None:
        return 0.0
    k, v, heads = linear.key_head_dim, linear.value_head_dim, linear.num_value_heads
    overlap = 1 + (linear.conv_kernel - 1) / CHUNK_TOKENS
    elements = overlap * linear.projection_width + 2 * linear.conv_width + 6 * linear.value_width
    elements += CHUNK_TOKENS * (4 * heads + 2 * linear.num_key_heads)
    elements += heads * (5 * k + 2 * k * v / CHUNK_TOKENS) + 2 * linear.num_key_heads * k
    return plan.tokens * (FP32_BYTES * elements / plan.tp + _state(shape, plan))


def _in_mlp(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes in addition to kept activations in the backward pass of a layer's MLP.

    The maximum of three moments: the second projection; the gate, which frees f and allocates 4 f
    (3 f in a fused kernel); and the first projection, when 3 f are freed and 2 f and the gradients
    of input and weight exist. A frozen layer has kept one f less and computes no gradient of its
    weights. Without a gate the first projection has one f less.
    """
    if shape.experts is not None:
        needed = _in_experts(shape, plan, layer)
        if is_recomputed(shape, plan, layer):
            needed += plan.tokens * _unrecomputed_layer_bytes(shape, plan, layer)
        return needed + plan.tokens * _state(shape, plan)
    wide = 2 if shape.is_gated else 1
    h, f = shape.hidden_size, shape.ffn_hidden_size / plan.tp
    tokens, state = plan.tokens, _state(shape, plan)
    size = ELEMENT_BYTES[plan.precision]
    if not keeps_input(shape, plan, layer, "linear_fc2"):
        needed = tokens * (wide + 2) * f
    else:
        gradient = _weight_gradient(shape, plan, layer)
        weights = tokens * (h - f) + wide * gradient
        # The fused kernel of SwiGLU allocates no scratch memory.
        scratch = not (plan.fused_kernels and shape.activation == "swiglu")
        needed = max(tokens * (f + h) + gradient, tokens * (wide + scratch) * f, weights)
    if is_recomputed(shape, plan, layer):
        # Recomputation allocates everything that the layer would have kept, and its output.
        tokens_bytes = _unrecomputed_layer_bytes(shape, plan, layer)
        return needed * size + tokens * (tokens_bytes + state)
    return needed * size + tokens * state


def _in_experts(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes in addition to kept activations in either pass of a mixture-of-experts layer.

    The maximum of five moments: expert parallelism sorts the outputs of its experts to send them
    back; the sum of a token's experts in fp32, whose outputs get gradients; the second projection,
    when these outputs are freed; the gate; and the first projection.
    """
    assert shape.experts is not None
    size = ELEMENT_BYTES[plan.precision]
    states = plan.tokens * shape.hidden_size
    rows = states * shape.experts.top_k * size
    inner = plan.tokens * _rank_width(shape, plan) * size / plan.tp
    gradient = _weight_gradient(shape, plan, layer) * size
    in_fp32 = states * (size + FP32_BYTES * (1 if size == FP32_BYTES else 2))
    sent = 2 * plan.expert_load * rows if plan.ep > 1 else 0.0
    return max(sent, rows + in_fp32, inner + gradient, 3 * inner - rows, 2 * gradient - inner)


def _weight_gradient(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Elements of the gradient of an MLP's second projection, before it is added to the buffer.

    Among experts, only the grouped kernel in bf16 allocates it.
    """
    if shape.lora is not None or not keeps_input(shape, plan, layer, "linear_fc2"):
        return 0.0
    if shape.experts is None:
        return shape.ffn_hidden_size * shape.hidden_size / plan.tp
    if plan.precision is not Precision.bf16:
        return 0.0
    rank_channels = shape.experts.count // plan.ep * shape.experts.width
    return rank_channels * shape.hidden_size / plan.tp


def _in_last_layer(shape: ModelShape, plan: Plan) -> float:
    """Bytes in addition to kept activations in the backward pass of the last layer.

    The maximum of two moments, plus what is recomputed: the first projection of the MLP, which has
    few rows, but a full gradient of its weights; and attention, with the gradients of a hidden
    state, of the output, and of queries, keys and values.
    """
    _, _, q, _ = widths(shape)
    last, size = shape.num_layers - 1, ELEMENT_BYTES[plan.precision]
    attention_gradients = (2 * q + _keys_in_attention(shape, plan)) * size / plan.tp
    needed = attention_gradients + _state(shape, plan)
    recomputed = 0.0
    if is_recomputed(shape, plan, last):
        recomputed = _unrecomputed_layer_bytes(shape, plan, last) - _state(shape, plan)
    elif plan.recompute is Recompute.selective:
        needed += attention_gradients
    attention = plan.tokens * needed + _in_attention(shape, plan)
    num_weights = 2 if shape.is_gated else 1
    mlp = num_weights * size * _weight_gradient(shape, plan, last)
    return max(attention, mlp) + plan.tokens * recomputed


def _in_attention(shape: ModelShape, plan: Plan) -> float:
    """Bytes that one call of attention's backward pass allocates in addition to its results.

    On a GPU one kernel computes a pack in 16 bits. It sums the gradients of queries in fp32, and
    computes those of keys and values for every query head (Dao 2023, "FlashAttention-2", as
    implemented). On a CPU a call computes one segment, and adds the gradients of all heads to the
    pack's. In a ring, each call needs this for its share of the keys, and the gradients of queries
    are summed in fp32.
    """
    _, _, q, kv = widths(shape)
    size, packs = ELEMENT_BYTES[plan.precision], plan.packs
    if packs.longest is not None:
        key_tensors = 2 / plan.cp if plan.ring else 2
        return packs.longest * (key_tensors + 1 / plan.cp) * q * size / plan.tp
    if plan.precision is Precision.fp32:
        return 0.0
    keys = plan.tokens if plan.ring else packs.kept_keys * packs.tokens
    in_fp32 = plan.tokens * FP32_BYTES * q * (2 if plan.ring else 1)
    return (in_fp32 + 2 * q * size * keys * (kv < q)) / plan.tp


def _keys_in_attention(shape: ModelShape, plan: Plan) -> float:
    """Elements per token of keys, values and their gradients in attention's backward pass.

    With context parallelism, those of the whole pack are gathered once more. In a ring, a rank
    holds two shares of the keys, one of which is in transit, and three of the gradients: the one
    that it adds, the one that it has sent, and the one that arrives. With two ranks nothing is in
    transit any more when the last share has come.
    """
    _, _, _, kv = widths(shape)
    if plan.cp == 1:
        return _key_width(shape, plan)
    if plan.ring:
        return 2 * kv * (4 if plan.cp == 2 else 5)
    return 4 * kv * plan.cp * plan.packs.kept_keys


def _state(shape: ModelShape, plan: Plan) -> float:
    """Bytes of one token's hidden state on one rank."""
    split = plan.tp if plan.sequence_parallel else 1
    return shape.hidden_size * ELEMENT_BYTES[plan.precision] / split
