"""Compare rewards in batches of one and of many: ``batch_invariance.py CASES LAYOUT...``.

It also runs under torchrun. It prints, by layout, case and precision, how many rewards are not
bit-identical with those in a batch of one; with ``--alone``, these rewards themselves. CASES is a
file of ``write_cases``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ROWS_BY_DEVICE
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.tools import invariance
from tests.harness.scorers import score_tokens

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "TP=2": {"tp": 2},
    "TP=2+SP": {"tp": 2, "sequence_parallel": True},
    "PP=2": {"pp": 2},
    "DP=2": {},
    "CP=2": {"cp": 2},
    "EP=2": {"ep": 2},
    "TP=4": {"tp": 4},
}
ORDERS = 20
LONGEST, BUDGET = 160, 512
# Spans are short, so that attention of few samples has distant keys, too.
VERY_LONG = 1100
CACHED = 1024
PRECISIONS = (Precision.fp32, Precision.bf16)


@dataclass(frozen=True)
class Case:
    """A reward model's file, and samples that are scored in ``orders`` random orders and packs."""

    archive: str
    texts: list[list[int]]
    orders: int = ORDERS
    budget: int = BUDGET


def write_cases(path: Path, cases: Mapping[str, Case]) -> Path:
    path.write_text(json.dumps({name: asdict(case) for name, case in cases.items()}))
    return path


def read_cases(path: str) -> dict[str, Case]:
    given = json.loads(Path(path).read_text())
    return {name: Case(**fields) for name, fields in given.items()}


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(90) for _ in range(count)]


def traffic(rng: random.Random, calls: int) -> list[list[list[int]]]:
    """Draw groups with shared prefixes, growing dialogues, repeats, and prefixes of samples."""
    known = [draw(rng, 70) for _ in range(4)]
    made = []
    for _ in range(calls):
        texts = []
        for _ in range(rng.randint(1, 5)):
            before = rng.choice(known)
            text = before[: rng.choice([0, 1, 15, 16, 17, 32, 50, 64, len(before)])]
            text = (text + draw(rng, rng.choice([0, 1, 5, 16, 30])))[:200] or [1]
            known[rng.randrange(4)] = text
            texts += [text, [*text, 7]][: rng.randint(1, 2)]
        made.append(texts)
    return made


def draw_texts(count: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Draw samples of 1 to ``longest`` tokens, in groups of 1 to 6 with prefixes of all lengths."""
    rng = random.Random(seed)

    def draw(most: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, most))]

    texts: list[list[int]] = [[3], draw(longest)]
    while len(texts) < count:
        beginning = draw(longest - 1)[rng.randrange(2) :]
        for _ in range(rng.randint(1, 6)):
            texts.append(beginning + draw(longest - len(beginning)))
    return texts[:count]


def calls(count: int, seed: int) -> Iterator[list[int]]:
    """Split a random order of the numbers below ``count`` at random positions."""
    rng = random.Random(seed)
    order = rng.sample(range(count), count)
    while order:
        size = rng.choice((1, 3, 30, 80, count))
        yield order[:size]
        del order[:size]


def count_changed(scorers: list[RewardScorer], texts: list[list[int]], orders: int) -> int:
    """Count rewards in random orders and packs that differ from those in a batch of one."""
    alone = invariance.score_alone(partial(score_tokens, scorers[0]), texts)
    assert np.ptp(alone) > 1e-3
    changed = 0
    for seed in range(orders):
        scorer = scorers[seed % len(scorers)]
        got = invariance.score_calls(partial(score_tokens, scorer), texts, calls(len(texts), seed))
        changed += invariance.count_changed(got, alone)
    return changed


def scorers_of(
    case: Case, layout: ParallelLayout, precision: Precision, rows: int | None
) -> list[RewardScorer]:
    """Load two scorers of a model: without a prefix cache, and with one that is too small."""
    plain = load_scorer(
        case.archive,
        layout,
        precision=precision,
        micro_batch_tokens=case.budget,
        invariant_rows=rows,
    )
    given = (plain.model, plain.contract, plain._tokenizer, layout, case.budget)
    return [plain, RewardScorer(*given, prefix_cache_tokens=CACHED)]


def compare(
    case: Case, layout: ParallelLayout, rows: int | None = ROWS_BY_DEVICE
) -> dict[str, int]:
    """Count by precision the rewards of ``case`` that differ from those in a batch of one."""
    return {
        precision.value: count_changed(
            scorers_of(case, layout, precision, rows), case.texts, case.orders
        )
        for precision in PRECISIONS
    }


def alone(case: Case, layout: ParallelLayout) -> dict[str, list[list[float]]]:
    """Compute by precision the rewards of the samples of ``case``, each in a batch of one."""
    return {
        precision.value: invariance.score_alone(
            partial(score_tokens, scorers_of(case, layout, precision, ROWS_BY_DEVICE)[0]),
            case.texts,
        ).tolist()
        for precision in PRECISIONS
    }


def print_at_layouts(names: Iterable[str], find: Callable[[ParallelLayout], object]) -> None:
    """Print the results of ``find`` by the layouts' names."""
    with launch(120.0) as world:
        found = {}
        for name in names:
            found[name] = find(initialize_layout(**LAYOUTS[name]))
            destroy_layout()
        if world.is_main:
            print(json.dumps(found))


def main(path: str, *names: str) -> None:
    cases = read_cases(path)
    # Three threads split rows less evenly than one or two.
    torch.set_num_threads(3 if names == ("one",) else 1)
    find = alone if "--alone" in names else compare
    print_at_layouts(
        [name for name in names if name != "--alone"],
        lambda layout: {which: find(case, layout) for which, case in cases.items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
