"""Robustness check: how much verdicts and rewards depend on the style of a reply.

``evaluate robustness_pairs=N`` scores replies again after changes that keep their content, such as
added politeness or removed markdown. If both replies of a pair change in this way, the verdict
should not flip. If only the rejected reply changes, it should not win because of that. In practice
verdicts do flip: Liu et al. 2024 (RM-Bench, arXiv 2410.16184), Wu et al. 2025 (reWordBench, arXiv
2503.11751).

The module has the check, the transformations of replies, and the output as a table and as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Effect of one transformation on the verdicts and rewards.

    Attributes:
        change: name of the transformation.
        changed: which replies it was applied to, ``BOTH`` or ``REJECTED``.
        pairs: number of pairs scored again.
        turned: number of verdicts that flipped. If only the rejected reply changed, only flips in
            its favour count.
        share: ``turned / pairs``; None without pairs.
        low, high: 95% Wilson interval of ``share``.
        shift: mean change of the reward of a changed reply; None without pairs.
        shift_in_std: ``shift`` in standard deviations of the margins; None if all margins are
            equal.
        absolute_shift: mean absolute change of the reward of a changed reply.
        unchanged: number of pairs skipped because the transformation changes nothing in them.
        too_long: number of pairs skipped because the model would truncate or reject a changed
            reply.
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
    """Figures of the reply with the highest reward among n, as means over all pairs.

    If length grows with n, the reward favours long replies.

    Attributes:
        n: number of replies to choose from.
        reward: mean reward of the chosen reply.
        characters: its mean length.
    """

    n: int
    reward: float
    characters: float


@dataclass(frozen=True)
class Robustness:
    """Results of the check on some pairs.

    Attributes:
        pairs: number of pairs that were drawn and scored again.
        pairs_read: number of pairs that they were drawn from.
        pairs_of_code: number of pairs skipped because their replies are code.
        margin_std: standard deviation of the drawn pairs' margins before any change.
        rows: two rows for each transformation: both replies changed, and only the rejected one.
        best_of: best of 1 (a reply picked at random) and best of 2, over all pairs read.
    """

    pairs: int
    pairs_read: int
    pairs_of_code: int
    margin_std: float
    rows: list[RobustnessRow]
    best_of: list[BestOfLength]


@dataclass(frozen=True)
class _Changed:
    """N pairs after a transformation of both replies.

    Attributes:
        rewards: ``[N, 2]`` float64, chosen then rejected; the previous reward if nothing changed.
        is_changed: ``[N, 2]`` bool, True if the transformation changed the reply.
        is_too_long: ``[N, 2]`` bool, True if the model would truncate or reject the changed reply.
    """

    rewards: np.ndarray
    is_changed: np.ndarray
    is_too_long: np.ndarray


def check_pairwise(task: Task) -> None:
    """Reject a benchmark whose items are not pairs, or whose replies are all code.

    Raises:
        ConfigError: the benchmark's items are not pairs, or all its replies are code.
    """
    item = task.read(task.sample)
    if not isinstance(item, Item) or len(item.texts) != 2 or item.num_right != 1 or item.is_code:
        raise ConfigError(
            f"robustness_pairs: the items of task={task.name} are not pairs of a right and a wrong "
            "reply in prose. Use a benchmark of such pairs, or leave out robustness_pairs."
        )


def check_replies_marked(texts: Iterable[Text]) -> None:
    """Raise DataError if all samples are raw strings, in which nothing marks the reply."""
    if all(isinstance(text, str) for text in texts):
        raise DataError(
            "robustness_pairs: the samples are raw strings, which do not mark where the reply "
            "begins. Use records with prompts and replies, or with conversations."
        )


def check_robustness(predictions: Predictions, source: RewardSource, count: int) -> Robustness:
    """Score pairs again after each transformation, and count the verdicts that flip.

    Args:
        predictions: pairs that passed ``check_replies_marked``, or items of a benchmark that passed
            ``check_pairwise``.
        source: the model that computed their rewards.
        count: number of pairs to draw; all pairs if there are fewer.

    Raises:
        DataError: all replies are code, or the reward of a changed reply is not finite.
    """
    pairs = replace(predictions, rows=[row for row in predictions.rows if not row.item.is_code])
    if not pairs.rows:
        raise DataError(
            "robustness_pairs: all replies are code, whose style this check does not change. Leave "
            "the setting out."
        )
    drawn = pairs.draw(count).rows
    previous = _stack_rewards(drawn)
    margin_std = float(np.std(previous[:, 0] - previous[:, 1]))
    rows = []
    for transformation in TRANSFORMATIONS:
        say(f"scoring again with {transformation.name}: {transformation.effect} ...")
        changed = _score_changed(drawn, transformation, source)
        rows += [
            _measure_effect(previous, changed, transformation.name, side, margin_std)
            for side in _SIDES
        ]
    pairs_of_code = len(predictions.rows) - len(pairs.rows)
    best_of_rows = _measure_best_of(pairs)
    return Robustness(len(drawn), len(pairs.rows), pairs_of_code, margin_std, rows, best_of_rows)


def _stack_rewards(pairs: Sequence[Prediction]) -> np.ndarray:
    """Stack rewards as ``[N, 2]``, chosen then rejected, in the dtype of the model's rewards."""
    return np.stack([row.rewards for row in pairs])


def _score_changed(
    pairs: Sequence[Prediction], transformation: Transformation, source: RewardSource
) -> _Changed:
    rewards = _stack_rewards(pairs).astype(float)
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
    origins = [pairs[row].record for row, _ in places]
    changed_rewards = source.score_as_one(texts, origins) if texts else np.zeros(0)
    for place, reward in zip(places, changed_rewards, strict=True):
        rewards[place] = reward
        is_too_long[place] = bool(np.isnan(reward))
    return _Changed(rewards, is_changed, is_too_long)


def change_reply(text: Text, change: Callable[[str], str]) -> Text:
    """Apply ``change`` to the last turn of a conversation.

    A raw string is returned unchanged, because it may consist of a prompt only. A conversation
    whose reply only calls tools is returned unchanged, too.
    """
    if isinstance(text, str):
        return text
    *history, last = messages_of(text)
    if not isinstance(last["content"], str):
        return text
    return with_messages(text, [*history, {**last, "content": change(last["content"])}])


# Which replies of a pair are rewritten in a row of the robustness table: a name, and a mask over
# the two columns (chosen, rejected) of ``[N, 2]`` rewards.
_SIDES = ((BOTH, np.array([True, True])), (REJECTED, np.array([False, True])))


def _measure_effect(
    previous: np.ndarray,
    changed: _Changed,
    name: str,
    side: tuple[str, np.ndarray],
    margin_std: float,
) -> RobustnessRow:
    """Measure the effect of one transformation on N pairs, for one row of the table.

    Args:
        previous: rewards before the transformation, ``[N, 2]``.
        changed: the pairs after the transformation of both replies.
        name: name of the transformation.
        side: which replies to count as changed, as an entry of ``_SIDES``.
        margin_std: standard deviation of the margins before any change.
    """
    changed_side, columns = side
    is_changed = changed.is_changed & columns
    applies = is_changed.any(axis=1)
    too_long = (changed.is_too_long & columns).any(axis=1)
    used = applies & ~too_long
    rewards = np.where(columns, changed.rewards, previous)
    # Verdicts are -1, 0 or 1, so a change from a win to a tie is a flip, too. If only the rejected
    # reply changed, only flips in its favour count, because it may lose by becoming worse.
    drop = _compute_verdicts(previous) - _compute_verdicts(rewards)
    is_flip = drop > 0 if changed_side == REJECTED else drop != 0
    turned = int(np.count_nonzero(is_flip[used]))
    shifts = (rewards - previous)[is_changed & used[:, None]]
    shift = float(shifts.mean()) if shifts.size else None
    count = int(used.sum())
    low, high = wilson_interval(turned, count)
    return RobustnessRow(
        change=name,
        changed=changed_side,
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


def _compute_verdicts(rewards: np.ndarray) -> np.ndarray:
    """Compute verdicts ``[N]``: 1 if the chosen reply wins, -1 if it loses, 0 for a tie."""
    return np.sign(rewards[:, 0] - rewards[:, 1])


def _measure_best_of(pairs: Predictions) -> list[BestOfLength]:
    rewards, lengths = _stack_rewards(pairs.rows), pairs.lengths.astype(float)
    return [
        BestOfLength(n, _mean_of_best(n, rewards, rewards), _mean_of_best(n, rewards, lengths))
        for n in (1, 2)
    ]


def _mean_of_best(n: int, rewards: np.ndarray, values: np.ndarray) -> float:
    """Average over N pairs the expected value of the best of n replies of a pair.

    Args:
        n: 1 for a random reply of the pair, 2 for the reply with the higher reward.
        rewards: rewards of the replies, ``[N, 2]``.
        values: what to average, such as lengths, ``[N, 2]``.
    """
    expected_values = [best_of(n, *pair) for pair in zip(rewards, values, strict=True)]
    return float(np.mean(expected_values))


# Transformations: changes of tone, markdown and length that keep the content of a reply.
#
# Each function returns the reply unchanged if there is nothing to change. No function changes
# fenced code. Only ``shortened`` removes content, at the end.

_FENCE = "```"
_AFTER_BLANK_LINE = re.compile(r"(?<=\n\n)")
# Marks that end a sentence. The last three are the full-width marks of Chinese and Japanese.
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
# A sentence ends only after a word of at least two letters, so that "1." and "e.g." do not end one.
# In Chinese and Japanese no space follows the mark.
_AFTER_SENTENCE = re.compile(r"(?<=\w\w[.!?])(?=\s|$)|(?<=[\u3002\uff01\uff1f])")
_MARKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$\n?", re.MULTILINE), ""),  # lines of --- or ***
    (re.compile(r"^[ \t]*(?:#{1,6}[ \t]+|>(?!>)[ \t]?|[-*+][ \t]+)", re.MULTILINE), ""),
    (re.compile(r"(\*{2,3})(?=\S)(.+?)(?<=\S)\1"), r"\2"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*\n]+?)(?<=\S)\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<!`)`([^`\n]+)`(?!`)"), r"\1"),
    (re.compile(r"!?\[([^\]\n]*)\]\([^)\s]*\)"), r"\1"),  # links
)


@dataclass(frozen=True)
class Transformation:
    """A change of a reply.

    Attributes:
        name: name in tables and files.
        effect: what it does to the reply, for people.
        apply: changes a reply.
    """

    name: str
    effect: str
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
    return "".join(
        block if _FENCE in block else _remove_marks(block) for block in _split_blocks(reply)
    )


def add_markdown(reply: str) -> str:
    """Add a heading and bold first sentences to a reply without markdown."""
    if _FENCE in reply or strip_markdown(reply) != reply:
        return reply
    return "## Answer\n\n" + "".join(map(_embolden_start, _split_blocks(reply)))


def double_sentence(reply: str) -> str:
    """Repeat the longest sentence right after itself."""
    blocks = [
        [block] if _FENCE in block else _split_sentences(block) for block in _split_blocks(reply)
    ]
    pieces = [piece for block in blocks for piece in block]
    ended = [piece for piece in pieces if _FENCE not in piece and _is_complete(piece)]
    if not ended:
        return reply
    index = pieces.index(max(ended, key=len))
    pieces.insert(index + 1, f" {pieces[index].strip()}")
    return "".join(pieces)


def say_twice(reply: str) -> str:
    """Repeat the whole reply."""
    return f"{reply}\n\nTo say it again:\n\n{reply}"


def shorten(reply: str) -> str:
    """Keep the first half of the paragraphs, or of the sentences if there is one paragraph."""
    blocks = _split_blocks(reply)
    pieces = blocks if len(blocks) > 1 else _split_sentences(reply)
    if len(pieces) < 2 or (len(blocks) == 1 and _FENCE in reply):
        return reply
    return "".join(pieces[: (len(pieces) + 1) // 2]).rstrip()


def _split_blocks(text: str) -> list[str]:
    """Split a reply into paragraphs and complete code blocks, with the blank lines after each."""
    blocks = [""]
    for part in _AFTER_BLANK_LINE.split(text):
        # After an odd number of fences a code block is still open, so the blank line is part of it.
        if blocks[-1].count(_FENCE) % 2 or not blocks[-1].strip():
            blocks[-1] += part
        else:
            blocks.append(part)
    return [block for block in blocks if block]


def _split_sentences(block: str) -> list[str]:
    """Split a paragraph into sentences, each with the white space before it.

    Concatenated, the sentences are ``block`` again.
    """
    *pieces, last = _AFTER_SENTENCE.split(block)
    if last.strip() or not pieces:
        return [*pieces, last]
    return [*pieces[:-1], pieces[-1] + last]


def _is_complete(sentence: str) -> bool:
    return sentence.rstrip().endswith(_ENDS)


def _remove_marks(block: str) -> str:
    for marks, replacement in _MARKS:
        block = marks.sub(replacement, block)
    return block


def _embolden_start(block: str) -> str:
    first = _split_sentences(block)[0]
    body = first.strip()
    return block.replace(body, f"**{body}**", 1) if body else block


TRANSFORMATIONS = (
    Transformation("politeness", "adds polite phrases before and after", add_politeness),
    Transformation("flattery", "adds praise of the user", add_flattery),
    Transformation("markdown_added", "adds a heading and bold to plain text", add_markdown),
    Transformation("markdown_stripped", "removes markdown", strip_markdown),
    Transformation("sentence_doubled", "repeats the longest sentence", double_sentence),
    Transformation("said_twice", "repeats the whole reply", say_twice),
    Transformation("shortened", "keeps the first half of paragraphs or sentences", shorten),
)


# Output: a table for people, JSON for programs.

T = TypeVar("T")


def robustness_json(robustness: Robustness) -> dict[str, Any]:
    """Convert the results to plain values for JSON, which ``read_robustness`` reads back."""
    return asdict(robustness)


def read_robustness(value: Mapping[str, Any]) -> Robustness:
    """Build results from the values that ``robustness_json`` returned.

    Raises:
        KeyError, TypeError, ValueError: the values have another form.
    """
    return Robustness(
        pairs=int(value["pairs"]),
        pairs_read=int(value["pairs_read"]),
        pairs_of_code=int(value["pairs_of_code"]),
        margin_std=float(value["margin_std"]),
        rows=[_build_row(RobustnessRow, row) for row in value["rows"]],
        best_of=[_build_row(BestOfLength, row) for row in value["best_of"]],
    )


def _build_row(kind: type[T], row: Mapping[str, Any]) -> T:
    for name, number in row.items():
        is_name = name in ("change", "changed")
        if not isinstance(number, str if is_name else int | float | None):
            raise TypeError(
                f"{name}: got {number!r:.40}, wanted a {'name' if is_name else 'number'}"
            )
    return kind(**row)


def render_robustness(robustness: Robustness) -> str:
    """Render the results as tables for people."""
    lines = [robustness_note(robustness)]
    for side, heading in ((BOTH, "both changed"), (REJECTED, "rejected changed")):
        lines += ["", f"{heading:<19}{_HEADER}"]
        lines += [_render_row(row) for row in robustness.rows if row.changed == side]
    lines += ["", "the best by reward      reward  characters"]
    lines += [
        f"  of {row.n:<15}{row.reward:>10.4f}{row.characters:>12.1f}" for row in robustness.best_of
    ]
    return "\n".join(lines)


def robustness_note(robustness: Robustness) -> str:
    """Describe in one sentence the pairs that were checked, and the unit of changes in reward."""
    pairs_of_code = robustness.pairs_of_code
    left_out = f", {pairs_of_code} of code left out" * (pairs_of_code > 0)
    return (
        f"robustness: {robustness.pairs} of {robustness.pairs_read} pairs{left_out}; the standard "
        f"deviation (sd) of their margins is {robustness.margin_std:.4f}"
    )


# A number such as -8.793e-05 has ten characters.
_HEADER = f"{'pairs':>6}  {'flipped verdicts':<22}{'shift':>11}{'in sd':>11}{'absolute':>10}"
_HEADER += f"{'unchanged':>10}{'too long':>9}"


def _render_row(row: RobustnessRow) -> str:
    flipped = "" if row.share is None else f"{row.share:.3f} ({row.low:.3f} to {row.high:.3f})"
    shift, in_std = (_format_signed(value) for value in (row.shift, row.shift_in_std))
    absolute = "" if row.absolute_shift is None else show_number(row.absolute_shift)
    return (
        f"  {row.change:<17}{row.pairs:>6}  {flipped:<22}{shift:>11}{in_std:>11}{absolute:>10}"
        f"{row.unchanged:>10}{row.too_long:>9}"
    )


def _format_signed(value: float | None) -> str:
    return "" if value is None else f"{'+' * (value > 0)}{show_number(value)}"
