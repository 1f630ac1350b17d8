"""The demo set of steps: chains of sums, in half of which one step is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_aligner.data.records import write_lines

_FEWEST, _MOST = 3, 6
# Of one digit: a small model learns to add these within minutes; numbers of two it does not.
_LARGEST = 9
# How far a wrong result is off.
_OFF = (-10, -2, -1, 1, 2, 10)


def write_step_demo(folder: Path, chains: int, heldout: float, seed: int) -> str:
    """Write ``train.jsonl`` and ``heldout.jsonl`` of ``stepwise`` records; what they have.

    No question of one file is in the other.
    """
    rng = random.Random(f"{seed}/steps")
    made = list(_chains(rng, chains))
    held = made[: round(chains * heldout)]
    sides = {"train": made[len(held) :], "heldout": held}
    lines = [f"{'':<12}{'chains':>8}{'with an error':>15}{'steps':>8}"]
    for name, rows in sides.items():
        path = write_lines(folder / f"{name}.jsonl", map(json.dumps, rows))
        wrong = sum(False in row["labels"] for row in rows)
        steps = sum(len(row["labels"]) for row in rows)
        lines.append(f"{name:<12}{len(rows):>8}{wrong:>15}{steps:>8}  {path}")
    lines.append("a step is right if its sum is; steps behind a wrong one have no label")
    return "\n".join(lines)


def _chains(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Chains of different questions, every second one with an error."""
    seen: set[str] = set()
    while len(seen) < count:
        numbers = [rng.randint(1, _LARGEST) for _ in range(rng.randint(_FEWEST, _MOST) + 1)]
        question = f"What is {' + '.join(map(str, numbers))}?"
        if question in seen:
            continue
        is_wrong = len(seen) % 2 == 1
        seen.add(question)
        yield _solved(rng, question, numbers, is_wrong)


def _solved(
    rng: random.Random, question: str, numbers: list[int], is_wrong: bool
) -> dict[str, Any]:
    first, *others = numbers
    wrong_at = rng.randrange(len(others)) if is_wrong else len(others)
    steps, labels = [], list[bool | None]()
    total = first
    for number, other in enumerate(others):
        result = total + other + (rng.choice(_OFF) if number == wrong_at else 0)
        steps.append(f"{total} + {other} = {result}")
        labels.append(None if number > wrong_at else number < wrong_at)
        total = result
    return {"prompt": question, "completions": steps, "labels": labels}
