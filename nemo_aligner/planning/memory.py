"""Bytes that a training step holds on each rank, by arithmetic alone.

Counted from the modules in ``nemo_aligner/models`` and from megatron-core 0.16's data parallel
wrapper, distributed optimizer and 1F1B schedule, as Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", count theirs; the letters are those of ``cost.py``, and
T is the tokens of a pack. ``tests/planning/test_cost.py`` holds it against real steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import Recompute
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
    parameters,
    stage_layers,
    widths,
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the fullest moment of a step.

    ``activations`` are what the backward pass needs of all packs in flight; ``transient`` is what
    is there beside all else at that moment.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


def memory(shape: ModelShape, plan: Plan, stage: int) -> Memory:
    """Bytes of one rank of a stage at the fullest moment of a step.

    Weights are in the precision of training, the head in fp32. Megatron's wrapper keeps gradients
    in fp32. The distributed optimizer (Rajbhandari et al. 2020, "ZeRO", stage 1) splits Adam's two
    fp32 moments over d, and an fp32 copy of weights that are not. With ``cpu_offload`` the moments
    are on the GPU, in part, only when no activations are.
    """
    size = ELEMENT_BYTES[plan.precision]
    head = head_size(shape, plan) if stage == plan.pp - 1 else 0
    trained = parameters(shape, plan, stage, trainable=True)
    copies = trained - head if size < FP32_BYTES else 0
    moments = 0 if plan.cpu_offload else 2 * trained
    # 1F1B: stage s of p has run p - s packs forward when the first of them comes back.
    packs = min(plan.packs.count, plan.pp - stage)
    return Memory(
        weights=size * (parameters(shape, plan, stage) - head) + FP32_BYTES * head,
        gradients=FP32_BYTES * trained,
        optimizer=FP32_BYTES * (moments + copies) / plan.dp,
        activations=packs * pack_activations(shape, plan, stage),
        transient=transient(shape, plan, stage),
    )


def fullest_stage(shape: ModelShape, plan: Plan) -> Memory:
    """The memory of the stage that needs the most."""
    return max((memory(shape, plan, stage) for stage in range(plan.pp)), key=lambda m: m.total)


def pack_activations(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Bytes that a stage's rank keeps of one pack between its forward and its backward pass.

    Every layer's, cosines and sines of the tokens' positions, and, until its gradient is back, what
    a stage sends to the next.
    """
    kept = [
        _layer_bytes(shape, plan, layer)
        for layer in stage_layers(shape, plan, stage)
        if has_backward(plan, stage, layer)
    ]
    rotation = shape.kv_channels * shape.rotary_percentage * ELEMENT_BYTES[plan.precision]
    sent = _state(shape, plan) if stage < plan.pp - 1 else 0.0
    return plan.packs.tokens * (sum(kept) + sent + rotation * bool(kept))


def _layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count bytes that a layer keeps per token; with full recomputation, its input."""
    if is_recomputed(shape, plan, layer):
        return _state(shape, plan)
    return _whole_layer_bytes(shape, plan, layer)


def _whole_layer_bytes(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count bytes that a layer keeps per token if it is not recomputed as a whole.

    Compare Korthikanti et al. 2022, equations 1 to 4, for GPT. The input of each norm and its
    output, 2 h each; rotated queries, keys and values, q + 2 kv; the attention's output, q; the
    gated MLP's two products, 2 f, and what it makes of them, f (f and f without a gate). In fp32
    one number of each norm, and the log-sum-exp of every head. Sequence parallelism splits what
    norms read and write over t. Norms of queries and keys keep those, q, and the projection in one
    piece, q + 2 kv; norms of what is added keep it, h each.

    Of the model's last layer the head's rows alone go past attention; they are too few to count. A
    frozen layer that passes a gradient on does not keep the inputs of its linear layers. Keys and
    values of a common beginning are kept as often as the kernel is given them.

    Selective recomputation leaves out those copies, the log-sum-exp, and the output, but as the
    input of the next linear layer; it keeps grouped queries twice: as the projection made them, in
    one piece with keys and values, and as a copy.

    LoRA keeps the input of each linear layer that it is beside, and r of what its A made of it.

    Where no kernel takes a whole pack and no fused one grouped heads (``equal_heads``), keys and
    values are kept for every head, 2 q, and the output twice.

    Ignored: a LayerNorm's second number; and where no kernel does a window or a soft-cap, another
    copy of the output, masks, a number for each query and key of a sequence, which all layers
    share, and in ``transient`` the scores of a block of queries, of at most 256 MiB in fp32.
    """
    h, f, q, kv = widths(shape)
    size = ELEMENT_BYTES[plan.precision]
    is_last = layer == shape.num_layers - 1
    keeps = partial(keeps_input, shape, plan, layer)
    norms = 1 if is_last else 2
    inputs = keeps("linear_qkv") + (not is_last and keeps("linear_fc1"))
    heads, inner = shape.num_attention_heads, 2 * q + _key_width(shape, plan)
    is_selective = plan.recompute is Recompute.selective
    if is_selective:
        output = q if keeps("linear_proj") and not is_last else 0
        heads, inner = 0, q + 2 * kv + output + (q if kv < q else 0)
    if not is_last:
        inner += ((2 if shape.is_gated else 1) + keeps("linear_fc2")) * f
    if shape.qk_layernorm:
        # Selective recomputation has the projection in one piece as it is.
        inner += q + kv if is_selective else 2 * q + 2 * kv
        heads += shape.num_attention_heads + shape.num_query_groups
    split = plan.tp if plan.sequence_parallel else 1
    states = ((norms + inputs) * h * size + norms * FP32_BYTES) / split
    if shape.post_layernorms and not is_last:
        states += norms * (h * size + FP32_BYTES) / split
    rank = 0 if shape.lora is None else shape.lora.rank
    low = rank * size * len(adapter_widths(shape, layer))
    return states + low + (inner * size + heads * FP32_BYTES) / plan.tp


def _key_width(shape: ModelShape, plan: Plan) -> float:
    """Numbers of keys and values that attention keeps of a token: of each group, or of each head.

    Those of a head are kept segment by segment, and the output once more.
    """
    _, _, q, kv = widths(shape)
    return 2 * q * plan.packs.kept_keys + q if plan.equal_heads else 2 * kv * plan.packs.kept_keys


def transient(shape: ModelShape, plan: Plan, stage: int) -> float:
    """The most bytes beside ``activations`` that a stage's rank needs for a moment.

    It is the greatest of some moments: in the forward pass of frozen layers; in the backward pass
    in the MLP of every layer, or the attention of the model's last one, when the layers above are
    over; and in the embedding, where all of a pack is over. Under sequence parallelism
    megatron-core keeps a buffer for a pack's states.
    """
    tokens, size = plan.packs.tokens, ELEMENT_BYTES[plan.precision]
    layers = list(stage_layers(shape, plan, stage))
    trained = [layer for layer in layers if has_backward(plan, stage, layer)]
    kept = pack_activations(shape, plan, stage)
    moments, over = [0.0], 0.0
    if len(trained) < len(layers):
        # Before anything of this pack is kept: an MLP's three products, and states on their way.
        states = 5 * _state(shape, plan)
        moments.append(tokens * (states + 3 * shape.ffn_hidden_size * size / plan.tp) - kept)
    for layer in reversed(trained):
        is_last = layer == shape.num_layers - 1
        in_layer = _in_last_attention(shape, plan) if is_last else _in_mlp(shape, plan, layer)
        moments.append(in_layer - over)
        over += tokens * _layer_bytes(shape, plan, layer)
    if stage == 0 and plan.freeze_layers == 0 and shape.lora is None:
        gradient = embedding_size(shape, plan) * size + tokens * shape.hidden_size * size
        moments.append(gradient - kept)
    buffer = tokens * shape.hidden_size * size if plan.sequence_parallel else 0.0
    return buffer + max(moments)


def _in_mlp(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Bytes beside what is kept, in the backward pass of a layer's MLP.

    It comes to the second product, then to the gate, where f are over and 4 f are made, then to the
    first product, where 3 f are over, and 2 f and the gradients of input and weight are there. (A
    frozen layer has kept one f less, and makes no gradient of a weight; without a gate the first
    product has one f less.)
    """
    wide = 2 if shape.is_gated else 1
    h, f = shape.hidden_size, shape.ffn_hidden_size / plan.tp
    tokens, state = plan.packs.tokens, _state(shape, plan)
    size = ELEMENT_BYTES[plan.precision]
    if not keeps_input(shape, plan, layer, "linear_fc2"):
        needed = tokens * (wide + 2) * f
    else:
        gradient = 0 if shape.lora is not None else f * h
        weights = tokens * (h - f) + wide * gradient
        needed = max(tokens * (f + h) + gradient, tokens * (wide + 1) * f, weights)
    if is_recomputed(shape, plan, layer):
        # The layer anew, but for its input; and its output.
        tokens_bytes = _whole_layer_bytes(shape, plan, layer)
        return needed * size + tokens * (tokens_bytes + state)
    return needed * size + tokens * state


def _in_last_attention(shape: ModelShape, plan: Plan) -> float:
    """Bytes beside what is kept, in the backward pass of the model's last attention.

    The gradients of a state, of the output, of queries, keys and values; what is recomputed.
    """
    _, _, q, _ = widths(shape)
    made = (2 * q + _key_width(shape, plan)) * ELEMENT_BYTES[plan.precision] / plan.tp
    needed = made + _state(shape, plan)
    if is_recomputed(shape, plan, shape.num_layers - 1):
        needed += _whole_layer_bytes(shape, plan, shape.num_layers - 1) - _state(shape, plan)
    elif plan.recompute is Recompute.selective:
        needed += made
    return plan.packs.tokens * needed


def _state(shape: ModelShape, plan: Plan) -> float:
    """Bytes of a token's hidden state on one rank."""
    split = plan.tp if plan.sequence_parallel else 1
    return shape.hidden_size * ELEMENT_BYTES[plan.precision] / split
