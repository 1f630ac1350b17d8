"""What scoring.py and invariance.py score, and our scorer of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nemo_aligner.models.reward_model import GPTRewardModel

Score = Callable[[list[list[int]]], np.ndarray]
SMALLEST_BUDGET = 8192


@dataclass(frozen=True)
class Work:
    """Token lists to score, and whether transformers may sort them by length."""

    name: str
    token_lists: list[list[int]]
    is_sorted: bool


@dataclass(frozen=True)
class Ours:
    """A base model with a new head, batch invariant as scoring is by default."""

    model: GPTRewardModel
    score: Score
    encode: Callable[[Any], list[int]]
    vocabulary: int

    @property
    def head(self) -> np.ndarray:
        """``[1, hidden]``."""
        return self.model.rm_head.weight.detach().cpu().numpy()


def our_scorer(nemo: Path, precision: Any, layout: Any) -> Ours:
    """Of texts that are cut to 2,048 tokens."""
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
    from nemo_aligner.config.common import Overlong
    from nemo_aligner.config.data import DataConfig
    from nemo_aligner.config.model import ModelConfig
    from nemo_aligner.models.batch_invariant import make_batch_invariant
    from nemo_aligner.scoring.scorer import RewardScorer
    from nemo_aligner.text.contract import build_contract

    config = ModelConfig(data=DataConfig(seq_length=2048, overlong=Overlong.truncate_left))
    pretrained = load_pretrained(nemo, layout, num_attributes=1, precision=precision)
    model, tokenizer = pretrained.model.eval(), pretrained.tokenizer
    make_batch_invariant(model, config.invariant_rows)
    contract = build_contract(config, tokenizer, precision)
    scorer = RewardScorer(model, contract, tokenizer, layout, SMALLEST_BUDGET)

    def score(token_lists: list[list[int]]) -> np.ndarray:
        return scorer.score_token_lists(token_lists)[:, 0]

    def encode(text: Any) -> list[int]:
        return scorer.encode(text).token_ids

    return Ours(model, score, encode, tokenizer.vocab_size)


def works_of(data: Path, pairs: int, ours: Ours) -> list[Work]:
    """Three kinds of work, as scoring.py describes them."""
    from nemo_aligner.config.common import RecordKind
    from nemo_aligner.data.reading import Reading, read_records

    records = read_records(data, Reading(RecordKind.comparison)).records[:pairs]
    texts = [ours.encode(text) for record in records for text in record.texts]
    rng = np.random.RandomState(0)
    prompt = rng.randint(100, ours.vocabulary, 1024).tolist()
    replies = [rng.randint(100, ours.vocabulary, rng.randint(150, 251)).tolist() for _ in range(16)]
    return [
        Work("pairs, theirs sorted by length", texts, True),
        Work("single replies as they come", texts[::2], False),
        Work("a group of 16 replies", [[*prompt, *reply] for reply in replies], True),
    ]
