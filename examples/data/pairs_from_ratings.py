"""Make preference pairs from rated replies: the reply with the higher rating is chosen.

    python examples/data/pairs_from_ratings.py ratings.jsonl --attribute helpfulness \\
        --output pairs.jsonl

A line of the input has ``prompt``, ``response`` and ratings, as in HelpSteer. Each reply is paired
with random replies of a different rating, to any prompt: the Bradley-Terry loss needs no common
prompt, although two replies to one prompt teach more.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def make_pairs(
    rows: Sequence[dict[str, Any]], attribute: str, per_reply: int, seed: int
) -> Iterator:
    """Yield up to ``per_reply`` pairs for every row with a rating."""
    draw = random.Random(seed)
    rated = [row for row in rows if row.get(attribute) is not None]
    for row in rated:
        candidates = [other for other in rated if other[attribute] != row[attribute]]
        for other in draw.sample(candidates, min(per_reply, len(candidates))):
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
    arguments = parser.parse_args()
    with arguments.ratings.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    pairs = list(make_pairs(rows, arguments.attribute, arguments.each, arguments.seed))
    arguments.output.write_text(
        "".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8"
    )
    print(f"{arguments.output}: {len(pairs)} pairs by {arguments.attribute}")


if __name__ == "__main__":
    main()
