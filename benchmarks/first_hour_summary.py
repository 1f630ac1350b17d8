"""What the first hour on a GPU was to show: figures next to their goals, and the fastest settings.

Goals are those for one H100 with bf16 weights. Rows are read by the names of their columns, and
whatever a part did not come to is ``not measured``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from step_variants import fastest

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
"""The rows of each part, by its name."""

# Width: model FLOPs utilization and tokens/s of a step.
_WIDTHS = {1024: (0.40, 215_000), 2048: (0.50, 110_000), 4096: (0.55, 64_000)}
_LONG, _LONG_MFU = "8,192 tokens", 0.45
_TRL = {"TRL, batch 8": 10.0, "TRL, tuned": 2.5}
_SCORING = {"scoring": 3.0, "vllm": 1.3}
_INVARIANCE = 0.10
_BESIDE_ALLOCATOR = 1.0
_AS_THEY_COME = "rows as they come"


def goals(rows: Rows) -> list[dict[str, Any]]:
    """A row for each goal: what was measured, and what was wanted."""
    return [
        {
            "goal": name,
            "measured": measured,
            "wanted": f"at {'most' if is_cost else 'least'} {wanted:,}",
            "reached": _verdict(measured, wanted, is_cost),
        }
        for name, measured, wanted, is_cost in _figures(rows)
    ]


def _verdict(measured: float | None, wanted: float, is_cost: bool) -> str:
    if measured is None:
        return "not measured"
    return "yes" if (measured <= wanted if is_cost else measured >= wanted) else "no"


def _figures(rows: Rows) -> Iterator[tuple[str, float | None, float, bool]]:
    """Name, measured and wanted figure of each goal, and whether less is better."""
    for width, (mfu, speed) in _WIDTHS.items():
        part = [row for row in rows.get(f"width-{width}", ()) if row.get("tokens/s")]
        spread = [row for row in part if row["texts"].startswith("up to")]
        yield f"width {width:,}: MFU", _most(spread, "MFU"), mfu, False
        yield f"width {width:,}: tokens/s", _most(spread, "tokens/s"), speed, False
        if width == 2048:
            long = [row for row in part if row["texts"] == _LONG]
            yield f"width {width:,}, {_LONG}: MFU", _most(long, "MFU"), _LONG_MFU, False
    for trainer, ratio in _TRL.items():
        compared = [r for r in rows.get("training", ()) if r["trainer"].startswith(trainer)]
        name = f"training is faster than {trainer}, by"
        yield name, _most(compared, "ours is faster by"), ratio, False
    for part_name, ratio in _SCORING.items():
        peer = "vLLM" if part_name == "vllm" else "transformers"
        pairs = [
            row
            for row in rows.get(part_name, ())
            if row["scorer"] == "nemo_aligner"
            and row["work"].startswith("pairs")
            and row["settings"] != _AS_THEY_COME
        ]
        yield f"pairs are scored faster than {peer}, by", _most(pairs, _FASTER), ratio, False
    yield "batch invariance costs, of scoring", _invariance_cost(rows), _INVARIANCE, True
    outside = [row for row in rows.get("memory", ()) if row.get("beside the allocator")]
    least = min((row["beside the allocator"] for row in outside), default=None)
    yield "GiB of the process next to the allocator", least, _BESIDE_ALLOCATOR, True


_FASTER = "ours is faster by"


def _most(rows: Sequence[Row], column: str) -> float | None:
    return max((row[column] for row in rows if row.get(column)), default=None)


def _speeds(rows: Rows) -> dict[str, dict[str, float]]:
    """Rewards/s of our scorers by their settings, each by the kind of work."""
    speeds: dict[str, dict[str, float]] = {}
    for row in rows.get("scoring", ()):
        if row["scorer"] == "nemo_aligner" and row.get("rewards/s"):
            speeds.setdefault(row["settings"], {})[row["work"]] = row["rewards/s"]
    return speeds


def _invariance_cost(rows: Rows) -> float | None:
    """The largest share of time, over the kinds of work, that the fastest invariant way adds."""
    speeds = _speeds(rows)
    usual = speeds.pop(_AS_THEY_COME, {})
    # CUDA graphs are another matter: they would pay for what invariance costs.
    ways = [speed for name, speed in speeds.items() if "graphs" not in name]
    costs = [
        min(speed / way[work] for way in ways if work in way) - 1
        for work, speed in usual.items()
        if any(work in way for way in ways)
    ]
    return max(costs, default=None)


def recommended_settings(rows: Rows) -> list[dict[str, Any]]:
    """The fastest settings that were measured, and by how much they are faster."""
    found = []
    for width in _WIDTHS:
        part = rows.get(f"width-{width}", ())
        best = fastest(part)
        if best is None:
            continue
        speeds = [row["tokens/s"] for row in part if row.get("tokens/s")]
        settings = ", ".join(f"model.{name}={value}" for name, value in vars(best).items())
        why = f"{max(speeds):,.0f} tokens/s; the slowest of {len(speeds)}: {min(speeds):,.0f}"
        found.append({"for": f"training, width {width:,}", "settings": settings, "because": why})
    scored = _speeds(rows)
    means = {
        name: geometric_mean(speed.values())
        for name, speed in scored.items()
        if name != _AS_THEY_COME and len(speed) == max(map(len, scored.values()))
    }
    if means:
        best_name = max(means, key=lambda name: means[name])
        others = ", ".join(f"{name or 'defaults'}: {mean:,.0f}" for name, mean in means.items())
        why = f"rewards/s, geometric mean over the kinds of work: {others}"
        found.append({"for": "scoring", "settings": best_name or "defaults", "because": why})
    return found
