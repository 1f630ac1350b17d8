"""What gives texts rewards, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from nemo_aligner.config.common import Overlong, RecordKind
from nemo_aligner.text.contract import EncodedText, OverlongError, ScoringContract
from nemo_aligner.text.messages import Text
from nemo_aligner.text.one_reward import one_reward
from nemo_aligner.text.turn_marks import TurnMarkError

# N texts -> [N, A] float32.
Score: TypeAlias = Callable[[Sequence[Text]], np.ndarray]
# N texts -> the lengths of their N replies.
Measure: TypeAlias = Callable[[Sequence[Text]], Sequence[int]]
# N texts -> [N, A] float32 twice: rewards, and how uncertain they are, None where nothing says so.
ScoreAndSpread: TypeAlias = Callable[[Sequence[Text]], tuple[np.ndarray, np.ndarray | None]]


class EvaluableScorer(Protocol):
    """A reward model of this process that knows its contract."""

    contract: ScoringContract

    def score(self, texts: Sequence[Text]) -> np.ndarray: ...

    def encode(self, text: Text) -> EncodedText: ...

    def count_reply_tokens(self, texts: Sequence[Text]) -> Sequence[int]: ...


@runtime_checkable
class SpreadScorer(Protocol):
    """A scorer that may know how uncertain its rewards are."""

    def score_and_spread(self, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray | None]: ...


@dataclass(frozen=True)
class RewardSource:
    """What gives texts rewards.

    Attributes:
        name: the file, folder or URL.
        attributes: what the A columns of its rewards are called.
        attribute_weights: A weights that make one reward of a text's A.
        score: where ``encode`` is None, a row of NaN is a text that the source refuses.
        contract: by what it scores; None where it does not say.
        encode: the token ids of a text; None where the source alone knows them.
        measure: the lengths of replies, in tokens; None where they are to be counted in characters.
        score_and_spread: ``score``, where it says in one go how uncertain it is.
    """

    name: str
    attributes: tuple[str, ...]
    attribute_weights: tuple[float, ...]
    score: Score
    contract: ScoringContract | None = None
    encode: Callable[[Text], EncodedText] | None = None
    measure: Measure | None = None
    score_and_spread: ScoreAndSpread | None = None

    @property
    def takes_ratings(self) -> bool:
        """Whether rated files may be measured: not by a model that was made to rank."""
        return self.contract is None or self.contract.record_kind is RecordKind.rating

    @property
    def stops_at_overlong(self) -> bool:
        """Whether a text that is too long is an error, and not left out."""
        return self.contract is not None and self.contract.overlong == Overlong.error.value

    @property
    def about_contract(self) -> str:
        """The hash of its contract, if it says one."""
        return "not known" if self.contract is None else self.contract.hash

    def score_as_one(self, texts: Sequence[Text]) -> np.ndarray:
        """``[N]`` rewards of N texts, by the weights; NaN where one is refused."""
        return one_reward(np.asarray(self.score(texts)), self.attribute_weights)

    def fits(self, text: Text) -> bool:
        """Whether a text is not known to be cut or refused."""
        try:
            return self.encode is None or not self.encode(text).truncated
        except (OverlongError, TurnMarkError):
            return False


def of_scorer(scorer: EvaluableScorer, name: str = "a scorer") -> RewardSource:
    """A reward model of this process."""
    contract = scorer.contract
    with_spread = None
    if contract.readout is not None and isinstance(scorer, SpreadScorer):
        with_spread = scorer.score_and_spread
    return RewardSource(
        name=name,
        attributes=tuple(contract.attributes),
        attribute_weights=tuple(contract.attribute_weights),
        score=scorer.score,
        contract=contract,
        encode=scorer.encode,
        measure=scorer.count_reply_tokens,
        score_and_spread=with_spread,
    )
