"""ModelShape: what ``model_config.yaml`` says of a model's architecture, checked and typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.errors import CheckpointError, ConfigError

_REQUIRED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
_SUPPORTED = {
    "normalization": ("rmsnorm",),
    "activation": ("fast-swiglu", "swiglu"),
    "position_embedding_type": ("rope",),
    "bias": (False,),
    "qkv_bias": (False, None),
    "qk_layernorm": (False, None),
    "apply_embedding_scaling": (False, None),
    "window_size": (None,),
    "moe_num_experts": (None, 0),
    "num_moe_experts": (None, 0),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent scaling of the rotary base frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    old_context_len: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family, in the terms of NeMo's ``model_config.yaml``."""

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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a NeMo model config.

        Raises:
            CheckpointError: a key is missing, or has a value that this package does not build.
        """
        missing = [key for key in (*_REQUIRED, "vocab_size") if config.get(key) is None]
        if missing:
            raise CheckpointError(f"model_config.yaml: it lacks {', '.join(missing)}")
        for key, values in _SUPPORTED.items():
            value = config.get(key, values[0])
            if value not in values:
                wanted = " or ".join(str(item) for item in values)
                raise CheckpointError(f"model_config.yaml: {key}: got {value!r}, wanted {wanted}")
        heads = int(config["num_attention_heads"])
        return cls(
            num_layers=int(config["num_layers"]),
            hidden_size=int(config["hidden_size"]),
            ffn_hidden_size=int(config["ffn_hidden_size"]),
            num_attention_heads=heads,
            num_query_groups=int(config.get("num_query_groups") or heads),
            kv_channels=int(config.get("kv_channels") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            make_vocab_size_divisible_by=int(config.get("make_vocab_size_divisible_by") or 128),
            max_position_embeddings=int(
                config.get("max_position_embeddings") or config["encoder_seq_length"]
            ),
            layernorm_epsilon=float(config.get("layernorm_epsilon", 1e-5)),
            rotary_base=float(config.get("rotary_base", 10000.0)),
            rotary_percentage=float(config.get("rotary_percentage", 1.0)),
            seq_len_interpolation_factor=config.get("seq_len_interpolation_factor"),
            rope_scaling=_read_rope_scaling(config),
        )

    def check_fits(self, tp: int, pp: int) -> None:
        """Refuse a layout that cannot split the model evenly.

        Raises:
            ConfigError: it names the setting, and what it should divide.
        """
        key = "model.tensor_model_parallel_size"
        if self.ffn_hidden_size % tp != 0:
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
                    f"{key}: got {tp}, wanted a divisor of the model's {count} {name} "
                    f"(convert_hf_to_nemo.py --tensor-parallel {tp} adds query groups of zeros)"
                )
        if self.num_layers % pp != 0:
            raise ConfigError(
                f"model.pipeline_model_parallel_size: got {pp}, "
                f"wanted a divisor of the model's {self.num_layers} layers"
            )

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding table when it is split over ``tp`` ranks."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def num_parameters(self) -> int:
        """Parameters of backbone and embedding table, without any head or vocabulary padding."""
        layer = self._linear_parameters() + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size * (self.vocab_size + 1)

    def pair_cost(self) -> float:
        """FLOPs of attention between a query and a key, over those of a token's linear layers.

        Two multiplications and additions per channel of every head, against one per parameter.
        """
        return 2 * self.num_attention_heads * self.kv_channels / self._linear_parameters()

    def _linear_parameters(self) -> int:
        """Of one layer."""
        heads = self.num_attention_heads * self.kv_channels
        groups = self.num_query_groups * self.kv_channels
        attention = self.hidden_size * (2 * heads + 2 * groups)
        return attention + 3 * self.hidden_size * self.ffn_hidden_size


def _read_rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    if not config.get("scale_positional_embedding"):
        return None
    # The defaults are Llama 3.1's, which NeMo leaves unwritten.
    return RopeScaling(
        factor=float(config.get("scale_factor", 8.0)),
        low_freq_factor=float(config.get("low_freq_factor", 1.0)),
        high_freq_factor=float(config.get("high_freq_factor", 4.0)),
        old_context_len=int(config.get("old_context_len", 8192)),
    )
