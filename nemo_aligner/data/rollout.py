"""A rollout of PPO: what a critic learns from in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nemo_aligner.utils.errors import DataError


@dataclass(frozen=True)
class Rollout:
    """N sequences, filled up to S tokens.

    Attributes:
        tokens: ``[N, S]`` int64.
        returns: ``[N, S - 1]`` float32; number t belongs to the value of token t, which is that of
            the sequence up to it. So do the others. The value of a last token is never learned.
        prev_values: ``[N, S - 1]`` float32, the values when the rollout was made.
        mask: ``[N, S - 1]`` float32, 1 or, where there is nothing to learn, 0.
    """

    tokens: np.ndarray
    returns: np.ndarray
    prev_values: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths(self) -> np.ndarray:
        """``[N]`` int64: how many tokens of each have a say, up to the last that is learned from.

        What comes after has none, as attention is causal; 0 is a sequence without any.
        """
        learned = self.mask != 0
        # argmax is where the first True is, here from the end.
        last = learned.shape[1] - learned[:, ::-1].argmax(axis=1)
        return np.where(learned.any(axis=1), last, 0)

    def in_batches(self, size: int) -> Iterator[Rollout]:
        """``size`` sequences each, in order; the last may have fewer."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield Rollout(
                self.tokens[rows], self.returns[rows], self.prev_values[rows], self.mask[rows]
            )

    def check(self, seq_length: int, vocab_size: int, global_batch_size: int) -> None:
        """Refuse what cannot be learned from.

        Raises:
            DataError: shapes that do not fit each other, a mask of other than 0 and 1, a number
                that is not finite where it is 1, a sequence that is too long or has an id outside
                the vocabulary, or a step that has nothing to learn.
        """
        self._check_shapes()
        self._check_numbers()
        self._check_tokens(seq_length, vocab_size)
        for step, batch in enumerate(self.in_batches(global_batch_size)):
            if not batch.mask.any():
                first = step * global_batch_size
                raise DataError(
                    f"mask: got only zeros in rows {first} to {first + len(batch) - 1}, wanted "
                    "something to learn in every step (model.global_batch_size rows)"
                )

    def _check_shapes(self) -> None:
        shape = self.tokens.shape
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
            raise DataError(f"tokens: got shape {list(shape)}, wanted [N, S], S at least 2")
        wanted = (shape[0], shape[1] - 1)
        for name in ("returns", "prev_values", "mask"):
            got = getattr(self, name).shape
            if got != wanted:
                raise DataError(
                    f"{name}: got shape {list(got)}, wanted {list(wanted)}: one number for each "
                    f"of the tokens {list(shape)} but the last"
                )

    def _check_numbers(self) -> None:
        other = (self.mask != 0) & (self.mask != 1)
        if other.any():
            row, position = np.argwhere(other)[0]
            raise DataError(f"mask, row {row}: got {self.mask[row, position]:g}, wanted 0 or 1")
        for name in ("returns", "prev_values"):
            wrong = (self.mask != 0) & ~np.isfinite(getattr(self, name))
            if wrong.any():
                row, position = np.argwhere(wrong)[0]
                raise DataError(
                    f"{name}, row {row}: got a number that is not finite at {position}, where the "
                    "mask is not 0"
                )

    def _check_tokens(self, seq_length: int, vocab_size: int) -> None:
        for row, length in enumerate(self.lengths().tolist()):
            if length > seq_length:
                raise DataError(
                    f"mask, row {row}: got {length} tokens up to its last number that is not 0, "
                    f"wanted at most {seq_length} (seq_length)"
                )
            used = self.tokens[row, :length]
            wrong = used[(used < 0) | (used >= vocab_size)]
            if wrong.size:
                raise DataError(
                    f"tokens, row {row}: got token id {wrong[0]}, wanted 0 to {vocab_size - 1}"
                )
