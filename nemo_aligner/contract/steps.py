"""Steps of a sample: where a model with several rewards per sample reads each of them.

The rule is part of the scoring contract (``scored_position``, setting ``model.head.reads``):

================  ==================================================================================
``turns``         Every assistant turn is a step. Its reward is read at the last token that the
                  conversation would have without the later turns.
``step_ends``     The reply is cut into steps at the separator. A reward is read at the last token
                  of each step; that of the last step at the last token of the sample.
``step_marks``    Steps as for ``step_ends``. A reward is read at the last token of the separator
                  after each step. If the last step has no separator after it, one is added.
                  Everything after the last separator is dropped.
``step_answers``  Steps as for ``step_ends``. Each step becomes a user turn that the assistant
                  answers with ``+``; the first step is appended to the question. A reward is read
                  where the answer begins, as in RLHFlow's ``math-rm/prm_evaluate.py``.
================  ==================================================================================

The pieces of a sample are tokenized one by one, so the token ids of a step do not depend on later
steps. The reward of a step equals that of the sample cut after the step. In raw text the whole text
is the reply, except what the chat template writes after a reply: with ``step_ends`` it belongs to
the last step. If the content of the last message is a list of text parts, each part is a step.
Whitespace between two separators is not a step.
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
    flatten_message,
    messages_of,
    with_messages,
)
from nemo_aligner.contract.readout import PROBABILITY, SCORE
from nemo_aligner.utils.errors import DataError, short

TURNS = ScoredPosition.turns.value
MARKS = ScoredPosition.step_marks.value
ANSWERS = ScoredPosition.step_answers.value
STEPPED = (TURNS, ScoredPosition.step_ends.value, MARKS, ANSWERS)
# Values of ``scored_position`` that need a separator.
SEPARATED = STEPPED[1:]
# Values of ``scored_position`` for which the sequence ends where the last reward is read.
OPEN_ENDED = (MARKS, ANSWERS)
# The assistant's answer to a correct step, for ``step_answers``.
_ANSWER = "+"
# A trial reply whose position in the rendered text is unique: no template writes this private-use
# character.
_PLACEHOLDER = "\ue000"

Write = Callable[[Messages | Conversation], str]


class StepTextError(DataError):
    """A step is blank, or contains the separator."""


@dataclass(frozen=True)
class StepSpan:
    """The position of a step in a sample.

    Attributes:
        message: index of the message; None in raw text.
        start, end: range of characters in the raw text, or in the output of ``flatten_message`` for
            the message. A list of text parts counts as one string, joined by the separator.
    """

    message: int | None
    start: int
    end: int


@dataclass(frozen=True)
class SteppedText:
    """A sample cut into pieces, which are tokenized one by one.

    Attributes:
        pieces: strings whose concatenation is the rendered sample.
        read: indices of the S pieces at whose last token a reward is read.
        spans: the S turns or steps that these rewards are for.
    """

    pieces: tuple[str, ...]
    read: tuple[int, ...]
    spans: tuple[StepSpan, ...]


def aggregate_steps(rewards: np.ndarray, rule: Aggregate, scale: str = SCORE) -> np.ndarray:
    """Combine the rewards ``[S, A]`` of a sample's steps into one reward ``[A]`` float32.

    Args:
        rule: how to combine. ``product`` is ``sum log sigmoid(r)``, as in training
            (``losses/pairwise.py``); if the rewards are probabilities already, it is ``sum log r``.
        scale: the contract's ``reward_scale``.
    """
    if rule is Aggregate.last:
        return rewards[-1]
    if rule is Aggregate.min:
        return rewards.min(axis=0)
    rewards64 = rewards.astype(np.float64)
    if rule is Aggregate.mean:
        return rewards64.mean(axis=0).astype(np.float32)
    if scale == PROBABILITY:
        # Clamp, because the logarithm of a probability that fp32 has rounded to 0 would be -inf.
        logarithms = np.log(np.maximum(rewards64, np.finfo(np.float32).tiny))
    else:
        logarithms = -np.logaddexp(0, -rewards64)
    return logarithms.sum(axis=0).astype(np.float32)


def aggregate_texts(rewards: np.ndarray, bounds: Sequence[int], rule: Aggregate) -> np.ndarray:
    """Combine the rewards of each sample's steps into one reward, for N samples.

    Args:
        rewards: ``[S, A]``, the steps of all samples one after another.
        bounds: N + 1 bounds; the rows of sample n are ``rewards[bounds[n] : bounds[n + 1]]``.

    Returns:
        ``[N, A]`` float32.
    """
    aggregated = [aggregate_steps(rewards[start:end], rule) for start, end in pairwise(bounds)]
    return np.array(aggregated, dtype=np.float32).reshape(-1, rewards.shape[1])


def step_texts(text: Text, spans: Sequence[StepSpan], separator: str | None) -> list[str]:
    """Return the text of each step, without separators and without the chat template's strings.

    Args:
        separator: the contract's ``step_separator``; None for ``turns``.
    """
    if isinstance(text, str):
        return [text[span.start : span.end] for span in spans]
    if separator is not None:
        reply = _join_reply(text, separator)
        return [reply[span.start : span.end] for span in spans]
    messages = messages_of(text)
    return [flatten_message(messages[span.message or 0])[span.start : span.end] for span in spans]


def split_steps(
    text: Text, position: str, separator: str | None, write: Write, tail: str
) -> SteppedText:
    """Render a sample in the normal form, and cut it into steps by the rule ``position``.

    Args:
        position: one of ``STEPPED``.
        separator: the contract's ``step_separator``; None for ``turns``.
        write: renders a conversation by the contract's template.
        tail: what the template writes after a reply; without a template, the EOS token's text.

    Raises:
        DataError: the steps cannot be found in the rendered sample.
    """
    if position == TURNS:
        return _cut_at_turns(text, write)
    assert separator is not None
    reply = _drop_tail(text, tail) if isinstance(text, str) else _join_reply(text, separator)
    steps = _find_steps(reply, separator)
    if position == ANSWERS:
        return _cut_at_answers(text, reply, steps, write, tail)
    if position == MARKS and not reply[steps[-1].end :].startswith(separator):
        reply = reply[: steps[-1].end] + separator
    if isinstance(text, str):
        rendered, start, number = reply if position == MARKS else text, 0, None
    else:
        rendered = write(_replace_reply(text, reply))
        number = len(messages_of(text)) - 1
        if messages_of(text)[-1].get("tool_calls") and reply.strip():
            start = _locate_before_calls(rendered, text, reply, write)
        else:
            start = _locate_reply(rendered, reply, tail)
    spans = tuple(StepSpan(number, step.start, step.end) for step in steps)
    ends = [start + step.end for step in steps]
    if position == MARKS:
        return _cut_at_marks(rendered, ends, separator, spans)
    pieces = _cut(rendered, [*ends[:-1], len(rendered)])
    return SteppedText(pieces, tuple(range(len(pieces))), spans)


def _cut_at_turns(text: Text, write: Write) -> SteppedText:
    messages = messages_of(text)
    if isinstance(text, str):
        return SteppedText((text,), (0,), (StepSpan(None, 0, len(text)),))
    turns = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
    prefixes = _render_prefixes(text, messages, turns, write)
    pieces = _cut(prefixes[-1], [len(prefix) for prefix in prefixes])
    spans = tuple(StepSpan(number, 0, len(flatten_message(messages[number]))) for number in turns)
    return SteppedText(pieces, tuple(range(len(pieces))), spans)


def _cut_at_answers(
    text: Text, reply: str, steps: Sequence[StepSpan], write: Write, tail: str
) -> SteppedText:
    messages = messages_of(text)
    if isinstance(text, str) or len(messages) < 2 or messages[-2]["role"] != "user":
        raise DataError(
            "the sample has no user message right before its last reply; add one, because "
            f"model.head.reads={ANSWERS} appends the first step to it"
        )
    *history, question, _ = messages
    contents = [reply[step.start : step.end].strip() for step in steps]
    contents[0] = f"{flatten_message(question)} {contents[0]}"
    answer = {"role": "assistant", "content": _ANSWER}
    turns = [
        turn for content in contents for turn in ({"role": "user", "content": content}, answer)
    ]
    answer_numbers = range(len(history) + 1, len(history) + len(turns), 2)
    prefixes = _render_prefixes(text, [*history, *turns], answer_numbers, write)
    end = _ANSWER + tail
    if not all(prefix.endswith(end) for prefix in prefixes):
        raise DataError(
            f"the chat template does not always end the answer {_ANSWER!r} to a step with {end!r}, "
            "so the answer is not found; wanted another template (model.data.template)"
        )
    pieces = _cut(prefixes[-1], [len(prefix) - len(end) for prefix in prefixes])
    spans = tuple(StepSpan(len(messages) - 1, step.start, step.end) for step in steps)
    return SteppedText(pieces, tuple(range(len(pieces))), spans)


def _render_prefixes(
    text: Messages | Conversation, messages: Messages, turns: Sequence[int], write: Write
) -> list[str]:
    """Render the conversation up to each turn that has a reward.

    Args:
        messages: the messages to render in place of those of ``text``.
        turns: indices in ``messages`` of the turns that have a reward.

    Returns:
        A string for each turn: the conversation up to the end of this turn.

    Raises:
        DataError: one of the strings is not a prefix of the next string, or of the last one.
    """
    prefixes = [write(with_messages(text, messages[: number + 1])) for number in turns]
    full_text = prefixes[-1]
    for number, prefix, longer in zip(turns, prefixes, prefixes[1:], strict=False):
        if not longer.startswith(prefix) or not full_text.startswith(longer):
            raise DataError(
                f"messages[{number}]: the chat template writes this turn differently when more "
                "turns follow, so it cannot have a separate reward; wanted another template "
                "(model.data.template), or model.head.reads=last_token"
            )
    return prefixes


def _cut_at_marks(
    rendered: str, ends: Sequence[int], separator: str, spans: tuple[StepSpan, ...]
) -> SteppedText:
    # Cut on both sides of each separator, so that the separator always has the same tokens.
    cuts = [position for end in ends for position in (end, end + len(separator))]
    pieces = _cut(rendered, cuts)
    if set(pieces[1::2]) != {separator}:
        raise DataError(
            f"the chat template does not write the separator {separator!r} after the last step, "
            "because it strips replies; wanted model.head.reads=step_ends, or another separator "
            "(model.data.step_separator)"
        )
    return SteppedText(pieces, tuple(range(1, len(pieces), 2)), spans)


def _cut(rendered: str, ends: Sequence[int]) -> tuple[str, ...]:
    return tuple(rendered[start:end] for start, end in zip([0, *ends], ends, strict=False))


def _drop_tail(text: str, tail: str) -> str:
    """Return a raw text without ``tail`` at its end; whitespace around the tail may be missing."""
    mark, body = tail.strip(), text.rstrip()
    return body.removesuffix(mark) if mark and body.endswith(mark) else text


def _join_reply(text: Messages | Conversation, separator: str) -> str:
    """Return the reply, the content of the last message.

    If the content is a list of parts, each of which is a step, they are joined by ``separator``.

    Raises:
        StepTextError: a part is blank, or contains the separator.
    """
    content = messages_of(text)[-1]["content"]
    if not isinstance(content, list):
        return content or ""
    steps = [part["text"] for part in content]
    for number, step in enumerate(steps):
        if separator in step or not step.strip():
            raise StepTextError(
                f"step {number + 1} of {len(steps)}: got {short(step)!r}, wanted one that is not "
                "blank and does not contain the separator "
                f"{separator!r} (model.data.step_separator)"
            )
    return separator.join(steps)


def _replace_reply(text: Messages | Conversation, reply: str) -> Messages | Conversation:
    *history, last = messages_of(text)
    if last["content"] is None and not reply:
        return text
    return with_messages(text, [*history, {**last, "content": reply}])


def _find_steps(reply: str, separator: str) -> list[StepSpan]:
    """Find the steps between separators; a reply of only whitespace is one step.

    ``message`` of the returned spans is None; the caller sets it.
    """
    steps, start = [], 0
    while start <= len(reply):
        end = reply.find(separator, start)
        end = len(reply) if end < 0 else end
        if reply[start:end].strip():
            steps.append(StepSpan(None, start, end))
        start = end + len(separator)
    return steps or [StepSpan(None, 0, len(reply))]


def _locate_reply(rendered: str, reply: str, tail: str) -> int:
    """Return the offset such that ``reply[i]`` is at ``rendered[i + offset]``.

    If the template strips whitespace from the beginning of the reply, the offset is smaller than
    the position at which the stripped reply begins: by the number of stripped characters.

    Args:
        tail: what the template writes after a reply; the search ends before it.

    Raises:
        DataError: the template writes the reply in another form.
    """
    end = len(rendered) - len(tail) if tail and rendered.endswith(tail) else len(rendered)
    occurrences = [
        (position + len(variant), position - num_stripped)
        for num_stripped, variant in _list_stripped_variants(reply)
        if (position := rendered.rfind(variant, 0, end)) >= 0
    ]
    if not occurrences:
        raise _make_not_found_error()
    # The prompt may quote the reply, even with whitespace that the template strips from the reply
    # itself. The reply follows the prompt, so it is the occurrence that ends last.
    _, offset = max(occurrences, key=lambda occurrence: occurrence[0])
    return offset


def _locate_before_calls(
    rendered: str, text: Messages | Conversation, reply: str, write: Write
) -> int:
    """Return the offset of ``_locate_reply`` for a reply that is followed by tool calls.

    The calls may repeat the reply, and ``_locate_reply``, which searches from the end, would find
    the repetition. So the conversation is rendered with a placeholder as the reply, and the reply
    begins where the placeholder does.
    """
    position = write(_replace_reply(text, _PLACEHOLDER)).find(_PLACEHOLDER)
    for num_stripped, variant in _list_stripped_variants(reply):
        if position >= 0 and rendered.startswith(variant, position):
            return position - num_stripped
    raise _make_not_found_error()


def _list_stripped_variants(reply: str) -> Iterator[tuple[int, str]]:
    """Yield each form in which templates write a reply, as ``(num_stripped, form)``.

    Templates write a reply unchanged, or without the whitespace at its beginning, its end, or
    both. ``num_stripped`` is the number of characters that were cut from the beginning.
    """
    for num_stripped in (0, len(reply) - len(reply.lstrip())):
        yield num_stripped, reply[num_stripped:]
        yield num_stripped, reply[num_stripped:].rstrip()


def _make_not_found_error() -> DataError:
    return DataError(
        "the chat template changes the reply, so its steps are not found; wanted "
        "model.head.reads=last_token or turns, or another template"
    )
