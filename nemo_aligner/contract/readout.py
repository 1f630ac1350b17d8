"""Readout of a reward head: the rule that turns several outputs per attribute into one reward.

The readout also gives the uncertainty of a reward. It is part of the scoring contract, so training,
evaluation and the server use the same code. Each sample is computed by itself in float64, so its
rounding does not depend on the other samples of a batch. ``one_reward`` combines the rewards of
all attributes into one.
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
# The units of a reward: the probability that a step or reply is right, its log-odds, or any
# other score.
PROBABILITY, LOG_ODDS, SCORE = "probability", "log_odds", "score"
MEDIAN = 0.5
# Largest number of outputs per attribute. A contract is untrusted, so there is a limit; real heads
# are far below it.
_MAX_NUMBERS = 1000


@dataclass(frozen=True)
class Readout:
    """The rule from K outputs per attribute to one reward, for A attributes.

    The A * K outputs of a sample are ordered attribute by attribute.

    Attributes:
        kind: meaning of an attribute's K outputs.
            ``bins``: logits over K values; the reward is the expected value.
            ``quantiles``: K quantiles of the label; the reward is the median.
            ``heads``: K rewards of an ensemble of heads; the reward is their mean.
            ``sigmoid``: the log-odds of a label of 1 (K is 1); the reward is the probability.
        numbers: ``[A][K]``, each row ascending. For ``bins`` the values, for ``quantiles`` the
            levels between 0 and 1, for ``heads`` the indices of the heads, for ``sigmoid`` the
            label 1.
    """

    kind: str
    numbers: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Validate ``kind`` and ``numbers``; raise DataError if they are invalid."""
        if self.kind not in _KINDS:
            raise DataError(f"readout: got {shown(self.kind)}, wanted {' or '.join(_KINDS)}")
        if len({len(row) for row in self.numbers}) != 1:
            sizes = [len(row) for row in self.numbers]
            raise DataError(
                f"readout: got attributes of different numbers of outputs ({shown(sizes)}), wanted "
                "the same number for each"
            )
        for row in self.numbers:
            _check_numbers(self.kind, row)

    @property
    def width(self) -> int:
        """K, the number of outputs per attribute."""
        return len(self.numbers[0])

    @property
    def is_linear(self) -> bool:
        """True if a reward is one of the K outputs or their mean.

        Then a head with one output per attribute can give the same rewards (``plain_rows``).
        """
        return self.kind in (QUANTILES, HEADS)

    @property
    def gives_probabilities(self) -> bool:
        """True if a reward is the probability of the label 1, for labels between 0 and 1."""
        return self.kind == SIGMOID or (
            self.kind == BINS and all(row == (0.0, 1.0) for row in self.numbers)
        )

    def plain_rows(self, rows: Any) -> Any:
        """Reduce the weights ``[A * K, ...]`` of a head to ``[A, ...]`` that give the same rewards.

        Exports use it to write a head with one output per attribute. It accepts numpy arrays and
        torch tensors, and requires ``is_linear``.
        """
        if self.kind == HEADS:
            return rows.reshape(len(self.numbers), self.width, *rows.shape[1:]).mean(1)
        medians = enumerate(levels.index(MEDIAN) for levels in self.numbers)
        return rows[[self.width * row + median for row, median in medians]]

    def rewards(self, outputs: np.ndarray) -> np.ndarray:
        """Turn ``outputs [S, A * K]`` into rewards ``[S, A]`` float32."""
        functions = {
            BINS: self._compute_expectation,
            QUANTILES: self._select_median,
            HEADS: _average_columns,
            SIGMOID: _compute_probability,
        }
        return self._apply(outputs, functions[self.kind])

    def spreads(self, outputs: np.ndarray) -> np.ndarray:
        """Return the uncertainty ``[S, A]`` float32 of the rewards, in the unit of the label.

        For ``quantiles`` it is the highest quantile minus the lowest one, which is negative if
        they cross; for all other kinds it is the standard deviation.
        """
        functions = {
            BINS: self._compute_deviation,
            QUANTILES: lambda row: row[:, -1] - row[:, 0],
            SIGMOID: lambda row: np.sqrt(_compute_probability(row) * _compute_probability(-row)),
            HEADS: lambda row: np.sqrt(
                _average_columns((row - _average_columns(row)[:, None]) ** 2)
            ),
        }
        return self._apply(outputs, functions[self.kind])

    def to_json(self) -> str:
        """Encode the readout as the JSON string that a scoring contract stores."""
        return json.dumps({"kind": self.kind, "numbers": self.numbers}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Readout:
        """Read the output of ``to_json``; DataError for anything else."""
        try:
            content = json.loads(text)
            kind, rows = content["kind"], content["numbers"]
            numbers = tuple(tuple(float(number) for number in row) for row in rows)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise DataError(
                f"readout: got {shown(text)}, wanted the JSON of an object with kind and numbers"
            ) from error
        return cls(kind, numbers)

    def _apply(
        self, outputs: np.ndarray, function: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Apply ``function`` to the outputs of each sample.

        Args:
            outputs: ``[S, A * K]``.
            function: from the float64 outputs ``[A, K]`` of a sample to A values.

        Returns:
            ``[S, A]`` float32.
        """
        num_attributes = len(self.numbers)
        rows = np.asarray(outputs, dtype=np.float64).reshape(-1, num_attributes, self.width)
        # numpy's order of summation depends on strides, so every row is made contiguous.
        results = [function(np.ascontiguousarray(row)) for row in rows]
        return np.array(results, dtype=np.float32).reshape(-1, num_attributes)

    def _softmax(self, logits: np.ndarray) -> np.ndarray:
        # The largest logit is subtracted, because exp overflows for large logits.
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def _compute_expectation(self, logits: np.ndarray) -> np.ndarray:
        return (self._softmax(logits) * np.array(self.numbers)).sum(axis=1)

    def _compute_deviation(self, logits: np.ndarray) -> np.ndarray:
        distances = np.array(self.numbers) - self._compute_expectation(logits)[:, None]
        return np.sqrt((self._softmax(logits) * distances**2).sum(axis=1))

    def _select_median(self, outputs: np.ndarray) -> np.ndarray:
        medians = [row.index(MEDIAN) for row in self.numbers]
        return outputs[np.arange(len(medians)), medians]


def _average_columns(row: np.ndarray) -> np.ndarray:
    return row.mean(axis=1)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Return the sigmoid of each value; exp does not overflow for large negative ones."""
    power = np.exp(-np.abs(values))
    return np.where(values >= 0, 1.0, power) / (1.0 + power)


def _compute_probability(row: np.ndarray) -> np.ndarray:
    return sigmoid(row[:, 0])


def _check_numbers(kind: str, row: Sequence[float]) -> None:
    """Check the row of ``numbers`` of one attribute; raise DataError if it is invalid."""
    if kind == SIGMOID:
        if tuple(row) != (1.0,):
            raise DataError(f"readout: {SIGMOID}: got the numbers {shown(list(row))}, wanted [1]")
        return
    fits = 2 <= len(row) <= _MAX_NUMBERS and all(map(math.isfinite, row))
    if not fits or any(low >= high for low, high in pairwise(row)):
        raise DataError(
            f"readout: got {shown(list(row))}, wanted 2 to {_MAX_NUMBERS} ascending numbers"
        )
    if kind == QUANTILES and not (row[0] > 0 and row[-1] < 1 and MEDIAN in row):
        raise DataError(
            f"readout: got the quantile levels {shown(list(row))}, wanted levels above 0 and "
            "below 1, one of them 0.5: the median is the reward"
        )


# The combination of the attributes into one reward per sample.


def reward_weights(contract: ScoringContract, attribute: str | None) -> tuple[float, ...]:
    """Return the A weights by which ``one_reward`` combines the attributes.

    Args:
        attribute: the only attribute to use; None takes the contract's ``attribute_weights``.

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


def weighted_components(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Compute what each attribute contributes to the combined reward.

    Args:
        rewards: ``[N, A]`` float32.
        weights: the A weights.

    Returns:
        ``[N, A]`` float64. Each row sums to the sample's ``one_reward``; NaN if it has none.
    """
    components = rewards.astype(np.float64) * np.asarray(weights, dtype=np.float64)
    return adjust_components(components, one_reward(rewards, weights))


def adjust_components(components: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Return components ``[N, A]`` float64 that add up to the rewards ``[N]`` float32.

    NeMo RL (``validate_reward_components_match_scalar``) ends a run if the components of a sample
    do not add up to its reward. Rewards are rounded to float32, so the sum of the components may
    differ in the last digit. The difference is added to the largest component.
    """
    components = components.copy()
    missing = rewards - components.sum(axis=1)
    largest = np.abs(components).argmax(axis=1)
    components[np.arange(len(components)), largest] += missing
    return components


def one_reward(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Combine ``rewards [N, A]`` float32 by A weights into ``[N]`` float32, summed in float64.

    A single attribute of weight 1 is returned unchanged, and rows of NaN (rejected samples) stay
    NaN. If all rows are NaN, the number of columns may differ from A: a client that has received no
    reward does not know A.
    """
    if tuple(weights) == (1.0,):
        return rewards[:, 0]
    # The sum is in float64, so that the order of additions in BLAS does not change the float32
    # result.
    combined = np.full(len(rewards), np.nan, dtype=np.float32)
    is_scored = ~np.isnan(rewards).all(axis=1)
    if is_scored.any():
        scored = rewards[is_scored].astype(np.float64)
        combined[is_scored] = scored @ np.asarray(weights, dtype=np.float64)
    return combined
