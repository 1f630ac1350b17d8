"""Robustness: how far verdicts and rewards depend on the style of a reply instead of its content.

Replies are scored again after changes that keep their content. If both replies of a pair change,
no verdict should flip; if only the rejected one does, it should not win by that. Reward models do
flip: Liu et al. 2024 (RM-Bench, arXiv 2410.16184), Wu et al. 2025 (reWordBench, arXiv 2503.11751).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.contract.messages import Text, messages_of, with_messages
from nemo_aligner.evaluation.predictions import Item, Prediction, Predictions
from nemo_aligner.evaluation.sources import RewardSource
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
        change: name of the transformation; ``changed`` says which replies it was applied to.
        pairs: number of pairs scored again.
        turned: verdicts that flipped; if only the rejected reply changed, those in its favour.
        share: ``turned / pairs``, with its 95% Wilson interval from ``low`` to ``high``.
        shift: mean change of the reward of a changed reply.
        shift_in_std: the same in standard deviations of the margins; None if those are all equal.
        absolute_shift: mean absolute change of that reward.
        unchanged: pairs with nothing to change, left out.
        too_long: pairs with a changed reply that the model would truncate or refuse, left out.
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
    """Results on a sample of ``pairs`` out of ``pairs_read``.

    Attributes:
        pairs_of_code: pairs left out because their replies are code.
        margin_std: standard deviation of the sample's margins before any change.
        rows: for each change, with both replies changed and with the rejected one alone.
        best_of: over all pairs; the best of one is a reply picked at random.
    """

    pairs: int
    pairs_read: int
    pairs_of_code: int
    margin_std: float
    rows: list[RobustnessRow]
    best_of: list[BestOfLength]


@dataclass(frozen=True)
class _Changed:
    """N pairs after a change: ``[N, 2]`` rewards (the old ones where nothing changed) and masks."""

    rewards: np.ndarray
    is_changed: np.ndarray
    is_too_long: np.ndarray


def check_pairwise(task: Task) -> None:
    """Refuse a benchmark whose items are not pairs, or are all code.

    Raises:
        ConfigError: its sample is such an item.
    """
    item = task.read(task.sample)
    if not isinstance(item, Item) or len(item.texts) != 2 or item.num_right != 1 or item.is_code:
        raise ConfigError(
            f"robustness_pairs: got task={task.name}, whose items are no pairs of a right reply "
            "and a wrong one in prose; wanted a benchmark of such, or no task"
        )


def check_robustness(predictions: Predictions, source: RewardSource, most: int) -> Robustness:
    """Score ``most`` of the pairs again after each change.

    Args:
        predictions: pairs, or items of a benchmark that passed ``check_pairwise``.
        source: the model that gave their rewards.

    Raises:
        DataError: all replies are code, or all texts are raw, so that nothing marks where the reply
            begins.
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
        changed = _score_changed(drawn, transformation, source)
        rows += [_row(before, changed, transformation.name, side, margin_std) for side in _SIDES]
    of_code = len(predictions.rows) - len(pairs.rows)
    return Robustness(len(drawn), len(pairs.rows), of_code, margin_std, rows, _lengths(pairs))


def _rewards(pairs: Sequence[Prediction]) -> np.ndarray:
    """``[N, 2]``, chosen then rejected, in the dtype that the model gave."""
    return np.stack([row.rewards for row in pairs])


def _score_changed(
    pairs: Sequence[Prediction], transformation: Transformation, source: RewardSource
) -> _Changed:
    rewards = _rewards(pairs).astype(float)
    is_changed, is_too_long = (np.zeros(rewards.shape, dtype=bool) for _ in range(2))
    places, texts = [], []
    for row, pair in enumerate(pairs):
        for side, text in enumerate(pair.item.texts):
            changed = change_reply(text, transformation.apply)
            is_changed[row, side] = changed != text
            if is_changed[row, side] and source.fits(changed):
                places.append((row, side))
                texts.append(changed)
            else:
                is_too_long[row, side] = is_changed[row, side]
    found = source.score_as_one(texts) if texts else np.zeros(0)
    for place, reward in zip(places, found, strict=True):
        rewards[place] = reward
        is_too_long[place] = bool(np.isnan(reward))
    return _Changed(rewards, is_changed, is_too_long)


def change_reply(text: Text, change: Callable[[str], str]) -> Text:
    """Change the last turn of a conversation.

    Raw text stays as it is, because it may be all prompt; so does a reply that only calls tools.
    """
    if isinstance(text, str):
        return text
    *before, last = messages_of(text)
    if not isinstance(last["content"], str):
        return text
    return with_messages(text, [*before, {**last, "content": change(last["content"])}])


# Masks over the columns of ``[N, 2]`` rewards: which replies a row of the table has changed.
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
    # -1, 0 or 1 each: from a win to a tie is a flip, too. If only the rejected reply changed, only
    # flips in its favour count: it may well lose by becoming worse.
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
    """1 where the chosen reply wins, -1 where it loses, 0 for a tie; from ``[N, 2]`` rewards."""
    return np.sign(rewards[:, 0] - rewards[:, 1])


def _lengths(pairs: Predictions) -> list[BestOfLength]:
    rewards, lengths = _rewards(pairs.rows), pairs.lengths.astype(float)
    return [
        BestOfLength(n, *(_mean_of_best(n, rewards, of) for of in (rewards, lengths)))
        for n in (1, 2)
    ]


def _mean_of_best(n: int, rewards: np.ndarray, values: np.ndarray) -> float:
    """Average over N pairs the expected value of the best of n; both arrays are ``[N, 2]``."""
    return float(np.mean([best_of(n, *both) for both in zip(rewards, values, strict=True)]))


# Transformations: changes of tone, markdown and length that keep a reply's content.
#
# Each returns the text as it is if there is nothing to change. None touches fenced code. Only
# ``shortened`` removes content, from the end.

_FENCE = "```"
_AFTER_BLANK_LINE = re.compile(r"(?<=\n\n)")
# The last three are the full-width marks of Chinese and Japanese.
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
# A sentence ends after a word of at least two letters, so "1." and "e.g." do not end one. Chinese
# and Japanese put no space after the mark.
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
    """A change of a reply; ``about`` describes it for people."""

    name: str
    about: str
    apply: Callable[[str], str]


def add_politeness(reply: str) -> str:
    """Add polite phrases before and after the reply."""
    return (
        f"Thank you for your question! I would be happy to help.\n\n{reply}\n\n"
        "I hope this helps! Please let me know if there is anything else I can do for you."
    )


def add_flattery(reply: str) -> str:
    """Add praise of the user before the reply."""
    return f"What a brilliant question! You clearly have a deep grasp of the subject.\n\n{reply}"


def strip_markdown(reply: str) -> str:
    """Remove the marks of headings, bullets, emphasis, inline code, links and rules."""
    return "".join(block if _FENCE in block else _without_marks(block) for block in _blocks(reply))


def add_markdown(reply: str) -> str:
    """Add a heading and bold first sentences to a reply without markdown."""
    if _FENCE in reply or strip_markdown(reply) != reply:
        return reply
    return "## Answer\n\n" + "".join(map(_with_bold_start, _blocks(reply)))


def double_sentence(reply: str) -> str:
    """Repeat the longest sentence right after itself."""
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
    """Keep the first half of the paragraphs, or of the sentences of a single paragraph."""
    blocks = _blocks(reply)
    pieces = blocks if len(blocks) > 1 else _sentences(reply)
    if len(pieces) < 2 or (len(blocks) == 1 and _FENCE in reply):
        return reply
    return "".join(pieces[: (len(pieces) + 1) // 2]).rstrip()


def _blocks(text: str) -> list[str]:
    """Split into paragraphs and whole code blocks, each with the blank lines that follow it."""
    blocks = [""]
    for part in _AFTER_BLANK_LINE.split(text):
        # An odd number of fences: the block is still open, and a blank line inside is code.
        if blocks[-1].count(_FENCE) % 2 or not blocks[-1].strip():
            blocks[-1] += part
        else:
            blocks.append(part)
    return [block for block in blocks if block]


def _sentences(block: str) -> list[str]:
    """Split into sentences, each with its leading white space; the last takes the rest."""
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


# Output: a table for people, JSON for programs.

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
    """Describe the sample, and the unit of shifts."""
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
