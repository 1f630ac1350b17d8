"""How far verdicts and rewards follow the style of a reply, and not what it says.

The replies of pairs that have been scored are scored again as ``transformations.py`` changes them:
both of a pair, by which no verdict should turn, and the rejected one alone, which should not win by
that. Models turn at such changes: Liu et al. 2024 (RM-Bench, arXiv 2410.16184), Wu et al. 2025
(reWordBench, arXiv 2503.11751).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_aligner.console import say
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.evaluation.evaluate import EvaluationReport
from nemo_aligner.evaluation.run_task import TaskReport
from nemo_aligner.evaluation.tasks.base import Task
from nemo_aligner.evaluation.tasks.best_of_n import best_of
from nemo_aligner.evaluation.transformations import TRANSFORMATIONS, Transformation
from nemo_aligner.metrics.paired import wilson_interval
from nemo_aligner.text.messages import Text, messages_of, reply_of, with_messages

BOTH = "both replies"
REJECTED = "the rejected reply"


@dataclass(frozen=True)
class ScoredPairs:
    """N pairs of texts, chosen and rejected, and their ``[N, 2]`` rewards.

    ``of_code`` are pairs beside them whose replies are code, which is left alone.
    """

    texts: Sequence[tuple[Text, Text]]
    rewards: np.ndarray
    of_code: int = 0

    @classmethod
    def of_report(cls, report: EvaluationReport) -> ScoredPairs:
        """The pairs of a file of comparisons."""
        return cls([(chosen, rejected) for chosen, rejected in report.texts], report.rewards)

    @classmethod
    def of_task(cls, report: TaskReport) -> ScoredPairs:
        """The pairs of a benchmark that ``check_pairwise`` lets pass, but for those of code.

        Raises:
            DataError: all are.
        """
        judged = [each for each in report.judged if not each.item.is_code]
        if not judged:
            raise DataError("robustness_pairs: all replies are code, whose style is not changed")
        pairs = [(each.item.texts[0], each.item.texts[1]) for each in judged]
        of_code = len(report.judged) - len(judged)
        return cls(pairs, np.stack([each.rewards for each in judged]), of_code)

    def draw(self, most: int) -> ScoredPairs:
        """At most so many, in their order; the same ones every time."""
        count = len(self.texts)
        if most >= count:
            return self
        drawn = sorted(random.Random(0).sample(range(count), most))
        return ScoredPairs([self.texts[row] for row in drawn], self.rewards[drawn])


@dataclass(frozen=True)
class RobustnessRow:
    """What a change did.

    Attributes:
        change: the name of the transformation, and ``changed`` the replies that it was made to.
        pairs: how many were scored again.
        turned: verdicts that turned; where the rejected reply alone was changed, in its favour.
        share: of ``turned`` in ``pairs``, with its 95% interval from ``low`` to ``high`` (Wilson).
        shift: of the reward of a changed reply, in the mean.
        shift_in_std: the same in standard deviations of the margins; None where they have none.
        absolute_shift: the mean of its absolute value.
        unchanged: pairs without anything to change, which are left out.
        too_long: pairs with a changed reply that the model does not take whole: left out, too.
    """

    change: str
    changed: str
    pairs: int
    turned: int
    share: float | None
    low: float
    high: float
    shift: float | None
    shift_in_std: float | None
    absolute_shift: float | None
    unchanged: int
    too_long: int


@dataclass(frozen=True)
class BestOfLength:
    """Of the best of n replies by reward the mean reward, and the mean length in characters."""

    n: int
    reward: float
    characters: float


@dataclass(frozen=True)
class Robustness:
    """What was found on ``pairs`` of all ``pairs_read``.

    Attributes:
        pairs_of_code: that were left out beside them.
        margin_std: standard deviation of the margins of ``pairs``, as they stand in the file.
        rows: both replies changed, and the rejected one alone, for each change.
        best_of: of all pairs; the best of one is a reply taken at random.
    """

    pairs: int
    pairs_read: int
    pairs_of_code: int
    margin_std: float
    rows: list[RobustnessRow]
    best_of: list[BestOfLength]


@dataclass(frozen=True)
class _Changed:
    """N pairs after a change; ``rewards`` are ``[N, 2]``, the old ones where nothing changed.

    ``is_changed`` and ``is_too_long`` are ``[N, 2]``.
    """

    rewards: np.ndarray
    is_changed: np.ndarray
    is_too_long: np.ndarray


def check_pairwise(task: Task) -> None:
    """Refuse a benchmark whose items are no pairs, or are code.

    Raises:
        ConfigError: its sample is none, or is.
    """
    item = task.read(task.sample)
    if item is None or len(item.texts) != 2 or item.num_right != 1 or item.is_code:
        raise ConfigError(
            f"robustness_pairs: got task={task.name}, whose items are no pairs of a right reply "
            "and a wrong one in prose; wanted a benchmark of such, or no task"
        )


def check_robustness(
    pairs: ScoredPairs,
    score: Callable[[Sequence[Text]], np.ndarray],
    fits: Callable[[Text], bool],
    most: int,
) -> Robustness:
    """Score ``most`` of the pairs again after each change.

    Args:
        score: M texts to ``[M]`` rewards, NaN where the model refuses one.
        fits: whether the model takes a text whole.

    Raises:
        DataError: no text of any pair is a conversation, in which it is known what the reply is.
    """
    if all(isinstance(text, str) for pair in pairs.texts for text in pair):
        raise DataError(
            "robustness_pairs: got raw texts, which do not say where the reply begins; wanted "
            "prompts and replies, or conversations"
        )
    drawn = pairs.draw(most)
    margin_std = float(np.std(drawn.rewards[:, 0] - drawn.rewards[:, 1]))
    rows = []
    for transformation in TRANSFORMATIONS:
        say(f"scoring again with {transformation.name}: {transformation.about} ...")
        changed = _score_changed(drawn, transformation, score, fits)
        rows += [_row(drawn, changed, transformation.name, side, margin_std) for side in _SIDES]
    counts = len(drawn.texts), len(pairs.texts), pairs.of_code
    return Robustness(*counts, margin_std, rows, _lengths(pairs))


def _score_changed(
    pairs: ScoredPairs,
    transformation: Transformation,
    score: Callable[[Sequence[Text]], np.ndarray],
    fits: Callable[[Text], bool],
) -> _Changed:
    rewards = pairs.rewards.astype(float)
    is_changed, is_too_long = (np.zeros(rewards.shape, dtype=bool) for _ in range(2))
    places, texts = [], []
    for row, pair in enumerate(pairs.texts):
        for side, text in enumerate(pair):
            changed = change_reply(text, transformation.apply)
            is_changed[row, side] = changed != text
            if is_changed[row, side] and fits(changed):
                places.append((row, side))
                texts.append(changed)
            else:
                is_too_long[row, side] = is_changed[row, side]
    found = score(texts) if texts else np.zeros(0)
    for place, reward in zip(places, found, strict=True):
        rewards[place] = reward
        is_too_long[place] = bool(np.isnan(reward))
    return _Changed(rewards, is_changed, is_too_long)


def change_reply(text: Text, change: Callable[[str], str]) -> Text:
    """A conversation whose last turn is changed; raw text, which may be all prompt, as it is.

    So is a reply without a text of its own, as one that only calls tools.
    """
    if isinstance(text, str):
        return text
    *before, last = messages_of(text)
    if not isinstance(last["content"], str):
        return text
    return with_messages(text, [*before, {**last, "content": change(last["content"])}])


# Which replies were changed, as columns of the rewards.
_SIDES = ((BOTH, np.array([True, True])), (REJECTED, np.array([False, True])))


def _row(
    pairs: ScoredPairs,
    changed: _Changed,
    name: str,
    side: tuple[str, np.ndarray],
    margin_std: float,
) -> RobustnessRow:
    which, columns = side
    is_changed = changed.is_changed & columns
    applies = is_changed.any(axis=1)
    too_long = (changed.is_too_long & columns).any(axis=1)
    used = applies & ~too_long
    rewards = np.where(columns, changed.rewards, pairs.rewards)
    fell = _verdicts(pairs.rewards) - _verdicts(rewards)
    turned = int(np.count_nonzero((fell > 0 if which == REJECTED else fell != 0)[used]))
    shifts = (rewards - pairs.rewards)[is_changed & used[:, None]]
    shift = float(shifts.mean()) if shifts.size else None
    count = int(used.sum())
    low, high = wilson_interval(turned, count)
    return RobustnessRow(
        change=name,
        changed=which,
        pairs=count,
        turned=turned,
        share=turned / count if count else None,
        low=low,
        high=high,
        shift=shift,
        shift_in_std=shift / margin_std if shift is not None and margin_std > 0 else None,
        absolute_shift=float(np.abs(shifts).mean()) if shifts.size else None,
        unchanged=int((~applies).sum()),
        too_long=int(too_long.sum()),
    )


def _verdicts(rewards: np.ndarray) -> np.ndarray:
    """1 where the chosen reply of ``[N, 2]`` rewards has the higher, -1 where the lower, else 0."""
    return np.sign(rewards[:, 0] - rewards[:, 1])


def _lengths(pairs: ScoredPairs) -> list[BestOfLength]:
    lengths = np.array([[len(reply_of(text)) for text in pair] for pair in pairs.texts], float)
    return [
        BestOfLength(n, *(_mean_of_best(n, pairs.rewards, of) for of in (pairs.rewards, lengths)))
        for n in (1, 2)
    ]


def _mean_of_best(n: int, rewards: np.ndarray, values: np.ndarray) -> float:
    """Of ``[N, 2]`` each."""
    return float(np.mean([best_of(n, *both) for both in zip(rewards, values, strict=True)]))
