"""Is a reward the same at every layout and in every batch? What is compared, and the bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_aligner.errors import ConfigError
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.layout import LayoutSizes

FP32_BAR = 1e-5
_EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}


# Layout -> variant -> rewards [N, A].
Rewards = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Scored:
    """Rewards by layout and variant, those to compare with, and why some layouts do not fit."""

    rewards: Rewards
    reference: np.ndarray
    reasons: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        rewards = {
            layout: {name: rows.tolist() for name, rows in variants.items()}
            for layout, variants in self.rewards.items()
        }
        reference = self.reference.tolist()
        return {"rewards": rewards, "reference": reference, "reasons": self.reasons}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scored:
        """What ``to_dict`` has made, in float64."""
        rewards = {
            layout: {name: np.array(rows) for name, rows in variants.items()}
            for layout, variants in content["rewards"].items()
        }
        return cls(rewards, np.array(content["reference"]), content["reasons"])


@dataclass(frozen=True)
class Row:
    """One layout and variant against the reference.

    ``difference`` is the largest |difference| of a reward; ``flips`` counts pairs whose verdict
    turned although the reference's margin was above the bar's tolerance.
    """

    layout: str
    variant: str
    texts: int
    difference: float
    flips: int
    ok: bool


@dataclass(frozen=True)
class Bar:
    """How far rewards may be from the reference: one of them, and the margin of two."""

    reward: float
    margin: float


def fitting_layouts(world_size: int, shape: ModelShape) -> tuple[list[LayoutSizes], list[str]]:
    """The layouts of ``world_size`` ranks that split the model evenly, and why others do not.

    Those that split it into the most pieces come first: where one fits into memory, it does.
    """
    fitting: list[LayoutSizes] = []
    reasons = []
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tp in divisors:
        for pp in (size for size in divisors if world_size % (tp * size) == 0):
            sizes = LayoutSizes(tp=tp, pp=pp, dp=world_size // (tp * pp))
            try:
                shape.check_fits(tp, pp)
            except ConfigError as error:
                reasons.append(f"{sizes}: {error}")
                continue
            fitting += [sizes, replace(sizes, sequence_parallel=True)][: 1 + (tp > 1)]
    return sorted(fitting, key=lambda sizes: -sizes.tp * sizes.pp), reasons


def choose_bar(precision: str, num_layers: int, reference: np.ndarray) -> Bar:
    """What ``precision`` may cost against an fp32 reference ``[N, A]``.

    In fp32 1e-5, times the largest |reward| where that is above 1, and no verdict may turn. Else
    every layer rounds the residual stream twice: as rounding errors of one size add up like a
    random walk, the bar is 4 standard deviations of it, ``4 * epsilon * sqrt(2 * num_layers)``, in
    units of the rewards' own spread.
    """
    if precision == "fp32":
        return Bar(FP32_BAR * max(1.0, float(np.abs(reference).max())), 0.0)
    spread = float(reference.std(axis=0).max())
    reward = 4 * _EPSILON[precision] * math.sqrt(2 * num_layers) * spread
    return Bar(reward, 2 * reward)


def compare(
    layout: str,
    variant: str,
    rewards: np.ndarray,
    reference: np.ndarray,
    weights: Sequence[float],
    bar: Bar,
) -> Row:
    """``[N, A]`` rewards of pairs (chosen, rejected, chosen, ...) against the reference's."""
    difference = float(np.abs(rewards - reference).max())
    margins, wanted = _margins(rewards, weights), _margins(reference, weights)
    turned = (np.sign(margins) != np.sign(wanted)) & (np.abs(wanted) > bar.margin)
    flips = int(turned.sum())
    # A NaN is no number that is small enough.
    return Row(
        layout, variant, len(rewards), difference, flips, difference <= bar.reward and not flips
    )


def _margins(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    merged = rewards.astype(np.float64) @ np.asarray(weights, dtype=np.float64)
    return merged[::2] - merged[1::2]


def render_rows(rows: Sequence[Row]) -> str:
    """The table for people."""
    layout = max(len("layout"), *(len(row.layout) for row in rows)) + 2
    variant = max(len("variant"), *(len(row.variant) for row in rows)) + 2
    head = f"{'layout':<{layout}}{'variant':<{variant}}{'texts':>6}{'largest |difference|':>22}"
    lines = [f"{head}{'flips':>7}"]
    for row in rows:
        lines.append(
            f"{row.layout:<{layout}}{row.variant:<{variant}}{row.texts:>6}"
            f"{row.difference:>22.2e}{row.flips:>7}" + ("" if row.ok else "   MISSED")
        )
    return "\n".join(lines)


def summarise(rows: Sequence[Row], bar: Bar) -> str:
    """One line: how many rows hold the bar, and the worst of them."""
    missed = sum(not row.ok for row in rows)
    # max() would pass over a NaN.
    worst = max(math.inf if math.isnan(row.difference) else row.difference for row in rows)
    flips = sum(row.flips for row in rows)
    verdict = "the same everywhere" if not missed else f"MISSED in {missed} of {len(rows)} rows"
    return (
        f"{verdict}: largest |difference| {worst:.2e} (wanted {bar.reward:.2g} or less), "
        f"{flips} verdicts turned where the margin is above {bar.margin:.2g}"
    )
