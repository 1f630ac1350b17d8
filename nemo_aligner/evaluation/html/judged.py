"""What a model made of held-out records, as arrays that figures are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from nemo_aligner.evaluation.compare import PairVerdict
from nemo_aligner.metrics.paired import wilson_interval
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.text.messages import Text, reply_of


@dataclass(frozen=True)
class Mistake:
    """A record that the model got wrong: what it gave each of its texts, by what they are."""

    record: str
    source: str
    about: str
    texts: tuple[tuple[str, Text], ...]


@dataclass(frozen=True)
class SourceShare:
    """How many pairs of a source are right, with the 95% interval (Wilson 1927)."""

    source: str
    pairs: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class JudgedPairs:
    """N pairs, or items of a benchmark.

    Lengths are in characters: of models with different tokenizers they are the same.
    """

    verdicts: Sequence[PairVerdict]

    @cached_property
    def rewards(self) -> np.ndarray:
        """``[N, 2]`` float64, of the chosen reply and the rejected."""
        return np.array([each.rewards for each in self.verdicts], dtype=float).reshape(-1, 2)

    @cached_property
    def lengths(self) -> np.ndarray:
        """``[N, 2]`` int64 characters of these replies."""
        found = [[len(reply_of(text)) for text in each.judged] for each in self.verdicts]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def right(self) -> np.ndarray:
        """``[N]`` float64, see ``PairVerdict``."""
        return np.array([each.right for each in self.verdicts], dtype=float)

    def as_metrics(self) -> PairRewards:
        """What ``metrics/`` takes, with lengths in characters."""
        return PairRewards.of(torch.from_numpy(self.rewards), torch.from_numpy(self.lengths))

    def shares(self) -> list[SourceShare]:
        """Of all pairs, and of every source where there are several."""
        sources = np.array([each.source for each in self.verdicts])
        names = sorted(set(sources.tolist()))
        shares = [_share("all", self.right)]
        if len(names) > 1:
            shares += [_share(name or "none", self.right[sources == name]) for name in names]
        return shares

    def mistakes(self, most: int) -> list[Mistake]:
        """The wrong verdicts with the largest margins, the largest first."""
        wrong = sorted((each for each in self.verdicts if each.right < 0.5), key=_margin)
        return [
            Mistake(
                each.record,
                each.source,
                f"margin {each.margin:+.3f}: chosen {each.rewards[0]:.3f}, "
                f"rejected {each.rewards[1]:.3f}",
                (("chosen", each.judged[0]), ("rejected", each.judged[1])),
            )
            for each in wrong[:most]
        ]


def _margin(verdict: PairVerdict) -> float:
    return verdict.margin


def _share(name: str, right: np.ndarray) -> SourceShare:
    low, high = wilson_interval(float(right.sum()), right.size)
    return SourceShare(name, right.size, float(right.mean()), low, high)


@dataclass(frozen=True)
class JudgedRatings:
    """N rated replies; lengths as of pairs.

    Attributes:
        attributes: A names.
        rewards, labels: ``[N, A]`` float64, NaN where one is missing.
        lengths: ``[N]`` int64 characters.
    """

    attributes: tuple[str, ...]
    rewards: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    records: tuple[str, ...]
    sources: tuple[str, ...]
    texts: tuple[Text, ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> JudgedRatings:
        """Of the lines of ``output_rewards``.

        Raises:
            KeyError, TypeError, ValueError: they are none of ratings.
        """
        rows = list(rows)
        names = tuple(rows[0]["rewards"])
        texts = tuple(row["texts"]["response"] for row in rows)
        return cls(
            attributes=names,
            rewards=_columns(rows, "rewards", names),
            labels=_columns(rows, "labels", names),
            lengths=np.array([len(reply_of(text)) for text in texts], dtype=np.int64),
            records=tuple(str(row["record"]) for row in rows),
            sources=tuple(str(row.get("source", "")) for row in rows),
            texts=texts,
        )

    def mistakes(self, most: int) -> list[Mistake]:
        """The records with an attribute that is farthest from its label, the farthest first."""
        errors = np.nan_to_num(np.abs(self.rewards - self.labels))
        farthest = np.argsort(-errors.max(axis=1), kind="stable")[:most]
        return [self._mistake(int(row), errors[row]) for row in farthest if errors[row].max() > 0]

    def _mistake(self, row: int, errors: np.ndarray) -> Mistake:
        column = int(errors.argmax())
        reward, label = self.rewards[row, column], self.labels[row, column]
        about = f"{self.attributes[column]}: reward {reward:.3f}, label {label:.3f}"
        texts = (("response", self.texts[row]),)
        return Mistake(self.records[row], self.sources[row], about, texts)


def _columns(rows: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> np.ndarray:
    return np.array([[row[key][name] for name in names] for row in rows], dtype=float)


HeldoutSet: TypeAlias = JudgedPairs | JudgedRatings
