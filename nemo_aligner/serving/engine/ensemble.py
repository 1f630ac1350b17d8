"""RewardEnsemble: several reward models that score the same samples on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_aligner.checkpoint.nemo.fingerprint import fingerprint_of_ensemble
from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.contract.from_settings import describe_differences, find_conflicts
from nemo_aligner.contract.messages import Text
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.token_scorer import TokenCounts, TokenScorer
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.host_transfer import Arriving

# Fields of the contract in which the models of an ensemble may differ. The other fields decide the
# token ids of a sample, or what the columns of its rewards mean.
_MAY_DIFFER = ("label_means", "attribute_weights")


class RewardEnsemble(TokenScorer):
    """Scores with M models on the same ranks: rewards ``[N, M * A]``, model after model.

    ``contract`` is that of the first model; ``fingerprint`` covers all models in their order.
    """

    def __init__(self, members: Sequence[TokenScorer]) -> None:
        """Store the models.

        Raises:
            ConfigError: two models encode samples differently, or differ in attributes.
        """
        check_same_encoding([member.contract for member in members])
        self._members = list(members)
        self.contract = members[0].contract
        self.fingerprint = fingerprint_of_ensemble([member.fingerprint for member in members])

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the columns of the rewards, model after model."""
        return tuple(
            f"{name} of model {number}"
            for number, member in enumerate(self._members)
            for name in member.attributes
        )

    @property
    def counts(self) -> TokenCounts:
        """Token counts since the start of one model: the mean over the models, rounded down.

        A call scores its tokens with every model, so a sum could not be compared with the tokens of
        the requests or with ``tokens_per_call``.
        """
        members = [vars(member.counts).values() for member in self._members]
        return TokenCounts(*(sum(counts) // len(members) for counts in zip(*members, strict=True)))

    @property
    def tokens_per_call(self) -> int:
        return self._members[0].tokens_per_call

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of this rank's memory that the prefix caches of all models take."""
        return sum(member.prefix_cache_bytes for member in self._members)

    @property
    def num_cached_states(self) -> int:
        """Number of snapshots for which the prefix caches of all models have room, added up."""
        return sum(member.num_cached_states for member in self._members)

    def encode(self, text: Text) -> EncodedText:
        return self._members[0].encode(text)

    def adds_special_tokens(self, text: str) -> bool:
        return self._members[0].adds_special_tokens(text)

    def encode_tokens(self, token_ids: Sequence[int]) -> EncodedText:
        return self._members[0].encode_tokens(token_ids)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        return self._members[0].count_reply_tokens(texts)

    def begin(self, rows: Sequence[Row]) -> Arriving[list[np.ndarray]]:
        """Start the computation of all models: ``[s, M * A * K]`` float32 for each row."""
        parts = [member.begin(rows) for member in self._members]

        def wait() -> list[np.ndarray]:
            outputs = [part.wait() for part in parts]
            return [np.concatenate(columns, axis=1) for columns in zip(*outputs, strict=True)]

        return Arriving(lambda: all(part.has_arrived() for part in parts), wait)

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Convert outputs ``[N, M * A * K]`` to rewards ``[N, M * A]`` float32, and their spreads.

        The spreads are None if the models' objective has none.
        """
        parts = np.split(outputs, len(self._members), axis=1)
        read = [
            member.read_outputs(part) for member, part in zip(self._members, parts, strict=True)
        ]
        spreads = [spread for _, spread in read if spread is not None]
        return (
            np.concatenate([rewards for rewards, _ in read], axis=1),
            np.concatenate(spreads, axis=1) if spreads else None,
        )

    def reset_cache(self) -> None:
        for member in self._members:
            member.reset_cache()


def check_same_encoding(contracts: Sequence[ScoringContract]) -> None:
    """Check that all models score the same token ids by the same attributes.

    Raises:
        ConfigError: a model differs from the first; the message has its number in
            ``ensemble.files`` and the differences.
    """
    for number, contract in enumerate(contracts[1:], start=1):
        differences = find_conflicts(contracts[0], contract, _MAY_DIFFER)
        if differences:
            raise ConfigError(
                f"ensemble.files: model {number} has another scoring contract than rm_model_file: "
                + describe_differences(differences)
            )
