"""Formulas for the memory that each rank needs at the peak of a training step, in bytes.

The formulas describe the modules in ``nemo_aligner/models`` and the data parallel wrapper, the
distributed optimizer and the 1F1B schedule of megatron-core 0.16. The approach is that of
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
``cost.py`` explains the letters. ``tests/planning/test_cost.py`` compares the formulas with real
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import LAYERS_NOT_OFFLOADED, Recompute
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import QUICK_GEGLU
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS
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
        weights, gradients, optimizer: memory that exists during the whole step.
        activations: tensors that are kept for the backward pass, of all packs whose backward pass
            has not run yet.
        transient: tensors that exist only at the moment of the peak.
        host: page-locked host memory for offloaded activations, and for Adam's moments with
            ``cpu_offload``. It is not part of ``total``.
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
    """Estimate the memory of one rank of a stage at the peak of a step.

    The head's weights are in fp32, all others in the precision of training. Megatron's wrapper
    keeps gradients in fp32. The distributed optimizer shards Adam's two fp32 moments and the fp32
    copies of 16-bit weights (``optimizer_parameters``). With ``cpu_offload``, moments are copied to
    the GPU only for the optimizer's step, when no activations exist, so they do not count there.
    """
    size = ELEMENT_BYTES[plan.precision]
    head = head_size(shape, plan) if stage == plan.pp - 1 else 0
    trained = parameters(shape, plan, stage, trainable=True)
    copies = trained - head if size < FP32_BYTES else 0
    moments = 0 if plan.cpu_offload else 2 * trained
    shares = optimizer_parameters(shape, plan, stage)
    # In the 1F1B schedule, stage s of p has run p - s forward passes before its first backward
    # pass, and keeps the activations of these packs.
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
    """Estimate the memory of a rank in the stage that needs the most.

    ``host`` is the maximum over all stages, which may be that of another stage.
    """
    stages = [memory(shape, plan, stage) for stage in range(plan.pp)]
    fullest = max(stages, key=lambda stage: stage.total)
    return replace(fullest, host=max(stage.host for stage in stages))


def pack_activations(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Count the bytes that a rank keeps of one pack on the GPU between forward and backward pass.

    These tensors are kept:

    - the activations of all layers that are not offloaded
    - the cosines and sines of RoPE for the tokens' positions
    - the output that the stage has sent to the next stage, until its gradient arrives
    - the input that the stage has received; Megatron keeps it on the GPU even if the activations of
      the stage's first layer are offloaded
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
    """Count the bytes of one pack's activations that a rank copies to host memory and back."""
    layers = _trained_layers(shape, plan, stage)
    offloaded = [layer for layer in layers if is_offloaded(shape, plan, layer)]
    received = _state(shape, plan) if offloaded and stage > 0 else 0.0
    copied = sum(_layer_bytes(shape, plan, layer) for layer in offloaded)
    return plan.tokens * (copied - received)


def is_offloaded(shape: ModelShape, plan: Plan, layer: int) -> bool:
    """Return True if a layer's activations are in host memory until its backward pass.

    ``models/activation_offload`` copies them.
    """
    return plan.activations_offload and layer < shape.num_layers - LAYERS_NOT_OFFLOADED


def _trained_layers(shape: ModelShape, plan: Plan, stage: int) -> list[int]:
    """Return the layers of a stage that have a backward pass."""
    layers = stage_layers(shape, plan, stage)
    return [layer for layer in layers if has_backward(plan, stage, layer)]


def _layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes per token that a layer keeps; with full recomputation, only its input."""
    if is_recomputed(shape, plan, layer):
        return _state(shape, plan)
    return _unrecomputed_layer_bytes(shape, plan, layer)


def _unrecomputed_layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes per token that a layer keeps if it is not fully recomputed.

    Equations 1 to 4 of Korthikanti et al. 2022 count the same for GPT. A layer keeps these elements
    per token, in the precision of training:

    - 2 h: input and output of each norm (h without a norm); sequence parallelism splits them over t
    - q + 2 kv and q: queries, keys and values after RoPE, and attention's output
    - 2 f and f: both projections of a gated MLP and their product (f and f without a gate)
    - with norms of queries and keys: the queries q, and the projection q + 2 kv before it is split;
      fused kernels keep contiguous copies of queries and keys, q + kv, instead
    - with norms on the outputs of attention and MLP: the inputs of these norms, h each
    - with output gates of attention: the gates' projection, their sigmoids and the gated output,
      q each
    - with linear attention instead of attention: its first projection, and the input of its second
      one; the rest is recomputed
    - with LoRA: the input of each linear layer that has an adapter, and the r outputs of A

    In fp32 it keeps one statistic of each norm and the log-sum-exp of every head. After attention,
    the model's last layer computes only the tokens that the head reads: too few to count. A frozen
    layer with a backward pass does not keep the inputs of its linear layers. Keys and values of a
    shared prefix are kept as often as the kernel receives them.

    Selective recomputation drops the copies after RoPE, the log-sum-exp, and attention's output if
    the next linear layer does not need it. ``_projection_width`` counts what it keeps instead.

    If no kernel computes a whole pack with grouped heads (``equal_heads``), keys and values are
    kept for every head (2 q), and the output is kept twice.

    The formula ignores the second statistic of a LayerNorm. If no kernel supports a window or a
    soft cap, it also ignores another copy of the output, the masks (one element per query and key
    of a sequence, shared by all layers), and the scores of a block of queries (``transient``, at
    most 256 MiB in fp32).
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
    """Count the bytes per token that a layer keeps of the outputs of LoRA's matrices A."""
    rank = 0 if shape.lora is None else shape.lora.rank
    return rank * ELEMENT_BYTES[plan.precision] * len(adapter_widths(shape, layer))


def _projection_width(shape: ModelShape, plan: Plan) -> float:
    """Count the elements per token that selective recomputation keeps of queries, keys and values.

    With grouped heads, queries are kept twice: in the output of the projection, a tensor that also
    holds keys and values, and as a contiguous copy. The fused kernel splits this output and applies
    RoPE at once. It makes one tensor each of queries, keys and values, so queries are kept once.
    """
    _, _, q, kv = widths(shape)
    is_fused = plan.fused_kernels and not shape.qk_layernorm and shape.experts is None
    return q + 2 * kv + (q if kv < q and not is_fused else 0)


def _rank_width(shape: ModelShape, plan: Plan) -> float:
    """Count the MLP channels per token that the experts of the busiest rank compute."""
    assert shape.experts is not None
    excess = shape.experts.top_k * shape.experts.width * (plan.expert_load - 1)
    return mlp_width(shape) + excess


def _reads_norm(shape: ModelShape) -> bool:
    """Return True if a matmul of the MLP keeps the output of the norm as its input.

    A mixture-of-experts layer without a shared expert does not: its experts keep copies of the rows
    that are sent to them.
    """
    return shape.experts is None or shape.experts.shared_width is not None


def _routed_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes per token that a mixture-of-experts layer keeps besides its matmuls' outputs.

    These tensors are kept:

    - a copy of the token for each of its k experts, and the output of each expert
    - in fp32, the router's probabilities of all experts and the weights of the k experts
    - the indices and positions of the k experts, 8 bytes each
    - with a gated shared expert: the shared expert's output
    - with a gated shared expert or a trained router: the token in fp32, which sequence parallelism
      splits
    - with a shared expert: its input, which sequence parallelism does not split

    With expert parallelism, a rank receives as many copies as it sends on average, and the busiest
    rank receives ``plan.expert_load`` times as many.
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
    """Count the elements per token that attention keeps of keys and values.

    If keys and values are copied for each head (``equal_heads``), attention computes one segment at
    a time and also keeps its output a second time. With context parallelism, a rank keeps only its
    own keys and values, and gathers those of other ranks again in the backward pass.
    """
    _, _, q, kv = widths(shape)
    if plan.cp > 1 and not plan.equal_heads:
        return 2 * kv
    return 2 * q * plan.packs.kept_keys + q if plan.equal_heads else 2 * kv * plan.packs.kept_keys


def transient(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Estimate the most bytes that a rank needs in addition to ``activations`` at any moment.

    It is the maximum over these moments:

    - the forward pass of frozen layers
    - the backward pass of each layer's MLP, and of the whole last layer, when the layers above have
      already freed their activations
    - the computation of the embedding's gradient, when all layers have freed their activations

    With sequence parallelism, megatron-core also keeps a buffer for the gathered hidden states of a
    pack.
    """
    tokens, size = plan.tokens, ELEMENT_BYTES[plan.precision]
    trained = _trained_layers(shape, plan, stage)
    kept_bytes = pack_activations(shape, plan, stage)
    moments, freed = [0.0], 0.0
    if len(trained) < len(stage_layers(shape, plan, stage)):
        # In a frozen layer, no activations of this pack are kept yet. Three tensors of the MLP's
        # width and five hidden states exist at the same time.
        states = 5 * _state(shape, plan)
        moments.append(tokens * (states + 3 * mlp_width(shape) * size / plan.tp) - kept_bytes)
    for layer in reversed(trained):
        is_last = layer == shape.num_layers - 1
        in_layer = _in_last_layer(shape, plan) if is_last else _in_mlp(shape, plan, layer)
        in_layer = max(in_layer, _in_linear_attention(shape, plan, layer))
        # The activations of an offloaded layer return to the GPU during the backward pass of the
        # layer above it.
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
    """Count the bytes that the backward pass of a layer's linear attention needs.

    They come in addition to the kept activations, and are fp32, because the gated delta rule is
    recomputed for the whole pack. For each token they are: the projections, before and after the
    convolution; one row of each of a chunk's ``[64, 64]`` matrices, of which a value head has four
    and a key head two; keys and values in several forms; and a token's share of two states per
    chunk.
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
    """Count the bytes that the backward pass of a layer's MLP needs besides kept activations.

    It is the maximum over the backward passes of the MLP's three parts, per token:

    - the second projection
    - the gate, which frees f and allocates 4 f (3 f in a fused kernel)
    - the first projection: 3 f are freed, and 2 f and the gradients of input and weight exist

    A frozen layer has kept one f less, and computes no gradients of weights. Without a gate, the
    first projection has one f less.
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
        # Recomputation allocates all activations that the layer did not keep, and its output.
        tokens_bytes = _unrecomputed_layer_bytes(shape, plan, layer)
        return needed * size + tokens * (tokens_bytes + state)
    return needed * size + tokens * state


def _in_experts(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes that a mixture-of-experts layer needs besides kept activations.

    It is the maximum over five moments of its forward and backward pass:

    - with expert parallelism, the outputs of the experts are sorted to be sent back
    - the outputs of a token's experts are summed in fp32, and get gradients
    - the backward pass of the second projection, when the outputs are freed
    - the backward pass of the gate, which allocates more for gpt-oss' activation
    - the backward pass of the first projection
    """
    assert shape.experts is not None
    size = ELEMENT_BYTES[plan.precision]
    states = plan.tokens * shape.hidden_size
    rows = states * shape.experts.top_k * size
    inner = plan.tokens * _rank_width(shape, plan) * size / plan.tp
    gradient = _weight_gradient(shape, plan, layer) * size
    in_fp32 = states * (size + FP32_BYTES * (1 if size == FP32_BYTES else 2))
    sent = 2 * plan.expert_load * rows if plan.ep > 1 else 0.0
    is_quick = shape.activation == QUICK_GEGLU
    gate = (3 + is_quick * (1 + 1 / size)) * inner - rows
    return max(sent, rows + in_fp32, inner + gradient, gate, 2 * gradient - inner)


def _weight_gradient(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the elements of the gradient of the weight of an MLP's second projection.

    It exists until it is added to Megatron's gradient buffer. In a mixture-of-experts model, only
    the grouped kernel in bf16 allocates it; otherwise the result is 0.
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
    """Count the bytes that the backward pass of the last layer needs besides kept activations.

    It is the maximum over two moments, plus the activations that are recomputed:

    - The first projection of the MLP computes few tokens, but has a full gradient of its weight.
    - Attention has gradients of a hidden state, of its output, and of queries, keys and values.
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
    """Count the bytes that a call of attention's backward pass allocates besides its results.

    On a GPU, one kernel computes a whole pack in 16 bits. It sums the gradients of queries in fp32,
    and computes the gradients of keys and values for every query head (Dao 2023,
    "FlashAttention-2", as implemented). On a CPU, a call computes one segment, and adds its
    gradients to those of the pack. In a ring, a call computes one rank's part of the keys, and the
    gradients of queries are summed over the calls in fp32.
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
    """Count the elements per token of keys, values and their gradients in the backward pass.

    With context parallelism, the keys and values of the whole pack are gathered again. In a ring, a
    rank holds the keys and values of two ranks, because it computes with one part while the next
    part arrives. It holds three parts of the gradients: the part to which it adds, the part that it
    has sent, and the part that arrives. With two ranks no further part arrives after the first.
    """
    _, _, _, kv = widths(shape)
    if plan.cp == 1:
        return _key_width(shape, plan)
    if plan.ring:
        return 2 * kv * (4 if plan.cp == 2 else 5)
    return 4 * kv * plan.cp * plan.packs.kept_keys


def _state(shape: ModelShape, plan: Plan) -> float:
    """Count the bytes of one token's hidden state on a rank; sequence parallelism splits it."""
    split = plan.tp if plan.sequence_parallel else 1
    return shape.hidden_size * ELEMENT_BYTES[plan.precision] / split
