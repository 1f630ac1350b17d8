"""The entry point for scores: the ``Scorer`` protocol, its result ``ScoredRows``, and helpers.

A scorer is a model in this process or a client of a server. It takes samples: raw texts or
conversations. Evaluation, benchmarks, the Python API and the integrations accept any scorer. The
helpers here work with all of them: other rules to aggregate steps, and the lengths of replies. The
client imports this module, so it must import neither torch nor pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from nemo_aligner.config.common import Aggregate
from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.contract.readout import SCORE
from nemo_aligner.contract.steps import StepSpan, aggregate_steps
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError

OnError = Literal["raise", "nan"]


class Scorer(Protocol):
    """Protocol of everything that scores samples: a model in this process, or a client."""

    @property
    def contract(self) -> ScoringContract | None:
        """The scoring contract; None if it is unknown."""

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the A columns of the rewards."""

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score N samples; a rejected sample gets NaN, and its reason goes to ``errors``.

        A reward may also be infinite or NaN because the model overflows; ``check_finite`` detects
        that.

        Raises:
            AlignerError: with ``on_error="raise"``, for the first rejected sample.
            ServingError: no server answers, or the server failed.
        """


@runtime_checkable
class SampleEncoder(Protocol):
    """Protocol of a scorer that can also tokenize samples in this process."""

    def encode(self, text: Text, /) -> EncodedText:
        """Tokenize one sample; DataError if the contract rejects it."""

    def count_reply_tokens(self, texts: Sequence[Text], /) -> list[int]:
        """Count the tokens of each sample's reply, tokenized by itself and before truncation."""


@dataclass(frozen=True)
class StepRewards:
    """Rewards ``[S, A]`` float32 of a sample's S turns or steps, and the S spans of these steps.

    ``spans`` is empty for a sample of token ids: only the reward of its last token is known.
    ``spread`` is the uncertainty ``[S, A]`` of the rewards, known only of a model in this process.
    """

    rewards: np.ndarray
    spans: tuple[StepSpan, ...] = ()
    spread: np.ndarray | None = None

    def to_json(self) -> str:
        """Return JSON from which ``from_json`` restores bit-identical rewards, without spread."""
        spans = [[span.message, span.start, span.end] for span in self.spans]
        return json.dumps({"rewards": self.rewards.tolist(), "spans": spans})

    @classmethod
    def from_json(cls, text: str) -> StepRewards:
        """Read the output of ``to_json``; KeyError, TypeError or ValueError for anything else."""
        content = json.loads(text)
        spans = tuple(StepSpan(*span) for span in content["spans"])
        return cls(np.array(content["rewards"], dtype=np.float32), spans)

    def after(self, prompt_size: int) -> np.ndarray:
        """Return the rewards of the steps that end after the prompt, one row for each step.

        If no step does, return the row of the last step.

        Args:
            prompt_size: length of the prompt in messages; for raw text, in characters.
        """
        positions = [span.end - 1 if span.message is None else span.message for span in self.spans]
        first = next(
            (step for step, position in enumerate(positions) if position >= prompt_size), -1
        )
        return self.rewards[first:]


@dataclass(frozen=True)
class ScoredRows:
    """Rewards of N samples, in the same form from every scorer.

    Attributes:
        rewards: ``[N, A]`` float32; NaN for each row in ``errors``.
        errors: why a row has no reward, by row number.
        exceeded: ``[N]`` bool, true for samples that were truncated to the model's ``seq_length``.
        contract_hash: hash of the scoring contract; None if it is unknown or no row was scored.
        model_fingerprint: fingerprint of the weights; None if unknown or not the same for all rows.
        raw_rewards: ``[N, M * A]``, rewards of the M models before shaping; from a server that
            shapes rewards, else None.
        deviation: ``[N, A]``, standard deviation between the models of an ensemble; None for a
            single model.
        passed: ``[N]``, 1 if the reward reaches the server's threshold, 0 if not, NaN for each row
            in ``errors``; None without a threshold.
        spread: ``[N, A]``, uncertainty of the rewards, from a head with K outputs for each
            attribute (``ordinal_bins``, ``quantiles``); else None.
        outputs: ``[N, M * A * K]``, outputs of such a head; else None.
        steps: ``[N]`` of ``StepRewards`` or None, from a model with a reward for each turn or step.
            The reward of a row is that of its last step or, if the contract has ``aggregate``, all
            of them combined.
        foreign_template: ``[N]`` bool, from the gateway: true for rows that were not rendered by
            the model's chat template.
        part_names: names of the P parts of the rewards, from a gateway that combines several.
        parts: ``[N, P]`` float64, the parts; NaN for a part that failed or was not needed.
        components: ``[N, P]`` float64, what each part adds to the reward; None if the reward is not
            a sum of parts.
        comparisons: judgments of pairs of rows, in the form of NeMo Gym's ``comparison_results``.
        unscored: rows in ``errors`` that are not at fault themselves: a judge or function of a
            gateway failed, or tokenizing took too long. The others were rejected.
        temporary: rows in ``unscored`` that may get a reward if they are sent again, because
            something was too slow or did not answer.
    """

    rewards: np.ndarray
    errors: dict[int, str]
    exceeded: np.ndarray
    contract_hash: str | None = None
    model_fingerprint: str | None = None
    raw_rewards: np.ndarray | None = None
    deviation: np.ndarray | None = None
    passed: np.ndarray | None = None
    spread: np.ndarray | None = None
    outputs: np.ndarray | None = None
    steps: np.ndarray | None = None
    foreign_template: np.ndarray | None = None
    part_names: tuple[str, ...] = ()
    parts: np.ndarray | None = None
    components: np.ndarray | None = None
    comparisons: Sequence[Mapping[str, float]] = ()
    unscored: frozenset[int] = frozenset()
    temporary: frozenset[int] = frozenset()

    @property
    def rejected(self) -> dict[int, str]:
        """Why a row was rejected, by row number: the part of ``errors`` that is its own fault."""
        return {row: reason for row, reason in self.errors.items() if row not in self.unscored}

    def take(self, rows: Sequence[int]) -> ScoredRows:
        """Return the results of the samples with the numbers ``rows``, in this order."""
        indices = np.asarray(rows, dtype=np.int64)
        arrays: dict[str, Any] = {
            name: values[indices]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        errors = {number: self.errors[row] for number, row in enumerate(rows) if row in self.errors}
        sets: dict[str, Any] = {
            name: frozenset(number for number, row in enumerate(rows) if row in values)
            for name, values in vars(self).items()
            if isinstance(values, frozenset)
        }
        return replace(self, errors=errors, **arrays, **sets)

    def check_finite(self) -> ScoredRows:
        """Check that all rewards are finite numbers, and return the rows unchanged.

        Rows in ``errors`` are not checked.

        Raises:
            ServingError: the reward of a row, or of one of its steps, is not finite.
        """
        is_infinite = ~np.isfinite(self.rewards).all(axis=1)
        for row, steps in enumerate(() if self.steps is None else self.steps):
            is_infinite[row] |= steps is not None and not np.isfinite(steps.rewards).all()
        is_infinite[[*self.errors]] = False
        if is_infinite.any():
            row = int(is_infinite.argmax())
            raise ServingError(f"row {row}: the model's reward is not a finite number")
        return self

    def aggregated(
        self, rule: Aggregate, scale: str = SCORE, prompt_sizes: Sequence[int] | None = None
    ) -> np.ndarray:
        """Combine each sample's step rewards by a rule other than the contract's.

        Args:
            rule: how to combine the rewards of a sample's turns or steps.
            scale: the contract's ``reward_scale``.
            prompt_sizes: N lengths of the prompts, in messages (for raw text, in characters). Turns
                and steps in the prompts are ignored; None includes them.

        Returns:
            ``[N, A]`` float32.

        Raises:
            ConfigError: a row has neither an error nor rewards of turns or steps.
        """
        rewards = self.rewards.copy()
        for row in range(len(rewards)):
            row_steps = None if self.steps is None else self.steps[row]
            if row_steps is not None:
                step_rewards = row_steps.rewards
                if prompt_sizes is not None:
                    step_rewards = row_steps.after(prompt_sizes[row])
                rewards[row] = aggregate_steps(step_rewards, rule, scale)
            elif row not in self.errors:
                raise ConfigError(
                    f"aggregate: got {rule.value}, but the server returns no rewards of turns or "
                    "steps: its model has none, or it shapes the rewards of whole replies. Omit "
                    "aggregate"
                )
        return rewards


def place_rows(values: np.ndarray, rows: Sequence[int], total: int) -> np.ndarray:
    """Return an array of ``total`` rows with ``values`` at ``rows``.

    All other rows, those of rejected samples, are NaN, False or None, by the dtype. Integers become
    float32, which has NaN.
    """
    if values.dtype.kind in "iu":
        values = values.astype(np.float32)
    fill: Any = {"b": False, "O": None}.get(values.dtype.kind, np.nan)
    placed = np.full((total, *values.shape[1:]), fill, dtype=values.dtype)
    placed[rows] = values
    return placed


# Functions that scorers are built from.


class RowValues(NamedTuple):
    """Rewards ``[N, A]`` of N encoded samples, and optional arrays.

    ``spread``, ``outputs`` and ``steps`` have the form of the same attributes of ``ScoredRows``.
    """

    rewards: np.ndarray
    spread: np.ndarray | None = None
    outputs: np.ndarray | None = None
    steps: np.ndarray | None = None


def check_on_error(on_error: str) -> None:
    """Raise ConfigError unless ``on_error`` is ``raise`` or ``nan``."""
    if on_error not in ("raise", "nan"):
        raise ConfigError(f"on_error: got {on_error!r:.80}, wanted 'raise' or 'nan'")


def score_encodable(
    samples: Sequence[Text],
    encode: Callable[[Text], EncodedText],
    measure: Callable[[Sequence[EncodedText]], RowValues],
    contract_hash: str | None = None,
    on_error: OnError = "nan",
) -> ScoredRows:
    """Encode all samples, and score those that are accepted.

    A rejected sample gets NaN, and its reason goes to ``errors``.

    Args:
        encode: tokenizes one sample; raises DataError to reject it.
        measure: scores all encoded samples in one call.

    Raises:
        DataError: with ``on_error="raise"``, for the first rejected sample, before any sample is
            scored.
    """
    encoded: dict[int, EncodedText] = {}
    errors: dict[int, str] = {}
    for row, sample in enumerate(samples):
        try:
            encoded[row] = encode(sample)
        except DataError as error:
            if on_error == "raise":
                raise DataError(f"text {row}: {error}") from error
            errors[row] = str(error)
    values = measure([*encoded.values()])._asdict()
    rows, total = list(encoded), len(samples)
    arrays: dict[str, Any] = {
        name: place_rows(array, rows, total) for name, array in values.items() if array is not None
    }
    exceeded = np.array([row in encoded and encoded[row].truncated for row in range(total)], bool)
    return ScoredRows(errors=errors, exceeded=exceeded, contract_hash=contract_hash, **arrays)


# Functions that work with any scorer.


def score_all(scorer: Scorer, samples: Sequence[Text]) -> np.ndarray:
    """Return the rewards ``[N, A]`` float32 of samples, none of which may be rejected.

    Raises:
        AlignerError: a sample is rejected; the message has its number.
    """
    return scorer.score_rows(samples, on_error="raise").rewards


def response_lengths(scorer: Scorer, samples: Sequence[Text]) -> list[int]:
    """Return the lengths of the replies, in tokens if the scorer has a tokenizer.

    Without a tokenizer the lengths are in characters.
    """
    if isinstance(scorer, SampleEncoder):
        return scorer.count_reply_tokens(samples)
    return [len(reply_of(sample)) for sample in samples]
