"""Rewards of turns and steps at some layouts: ``step_layouts.py ARCHIVE``, under torchrun.

It prints the results, including those of a training step on step labels.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision, RecordKind, RewardModelType
from nemo_aligner.config.model import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    RegressionConfig,
    ScoredPosition,
)
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.records import Origin
from nemo_aligner.data.token_index import TokenSequences
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.losses.regression import BinaryCrossEntropy
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.serving.engine.scorer import RewardScorer
from tests.harness import tiny
from tests.serving.engine.batch_invariance import print_at_layouts
from tests.training import poisoned

LAYOUTS = ("TP=2", "TP=2+SP", "PP=2", "DP=2", "CP=2")
BUDGET = 256
TEXTS, TURNS = 5, 4


def scorers(archive: Path, layout: ParallelLayout, *caches: int) -> list[RewardScorer]:
    """A scorer per cache size, one without a cache, and one without steps, of the same model."""
    loaded = load_pretrained(archive, layout, num_attributes=2, precision=Precision.fp32)
    if layout.is_last_stage:
        torch.manual_seed(0)
        torch.nn.init.normal_(loaded.model.rm_head.weight, std=0.05)
    make_batch_invariant(loaded.model, 256)

    def make(reads: ScoredPosition, cache: int) -> RewardScorer:
        settings = ModelConfig(
            reward_model_type=RewardModelType.regression,
            regression=RegressionConfig(attributes=["right", "clear"]),
            head=HeadConfig(reads=reads),
            data=DataConfig(seq_length=BUDGET),
        )
        contract = build_contract(settings, loaded.tokenizer, Precision.fp32)
        model, tokenizer = loaded.model, loaded.tokenizer
        return RewardScorer(model, contract, tokenizer, layout, BUDGET, prefix_cache_tokens=cache)

    turns = [make(ScoredPosition.turns, cache) for cache in (0, *caches)]
    return [*turns, make(ScoredPosition.last_token, 0)]


def dialogues() -> list[list[dict[str, str]]]:
    """TEXTS dialogues of TURNS turns; the first two share their first turn."""
    rng = random.Random(0)
    found = []
    for number in range(TEXTS):
        messages = []
        for _ in range(TURNS):
            messages += [
                {"role": "user", "content": tiny.sentence(rng)},
                {"role": "assistant", "content": tiny.sentence(rng)},
            ]
        if number == 1:
            messages[:2] = found[0][:2]
        found.append(messages)
    return found


def compare(archive: Path, layout: ParallelLayout) -> dict[str, Any]:
    """Compute rewards of all turns, and in which batches they differ."""
    plain, cached, small, whole = scorers(archive, layout, 4096, 64)
    texts = dialogues()
    rewards = [each.rewards for each in plain.score_rows(texts).steps]

    def same(other: list[np.ndarray]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(rewards, other, strict=True))

    alone = [plain.score_rows([text]).steps[0].rewards for text in texts]
    cut = [
        score_all(whole, [text[: 2 * turn + 2] for turn in range(TURNS)]).astype(np.float32)
        for text in texts
    ]
    grown: dict[str, list[np.ndarray]] = {"large": [], "small": []}
    counts = []
    for text in texts:
        for turn in range(TURNS):
            ask = [text[: 2 * turn + 2]]
            last = {"large": cached, "small": small}
            found = {name: each.score_rows(ask).steps[0].rewards for name, each in last.items()}
        for name, own in found.items():
            grown[name].append(own)
        counts.append(cached.counts.computed)
    again = cached.counts.computed
    together = [each.rewards for each in cached.score_rows(texts).steps]
    return {
        "rewards": [own.tolist() for own in rewards],
        "alone": same(alone),
        "cut": same(cut),
        "grown": {name: same(own) for name, own in grown.items()},
        "together": same(together),
        "last": bool(
            np.array_equal(score_all(plain, texts), np.stack([own[-1] for own in rewards]))
        ),
        "computed": counts,
        "computed_again": cached.counts.computed - again,
        "tokens": [len(plain.encode(text).token_ids) for text in texts],
        "step": train_step(layout),
    }


def train_step(layout: ParallelLayout) -> dict[str, float]:
    """Loss and gradient of a training step on samples with varying numbers of labels."""
    rng = random.Random(1)
    count = poisoned.RECORDS
    sequences = [[rng.randrange(1, 40) for _ in range(rng.randint(6, 20))] for _ in range(count)]
    places = [
        sorted({*rng.sample(range(len(ids)), rng.randint(0, 4)), len(ids) - 1}) for ids in sequences
    ]
    sizes = [len(own) for own in places]
    labels = [rng.choice((0.0, 0.3, 1.0, float("nan"))) for _ in range(sum(sizes))]
    columns = LabelColumns.of(["right"], torch.tensor(labels)[:, None])
    data = TokenizedDataset(
        kind=RecordKind.rating,
        name="train",
        sequences=TokenSequences.of(sequences),
        records=Records.of(
            range(count),
            [1] * count,
            columns,
            reward_counts=sizes,
            reply_lengths=torch.ones(sum(sizes), dtype=torch.int64),
        ),
        places=torch.tensor([place for own in places for place in own]),
        origins=[Origin("steps.jsonl", record + 1) for record in range(count)],
        sources=[""] * count,
        reports=[],
        prefixes=torch.zeros(count, dtype=torch.int64),
    )
    learner = poisoned.build(layout, data)
    learner.objective = BinaryCrossEntropy(("right",), has_steps=True)  # type: ignore[assignment]
    metrics = learner.train_step(0)
    learner.release()
    return {name: metrics[name] for name in ("loss", "grad_norm", "step_accuracy")}


if __name__ == "__main__":
    print_at_layouts(LAYOUTS, lambda layout: compare(Path(sys.argv[1]), layout))
