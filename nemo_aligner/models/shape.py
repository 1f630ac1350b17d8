"""Architecture of a model, read from ``model_config.yaml`` and checked, without importing torch.

``ModelShape`` describes the decoder, ``HeadShape`` the reward head, and ``LoraShape`` the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nemo_aligner.config.common import (
    MAX_COUNT,
    MAX_NUMBER,
    MIN_NUMBER,
    count_of_config,
    number_of_config,
    optional_number_of_config,
    read_count,
    read_number,
)
from nemo_aligner.config.model import LORA_TARGETS, HeadConfig, LoraConfig
from nemo_aligner.models.layer_shape import (
    ExpertShape,
    Frequency,
    LinearAttentionShape,
    LongRope,
    QueryScaling,
    RopeScaling,
    YarnScaling,
    check_longer,
    check_supported,
    is_in,
    read_frequency,
    read_layer,
    read_longrope,
    read_query_scaling,
    read_rope_scaling,
    read_yarn,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# The decoder: its keys in ``model_config.yaml``, and ``ModelShape``.

_REQUIRED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")

# Fields that older checkpoints lack, with the values that their models have.
_NAMED_LATER = {
    "qk_layernorm_across_heads": False,
    "pre_layernorms": True,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_output_gate": False,
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder in the terms of NeMo's ``model_config.yaml``.

    Attributes:
        activation: the MLP's activation: ``swiglu``, ``geglu`` (with tanh GELU), or
            ``squared-relu``, which has no gate.
        normalization: ``rmsnorm``, or ``layernorm1p``: LayerNorm with a bias, whose stored weight
            is gamma - 1.
        layernorm_zero_centered_gamma: the stored weight is gamma - 1.
        qk_layernorm_across_heads: the norms of queries and keys take their statistics over all
            heads together, as in OLMo 2, rather than over each head.
        zero_query_groups: how many of the query groups are zeros, added for tensor parallelism.
        pre_layernorms: the inputs of attention and MLP are normed.
        post_layernorms: the outputs of attention and MLP are normed before they are added.
        embedding_multiplier: factor of the embeddings.
        residual_multiplier: factor of what attention and MLP add to the residual stream.
        window_size: number of keys that a token sees, its own included; None is all before it.
        window_pattern: layers with the window: ``all``, or ``alternate`` for the odd ones, counted
            from 1.
        window_attn_skip_freq: layers without the window, instead of ``window_pattern``: N for every
            N-th layer, or a list with 0 for each layer without the window and 1 for each with it.
        rotary_base_local: RoPE base of the layers with a window, whose frequencies are not scaled;
            None is the same RoPE in all layers.
        dynamic_rope_factor: factor of dynamic NTK-aware scaling, where the RoPE base grows with the
            length of a sequence of more than ``max_position_embeddings`` tokens.
        query_scaling: scaling of queries by their position; None is no scaling.
        no_rope_freq: layers without RoPE: N for every N-th layer, or a list with 1 for each layer
            without RoPE and 0 for each with it.
        attn_logit_softcapping: c of ``c * tanh(score / c)``; None is no cap.
        query_pre_attn_scalar: scores are divided by its square root; None is ``kv_channels``.
        attention_output_gate: attention's output is multiplied by the sigmoid of a projection.
        experts: experts of a mixture-of-experts model; None is an MLP of ``ffn_hidden_size`` a
            layer.
        linear_attention: sizes of the linear attention that some layers have instead of attention;
            None if no layer has it.
        linear_attention_freq: layers with attention: every N-th one; or a list with a 0 for each
            layer with attention and a 1 for each layer with linear attention; None if all layers
            have linear attention.
        lora: adapters of the linear layers; None without LoRA.
        head: layers of the reward head; None is one matrix.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    make_vocab_size_divisible_by: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rotary_base: float
    rotary_percentage: float
    seq_len_interpolation_factor: float | None
    rope_scaling: RopeScaling | None
    yarn: YarnScaling | None
    longrope: LongRope | None
    rotary_base_local: float | None
    dynamic_rope_factor: float | None
    query_scaling: QueryScaling | None
    no_rope_freq: Frequency
    activation: str
    normalization: str
    layernorm_zero_centered_gamma: bool
    qkv_bias: bool
    qk_layernorm: bool
    qk_layernorm_across_heads: bool
    zero_query_groups: int
    pre_layernorms: bool
    post_layernorms: bool
    embedding_multiplier: float
    residual_multiplier: float
    apply_embedding_scaling: bool
    window_size: int | None
    window_pattern: str
    window_attn_skip_freq: Frequency
    attn_logit_softcapping: float | None
    query_pre_attn_scalar: float | None
    attention_output_gate: bool = False
    experts: ExpertShape | None = None
    linear_attention: LinearAttentionShape | None = None
    linear_attention_freq: Frequency = None
    lora: LoraShape | None = None
    head: HeadShape | None = None

    def as_fingerprint(self) -> dict[str, Any]:
        """Return the fields by which resuming from a checkpoint checks that the model is the same.

        Fields that old checkpoints lack are left out if they have the values of old models.
        """
        fields = asdict(self)
        del fields["zero_query_groups"]  # zero groups do not change a reward
        if self.longrope is not None:
            del fields["longrope"]["long"]  # checkpoints of early versions lack it
        return {name: value for name, value in fields.items() if value != _NAMED_LATER.get(name)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a NeMo model config.

        Raises:
            CheckpointError: a key is missing, or has a value that this package does not support.
        """
        missing = [key for key in (*_REQUIRED, "vocab_size") if config.get(key) is None]
        if missing:
            raise CheckpointError(f"model_config.yaml: it lacks {', '.join(missing)}")
        check_supported(config)
        heads = count_of_config(config, "num_attention_heads")
        hidden = count_of_config(config, "hidden_size")
        groups = count_of_config(config, "num_query_groups", heads)
        channels = count_of_config(config, "kv_channels", hidden // heads)
        rotated = number_of_config(config, "rotary_percentage", 1.0)
        if heads % groups != 0:
            raise CheckpointError(
                f"model_config.yaml: num_query_groups: got {groups}, wanted a divisor of the "
                f"{heads} attention heads"
            )
        return cls(
            num_layers=count_of_config(config, "num_layers"),
            hidden_size=hidden,
            ffn_hidden_size=count_of_config(config, "ffn_hidden_size"),
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=channels,
            vocab_size=count_of_config(config, "vocab_size"),
            make_vocab_size_divisible_by=count_of_config(
                config, "make_vocab_size_divisible_by", 128
            ),
            max_position_embeddings=count_of_config(
                config, "max_position_embeddings", config.get("encoder_seq_length")
            ),
            layernorm_epsilon=number_of_config(config, "layernorm_epsilon", 1e-5),
            rotary_base=number_of_config(config, "rotary_base", 10000.0),
            rotary_percentage=rotated,
            seq_len_interpolation_factor=optional_number_of_config(
                config, "seq_len_interpolation_factor"
            ),
            rope_scaling=read_rope_scaling(config),
            yarn=read_yarn(config),
            longrope=read_longrope(config, int(channels * rotated) // 2),
            rotary_base_local=optional_number_of_config(config, "rotary_base_local"),
            dynamic_rope_factor=optional_number_of_config(config, "dynamic_rope_factor"),
            query_scaling=read_query_scaling(config),
            no_rope_freq=read_frequency(config, "no_rope_freq"),
            **read_layer(config),
            lora=read_lora(config),
            head=read_head_shape(config),
        )

    @property
    def is_gated(self) -> bool:
        """True if the MLP multiplies its activation by a second linear projection of the input."""
        return self.activation != "squared-relu"

    @property
    def softmax_scale(self) -> float | None:
        """Factor of the attention scores; None is ``kv_channels ** -0.5``."""
        scalar = self.query_pre_attn_scalar
        return None if scalar is None else scalar**-0.5

    def window_of(self, layer_number: int) -> int | None:
        """Return how many keys a token sees in a layer, numbered from 1; None is all before it."""
        skipped = 2 if self.window_pattern == "alternate" else self.window_attn_skip_freq
        return None if is_in(skipped, layer_number, 0) else self.window_size

    def rotates(self, layer_number: int) -> bool:
        """Tell if a layer, numbered from 1, has RoPE."""
        return not is_in(self.no_rope_freq, layer_number, 1)

    @property
    def one_rotation_until(self) -> int | None:
        """Length up to which all sequences have the same RoPE; None if there is no such limit."""
        if self.longrope is not None:
            return self.longrope.old_context_len
        return None if self.dynamic_rope_factor is None else self.max_position_embeddings

    def length_dependent_rope(self, tokens: int) -> int:
        """Number the RoPE of a sequence; only sequences with the same number may share keys.

        The number is 0 up to ``one_rotation_until``. For longer sequences it is 1 with LongRoPE,
        and their length with dynamic NTK-aware scaling.

        Raises:
            ConfigError: RoPE is not defined for such long sequences; see ``check_longer``.
        """
        until = self.one_rotation_until
        if until is None or tokens <= until:
            return 0
        scalings = self.rope_scaling, self.yarn, self.seq_len_interpolation_factor
        check_longer(tokens, until, self.longrope, any(scalings))
        return 1 if self.longrope is not None else tokens

    @property
    def is_uniform(self) -> bool:
        """True if all layers have the same modules, so that archives stack their tensors."""
        return self.linear_attention is None

    def of_layer(self, layer_number: int) -> ModelShape:
        """Return the shape of a model with the modules of layer 1 to ``num_layers`` in each layer.

        The windows and RoPE of layers may still differ.
        """
        if self.is_uniform:
            return self
        is_full = is_in(self.linear_attention_freq, layer_number, 0)
        linear = None if is_full else self.linear_attention
        return replace(self, linear_attention=linear, linear_attention_freq=None)

    def check_fits(self, tp: int, pp: int, ep: int = 1) -> None:
        """Check that a layout splits the model evenly.

        Raises:
            ConfigError: the layout does not. The message says what a setting should divide.
        """
        key = "model.tensor_model_parallel_size"
        if self.linear_attention is not None:
            self.linear_attention.check_fits(tp)
        if self.experts is not None:
            self.experts.check_fits(tp, ep)
        elif ep > 1:
            raise ConfigError(
                f"model.expert_model_parallel_size: got {ep}, wanted 1, as the model has no experts"
            )
        elif self.ffn_hidden_size % tp != 0:
            raise ConfigError(
                f"{key}: got {tp}, wanted a divisor of the model's {self.ffn_hidden_size} ffn "
                "channels"
            )
        for name, count in (
            ("attention heads", self.num_attention_heads),
            ("query groups", self.num_query_groups),
        ):
            if count % tp != 0:
                raise ConfigError(
                    f"{key}: got {tp}, wanted a divisor of the model's {count} {name}. "
                    f"Convert it with --tensor-parallel={tp}, which adds query groups of zeros."
                )
        if self.num_layers % pp != 0:
            raise ConfigError(
                f"model.pipeline_model_parallel_size: got {pp}, "
                f"wanted a divisor of the model's {self.num_layers} layers"
            )

    def padded_vocab_size(self, tp: int) -> int:
        """Return the embedding table's number of rows when it is split over ``tp`` ranks."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def num_parameters(self) -> int:
        """Count the parameters of backbone and embedding table, without vocabulary padding."""
        numbers = range(1, self.num_layers + 1)
        layers = sum(sum(self.of_layer(number).layer_parameters()) for number in numbers)
        return layers + self.norm_parameters(self.hidden_size) + self.hidden_size * self.vocab_size

    def layer_parameters(self) -> tuple[int, int]:
        """Count a layer's parameters: those that TP shards, and those that all ranks replicate.

        This shape must be the one that ``of_layer`` returns for that layer.
        """
        places = 2 * self.pre_layernorms + 2 * self.post_layernorms
        norms = places * self.norm_parameters(self.hidden_size)
        split, replicated = self._mixer_parameters()
        if self.experts is None:
            mlp = self._mlp_matrices * self.hidden_size * self.ffn_hidden_size
            return split + mlp, norms + replicated
        *parts, routers = self.experts.parameters(self.hidden_size, self._mlp_matrices)
        return split + sum(parts), norms + replicated + routers

    def _mixer_parameters(self) -> tuple[int, int]:
        """Count ``layer_parameters`` of attention or linear attention alone."""
        if self.linear_attention is not None:
            return self.linear_attention.parameters(self.hidden_size)
        biases = (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels
        norms = sum(map(self.norm_parameters, self.qk_norm_widths())) if self.qk_layernorm else 0
        return self._attention_parameters() + self.qkv_bias * biases, norms

    def qk_norm_widths(self) -> tuple[int, int]:
        """Return how many channels a norm of queries and one of keys has, over all TP ranks."""
        if not self.qk_layernorm_across_heads:
            return self.kv_channels, self.kv_channels
        return (
            self.num_attention_heads * self.kv_channels,
            self.num_query_groups * self.kv_channels,
        )

    def norm_parameters(self, width: int) -> int:
        """Count the parameters of a norm over ``width`` channels; a LayerNorm also has biases."""
        return width * (2 if self.normalization == "layernorm1p" else 1)

    def query_key_cost(self) -> float:
        """Return attention's FLOPs for a query and a key, relative to a token's linear layers.

        The ratio is two multiply-adds per channel of every head, divided by one for each parameter
        that a token goes through. For models with windows it is an upper bound. Layers with linear
        attention have no such pairs.
        """
        width = self.ffn_hidden_size if self.experts is None else self.experts.active_width
        linear = self._attention_parameters() + self._mlp_matrices * self.hidden_size * width
        numbers = range(1, self.num_layers + 1)
        full = sum(self.of_layer(number).linear_attention is None for number in numbers)
        return full / self.num_layers * 2 * self.num_attention_heads * self.kv_channels / linear

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.is_gated else 2

    def _attention_parameters(self) -> int:
        """Count the parameters of the weight matrices of a layer's attention."""
        heads = self.num_attention_heads * self.kv_channels
        groups = self.num_query_groups * self.kv_channels
        return self.hidden_size * ((2 + self.attention_output_gate) * heads + 2 * groups)


# The reward head, if it is more than one matrix.

# Key in ``model_config.yaml``. Models whose head is one matrix, and older archives, lack it.
_KEY = "reward_head"


@dataclass(frozen=True)
class HeadShape:
    """Layers of a reward head.

    Attributes:
        bias: every layer has a bias.
        mlp_size: width of the hidden layer; None is a single linear layer.
    """

    bias: bool = False
    mlp_size: int | None = None

    @classmethod
    def from_settings(cls, config: HeadConfig) -> HeadShape | None:
        """Convert the settings to a shape; None for a head of one matrix."""
        head = cls(config.bias, config.mlp_size)
        return None if head == cls() else head

    def tensors(self, outputs: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the head's tensors by their names after ``rm_head.``"""
        width = hidden_size if self.mlp_size is None else self.mlp_size
        shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, width)}
        if self.mlp_size is not None:
            shapes["hidden.weight"] = (self.mlp_size, hidden_size)
        if self.bias:
            biases = {name.replace("weight", "bias"): size[:1] for name, size in shapes.items()}
            shapes |= biases
        return shapes

    def __str__(self) -> str:
        parts = ["linear" if self.mlp_size is None else f"two layers of {self.mlp_size}"]
        return " ".join([*parts, *(["with bias"] * self.bias)])


def read_head_shape(config: Mapping[str, Any]) -> HeadShape | None:
    """Read the head's shape from a model config; None for a head of one matrix.

    Raises:
        CheckpointError: the section has an unknown key or a value out of range.
    """
    section = config.get(_KEY)
    if section is None:
        return None
    location = f"model_config.yaml: {_KEY}"
    if not isinstance(section, Mapping) or not set(section) <= set(asdict(HeadShape())):
        raise CheckpointError(f"{location}: got {shown(section)}, wanted bias and mlp_size only")
    bias, size = section.get("bias", False), section.get("mlp_size")
    if not isinstance(bias, bool):
        raise CheckpointError(f"{location}.bias: got {shown(bias)}, wanted true or false")
    if size is not None:
        size = read_count(size, f"{location}.mlp_size", f"a whole number from 1 to {MAX_COUNT}")
    head = HeadShape(bias, size)
    return None if head == HeadShape() else head


def with_head_shape(config: Mapping[str, Any], head: HeadShape | None) -> dict[str, Any]:
    """Return a copy of a model config that describes ``head``; None removes the section."""
    remaining = {key: value for key, value in config.items() if key != _KEY}
    return remaining if head is None else {**remaining, _KEY: asdict(head)}


def head_to_train(
    stored: HeadShape | None, settings: HeadConfig, *, is_new: bool
) -> HeadShape | None:
    """Return the settings' head; ``stored`` if the settings name none and the head is not new."""
    requested = HeadShape.from_settings(settings)
    return stored if requested is None and not is_new else requested


def check_is_linear(head: HeadShape | None, location: str, format_name: str) -> None:
    """Check that the head is one matrix, because ``format_name`` can store no other head.

    Raises:
        CheckpointError: the head has a hidden layer. The message names the file ``location``.
    """
    if head is not None and head.mlp_size is not None:
        raise CheckpointError(
            f"{location}: its head is {head}, wanted one matrix, as {format_name} stores no other"
        )


# LoRA: rank, scale, and the linear layers that have an adapter.

# Name of LoRA's section in ``model_config.yaml``.
LORA_KEY = "lora"
# Suffixes of the two matrices after the linear layer's own name, as in NeMo 2.
LORA_A, LORA_B = "adapter.linear_in.weight", "adapter.linear_out.weight"
# Linear layers of a decoder layer by their names in the settings, in the order of LORA_TARGETS.
LINEARS = dict(
    zip(
        LORA_TARGETS,
        ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
         "mlp.linear_fc2"),
        strict=True,
    )
)  # fmt: skip
# The same for mixture-of-experts layers, where each expert has its own linear layers.
EXPERT_LINEARS = {
    name: path.replace("mlp.", "mlp.experts.") for name, path in LINEARS.items() if "mlp" in path
}
_WHERE = f"model_config.yaml: {LORA_KEY}"


@dataclass(frozen=True)
class LoraShape:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): ``W x`` becomes ``W x + alpha / rank * B A x``.

    Each linear layer named in ``targets`` trains its ``A [rank, in]`` and ``B [out, rank]``.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: LoraConfig) -> LoraShape | None:
        """Convert the settings to a shape; None if the rank is 0, which means no LoRA."""
        if settings.rank == 0:
            return None
        targets = tuple(name for name in LORA_TARGETS if name in settings.targets)
        return cls(settings.rank, float(settings.alpha), targets)

    @property
    def scale(self) -> float:
        """The factor ``alpha / rank`` of ``B A x``, which LoRA adds to a layer's output."""
        return self.alpha / self.rank

    @property
    def linears(self) -> list[str]:
        """Module names of the targets in a decoder layer, both in a dense and in an MoE layer."""
        names = [LINEARS[target] for target in self.targets]
        return names + [
            EXPERT_LINEARS[target] for target in self.targets if target in EXPERT_LINEARS
        ]

    def tensors(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the unsharded shapes of A and B by name, given the shapes of a layer's weights."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.linears:
            if f"{name}.weight" in weights:
                *outputs, inputs = weights[f"{name}.weight"]
                count = outputs[:1] if name in EXPERT_LINEARS.values() else []
                shapes[f"{name}.{LORA_A}"] = (*count, self.rank, inputs)
                shapes[f"{name}.{LORA_B}"] = (*outputs, self.rank)
        return shapes

    def to_config(self) -> dict[str, Any]:
        """Convert to LoRA's section of ``model_config.yaml``, which ``read_lora`` reads."""
        return {**asdict(self), "targets": list(self.targets)}

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, on {', '.join(self.targets)}"


def is_of_adapter(name: str) -> bool:
    """Tell from a tensor's name if it belongs to a LoRA adapter."""
    return name.endswith((LORA_A, LORA_B))


def read_lora(config: Mapping[str, Any]) -> LoraShape | None:
    """Read LoRA's section of a NeMo model config; None if the model has no adapters.

    Raises:
        CheckpointError: the section is not one that ``LoraShape.to_config`` writes.
    """
    section = config.get(LORA_KEY)
    if section is None:
        return None
    keys = {"rank", "alpha", "targets"}
    if not isinstance(section, Mapping) or set(section) != keys:
        raise CheckpointError(f"{_WHERE}: got {shown(section)}, wanted rank, alpha and targets")
    expected = f"a whole number above 0 and of at most {MAX_COUNT}"
    rank = read_count(section["rank"], f"{_WHERE}.rank", expected)
    expected = f"a number above 0, from {MIN_NUMBER} to {MAX_NUMBER}"
    alpha = float(read_number(section["alpha"], f"{_WHERE}.alpha", expected))
    targets = section["targets"]
    names = [name for name in LORA_TARGETS if isinstance(targets, list) and name in targets]
    if not names or len(names) != len(targets):
        expected = f"at least one of {', '.join(LORA_TARGETS)}, each once"
        raise CheckpointError(f"{_WHERE}.targets: got {shown(targets)}, wanted {expected}")
    return LoraShape(rank, alpha, tuple(names))


def with_lora(config: Mapping[str, Any], lora: LoraShape | None) -> dict[str, Any]:
    """Return a copy of a NeMo model config that describes ``lora``; None removes the section."""
    remaining = {key: value for key, value in config.items() if key != LORA_KEY}
    return remaining if lora is None else {**remaining, LORA_KEY: lora.to_config()}


def check_lora(stored: LoraShape | None, requested: LoraShape | None, source: object) -> None:
    """Check that the settings request the adapters that the model already has, if it has any.

    Raises:
        CheckpointError: the settings request different adapters.
    """
    if stored is not None and requested is not None and stored != requested:
        raise CheckpointError(
            f"{source}: the model has LoRA adapters of {stored}, but model.lora has {requested}. "
            "Set the same adapters, or model.lora.rank=0 to fold them and train all weights."
        )
