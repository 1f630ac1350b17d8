"""Robustness: how far verdicts and rewards follow the style of a reply, not its content.

The replies of pairs that have been scored are scored again with changes that keep what they say:
both of a pair, by which no verdict should turn, and the rejected one alone, which should not win by
that. Models turn at such changes: Liu et al. 2024 (RM-Bench, arXiv 2410.16184), Wu et al. 2025
(reWordBench, arXiv 2503.11751).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.contract.messages import Text, messages_of, with_messages
from nemo_aligner.evaluation.predictions import Prediction, Predictions
from nemo_aligner.evaluation.tasks.base import Task
from nemo_aligner.evaluation.tasks.best_of_n import best_of
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.utils.console import say, show_number
from nemo_aligner.utils.errors import ConfigError, DataError

BOTH = "both replies"
REJECTED = "the rejected reply"


@dataclass(frozen=True)
class RobustnessRow:
    """Effect of one change.

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
    """Mean reward and mean length in characters of the best of n replies by reward."""

    n: int
    reward: float
    characters: float


@dataclass(frozen=True)
class Robustness:
    """Results on ``pairs`` of all ``pairs_read``.

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
    predictions: Predictions,
    score: Callable[[Sequence[Text]], np.ndarray],
    fits: Callable[[Text], bool],
    most: int,
) -> Robustness:
    """Score ``most`` of the pairs again after each change.

    Args:
        predictions: pairs, or items of a benchmark that ``check_pairwise`` lets pass; code is left
            out.
        score: M texts to ``[M]`` rewards, NaN where the model refuses one.
        fits: whether the model takes a text whole.

    Raises:
        DataError: all replies are code, or no text of any pair is a conversation, in which it is
            known what the reply is.
    """
    pairs = replace(predictions, rows=[row for row in predictions.rows if not row.item.is_code])
    if not pairs.rows:
        raise DataError("robustness_pairs: all replies are code, whose style is not changed")
    if all(isinstance(text, str) for row in pairs.rows for text in row.item.texts):
        raise DataError(
            "robustness_pairs: got raw texts, which do not say where the reply begins; wanted "
            "prompts and replies, or conversations"
        )
    drawn = pairs.draw(most).rows
    before = _rewards(drawn)
    margin_std = float(np.std(before[:, 0] - before[:, 1]))
    rows = []
    for transformation in TRANSFORMATIONS:
        say(f"scoring again with {transformation.name}: {transformation.about} ...")
        changed = _score_changed(drawn, transformation, score, fits)
        rows += [_row(before, changed, transformation.name, side, margin_std) for side in _SIDES]
    of_code = len(predictions.rows) - len(pairs.rows)
    return Robustness(len(drawn), len(pairs.rows), of_code, margin_std, rows, _lengths(pairs))


def _rewards(pairs: Sequence[Prediction]) -> np.ndarray:
    """``[N, 2]``, chosen then rejected, in the dtype that the model gave."""
    return np.stack([row.rewards for row in pairs])


def _score_changed(
    pairs: Sequence[Prediction],
    transformation: Transformation,
    score: Callable[[Sequence[Text]], np.ndarray],
    fits: Callable[[Text], bool],
) -> _Changed:
    rewards = _rewards(pairs).astype(float)
    is_changed, is_too_long = (np.zeros(rewards.shape, dtype=bool) for _ in range(2))
    places, texts = [], []
    for row, pair in enumerate(pairs):
        for side, text in enumerate(pair.item.texts):
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


# Changed replies, as columns of the rewards.
_SIDES = ((BOTH, np.array([True, True])), (REJECTED, np.array([False, True])))


def _row(
    before: np.ndarray,
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
    rewards = np.where(columns, changed.rewards, before)
    fell = _verdicts(before) - _verdicts(rewards)
    turned = int(np.count_nonzero((fell > 0 if which == REJECTED else fell != 0)[used]))
    shifts = (rewards - before)[is_changed & used[:, None]]
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


def _lengths(pairs: Predictions) -> list[BestOfLength]:
    rewards, lengths = _rewards(pairs.rows), pairs.lengths.astype(float)
    return [
        BestOfLength(n, *(_mean_of_best(n, rewards, of) for of in (rewards, lengths)))
        for n in (1, 2)
    ]


def _mean_of_best(n: int, rewards: np.ndarray, values: np.ndarray) -> float:
    """Average the best of two, of ``[N, 2]`` each."""
    return float(np.mean([best_of(n, *both) for both in zip(rewards, values, strict=True)]))


# Changes of a reply's style that keep its content: tone, markdown, length.
#
# Each returns the text unchanged if there is nothing to change. Fenced code is never touched. Only
# ``shortened`` removes content, from the end.

_FENCE = "```"
_AFTER_BLANK_LINE = re.compile(r"(?<=\n\n)")
# The last three are Chinese and Japanese.
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
# Two letters before the point: neither "1." nor "e.g." ends a sentence.
_AFTER_SENTENCE = re.compile(r"(?<=\w\w[.!?])(?=\s|$)|(?<=[\u3002\uff01\uff1f])")
_MARKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$\n?", re.MULTILINE), ""),  # rules
    (re.compile(r"^[ \t]*(?:#{1,6}[ \t]+|>(?!>)[ \t]?|[-*+][ \t]+)", re.MULTILINE), ""),
    (re.compile(r"(\*{2,3})(?=\S)(.+?)(?<=\S)\1"), r"\2"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*\n]+?)(?<=\S)\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<!`)`([^`\n]+)`(?!`)"), r"\1"),
    (re.compile(r"!?\[([^\]\n]*)\]\([^)\s]*\)"), r"\1"),  # links
)


@dataclass(frozen=True)
class Transformation:
    """A change of a reply; ``about`` says to people what it does."""

    name: str
    about: str
    apply: Callable[[str], str]


def add_politeness(reply: str) -> str:
    """Phrases of courtesy before and after it."""
    return (
        f"Thank you for your question! I would be happy to help.\n\n{reply}\n\n"
        "I hope this helps! Please let me know if there is anything else I can do for you."
    )


def add_flattery(reply: str) -> str:
    """Praise of who asked, before it."""
    return f"What a brilliant question! You clearly have a deep grasp of the subject.\n\n{reply}"


def strip_markdown(reply: str) -> str:
    """Headings, bullets, emphasis, inline code, links and rules without their marks."""
    return "".join(block if _FENCE in block else _without_marks(block) for block in _blocks(reply))


def add_markdown(reply: str) -> str:
    """A heading, and the first sentence of each paragraph in bold, if it has no markdown yet."""
    if _FENCE in reply or strip_markdown(reply) != reply:
        return reply
    return "## Answer\n\n" + "".join(map(_with_bold_start, _blocks(reply)))


def double_sentence(reply: str) -> str:
    """Its longest sentence a second time, right behind itself."""
    blocks = [[block] if _FENCE in block else _sentences(block) for block in _blocks(reply)]
    pieces = [piece for block in blocks for piece in block]
    ended = [piece for piece in pieces if _FENCE not in piece and _is_ended(piece)]
    if not ended:
        return reply
    index = pieces.index(max(ended, key=len))
    pieces.insert(index + 1, f" {pieces[index].strip()}")
    return "".join(pieces)


def say_twice(reply: str) -> str:
    """Repeat the whole reply."""
    return f"{reply}\n\nTo say it again:\n\n{reply}"


def shorten(reply: str) -> str:
    """The first half of its paragraphs; of a single one the first half of its sentences."""
    blocks = _blocks(reply)
    pieces = blocks if len(blocks) > 1 else _sentences(reply)
    if len(pieces) < 2 or (len(blocks) == 1 and _FENCE in reply):
        return reply
    return "".join(pieces[: (len(pieces) + 1) // 2]).rstrip()


def _blocks(text: str) -> list[str]:
    """Paragraphs, and whole blocks of code, with the blank lines that follow them."""
    blocks = [""]
    for part in _AFTER_BLANK_LINE.split(text):
        if blocks[-1].count(_FENCE) % 2 or not blocks[-1].strip():
            blocks[-1] += part
        else:
            blocks.append(part)
    return [block for block in blocks if block]


def _sentences(block: str) -> list[str]:
    """Split into sentences, each with the white space before it; the last takes the rest."""
    *pieces, last = _AFTER_SENTENCE.split(block)
    if last.strip() or not pieces:
        return [*pieces, last]
    return [*pieces[:-1], pieces[-1] + last]


def _is_ended(sentence: str) -> bool:
    return sentence.rstrip().endswith(_ENDS)


def _without_marks(block: str) -> str:
    for marks, replacement in _MARKS:
        block = marks.sub(replacement, block)
    return block


def _with_bold_start(block: str) -> str:
    first = _sentences(block)[0]
    body = first.strip()
    return block.replace(body, f"**{body}**", 1) if body else block


TRANSFORMATIONS = (
    Transformation("politeness", "courtesies before and after it", add_politeness),
    Transformation("flattery", "praise of who asked, before it", add_flattery),
    Transformation("markdown_added", "a heading, and bold where there was none", add_markdown),
    Transformation("markdown_stripped", "its markdown taken away", strip_markdown),
    Transformation("sentence_doubled", "its longest sentence a second time", double_sentence),
    Transformation("said_twice", "all of it a second time", say_twice),
    Transformation("shortened", "the first half of its paragraphs or sentences", shorten),
)


# Output of robustness: a table for people, JSON for programs.

T = TypeVar("T")


def robustness_json(found: Robustness) -> dict[str, Any]:
    """Convert to plain JSON values."""
    return asdict(found)


def read_robustness(value: Mapping[str, Any]) -> Robustness:
    """Read what ``robustness_json`` wrote.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    return Robustness(
        pairs=int(value["pairs"]),
        pairs_read=int(value["pairs_read"]),
        pairs_of_code=int(value["pairs_of_code"]),
        margin_std=float(value["margin_std"]),
        rows=[_read_row(RobustnessRow, row) for row in value["rows"]],
        best_of=[_read_row(BestOfLength, row) for row in value["best_of"]],
    )


def _read_row(kind: type[T], row: Mapping[str, Any]) -> T:
    for name, number in row.items():
        is_name = name in ("change", "changed")
        if not isinstance(number, str if is_name else int | float | None):
            raise TypeError(f"{name}: got {number!r:.40}")
    return kind(**row)


def render_robustness(found: Robustness) -> str:
    """The tables, for people."""
    lines = [robustness_note(found)]
    for side, heading in ((BOTH, "both changed"), (REJECTED, "rejected changed")):
        lines += ["", f"{heading:<19}{_HEADER}"]
        lines += [_line(row) for row in found.rows if row.changed == side]
    lines += ["", "the best by reward      reward  characters"]
    lines += [
        f"  of {row.n:<15}{row.reward:>10.4f}{row.characters:>12.1f}" for row in found.best_of
    ]
    return "\n".join(lines)


def robustness_note(found: Robustness) -> str:
    """On how many pairs it was found, and the unit of shifts."""
    of_code = f", {found.pairs_of_code} of code left out" * (found.pairs_of_code > 0)
    return (
        f"robustness: {found.pairs} of {found.pairs_read} pairs{of_code}; the standard deviation "
        f"(sd) of their margins is {found.margin_std:.4f}"
    )


_HEADER = f"{'pairs':>6}  {'verdicts that turn':<22}{'shift':>9}{'in sd':>8}{'absolute':>10}"
_HEADER += f"{'unchanged':>11}{'too long':>10}"


def _line(row: RobustnessRow) -> str:
    turned = "" if row.share is None else f"{row.share:.3f} ({row.low:.3f} to {row.high:.3f})"
    shift, in_std = (_signed(value) for value in (row.shift, row.shift_in_std))
    absolute = "" if row.absolute_shift is None else show_number(row.absolute_shift)
    return (
        f"  {row.change:<17}{row.pairs:>6}  {turned:<22}{shift:>9}{in_std:>8}{absolute:>10}"
        f"{row.unchanged:>11}{row.too_long:>10}"
    )


def _signed(value: float | None) -> str:
    return "" if value is None else f"{'+' * (value > 0)}{show_number(value)}"
