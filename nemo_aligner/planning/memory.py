"""Formulas for the memory that each rank needs at the peak of a training step, in bytes.

The formulas describe the modules in ``nemo_aligner/models`` and the data parallel wrapper, the
distributed optimizer and the 1F1B schedule of megatron-core. The approach is that of
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
``cost.py`` explains the letters h, f, q, kv and t. ``tests/planning/test_cost.py`` compares the
formulas with real steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import LAYERS_NOT_OFFLOADED, Recompute
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import QUICK_GEGLU
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS
from nemo_aligner.planning.attention import (
    in_attention,
    joined_width,
    key_width,
    keys_in_attention,
    mask_bytes,
)
from nemo_aligner.planning.cost import (
    FP32_BYTES,
    Plan,
    adapter_widths,
    has_backward,
    head_size,
    is_recomputed,
    keeps_input,
    mixer_widths,
    optimizer_parameters,
    parameters,
    stage_layers,
    widths,
)
from nemo_aligner.planning.gemma4 import (
    kept_of_gemma4,
    kept_outside_mixer,
    layer_input_bytes,
)
from nemo_aligner.planning.quantized import base_precision, matmul_bytes, saved_by_quantization

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
    copies of 16-bit weights (``optimizer_parameters``). With ``cpu_offload``, the moments count as
    ``host``: they are on the GPU only during the optimizer's step, when no activations exist.
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
        weights=size * (parameters(shape, plan, stage) - head)
        + FP32_BYTES * head
        - saved_by_quantization(shape, plan, stage),
        gradients=FP32_BYTES * trained,
        optimizer=FP32_BYTES * (moments + copies) / trained * shares if trained else 0.0,
        activations=packs * pack_activations(shape, plan, stage),
        transient=transient(shape, plan, stage),
        host=packs * offloaded_bytes(shape, plan, stage)
        + (FP32_BYTES * moments_on_host / trained * shares if trained else 0.0),
    )


def fullest_stage(shape: ModelShape, plan: Plan) -> Memory:
    """Estimate the memory of a rank in the pipeline stage that needs the most GPU memory.

    ``host`` in the result is the largest ``host`` of all stages, even if another stage needs it.
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
    - on a CPU, the masks of windows, which all layers share
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
    inputs = 0.0
    if shape.gemma4 is not None:
        rope = (shape.kv_channels + shape.gemma4.global_channels) * ELEMENT_BYTES[plan.precision]
        inputs = layer_input_bytes(shape, shape.gemma4, plan)
    sent = _state(shape, plan) if stage < plan.pp - 1 else 0.0
    kept_per_token += sent + (rope + inputs) * bool(trained)
    return plan.tokens * kept_per_token + mask_bytes(shape, plan, trained)


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
    """Return the numbers of the layers of a stage that have a backward pass (``has_backward``)."""
    layers = stage_layers(shape, plan, stage)
    return [layer for layer in layers if has_backward(plan, stage, layer)]


def _layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes per token that a layer keeps; with full recomputation, only its input."""
    if is_recomputed(shape, plan, layer):
        return _state(shape, plan)
    return _unrecomputed_layer_bytes(shape, plan, layer)


def _unrecomputed_layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes per token that a layer keeps if it is not fully recomputed.

    The approach is that of Korthikanti et al. 2022, equations 1 to 4. With the widths h of a hidden
    state, f of the MLP, q of all query heads and kv of all key heads, a layer keeps per token:

    - input and output of each norm: h each, which sequence parallelism splits over its ranks; with
      LoRA the first layer's first norm keeps only its output
    - queries, keys and values after RoPE: q + 2 kv; attention's output: q
    - both projections of a gated MLP: 2 f; their product: f (f and f without a gate)
    - with norms of queries and keys: their inputs (queries: q, the unsplit QKV projection:
      q + 2 kv), or with fused kernels contiguous copies of queries and keys (q + kv)
    - with norms on the outputs of attention and MLP: the inputs of these norms, h each
    - with attention output gates: their projection, their sigmoids, and the gated output, q each
    - with linear attention: only its projection, and the input of its output projection
    - with LoRA: the input of each linear layer that has an adapter, and the output of matrix A
    - in fp32: one statistic of each norm, and the log-sum-exp of every attention head

    Frozen layers do not keep the inputs of linear layers. Keys and values of a shared prefix are
    kept once for each time that attention's kernel receives them. With ``equal_heads`` they are
    kept for every query head (2 q), and the output is kept twice, as it is with a window on a CPU.
    Selective recomputation keeps ``_projection_width`` instead of the tensors after RoPE and the
    log-sum-exp, and attention's output only if the next linear layer needs it.

    Not counted: the MLP of the model's last layer, which computes only the few tokens that the head
    reads; the second statistic of a LayerNorm; and, if no kernel on a GPU supports a window or a
    soft cap, masks (shared by all layers), the scores of a block of queries (at most 256 MiB), and
    another copy of attention's output.
    """
    shape = shape.of_layer(layer + 1)
    h, f, _, _ = widths(shape)
    size = ELEMENT_BYTES[plan.precision]
    is_last = layer == shape.num_layers - 1
    keeps = partial(keeps_input, shape, plan, layer)
    computes_mlp = shape.has_mlp and not is_last
    places = shape.has_mixer + computes_mlp
    norms = places * shape.pre_layernorms
    inputs = shape.has_mixer * keeps("linear_qkv")
    inputs += computes_mlp and keeps("linear_fc1") and _reads_norm(shape)
    heads, inner = _kept_of_mixer(shape, plan, layer) if shape.has_mixer else (0.0, 0.0)
    if computes_mlp:
        width = f if shape.experts is None else _rank_width(shape, plan)
        inner += ((2 if shape.is_gated else 1) + keeps("linear_fc2")) * width
    split = plan.tp if plan.sequence_parallel else 1
    if layer == 0 and _frees_embedded(shape, plan):
        # The first norm, or with a parallel residual both norms of the layer, computes no gradient:
        # its input is the frozen embedding, and its own weight is frozen, too.
        norms = 0 if shape.parallel_residual else max(norms - 1, 0)
    # If attention and MLP read the same input (a parallel residual), both norms keep the same
    # tensor.
    streams = min(norms, 1) if shape.parallel_residual else norms
    states = ((streams + inputs) * h * size + norms * FP32_BYTES) / split
    if shape.post_layernorms and not is_last:
        states += places * (h * size + FP32_BYTES) / split
    if shape.gemma4 is not None and not is_last:
        added = kept_outside_mixer(shape, shape.gemma4, plan, keeps("linear_fc1"))
        inner, states = inner + added[0], states + added[1] / split
    states += _low_rank_bytes(shape, plan, layer) + _routed_bytes(shape, plan, layer)
    return states + (inner * size + heads * FP32_BYTES) / plan.tp


def _frees_embedded(shape: ModelShape, plan: Plan) -> bool:
    """Return True if the embedding's output is not kept for the backward pass.

    With LoRA it needs no gradient, but full recomputation keeps it as the input of the first layer.
    """
    return shape.lora is not None and plan.recompute is not Recompute.full


def _kept_of_mixer(shape: ModelShape, plan: Plan, layer: int) -> tuple[float, float]:
    """Count the elements per token that attention or linear attention keeps for the backward pass.

    Args:
        shape: the result of ``ModelShape.of_layer`` for the layer.

    Returns:
        The number of elements in fp32, and the number of elements in the precision of training;
        tensor parallelism splits both.
    """
    _, _, q, kv = widths(shape)
    is_last = layer == shape.num_layers - 1
    is_output_kept = keeps_input(shape, plan, layer, "linear_proj") and not is_last
    if shape.linear_attention is not None:
        projected, attended = mixer_widths(shape)
        return 0, projected + is_output_kept * attended
    joined = is_output_kept or (shape.attention_output_gate and not is_last)
    key_elements = key_width(shape, plan) + joined * joined_width(shape, plan, layer)
    if shape.gemma4 is not None:
        return kept_of_gemma4(shape, plan, is_output_kept, key_elements)
    heads, inner = float(shape.num_attention_heads), 2 * q + key_elements
    is_selective = plan.recompute is Recompute.selective
    if is_selective:
        heads, inner = 0, _projection_width(shape, plan) + is_output_kept * q
    if shape.latent_attention is not None:
        # LoRA trains no adapters of the up projections, so with LoRA they keep no inputs.
        trains_up = keeps_input(shape, plan, layer, "linear_kv_up_proj")
        return _kept_of_latents(shape, plan, is_output_kept, trains_up)
    if shape.attention_output_gate:
        inner += (not plan.fused_kernels) * q + (not is_last) * q + is_output_kept * q
    # Selective recomputation repeats norms of queries and keys that come after RoPE, so they keep
    # nothing.
    if shape.qk_layernorm and not (is_selective and shape.qk_norm_after_rope):
        # Eager norms keep the unsplit projection as their input. With selective recomputation,
        # ``_projection_width`` has counted it already.
        keeps_once = is_selective or plan.fused_kernels or shape.qk_norm_after_rope
        inner += q + kv if keeps_once else 2 * q + 2 * kv
        per_head = shape.num_attention_heads + shape.num_query_groups
        heads += 2 * plan.tp if shape.qk_layernorm_across_heads else per_head
    return heads, inner


def _kept_of_latents(
    shape: ModelShape, plan: Plan, is_output_kept: bool, is_trained: bool
) -> tuple[float, float]:
    """Count the elements of latent attention that ``_kept_of_mixer`` returns.

    Values are padded to as many channels as keys have, and so is attention's output; the output
    projection reads a copy of the output without the padding. Selective recomputation keeps only
    this copy and the outputs of the input projections. Every tensor parallel rank keeps the
    complete latents and the outputs of their norms. They are counted t times here, because the
    caller divides the result by t.
    """
    latent = shape.latent_attention
    assert latent is not None
    copied = is_output_kept * (latent.v_head_dim < latent.key_channels) * latent.value_width
    if plan.recompute is Recompute.selective:
        return 0, latent.projection_width + is_output_kept * latent.value_width
    latents = (latent.q_lora_rank or 0) + latent.latent_width + is_trained * latent.norm_width
    _, _, q, _ = widths(shape)
    norms = 1 + (latent.q_lora_rank is not None)
    heads = shape.num_attention_heads + norms * plan.tp
    return heads, 2 * q + key_width(shape, plan) + copied + latents * plan.tp


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
    """Count the MLP channels that the busiest expert parallel rank computes, per token."""
    assert shape.experts is not None
    excess = shape.experts.top_k * shape.experts.width * (plan.expert_load - 1)
    return shape.active_mlp_width + excess


def _reads_norm(shape: ModelShape) -> bool:
    """Return True if a matmul of the MLP keeps the output of the norm as its input.

    This is False for a mixture-of-experts layer without a shared expert: its experts keep copies of
    the tokens that are sent to them.
    """
    return shape.experts is None or shape.experts.shared_width is not None


def _routed_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes per token that a mixture-of-experts layer keeps besides its matmuls' outputs.

    These tensors are kept:

    - a copy of the token for each of its k experts, and the output of each expert
    - in fp32, the router's scores of all experts and the weights of the k experts; sigmoid scores
      are kept together with 1 minus them
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
    in_fp32: float = (1 + shape.experts.is_sigmoid) * shape.experts.count + 6 * k
    reads_fp32 = shape.experts.shared_gate or plan.train_router
    if reads_fp32 and (size < FP32_BYTES or not _reads_norm(shape)):
        in_fp32 += shape.hidden_size / split
    return rows * shape.hidden_size * size + FP32_BYTES * in_fp32


def transient(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Estimate the most bytes that a rank needs in addition to ``activations`` at any moment.

    It is the maximum over these moments:

    - the forward pass of frozen layers
    - the backward pass of each layer's MLP, and of the whole last layer, when the layers above have
      already freed their activations
    - the computation of the embedding's gradient, when all layers have freed their activations

    With sequence parallelism, megatron-core also keeps a buffer for the gathered hidden states of a
    pack, unless all weights that need them are frozen, as with LoRA.
    """
    tokens, size = plan.tokens, ELEMENT_BYTES[plan.precision]
    trained = _trained_layers(shape, plan, stage)
    kept_bytes = pack_activations(shape, plan, stage)
    moments, freed = [0.0], 0.0
    frozen = stage_layers(shape, plan, stage)[: -len(trained) or None]
    if frozen:
        # The forward pass of frozen layers runs before any activations of this pack are kept. At
        # its peak, three tensors of the MLP's width and five hidden states exist.
        states = 5 * _state(shape, plan)
        width = max(shape.of_layer(layer + 1).active_mlp_width for layer in frozen)
        moments.append(tokens * (states + 3 * width * size / plan.tp) - kept_bytes)
    for layer in reversed(trained):
        is_last = layer == shape.num_layers - 1
        of_layer = shape.of_layer(layer + 1)
        if is_last:
            in_layer = _in_last_layer(shape, plan)
        elif of_layer.has_mlp:
            in_layer = _in_mlp(shape, plan, layer)
        else:
            in_layer = _in_attention_layer(of_layer, plan, layer)
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
        rows = shape.padded_vocab_size(plan.tp) // plan.tp
        table = max(rows * shape.hidden_size, shape.per_layer_embedding(rows)[0])
        gradient = table * size + tokens * shape.hidden_size * size
        moments.append(gradient - kept_bytes)
    buffer = tokens * shape.hidden_size * size * (plan.sequence_parallel and shape.lora is None)
    return buffer + max(moments)


def _in_linear_attention(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes that the backward pass of linear attention needs besides kept activations.

    It is recomputed in fp32 for the whole pack, whose sequences are padded to whole chunks, and
    needs ``elements_of_backward``, less in the last chunk of each sequence. The activations of the
    layer's MLP are already freed, so they are subtracted.
    """
    of_layer = shape.of_layer(layer + 1)
    linear = of_layer.linear_attention
    if linear is None:
        return 0.0
    chunks = math.ceil(plan.packs.tokens / plan.packs.sequences / CHUNK_TOKENS)
    elements = linear.elements_of_backward - linear.elements_of_last_chunk / chunks
    padding = chunks * CHUNK_TOKENS * plan.packs.sequences / plan.packs.tokens
    state = _state(shape, plan)
    _, inner = _kept_of_mixer(of_layer, plan, layer)
    of_mixer = inner * ELEMENT_BYTES[plan.precision] / plan.tp
    of_mixer += (1 + keeps_input(shape, plan, layer, "linear_qkv")) * state
    freed = _layer_bytes(shape, plan, layer) - of_mixer
    return plan.tokens * (FP32_BYTES * padding * elements / plan.tp + state - freed)


def _in_mlp(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes that the backward pass of a layer's MLP needs besides kept activations.

    The result is the maximum over the backward passes of the MLP's three parts. With an MLP of
    width f they need, in elements per token:

    - the second projection: the gradients of its input and of its weight, and a hidden state
    - the gate: 4 f (3 f in a fused kernel), when f of the kept activations are freed
    - the first projection: 2 f and the gradients of its input and weight, when 3 f are freed

    A frozen layer has not kept the input of the second projection, so f less are freed, and it
    computes no gradients of weights. Without a gate, the first projection needs f instead of 2 f.
    """
    shape = shape.of_layer(layer + 1)
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
        # The fused kernel of SwiGLU allocates no scratch memory, and torch's square twice as much.
        scratch = 2 if shape.activation == "squared-relu" else 1
        if plan.fused_kernels and shape.activation == "swiglu":
            scratch = 0
        needed = max(tokens * (f + h) + gradient, tokens * (wide + scratch) * f, weights)
    if is_recomputed(shape, plan, layer):
        # Recomputation allocates the activations that the layer did not keep, and its output.
        state += _unrecomputed_layer_bytes(shape, plan, layer)
    at_matmul = 0.0
    if base_precision(shape) is not None:
        # A dequantized weight exists next to the gradient of its layer's output.
        freed = keeps_input(shape, plan, layer, "linear_fc2") * f
        first = matmul_bytes(shape, plan, "linear_fc1", tokens * h * size) - tokens * freed * size
        second = matmul_bytes(shape, plan, "linear_fc2", tokens * f * size) + tokens * h * size
        at_matmul = max(first, second)
        if is_recomputed(shape, plan, layer):
            # The first projection's output, its adapter's and their sum exist together, before the
            # gate has computed the input of the second projection.
            at_matmul = max(at_matmul, tokens * (2 * wide * f - freed) * size)
    return max(needed * size, at_matmul) + tokens * state


def _in_experts(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes that a mixture-of-experts layer needs besides kept activations.

    It is the maximum over five moments of its forward and backward pass:

    - with expert parallelism, the outputs of the experts are sorted to be sent back
    - the outputs of a token's experts are summed in fp32, and get gradients
    - the backward pass of the second projection, when the outputs are freed
    - the backward pass of the gate; gpt-oss' activation function allocates more than others
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
    """Count the elements of the weight gradient of an MLP's second projection (linear_fc2).

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

    - The first projection of the MLP computes few tokens, but has a full gradient of its weight,
      or dequantizes the weight.
    - ``_in_attention_layer``
    """
    last, size = shape.num_layers - 1, ELEMENT_BYTES[plan.precision]
    of_layer, attention = shape.of_layer(last + 1), 0.0
    if of_layer.has_mixer:
        attention = _in_attention_layer(of_layer, plan, last)
    if not of_layer.has_mlp:
        return attention
    num_weights = 2 if shape.is_gated else 1
    mlp = num_weights * size * _weight_gradient(of_layer, plan, last)
    if base_precision(shape) is not None:
        # In the forward pass, the model still has the embedding's output.
        embedded = _state(shape, plan) * (plan.pp == 1 and _frees_embedded(shape, plan))
        mlp = matmul_bytes(shape, plan, "linear_fc1", 0.0) + plan.tokens * embedded
    recomputed = 0.0
    if is_recomputed(of_layer, plan, last):
        recomputed = _unrecomputed_layer_bytes(of_layer, plan, last) - _state(of_layer, plan)
    return max(attention, mlp + plan.tokens * recomputed)


def _in_attention_layer(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the bytes that the backward pass of attention needs besides kept activations.

    There are gradients of a hidden state, of attention's output, and of queries, keys and values,
    and the activations that are recomputed.
    """
    _, _, q, _ = widths(shape)
    size = ELEMENT_BYTES[plan.precision]
    attention_gradients = (2 * q + keys_in_attention(shape, plan)) * size / plan.tp
    needed = attention_gradients + _state(shape, plan)
    if is_recomputed(shape, plan, layer):
        needed += _unrecomputed_layer_bytes(shape, plan, layer) - _state(shape, plan)
    elif plan.recompute is Recompute.selective:
        # A Gemma 4 repeats attention alone, and not RoPE before it.
        repeated = q * size / plan.tp
        needed += attention_gradients if shape.gemma4 is None else repeated
    return plan.tokens * needed + in_attention(shape, plan)


def _state(shape: ModelShape, plan: Plan) -> float:
    """Count the bytes of one token's hidden state on a rank; sequence parallelism splits it."""
    split = plan.tp if plan.sequence_parallel else 1
    return shape.hidden_size * ELEMENT_BYTES[plan.precision] / split
