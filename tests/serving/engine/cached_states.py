"""Compare rewards of a model with linear or latent attention with and without a prefix cache.

``cached_states.py ARCHIVE LAYOUT...`` runs under torchrun and prints ``compare`` by layout.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.tools.invariance import count_changed
from tests.serving.engine.batch_invariance import PRECISIONS, draw, print_at_layouts

BUDGET, LONGEST, CALLS = 1200, 600, 10
# Tokens and states of caches: of enough room, of few states, and of few tokens.
CACHES = {"large": (8192, 16), "small": (320, 8), "two states": (8192, 2)}


def scorer_of(
    archive: Path,
    layout: ParallelLayout,
    precision: Precision = Precision.fp32,
    plain: RewardScorer | None = None,
    cache: tuple[int, int] = (0, 0),
) -> RewardScorer:
    """A scorer without a prefix cache, or one with a ``cache`` and the model of ``plain``."""
    if plain is None:
        return load_scorer(archive, layout, precision=precision, micro_batch_tokens=BUDGET)
    return RewardScorer(
        plain.model,
        plain.contract,
        plain._tokenizer,
        layout,
        BUDGET,
        prefix_cache_tokens=cache[0],
        prefix_cache_states=cache[1],
    )


def grow(rng: random.Random, turns: int, most: int = 90) -> list[list[int]]:
    """The prefixes of a dialogue that end with its turns, of 5 to ``most`` tokens each."""
    texts: list[list[int]] = [[]]
    for _ in range(turns):
        texts.append(texts[-1] + draw(rng, rng.randint(5, most)))
    return texts[1:]


def requests(rng: random.Random) -> list[list[list[int]]]:
    """Draw calls: three dialogues that grow, branch into several replies, and are scored again."""
    dialogues = [draw(rng, count) for count in (64, 70, 150)]
    calls = []
    for _ in range(CALLS):
        texts = []
        for number in rng.sample(range(3), rng.randint(1, 2)):
            before = dialogues[number]
            replies = [before + draw(rng, rng.choice((1, 5, 64 - len(before) % 64, 90)))]
            replies += [before + draw(rng, 30) for _ in range(rng.choice((0, 0, 3)))]
            texts += [*replies, replies[0]][: rng.randint(1, 5)]
            longer = rng.choice(replies)
            dialogues[number] = longer if len(longer) < LONGEST else longer[:130]
        calls.append(texts)
    return calls


def compare(archive: Path, layout: ParallelLayout) -> dict[str, Any]:
    """Count the rewards that differ from those in a batch of one, and the tokens of each cache."""
    changed: dict[str, int] = {}
    counts: dict[str, Mapping[str, int]] = {}
    spread = 0.0
    for precision in PRECISIONS:
        plain = scorer_of(archive, layout, precision)
        calls = requests(random.Random(0))
        alone = [score_alone(plain, call) for call in calls]
        spread = float(np.ptp(np.concatenate(alone)))
        for name, cache in list(CACHES.items())[: 3 if plain.model.has_states else 2]:
            scorer = scorer_of(archive, layout, precision, plain, cache)
            rewards = [scorer.score_token_lists(call) for call in calls]
            key = f"{name} {precision.value}"
            changed[key] = count_changed(np.concatenate(rewards), np.concatenate(alone))
            counts[key] = vars(scorer.counts) | {"bytes": scorer.prefix_cache_bytes}
    return {"changed": changed, "counts": counts, "spread": spread}


def score_alone(scorer: RewardScorer, texts: Sequence[list[int]]) -> np.ndarray:
    return np.concatenate([scorer.score_token_lists([text]) for text in texts])


if __name__ == "__main__":
    print_at_layouts(sys.argv[2:], lambda layout: compare(Path(sys.argv[1]), layout))
