"""What a chat template writes around the contents of messages, found by rendering trial dialogues.

A trial renders a dialogue whose contents are known, so that all other text is the template's own.
``find_frames`` returns these strings. From them, ``turns.py`` derives the turn markers that no
message may contain. ``for_trials`` adds a tool to trials of templates that require one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nemo_aligner.contract.messages import ROLES, Conversation, Message, Messages, messages_of
from nemo_aligner.utils.errors import DataError

# A function that renders a conversation by one template; DataError if the template rejects it.
Write = Callable[[Messages | Conversation], str]

_QUESTION, _REPLY = "a question", "the reply"
_CALL_ID = "call00001"
PROBE = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
# A tool for trials. It has every field, because templates may fail if one is missing.
TRIAL_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "A word."}},
                "required": ["query"],
            },
        },
    }
]
# Pattern of the contents of a trial: private-use characters, which no template writes.
_CONTENT = re.compile("\ue000[0-9]\ue000")
# Roles of the trial dialogues. There are several, because some templates reject a system prompt
# or a second question.
_TRIALS = (
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant"),
)


def needs_tools(write: Write) -> bool:
    """Return whether a template renders conversations with tools, but rejects those without.

    The tool-use templates of Hermes and Command R+ loop over the tools even if there are none.
    """
    try:
        write(PROBE)
    except DataError:
        try:
            write(Conversation(PROBE, tools=TRIAL_TOOLS))
        except DataError:
            return False
        return True
    return False


def for_trials(write: Write) -> Write:
    """Return ``write``, extended to add a trial tool if the template ``needs_tools``."""

    def write_with_tool(text: Messages | Conversation) -> str:
        documents = text.documents if isinstance(text, Conversation) else None
        tools = text.tools if isinstance(text, Conversation) else None
        return write(Conversation(messages_of(text), tools or TRIAL_TOOLS, documents))

    return write_with_tool if needs_tools(write) else write


class CallFrames(NamedTuple):
    """Strings that a template writes inside tool calls whose arguments it does not escape.

    An argument with such a string would be read as several arguments or calls.

    Attributes:
        values: strings between the value of an argument and the name of the next argument or call.
        names: strings that follow the name of a function or of an argument.
    """

    values: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Frames(NamedTuple):
    """Strings that a template writes around the contents of messages.

    Attributes:
        around: all strings around the contents of one trial dialogue, in order.
        between: strings between two messages, from dialogues with every role.
        end: string after the last reply, stripped.
        results: strings between two tool results, and between the last result and a reply.
        calls: strings inside tool calls, if arguments are not written as JSON.
    """

    around: tuple[str, ...]
    between: tuple[str, ...]
    end: str
    results: tuple[str, ...] = ()
    calls: CallFrames = CallFrames()


def find_frames(write: Write) -> Frames:
    """Find what a template writes around contents, by rendering trial dialogues.

    The string before the last reply is skipped if there is an earlier reply: some templates add
    tags for reasoning there, which a content may legitimately contain.

    Raises:
        DataError: the template cannot render a question and its answer.
    """
    write = for_trials(write)
    end = cut_after_reply(write(PROBE)).strip()
    around = next(filter(None, (_find_around(write, roles) for roles in _TRIALS)), ())
    by_role = (_find_around(write, ("user", "assistant", role, "assistant")) for role in ROLES)
    between = [*around[1:-1], *(piece for pieces in by_role for piece in pieces[1:-1])]
    between = [*dict.fromkeys(between)]
    return Frames(
        around, tuple(between), end, _find_around_results(write), _find_call_frames(write)
    )


def _find_around_results(write: Write) -> tuple[str, ...]:
    """Return the ``results`` of ``Frames``; empty if tool results are not rendered verbatim."""
    question, answer, *second_round = _make_turns(("user", "assistant", "user", "assistant"))
    results = [{**tool_result(), "content": f"\ue000{number}\ue000"} for number in (4, 5)]
    # The first trial ends with a second question and answer, so that the reply to the tool results
    # is not the last reply: some templates add tags in front of that (see ``find_frames``).
    for following in (second_round, []):
        try:
            text = write([question, tool_call_turn(), *results, answer, *following])
        except DataError:
            continue
        # The string before the question and the one before the results (the call) are dropped.
        _, *pieces = _CONTENT.split(text)
        return tuple(pieces[1:3]) if len(pieces) == len(results) + 2 + len(following) else ()
    return ()


def _find_call_frames(write: Write) -> CallFrames:
    """Return the ``calls`` of ``Frames``; empty if calls are not rendered, or are escaped JSON.

    A trial shows if arguments are escaped. It has a single argument, which contains the string that
    the template writes between two arguments (or calls). If the rendered text is the same as for
    two arguments (or calls), the template does not escape.
    """
    function, key, value, second, last = ("zqnamev", "zqkeyv", "zqvaluev", "zqotherv", "zqlastv")

    def write_calls(*calls: tuple[str, dict[str, str]]) -> str:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        turn = tool_call_turn()
        turn["tool_calls"] = [
            {**turn["tool_calls"][0], "function": function} for function in functions
        ]
        return write([PROBE[0], turn])

    values: list[str] = []
    names: list[str] = []
    two_arguments = [(function, {key: value, second: last})]
    two_calls = [(function, {key: value}), (second, {key: last})]
    for calls in (two_arguments, two_calls):
        try:
            text = write_calls(*calls)
            _, in_name, in_key, between, *_ = _split_at(text, (function, key, value, second))
            forged = text[text.index(value) : text.index(last) + len(last)]
            if write_calls((function, {key: forged})) == text:
                values.append(between)
                names += [in_name, in_key]
        except (DataError, ValueError):
            continue
    plain_names = (name for name in names if function not in name)
    return CallFrames(tuple(values), tuple(dict.fromkeys(plain_names)))


def _split_at(text: str, words: Sequence[str]) -> list[str]:
    """Split a text at words that occur in this order; ValueError if they do not."""
    parts = []
    for word in words:
        part, match, text = text.partition(word)
        if not match:
            raise ValueError(word)
        parts.append(part)
    return [*parts, text]


def tool_call_turn(name: str = "look_up", argument: str = "a word", content: str = "") -> Message:
    """Return a trial turn with a tool call, whose id has the form that Mistral's templates need."""
    function = {"name": name, "arguments": {"query": argument}}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def tool_result(content: str = "found") -> Message:
    """Return the result of the tool that ``tool_call_turn`` calls."""
    return {"role": "tool", "content": content, "name": "look_up", "tool_call_id": _CALL_ID}


def _make_turns(roles: Sequence[str]) -> Messages:
    return [{"role": role, "content": f"\ue000{number}\ue000"} for number, role in enumerate(roles)]


def _find_around(write: Write, roles: Sequence[str]) -> tuple[str, ...]:
    """Return the strings that the template writes around the contents of a trial dialogue.

    The result is empty if the template rejects the dialogue. The string before the last reply is
    skipped, because some templates add tags for reasoning there.

    Args:
        roles: the roles of the messages of the dialogue.
    """
    try:
        prefix, *pieces = _CONTENT.split(write(_make_turns(roles)))
    except DataError:
        return ()
    before_last_reply = len(pieces) - 2
    return (
        prefix,
        *(
            piece
            for number, piece in enumerate(pieces)
            if number != before_last_reply or number == 0
        ),
    )


def cut_after_reply(rendered_probe: str) -> str:
    """Return what follows the reply in the rendered ``PROBE``."""
    return rendered_probe.rpartition(_REPLY)[2]
