"""Texts to token ids by one contract, and which ids a model of it takes."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.errors import DataError
from nemo_aligner.text.contract import EncodedText, ScoringContract
from nemo_aligner.text.messages import Text
from nemo_aligner.text.tokenizer import Tokenizer


class TextEncoder:
    """The ids that a model with ``contract`` and ``tokenizer`` reads."""

    def __init__(self, contract: ScoringContract, tokenizer: Tokenizer) -> None:
        self.contract = contract
        self.tokenizer = tokenizer

    def encode(self, text: Text) -> EncodedText:
        """The token ids of one text; DataError where the contract refuses it."""
        encoded = self.contract.encode(self.tokenizer, text)
        self.check_tokens(encoded.token_ids)
        return encoded

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse, with a DataError, what the model would fail on or take for something else."""
        if not 1 <= len(token_ids) <= self.contract.seq_length:
            raise DataError(
                f"got {len(token_ids)} tokens, wanted 1 to {self.contract.seq_length} (seq_length)"
            )
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.tokenizer.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(f"got token id {wrong}, wanted 0 to {self.tokenizer.vocab_size - 1}")

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone, at its full length."""
        return self.contract.count_reply_tokens(self.tokenizer, texts)
