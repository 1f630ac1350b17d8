"""Steps of a text: where a model reads a reward that has several of them in one text.

Which they are is a rule of the scoring contract (``scored_position``, ``model.head.reads``):

================  ==================================================================================
``turns``         every assistant turn is a step, read where the text would end without what follows
``step_ends``     the reply is cut at the separator; each step is read at its own last token, the
                  last one at the text's
``step_marks``    the same, read at the last token of the separator behind each step; it is put
                  behind the last step if it is not there, and what follows it is not read at all
``step_answers``  the same steps, each a turn of the user that is answered ``+``, the first one
                  behind the question and a space; read where the answer begins, as in RLHFlow's
                  ``math-rm/prm_evaluate.py``
================  ==================================================================================

Pieces of a text are tokenized one by one, so that the ids of a step do not depend on what follows:
a reward is that of the text cut behind its step, and a text of one step has the ids that it has
without steps. In a raw text all of it is the reply. A last message whose content is a list of text
parts says its steps itself. White space between two separators is no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nemo_aligner.config.common import Aggregate
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    messages_of,
    said,
    with_messages,
)
from nemo_aligner.contract.readout import PROBABILITY, SCORE
from nemo_aligner.utils.errors import DataError, short

TURNS = ScoredPosition.turns.value
MARKS = ScoredPosition.step_marks.value
ANSWERS = ScoredPosition.step_answers.value
STEPPED = (TURNS, ScoredPosition.step_ends.value, MARKS, ANSWERS)
# Rules that need a separator.
SEPARATED = STEPPED[1:]
# Rules by which the text stops where the last reward is read.
OPEN_ENDED = (MARKS, ANSWERS)
# What a right step is answered by.
_ANSWER = "+"
# A reply of a character that no template writes.
_PLACEHOLDER = "\ue000"

Write = Callable[[Messages | Conversation], str]


class StepTextError(DataError):
    """A step that is blank, or holds the separator."""


@dataclass(frozen=True)
class StepSpan:
    """Characters ``start`` to ``end`` of what ``message`` says, None in a raw text.

    Parts of a message's content count as joined by the separator.
    """

    message: int | None
    start: int
    end: int


@dataclass(frozen=True)
class SteppedText:
    """A text as pieces to tokenize, and the S of them at whose last token a reward is read."""

    pieces: tuple[str, ...]
    read: tuple[int, ...]
    spans: tuple[StepSpan, ...]


def aggregate_steps(rewards: np.ndarray, how: Aggregate, scale: str = SCORE) -> np.ndarray:
    """One reward of a text, ``[A]`` float32, of the rewards ``[S, A]`` of its turns or steps.

    ``product`` is ``sum log sigmoid(r)``, as training has it (``losses/pairwise.py``); of rewards
    whose ``scale`` (the contract's) is that of probabilities ``sum log r``, which is the same of
    the log-odds.
    """
    if how is Aggregate.last:
        return rewards[-1]
    if how is Aggregate.min:
        return rewards.min(axis=0)
    exact = rewards.astype(np.float64)
    if how is Aggregate.mean:
        return exact.mean(axis=0).astype(np.float32)
    if scale == PROBABILITY:
        # A probability that fp32 has rounded to 0 is as small as the smallest.
        logarithms = np.log(np.maximum(exact, np.finfo(np.float32).tiny))
    else:
        logarithms = -np.logaddexp(0, -exact)
    return logarithms.sum(axis=0).astype(np.float32)


def aggregate_texts(rewards: np.ndarray, bounds: Sequence[int], how: Aggregate) -> np.ndarray:
    """One reward of each of N texts, ``[N, A]`` float32, of rewards ``[S, A]`` of all their steps.

    Text n has those from ``bounds[n]`` up to ``bounds[n + 1]``, of N + 1 bounds.
    """
    merged = [aggregate_steps(rewards[start:end], how) for start, end in pairwise(bounds)]
    return np.array(merged, dtype=np.float32).reshape(-1, rewards.shape[1])


def step_texts(text: Text, spans: Sequence[StepSpan], separator: str | None) -> list[str]:
    """What each step of a text says, without separators and without the chat template's words.

    Args:
        separator: the contract's; None for ``turns``.
    """
    if isinstance(text, str):
        return [text[span.start : span.end] for span in spans]
    if separator is not None:
        reply = _reply(text, separator)
        return [reply[span.start : span.end] for span in spans]
    messages = messages_of(text)
    return [said(messages[span.message or 0])[span.start : span.end] for span in spans]


def split_steps(
    text: Text, position: str, separator: str | None, write: Write, tail: str
) -> SteppedText:
    """Write a text in the normal form, cut at its steps by the rule ``position``.

    Args:
        separator: None for ``turns``.
        write: writes a conversation by the contract's template.
        tail: what the template writes after a reply.

    Raises:
        DataError: its steps cannot be told apart in what the template writes.
    """
    if position == TURNS:
        return _at_turns(text, write)
    assert separator is not None
    reply = _reply(text, separator)
    steps = _find(reply, separator)
    if position == ANSWERS:
        return _at_answers(text, reply, steps, write, tail)
    if position == MARKS and not reply[steps[-1].end :].startswith(separator):
        reply = reply[: steps[-1].end] + separator
    written = reply if isinstance(text, str) else write(_with_reply(text, reply))
    calls = not isinstance(text, str) and messages_of(text)[-1].get("tool_calls")
    if calls and not isinstance(text, str) and reply.strip():
        start = _place_before_calls(written, text, reply, write)
    else:
        start = _place(written, reply, tail)
    number = None if isinstance(text, str) else len(messages_of(text)) - 1
    spans = tuple(StepSpan(number, step.start, step.end) for step in steps)
    ends = [start + step.end for step in steps]
    if position == MARKS:
        return _at_marks(written, ends, separator, spans)
    pieces = _cut(written, [*ends[:-1], len(written)])
    return SteppedText(pieces, tuple(range(len(pieces))), spans)


def _at_turns(text: Text, write: Write) -> SteppedText:
    messages = messages_of(text)
    if isinstance(text, str):
        return SteppedText((text,), (0,), (StepSpan(None, 0, len(text)),))
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    written = _write_growing(text, messages, turns, write)
    pieces = _cut(written[-1], [len(each) for each in written])
    spans = tuple(StepSpan(number, 0, len(said(messages[number]))) for number in turns)
    return SteppedText(pieces, tuple(range(len(pieces))), spans)


def _at_answers(
    text: Text, reply: str, steps: Sequence[StepSpan], write: Write, tail: str
) -> SteppedText:
    messages = messages_of(text)
    if isinstance(text, str) or len(messages) < 2 or messages[-2]["role"] != "user":
        raise DataError(
            f"got a text without a question in front of its steps, wanted one: {ANSWERS} puts the "
            "first step behind it"
        )
    *before, question, _ = messages
    asked = [reply[step.start : step.end].strip() for step in steps]
    asked[0] = f"{said(question)} {asked[0]}"
    answer = {"role": "assistant", "content": _ANSWER}
    turns = [turn for step in asked for turn in ({"role": "user", "content": step}, answer)]
    numbers = range(len(before) + 1, len(before) + len(turns), 2)
    written = _write_growing(text, [*before, *turns], numbers, write)
    end = _ANSWER + tail
    if not all(each.endswith(end) for each in written):
        raise DataError(f"the chat template does not end an answer {_ANSWER!r} with {end!r}")
    pieces = _cut(written[-1], [len(each) - len(end) for each in written])
    spans = tuple(StepSpan(len(messages) - 1, step.start, step.end) for step in steps)
    return SteppedText(pieces, tuple(range(len(pieces))), spans)


def _write_growing(
    text: Messages | Conversation, messages: Messages, turns: Sequence[int], write: Write
) -> list[str]:
    """The text up to each of the ``turns``, by number; raises DataError unless each begins it."""
    written = [write(with_messages(text, messages[: number + 1])) for number in turns]
    whole = written[-1]
    for number, begun, longer in zip(turns, written, written[1:], strict=False):
        if not longer.startswith(begun) or not whole.startswith(longer):
            raise DataError(
                f"messages[{number}]: the chat template writes this turn in another way once more "
                "turns follow, so it has no reward of its own; wanted a template that does not, or "
                "model.head.reads=last_token"
            )
    return written


def _at_marks(
    written: str, ends: Sequence[int], separator: str, spans: tuple[StepSpan, ...]
) -> SteppedText:
    # Cut on both sides, so that the separator is the same tokens behind every step.
    pieces = _cut(written, [place for end in ends for place in (end, end + len(separator))])
    if set(pieces[1::2]) != {separator}:
        raise DataError(
            f"the chat template does not write the separator {separator!r} behind the last step, "
            "as it trims replies; wanted model.head.reads=step_ends, or another separator "
            "(model.data.step_separator)"
        )
    return SteppedText(pieces, tuple(range(1, len(pieces), 2)), spans)


def _cut(written: str, ends: Sequence[int]) -> tuple[str, ...]:
    return tuple(written[a:b] for a, b in zip([0, *ends], ends, strict=False))


def _reply(text: Text, separator: str) -> str:
    """What is cut into steps: all of a raw text, or the content of the last message."""
    if isinstance(text, str):
        return text
    content = messages_of(text)[-1]["content"]
    if not isinstance(content, list):
        return content or ""
    steps = [part["text"] for part in content]
    for number, step in enumerate(steps):
        if separator in step or not step.strip():
            raise StepTextError(
                f"step {number + 1} of {len(steps)}: got {short(step)!r}, wanted one that is not "
                f"blank and does not hold the separator {separator!r} (model.data.step_separator)"
            )
    return separator.join(steps)


def _with_reply(text: Messages | Conversation, reply: str) -> Messages | Conversation:
    *before, last = messages_of(text)
    if last["content"] is None and not reply:
        return text
    return with_messages(text, [*before, {**last, "content": reply}])


def _find(reply: str, separator: str) -> list[StepSpan]:
    """The steps of a reply, at least one; their message is not known here."""
    found, start = [], 0
    while start <= len(reply):
        end = reply.find(separator, start)
        end = len(reply) if end < 0 else end
        if reply[start:end].strip():
            found.append(StepSpan(None, start, end))
        start = end + len(separator)
    return found or [StepSpan(None, 0, len(reply))]


def _place(written: str, reply: str, tail: str) -> int:
    """Where the reply would begin in what the template has written, had it trimmed nothing."""
    end = len(written) - len(tail) if tail and written.endswith(tail) else len(written)
    for trimmed, shown in _as_shown(reply):
        at = written.rfind(shown, 0, end)
        if at >= 0:
            return at - trimmed
    raise _not_found()


def _place_before_calls(
    written: str, text: Messages | Conversation, reply: str, write: Write
) -> int:
    """``_place`` of a reply with calls of tools behind it, which may hold the same words again."""
    at = write(_with_reply(text, _PLACEHOLDER)).find(_PLACEHOLDER)
    for trimmed, shown in _as_shown(reply):
        if at >= 0 and written.startswith(shown, at):
            return at - trimmed
    raise _not_found()


def _as_shown(reply: str) -> Iterator[tuple[int, str]]:
    """A reply as templates write it, and by how much its beginning is trimmed there."""
    for trimmed in (0, len(reply) - len(reply.lstrip())):
        yield trimmed, reply[trimmed:]
        yield trimmed, reply[trimmed:].rstrip()


def _not_found() -> DataError:
    return DataError(
        "the chat template does not write the reply as it is, so its steps are not found; wanted "
        "model.head.reads=last_token or turns, or another template"
    )
