"""Summary of gpu_first_hour.py: measured figures next to their goals, and the fastest settings.

The goals are for one H100 with bf16 weights. Rows are read by their columns' names; a figure that
no part measured is ``not measured``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from step_settings import UP_TO, fastest, measured_on_spread

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
"""The rows of each part, by its name."""

# Goals of a step by hidden size: model FLOPs utilization and tokens/s.
_WIDTHS = {1024: (0.40, 215_000), 2048: (0.50, 110_000), 4096: (0.55, 64_000)}
_LONG_TEXTS, _LONG_MFU = "8,192 tokens", 0.45
_TRL_RATIOS = {"TRL, batch 8": 10.0, "TRL, tuned": 2.5}
_SCORING_RATIOS = {"scoring": 3.0, "vllm": 1.3}
_INVARIANCE_LIMIT = 0.10
_OUTSIDE_ALLOCATOR_GIB = 1.0
# Names of scorers' settings in scoring.py.
_INVARIANT = ("defaults", "model.batch_invariant_rows=")
_NOT_INVARIANT = "model.batch_invariant=false"


def goals(rows: Rows) -> list[dict[str, Any]]:
    """Build a row for each goal: its measured figure, the goal, and whether it is reached."""
    return [
        {
            "goal": name,
            "measured": measured,
            "wanted": f"at {'most' if is_cost else 'least'} {goal:,}",
            "reached": _verdict(measured, goal, is_cost),
        }
        for name, measured, goal, is_cost in _collect_figures(rows)
    ]


def _verdict(measured: float | None, goal: float, is_cost: bool) -> str:
    if measured is None:
        return "not measured"
    return "yes" if (measured <= goal if is_cost else measured >= goal) else "no"


def _collect_figures(rows: Rows) -> Iterator[tuple[str, float | None, float, bool]]:
    """Yield each goal's name, measured figure, goal, and whether less is better."""
    for width, (mfu, speed) in _WIDTHS.items():
        part = [row for row in rows.get(f"width-{width}", ()) if row.get("tokens/s")]
        spread = [row for row in part if row["texts"].startswith(UP_TO)]
        yield f"width {width:,}: MFU", _largest(spread, "MFU"), mfu, False
        yield f"width {width:,}: tokens/s", _largest(spread, "tokens/s"), speed, False
        if width == 2048:
            long = [row for row in part if row["texts"] == _LONG_TEXTS]
            yield f"width {width:,}, {_LONG_TEXTS}: MFU", _largest(long, "MFU"), _LONG_MFU, False
    for trainer, ratio in _TRL_RATIOS.items():
        compared = [r for r in rows.get("training", ()) if r["trainer"].startswith(trainer)]
        name = f"training is faster than {trainer}, by"
        yield name, _largest(compared, "ours is faster by"), ratio, False
    for part_name, ratio in _SCORING_RATIOS.items():
        peer = "vLLM" if part_name == "vllm" else "transformers"
        pairs = [
            row
            for row in rows.get(part_name, ())
            if row["scorer"] == "nemo_aligner"
            and row["work"].startswith("pairs")
            and row["settings"] != _NOT_INVARIANT
        ]
        yield f"pairs are scored faster than {peer}, by", _largest(pairs, _FASTER), ratio, False
    yield "batch invariance costs, of scoring", _invariance_cost(rows), _INVARIANCE_LIMIT, True
    outside = [row for row in rows.get("memory", ()) if row.get("beside the allocator")]
    least = min((row["beside the allocator"] for row in outside), default=None)
    yield "GiB of the process next to the allocator", least, _OUTSIDE_ALLOCATOR_GIB, True


_FASTER = "ours is faster by"


def _largest(rows: Sequence[Row], column: str) -> float | None:
    return max((row[column] for row in rows if row.get(column)), default=None)


def _collect_speeds(rows: Rows) -> dict[str, dict[str, float]]:
    """Collect how many rewards per second nemo_aligner computed in the measurement ``scoring``.

    Returns:
        Rewards per second, by the name of the scorer's settings, and then by the kind of work
        (such as pairs or single replies, see scoring.py).
    """
    speeds: dict[str, dict[str, float]] = {}
    for row in rows.get("scoring", ()):
        if row["scorer"] == "nemo_aligner" and row.get("rewards/s"):
            speeds.setdefault(row["settings"], {})[row["work"]] = row["rewards/s"]
    return speeds


def _invariance_cost(rows: Rows) -> float | None:
    """Compute how much longer scoring takes with batch invariance, as a share of the time without.

    For each kind of work, the fastest batch-invariant settings are compared. The result is the
    largest share over the kinds of work; None if nothing was measured.
    """
    speeds = _collect_speeds(rows)
    usual = speeds.pop(_NOT_INVARIANT, {})
    # Leave out other settings: a speed-up by CUDA graphs, for example, would hide the cost.
    ways = [speed for name, speed in speeds.items() if name.startswith(_INVARIANT)]
    costs = [
        min(speed / way[work] for way in ways if work in way) - 1
        for work, speed in usual.items()
        if any(work in way for way in ways)
    ]
    return max(costs, default=None)


def recommended_settings(rows: Rows) -> list[dict[str, Any]]:
    """Build rows with the fastest measured settings for training and for scoring.

    Each row also has the figures by which the settings were chosen.
    """
    recommendations = []
    for width in _WIDTHS:
        part = rows.get(f"width-{width}", ())
        best = fastest(part)
        if best is None:
            continue
        speeds = [row["tokens/s"] for row in measured_on_spread(part)]
        settings = ", ".join(f"model.{name}={value}" for name, value in vars(best).items())
        reason = f"{max(speeds):,.0f} tokens/s; the slowest of {len(speeds)}: {min(speeds):,.0f}"
        recommendations.append(
            {"for": f"training, width {width:,}", "settings": settings, "because": reason}
        )
    scored = _collect_speeds(rows)
    means = {
        name: geometric_mean(speed.values())
        for name, speed in scored.items()
        if name != _NOT_INVARIANT and len(speed) == max(map(len, scored.values()))
    }
    if means:
        best_name = max(means, key=lambda name: means[name])
        listed = ", ".join(f"{name or 'defaults'}: {mean:,.0f}" for name, mean in means.items())
        reason = f"rewards/s, geometric mean over the kinds of work: {listed}"
        recommendations.append(
            {"for": "scoring", "settings": best_name or "defaults", "because": reason}
        )
    return recommendations
