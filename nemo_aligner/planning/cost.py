"""Formulas for the cost of a training step: parameters, FLOPs and bytes sent between ranks.

The formulas describe the modules in ``nemo_aligner/models`` and the schedules and optimizer of
megatron-core. ``memory.py`` estimates memory, and ``step_time.py`` estimates time.

The approach is that of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM". The docstrings of this package use these letters:

- h, f, q and kv: width of a hidden state, of the MLP, of all queries and of all keys
- t, c, p, d and e: sizes of tensor, context, pipeline, data and expert parallelism
- m: number of packs that a data parallel rank computes in a step
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import LayoutSizes
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import HeadShape
from nemo_aligner.models.shapes.linear_attention import (
    CHUNK_TOKENS,
    LinearAttentionShape,
    Mamba2Shape,
)
from nemo_aligner.utils.errors import ConfigError

FP32_BYTES = 4


@dataclass(frozen=True)
class Packs:
    """The work of one data parallel rank in a step: ``count`` packs of equal size.

    A pack is a micro-batch of several sequences in one row, without padding.

    Attributes:
        tokens: number of tokens of a pack.
        sequences: number of sequences of a pack. The head reads one token of each sequence.
        keys: mean number of keys that a token attends to.
        count: number of packs that the rank computes in a step.
        kept_keys: number of keys per token that attention keeps for the backward pass: 1, or more
            if a shared prefix is copied for each sequence that has it.
        longest: number of tokens of the longest segment (a shared prefix, or the rest of a
            sequence) if attention's backward pass computes one segment at a time, as on a CPU;
            None if one kernel computes the whole pack.
    """

    tokens: int
    sequences: int
    keys: float
    count: int = 1
    kept_keys: float = 1.0
    longest: int | None = None


@dataclass(frozen=True)
class Plan(LayoutSizes):
    """Everything that the cost of a step depends on, except for the model's shape.

    The fields of ``LayoutSizes`` are the parallel layout. A field with the name of a training
    setting means the same as the setting.

    Attributes:
        packs: the work of each data parallel rank.
        recompute_layers: number of layers that ``Recompute.full`` recomputes in each pipeline
            stage, counted from its first layer with a backward pass; None means all.
        equal_heads: attention copies keys and values for every query head, because no kernel
            supports grouped heads, as in fp32 on GPUs (``models/attention``).
        fused_kernels: norms and RoPE use the fused GPU kernels of ``models/pointwise`` instead of
            torch's.
        fused_dequantization: one GPU kernel dequantizes a quantized weight, instead of torch's.
        expert_load: number of tokens that the router sends to the busiest expert parallel rank,
            relative to the mean over these ranks.
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
    fused_dequantization: bool = False
    expert_load: float = 1.0

    @property
    def tokens(self) -> float:
        """Number of tokens of a pack that one context parallel rank computes."""
        return self.packs.tokens / self.cp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same dense weights.

        They reduce gradients with each other, and shard the optimizer's state.
        """
        return self.dp * self.cp


@dataclass(frozen=True)
class Flops:
    """Floating point operations for one pack in a pipeline stage.

    They are summed over the tensor and context parallel ranks that share the pack.
    """

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
    """Describe the packs that training makes of equal pairs of sequences.

    ``data/packing.py`` makes as few packs as the token budget allows, with even work. The two
    sequences of a pair share a prefix, which a pack holds once. As on a GPU, attention's kernel
    gets the prefix once by itself and once with each sequence.

    Args:
        pairs: number of pairs that the rank computes in a step.
        length: number of tokens of each sequence, prefix included.
        budget: most tokens of a pack.
        prefix: number of tokens that both sequences of a pair share.

    Raises:
        ConfigError: a single pair has more tokens than the budget.
    """
    size = 2 * length - prefix
    if size > budget:
        raise ConfigError(
            f"model.micro_batch_tokens: got {budget}, wanted at least {size}, the tokens of a pair "
            f"of two sequences of {length} tokens"
        )
    count = -(-pairs // (budget // size))
    fullest = -(-pairs // count)
    kept_keys = (2 * length + prefix) / size
    return Packs(fullest * size, 2 * fullest, attended_keys(length, prefix), count, kept_keys)


def attended_keys(length: int, prefix: int = 0, sequences: int = 2) -> float:
    """Compute the mean number of keys that a token of a pack attends to, under causal attention.

    Token i (from 1) of a sequence attends to i keys. The sequences of ``length`` tokens share a
    prefix of ``prefix`` tokens, which the pack holds once.
    """
    suffix = length - prefix
    prefix_keys = prefix * (prefix + 1) / 2
    suffix_keys = suffix * prefix + suffix * (suffix + 1) / 2
    return (prefix_keys + sequences * suffix_keys) / (prefix + sequences * suffix)


def widths(shape: ModelShape) -> tuple[int, int, int, int]:
    """Return the channels of a hidden state (h), the MLP (f), all queries (q) and all keys (kv)."""
    return (
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_attention_heads * shape.kv_channels,
        shape.num_query_groups * shape.kv_channels,
    )


def mixer_widths(shape: ModelShape) -> tuple[int, int]:
    """Return the widths of attention's QKV projection (outputs) and output projection (inputs).

    For linear attention, these are the widths of its input projection and of its output projection.

    Args:
        shape: ``ModelShape.of_layer`` of a layer with attention of any kind.
    """
    if shape.linear_attention is not None:
        return shape.linear_attention.projection_width, shape.linear_attention.value_width
    if shape.latent_attention is not None:
        return shape.latent_attention.projection_width, shape.latent_attention.value_width
    _, _, q, _ = widths(shape)
    return (1 + shape.attention_output_gate) * q + shape.key_value_width, q


def stage_layers(shape: ModelShape, plan: Plan, stage: int) -> range:
    """Return the layers of a pipeline stage; layers are counted from 0 over the whole model."""
    num_layers = shape.num_layers // plan.pp
    return range(stage * num_layers, (stage + 1) * num_layers)


def has_backward(plan: Plan, stage: int, layer: int) -> bool:
    """Return True if a layer has a backward pass, even if its weights are frozen.

    The frozen layers of the first stage have none. In later stages every layer has one, because the
    hidden states that arrive from the previous stage require a gradient.
    """
    return layer >= plan.freeze_layers or stage > 0


def is_recomputed(shape: ModelShape, plan: Plan, layer: int) -> bool:
    """Return True if a layer is fully recomputed.

    Such a layer keeps only its input, and its backward pass begins with another forward pass.
    """
    if plan.recompute is not Recompute.full:
        return False
    num_layers = shape.num_layers // plan.pp
    num_recomputed = num_layers if plan.recompute_layers is None else plan.recompute_layers
    stage, index = divmod(layer, num_layers)
    first = 0 if stage > 0 else plan.freeze_layers
    return first <= index < first + num_recomputed


def parameters(shape: ModelShape, plan: Plan, stage: int, *, trainable: bool = False) -> int:
    """Count the parameters on one rank of a stage; with ``trainable`` only the trained ones.

    Linear layers and the rows of the embedding are split over tensor parallel ranks; every rank has
    all norms. The first stage has the embedding. The last stage has the final norm and the head.
    With LoRA, only the adapters and the head are trained.
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
    """Count a layer's parameters on one rank, without LoRA adapters."""
    split, replicated = shape.layer_parameters()
    experts, biases = _experts_of_layer(shape), _output_biases(shape)
    dense = (split - experts) // plan.tp + replicated - biases
    return dense + experts // (plan.tp * plan.ep) + biases // plan.ep


def _experts_of_layer(shape: ModelShape) -> int:
    """Count the parameters of all experts of a layer, before parallelism splits them over ranks."""
    if shape.experts is None:
        return 0
    return shape.experts.parameters(shape.hidden_size, 3 if shape.is_gated else 2)[0]


def _output_biases(shape: ModelShape) -> int:
    """Count the biases of the experts' second projections in a layer, which TP does not split."""
    return 0 if shape.experts is None else shape.experts.output_biases(shape.hidden_size)


def expert_parameters(shape: ModelShape, plan: Plan, stage: int) -> int:
    """Count the trained expert parameters on one rank of a stage.

    ``optimizer_parameters`` needs them separately, because their optimizer state is split over
    fewer ranks than that of other parameters.
    """
    layers = {layer: shape.of_layer(layer + 1) for layer in stage_layers(shape, plan, stage)}
    if shape.lora is not None:
        return sum(_adapter_size(layer, plan, of_experts=True) for layer in layers.values())
    trained = [layers[layer] for layer in layers if layer >= plan.freeze_layers]
    return sum(
        _experts_of_layer(layer) // (plan.tp * plan.ep) + _output_biases(layer) // plan.ep
        for layer in trained
    )


def optimizer_parameters(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Count the trained parameters whose optimizer state one rank of a stage holds and updates.

    The distributed optimizer (Rajbhandari et al. 2020, "ZeRO", stage 1) splits the state of a
    parameter over all ranks that have a copy of the parameter. With d data and c context parallel
    ranks, a dense parameter has d * c copies. An expert's parameter has d * c / e copies, because
    expert parallelism splits the experts over e of these ranks.
    """
    trained = parameters(shape, plan, stage, trainable=True)
    experts = expert_parameters(shape, plan, stage)
    return (trained - experts + experts * plan.ep) / plan.replicas


def adapter_widths(shape: ModelShape, layer: int) -> dict[str, tuple[int, int]]:
    """Return input and output width of each linear layer with a LoRA adapter in ``layer``.

    For the model's last layer, only ``linear_qkv`` is returned, because the others compute only the
    tokens that the head reads. A ``layer`` of -1 means any layer before the last one.
    """
    if shape.lora is None:
        return {}
    of_layer = shape.of_layer(layer + 1)
    h, f, _, _ = widths(of_layer)
    outputs, inputs = mixer_widths(of_layer)
    f = f if of_layer.experts is None else of_layer.experts.width
    fc1_outputs = (2 if shape.is_gated else 1) * f
    all_widths = {
        "linear_qkv": (h, outputs),
        "linear_proj": (inputs, h),
        "linear_fc1": (h, fc1_outputs),
        "linear_fc2": (f, h),
    }
    names = ("linear_qkv",) if layer == shape.num_layers - 1 else tuple(all_widths)
    is_present = dict.fromkeys(all_widths, of_layer.has_mlp)
    is_present |= {"linear_qkv": of_layer.has_mixer, "linear_proj": of_layer.has_mixer}
    targets = shape.lora.targets
    return {name: all_widths[name] for name in names if name in targets and is_present[name]}


def keeps_input(shape: ModelShape, plan: Plan, layer: int, linear: str) -> bool:
    """Return True if a linear layer keeps its input for the backward pass.

    The gradient of a trained weight needs the input, and so does that of LoRA's matrix A.
    """
    if shape.lora is not None:
        return linear in shape.lora.targets
    return layer >= plan.freeze_layers


def is_of_experts(shape: ModelShape, linear: str) -> bool:
    """Return True if ``linear`` is a layer of the MLP in a mixture-of-experts model.

    Each expert then has a weight of its own for this linear layer.
    """
    return shape.experts is not None and linear in ("linear_fc1", "linear_fc2")


def _adapter_size(shape: ModelShape, plan: Plan, of_experts: bool = False) -> int:
    """Count a layer's LoRA parameters on one rank; with ``of_experts`` only adapters of experts.

    Tensor parallelism splits either the inputs or the outputs of a linear layer. If it splits the
    inputs, LoRA's matrix A is split, otherwise B. In an expert, both matrices are split.
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
    """Count the parameters of the embedding on one rank, which holds some of its rows.

    Inputs that every layer has of its own (Gemma 4) have a second table, and a projection that is
    not split.
    """
    rows = shape.padded_vocab_size(plan.tp) // plan.tp
    return rows * shape.hidden_size + sum(shape.per_layer_embedding(rows))


def head_size(shape: ModelShape, plan: Plan) -> int:
    """Count the parameters of the reward head."""
    head = shape.head or HeadShape()
    sizes = head.tensors(plan.num_attributes, shape.hidden_size).values()
    return sum(map(math.prod, sizes))


def _layer_flops(shape: ModelShape, plan: Plan, *, last: bool) -> tuple[float, float]:
    """Count the FLOPs of a layer's forward pass for one pack.

    Returns:
        The FLOPs of the linear layers, and those of attention's matmuls.
    """
    h, _, q, _ = widths(shape)
    outputs, inputs = mixer_widths(shape) if shape.has_mixer else (0, 0)
    packs = plan.packs
    rows = packs.sequences if last else packs.tokens
    mlp = (3 if shape.is_gated else 2) * h * shape.active_mlp_width
    if shape.experts is not None:
        mlp += h * shape.experts.count
    if shape.gemma4 is not None:
        mlp += shape.gemma4.layer_parameters(h)[0]
    linear = 2.0 * packs.tokens * h * outputs + 2.0 * rows * (inputs * h + mlp)
    if shape.latent_attention is not None:
        linear += 2.0 * packs.tokens * shape.latent_attention.up_parameters
    if shape.linear_attention is not None:
        return linear, packs.tokens * _linear_attention_flops(shape.linear_attention)
    return linear, 4.0 * packs.tokens * packs.keys * q * shape.has_mixer


def _linear_attention_flops(linear: LinearAttentionShape) -> float:
    """Count the FLOPs per token of the gated delta rule in chunks (``models/gated_delta.py``).

    - for each key head: the products of a token's query and key with all keys of its chunk
    - for each value head: the solution of a triangular system (half a square matrix), the weighted
      sum of the chunk's values, and three products with the recurrent state

    Mamba-2 lacks the products of keys with keys, the system, and one product with the state.
    """
    k, v = linear.key_head_dim, linear.value_head_dim
    if isinstance(linear, Mamba2Shape):
        of_head = 2.0 * CHUNK_TOKENS * v + 4.0 * k * v
        return 2.0 * CHUNK_TOKENS * linear.num_key_heads * k + linear.num_value_heads * of_head
    in_chunk = 4.0 * CHUNK_TOKENS * linear.num_key_heads * k
    of_values = CHUNK_TOKENS * (k + v) + 2.0 * CHUNK_TOKENS * v + 6.0 * k * v
    return in_chunk + linear.num_value_heads * of_values


def _adapter_flops(shape: ModelShape, plan: Plan, layer: int) -> float:
    """Count the FLOPs of the forward pass of a layer's LoRA adapters for one pack."""
    rank = 0 if shape.lora is None else shape.lora.rank
    read_by_all, shape = adapter_widths(shape, layer), shape.of_layer(layer + 1)
    all_widths = adapter_widths(shape, -1)
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
    """Count the FLOPs of a stage for one pack, summed over the ranks that share the pack.

    A multiplication and an addition count as two operations. A linear layer takes
    ``2 * inputs * outputs`` per token, and attention ``4 * q`` per pair of query and key, where q
    is the width of all query heads. Narayanan et al. 2021 (appendix) count all keys; here only the
    keys count to which a query attends under the causal mask.

    The backward pass takes twice as many FLOPs as the forward pass, or none if ``has_backward`` is
    False. The backward pass of a linear layer with a frozen weight takes as many FLOPs as its
    forward pass, because the weight gets no gradient. LoRA adds ``2 * rank * (inputs + outputs)``
    per token to the forward pass. Full recomputation repeats the forward pass; selective
    recomputation repeats attention only.

    The formula ignores norms, biases, RoPE and softmax. A layer with an attention window counts as
    if it had none.
    """
    forward = backward = recomputed = 0.0
    for layer in stage_layers(shape, plan, stage):
        of_layer = shape.of_layer(layer + 1)
        linear, attention = _layer_flops(of_layer, plan, last=layer == shape.num_layers - 1)
        adapters = _adapter_flops(shape, plan, layer)
        forward += linear + attention + adapters
        if not has_backward(plan, stage, layer):
            continue
        # A frozen layer passes the gradient on, but computes no gradient of its own weights.
        is_trained = layer >= plan.freeze_layers and shape.lora is None
        backward += linear * (2 if is_trained else 1) + 2 * (attention + adapters)
        if is_recomputed(shape, plan, layer):
            recomputed += linear + attention + adapters
        elif plan.recompute is Recompute.selective or of_layer.linear_attention is not None:
            recomputed += attention
    return Flops(forward, backward, recomputed)


def stage_attention_flops(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Count the FLOPs of attention (without its linear layers) that ``pack_flops`` includes.

    ``step_time.py`` needs them separately, because attention reaches a lower share of the GPU's
    peak speed than other matmuls do.
    """
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
    """Count the FLOPs of all ranks in a step, without recomputation, as MFU needs them."""
    stages = [pack_flops(shape, plan, stage) for stage in range(plan.pp)]
    return plan.packs.count * plan.dp * sum(flops.forward + flops.backward for flops in stages)


def traffic(shape: ModelShape, plan: Plan, stage: int) -> Traffic:
    """Count the bytes that one rank of a stage sends in a step, if collectives use rings.

    Tensor, context, expert and data parallelism have the sizes t, c, e and d.

    - Tensor parallelism (Narayanan et al. 2021, section 3.2) all-reduces the hidden states after
      attention and after the MLP, and in the backward pass the gradients of their inputs. A ring
      all-reduce sends ``2 * (t - 1) / t`` of the tensor.
    - Sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather, each of
      which sends half as many bytes. It gathers the inputs of two linear layers again, for the
      gradients of their weights.
    - Context parallelism all-gathers a layer's keys and values in the forward and in the backward
      pass, and reduce-scatters their gradients. Each collective sends ``(c - 1) / c`` of the
      tensor. In a ring (``Plan.ring``), gradients make one more hop, back to the rank of the keys.
    - Expert parallelism sends a token's hidden state to each of its experts, and the result back.
      ``(e - 1) / e`` of the experts are on other ranks. The gradients go the same way.
    - A pipeline sends hidden states forward and their gradients back.
    - Data and context parallelism reduce-scatter fp32 gradients and all-gather updated weights.
      Each collective sends ``(d * c - 1) / (d * c)`` of the elements. Experts have only
      ``d * c / e`` copies, so their collectives run among fewer ranks.
    """
    size = ELEMENT_BYTES[plan.precision]
    states = plan.tokens * shape.hidden_size * size
    ring = (plan.tp - 1) / plan.tp * states
    layers = stage_layers(shape, plan, stage)
    kv = sum(widths(shape.of_layer(layer + 1))[3] for layer in layers) / len(layers)
    keys = (plan.cp - 1) / plan.cp * plan.packs.tokens * 2 * kv * size / plan.tp
    home = plan.ring / (plan.cp - 1) if plan.cp > 1 else 0.0
    # Tensor parallelism splits the embedding's rows, so the first stage also all-reduces its
    # output.
    gathers, exchanges, reductions = 0.0, 0, float(stage == 0)
    for layer in stage_layers(shape, plan, stage):
        # In the last layer, the MLP computes only the tokens that the head reads, so few that its
        # all-reduce is not counted.
        of_layer = shape.of_layer(layer + 1)
        computes_mlp = of_layer.has_mlp and layer < shape.num_layers - 1
        forward = of_layer.has_mixer + computes_mlp
        reductions += forward
        gathers += of_layer.has_mixer
        sends = 0 if of_layer.experts is None else 2 * computes_mlp
        exchanges += sends
        if has_backward(plan, stage, layer):
            passes = 2 if is_recomputed(shape, plan, layer) else 1
            gathers += of_layer.has_mixer * (passes + 1 + home)
            exchanges += sends * passes
            has_weights = layer >= plan.freeze_layers and shape.lora is None
            inputs = of_layer.has_mixer + of_layer.has_mlp
            gathered_again = 0.5 * inputs if plan.sequence_parallel and has_weights else 0
            reductions += forward * (2 if is_recomputed(shape, plan, layer) else 1) + gathered_again
    rows = 0.0 if shape.experts is None else shape.experts.top_k * states * (1 - 1 / plan.ep)
    adjacent_stages = (stage > 0) + (stage < plan.pp - 1)
    split = plan.tp if plan.sequence_parallel else 1
    return Traffic(
        tensor=plan.packs.count * (reductions * 2 * ring + _latent_bytes(shape, plan, stage)),
        context=plan.packs.count * gathers * keys,
        expert=plan.packs.count * exchanges * rows,
        pipeline=plan.packs.count * adjacent_stages * states / split,
        data=_reduced_elements_of_stage(shape, plan, stage) * (FP32_BYTES + size),
    )


def _reduced_elements_of_stage(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Count the elements of gradients that one rank of a stage sends to be reduced in a step."""
    trained = parameters(shape, plan, stage, trainable=True)
    experts = expert_parameters(shape, plan, stage)
    dense = _reduced_elements(trained - experts, plan.replicas)
    return dense + _reduced_elements(experts, plan.replicas // plan.ep)


def _latent_bytes(shape: ModelShape, plan: Plan, stage: int) -> float:
    """Count the bytes of latents (of latent attention) that a rank of a stage sends for a pack.

    Tensor parallelism all-gathers the latents in each forward pass, and all-reduces their
    gradients. The all-reduce sends twice as many bytes.
    """
    latent = shape.latent_attention
    if latent is None:
        return 0.0
    width = (latent.q_lora_rank or 0) + latent.latent_width
    passes = 0
    for layer in stage_layers(shape, plan, stage):
        is_repeated = is_recomputed(shape, plan, layer)
        passes += 1 + (2 + is_repeated) * has_backward(plan, stage, layer)
    return passes * (plan.tp - 1) / plan.tp * plan.tokens * width * ELEMENT_BYTES[plan.precision]


def _reduced_elements(parameters: int, ranks: int) -> float:
    """Count the elements that a rank sends in a ring reduce-scatter of ``parameters`` elements."""
    return (ranks - 1) / ranks * parameters
