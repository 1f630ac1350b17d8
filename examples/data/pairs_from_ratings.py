"""Pairs to rank from rated replies: the better rated is the chosen one.

    python examples/data/pairs_from_ratings.py ratings.jsonl --attribute helpfulness \\
        --output pairs.jsonl

A line of the input has ``prompt``, ``response`` and numbers, as HelpSteer's. Each reply is paired
with others drawn at random, whatever their prompt, whose rating is another; Bradley-Terry needs no
more than that, though two replies to one prompt would teach more where there are such.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def make_pairs(rows: Sequence[dict[str, Any]], attribute: str, each: int, seed: int) -> Iterator:
    """``each`` pairs for every row that is rated and has a row that is rated differently."""
    draw = random.Random(seed)
    rated = [row for row in rows if row.get(attribute) is not None]
    for row in rated:
        others = [other for other in rated if other[attribute] != row[attribute]]
        for other in draw.sample(others, min(each, len(others))):
            rejected, chosen = sorted((row, other), key=lambda one: one[attribute])
            yield {"chosen": _conversation(chosen), "rejected": _conversation(rejected)}


def _conversation(row: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["response"]},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ratings", type=Path)
    parser.add_argument("--attribute", required=True, help="the rating that decides")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--each", type=int, default=2, help="pairs for each reply (default: 2)")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with asked.ratings.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    pairs = list(make_pairs(rows, asked.attribute, asked.each, asked.seed))
    asked.output.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")
    print(f"{asked.output}: {len(pairs)} pairs by {asked.attribute}")


if __name__ == "__main__":
    main()
