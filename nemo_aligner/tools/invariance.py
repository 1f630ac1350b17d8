"""Compare rewards of the same samples that were scored in different ways, and judge differences.

A reward must be bit-identical in every batch. At another layout, in a training forward pass, and in
another precision it may differ by rounding, but only up to a limit. ``nemo-aligner check`` compares
with these functions; tests and a benchmark use ``score_alone``, ``score_calls`` and
``count_changed`` for any scorer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

# ``SERVER`` is the name in place of a layout for rewards over HTTP. ``TRAINING`` is the prefix of
# variants that were computed in a training forward pass.
SERVER, TRAINING = "server", "training"
# Unit roundoff (largest relative rounding error) of each precision.
_EPSILON = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}

# Type of a function that scores a list of N samples, and returns rewards [N, ...].
Score: TypeAlias = Callable[[list[Any]], np.ndarray]
# layout -> variant (how the samples were batched) -> rewards [N, A].
Rewards: TypeAlias = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Scored:
    """Rewards of N samples, scored in different ways.

    Attributes:
        rewards: layout -> variant (how the samples were batched) -> rewards ``[N, A]``.
        reference: rewards ``[N, A]`` in fp32, each in a batch of one.
        reasons: for each layout that does not fit the model, why it does not.
    """

    rewards: Rewards
    reference: np.ndarray
    reasons: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Convert the rewards to lists of numbers, for JSON."""
        rewards = {
            layout: {name: rows.tolist() for name, rows in variants.items()}
            for layout, variants in self.rewards.items()
        }
        reference = self.reference.tolist()
        return {"rewards": rewards, "reference": reference, "reasons": self.reasons}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scored:
        """Build an object from the result of ``to_dict``; rewards become float64."""
        rewards = {
            layout: {name: np.array(rows) for name, rows in variants.items()}
            for layout, variants in content["rewards"].items()
        }
        return cls(rewards, np.array(content["reference"]), content["reasons"])


class Compared(Enum):
    """The kind of reference with which a row of the table compares rewards.

    The members' values must not change, because the JSON files of earlier runs contain them.
    """

    batch = "company"
    layout = "layout"
    training = "training"
    precision = "precision"


_HEADINGS = {
    Compared.batch: "the same layout, in another batch",
    Compared.layout: "another layout",
    Compared.training: "training's forward pass",
    Compared.precision: "fp32",
}


@dataclass(frozen=True)
class Row:
    """A row of the table: the rewards of one layout and variant, compared with a reference.

    Attributes:
        compared: kind of the reference.
        layout: name of the layout, or ``SERVER``.
        variant: how the samples were batched.
        texts: number of samples.
        changed: number of rewards that are not bit-identical.
        difference: largest |difference| of a reward; NaN if a reward is NaN.
        flips: number of pairs in which another sample wins than in the reference, not counting
            pairs whose reference margin is within the limit.
        ok: True if the row passes.
    """

    compared: Compared
    layout: str
    variant: str
    texts: int
    changed: int
    difference: float
    flips: int
    ok: bool


@dataclass(frozen=True)
class Limits:
    """The largest differences with which a row passes, for one kind of reference.

    Attributes:
        reward: largest allowed |difference| of a reward.
        margin: largest |margin| of a pair, in the reference, whose verdict may flip.
    """

    reward: float
    margin: float


# Limits in units of the expected rounding error (the random walk of ``choose_limits``). With 64
# samples, the largest measured difference was 1.7 to 5 units. Training has a higher limit, because
# it also rounds the residual stream, which changed rewards 1.7 times as much.
_WALKS = {Compared.layout: 6.0, Compared.training: 10.0, Compared.precision: 6.0}
# The limit in fp32, in the same units of expected rounding error. It is higher, because in fp32 the
# sums inside a matmul also round; docs/correctness.md has measurements.
_FP32_UNITS = 100.0


def choose_limits(precision: str, num_layers: int, reference: np.ndarray) -> dict[Compared, Limits]:
    """Choose the limits for each kind of reference.

    Args:
        precision: precision in which the rewards were computed.
        num_layers: number of the model's layers.
        reference: rewards ``[N, A]`` in fp32.

    In another batch nothing may change. Otherwise every layer rounds twice, and independent
    rounding errors of the same size add up like a random walk. A limit is therefore a multiple of
    ``epsilon * sqrt(2 * (num_layers + 4))``; the 4 extra layers stand for the rounding of weights,
    embeddings and head. For bf16 and fp16, this is multiplied by the standard deviation of the
    rewards; for fp32, by the largest |reward|, but at least 1. A verdict may flip if its margin is
    below twice the limit. docs/correctness.md has the measurements.
    """
    exact = {Compared.batch: Limits(0.0, 0.0)}
    walk = _EPSILON[precision] * math.sqrt(2 * (num_layers + 4))
    if precision == "fp32":
        limit = _FP32_UNITS * walk * max(1.0, float(np.abs(reference).max()))
        return exact | dict.fromkeys((Compared.layout, Compared.training), Limits(limit, 2 * limit))
    walk *= float(reference.std(axis=0).max())
    return exact | {
        compared: Limits(steps * walk, 2 * steps * walk) for compared, steps in _WALKS.items()
    }


def compare_all(
    scored: Scored, weights: Sequence[float], limits: Mapping[Compared, Limits]
) -> list[Row]:
    """Compare all rewards with their references, and return a row for each comparison.

    At each layout, other batches are compared with batches of one. Batches of one are compared with
    those of the first layout, and with fp32. The server and the training forward pass are compared
    with batches of one at the first layout.

    Comparisons without an entry in ``limits`` are skipped: rewards in fp32 are not compared with
    fp32.
    """
    first = next(iter(scored.rewards.values()))["alone"]
    rows = []
    for layout, variants in scored.rewards.items():
        for variant, rewards in variants.items():
            if layout == SERVER:
                references = [(Compared.batch, first)]
            elif variant.startswith(TRAINING):
                references = [(Compared.training, first)]
            elif variant == "alone":
                references = [(Compared.layout, first), (Compared.precision, scored.reference)]
            else:
                references = [(Compared.batch, variants["alone"])]
            rows += [
                compare(compared, layout, variant, rewards, reference, weights, limits[compared])
                for compared, reference in references
                if compared in limits
            ]
    return rows


def compare(
    compared: Compared,
    layout: str,
    variant: str,
    rewards: np.ndarray,
    reference: np.ndarray,
    weights: Sequence[float],
    limit: Limits,
) -> Row:
    """Compare rewards ``[N, A]`` with a reference of the same samples.

    Args:
        compared, layout, variant: fields of the row.
        rewards: rewards of pairs, in the order chosen, rejected, chosen, ...
        reference: the rewards to compare with, ``[N, A]``.
        weights: weight of each attribute in a margin, ``[A]``.
        limit: the differences up to which the row passes.
    """
    difference = float(np.abs(rewards - reference).max())
    margins, expected = _compute_margins(rewards, weights), _compute_margins(reference, weights)
    is_flip = (np.sign(margins) != np.sign(expected)) & (np.abs(expected) > limit.margin)
    flips = int(is_flip.sum())
    return Row(
        compared=compared,
        layout=layout,
        variant=variant,
        texts=len(rewards),
        changed=count_changed(rewards, reference),
        difference=difference,
        flips=flips,
        # ``<=`` makes a NaN fail; ``not difference > limit.reward`` would let it pass.
        ok=difference <= limit.reward and not flips,
    )


def _compute_margins(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Compute the margins ``[N / 2]`` of pairs from rewards ``[N, A]`` and weights ``[A]``.

    A margin is the weighted sum of the chosen sample's rewards minus that of the rejected one.
    """
    merged = rewards.astype(np.float64) @ np.asarray(weights, dtype=np.float64)
    return merged[::2] - merged[1::2]


def render_rows(rows: Sequence[Row]) -> str:
    """Render one table for each kind of reference, without kinds that have no rows."""
    layout_width = max(len("layout"), *(len(row.layout) for row in rows)) + 2
    variant_width = max(len("variant"), *(len(row.variant) for row in rows)) + 2
    tables = []
    for compared in Compared:
        names = f"{'layout':<{layout_width}}{'variant':<{variant_width}}"
        counts = f"{'samples':>7}{'changed':>9}{'largest |difference|':>22}{'flips':>7}"
        lines = [f"against {_HEADINGS[compared]}", f"{names}{counts}"]
        lines += [
            f"{row.layout:<{layout_width}}{row.variant:<{variant_width}}{row.texts:>7}"
            f"{row.changed:>9}{row.difference:>22.2e}{row.flips:>7}"
            + ("" if row.ok else "   FAILED")
            for row in rows
            if row.compared is compared
        ]
        if len(lines) > 2:
            tables.append("\n".join(lines))
    return "\n\n".join(tables)


def summarise(rows: Sequence[Row], limits: Mapping[Compared, Limits]) -> str:
    """Report in one line whether all rows passed; add the worst row and the limit of each kind."""
    failed = sum(not row.ok for row in rows)
    lines = ["the same everywhere" if not failed else f"FAILED in {failed} of {len(rows)} rows"]
    for compared, limit in limits.items():
        compared_rows = [row for row in rows if row.compared is compared]
        if not compared_rows:
            continue
        # Count NaN as infinite, because max() would skip a NaN that does not come first.
        worst = max(
            math.inf if math.isnan(row.difference) else row.difference for row in compared_rows
        )
        flips = sum(row.flips for row in compared_rows)
        expected = f"{limit.reward:.2g} or less" if limit.reward else "0: bit-identical rewards"
        beyond = f" where the margin is above {limit.margin:.2g}" if limit.margin else ""
        lines.append(
            f"against {_HEADINGS[compared]}: largest |difference| {worst:.2e} (wanted {expected}), "
            f"{flips} verdicts flipped{beyond}"
        )
    return "\n  ".join(lines)


# The functions below score the same samples in different batches, with any scorer.


def score_alone(score: Score, texts: Sequence[Any]) -> np.ndarray:
    """Score each of N samples in a separate call; return rewards ``[N, ...]``."""
    return score_calls(score, texts, [[index] for index in range(len(texts))])


def score_calls(
    score: Score, texts: Sequence[Any], calls: Iterable[Sequence[int] | np.ndarray]
) -> np.ndarray:
    """Score samples in several calls; return rewards ``[N, ...]`` in the order of ``texts``.

    Args:
        score: the scorer.
        texts: N samples.
        calls: indices of the samples of each call; every index occurs in exactly one call.
    """
    calls = [np.asarray(call) for call in calls]
    rewards = np.concatenate([score([texts[index] for index in call]) for call in calls])
    return rewards[np.argsort(np.concatenate(calls))]


def count_changed(rewards: np.ndarray, reference: np.ndarray) -> int:
    """Count the rewards that are not bit-identical to the reference; 0.0 and -0.0 differ."""
    same = (rewards == reference) & (np.signbit(rewards) == np.signbit(reference))
    return int((~same).sum())
