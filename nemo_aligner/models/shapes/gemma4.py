"""Traits of Gemma 4's decoder layers that other decoders lack, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_aligner.config.common import count_of_config, number_of_config, read_count
from nemo_aligner.models.shapes.experts import (
    BRANCH_NORMS,
    EXPERT_COUNT,
    EXPERT_FREQUENCY,
    SHARED_GATE,
    SHARED_WIDTH,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# This package's own keys. A config with GLOBAL_CHANNELS describes a Gemma 4; "global" layers are
# those without a window.
GLOBAL_CHANNELS, GLOBAL_GROUPS = "global_kv_channels", "global_query_groups"
KEYS_AS_VALUES, GLOBAL_ROTARY = "global_keys_as_values", "global_rotary_percentage"
SHARED_LAYERS, DOUBLE_WIDE = "kv_shared_layers", "kv_shared_double_wide_mlp"
PER_LAYER_WIDTH = "per_layer_input_size"

# Settings that a Gemma 4 has, and settings that are not supported with it: each key with the values
# that are allowed.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "normalization": ("rmsnorm", None),
    "post_layernorms": (True,),
    "qk_layernorm": (True,),
    "position_embedding_type": ("rope", None),
}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "pre_layernorms": (True, None),
    "qk_layernorm_across_heads": (False, None),
    "qk_norm_after_rope": (False, None),
    "bias": (False, None),
    "qkv_bias": (False, None),
    "attention_output_gate": (False, None),
    "attn_logit_softcapping": (None,),
    "softmax_type": ("vanilla", None),
    "no_rope_freq": (None,),
    "rotary_percentage": (1.0, None),
    "scale_positional_embedding": (False, None),
    "seq_len_interpolation_factor": (None,),
    "dynamic_rope_factor": (None,),
    "llama_4_scaling_beta": (None,),
    "zero_query_groups": (0, None),
    "experimental_attention_variant": (None,),
    "multi_latent_attention": (False, None),
    EXPERT_FREQUENCY: (None, 1),
}


@dataclass(frozen=True)
class Gemma4Layer:
    """Traits of one layer.

    Attributes:
        keys_as_values: the layer's values are its keys, before their norm and RoPE.
        keys_from: number, from 1, of the earlier layer whose keys and values this layer reads; None
            if it has its own.
        lends_keys: a later layer reads this layer's keys and values.
    """

    keys_as_values: bool
    keys_from: int | None
    lends_keys: bool


@dataclass(frozen=True)
class Gemma4Shape:
    """Traits of Gemma 4's decoder (Gemma Team 2026, ``modeling_gemma4.py`` of transformers).

    In addition to these, every layer norms its values by an RMSNorm without a weight, and
    multiplies its output by a stored scalar that is not trained.

    Attributes:
        global_channels: channels of a head in layers without a window, which have another size of
            heads than layers with one (``ModelShape.kv_channels``).
        global_groups: query groups in layers without a window.
        keys_as_values: layers without a window have no projection of values.
        global_rotary: fraction of a head's channel pairs that RoPE rotates in layers without a
            window ("proportional" RoPE): the pairs of the other channels have the frequency 0.
        shared_layers: number of layers at the end of the model that compute no keys and values, and
            read those of the last layer before them with the same kind of window.
        double_wide: these last layers have an MLP of twice the width.
        per_layer_width: channels of each layer's input from the token's id and embedding; None if
            layers have no such input.
        layer: traits of one layer, in the shape that ``ModelShape.of_layer`` returns; None in the
            shape of a whole model.
    """

    global_channels: int
    global_groups: int
    keys_as_values: bool
    global_rotary: float
    shared_layers: int = 0
    double_wide: bool = False
    per_layer_width: int | None = None
    layer: Gemma4Layer | None = None

    @property
    def needs_whole_backward(self) -> bool:
        """True if layers read tensors with gradients other than the previous layer's output.

        These are the keys of an earlier layer, or inputs from the embeddings. Full recomputation
        would not return their gradients.
        """
        return self.shared_layers > 0 or self.per_layer_width is not None

    def of_layer(self, layer_number: int, are_global: Sequence[bool]) -> Gemma4Shape:
        """Return this shape with the traits of one layer.

        Args:
            layer_number: number of the layer, from 1.
            are_global: for each layer of the model whether it has no window.
        """
        is_global = are_global[layer_number - 1]
        keys_from, last = None, len(are_global) - self.shared_layers
        same_kind = [
            n for n, has_no_window in enumerate(are_global[:last], 1) if has_no_window == is_global
        ]
        if layer_number > last:
            keys_from = same_kind[-1]
        lends_keys = self.shared_layers > 0 and layer_number == same_kind[-1]
        as_values = self.keys_as_values and is_global
        return replace(self, layer=Gemma4Layer(as_values, keys_from, lends_keys))

    def check_layers(self, are_global: Sequence[bool]) -> None:
        """Check that every layer without keys has an earlier layer with the same kind of window.

        Args:
            are_global: for each layer of the model whether it has no window.

        Raises:
            CheckpointError: a layer without keys has no such earlier layer.
        """
        with_keys = are_global[: len(are_global) - self.shared_layers]
        if not with_keys or set(with_keys) != set(are_global):
            raise CheckpointError(
                f"model_config.yaml: {SHARED_LAYERS}: got {self.shared_layers} of "
                f"{len(are_global)} layers, wanted fewer, so that a layer with a window and one "
                "without come before them"
            )

    def check_fits(self, tp: int, pp: int, are_global: Sequence[bool]) -> None:
        """Check that a layout splits what is particular to Gemma 4.

        Args:
            tp, pp: sizes of tensor and pipeline parallelism.
            are_global: for each layer of the model whether it has no window.

        Raises:
            ConfigError: ``tp`` does not divide the global query groups or the per-layer channels,
                or a layer reads what another pipeline stage has.
        """
        key = "model.tensor_model_parallel_size"
        if self.global_groups % tp != 0:
            raise ConfigError(
                f"{key}: got {tp}, wanted a divisor of the {self.global_groups} query groups of "
                "the model's layers without a window. Query groups of zeros cannot be added to a "
                "Gemma 4, whose layers have several numbers of query groups."
            )
        if self.per_layer_width is not None and self.per_layer_width % tp != 0:
            raise ConfigError(
                f"{key}: got {tp}, wanted a divisor of the {self.per_layer_width} channels of the "
                "model's per-layer inputs"
            )
        key = "model.pipeline_model_parallel_size"
        if self.per_layer_width is not None and pp > 1:
            raise ConfigError(
                f"{key}: got {pp}, which is not supported for a model whose layers read the "
                f"token's embedding ({PER_LAYER_WIDTH}): only the first stage has it. Set it to 1."
            )
        per_stage = max(1, len(are_global) // pp)
        for number in range(1, len(are_global) + 1):
            layer = self.of_layer(number, are_global).layer
            lender = number if layer is None or layer.keys_from is None else layer.keys_from
            if (lender - 1) // per_stage != (number - 1) // per_stage:
                raise ConfigError(
                    f"{key}: got {pp}, which is not supported, as layer {number} reads the keys of "
                    f"layer {lender}, in an earlier stage. Use fewer stages."
                )

    def layer_parameters(self, hidden_size: int) -> tuple[int, int]:
        """Count a layer's parameters for its per-layer input: those that TP shards, and others.

        The layer's scalar is not trained, so it does not count.
        """
        width = self.per_layer_width
        return (0, 0) if width is None else (2 * hidden_size * width, hidden_size)

    def outer_parameters(self, hidden_size: int, rows: int, num_layers: int) -> tuple[int, int]:
        """Count the parameters outside the layers that compute the per-layer inputs.

        Args:
            rows: rows of the embedding table.

        Returns:
            The parameters of the table, which TP shards, and of the projection of the embeddings
            with its norm, which all ranks have.
        """
        if self.per_layer_width is None:
            return 0, 0
        width = num_layers * self.per_layer_width
        return rows * width, hidden_size * width + self.per_layer_width


def read_gemma4(config: Mapping[str, Any]) -> Gemma4Shape | None:
    """Read the traits of a Gemma 4; None for another model.

    Raises:
        CheckpointError: a key is missing or out of range, or the config has a setting that is not
            supported together with them.
    """
    _check_experts(config)
    if config.get(GLOBAL_CHANNELS) is None:
        return None
    for key, allowed in (*_REQUIRED.items(), *_UNSUPPORTED.items()):
        if config.get(key) not in allowed:
            raise CheckpointError(
                f"model_config.yaml: {key}: got {shown(config.get(key))} together with "
                f"{GLOBAL_CHANNELS}, wanted {allowed[0]}"
            )
    heads, channels = (
        count_of_config(config, key) for key in ("num_attention_heads", GLOBAL_CHANNELS)
    )
    groups = count_of_config(config, GLOBAL_GROUPS)
    if heads % groups:
        raise CheckpointError(
            f"model_config.yaml: {GLOBAL_GROUPS}: got {groups}, wanted a divisor of the {heads} "
            "attention heads"
        )
    if channels % 2:
        raise CheckpointError(
            f"model_config.yaml: {GLOBAL_CHANNELS}: got {channels}, wanted an even number"
        )
    rotated = number_of_config(config, GLOBAL_ROTARY, 1.0)
    if rotated > 1:
        raise CheckpointError(
            f"model_config.yaml: {GLOBAL_ROTARY}: got {rotated}, wanted at most 1"
        )
    layers = count_of_config(config, "num_layers")
    width = config.get(PER_LAYER_WIDTH)
    return Gemma4Shape(
        global_channels=channels,
        global_groups=groups,
        keys_as_values=bool(config.get(KEYS_AS_VALUES)),
        global_rotary=rotated,
        shared_layers=read_count(
            config.get(SHARED_LAYERS) or 0,
            f"model_config.yaml: {SHARED_LAYERS}",
            f"a whole number from 0 to {layers - 1}",
            0,
            layers - 1,
        ),
        double_wide=bool(config.get(DOUBLE_WIDE)),
        per_layer_width=None if width is None else count_of_config(config, PER_LAYER_WIDTH),
    )


def _check_experts(config: Mapping[str, Any]) -> None:
    """Check that a Gemma 4, and no other model, has experts with norms next to a dense MLP.

    Raises:
        CheckpointError: it has other experts, or another model has such experts.
    """
    has_experts, has_norms = bool(config.get(EXPERT_COUNT)), bool(config.get(BRANCH_NORMS))
    is_gemma4 = config.get(GLOBAL_CHANNELS) is not None
    if has_norms != (has_experts and is_gemma4):
        raise CheckpointError(
            f"model_config.yaml: {BRANCH_NORMS}: got {shown(config.get(BRANCH_NORMS))} together "
            f"with {EXPERT_COUNT}={shown(config.get(EXPERT_COUNT))} and {GLOBAL_CHANNELS}="
            f"{shown(config.get(GLOBAL_CHANNELS))}. Set it to true for a Gemma 4 with experts, and "
            "for no other model."
        )
    if not has_norms:
        return
    is_wide = config.get(DOUBLE_WIDE) and config.get(SHARED_LAYERS)
    expected = {SHARED_WIDTH: config.get("ffn_hidden_size"), SHARED_GATE: False, DOUBLE_WIDE: False}
    values = {**config, SHARED_GATE: bool(config.get(SHARED_GATE)), DOUBLE_WIDE: bool(is_wide)}
    for key, value in expected.items():
        if values.get(key) != value:
            raise CheckpointError(
                f"model_config.yaml: {key}: got {shown(config.get(key))} together with "
                f"{BRANCH_NORMS}, wanted {value}"
            )
