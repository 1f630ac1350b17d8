"""What scoring.py and invariance.py score, and our scorer of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import add_device_option

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
    from nemo_aligner.config.model import DataConfig, ModelConfig
    from nemo_aligner.contract.from_settings import build_contract
    from nemo_aligner.models.reward_model import make_batch_invariant
    from nemo_aligner.serving.engine.scorer import RewardScorer

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


def encode_pairs(data: Path, pairs: int, encode: Callable[[Any], list[int]]) -> list[list[int]]:
    """Both replies of the first ``pairs`` of a file."""
    from nemo_aligner.config.common import RecordKind
    from nemo_aligner.data.readers import Reading, read_records

    records = read_records(data, Reading(RecordKind.comparison)).records[:pairs]
    return [encode(text) for record in records for text in record.texts]


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """The model, what it scores, and how often."""
    parser.add_argument("--model", type=Path, required=True, help="a .gguf, or a folder")
    parser.add_argument("--data", type=Path, required=True, help="pairs")
    parser.add_argument("--pairs", type=int, default=24, help="how many (default 24)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default 2)")
    add_device_option(parser)
    parser.add_argument("--work", help="a folder to keep the converted model in")
    parser.add_argument("--output", type=Path, metavar="JSON")


def works_of(data: Path, pairs: int, ours: Ours) -> list[Work]:
    """Three kinds of work, as scoring.py describes them."""
    texts = encode_pairs(data, pairs, ours.encode)
    rng = np.random.RandomState(0)
    prompt = rng.randint(100, ours.vocabulary, 1024).tolist()
    replies = [rng.randint(100, ours.vocabulary, rng.randint(150, 251)).tolist() for _ in range(16)]
    return [
        Work("pairs, theirs sorted by length", texts, True),
        Work("single replies as they come", texts[::2], False),
        Work("a group of 16 replies", [[*prompt, *reply] for reply in replies], True),
    ]
