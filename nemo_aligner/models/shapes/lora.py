"""LoRA: rank, scale, and the linear layers with an adapter, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_aligner.config.common import (
    MAX_COUNT,
    MAX_NUMBER,
    MIN_NUMBER,
    as_yaml,
    read_count,
    read_number,
)
from nemo_aligner.config.model import LORA_TARGETS, BasePrecision, LoraConfig
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

if TYPE_CHECKING:
    from nemo_aligner.models.shapes.decoder import ModelShape

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
# Linear layers of the MLP by the same names in mixture-of-experts layers, where each expert has its
# own.
EXPERT_LINEARS = {
    name: path.replace("mlp.", "mlp.experts.") for name, path in LINEARS.items() if "mlp" in path
}
_BASE = "base_precision"
_WHERE = f"model_config.yaml: {LORA_KEY}"


@dataclass(frozen=True)
class LoraShape:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): ``W x`` becomes ``W x + alpha / rank * B A x``.

    Each linear layer named in ``targets`` trains its ``A [rank, in]`` and ``B [out, rank]``.

    Attributes:
        base_precision: precision to which the frozen weights of all linear layers are quantized; an
            archive holds their dequantized values. None if they are not quantized.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_precision: BasePrecision | None = None

    @classmethod
    def from_settings(cls, settings: LoraConfig) -> LoraShape | None:
        """Convert the settings to a shape; None if the rank is 0, which means no LoRA."""
        if settings.rank == 0:
            return None
        targets = tuple(name for name in LORA_TARGETS if name in settings.targets)
        return cls(settings.rank, float(settings.alpha), targets, settings.base_precision)

    def to_settings(self) -> list[str]:
        """List the settings, as ``key=value``, whose defaults would give another shape."""
        default, settings = LoraConfig(), [f"model.lora.rank={self.rank}"]
        if self.alpha != default.alpha:
            settings.append(f"model.lora.alpha={as_yaml(self.alpha)}")
        if set(self.targets) != set(default.targets):
            settings.append(f"model.lora.targets=[{','.join(self.targets)}]")
        if self.base_precision is not None:
            settings.append(f"model.lora.base_precision={self.base_precision.value}")
        return settings

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

    @property
    def adapts_experts(self) -> bool:
        """True if the experts of a mixture-of-experts model get adapters."""
        return any(target in EXPERT_LINEARS for target in self.targets)

    def with_dense_base(self) -> LoraShape:
        """Return the same adapters on a base that is not quantized, as folding them requires."""
        return replace(self, base_precision=None)

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
        section = {**asdict(self), "targets": list(self.targets)}
        if self.base_precision is None:  # earlier versions reject the key
            del section[_BASE]
        else:
            section[_BASE] = self.base_precision.value
        return section

    def __str__(self) -> str:
        base = "" if self.base_precision is None else f", on a base in {self.base_precision.value}"
        return f"rank {self.rank}, alpha {self.alpha:g}, on {', '.join(self.targets)}{base}"


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
    if not isinstance(section, Mapping) or set(section) - {_BASE} != keys:
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
    base, choices = section.get(_BASE), [choice.value for choice in BasePrecision]
    if base is not None and base not in choices:
        expected = f"one of {', '.join(choices)}"
        raise CheckpointError(f"{_WHERE}.{_BASE}: got {shown(base)}, wanted {expected}")
    return LoraShape(rank, alpha, tuple(names), None if base is None else BasePrecision(base))


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


def check_expert_rank(lora: LoraShape | None, tp: int) -> None:
    """Check that tensor parallelism can split the adapters of experts, along LoRA's rank.

    Raises:
        ConfigError: experts get adapters, and ``tp`` does not divide LoRA's rank.
    """
    if lora is not None and lora.adapts_experts and lora.rank % tp != 0:
        raise ConfigError(
            f"model.lora.rank: got {lora.rank}, wanted a multiple of "
            f"model.tensor_model_parallel_size={tp}, which splits the adapters of experts"
        )


def check_dropout(shape: ModelShape, rate: float) -> None:
    """Check that LoRA's adapters in a model of this shape support dropout at ``rate``.

    Raises:
        ConfigError: experts get adapters, and ``rate`` is above 0.
    """
    has_adapted_experts = (
        shape.experts is not None and shape.lora is not None and shape.lora.adapts_experts
    )
    if rate > 0 and has_adapted_experts:
        raise ConfigError(
            f"model.lora.dropout: got {rate:g}, which is not supported for adapters of experts. "
            "Set it to 0, or choose only attention's linear layers in model.lora.targets."
        )
