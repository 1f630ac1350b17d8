"""LoRA as a model's settings have it: its rank, its scale, the linear layers that it is beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_aligner.config.lora import LORA_TARGETS, LoraConfig
from nemo_aligner.config.numbers import LEAST_NUMBER, MOST, MOST_NUMBER, read_count, read_number
from nemo_aligner.errors import CheckpointError, shown

# The section of model_config.yaml.
LORA_KEY = "lora"
# What a linear layer's two matrices are named behind its own name, as NeMo 2 names them.
LORA_A, LORA_B = "adapter.linear_in.weight", "adapter.linear_out.weight"
# A layer's linear layers by the names that settings have for them, in the order of LORA_TARGETS.
LINEARS = dict(
    zip(
        LORA_TARGETS,
        ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
         "mlp.linear_fc2"),
        strict=True,
    )
)  # fmt: skip
_WHERE = f"model_config.yaml: {LORA_KEY}"


@dataclass(frozen=True)
class LoraShape:
    """``W x`` of the ``targets`` becomes ``W x + alpha / rank * B A x``.

    ``A [rank, in]`` and ``B [out, rank]`` are what is trained (Hu et al. 2021, arXiv:2106.09685).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: LoraConfig) -> LoraShape | None:
        """None where there is to be no LoRA."""
        if settings.rank == 0:
            return None
        targets = tuple(name for name in LORA_TARGETS if name in settings.targets)
        return cls(settings.rank, float(settings.alpha), targets)

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    @property
    def linears(self) -> list[str]:
        """The names of the linear layers inside a layer of the decoder."""
        return [LINEARS[target] for target in self.targets]

    def tensors(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The whole shapes of A and B beside a layer's ``weights``, by their names."""
        found: dict[str, tuple[int, ...]] = {}
        for name in self.linears:
            outputs, inputs = weights[f"{name}.weight"]
            found[f"{name}.{LORA_A}"] = (self.rank, inputs)
            found[f"{name}.{LORA_B}"] = (outputs, self.rank)
        return found

    def to_config(self) -> dict[str, Any]:
        """The section of ``model_config.yaml``."""
        return {**asdict(self), "targets": list(self.targets)}

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, on {', '.join(self.targets)}"


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of a model is LoRA's, by its name."""
    return name.endswith((LORA_A, LORA_B))


def read_lora(config: Mapping[str, Any]) -> LoraShape | None:
    """LoRA of a NeMo model config, if it has any.

    Raises:
        CheckpointError: the section is not what ``LoraShape.to_config`` gives.
    """
    section = config.get(LORA_KEY)
    if section is None:
        return None
    keys = {"rank", "alpha", "targets"}
    if not isinstance(section, Mapping) or set(section) != keys:
        raise CheckpointError(f"{_WHERE}: got {shown(section)}, wanted rank, alpha and targets")
    wanted = f"a whole number above 0 and of at most {MOST}"
    rank = read_count(section["rank"], f"{_WHERE}.rank", wanted)
    wanted = f"a number above 0, from {LEAST_NUMBER} to {MOST_NUMBER}"
    alpha = float(read_number(section["alpha"], f"{_WHERE}.alpha", wanted))
    targets = section["targets"]
    names = [name for name in LORA_TARGETS if isinstance(targets, list) and name in targets]
    if not names or len(names) != len(targets):
        wanted = f"at least one of {', '.join(LORA_TARGETS)}, each once"
        raise CheckpointError(f"{_WHERE}.targets: got {shown(targets)}, wanted {wanted}")
    return LoraShape(rank, alpha, tuple(names))


def with_lora(config: Mapping[str, Any], lora: LoraShape | None) -> dict[str, Any]:
    """A NeMo model config with the section of ``lora``, or without one."""
    rest = {key: value for key, value in config.items() if key != LORA_KEY}
    return rest if lora is None else {**rest, LORA_KEY: lora.to_config()}


def check_lora(stored: LoraShape | None, wanted: LoraShape | None, source: object) -> None:
    """Refuse to train another LoRA than the one that a model comes with.

    Raises:
        CheckpointError: both are there, and differ.
    """
    if stored is not None and wanted is not None and stored != wanted:
        raise CheckpointError(
            f"{source}: it comes with LoRA of {stored}; model.lora has {wanted}. Wanted the same, "
            "to go on with it; model.lora.rank=0 trains all weights with LoRA folded into them"
        )
