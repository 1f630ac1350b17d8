"""Settings of what a server makes of a reward model's rewards for a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nemo_aligner.config.common import Checks, setting


class Standardize(Enum):
    none = "none"
    contract = "contract"
    running = "running"
    given = "given"


class Combine(Enum):
    mean = "mean"
    min = "min"
    lower_bound = "lower_bound"


@dataclass
class EnsembleConfig:
    """More reward models beside ``rm_model_file``, and one reward of them all."""

    files: list[str] = setting([], "more reward models that score the same texts")
    combine: Combine = setting(
        Combine.mean, "mean of the models, or lower_bound: mean minus k deviations"
    )
    k: float = setting(1.0, "number of deviations for lower_bound")

    def __post_init__(self) -> None:
        with Checks("ensemble", self) as checks:
            checks.not_negative("k")


@dataclass
class ShapingConfig:
    """Each is off by default; in this order, and the raw rewards stand beside."""

    standardize: Standardize = setting(
        Standardize.none,
        "standardize by statistics of training, of all so far, or given ones",
    )
    mean: list[float] = setting([], "means for standardize=given, one per attribute")
    std: list[float] = setting([], "deviations for standardize=given, one above 0 per attribute")
    statistics_file: str | None = setting(
        None, "file that keeps the statistics of standardize=running"
    )
    attribute_weights: dict[str, float] = setting(
        {}, "weights by attribute for the combined reward"
    )
    spread_penalty: float = setting(
        0.0, "k: reward minus k times its uncertainty, where the model has one"
    )
    length_penalty: float = setting(
        0.0, "penalty per token of the reply beyond length_penalty_from"
    )
    length_penalty_from: int = setting(0, "tokens of a reply that are free")
    clip: list[float] = setting([], "[low, high]: clip rewards to this range")
    threshold: float | None = setting(None, "also report whether each reward reaches this value")

    def __post_init__(self) -> None:
        with Checks("shaping", self) as checks:
            checks.not_negative("spread_penalty", "length_penalty", "length_penalty_from")
            checks.require(
                self.length_penalty > 0 or not self.length_penalty_from,
                "length_penalty_from",
                "0, or shaping.length_penalty beside it",
            )
            fits = not self.clip or (len(self.clip) == 2 and self.clip[0] < self.clip[1])
            checks.require(fits, "clip", "[low, high], low below high")
            is_given = self.standardize is Standardize.given
            checks.require(is_given or not self.mean, "mean", "none, or shaping.standardize=given")
            fits = len(self.std) == len(self.mean) and all(value > 0 for value in self.std)
            wanted = "as many numbers above 0 as shaping.mean has"
            checks.require(fits and is_given == bool(self.std), "std", wanted)
            is_running = self.standardize is Standardize.running
            checks.require(
                self.statistics_file is None or is_running,
                "statistics_file",
                "null, or shaping.standardize=running",
            )
