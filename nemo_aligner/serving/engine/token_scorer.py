"""TokenScorer: the interface of a model or ensemble to server, evaluation and Python API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import (
    OnError,
    RowValues,
    ScoredRows,
    StepRewards,
    score_encodable,
)
from nemo_aligner.contract.steps import aggregate_texts
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.utils.host_transfer import Arriving


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of all calls so far, on all ranks.

    Attributes:
        requested: tokens of the samples.
        computed: tokens that went through the model; a shared prefix of one call counts once.
        cached: tokens that needed no computation, because their keys and values were cached.
    """

    requested: int = 0
    computed: int = 0
    cached: int = 0

    def after(self, requested: int, computed: int, cached: int) -> TokenCounts:
        """Return the sums after a call that added these numbers of tokens."""
        return TokenCounts(
            self.requested + requested, self.computed + computed, self.cached + cached
        )


class TokenScorer(ABC):
    """Scores N samples: rewards ``[N, A]`` float32, one column for each of ``attributes``.

    ``score_rows``, ``compute``, ``begin`` and ``reset_cache`` are collective: every rank calls them
    with the same arguments, and gets all rewards.

    Attributes:
        contract: the scoring contract by which samples are encoded.
        fingerprint: fingerprint of the weights; None if unknown.
    """

    contract: ScoringContract
    fingerprint: str | None

    @property
    @abstractmethod
    def attributes(self) -> tuple[str, ...]:
        """Names of the columns of the rewards."""

    @property
    @abstractmethod
    def counts(self) -> TokenCounts:
        """Tokens of all calls since the warm-up."""

    @property
    @abstractmethod
    def tokens_per_call(self) -> int:
        """The tokens of a call that has one full pack for each data and pipeline parallel rank."""

    @property
    @abstractmethod
    def prefix_cache_bytes(self) -> int:
        """Bytes of this rank's memory that the prefix caches take."""

    @property
    @abstractmethod
    def num_cached_states(self) -> int:
        """Number of snapshots of linear attention for which the prefix caches have room."""

    @abstractmethod
    def encode(self, text: Text) -> EncodedText:
        """Encode one sample to token ids.

        Raises:
            DataError: the contract does not allow the sample.
        """

    @abstractmethod
    def encode_tokens(self, token_ids: Sequence[int]) -> EncodedText:
        """Turn token ids of a client into those to score.

        Raises:
            DataError: the contract does not allow them, e.g. because one is unknown.
        """

    @abstractmethod
    def adds_special_tokens(self, text: str) -> bool:
        """Return whether BOS or EOS is added to a raw text.

        Raises:
            DataError: the text cannot be scored.
        """

    @abstractmethod
    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Count the tokens of each sample's reply, before truncation."""

    @abstractmethod
    def begin(self, rows: Sequence[Row]) -> Arriving[list[np.ndarray]]:
        """Start computing the outputs of rows (see ``compute``), without waiting for the device.

        A call may begin before the results of earlier ones have arrived, but the caller must wait
        for the results in order. A call that fails, either here or while waiting, empties the
        prefix cache. Calls that began after it may have read keys and values that it never wrote,
        so they must begin again.
        """

    @abstractmethod
    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Convert head outputs ``[N, A * K]`` to rewards ``[N, A]`` float32, and their spreads.

        The spreads ``[N, A]`` are the model's uncertainty; None if its objective has none.

        This method is not collective.
        """

    @abstractmethod
    def reset_cache(self) -> None:
        """Empty the prefix cache, because keys and values of a failed call may be missing."""

    def compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Compute the outputs of the head at the positions that each row reads.

        Returns:
            An array ``[s, A * K]`` float32 for each row, where s is the number of its ``reads`` (1
            if it has none) and K the number of head outputs per attribute; ``read_outputs``
            converts them to rewards. If ``rows`` is empty, the list has one empty array.
        """
        return self.begin(rows).wait()

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score samples and all their steps in one forward pass; return rewards and rejections."""
        scored = score_encodable(samples, self.encode, self._measure, self.contract.hash, on_error)
        return replace(scored, model_fingerprint=self.fingerprint)

    def _measure(self, encoded: Sequence[EncodedText]) -> RowValues:
        contract = self.contract
        rows = [Row.of(sample.token_ids, sample.reads) for sample in encoded]
        outputs = np.concatenate(self.compute(rows))
        rewards, spreads = self.read_outputs(outputs)
        bounds = [*accumulate((len(row.positions) for row in rows), initial=0)]
        last = np.array(bounds[1:], dtype=np.int64) - 1
        steps = np.full(len(rows), None, dtype=np.object_)
        for row, (start, end) in enumerate(pairwise(bounds)):
            spread = None if spreads is None else spreads[start:end]
            steps[row] = StepRewards(rewards[start:end], encoded[row].spans, spread)
        return RowValues(
            aggregate_texts(rewards, bounds, contract.aggregation),
            None if spreads is None else spreads[last],
            None if contract.readout is None else outputs[last],
            steps if contract.has_steps else None,
        )
