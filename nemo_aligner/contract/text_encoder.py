"""TextEncoder: a scoring contract together with its tokenizer, as scorers and servers use them."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.contract.completion import complete_ids, without_trailing_pad
from nemo_aligner.contract.contract import EncodedText, OverlongError, ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import OPEN_ENDED
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import DataError

_SHORTEN = "Shorten the prompt or the reply, or use a model with a larger seq_length"


class TextEncoder:
    """Encodes samples for one model, and checks token ids that clients send."""

    def __init__(self, contract: ScoringContract, tokenizer: Tokenizer) -> None:
        self.contract = contract
        self.tokenizer = tokenizer

    def encode(self, text: Text) -> EncodedText:
        """Turn one sample into token ids; DataError if the contract rejects it."""
        try:
            encoded = self.contract.encode(self.tokenizer, text)
        except OverlongError as error:
            raise OverlongError(f"{error}. {_SHORTEN}") from error
        self._check_ids(encoded.token_ids)
        return encoded

    def adds_special_tokens(self, text: str) -> bool:
        """Return whether BOS or EOS is added to a raw text, which may have them already.

        Raises:
            DataError: the text is empty, or begins with BOS twice.
        """
        contract = self.contract
        if not (contract.add_bos or contract.add_eos):
            return False
        ids, ends = self.tokenizer.encode(text), contract.scored_position not in OPEN_ENDED
        completed = complete_ids(contract, ids, is_raw=True, ends=ends)
        return completed != complete_ids(contract, ids, is_raw=False, ends=ends)

    def encode_tokens(self, token_ids: Sequence[int]) -> EncodedText:
        """Turn token ids that a client has sent into the ids to score.

        They are scored unchanged, except that the contract's ``trailing_pad_id`` is removed from
        the end.

        Raises:
            DataError: their number or an id is out of range, all of them are ``trailing_pad_id``,
                or the model aggregates over steps, which cannot be found in token ids.
        """
        if self.contract.aggregate is not None:
            raise DataError(
                f"got token ids, but the reward of a sample is the {self.contract.aggregate} over "
                "its steps, which cannot be found in token ids. Send the text or the conversation"
            )
        remaining_ids = without_trailing_pad(self.contract, token_ids)
        self._check_ids(remaining_ids)
        return EncodedText(remaining_ids, False)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not 1 <= len(token_ids) <= self.contract.seq_length:
            advice = _SHORTEN if token_ids else "Leave the sequence out"
            raise DataError(
                f"got {len(token_ids)} tokens, wanted 1 to {self.contract.seq_length} "
                f"(seq_length). {advice}"
            )
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.tokenizer.vocab_size:
            invalid_id = lowest if lowest < 0 else highest
            raise DataError(
                f"got token id {invalid_id}, wanted 0 to {self.tokenizer.vocab_size - 1}"
            )

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Count the tokens of each sample's reply, tokenized by itself and before truncation."""
        return self.contract.count_reply_tokens(self.tokenizer, texts)
