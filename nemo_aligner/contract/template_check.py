"""Checks of a chat template: what it renders, whether it terminates, whether it writes the date.

- ``check_template`` checks a template before training.
- ``check_terminates`` renders it in a subprocess with limits: Jinja's sandbox blocks files and
  code, but not endless loops or the use of all memory.
- ``freeze_date`` replaces today's date by a fixed one.
- ``TemplateReading`` finds by trials which message fields a template renders, and rejects or adapts
  conversations accordingly.

``check_terminates`` starts this module as a subprocess (``python -m``).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from nemo_aligner.contract.chat_template import CACHED_TEMPLATES, ChatTemplate
from nemo_aligner.contract.messages import (
    REASONING,
    Conversation,
    Message,
    Messages,
    is_plain,
    joined_content,
    messages_of,
    with_messages,
)
from nemo_aligner.contract.template_trials import (
    PROBE,
    Write,
    find_frames,
    for_trials,
    needs_tools,
    tool_call_turn,
    tool_result,
)
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES, KWARGS_KEY, TEMPLATE_KEY
from nemo_aligner.utils.errors import ConfigError, DataError, short, shown

if TYPE_CHECKING:
    from nemo_aligner.contract.tokenizer import Tokenizer

# Variables that ``ChatTemplate.render`` passes to a template, so no setting may replace them.
_RESERVED_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "strftime_now",
    "raise_exception",
)
_DATE = "strftime_now"
_DAYS = (datetime(2001, 2, 3), datetime(2034, 11, 30, 13, 47, 59))
_CPU_SECONDS = 5
_BYTES = 2**30
# Limit of wall time. Normally the limit of CPU time ends a trial first, except on a busy machine.
_TIMEOUT_SECONDS = 120


def check_template(template: ChatTemplate, setting: str, tokenizer: Tokenizer) -> None:
    """Check that a template is fit for training: complete and independent of the date.

    Args:
        setting: value of ``model.data.template``, for error messages.

    Raises:
        ConfigError: the template depends on the date, omits parts of a conversation, writes BOS
            twice, ends a reply with nothing or with the same string twice, or does not use one of
            its ``kwargs``. The message says what to set.
    """
    prefix, built_in = f"{TEMPLATE_KEY}: {setting}", ", ".join(BUILT_IN_TEMPLATES)
    bos, eos = template.bos_token, template.eos_token
    try:
        _check_kwargs(template)
        check_terminates(template)
        if is_dated(template):
            raise ConfigError(
                f"{prefix}: the template writes today's date, so scores change from day to day; "
                f"set one of {built_in}, or a copy of the template with a fixed date"
            )
        text = template.render_probe()
    except DataError as error:
        raise ConfigError(f"{prefix}: {error}; set one of {built_in}, or a file") from error
    for part in (message["content"] for message in PROBE):
        if part not in text:
            raise ConfigError(
                f"{prefix}: the template renders a trial conversation as {shown(text)}, without "
                f"the message {part!r}; set one of {built_in}, or the file of another template"
            )
    if bos and tokenizer.encode(text)[:2] == [tokenizer.bos_id] * 2:
        raise ConfigError(
            f"{prefix}: the template writes BOS ({bos!r}) twice; set a copy that writes it once"
        )
    end = "".join(template.after_reply().split())
    if not end:
        raise ConfigError(
            f"{prefix}: the template writes nothing after the reply, so a complete reply looks "
            f"like one that was cut off; set one of {built_in}, or a copy of the template that "
            "ends each turn"
            + ("" if eos else " (plain and zephyr end with EOS, which this tokenizer lacks)")
        )
    if end[: len(end) // 2] * 2 == end:
        raise ConfigError(
            f"{prefix}: the template ends the reply twice ({short(end)}); set a copy of the "
            "template that ends it once"
        )


def _check_kwargs(template: ChatTemplate) -> None:
    """Raise ConfigError for a variable that the template does not use, or that ``render`` sets."""
    usable = sorted(template.variables.difference(_RESERVED_VARIABLES))
    for name in json.loads(template.kwargs or "{}"):
        if name not in usable:
            raise ConfigError(
                f"{KWARGS_KEY}: got {name!r:.60}, which the chat template does not use; wanted "
                + (", ".join(usable) or "none, because this template has no variables")
            )


def is_dated(template: ChatTemplate) -> bool:
    """Return whether a template writes today's date, which would change the tokens every day."""
    # The two days in _DAYS differ in every field of strftime, so any date makes the texts differ.
    texts = {template.render_probe(strftime_now=day.strftime) for day in _DAYS}
    return len(texts) > 1


# 26 July 2024, 00:00, for each letter of strftime, in English independent of the locale. Llama 3's
# templates write this date if no date is passed. Never change it: stored contracts contain it.
_FROZEN_DAY = {
    **{"a": "Fri", "A": "Friday", "w": "5", "u": "5", "d": "26", "-d": "26", "e": "26", "j": "208"},
    **{"b": "Jul", "h": "Jul", "B": "July", "m": "07", "-m": "7", "y": "24", "Y": "2024"},
    **{"C": "20", "g": "24", "G": "2024", "U": "29", "V": "30", "W": "30", "-j": "208"},
    **{"D": "07/26/24", "F": "2024-07-26", "x": "07/26/24", "c": "Fri Jul 26 00:00:00 2024"},
    **{"H": "00", "-H": "0", "k": " 0", "I": "12", "-I": "12", "l": "12", "p": "AM", "P": "am"},
    **{"M": "00", "-M": "0", "S": "00", "-S": "0", "f": "000000", "z": "", "Z": ""},
    **{"R": "00:00", "T": "00:00:00", "X": "00:00:00", "r": "12:00:00 AM"},
}


def _write_frozen_macro() -> str:
    """Return a Jinja macro that replaces the function ``strftime_now``.

    Jinja drops the newline after the macro, so it adds nothing to the rendered text.
    """
    replacements = "".join(
        f".replace('%{letter}','{value}')" for letter, value in _FROZEN_DAY.items()
    )
    # ``%%`` is a percent sign, so the format is split there and only its parts are replaced.
    return (
        f"{{%- macro {_DATE}(format) -%}}{{%- for part in format.split('%%') -%}}"
        f"{{{{ '' if loop.first else '%' }}}}{{{{ part{replacements} }}}}"
        "{%- endfor -%}{%- endmacro %}\n"
    )


@lru_cache(maxsize=8)
def freeze_date(template: ChatTemplate) -> ChatTemplate:
    """Make a template that writes today's date write 26 July 2024 instead.

    A macro at the template's beginning shadows ``strftime_now``, so any program that renders the
    template writes the fixed date. A log line reports the change. A template that does not write
    today's date is returned unchanged.
    """
    from nemo_aligner.utils.console import say

    try:
        if _DATE not in template.variables:
            return template
        check_terminates(template)
        if not is_dated(template):
            return template
    except DataError:  # the template is invalid; ``check_template`` will report that
        return template
    say(
        "the chat template writes today's date: it is fixed to 26 July 2024, so that scores do not "
        "change from day to day"
    )
    return replace(template, source=_write_frozen_macro() + template.source)


@lru_cache(maxsize=8)
def check_terminates(template: ChatTemplate) -> None:
    """Render short conversations, also with tool calls, in a subprocess with limits.

    Raises:
        DataError: the template raises an error, or needs more than 5 s of CPU time or 1 GiB.
    """
    python_path = os.pathsep.join(filter(None, sys.path))
    try:
        trial = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(vars(template)).encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            env={**os.environ, "PYTHONPATH": python_path},
        )
        problem, status = trial.stdout.decode("utf-8", "replace"), trial.returncode
    except subprocess.TimeoutExpired:
        problem, status = "", -1
    if status < 0:
        raise DataError(
            "the chat template cannot render this conversation: it needs more than "
            f"{_CPU_SECONDS} s or {_BYTES >> 20} MiB"
        )
    if problem:
        raise DataError(problem)
    if status:
        raise DataError(f"the trial of the chat template failed to start: {trial.stderr[-1000:]!r}")


# Detection of the message fields (besides role and content) that a template renders.
#
# If a template dropped tool calls, the reward would be that of another conversation. So a
# conversation with a key that is not rendered is rejected, and the error names the key. Only the
# reasoning of earlier turns, names and call ids may be dropped.

# Contents of trials: words that no template contains, and that JSON and Jinja filters keep.
_FIRST, _SECOND, _THIRD, _FOURTH = "Zqfirstv", "Zqsecondv", "Zqthirdv", "Zqfourthv"
_KNOWN_KEYS = ("role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id")
# Roles that every template is assumed to render, so no trial tests them.
_USUAL_ROLES = ("system", "user", "assistant")
# The three forms in which conversations have a message without content.
_NULLS: tuple[Message, ...] = ({"content": None}, {}, {"content": ""})


def _make_turn(role: str, content: Any = _FIRST, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


class TemplateReading:
    """The parts of a conversation that one template renders, found by trials.

    Each trial runs when it is first needed.

    Args:
        write: renders a conversation; DataError if the template rejects it.
        names: attribute names and keys that occur in the template's code (``ChatTemplate.names``).
        origin: which template it is, for error messages.
    """

    def __init__(self, write: Write, names: Collection[str], origin: str = "") -> None:
        self._needs_tools = needs_tools(write)
        self._write = for_trials(write)
        self._names = names
        self._origin = f" ({origin})" if origin else ""
        self._written_roles: dict[str, bool | None] = {}
        self._read_parts: dict[str, bool] = {}
        self._reasonings: dict[bool, str | None] = {}
        self._nulls: dict[bool, Message] = {}

    def adapt(self, text: Messages | Conversation) -> Messages | Conversation:
        """Rewrite a conversation into the form that the template renders completely.

        Raises:
            DataError: the template does not render a part of it; the message names the key.
        """
        messages = messages_of(text)
        if isinstance(text, Conversation):
            self._check(not text.tools or self.writes_tools, "tools")
            self._check(not text.documents or self.writes_documents, "documents")
        if self._needs_tools and not (isinstance(text, Conversation) and text.tools):
            raise DataError(
                f"tools: got none, and the chat template{self._origin} renders no conversation "
                "without tools; add tools to the conversation, or train with a template that "
                "needs none (model.data.template=chatml)"
            )
        if is_plain(messages) and all(message["role"] in _USUAL_ROLES for message in messages):
            return text
        last = len(messages) - 1
        adapted = [
            self._adapt_message(message, f"messages[{number}]", number == last)
            for number, message in enumerate(messages)
        ]
        return with_messages(text, adapted)

    def try_all(self) -> None:
        """Run every trial, so that the subprocess of ``check_terminates`` can limit all of them."""
        _ = self.writes_tools, self.writes_documents
        _ = self.reasoning(calls=True), self.reasoning(calls=False)
        _ = self._null_content(calls=True), self._null_content(calls=False)
        for role in ("developer", "function", "tool"):
            self._writes_role(role)
        for role in ("system", "user", "assistant", "tool"):
            self._reads_parts(role)

    @cached_property
    def writes_tools(self) -> bool | None:
        """True if the template renders tools; None if it rejects every trial."""
        functions = {"name": _FIRST, "description": "d", "parameters": _NO_PARAMETERS}
        tools = [{"type": "function", "function": functions}]
        dialogues = [
            [_make_turn(role, "a") for role in roles] for roles in (_USUAL_ROLES[1:], _USUAL_ROLES)
        ]
        trials = [Conversation(dialogue, tools=tools) for dialogue in dialogues]
        return self._writes([_FIRST], trials)

    @cached_property
    def writes_documents(self) -> bool | None:
        """True if the template renders documents; None if it rejects every trial."""
        documents = [{"title": "t", "text": _FIRST, "contents": _FIRST, "doc_id": "1"}]
        dialogue = [_make_turn("user", "a"), _make_turn("assistant", "b")]
        return self._writes([_FIRST], [Conversation(dialogue, documents=documents)])

    @cached_property
    def writes_calls(self) -> bool | None:
        """True if the template renders tool calls; None if it rejects every trial."""
        return self._needs_json_arguments or self._writes_object_arguments

    @cached_property
    def _writes_object_arguments(self) -> bool | None:
        """Like ``writes_calls``, for arguments that are objects."""
        return self._writes([_FIRST, _SECOND], _dialogues_with_calls())

    @cached_property
    def _needs_json_arguments(self) -> bool:
        """True if the template renders tool calls only if their arguments are JSON strings."""
        trials = [[_encode_arguments(turn) for turn in trial] for trial in _dialogues_with_calls()]
        return not self._writes_object_arguments and bool(self._writes([_FIRST, _SECOND], trials))

    def _null_content(self, calls: bool) -> Message:
        """Return the ``content`` that the template accepts in a message without content.

        Three forms are tried in this order: null, no key ``content``, an empty string. The first
        form with which the template neither fails nor writes the word "None" is returned.

        Args:
            calls: whether the message has tool calls; if not, it has only reasoning.
        """
        if calls not in self._nulls:
            key = self.reasoning(calls=False) or REASONING[0]
            turn: Message = {"role": "assistant", key: _THIRD}
            if calls and self.writes_calls is not None:
                turn = _without_content(tool_call_turn(_FIRST, _SECOND))
                turn = _encode_arguments(turn) if self._needs_json_arguments else turn
            empty = _dialogues_with({**turn, "content": ""})
            self._nulls[calls] = next(
                null
                for null in _NULLS
                if all(map(self._is_as_empty, _dialogues_with({**turn, **null}), empty))
            )
        return self._nulls[calls]

    def reasoning(self, calls: bool) -> str | None:
        """Return the key under which the template reads a last reply's reasoning; None without one.

        Args:
            calls: whether the reply has tool calls.
        """
        if calls not in self._reasonings:
            reply = tool_call_turn() if calls else _make_turn("assistant")
            question = _make_turn("user", "a")
            candidates = [name for name in REASONING if name in self._names]
            self._reasonings[calls] = next(
                (
                    name
                    for name in candidates
                    if self._writes([_SECOND], [[question, {**reply, name: _SECOND}]]) is not False
                ),
                None,
            )
        return self._reasonings[calls]

    def _adapt_message(self, original: Message, location: str, is_last: bool) -> Message:
        message = dict(original)
        role = message["role"]
        if role not in _USUAL_ROLES:
            self._check(self._writes_role(role), f"{location}.role {role!r}")
        if "tool_calls" in message:
            self._check(self.writes_calls, f"{location}.tool_calls")
            message = _encode_arguments(message) if self._needs_json_arguments else message
        if REASONING[0] in message:
            name = self.reasoning("tool_calls" in message)
            is_scored = is_last and message[REASONING[0]].strip()
            self._check(name is not None or not is_scored, f"{location}.{REASONING[0]}")
            # With ``name`` None the template renders no reasoning in a last reply like this, but it
            # may in an earlier turn: use the key for replies of the other kind.
            name = name or self.reasoning("tool_calls" not in message)
            if name is not None:
                message[name] = message.pop(REASONING[0])
        for key in message:
            if key not in (*_KNOWN_KEYS, *REASONING) and key not in self._names:
                raise DataError(
                    f"{location}: got the key {key!r:.60}, which the chat template does not use; "
                    f"wanted only {', '.join(_KNOWN_KEYS)}"
                )
        return self._adapt_content(message)

    def _adapt_content(self, message: Message) -> Message:
        content = message["content"]
        if content is None:
            null = self._null_content(calls="tool_calls" in message)
            return {**_without_content(message), **null}
        if isinstance(content, list) and not self._reads_parts(message["role"]):
            return {**message, "content": joined_content(content)}
        return message

    def _writes_role(self, role: str) -> bool | None:
        """Return whether the template renders messages of a role; None if it rejects all trials."""
        if role not in self._written_roles:
            question, answer = _make_turn("user", "a"), _make_turn("assistant", "b")
            if role == "developer":
                turns = [_make_turn(role), question, answer]
                trials = [turns, [_make_turn("system", "c"), *turns]]
            else:
                result = {**tool_result(_FIRST), "role": role}
                calls = [tool_call_turn(content=content) for content in ("", "c")]
                trials = [[question, call, result, answer] for call in calls]
                trials.append([question, answer, {"role": role, "content": _FIRST}, answer])
            self._written_roles[role] = self._writes([_FIRST], trials)
        return self._written_roles[role]

    def _reads_parts(self, role: str) -> bool:
        """Return whether the template renders a list of text parts like the text as one string.

        If it does not, ``_adapt_content`` joins the parts.

        Args:
            role: role of the message with the parts.
        """
        if role not in self._read_parts:
            one_part = [_make_part(_FIRST)]
            two_parts = [_make_part(_FIRST), _make_part(_SECOND)]
            from_string, from_one, from_two = (
                self._try_render(_make_dialogue(role, content))
                for content in (_FIRST, one_part, two_parts)
            )
            self._read_parts[role] = (
                from_string is not None
                and from_string == from_one
                and from_two is not None
                and from_two.count(_FIRST) == from_two.count(_SECOND) == from_string.count(_FIRST)
                and "'type'" not in from_two
                and '"type": "text"' not in from_two
            )
        return self._read_parts[role]

    def _is_as_empty(self, trial: Messages, with_empty: Messages) -> bool:
        """Return whether the template renders a missing content like an empty string.

        The result is False if the template rejects ``trial``, or writes the word "None" more often
        in ``trial`` than in ``with_empty``. If it rejects ``with_empty``, the two cannot be
        compared, and the result is True.

        Args:
            trial: a dialogue that has a message without content.
            with_empty: the same dialogue with an empty string as this content.
        """
        expected, actual = self._try_render(with_empty), self._try_render(trial)
        if expected is None:
            return True
        return actual is not None and actual.count("None") <= expected.count("None")

    def _writes(
        self, words: Sequence[str], trials: Sequence[Messages | Conversation]
    ) -> bool | None:
        """Return whether the template renders all ``words`` in at least one of the ``trials``.

        Return None if the template rejects every trial.
        """
        texts = [text for text in map(self._try_render, trials) if text is not None]
        return any(all(word in text for word in words) for text in texts) if texts else None

    def _try_render(self, trial: Messages | Conversation) -> str | None:
        try:
            return self._write(trial)
        except DataError:
            return None

    def _check(self, is_written: object, location: str) -> None:
        """Raise DataError if ``is_written`` is False.

        None passes: every trial was rejected, so ``render`` will report the template's own error.
        """
        if is_written is False:
            raise DataError(
                f"{location}: the chat template{self._origin} does not render it, so the model "
                "would never see it. Remove it, or train with a template that renders it, as every "
                "built-in one does (model.data.template=chatml)"
            )


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}


def _without_content(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "content"}


def _encode_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON strings.

    This is their form in OpenAI's chat API, and some templates accept only this form.
    """
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        text = json.dumps(function["arguments"], ensure_ascii=False)
        changed = {**function, "arguments": text}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "tool_calls": calls}


def _make_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _dialogues_with(turn: Message) -> list[Messages]:
    """Return two trial dialogues with ``turn``, which may be a message without content.

    In the first dialogue it is the last message; in the second a tool result and a reply follow.
    """
    question = _make_turn("user", "a")
    return [[question, turn], [question, turn, tool_result(_FOURTH), _make_turn("assistant", "b")]]


def _dialogues_with_calls() -> list[Messages]:
    """Return trial dialogues with a tool call, in each form of a message without content."""
    call = _without_content(tool_call_turn(_FIRST, _SECOND))
    return [trial for null in _NULLS for trial in _dialogues_with({**call, **null})]


def _make_dialogue(role: str, content: Any) -> Messages:
    """Return a trial dialogue that contains a turn of this role and content."""
    turn = {"role": role, "content": content}
    question, answer = _make_turn("user", "a"), _make_turn("assistant", "b")
    if role == "user":
        return [turn, answer]
    if role == "assistant":
        return [question, turn]
    if role in ("tool", "function"):
        return [question, tool_call_turn(), {**tool_result(), **turn}, answer]
    return [turn, question, answer]


@lru_cache(maxsize=CACHED_TEMPLATES)
def template_reading(template: ChatTemplate, origin: str = "") -> TemplateReading:
    """Return the ``TemplateReading`` of a template (cached).

    Raises:
        DataError: the template is invalid.
    """
    return TemplateReading(template.render, template.names, origin)


def _main() -> None:
    """Run the trials of a template in the subprocess that ``check_terminates`` starts.

    stdin has the fields of the template as JSON. The first error of the template goes to stdout.
    """
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_DATA, _BYTES),
    ):
        _, hard_limit = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit, hard_limit))
    # The limits are set before the template is read, because the template is untrusted.
    template = ChatTemplate(**json.load(sys.stdin))
    try:
        # If the template writes today's date, the caller of ``check_terminates`` rejects it, or
        # fixes the date and checks the new template. So a dated template needs no more trials.
        if not is_dated(template):
            find_frames(template.render)
            TemplateReading(template.render, template.names).try_all()
    except DataError as error:
        sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))


if __name__ == "__main__":
    _main()
