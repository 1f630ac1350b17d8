"""Trials of a chat template before it is used: what it writes, whether it ends, and its date.

An untrusted template may not end: Jinja's sandbox keeps it from files and code, but not from loops,
nor from asking for all memory. So it is first run in a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

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
from nemo_aligner.contract.templates import (
    BUILT_IN_TEMPLATES,
    KWARGS_KEY,
    PROBE,
    TEMPLATE_KEY,
    Write,
    end_of_turn,
    find_frames,
    for_trials,
    names_in,
    needs_tools,
    render,
    tool_call_turn,
    tool_result,
    variables_of,
    write_probe,
)
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import ConfigError, DataError, short, shown

# Variables that the caller of a template sets, and no setting may replace.
_GIVEN = (
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
_TIMEOUT_SECONDS = 120  # of a machine that is busy; CPU time is what ends the trial


def check_template(template: str, setting: str, tokenizer: Tokenizer, kwargs: str = "") -> None:
    """Refuse a template whose text would be wrong, or another one tomorrow.

    ``kwargs`` are the contract's ``chat_template_kwargs``.

    Raises:
        ConfigError: it depends on the date, does not write a question and its answer, writes BOS
            twice, or writes nothing, or the same thing twice, after the reply; with what to set. Or
            it does not read one of ``kwargs``.
    """
    where, built_in = f"{TEMPLATE_KEY}: {setting}", ", ".join(BUILT_IN_TEMPLATES)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    try:
        _check_kwargs(template, kwargs)
        check_it_ends(template, bos, eos, kwargs)
        if is_dated(template, bos, eos, kwargs):
            raise ConfigError(
                f"{where}: its text depends on the date, so scores change from day to day; set "
                f"it to one of {built_in}, or to a file of it with the date written out"
            )
        text = write_probe(template, bos, eos, kwargs)
    except DataError as error:
        raise ConfigError(f"{where}: {error}; set it to one of {built_in}, or a file") from error
    for part in (message["content"] for message in PROBE):
        if part not in text:
            raise ConfigError(
                f"{where}: it writes {shown(text)}, without the conversation's {part!r}; set it to "
                f"one of {built_in}, or to a file of a chat template"
            )
    if bos and tokenizer.encode(text)[:2] == [tokenizer.bos_id] * 2:
        raise ConfigError(
            f"{where}: it writes BOS ({bos!r}) twice; set it to a file of it with one"
        )
    end = "".join(end_of_turn(template, bos, eos, kwargs).split())
    if not end:
        raise ConfigError(
            f"{where}: it writes nothing after the reply, so a complete one looks like one that "
            f"was cut off; set it to one of {built_in}, or to a file of it that ends a turn"
            + ("" if eos else " (plain and zephyr end with EOS, which this tokenizer lacks)")
        )
    if end[: len(end) // 2] * 2 == end:
        raise ConfigError(
            f"{where}: it ends the reply twice ({short(end)}); set it to a file that does once"
        )


def _check_kwargs(template: str, kwargs: str) -> None:
    """Raises ConfigError: the template does not read one of them, or is given it anyway."""
    known = sorted(variables_of(template).difference(_GIVEN))
    for name in json.loads(kwargs or "{}"):
        if name not in known:
            raise ConfigError(
                f"{KWARGS_KEY}: got {name!r:.60}, which the chat template ignores; wanted "
                + (", ".join(known) or "none, as it reads none")
            )


def is_dated(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> bool:
    """True if a template writes the date, and so another text tomorrow."""
    # Two days that differ in everything that strftime can say of one.
    texts = {write_probe(template, bos_token, eos_token, kwargs, day.strftime) for day in _DAYS}
    return len(texts) > 1


# 26 July 2024, 00:00, by each of strftime's letters, in English whatever the locale. It is the date
# that Llama 3's templates write where they are not told the day. It is part of contracts.
_FROZEN_DAY = {
    **{"a": "Fri", "A": "Friday", "w": "5", "u": "5", "d": "26", "-d": "26", "e": "26", "j": "208"},
    **{"b": "Jul", "h": "Jul", "B": "July", "m": "07", "-m": "7", "y": "24", "Y": "2024"},
    **{"C": "20", "g": "24", "G": "2024", "U": "29", "V": "30", "W": "30", "-j": "208"},
    **{"D": "07/26/24", "F": "2024-07-26", "x": "07/26/24", "c": "Fri Jul 26 00:00:00 2024"},
    **{"H": "00", "-H": "0", "k": " 0", "I": "12", "-I": "12", "l": "12", "p": "AM", "P": "am"},
    **{"M": "00", "-M": "0", "S": "00", "-S": "0", "f": "000000", "z": "", "Z": ""},
    **{"R": "00:00", "T": "00:00:00", "X": "00:00:00", "r": "12:00:00 AM"},
}


def _frozen_function() -> str:
    """A macro in place of the function; the line break behind it is none of the text."""
    replaced = "".join(f".replace('%{form}','{said}')" for form, said in _FROZEN_DAY.items())
    # Between two %% no letter is meant.
    return (
        f"{{%- macro {_DATE}(format) -%}}{{%- for part in format.split('%%') -%}}"
        f"{{{{ '' if loop.first else '%' }}}}{{{{ part{replaced} }}}}"
        "{%- endfor -%}{%- endmacro %}\n"
    )


@lru_cache(maxsize=8)
def freeze_date(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> str:
    """A template that writes today's date, with 26 July 2024 for every day; others as they are.

    A macro at its beginning takes the place of the function that says the day, for whoever renders
    it. What is done is said in a line, once.
    """
    from nemo_aligner.utils.console import say

    try:
        if _DATE not in variables_of(template):
            return template
        check_it_ends(template, bos_token, eos_token, kwargs)
        if not is_dated(template, bos_token, eos_token, kwargs):
            return template
    except DataError:  # which check_template says
        return template
    say("the chat template writes today's date: it gets 26 July 2024, so that scores stay the same")
    return _frozen_function() + template


@lru_cache(maxsize=8)
def check_it_ends(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> None:
    """Render short conversations by ``template`` elsewhere, with calls of tools, too.

    Raises:
        DataError: it cannot be, or not within 5 s and 1 GiB.
    """
    where = os.pathsep.join(filter(None, sys.path))
    try:
        trial = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps([template, bos_token, eos_token, kwargs]).encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            env={**os.environ, "PYTHONPATH": where},
        )
        problem, status = trial.stdout.decode("utf-8", "replace"), trial.returncode
    except subprocess.TimeoutExpired:
        problem, status = "", -1
    if status < 0:
        raise DataError(
            "the chat template cannot write this conversation: it takes more than "
            f"{_CPU_SECONDS} s or {_BYTES >> 20} MiB"
        )
    if problem:
        raise DataError(problem)
    if status:
        raise DataError(f"the chat template cannot be tried: {trial.stderr[-1000:]!r}")


# Which message fields beyond role and content it writes.
#
# A template that never writes tool calls would turn a conversation with one into another without:
# such a conversation is refused, and the error names the key that is not written.
# The reasoning of earlier turns, names and call ids are left to the template: it may drop them.

# Words that no template writes itself, and that JSON and filters leave unchanged.
_FIRST, _SECOND, _THIRD, _FOURTH = "Zqfirstv", "Zqsecondv", "Zqthirdv", "Zqfourthv"
_KNOWN_KEYS = ("role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id")
# Every dialogue has these.
_USUAL = ("system", "user", "assistant")
_NULLS: tuple[Message, ...] = ({"content": None}, {}, {"content": ""})


def _said(role: str, content: Any = _FIRST, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


class TemplateReading:
    """The trials of one template, each made where it is first asked for.

    ``write`` raises DataError where the template refuses a conversation; ``names`` are those that
    its code has; ``origin`` says in errors which template it is.
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
        self._arguments_are_text = False

    def adapt(self, text: Messages | Conversation) -> Messages | Conversation:
        """A conversation in the words that the template reads.

        Raises:
            DataError: it has what the template does not write; the message names it.
        """
        messages = messages_of(text)
        if isinstance(text, Conversation):
            self._check(not text.tools or self.writes_tools, "tools")
            self._check(not text.documents or self.writes_documents, "documents")
        if self._needs_tools and not (isinstance(text, Conversation) and text.tools):
            raise DataError(
                f"tools: got none, and the chat template{self._origin} writes no conversation "
                "without; wanted tools beside the messages, or training with a template that "
                "needs none (model.data.template=chatml)"
            )
        if is_plain(messages) and all(message["role"] in _USUAL for message in messages):
            return text
        last = len(messages) - 1
        adapted = [
            self._adapt(message, f"messages[{number}]", number == last)
            for number, message in enumerate(messages)
        ]
        return with_messages(text, adapted)

    def try_all(self) -> None:
        """Make every trial."""
        _ = self.writes_tools, self.writes_documents
        _ = self.reasoning(calls=True), self.reasoning(calls=False)
        _ = self._null_content(calls=True), self._null_content(calls=False)
        for role in ("developer", "function", "tool"):
            self._writes_role(role)
        for role in ("system", "user", "assistant", "tool"):
            self._reads_parts(role)

    @cached_property
    def writes_tools(self) -> bool | None:
        """True if tools are written, None if no trial was possible."""
        functions = {"name": _FIRST, "description": "d", "parameters": _NO_PARAMETERS}
        tools = [{"type": "function", "function": functions}]
        dialogues = [[_said(role, "a") for role in roles] for roles in (_USUAL[1:], _USUAL)]
        return self._writes([_FIRST], [Conversation(each, tools=tools) for each in dialogues])

    @cached_property
    def writes_documents(self) -> bool | None:
        """True if documents are written, None if no trial was possible."""
        documents = [{"title": "t", "text": _FIRST, "contents": _FIRST, "doc_id": "1"}]
        dialogue = [_said("user", "a"), _said("assistant", "b")]
        return self._writes([_FIRST], [Conversation(dialogue, documents=documents)])

    @cached_property
    def writes_calls(self) -> bool | None:
        """True if tool calls are written, None if no trial was possible."""
        call = tool_call_turn(_FIRST, _SECOND)
        trials = [
            trial
            for null in _NULLS
            for trial in _dialogues_with({**_without_content(call), **null})
        ]
        found = self._writes([_FIRST, _SECOND], trials)
        if not found:
            texts = [[_with_arguments_as_text(turn) for turn in trial] for trial in trials]
            self._arguments_are_text = bool(self._writes([_FIRST, _SECOND], texts))
        return found or self._arguments_are_text or found

    def _null_content(self, calls: bool) -> Message:
        """Substitute for content that is null, beside tool calls or with reasoning alone.

        The first of null, nothing and an empty text that the template takes and does not write as a
        word.
        """
        if calls not in self._nulls:
            turn: Message = {
                "role": "assistant",
                self.reasoning(calls=False) or REASONING[0]: _THIRD,
            }
            if calls and self.writes_calls is not None:
                turn = self._with_arguments(_without_content(tool_call_turn(_FIRST, _SECOND)))
            empty = _dialogues_with({**turn, "content": ""})
            self._nulls[calls] = next(
                null
                for null in _NULLS
                if all(map(self._is_as_empty, _dialogues_with({**turn, **null}), empty))
            )
        return self._nulls[calls]

    def reasoning(self, calls: bool) -> str | None:
        """Key under which the template reads a last reply's reasoning, with tool calls or without.

        None if it writes none.
        """
        if calls not in self._reasonings:
            reply = tool_call_turn() if calls else _said("assistant")
            found = [name for name in REASONING if name in self._names]
            self._reasonings[calls] = next(
                (
                    name
                    for name in found
                    if self._writes([_SECOND], [[_said("user", "a"), {**reply, name: _SECOND}]])
                    is not False
                ),
                None,
            )
        return self._reasonings[calls]

    def _adapt(self, given: Message, where: str, is_last: bool) -> Message:
        message = dict(given)
        role = message["role"]
        if role not in _USUAL:
            self._check(self._writes_role(role), f"{where}.role {role!r}")
        if "tool_calls" in message:
            self._check(self.writes_calls, f"{where}.tool_calls")
            message = self._with_arguments(message)
        if REASONING[0] in message:
            name = self.reasoning("tool_calls" in message)
            is_said = is_last and message[REASONING[0]].strip()
            self._check(name is not None or not is_said, f"{where}.{REASONING[0]}")
            # Of an earlier turn it may be written all the same.
            name = name or self.reasoning("tool_calls" not in message)
            if name is not None:
                message[name] = message.pop(REASONING[0])
        for key in message:
            if key not in (*_KNOWN_KEYS, *REASONING) and key not in self._names:
                raise DataError(
                    f"{where}: got the key {key!r:.60}, which the chat template ignores; "
                    f"wanted {', '.join(_KNOWN_KEYS)} alone"
                )
        return self._with_content(message)

    def _with_arguments(self, message: Message) -> Message:
        return _with_arguments_as_text(message) if self._arguments_are_text else message

    def _with_content(self, message: Message) -> Message:
        content = message["content"]
        if content is None:
            null = self._null_content(calls="tool_calls" in message)
            return {**_without_content(message), **null}
        if isinstance(content, list) and not self._reads_parts(message["role"]):
            return {**message, "content": joined_content(content)}
        return message

    def _writes_role(self, role: str) -> bool | None:
        if role not in self._written_roles:
            ends = [_said("user", "a"), _said("assistant", "b")]
            if role == "developer":
                trials = [[_said(role), *ends], [_said("system", "c"), _said(role), *ends]]
            else:
                result = {**tool_result(_FIRST), "role": role}
                calls = [tool_call_turn(content=content) for content in ("", "c")]
                trials = [[ends[0], call, result, ends[1]] for call in calls]
                trials.append([*ends, {"role": role, "content": _FIRST}, ends[1]])
            self._written_roles[role] = self._writes([_FIRST], trials)
        return self._written_roles[role]

    def _reads_parts(self, role: str) -> bool:
        """True if parts of text are written as one text is, and all of several."""
        if role not in self._read_parts:
            one, two = ([_part(each) for each in some] for some in ((_FIRST,), (_FIRST, _SECOND)))
            whole, parted, several = (
                self._try(_dialogue_of(role, content)) for content in (_FIRST, one, two)
            )
            self._read_parts[role] = (
                whole is not None
                and whole == parted
                and several is not None
                and several.count(_FIRST) == several.count(_SECOND) == whole.count(_FIRST)
                and "'type'" not in several
                and '"type": "text"' not in several
            )
        return self._read_parts[role]

    def _is_as_empty(self, trial: Messages, with_empty: Messages) -> bool:
        wanted, got = self._try(with_empty), self._try(trial)
        if wanted is None:
            return True
        return got is not None and got.count("None") <= wanted.count("None")

    def _writes(
        self, words: Sequence[str], trials: Sequence[Messages | Conversation]
    ) -> bool | None:
        """True if a trial is written with all words; None if none can be written."""
        texts = [text for text in map(self._try, trials) if text is not None]
        return any(all(word in text for word in words) for text in texts) if texts else None

    def _try(self, trial: Messages | Conversation) -> str | None:
        try:
            return self._write(trial)
        except DataError:
            return None

    def _check(self, is_written: object, what: str) -> None:
        """Refuse what is not written; None, untried, passes: the template itself may refuse it."""
        if is_written is False:
            raise DataError(
                f"{what}: the chat template{self._origin} does not write that, so the score would "
                "be of another conversation; wanted messages without, or training with a template "
                "that writes it, as every built-in one does (model.data.template=chatml)"
            )


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}


def _without_content(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "content"}


def _with_arguments_as_text(message: Message) -> Message:
    """Write arguments as JSON text, as the chat API has them; some templates expect that."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        text = json.dumps(function["arguments"], ensure_ascii=False)
        changed = {**function, "arguments": text}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "tool_calls": calls}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _dialogues_with(turn: Message) -> list[Messages]:
    """A turn as the last one, and with the result of a tool and a reply behind it."""
    asked = _said("user", "a")
    return [[asked, turn], [asked, turn, tool_result(_FOURTH), _said("assistant", "b")]]


def _dialogue_of(role: str, content: Any) -> Messages:
    turn = {"role": role, "content": content}
    asked, answered = _said("user", "a"), _said("assistant", "b")
    if role == "user":
        return [turn, answered]
    if role == "assistant":
        return [asked, turn]
    if role in ("tool", "function"):
        return [asked, tool_call_turn(), {**tool_result(), **turn}, answered]
    return [turn, asked, answered]


@lru_cache(maxsize=8)
def template_reading(
    template: str, bos_token: str, eos_token: str, kwargs: str = "", origin: str = ""
) -> TemplateReading:
    """The trials of a template that ``render`` writes, kept for the templates used last.

    Raises:
        DataError: it is no valid template.
    """

    def write(text: Messages | Conversation) -> str:
        return render(template, text, bos_token, eos_token, kwargs)

    return TemplateReading(write, names_in(template), origin)


def _main() -> None:
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_DATA, _BYTES),
    ):
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit, most))
    # The limits hold before anything of the template is looked at.
    given = json.load(sys.stdin)
    try:
        if not is_dated(*given):  # or it is refused for that
            template, *rest = given
            find_frames(lambda turns: render(template, turns, *rest))
            reading = TemplateReading(
                lambda text: render(template, text, *rest), names_in(template)
            )
            reading.try_all()
    except DataError as error:
        sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))


if __name__ == "__main__":
    _main()
