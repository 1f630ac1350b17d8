"""Readout of a head whose outputs are no rewards: a reward, and its uncertainty.

It is part of the scoring contract, so training, evaluation and the server read outputs by the same
code. Every row is read alone, in float64: how a row's sum is rounded depends on no other row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_aligner.utils.errors import ConfigError, DataError, shown

if TYPE_CHECKING:
    from nemo_aligner.contract.contract import ScoringContract

BINS, QUANTILES, HEADS, SIGMOID = "bins", "quantiles", "heads", "sigmoid"
_KINDS = (BINS, QUANTILES, HEADS, SIGMOID)
# What a reward is a number of: the probability that a step or reply is right, the logarithm of
# its odds, or any other score.
PROBABILITY, LOG_ODDS, SCORE = "probability", "log_odds", "score"
MEDIAN = 0.5
# Far more than any has; a contract is untrusted.
_MOST_NUMBERS = 1000


@dataclass(frozen=True)
class Readout:
    """K outputs of each of A attributes, ``[A * K]`` of a text, attribute by attribute.

    Attributes:
        kind: ``bins``: they are logits of as many values, and the reward is the expected one;
            ``quantiles``: they are these quantiles of the label, and the reward is the median;
            ``heads``: each is a reward, and the reward is their mean;
            ``sigmoid``: the one output is log-odds, and the reward is the probability.
        numbers: ``[A][K]`` the values, or levels between 0 and 1, or numbers of the heads, each
            going up; of a sigmoid the label that it is the probability of, 1.
    """

    kind: str
    numbers: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Raises DataError: it is no readout that a reward could be had of."""
        if self.kind not in _KINDS:
            raise DataError(f"readout: got {shown(self.kind)}, wanted {' or '.join(_KINDS)}")
        if len({len(row) for row in self.numbers}) != 1:
            raise DataError("readout: got attributes of different numbers of outputs")
        for row in self.numbers:
            _check_row(self.kind, row)

    @property
    def width(self) -> int:
        """K."""
        return len(self.numbers[0])

    @property
    def is_linear(self) -> bool:
        """True if rewards are outputs, or means of them, so that a head of one output has them."""
        return self.kind in (QUANTILES, HEADS)

    @property
    def gives_probabilities(self) -> bool:
        """True if a reward is the probability of the label 1, where labels are from 0 to 1."""
        return self.kind == SIGMOID or (
            self.kind == BINS and all(row == (0.0, 1.0) for row in self.numbers)
        )

    def plain_rows(self, rows: Any) -> Any:
        """Rows ``[A, ...]`` of a head that gives the rewards, of those ``[A * K, ...]`` of one that
        gives the outputs; arrays or tensors. Only if ``is_linear``.
        """
        if self.kind == HEADS:
            return rows.reshape(len(self.numbers), self.width, *rows.shape[1:]).mean(1)
        medians = enumerate(each.index(MEDIAN) for each in self.numbers)
        return rows[[self.width * row + median for row, median in medians]]

    def rewards(self, outputs: np.ndarray) -> np.ndarray:
        """``[S, A]`` float32 of ``outputs [S, A * K]``."""
        of = {BINS: self._expected, QUANTILES: self._median, HEADS: _mean, SIGMOID: _probability}
        return self._read(outputs, of[self.kind])

    def spreads(self, outputs: np.ndarray) -> np.ndarray:
        """``[S, A]`` float32: how far apart the label may be, in its own unit.

        Of bins, heads and probabilities the standard deviation, of quantiles the highest minus the
        lowest; that is negative where they cross.
        """
        of = {
            BINS: self._deviation,
            QUANTILES: lambda row: row[:, -1] - row[:, 0],
            SIGMOID: lambda row: np.sqrt(_probability(row) * _probability(-row)),
            HEADS: lambda row: np.sqrt(_mean((row - _mean(row)[:, None]) ** 2)),
        }
        return self._read(outputs, of[self.kind])

    def to_json(self) -> str:
        """JSON for a scoring contract."""
        return json.dumps({"kind": self.kind, "numbers": self.numbers}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Readout:
        """The inverse of ``to_json``; raises DataError for anything else."""
        try:
            found = json.loads(text)
            kind, rows = found["kind"], found["numbers"]
            numbers = tuple(tuple(float(number) for number in row) for row in rows)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise DataError(f"readout: got {shown(text)}, wanted kind and numbers") from error
        return cls(kind, numbers)

    def _read(self, outputs: np.ndarray, of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        attributes = len(self.numbers)
        rows = np.asarray(outputs, dtype=np.float64).reshape(-1, attributes, self.width)
        # numpy adds up in an order that depends on strides: every row has the same.
        found = [of(np.ascontiguousarray(row)) for row in rows]
        return np.array(found, dtype=np.float32).reshape(-1, attributes)

    def _probabilities(self, logits: np.ndarray) -> np.ndarray:
        # Less the largest, which exp would otherwise overflow at.
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def _expected(self, logits: np.ndarray) -> np.ndarray:
        return (self._probabilities(logits) * np.array(self.numbers)).sum(axis=1)

    def _deviation(self, logits: np.ndarray) -> np.ndarray:
        away = np.array(self.numbers) - self._expected(logits)[:, None]
        return np.sqrt((self._probabilities(logits) * away**2).sum(axis=1))

    def _median(self, outputs: np.ndarray) -> np.ndarray:
        medians = [row.index(MEDIAN) for row in self.numbers]
        return outputs[np.arange(len(medians)), medians]


def _mean(row: np.ndarray) -> np.ndarray:
    return row.mean(axis=1)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """The sigmoid of each value, without the overflow of exp at large ones."""
    power = np.exp(-np.abs(values))
    return np.where(values >= 0, 1.0, power) / (1.0 + power)


def _probability(row: np.ndarray) -> np.ndarray:
    return sigmoid(row[:, 0])


def _check_row(kind: str, row: Sequence[float]) -> None:
    if kind == SIGMOID:
        if tuple(row) != (1.0,):
            raise DataError(f"readout: got {shown(list(row))}, wanted [1] of a {SIGMOID}")
        return
    fits = 2 <= len(row) <= _MOST_NUMBERS and all(map(math.isfinite, row))
    if not fits or any(low >= high for low, high in pairwise(row)):
        raise DataError(
            f"readout: got {shown(list(row))}, wanted 2 to {_MOST_NUMBERS} ascending numbers"
        )
    if kind == QUANTILES and not (row[0] > 0 and row[-1] < 1 and MEDIAN in row):
        raise DataError(
            f"readout: got the quantiles {shown(list(row))}, wanted levels between 0 and 1, "
            "with 0.5, which is the reward"
        )


# The one number that ranks texts, where a reward model has several attributes.


def reward_weights(contract: ScoringContract, attribute: str | None) -> tuple[float, ...]:
    """A weights that make one reward of a text's A; None is the contract's own.

    Raises:
        ConfigError: the model has no such attribute.
    """
    if attribute is None:
        return contract.attribute_weights
    if attribute not in contract.attributes:
        raise ConfigError(
            f"attribute: got {attribute!r:.80}, wanted one of {', '.join(contract.attributes)}"
        )
    return tuple(float(name == attribute) for name in contract.attributes)


def one_reward(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """``[N, A]`` float32 and A weights to ``[N]`` float32, summed in float64.

    A single attribute stays as it is, and a row of NaN stays NaN. Where every row is NaN, there may
    be any number of columns: a client that has seen no reward knows of none.
    """
    if len(weights) == 1:
        return rewards[:, 0]
    # In float64, so that the order in which BLAS adds does not show in the float32 result.
    merged = np.full(len(rewards), np.nan, dtype=np.float32)
    known = ~np.isnan(rewards).all(axis=1)
    if known.any():
        merged[known] = rewards[known].astype(np.float64) @ np.asarray(weights, dtype=np.float64)
    return merged
