"""Chat templates: a conversation to text, and the checks that a template must pass before training.

A template is Jinja, as Hugging Face tokenizers carry it. The built-in ones write no date, and every
turn with its role:

============  =====================================================================================
``chatml``    ``<|im_start|>user\\n...<|im_end|>\\n``
``llama3``    ``<|start_header_id|>user<|end_header_id|>\\n\\n...<|eot_id|>``, after BOS; Llama 3's
              own, without the dates that later ones write into the system prompt
``zephyr``    ``<|user|>\\n...`` EOS ``\\n``
``plain``     ``User: ...\\n\\nAssistant: ...`` EOS; for models that know no chat tokens
============  =====================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_aligner.errors import ConfigError, DataError, short, shown
from nemo_aligner.text.messages import ROLES, Conversation
from nemo_aligner.text.template_trial import check_it_ends
from nemo_aligner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
)
_LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
)
_ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
)
_PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{{ eos_token }}"
)
BUILT_IN_TEMPLATES = {"chatml": _CHATML, "llama3": _LLAMA3, "plain": _PLAIN, "zephyr": _ZEPHYR}

_KEY = "model.data.template"
_QUESTION, _REPLY = "a question", "the reply"
_PROBE = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
_DAYS = (datetime(2001, 2, 3), datetime(2034, 11, 30))
# What stands for the content of each turn of a trial: no template writes such a character itself.
_CONTENT = re.compile("\ue000[0-9]\ue000")
# Some templates take no system prompt, and some no second question.
_TRIALS = (
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant"),
)


def resolve_template(setting: str, tokenizer: Tokenizer) -> str:
    """The template text that ``model.data.template`` asks for; empty when the tokenizer has none.

    ``tokenizer`` is the tokenizer's own, others are built in, or files.

    Raises:
        ConfigError: there is no such template or file.
    """
    if setting == "tokenizer":
        return tokenizer.chat_template or ""
    if setting in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[setting]
    path = Path(setting)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise ConfigError(
        f"{_KEY}: got {setting!r}, wanted 'tokenizer', "
        f"{', '.join(map(repr, BUILT_IN_TEMPLATES))} or the path of a template file"
    )


def check_template(template: str, setting: str, tokenizer: Tokenizer) -> None:
    """Refuse a template whose text would be wrong, or another one tomorrow.

    Raises:
        ConfigError: it depends on the date, does not write a question and its answer, writes BOS
            twice, or writes nothing, or the same thing twice, after the reply; with what to set.
    """
    where, built_in = f"{_KEY}: {setting}", ", ".join(BUILT_IN_TEMPLATES)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    try:
        check_it_ends(template, bos, eos)
        if is_dated(template, bos, eos):
            raise ConfigError(
                f"{where}: its text depends on the date, so a score would change over night; set "
                f"it to one of {built_in}, or to a file of it with the date written out"
            )
        text = render(template, _PROBE, bos, eos)
    except DataError as error:
        raise ConfigError(f"{where}: {error}; set it to one of {built_in}, or a file") from error
    for part in (_QUESTION, _REPLY):
        if part not in text:
            raise ConfigError(
                f"{where}: it writes {shown(text)}, without the conversation's {part!r}; set it to "
                f"one of {built_in}, or to a file of a chat template"
            )
    if bos and tokenizer.encode(text)[:2] == [tokenizer.bos_id] * 2:
        raise ConfigError(
            f"{where}: it writes BOS ({bos!r}) twice; set it to a file of it with one"
        )
    end = "".join(end_of_turn(template, bos, eos).split())
    if not end:
        raise ConfigError(
            f"{where}: it writes nothing after the reply, so that a whole one looks like one that "
            f"was cut off; set it to one of {built_in}, or to a file of it that ends a turn"
            + ("" if eos else " (plain and zephyr end with EOS, which the tokenizer has not)")
        )
    if end[: len(end) // 2] * 2 == end:
        raise ConfigError(
            f"{where}: it ends the reply twice ({short(end)}); set it to a file that does once"
        )


def is_dated(template: str, bos_token: str, eos_token: str) -> bool:
    """Whether a template writes another text tomorrow."""
    texts = {render(template, _PROBE, bos_token, eos_token, day.strftime) for day in _DAYS}
    return len(texts) > 1


@lru_cache(maxsize=8)
def end_of_turn(template: str, bos_token: str, eos_token: str) -> str:
    """What a template writes after the last reply, without white space around it."""
    return after_reply(template, bos_token, eos_token).strip()


def after_reply(template: str, bos_token: str, eos_token: str) -> str:
    """What a template writes after the last reply."""
    return _behind_reply(render(template, _PROBE, bos_token, eos_token))


def _behind_reply(probe: str) -> str:
    return probe.rpartition(_REPLY)[2]


class Frames(NamedTuple):
    """What a template writes around the contents of messages.

    Attributes:
        around: all of it, in a dialogue.
        between: of it what stands between two messages, whatever the role of the second.
        end: what it writes after the last reply, without white space around it.
    """

    around: tuple[str, ...]
    between: tuple[str, ...]
    end: str


def find_frames(write: Callable[[Conversation], str]) -> Frames:
    """The frames of what ``write`` makes of conversations.

    What stands before the last reply is left out where an earlier one tells the same: some
    templates write more there, as tags for thoughts, which a content may have.

    Raises:
        DataError: it cannot write a question and its answer.
    """
    end = _behind_reply(write(_PROBE)).strip()
    around = next(filter(None, (_around(write, roles) for roles in _TRIALS)), ())
    others = (_around(write, ("user", "assistant", role, "assistant")) for role in ROLES)
    between = [*around[1:-1], *(piece for found in others for piece in found[1:-1])]
    return Frames(around, tuple(dict.fromkeys(between)), end)


def _around(write: Callable[[Conversation], str], roles: Sequence[str]) -> tuple[str, ...]:
    """Nothing where such a conversation cannot be written."""
    turns = [
        {"role": role, "content": f"\ue000{number}\ue000"} for number, role in enumerate(roles)
    ]
    try:
        before, *found = _CONTENT.split(write(turns))
    except DataError:
        return ()
    last_reply = len(found) - 2
    kept = [piece for number, piece in enumerate(found) if number != last_reply or number == 0]
    return (before, *kept)


def render(
    template: str,
    conversation: Conversation,
    bos_token: str,
    eos_token: str,
    strftime_now: Callable[[str], str] | None = None,
) -> str:
    """The text that a chat template makes of a conversation, reply included.

    It is what ``apply_chat_template(..., tokenize=False, add_generation_prompt=False)`` of Hugging
    Face transformers gives, in a sandbox and without today's date: ``check_template`` has seen to
    it that the text does not depend on it.

    Raises:
        DataError: the template refuses the conversation, or is no valid template.
    """
    try:
        return _compile(template).render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=False,
            bos_token=bos_token,
            eos_token=eos_token,
            **({} if strftime_now is None else {"strftime_now": strftime_now}),
        )
    except Exception as error:  # a template may raise anything, and so may its compilation
        reason = f"{type(error).__name__}: {short(error)}"
        raise DataError(f"the chat template cannot write this conversation: {reason}") from error


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.add_extension(_generation_tag())
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


@lru_cache(maxsize=1)
def _generation_tag() -> Any:
    from jinja2 import ext, nodes, parser

    class GenerationTag(ext.Extension):
        """``{% generation %}`` marks replies for other trainers; its body is written as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, source: parser.Parser) -> list[nodes.Node]:
            next(source.stream)
            return source.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
