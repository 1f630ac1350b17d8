"""Several reward models that score the same token ids, as one scorer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_aligner.errors import ConfigError
from nemo_aligner.scoring.scorer import RewardScorer, TokenCounts
from nemo_aligner.text.contract import EncodedText, ScoringContract
from nemo_aligner.text.contract_changes import describe_differences
from nemo_aligner.text.messages import Text

# All else decides what ids a text becomes, or what the columns are.
_MAY_DIFFER = ("label_means", "attribute_weights")


class RewardEnsemble:
    """M models on the same ranks: ``[N, M * A]`` rewards, model after model.

    Its methods are those of ``RewardScorer``, and as collective. ``contract`` is the first model's.
    """

    def __init__(self, members: Sequence[RewardScorer]) -> None:
        """Raises ConfigError: two of them make other token ids, or other attributes, of a text."""
        check_alike([member.contract for member in members])
        self._members = list(members)
        self.contract = members[0].contract

    @property
    def counts(self) -> TokenCounts:
        """Tokens of all models."""
        counts = TokenCounts()
        for member in self._members:
            counts = counts.after(*vars(member.counts).values())
        return counts

    @property
    def tokens_per_call(self) -> int:
        """With how many tokens a call of ``score_token_lists`` has a pack for every rank."""
        return self._members[0].tokens_per_call

    @property
    def prefix_cache_bytes(self) -> int:
        """What the prefix caches take on this rank."""
        return sum(member.prefix_cache_bytes for member in self._members)

    def encode(self, text: Text) -> EncodedText:
        """The token ids of one text; DataError where the contract refuses it."""
        return self._members[0].encode(text)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse, with a DataError, what a model would fail on or take for something else."""
        self._members[0].check_tokens(token_ids)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone, at its full length."""
        return self._members[0].count_reply_tokens(texts)

    def score_token_lists(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, M * A]`` float32 rewards of token ids that ``check_tokens`` let pass."""
        return np.concatenate(
            [member.score_token_lists(token_lists) for member in self._members], axis=1
        )

    def score_outputs(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, M * A * K]`` float32 outputs of the heads, for token ids that were checked."""
        return np.concatenate(
            [member.score_outputs(token_lists) for member in self._members], axis=1
        )

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """``[N, M * A]`` float32 rewards of ``outputs``, and their spreads, if any."""
        parts = np.split(outputs, len(self._members), axis=1)
        read = [
            member.read_outputs(part) for member, part in zip(self._members, parts, strict=True)
        ]
        spreads = [each for _, each in read if each is not None]
        return (
            np.concatenate([rewards for rewards, _ in read], axis=1),
            np.concatenate(spreads, axis=1) if spreads else None,
        )

    def forget(self) -> None:
        """Forget what is cached, as keys and values of a call that failed may not be there."""
        for member in self._members:
            member.forget()


def check_alike(contracts: Sequence[ScoringContract]) -> None:
    """Refuse models that do not score the same token ids by the same attributes.

    Raises:
        ConfigError: it names the model by its number in ``ensemble.files``, and what is different.
    """
    for number, contract in enumerate(contracts[1:], start=1):
        differences = contracts[0].differences(contract)
        parting = {name: each for name, each in differences.items() if name not in _MAY_DIFFER}
        if parting:
            raise ConfigError(
                f"ensemble.files: model {number} scores otherwise than rm_model_file: "
                + describe_differences(parting)
            )
