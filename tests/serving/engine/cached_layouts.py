"""Compare rewards with and without a prefix cache: ``cached_layouts.py ARCHIVE...``.

It runs under torchrun and prints the results. ``--one`` uses only this process; ``--bf16``, too,
but in bf16.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.model import DataConfig, ModelConfig, RegressionConfig
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.segments import KeyValuePool
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.scorer import RewardScorer
from tests.serving.engine.batch_invariance import print_at_layouts, traffic

LAYOUTS = ("TP=2", "TP=2+SP", "PP=2", "DP=2", "CP=2")
BUDGET = 256
CALLS = 20
CACHES = (16, 64, 4096)
# Windows belong to the layers of a stage and to the chunks of a rank, not to the heads of one.
WINDOWED = ("gemma2",)


def scorers(
    archive: Path,
    layout: ParallelLayout,
    caches: tuple[int, ...],
    precision: Precision = Precision.fp32,
) -> list[RewardScorer]:
    """One scorer per cache size and one without a cache, all with the same model."""
    loaded = load_pretrained(archive, layout, num_attributes=2, precision=precision)
    if layout.is_last_stage:
        torch.manual_seed(0)
        torch.nn.init.normal_(loaded.model.rm_head.weight, std=0.05)
    settings = ModelConfig(
        reward_model_type=RewardModelType.regression,
        regression=RegressionConfig(attributes=["helpfulness", "verbosity"]),
        data=DataConfig(seq_length=BUDGET),
    )
    contract = build_contract(settings, loaded.tokenizer, precision)
    return [
        RewardScorer(
            loaded.model, contract, loaded.tokenizer, layout, BUDGET, prefix_cache_tokens=tokens
        )
        for tokens in (0, *caches)
    ]


def compare(
    archive: Path, layout: ParallelLayout, precision: Precision = Precision.fp32
) -> dict[str, Any]:
    """The largest difference that each cache makes, the range of rewards, and token counts."""
    plain, *cached = scorers(archive, layout, CACHES, precision)
    worst = dict.fromkeys(CACHES, 0.0)
    rewards = []
    for call in traffic(random.Random(0), CALLS):
        rewards.append(plain.score_token_lists(call))
        for tokens, scorer in zip(CACHES, cached, strict=True):
            difference = np.abs(scorer.score_token_lists(call) - rewards[-1]).max()
            worst[tokens] = max(worst[tokens], float(difference))
    return {
        "worst": worst,
        "range": float(np.ptp(np.concatenate(rewards))),
        "without": vars(plain.counts),
        "counts": {tokens: vars(s.counts) for tokens, s in zip(CACHES, cached, strict=True)},
        "bytes": [scorer.prefix_cache_bytes for scorer in cached],
        "after_failure": after_failure(plain, cached[-1], layout),
    }


def score_ahead(scorer: RewardScorer, calls: Sequence[Sequence[Sequence[int]]]) -> list[np.ndarray]:
    """Outputs of calls, each of which begins before the previous one is awaited."""
    outputs, waiting = [], None
    for call in calls:
        begun = scorer.begin([Row.of(list(ids)) for ids in call])
        if waiting is not None:
            outputs.append(np.concatenate(waiting.wait()))
        waiting = begun
    assert waiting is not None
    return [*outputs, np.concatenate(waiting.wait())]


def after_failure(plain: RewardScorer, cached: RewardScorer, layout: ParallelLayout) -> float:
    """The error of rewards after a call that failed before all its keys were stored."""
    layer = KeyValuePool.layer
    cached.reset_cache()
    assert cached._pool is not None
    for kept in cached._pool._layers.values():
        kept.fill_(float("nan"))

    def refuse(pool: KeyValuePool, number: int) -> Any:
        if number == 2:
            raise RuntimeError("out of memory")
        return layer(pool, number)

    texts = [[5, 6, 7] * 30, [8, 9] * 30]
    if layout.num_ranks == 1:
        KeyValuePool.layer = refuse  # type: ignore[method-assign]
        try:
            cached.score_token_lists(texts)
        except RuntimeError:
            pass
        else:
            raise AssertionError("it was to fail")
        finally:
            KeyValuePool.layer = layer  # type: ignore[method-assign]
    else:
        # As if another rank had failed: planned blocks are in no pool.
        cached._cache.plan([np.array(text) for text in texts])
        cached.reset_cache()
    again = [[*text, 3] for text in texts]
    difference = cached.score_token_lists(again) - plain.score_token_lists(again)
    return float(np.abs(np.nan_to_num(difference, nan=np.inf)).max())


def main(*arguments: str) -> None:
    archives = [Path(each) for each in arguments if not each.startswith("--")]
    precision = Precision.bf16 if "--bf16" in arguments else Precision.fp32
    print_at_layouts(
        ["one"] if "--one" in arguments else LAYOUTS,
        lambda layout: {
            path.stem: compare(path, layout, precision)
            for path in archives
            if path.stem not in WINDOWED or layout.num_ranks in (1, layout.pp, layout.cp)
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
