"""Scorers that compute rewards by a given function, and a function that scores token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.contract.scorer import ScoredRows, StepRewards
from nemo_aligner.evaluation.sources import RewardSource
from tests.serving.fake_server import CONTRACT

STEPPED = replace(
    CONTRACT,
    attributes=("reward",),
    attribute_weights=(1.0,),
    label_means=(0.0,),
    scored_position="step_ends",
    step_separator="\n\n",
)


@dataclass
class FunctionScorer:
    """Scores by a function of N samples to ``[N, A]`` rewards; NaN rejects a sample."""

    function: Callable[[Sequence[Text]], np.ndarray]
    steps: Callable[[Sequence[Text]], list[StepRewards]] | None = None
    attributes: tuple[str, ...] = ("reward",)

    @property
    def contract(self) -> ScoringContract | None:
        return None if self.steps is None else STEPPED

    def score_rows(self, samples: Sequence[Text], *, on_error: str = "nan") -> ScoredRows:
        rewards = np.asarray(self.function(samples))
        rejected = np.flatnonzero(np.isnan(rewards).all(axis=1)).tolist()
        steps = None
        if self.steps is not None:
            steps = np.full(len(samples), None, dtype=np.object_)
            steps[:] = self.steps(samples)
        errors = dict.fromkeys(rejected, "it has no reward")
        return ScoredRows(rewards, errors, np.zeros(len(rewards), dtype=bool), steps=steps)


@dataclass
class EncodingScorer(FunctionScorer):
    """A FunctionScorer with a tokenizer, which can reject samples before they are scored."""

    encoding: Callable[[Text], EncodedText | None] = lambda text: None

    def encode(self, text: Text) -> EncodedText:
        return self.encoding(text) or EncodedText([1], False)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        return [len(reply_of(text)) for text in texts]


def source_of(function: Callable[..., np.ndarray], *more: Any, **settings: Any) -> RewardSource:
    """A reward source that scores by ``function``; with ``encoding`` it has a tokenizer."""
    kind = EncodingScorer if "encoding" in settings else FunctionScorer
    return RewardSource.of(kind(function, *more, **settings))


def measured(measure: Callable[..., Any], source: RewardSource, records: Sequence[Any]) -> Any:
    """Score the samples of ``records`` and call ``measure``, such as ``evaluate_ratings``."""
    texts = [text for record in records for text in record.texts]
    return measure(source, records, source.scorer.score_rows(texts))


def score_tokens(scorer: Any, token_lists: Sequence[Sequence[int]]) -> np.ndarray:
    """Rewards ``[N, A]`` of token ids, used unchanged; the contract must accept them."""
    return scorer.score_token_lists(
        [scorer.encode_tokens(token_ids).token_ids for token_ids in token_lists]
    )
