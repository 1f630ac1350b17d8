"""Bytes that a training step holds on each rank, by arithmetic alone.

Counted from the modules in ``nemo_aligner/models`` and from megatron-core 0.16's data parallel
wrapper, distributed optimizer and 1F1B schedule, in the manner of Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models". Letters are those of ``cost.py``.
``tests/planning/test_cost.py`` compares it with real steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import LAYERS_NOT_OFFLOADED, Recompute
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
    mlp_width,
    optimizer_parameters,
    parameters,
    stage_layers,
    widths,
)

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step.

    ``activations`` is what the backward pass needs of all packs in flight, and ``transient`` what
    exists only at that moment. ``host`` are bytes of page-locked host memory, which are no part of
    ``total``: offloaded activations, and Adam's moments with ``cpu_offload``.
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
    """Bytes of one rank of a stage at the peak of a step.

    Weights are in the precision of training, the head in fp32. Megatron's wrapper keeps gradients
    in fp32. The distributed optimizer splits Adam's two fp32 moments, and the fp32 copies of 16-bit
    weights (``optimizer_parameters``). With ``cpu_offload`` moments visit the GPU in parts, and
    only when there are no activations.
    """
    size = ELEMENT_BYTES[plan.precision]
    head = head_size(shape, plan) if stage == plan.pp - 1 else 0
    trained = parameters(shape, plan, stage, trainable=True)
    copies = trained - head if size < FP32_BYTES else 0
    moments = 0 if plan.cpu_offload else 2 * trained
    shares = optimizer_parameters(shape, plan, stage)
    # 1F1B: stage s of p has run p - s packs forward when the first one's gradient arrives.
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
    """Memory of the stage that needs the most; ``host`` is the most of any stage."""
    stages = [memory(shape, plan, stage) for stage in range(plan.pp)]
    fullest = max(stages, key=lambda stage: stage.total)
    return replace(fullest, host=max(stage.host for stage in stages))


def pack_activations(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Bytes that a stage's rank keeps of one pack on the GPU between forward and backward pass.

    That is what the layers keep that are not offloaded, the cosines and sines of the tokens'
    positions, and the output that the stage sent to the next one, which megatron holds until its
    gradient is back. It holds what the stage received, too, of which offloading keeps a copy.
    """
    trained = _trained_layers(shape, plan, stage)
    kept = sum(
        _layer_bytes(shape, plan, layer)
        for layer in trained
        if not is_offloaded(shape, plan, layer)
    )
    if stage > 0 and any(is_offloaded(shape, plan, layer) for layer in trained):
        kept += _state(shape, plan)
    rotation = shape.kv_channels * shape.rotary_percentage * ELEMENT_BYTES[plan.precision]
    rotation *= 1 if shape.rotary_base_local is None else 2
    sent = _state(shape, plan) if stage < plan.pp - 1 else 0.0
    return plan.tokens * (kept + sent + rotation * bool(trained))


def offloaded_bytes(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Bytes of one pack that a stage's rank copies to host memory, and back."""
    layers = _trained_layers(shape, plan, stage)
    offloaded = [layer for layer in layers if is_offloaded(shape, plan, layer)]
    received = _state(shape, plan) if offloaded and stage > 0 else 0.0
    return plan.tokens * (sum(_layer_bytes(shape, plan, each) for each in offloaded) - received)


def is_offloaded(shape: ModelShape, plan: Plan, layer: int) -> bool:
    """Return True if host memory has what a layer keeps (``models/activation_offload``)."""
    return plan.activations_offload and layer < shape.num_layers - LAYERS_NOT_OFFLOADED


def _trained_layers(shape: ModelShape, plan: Plan, stage: int) -> list[int]:
    """Layers of a stage that have a backward pass."""
    layers = stage_layers(shape, plan, stage)
    return [layer for layer in layers if has_backward(plan, stage, layer)]


def _layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes that a layer keeps per token; with full recomputation, only its input."""
    if is_recomputed(shape, plan, layer):
        return _state(shape, plan)
    return _whole_layer_bytes(shape, plan, layer)


def _whole_layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes that a layer keeps per token if it is not recomputed as a whole.

    Compare equations 1 to 4 of Korthikanti et al. 2022, for GPT. Numbers per token, in the
    precision of training:

    - input and output of each norm, 2 h, or h without it; sequence parallelism splits them over t
    - rotated queries, keys and values, q + 2 kv, and the attention's output, q
    - both products of a gated MLP, 2 f, and their combination, f (without a gate f and f)
    - with norms of queries and keys, the queries, q, and the unsplit projection, q + 2 kv; fused
      kernels keep contiguous copies of queries and keys, q + kv, instead
    - with norms of what is added to the residual stream, their inputs, h each
    - with LoRA, the input of each linear layer that has it, and the r outputs of A

    and in fp32 one statistic of each norm, and the log-sum-exp of every head. Past attention the
    model's last layer has only the rows that the head reads: too few to count. A frozen layer that
    passes a gradient on does not keep the inputs of its linear layers. Keys and values of a common
    prefix are kept as often as the kernel gets them.

    Selective recomputation drops those copies, the log-sum-exp and the output, unless the next
    linear layer needs it as its input. It keeps grouped queries as ``_split_width`` says.

    If no kernel takes a whole pack with grouped heads (``equal_heads``), keys and values are kept
    for every head, 2 q, and the output twice.

    Ignored: a LayerNorm's second statistic. And, if no kernel supports a window or a soft cap:
    another copy of the output; masks, one number per query and key of a sequence, which all layers
    share; and in ``transient`` the scores of a block of queries, at most 256 MiB in fp32.
    """
    h, f, q, kv = widths(shape)
    size = ELEMENT_BYTES[plan.precision]
    is_last = layer == shape.num_layers - 1
    keeps = partial(keeps_input, shape, plan, layer)
    places = 1 if is_last else 2
    norms = places * shape.pre_layernorms
    inputs = keeps("linear_qkv") + (not is_last and keeps("linear_fc1") and _reads_norm(shape))
    heads, inner = shape.num_attention_heads, 2 * q + _key_width(shape, plan)
    is_selective = plan.recompute is Recompute.selective
    if is_selective:
        output = q if keeps("linear_proj") and not is_last else 0
        heads, inner = 0, _split_width(shape, plan) + output
    if not is_last and shape.experts is None:
        inner += ((2 if shape.is_gated else 1) + keeps("linear_fc2")) * f
    elif not is_last:
        inner += (2 + keeps("linear_fc2")) * _rank_width(shape, plan)
    if shape.qk_layernorm:
        # Selective recomputation has the projection in one piece as it is.
        inner += q + kv if is_selective or plan.fused_kernels else 2 * q + 2 * kv
        per_head = shape.num_attention_heads + shape.num_query_groups
        heads += 2 * plan.tp if shape.qk_layernorm_across_heads else per_head
    split = plan.tp if plan.sequence_parallel else 1
    states = ((norms + inputs) * h * size + norms * FP32_BYTES) / split
    if shape.post_layernorms and not is_last:
        states += places * (h * size + FP32_BYTES) / split
    states += _low_rank_bytes(shape, plan, layer) + _routed_bytes(shape, plan, layer)
    return states + (inner * size + heads * FP32_BYTES) / plan.tp


def _low_rank_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes per token that a layer keeps of what LoRA's matrices A give."""
    rank = 0 if shape.lora is None else shape.lora.rank
    return rank * ELEMENT_BYTES[plan.precision] * len(adapter_widths(shape, layer))


def _split_width(shape: ModelShape, plan: Plan) -> float:
    """Numbers per token that selective recomputation keeps of queries, keys and values.

    Grouped queries are kept twice: in the projection, in one piece with keys and values, and as a
    contiguous copy. The fused kernel, which splits and rotates at once, makes three tensors of it.
    """
    _, _, q, kv = widths(shape)
    is_fused = plan.fused_kernels and not shape.qk_layernorm and shape.experts is None
    return q + 2 * kv + (q if kv < q and not is_fused else 0)


def _rank_width(shape: ModelShape, plan: Plan) -> float:
    """Ffn channels, for each token, of what a rank's experts are given."""
    assert shape.experts is not None
    more = shape.experts.top_k * shape.experts.width * (plan.expert_load - 1)
    return mlp_width(shape) + more


def _reads_norm(shape: ModelShape) -> bool:
    """Return True if a product keeps the normed tokens; experts keep copies of them instead."""
    return shape.experts is None or shape.experts.shared_width is not None


def _routed_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes per token that a mixture keeps beside its products.

    A copy of the token for each of its k experts, and what each gives it; in fp32 the shares of all
    experts and the weights of k, and the numbers and the places of k in 8 bytes each. The shared
    expert's gate keeps its output, and like a router that is trained the token in fp32; sequence
    parallelism splits the latter, but not the shared expert's input. Expert parallelism exchanges
    as many rows on average, of which the fullest rank gets ``plan.expert_load`` times as many.
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
    """Numbers per token that attention keeps of keys and values, for each group or each head.

    With a copy for each head it works segment by segment, and keeps the output a second time. With
    context parallelism only a rank's own are kept, and the others' gathered once more.
    """
    _, _, q, kv = widths(shape)
    if plan.cp > 1 and not plan.equal_heads:
        return 2 * kv
    return 2 * q * plan.packs.kept_keys + q if plan.equal_heads else 2 * kv * plan.packs.kept_keys


def transient(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Most bytes that a stage's rank needs on top of ``activations`` at any moment.

    The candidates are: the forward pass of frozen layers; the backward pass of each layer's MLP, or
    of the whole last layer, when the layers above have freed theirs; and the embedding's
    gradient, when all layers have. Under sequence parallelism megatron-core also keeps a buffer for
    a pack's gathered states.
    """
    tokens, size = plan.tokens, ELEMENT_BYTES[plan.precision]
    trained = _trained_layers(shape, plan, stage)
    kept = pack_activations(shape, plan, stage)
    moments, over = [0.0], 0.0
    if len(trained) < len(stage_layers(shape, plan, stage)):
        # Nothing of this pack is kept yet: three MLP products, and five hidden states in flight.
        states = 5 * _state(shape, plan)
        moments.append(tokens * (states + 3 * mlp_width(shape) * size / plan.tp) - kept)
    for layer in reversed(trained):
        is_last = layer == shape.num_layers - 1
        in_layer = _in_last_layer(shape, plan) if is_last else _in_mlp(shape, plan, layer)
        # Offloaded layers are on the GPU one ahead of their backward pass.
        near = [each for each in trained if each in (layer - 1, layer)]
        moving = sum(
            _layer_bytes(shape, plan, each) for each in near if is_offloaded(shape, plan, each)
        )
        moments.append(in_layer + tokens * moving - over)
        if not is_offloaded(shape, plan, layer):
            over += tokens * _layer_bytes(shape, plan, layer)
    if stage == 0 and plan.freeze_layers == 0 and shape.lora is None:
        gradient = embedding_size(shape, plan) * size + tokens * shape.hidden_size * size
        moments.append(gradient - kept)
    buffer = tokens * shape.hidden_size * size if plan.sequence_parallel else 0.0
    return buffer + max(moments)


def _in_mlp(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes on top of what is kept, in the backward pass of a layer's MLP.

    The maximum of three moments: the second product; the gate, where f are freed and 4 f made (3 f
    by a fused kernel); and the first product, where 3 f are freed, and 2 f and the gradients of
    input and weight exist. (A frozen layer has kept one f less and makes no weight gradient;
    without a gate the first product has one f less.)
    """
    if shape.experts is not None:
        needed = _in_experts(shape, plan, layer)
        if is_recomputed(shape, plan, layer):
            needed += plan.tokens * _whole_layer_bytes(shape, plan, layer)
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
        # The fused kernel of SwiGLU needs no scratch.
        scratch = not (plan.fused_kernels and shape.activation == "swiglu")
        needed = max(tokens * (f + h) + gradient, tokens * (wide + scratch) * f, weights)
    if is_recomputed(shape, plan, layer):
        # Everything the layer would have kept, recomputed, and its output.
        tokens_bytes = _whole_layer_bytes(shape, plan, layer)
        return needed * size + tokens * (tokens_bytes + state)
    return needed * size + tokens * state


def _in_experts(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes on top of what is kept, in the forward or backward pass of a layer's mixture.

    The maximum of five moments: expert parallelism sorts the outputs of its experts to send them
    back; the sum of a token's experts in fp32, whose outputs get gradients; the second product,
    where these outputs are freed; the gate; and the first product.
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
    """Numbers of the gradient of an MLP's second product, before it is added to the buffer.

    Of experts only the kernel that takes all at once makes it, in bf16.
    """
    if shape.lora is not None or not keeps_input(shape, plan, layer, "linear_fc2"):
        return 0.0
    if shape.experts is None:
        return shape.ffn_hidden_size * shape.hidden_size / plan.tp
    if plan.precision is not Precision.bf16:
        return 0.0
    own = shape.experts.count // plan.ep * shape.experts.width
    return own * shape.hidden_size / plan.tp


def _in_last_layer(shape: ModelShape, plan: Plan) -> float:
    """Bytes on top of what is kept, in the backward pass of the last layer.

    The maximum of two moments: the first product of its MLP, which has few rows, but whole
    gradients of its weights; and attention, with gradients of a hidden state, of the output, and of
    queries, keys and values. And what is recomputed.
    """
    _, _, q, _ = widths(shape)
    last, size = shape.num_layers - 1, ELEMENT_BYTES[plan.precision]
    made = (2 * q + _keys_in_attention(shape, plan)) * size / plan.tp
    needed = made + _state(shape, plan)
    again = 0.0
    if is_recomputed(shape, plan, last):
        again = _whole_layer_bytes(shape, plan, last) - _state(shape, plan)
    elif plan.recompute is Recompute.selective:
        needed += made
    attention = plan.tokens * needed + _in_attention(shape, plan)
    wide = 2 if shape.is_gated else 1
    return max(attention, wide * size * _weight_gradient(shape, plan, last)) + plan.tokens * again


def _in_attention(shape: ModelShape, plan: Plan) -> float:
    """Bytes that one call of attention's backward pass needs beside its results.

    A GPU's kernel takes a pack in 16 bits. It sums the gradients of queries in fp32, and makes
    those of keys and values for every query head (Dao 2023, "FlashAttention-2", as implemented). A
    CPU's takes a segment, whose gradients of all heads are then added to the pack's. In a ring each
    takes what a share has of these, and those of queries are added up in fp32.
    """
    _, _, q, kv = widths(shape)
    size, packs = ELEMENT_BYTES[plan.precision], plan.packs
    if packs.longest is not None:
        of_keys = 2 / plan.cp if plan.ring else 2
        return packs.longest * (of_keys + 1 / plan.cp) * q * size / plan.tp
    if plan.precision is Precision.fp32:
        return 0.0
    keys = plan.tokens if plan.ring else packs.kept_keys * packs.tokens
    in_fp32 = plan.tokens * FP32_BYTES * q * (2 if plan.ring else 1)
    return (in_fp32 + 2 * q * size * keys * (kv < q)) / plan.tp


def _keys_in_attention(shape: ModelShape, plan: Plan) -> float:
    """Numbers per token of keys, values and their gradients in attention's backward pass.

    Those of the whole pack are gathered once more. In a ring a rank has two shares, of which one is
    on its way, and gradients of three: what it adds, what it has sent, and what arrives. Nothing is
    on its way when the last one of two ranks has come.
    """
    _, _, _, kv = widths(shape)
    if plan.cp == 1:
        return _key_width(shape, plan)
    if plan.ring:
        return 2 * kv * (4 if plan.cp == 2 else 5)
    return 4 * kv * plan.cp * plan.packs.kept_keys


def _state(shape: ModelShape, plan: Plan) -> float:
    """Bytes of a token's hidden state on one rank."""
    split = plan.tp if plan.sequence_parallel else 1
    return shape.hidden_size * ELEMENT_BYTES[plan.precision] / split
