"""The one entry point for scores: the ``Scorer`` protocol, its result, and what derives from it.

A scorer is a model in this process or a client of a server. It takes samples: raw texts or
conversations. Evaluation, benchmarks, the Python API and the integrations take any scorer; other
rules for steps, and the lengths of responses, are derived here for all of them. The client imports
this module, so it needs neither torch nor pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    """Anything that scores samples."""

    @property
    def contract(self) -> ScoringContract | None:
        """The scoring contract; None where it is unknown."""

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the A columns of the rewards."""

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score N samples; a rejected one gets NaN and its reason in ``errors``.

        A reward may be infinite or NaN where the model overflows; ``check_finite`` finds that.

        Raises:
            AlignerError: with ``on_error="raise"``, for the first sample that is rejected.
            ServingError: no server answers, or it failed.
        """


@runtime_checkable
class SampleEncoder(Protocol):
    """The tokenizer of a scorer that has one at hand."""

    def encode(self, text: Text, /) -> EncodedText:
        """Tokenize one sample; DataError where the contract rejects it."""

    def count_reply_tokens(self, texts: Sequence[Text], /) -> list[int]:
        """Count the tokens of every response alone, at its full length."""


@dataclass(frozen=True)
class StepRewards:
    """Rewards ``[S, A]`` float32 of a text's turns or steps, and where each stands in it.

    ``spans`` are empty for token ids, of which the last one alone is read.
    """

    rewards: np.ndarray
    spans: tuple[StepSpan, ...] = ()

    def to_json(self) -> str:
        """JSON of which ``from_json`` makes the same bits."""
        spans = [[span.message, span.start, span.end] for span in self.spans]
        return json.dumps({"rewards": self.rewards.tolist(), "spans": spans})

    @classmethod
    def from_json(cls, text: str) -> StepRewards:
        """The inverse of ``to_json``; KeyError, TypeError or ValueError where it is none."""
        content = json.loads(text)
        spans = tuple(StepSpan(*span) for span in content["spans"])
        return cls(np.array(content["rewards"], dtype=np.float32), spans)

    def after(self, prompt_size: int) -> np.ndarray:
        """Rewards behind a prompt of so many messages (characters of a raw text), at least one."""
        places = [s.end - 1 if s.message is None else s.message for s in self.spans]
        first = next((n for n, place in enumerate(places) if place >= prompt_size), -1)
        return self.rewards[first:]


@dataclass(frozen=True)
class ScoredRows:
    """Rewards of N samples, the same from every scorer.

    ``rewards`` ``[N, A]`` float32, NaN for each row in ``errors``, which has the reasons.
    ``exceeded`` ``[N]`` bool says which samples were cut to the model's ``seq_length``;
    ``contract_hash`` by what contract they were scored, None where no row was, or it is unknown;
    ``model_fingerprint`` by what weights, None also where the rows are of several models.

    From a server that shapes its rewards also those of each model before, ``raw_rewards``
    ``[N, M * A]``; ``deviation`` ``[N, A]`` between models; and whether a reward ``passed`` the
    threshold, ``[N]`` 1, 0 or NaN. None where it does not say.

    From a model with K outputs for each attribute (``ordinal_bins``, ``quantiles``) also ``spread``
    ``[N, A]``, the uncertainty of the rewards, and the head's ``outputs`` ``[N, M * A * K]``.

    From a model with a reward for each turn or step also ``steps`` ``[N]``, a ``StepRewards`` or
    None for each row; the reward of a row is that of its last one, or what the contract's
    ``aggregate`` makes of all.

    From the gateway also ``foreign_template`` ``[N]`` bool: rows that are not written in the
    model's chat template.
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

    def take(self, rows: Sequence[int]) -> ScoredRows:
        """Select rows by their numbers, in the order of ``rows``."""
        places = np.asarray(rows, dtype=np.int64)
        arrays: dict[str, Any] = {
            name: values[places]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        errors = {n: self.errors[row] for n, row in enumerate(rows) if row in self.errors}
        return replace(self, errors=errors, **arrays)

    def check_finite(self) -> ScoredRows:
        """Return the rows unchanged.

        Raises:
            ServingError: a reward of a row without an error, or of one of its steps, is not finite.
        """
        is_wrong = ~np.isfinite(self.rewards).all(axis=1)
        for row, steps in enumerate(() if self.steps is None else self.steps):
            is_wrong[row] |= steps is not None and not np.isfinite(steps.rewards).all()
        is_wrong[[*self.errors]] = False
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise ServingError(f"row {row}: the model's reward is not a finite number")
        return self

    def aggregated(
        self, rule: Aggregate, scale: str = SCORE, prompt_sizes: Sequence[int] | None = None
    ) -> np.ndarray:
        """Make one reward of each sample's turns or steps by a rule other than the contract's.

        Args:
            scale: the contract's ``reward_scale``.
            prompt_sizes: ``[N]`` messages (characters of raw texts) of the prompts, whose own turns
                and steps do not count; None counts all.

        Returns:
            ``[N, A]`` float32.

        Raises:
            ConfigError: a row has neither an error nor rewards of turns or steps.
        """
        rewards = self.rewards.copy()
        for row in range(len(rewards)):
            row_steps = None if self.steps is None else self.steps[row]
            if row_steps is not None:
                counted = row_steps.rewards
                if prompt_sizes is not None:
                    counted = row_steps.after(prompt_sizes[row])
                rewards[row] = aggregate_steps(counted, rule, scale)
            elif row not in self.errors:
                raise ConfigError(
                    f"aggregate: got {rule.value}, but the server answers no rewards of turns or "
                    "steps: its model reads none, or it shapes whole replies. Leave it out"
                )
        return rewards


def place_rows(values: np.ndarray, rows: Sequence[int], total: int) -> np.ndarray:
    """Put ``values`` at their ``rows`` of ``total``; the other rows are NaN, False or None."""
    nothing: Any = {"b": False, "O": None}.get(values.dtype.kind, np.nan)
    placed = np.full((total, *values.shape[1:]), nothing, dtype=values.dtype)
    placed[rows] = values
    return placed


# What scorers are made of.


class RowValues(NamedTuple):
    """Rewards ``[N, A]`` of N encoded samples, and what else the model tells; see ScoredRows."""

    rewards: np.ndarray
    spread: np.ndarray | None = None
    outputs: np.ndarray | None = None
    steps: np.ndarray | None = None


def check_on_error(on_error: str) -> None:
    """Raise ConfigError for any other way."""
    if on_error not in ("raise", "nan"):
        raise ConfigError(f"on_error: got {on_error!r:.80}, wanted 'raise' or 'nan'")


def score_encodable(
    samples: Sequence[Text],
    encode: Callable[[Text], EncodedText],
    measure: Callable[[Sequence[EncodedText]], RowValues],
    contract_hash: str | None = None,
    on_error: OnError = "nan",
) -> ScoredRows:
    """Score by ``measure`` the samples that ``encode`` accepts; the others get NaN and the reason.

    Raises:
        DataError: with ``on_error="raise"``, for the first sample that is rejected, before any is
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


# What derives from any scorer.


def score_all(scorer: Scorer, samples: Sequence[Text]) -> np.ndarray:
    """Rewards ``[N, A]`` of samples, none of which may be rejected.

    Raises:
        AlignerError: a sample is rejected; the message has its number.
    """
    return scorer.score_rows(samples, on_error="raise").rewards


def response_lengths(scorer: Scorer, samples: Sequence[Text]) -> list[int]:
    """Lengths of responses alone, in tokens; in characters without a tokenizer at hand."""
    if isinstance(scorer, SampleEncoder):
        return scorer.count_reply_tokens(samples)
    return [len(reply_of(sample)) for sample in samples]
