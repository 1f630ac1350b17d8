"""Rollout: the tokens, returns and mask that a PPO critic learns from in one request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nemo_aligner.utils.errors import DataError


@dataclass(frozen=True)
class Rollout:
    """N sequences, padded to S tokens, and what a critic learns about the value at each token.

    Element t of ``returns``, ``prev_values`` and ``mask`` belongs to the value at token t, which is
    the value of the sequence up to this token. The value at the last token is never learned.

    Attributes:
        tokens: ``[N, S]`` int64.
        returns: ``[N, S - 1]`` float32 targets of the values.
        prev_values: ``[N, S - 1]`` float32, the critic's values when the rollout was generated.
        mask: ``[N, S - 1]`` float32, 1 if the value is learned, else 0.
    """

    tokens: np.ndarray
    returns: np.ndarray
    prev_values: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self) -> np.ndarray:
        """Count the tokens of each sequence up to its last learned value; 0 if it has none.

        Attention is causal, so later tokens do not matter. The result is ``[N]`` int64.
        """
        learned = self.mask != 0
        # argmax finds the first True of the reversed row, which is the last learned value.
        last = learned.shape[1] - learned[:, ::-1].argmax(axis=1)
        return np.where(learned.any(axis=1), last, 0)

    def in_batches(self, size: int) -> Iterator[Rollout]:
        """Split into batches of ``size`` sequences, in order; the last may have fewer."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield Rollout(
                self.tokens[rows], self.returns[rows], self.prev_values[rows], self.mask[rows]
            )

    def check(self, seq_length: int, vocab_size: int, global_batch_size: int) -> None:
        """Check that the critic can learn from the rollout.

        Raises:
            DataError: the shapes do not fit each other; the mask has another value than 0 and 1; a
                return or previous value is not finite where the mask is 1; a sequence is too long
                or has a token id outside the vocabulary; or the mask of all sequences of a training
                step is 0.
        """
        self._check_shapes()
        self._check_numbers()
        self._check_tokens(seq_length, vocab_size)
        for step, batch in enumerate(self.in_batches(global_batch_size)):
            if not batch.mask.any():
                first = step * global_batch_size
                raise DataError(
                    f"mask: got only zeros in rows {first} to {first + len(batch) - 1}. Every step "
                    "(model.global_batch_size rows) needs at least one 1"
                )

    def _check_shapes(self) -> None:
        shape = self.tokens.shape
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
            raise DataError(f"tokens: got shape {list(shape)}, wanted [N, S], S at least 2")
        expected = (shape[0], shape[1] - 1)
        for name in ("returns", "prev_values", "mask"):
            actual = getattr(self, name).shape
            if actual != expected:
                raise DataError(
                    f"{name}: got shape {list(actual)}, wanted {list(expected)}: one number for "
                    f"each token of a sequence except its last (tokens have shape {list(shape)})"
                )

    def _check_numbers(self) -> None:
        invalid = (self.mask != 0) & (self.mask != 1)
        if invalid.any():
            row, position = np.argwhere(invalid)[0]
            raise DataError(f"mask, row {row}: got {self.mask[row, position]:g}, wanted 0 or 1")
        for name in ("returns", "prev_values"):
            wrong = (self.mask != 0) & ~np.isfinite(getattr(self, name))
            if wrong.any():
                row, position = np.argwhere(wrong)[0]
                raise DataError(
                    f"{name}, row {row}: got a number that is not finite at position {position}, "
                    "where the mask is 1"
                )

    def _check_tokens(self, seq_length: int, vocab_size: int) -> None:
        for row, length in enumerate(self.lengths().tolist()):
            if length > seq_length:
                raise DataError(
                    f"mask, row {row}: its last 1 is at token {length}; sequences have at most "
                    f"{seq_length} tokens (the model's seq_length). Shorten the sequence, or set "
                    "its mask to 0 from there on"
                )
            used = self.tokens[row, :length]
            wrong = used[(used < 0) | (used >= vocab_size)]
            if wrong.size:
                raise DataError(
                    f"tokens, row {row}: got token id {wrong[0]}, wanted 0 to {vocab_size - 1}"
                )
