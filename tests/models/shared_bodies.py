"""Compare models that share a body with the same models alone: ``shared_bodies.py ARCHIVE...``.

It runs under torchrun and prints the results of each layout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.shared_body import Bodies
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from tests.harness import tiny
from tests.serving.engine.batch_invariance import print_at_layouts

LAYOUTS = ("TP=2+SP", "PP=2")
TEXTS: list[Text] = [
    tiny.chat("what is red", "a rose"),
    "one two three four five",
    tiny.chat("who sings", "the bird sings thank you"),
]


def load(archives: Sequence[Path], layout: ParallelLayout, **settings: Any) -> list[RewardScorer]:
    """Load the archives, each with a prefix cache, and let them share their bodies."""
    bodies: Bodies = {}
    sizes: dict[str, Any] = {"micro_batch_tokens": 128, "prefix_cache_tokens": 256}
    return [load_scorer(path, layout, **sizes, bodies=bodies, **settings) for path in archives]


def compare(archives: Sequence[Path], layout: ParallelLayout, **settings: Any) -> dict[str, Any]:
    """Tell which models share a body, and which give the rewards that they give alone."""
    alone = []
    for path in archives:
        (scorer,) = load([path], layout, **settings)
        alone.append([scorer.score_rows(TEXTS).rewards for _ in range(2)])
    if settings.get("invariant_rows", 0) is not None:
        # Otherwise rewards may depend on the pack, and after cached prefixes the packs are others.
        alone = [[uncached, uncached] for uncached, _ in alone]
    scorers = load(archives, layout, **settings)
    # Interleaved twice: the second time from the prefix caches.
    rewards = [[scorer.score_rows(TEXTS).rewards for scorer in scorers] for _ in range(2)]
    return {
        "is_equal": [
            all(map(np.array_equal, computed, expected))
            for computed, expected in zip(zip(*rewards, strict=True), alone, strict=True)
        ],
        "shared": [scorer.body is not None and scorer.body.num_shared for scorer in scorers],
        "cached": [scorer.counts.cached > 0 for scorer in scorers],
        "spread": float(np.ptp(np.concatenate([uncached[:, 0] for uncached, _ in alone]))),
    }


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    print_at_layouts(LAYOUTS, lambda layout: compare(paths, layout))
