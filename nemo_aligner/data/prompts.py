"""What is put around the prompts of a file: a system prompt, more words, or a raw text.

A system prompt and a prompt's own words come from files, as NVIDIA-NeMo/RL's data sets have them
(``system_prompt_file``, ``prompt_file``); a raw text is written by OpenRLHF's ``input_template``.
In the last two ``{}`` is where the prompt goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from nemo_aligner.data.records import Rating, Record
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.messages import (
    Conversation,
    Messages,
    Text,
    messages_of,
    said,
    with_messages,
)

PLACE = "{}"


class PromptSettings(Protocol):
    """The section of the settings that says it."""

    system_prompt_file: str | None
    prompt_file: str | None
    input_template: str | None


@dataclass(frozen=True)
class PromptWrapping:
    """What every conversation of a file gets; None leaves it as it is.

    Attributes:
        system: said by the system, first; a conversation that has a system prompt keeps its own.
        words: around the last user turn.
        raw: around the one user turn of a conversation, which becomes a raw text: this and then
            the reply.
    """

    system: str | None = None
    words: str | None = None
    raw: str | None = None

    @classmethod
    def of(cls, settings: PromptSettings, section: str) -> PromptWrapping | None:
        """Those of a section of the settings; None where it says nothing.

        Raises:
            ConfigError: a file cannot be read, or the prompt has no place, or two, in a template.
        """
        files = {"system_prompt_file": settings.system_prompt_file}
        files["prompt_file"] = settings.prompt_file
        system, words = (_read(path, f"{section}.{name}") for name, path in files.items())
        _check_place(words, f"{section}.prompt_file")
        _check_place(settings.input_template, f"{section}.input_template")
        if settings.input_template is not None and system is not None:
            raise ConfigError(
                f"{section}.input_template: a raw text has no turns, so the one of "
                f"{section}.system_prompt_file cannot be put in front; write it into the template"
            )
        found = cls(system, words, settings.input_template)
        return None if found == cls() else found

    def put_around(self, record: Record) -> Record:
        """``record`` with what its conversations get; raw texts stay as they are.

        Raises:
            DataError: a conversation has no user turn to write anything around, or, where it is to
                become a raw text, something else than one user turn and the reply.
        """
        if isinstance(record, Rating):
            return replace(record, response=self._write(record.response))
        return replace(record, texts=tuple(map(self._write, record.texts)))

    def _write(self, text: Text) -> Text:
        if isinstance(text, str):
            return text
        messages = messages_of(text)
        if self.words is not None:
            messages = _around_last_question(messages, self.words)
        if self.raw is not None:
            if isinstance(text, Conversation):
                raise DataError("got tools or documents, wanted none, as input_template has none")
            return _as_raw(messages, self.raw)
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return with_messages(text, messages)


def _read(path: str | None, key: str) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from error


def _check_place(template: str | None, key: str) -> None:
    if template is not None and template.count(PLACE) != 1:
        raise ConfigError(
            f"{key}: got {PLACE} {template.count(PLACE)} times in {template!r:.80}, wanted it "
            "once, where the prompt goes"
        )


def _around_last_question(conversation: Messages, words: str) -> Messages:
    roles = [turn["role"] for turn in conversation]
    if "user" not in roles:
        raise DataError(f"got turns of {', '.join(roles)}, wanted a user's for the prompt file")
    last = len(roles) - 1 - roles[::-1].index("user")
    asked = {**conversation[last], "content": _put(words, said(conversation[last]))}
    return [*conversation[:last], asked, *conversation[last + 1 :]]


def _as_raw(conversation: Messages, template: str) -> str:
    roles = [turn["role"] for turn in conversation]
    if roles != ["user", "assistant"]:
        raise DataError(
            f"got turns of {', '.join(roles)}, wanted one user turn and the reply, which is what "
            "input_template takes"
        )
    return _put(template, said(conversation[0])) + said(conversation[1])


def _put(template: str, prompt: str) -> str:
    # Not str.format: a template may have other braces.
    return template.replace(PLACE, prompt)
