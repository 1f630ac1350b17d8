"""Architecture of a model, read from ``model_config.yaml`` and checked, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nemo_aligner.config.common import (
    count_of_config,
    number_of_config,
    optional_number_of_config,
)
from nemo_aligner.models.shapes.experts import ADDED_EXPERT_FIELDS, QUICK_GEGLU, ExpertShape
from nemo_aligner.models.shapes.frequency import Frequency, is_in, read_frequency
from nemo_aligner.models.shapes.gemma4 import Gemma4Shape, read_gemma4
from nemo_aligner.models.shapes.head import HeadShape, read_head_shape
from nemo_aligner.models.shapes.hybrid import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MIXERS,
    MLP,
    read_hybrid_pattern,
)
from nemo_aligner.models.shapes.latent_attention import (
    LatentAttentionShape,
    read_latent_attention,
)
from nemo_aligner.models.shapes.layer import check_supported, read_layer
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape
from nemo_aligner.models.shapes.lora import LoraShape, check_expert_rank, read_lora
from nemo_aligner.models.shapes.rope import (
    ROPE_FP32,
    LongRope,
    QueryScaling,
    RopeScaling,
    YarnScaling,
    check_longer,
    read_longrope,
    read_query_scaling,
    read_rope_scaling,
    read_yarn,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError

# Fields of ``ModelShape`` that older checkpoints lack, with the values that their models have.
_ADDED_FIELDS = {
    "qk_layernorm_across_heads": False,
    "pre_layernorms": True,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_output_gate": False,
    "qk_norm_after_rope": False,
    "linear_bias": False,
    "parallel_residual": False,
    "one_norm_per_layer": False,
    "attention_sinks": False,
    "proj_bias": False,
    "has_mixer": True,
    "has_mlp": True,
    "gemma4": None,
    "rope_fp32": None,
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder in the terms of NeMo's ``model_config.yaml``.

    Attributes:
        activation: the MLP's activation. With a gate: ``swiglu``, ``geglu`` (tanh GELU) and, only
            for experts, ``quick-geglu``. Without a gate: ``squared-relu``, ``gelu``, ``gelu-tanh``
            (GELU's tanh approximation) and ``xielu`` (two learned parameters in each layer).
        normalization: ``rmsnorm``; ``layernorm``: LayerNorm with a bias; ``layernorm1p``: the
            same, but its stored weight is gamma - 1; or ``layernorm_without_bias``.
        layernorm_zero_centered_gamma: the stored weight is gamma - 1.
        qk_layernorm_across_heads: the norms of queries and keys take their statistics over all
            heads together, as in OLMo 2, rather than over each head.
        zero_query_groups: how many of the query groups have only zero weights; they were added so
            that the tensor parallel size divides the groups.
        pre_layernorms: the inputs of attention and MLP are normed.
        post_layernorms: the outputs of attention and MLP are normed before they are added to the
            residual stream.
        embedding_multiplier: factor of the embeddings.
        residual_multiplier: factor of what attention and MLP add to the residual stream.
        window_size: number of keys that a token sees, its own included; None means no window.
        window_pattern: layers with the window: ``all``, or ``alternate`` for the odd ones, counted
            from 1.
        window_attn_skip_freq: layers without the window, instead of ``window_pattern``: N for every
            N-th layer, or a list with 0 for each layer without the window and 1 for each with it.
        rotary_base_local: RoPE base of the layers with a window, whose frequencies are not scaled;
            None is the same RoPE in all layers.
        dynamic_rope_factor: factor of dynamic NTK-aware scaling, where the RoPE base grows with the
            length of a sequence of more than ``max_position_embeddings`` tokens.
        query_scaling: scaling of queries by their position; None means no scaling.
        no_rope_freq: layers without RoPE: N for every N-th layer, or a list with 1 for each layer
            without RoPE and 0 for each with it.
        attn_logit_softcapping: c of ``c * tanh(score / c)``; None means no cap.
        query_pre_attn_scalar: scores are divided by its square root; None means ``kv_channels``.
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
        qk_norm_after_rope: the norms of queries and keys come after RoPE, as in HunYuan, rather
            than before it.
        linear_bias: all linear layers have biases, not only those of queries, keys and values.
        parallel_residual: the MLP reads the layer's normed input, as attention does, and not the
            sum of input and attention: ``x + attention(norm(x)) + mlp(norm'(x))``, as in GPT-NeoX.
        one_norm_per_layer: with a parallel residual, attention and MLP have the same norm, as in
            Cohere: ``x + attention(norm(x)) + mlp(norm(x))``.
        moe_layer_freq: for each layer of a mixture-of-experts model a 1 if it has experts, and a 0
            if it has an MLP of ``ffn_hidden_size`` instead; None if all layers have experts.
        latent_attention: sizes of multi-head latent attention, which all layers then have;
            ``kv_channels`` and ``rotary_percentage`` are those of its queries and keys. None for
            other attention.
        attention_sinks: each query head has a learned logit that joins the softmax over its scores,
            and whose probability is dropped.
        proj_bias: attention's output projection has a bias.
        hybrid_pattern: for each layer of a hybrid model, such as Nemotron-H, the letter of its kind
            (``shapes/hybrid.py``). None if all layers have both a mixer (attention of any kind) and
            an MLP.
        has_mixer, has_mlp: False only in what ``of_layer`` returns for a layer of a hybrid model.
        rope_fp32: which parts of RoPE are in fp32 in a 16-bit model. ``products``: heads are
            multiplied by the tables in fp32, and rounded once, as in Cohere. ``tables``: in
            addition, the tables of cosines and sines are not rounded, as in OLMo 2. None: neither.
        gemma4: traits of a Gemma 4; None for other models. ``kv_channels`` and ``num_query_groups``
            are then those of layers with a window, and ``of_layer`` has those of each layer.
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
    qk_norm_after_rope: bool = False
    linear_bias: bool = False
    parallel_residual: bool = False
    one_norm_per_layer: bool = False
    moe_layer_freq: tuple[int, ...] | None = None
    latent_attention: LatentAttentionShape | None = None
    attention_sinks: bool = False
    proj_bias: bool = False
    hybrid_pattern: str | None = None
    has_mixer: bool = True
    has_mlp: bool = True
    gemma4: Gemma4Shape | None = None
    rope_fp32: str | None = None

    def as_fingerprint(self) -> dict[str, Any]:
        """Return the fields that a resumed run compares with those of the checkpoint's model.

        Fields that older checkpoints lack are omitted if they have the values of older models.
        """
        fields = asdict(self)
        del fields["zero_query_groups"]  # zero groups do not change a reward
        if self.latent_attention is not None:
            del fields["latent_attention"]["zero_heads"]
        if self.lora is not None:
            fields["lora"] = {**self.lora.to_config(), "targets": self.lora.targets}
        if self.longrope is not None:
            del fields["longrope"]["long"]  # checkpoints of early versions lack it
        if self.experts is not None:
            fields["experts"] = {
                name: value
                for name, value in fields["experts"].items()
                if name not in ADDED_EXPERT_FIELDS or value != ADDED_EXPERT_FIELDS[name]
            }
        return {name: value for name, value in fields.items() if value != _ADDED_FIELDS.get(name)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a NeMo model config.

        Raises:
            CheckpointError: a key is missing, or has a value that this package does not support.
        """
        check_supported(config)
        heads = count_of_config(config, "num_attention_heads")
        hidden = count_of_config(config, "hidden_size")
        groups = count_of_config(config, "num_query_groups", heads)
        channels = count_of_config(config, "kv_channels", hidden // heads)
        rotated = number_of_config(config, "rotary_percentage", 1.0)
        latent = read_latent_attention(config)
        if latent is not None:
            channels, rotated = latent.key_channels, latent.rotary_percentage
        if heads % groups != 0:
            raise CheckpointError(
                f"model_config.yaml: num_query_groups: got {groups}, wanted a divisor of the "
                f"{heads} attention heads"
            )
        shape = cls(
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
            latent_attention=latent,
            hybrid_pattern=read_hybrid_pattern(config),
            gemma4=read_gemma4(config),
            rope_fp32=config.get(ROPE_FP32),
        )
        if shape.gemma4 is not None:
            shape.gemma4.check_layers(shape.are_global)
        return shape

    @property
    def is_gated(self) -> bool:
        """True if the MLP multiplies its activation by a second linear projection of the input."""
        return self.activation in ("swiglu", "geglu", QUICK_GEGLU)

    @property
    def norms_have_biases(self) -> bool:
        """True if the norms are LayerNorms with a bias."""
        return self.normalization in ("layernorm", "layernorm1p")

    @property
    def softmax_scale(self) -> float | None:
        """Factor of the attention scores; None means ``kv_channels ** -0.5``."""
        scalar, latent = self.query_pre_attn_scalar, self.latent_attention
        if latent is not None:
            return latent.score_factor * latent.key_channels**-0.5
        return None if scalar is None else scalar**-0.5

    def window_of(self, layer_number: int) -> int | None:
        """Return how many keys a token sees in a layer, numbered from 1; None means no window."""
        skipped = 2 if self.window_pattern == "alternate" else self.window_attn_skip_freq
        return None if is_in(skipped, layer_number, 0) else self.window_size

    def rotates(self, layer_number: int) -> bool:
        """Tell if a layer, numbered from 1, applies RoPE to its queries and keys."""
        return not is_in(self.no_rope_freq, layer_number, 1)

    @property
    def one_rotation_until(self) -> int | None:
        """Length in tokens up to which all sequences have the same RoPE frequencies.

        None if sequences of every length have the same ones.
        """
        if self.longrope is not None:
            return self.longrope.old_context_len
        return None if self.dynamic_rope_factor is None else self.max_position_embeddings

    def length_dependent_rope(self, tokens: int) -> int:
        """Return the number of the RoPE frequencies that a sequence of ``tokens`` tokens gets.

        Only sequences with the same number may share keys. The number is 0 up to
        ``one_rotation_until`` tokens. For longer sequences it is 1 with LongRoPE, and ``tokens``
        with dynamic NTK-aware scaling.

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
        has_one_kind = self.gemma4 is None or self.gemma4.layer is not None
        is_hybrid = self.linear_attention is not None or self.hybrid_pattern is not None
        return self.moe_layer_freq is None and has_one_kind and not is_hybrid

    @property
    def are_global(self) -> list[bool]:
        """Tell for each layer whether it has no window."""
        return [self.window_of(number + 1) is None for number in range(self.num_layers)]

    def of_layer(self, layer_number: int) -> ModelShape:
        """Return the shape of a model whose layers all have the modules of this one layer.

        The windows and RoPE of layers may still differ.

        Args:
            layer_number: number of the layer, from 1 to ``num_layers``.
        """
        if self.is_uniform:
            return self
        if self.hybrid_pattern is not None:
            kind = self.hybrid_pattern[layer_number - 1]
            return replace(
                self,
                linear_attention=self.linear_attention if kind == MAMBA else None,
                experts=self.experts if kind == EXPERTS else None,
                hybrid_pattern=None,
                has_mixer=kind in MIXERS,
                has_mlp=kind not in MIXERS,
            )
        if self.gemma4 is not None:
            return self._of_gemma4_layer(self.gemma4, layer_number)
        is_full = is_in(self.linear_attention_freq, layer_number, 0)
        is_dense = self.moe_layer_freq is not None and not self.moe_layer_freq[layer_number - 1]
        return replace(
            self,
            linear_attention=None if is_full else self.linear_attention,
            linear_attention_freq=None,
            experts=None if is_dense else self.experts,
            moe_layer_freq=None,
        )

    def _of_gemma4_layer(self, gemma4: Gemma4Shape, layer_number: int) -> ModelShape:
        are_global = self.are_global
        traits = gemma4.of_layer(layer_number, are_global)
        assert traits.layer is not None
        is_global = are_global[layer_number - 1]
        is_wide = gemma4.double_wide and traits.layer.keys_from is not None
        return replace(
            self,
            kv_channels=gemma4.global_channels if is_global else self.kv_channels,
            num_query_groups=gemma4.global_groups if is_global else self.num_query_groups,
            ffn_hidden_size=self.ffn_hidden_size * (1 + is_wide),
            gemma4=traits,
        )

    def snapshot_bytes(self, element_bytes: int) -> int:
        """Count the bytes of a snapshot in a server's prefix cache, over all ranks of a model.

        It has the states of all layers with linear attention; 0 for a model without.
        """
        shapes = (self.of_layer(number + 1).linear_attention for number in range(self.num_layers))
        return sum(shape.snapshot_bytes(element_bytes) for shape in shapes if shape is not None)

    def cached_token_bytes(self, element_bytes: int) -> int:
        """Count the bytes of a token in a server's prefix cache, over all ranks of a model.

        Without latent attention it has the keys and values of every full attention layer with keys
        of its own. With it, a layer has one latent and one key, counted once although every tensor
        parallel rank has them.
        """
        layers = [self.of_layer(number + 1) for number in range(self.num_layers)]
        widths = (
            2 * layer.num_query_groups * layer.kv_channels
            if layer.latent_attention is None
            else layer.latent_attention.latent_width
            for layer in layers
            if layer.has_mixer and layer.has_keys and layer.linear_attention is None
        )
        return element_bytes * sum(widths)

    @property
    def can_recompute_fully(self) -> bool:
        """False if full recomputation would lose gradients (``needs_whole_backward``)."""
        return self.gemma4 is None or not self.gemma4.needs_whole_backward

    def check_fits(self, tp: int, pp: int, ep: int = 1, cp: int = 1) -> None:
        """Check that a layout splits the model evenly.

        Args:
            tp, pp, ep, cp: sizes of tensor, pipeline, expert and context parallelism.

        Raises:
            ConfigError: a size does not divide what it splits, or the model does not support it.
        """
        key = "model.tensor_model_parallel_size"
        if self.linear_attention is not None:
            self.linear_attention.check_fits(tp, cp)
        if self.latent_attention is not None:
            self.latent_attention.check_fits(tp)
        if self.gemma4 is not None:
            self.gemma4.check_fits(tp, pp, self.are_global)
        if self.experts is not None:
            self.experts.check_fits(tp, ep)
            check_expert_rank(self.lora, tp)
        elif ep > 1:
            raise ConfigError(
                f"model.expert_model_parallel_size: got {ep}, wanted 1, as the model has no experts"
            )
        if self._has_layers_of(MLP) and self.ffn_hidden_size % tp != 0:
            raise ConfigError(
                f"{key}: got {tp}, wanted a divisor of the model's {self.ffn_hidden_size} ffn "
                "channels"
            )
        for name, count in (
            ("attention heads", self.num_attention_heads),
            ("query groups", self.num_query_groups),
        ):
            if self._has_layers_of(ATTENTION) and count % tp != 0:
                advice = (
                    f"Convert the checkpoint with nemo-aligner convert --tensor-parallel={tp}, "
                    "which adds query groups of zeros."
                )
                raise ConfigError(
                    f"{key}: got {tp}, wanted a divisor of the model's {count} {name}. "
                    + (advice if self.gemma4 is None else "A Gemma 4 cannot be padded.")
                )
        if self.num_layers % pp != 0:
            raise ConfigError(
                f"model.pipeline_model_parallel_size: got {pp}, "
                f"wanted a divisor of the model's {self.num_layers} layers"
            )

    def _has_layers_of(self, kind: str) -> bool:
        """Tell if at least one layer is of ``kind``: ATTENTION, or MLP (without experts)."""
        if self.hybrid_pattern is not None:
            return kind in self.hybrid_pattern
        return kind == ATTENTION or self.experts is None or self.moe_layer_freq is not None

    def padded_vocab_size(self, tp: int) -> int:
        """Return the embedding table's number of rows when it is split over ``tp`` ranks."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def num_parameters(self) -> int:
        """Count the parameters of backbone and embedding table, without vocabulary padding."""
        numbers = range(1, self.num_layers + 1)
        layers = sum(sum(self.of_layer(number).layer_parameters()) for number in numbers)
        outside = self.norm_parameters(self.hidden_size) + self.hidden_size * self.vocab_size
        return layers + outside + sum(self.per_layer_embedding(self.vocab_size))

    def per_layer_embedding(self, rows: int) -> tuple[int, int]:
        """Count the parameters that compute Gemma 4's per-layer inputs, outside the layers.

        Args:
            rows: rows of the table of per-layer embeddings.

        Returns:
            The parameters that TP shards, and those that all ranks replicate; both are 0 for a
            model without per-layer inputs.
        """
        if self.gemma4 is None:
            return 0, 0
        return self.gemma4.outer_parameters(self.hidden_size, rows, self.num_layers)

    def layer_parameters(self) -> tuple[int, int]:
        """Count a layer's parameters: those that TP shards, and those that all ranks replicate.

        This shape must be the one that ``of_layer`` returns for that layer.
        """
        halves = self.has_mixer + self.has_mlp
        places = halves * (self.pre_layernorms + self.post_layernorms) - self.one_norm_per_layer
        norms = places * self.norm_parameters(self.hidden_size)
        split, replicated = self._mixer_parameters() if self.has_mixer else (0, 0)
        if not self.has_mlp:
            return split, norms + replicated
        if self.gemma4 is not None:
            of_input = self.gemma4.layer_parameters(self.hidden_size)
            split, replicated = split + of_input[0], replicated + of_input[1]
        if self.experts is None:
            mlp = self._mlp_matrices * self.hidden_size * self.ffn_hidden_size
            if self.linear_bias:
                # The biases of linear_fc1, and of linear_proj and linear_fc2.
                mlp += (1 + self.is_gated) * self.ffn_hidden_size
                replicated += 2 * self.hidden_size
            if self.activation == "xielu":
                replicated += 2
            return split + mlp, norms + replicated
        *parts, routers = self.experts.parameters(self.hidden_size, self._mlp_matrices)
        routers += self.experts.output_biases(self.hidden_size)
        return split + sum(parts), norms + replicated + routers

    def _mixer_parameters(self) -> tuple[int, int]:
        """Count the parameters of attention: those that TP shards, and the replicated ones."""
        if self.linear_attention is not None:
            return self.linear_attention.parameters(self.hidden_size)
        if self.latent_attention is not None:
            return self.latent_attention.parameters(self.hidden_size)
        biases = (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels
        widths = self.qk_norm_widths()[: 1 + self.has_keys]
        norms = sum(map(self.norm_parameters, widths)) if self.qk_layernorm else 0
        sinks = self.attention_sinks * self.num_attention_heads
        split = self.attention_parameters() + self.qkv_bias * biases + sinks
        return split, norms + self.proj_bias * self.hidden_size

    @property
    def has_keys(self) -> bool:
        """True if the layer computes keys; else it reads an earlier layer's (Gemma 4)."""
        layer = None if self.gemma4 is None else self.gemma4.layer
        return layer is None or layer.keys_from is None

    @property
    def key_value_width(self) -> int:
        """Outputs of a layer's projection of keys and values.

        This shape must be the one that ``of_layer`` returns for that layer.
        """
        layer = None if self.gemma4 is None else self.gemma4.layer
        kinds = 1 if layer is not None and layer.keys_as_values else 2
        return self.has_keys * kinds * self.num_query_groups * self.kv_channels

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
        return width * (1 + self.norms_have_biases)

    def query_key_cost(self) -> float:
        """Return attention's FLOPs for a query and a key, relative to a token's linear layers.

        The ratio is two multiply-adds per channel of every head, divided by one for each parameter
        that a token goes through. For models with windows it is an upper bound. Layers with linear
        attention count as 0.
        """
        layers = [self.of_layer(number) for number in range(1, self.num_layers + 1)]
        width = sum(layer.active_mlp_width for layer in layers) / self.num_layers
        mixers = [layer for layer in layers if layer.has_mixer]
        attention = sum(layer.attention_parameters() for layer in mixers) / self.num_layers
        linear = attention + self._mlp_matrices * self.hidden_size * width
        channels = sum(layer.kv_channels for layer in mixers if layer.linear_attention is None)
        return channels / self.num_layers * 2 * self.num_attention_heads / linear

    @property
    def active_mlp_width(self) -> int:
        """Number of MLP channels that a token goes through in a layer, in all its experts.

        This shape must be the one that ``of_layer`` returns for that layer.
        """
        if not self.has_mlp:
            return 0
        return self.ffn_hidden_size if self.experts is None else self.experts.active_width

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.is_gated else 2

    def attention_parameters(self) -> int:
        """Count the parameters of the weight matrices of a layer's attention."""
        if self.latent_attention is not None:
            return self.latent_attention.parameters(self.hidden_size)[0]
        heads = self.num_attention_heads * self.kv_channels
        rows = (2 + self.attention_output_gate) * heads + self.key_value_width
        return self.hidden_size * rows
