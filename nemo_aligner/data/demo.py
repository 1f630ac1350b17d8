"""The demo set: small preference pairs that anyone can judge, balanced and split by what they ask.

Pairs of an item (a question, a sum, a word) all fall on the same side of the split, so held-out
prompts ask what no training prompt asks. In exactly half of the pairs of every kind the better
reply is the shorter one, so that length tells nothing.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from nemo_aligner.data.demo_kinds import KINDS, REASONS, DemoPair
from nemo_aligner.data.length_baseline import longer_wins
from nemo_aligner.data.write import write_lines
from nemo_aligner.errors import DataError


def write_demo(folder: Path, pairs: int = 2400, heldout: float = 0.1, seed: int = 1) -> str:
    """Write ``train.jsonl`` and ``heldout.jsonl``; how many of each kind they have, and why.

    Raises:
        DataError: see ``build_demo_pairs``.
    """
    train, held = build_demo_pairs(pairs, heldout, seed)
    sides = {"train": train, "heldout": held}
    written = [
        write_lines(folder / f"{name}.jsonl", demo_lines(side)) for name, side in sides.items()
    ]
    kinds = {name: Counter(pair.kind for pair in side) for name, side in sides.items()}
    rows = [f"{'kind':<12}{'train':>7}{'heldout':>9}  the better reply is better because"]
    for kind, reason in REASONS.items():
        rows.append(f"{kind:<12}{kinds['train'][kind]:>7}{kinds['heldout'][kind]:>9}  {reason}")
    wins = longer_wins([(len(pair.chosen), len(pair.rejected)) for pair in held])
    rows.append(f"written: {', '.join(written)}")
    rows.append(f"always taking the longer reply (in characters) is right in {wins:.1%} of heldout")
    return "\n".join(rows)


def demo_lines(pairs: Iterable[DemoPair]) -> list[str]:
    """The pairs as lines of a file of preference data."""
    return [
        json.dumps(
            {"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected, "kind": p.kind},
            ensure_ascii=False,
        )
        for p in pairs
    ]


def build_demo_pairs(
    pairs: int, heldout: float, seed: int
) -> tuple[list[DemoPair], list[DemoPair]]:
    """About ``pairs`` pairs, as many of each kind: those to train on, and those held out.

    Raises:
        DataError: more pairs are wanted than there are different ones.
    """
    train: list[DemoPair] = []
    held: list[DemoPair] = []
    for kind, make in KINDS.items():
        rng = random.Random(f"{seed}/{kind}")
        candidates = list(dict.fromkeys(make(rng)))
        wanted = pairs // len(KINDS)
        wanted_held = round(wanted * heldout)
        held_items = _held_items(candidates, heldout, seed)
        held += _balanced(
            [pair for pair in candidates if pair.item in held_items], wanted_held, rng
        )
        train += _balanced(
            [pair for pair in candidates if pair.item not in held_items], wanted - wanted_held, rng
        )
    random.Random(f"{seed}/train").shuffle(train)
    random.Random(f"{seed}/held").shuffle(held)
    return train, held


def _held_items(candidates: list[DemoPair], heldout: float, seed: int) -> set[str]:
    """Items drawn from the names alone: kinds of the same questions hold out the same ones."""
    items = sorted({pair.item for pair in candidates})
    random.Random(f"{seed}/items").shuffle(items)
    return set(items[: max(1, round(len(items) * heldout))])


def _balanced(candidates: list[DemoPair], wanted: int, rng: random.Random) -> list[DemoPair]:
    """``wanted`` pairs; in half of them the chosen reply is the shorter one."""
    shorter = [pair for pair in candidates if len(pair.chosen) < len(pair.rejected)]
    longer = [pair for pair in candidates if len(pair.chosen) > len(pair.rejected)]
    half = wanted // 2
    if half > len(shorter) or wanted - half > len(longer):
        raise DataError(
            f"{candidates[0].kind}: got {len(shorter)} pairs with the shorter reply better and "
            f"{len(longer)} with the longer one; wanted {half} and {wanted - half}"
        )
    return rng.sample(shorter, half) + rng.sample(longer, wanted - half)
