"""Chat templates: from a conversation to text, and what a template writes around messages.

A template is Jinja source, as in Hugging Face tokenizers. There are four built-in ones, which write
every turn with its role, and no date:

============  =====================================================================================
``chatml``    ``<|im_start|>user\\n...<|im_end|>\\n``
``llama3``    ``<|start_header_id|>user<|end_header_id|>\\n\\n...<|eot_id|>``, after BOS; Llama 3's
              template, without the dates that Llama 3.1 and later write into the system prompt
``zephyr``    ``<|user|>\\n...`` EOS ``\\n``
``plain``     ``User: ...\\n\\nAssistant: ...`` EOS; for models without chat tokens
============  =====================================================================================

All four write reasoning before the reply between ``<think>`` and ``</think>``, each tool call
behind it as JSON between ``<tool_call>`` and ``</tool_call>``, a tool result as a turn of the tool,
and tools and documents at the end of the system prompt as lines of JSON.

``find_frames`` finds what a template writes around messages; ``turns.py`` derives the turn markers
that no message may contain.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_aligner.contract.messages import (
    ROLES,
    Conversation,
    Message,
    Messages,
    is_plain,
    messages_of,
)
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import ConfigError, DataError, short

if TYPE_CHECKING:
    import jinja2

# A function that renders a conversation by one template; DataError if the template rejects it.
Write = Callable[[Messages | Conversation], str]

# The built-in templates of the first versions, which wrote only role and content. Contracts that
# contain such a template keep it.
_EARLIER = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
        "{% endfor %}"
    ),
    "plain": (
        "{% for message in messages %}"
        "{{ message['role'] | capitalize + ': ' + message['content'] }}"
        "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
        "{% endfor %}"
        "{{ eos_token }}"
    ),
}
# Jinja code at the beginning of every built-in template. It adds tools and documents to the system
# prompt. ``_BUILD_TURN`` builds the text of a turn from reasoning, content and tool calls.
# The names in it are part of stored contracts: never change them.
_BEFORE_TURNS = (
    "{% set beside = ["
    "('Tools:\\n' + tools | map('tojson') | join('\\n')) if tools else '',"
    "('Documents:\\n' + documents | map('tojson') | join('\\n')) if documents else ''"
    "] | select | join('\\n\\n') %}"
    "{% if beside and messages[0]['role'] != 'system' %}"
    "{% set messages = [{'role': 'system', 'content': ''}] + messages %}"
    "{% endif %}"
)
_BUILD_TURN = (
    "{% set turn = namespace(said=message['content'] or '') %}"
    "{% if message['reasoning_content'] %}"
    "{% set turn.said = '<think>\\n' + message['reasoning_content']"
    " + '\\n</think>\\n\\n' + turn.said %}"
    "{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set call = call['function'] or call %}"
    "{% set turn.said = turn.said + ('\\n' if turn.said and turn.said[-1] != '\\n' else '')"
    " + '<tool_call>\\n'"
    " + {'name': call['name'], 'arguments': call['arguments']} | tojson + '\\n</tool_call>' %}"
    "{% endfor %}"
    "{% if beside and loop.first %}"
    "{% set turn.said = [turn.said, beside] | select | join('\\n\\n') %}"
    "{% endif %}"
)
_TURNS = "{% for message in messages %}"


def _with_tools(earlier: str) -> str:
    """Extend an earlier built-in template by reasoning, tool calls, tools and documents."""
    turns = earlier.replace("message['content']", "turn.said").replace(_TURNS, _TURNS + _BUILD_TURN)
    return _BEFORE_TURNS + turns


BUILT_IN_TEMPLATES = {name: _with_tools(earlier) for name, earlier in _EARLIER.items()}
# Maps each built-in template to its earlier version. That one renders a conversation of only roles
# and contents to the same text, and is faster.
_QUICKER = {template: _EARLIER[name] for name, template in BUILT_IN_TEMPLATES.items()}
KWARGS_KEY = "model.data.chat_template_kwargs"
TEMPLATE_KEY = "model.data.template"
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


def resolve_template(
    setting: str, tokenizer: Tokenizer, contract_templates: Sequence[str] = ()
) -> str:
    """Return the template that ``model.data.template`` names; empty if the tokenizer has none.

    Args:
        setting: ``tokenizer`` for the tokenizer's own template, a built-in name, or a file.
        contract_templates: templates of the contracts that training continues. If one of them is
            the earlier version of the built-in template, that version is returned.

    Raises:
        ConfigError: there is no such template or file, or the file is not UTF-8.
    """
    if setting == "tokenizer":
        return tokenizer.chat_template or ""
    if setting in BUILT_IN_TEMPLATES:
        is_earlier = _EARLIER[setting] in contract_templates
        return _EARLIER[setting] if is_earlier else BUILT_IN_TEMPLATES[setting]
    if "{{" in setting or "{%" in setting:
        raise ConfigError(f"{TEMPLATE_KEY}: got a template, wanted the path of a file that has it")
    if os.path.isfile(setting):  # unlike Path.is_file no error for a name that is too long
        try:
            # Some editors begin a file with a byte order mark, which is no part of the template.
            return Path(setting).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{TEMPLATE_KEY}: {setting} cannot be read: {error}") from error
    raise ConfigError(
        f"{TEMPLATE_KEY}: got {setting!r}, wanted 'tokenizer', "
        f"{', '.join(map(repr, BUILT_IN_TEMPLATES))} or the path of a template file"
    )


def name_of(template: str) -> str:
    """Return the name of a built-in template, also of an earlier version; empty for others."""
    versions = [(BUILT_IN_TEMPLATES, ""), (_EARLIER, " of an earlier version")]
    return next(
        (
            f"{name}{suffix}"
            for templates, suffix in versions
            for name, source in templates.items()
            if source == template
        ),
        "",
    )


def canonical_kwargs(kwargs: Mapping[str, Any]) -> str:
    """Encode template variables as in a contract: JSON sorted by name; empty if there are none.

    Raises:
        ConfigError: a value cannot be written as JSON.
    """
    if not kwargs:
        return ""
    try:
        ordered = {str(name): kwargs[name] for name in sorted(kwargs)}
        return json.dumps(ordered, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KWARGS_KEY}: wanted JSON values: {error}") from error


def with_kwargs_inside(template: str, kwargs: str) -> str:
    """Prefix a template with ``set`` statements for its variables.

    For exports: other programs render the template without passing variables.
    """
    values = json.loads(kwargs or "{}")
    statements = (f"{{% set {name} = {_to_jinja_literal(values[name])} +%}}" for name in values)
    return "".join(statements) + template


def _to_jinja_literal(value: Any) -> str:
    """Write a JSON value as a Jinja literal."""
    if isinstance(value, Mapping):
        items = (
            f"{_to_jinja_literal(key)}: {_to_jinja_literal(item)}" for key, item in value.items()
        )
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_to_jinja_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=8)
def end_of_turn(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> str:
    """Return what a template writes after the last reply, without white space around it."""
    return after_reply(template, bos_token, eos_token, kwargs).strip()


def after_reply(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> str:
    """Return what a template writes after the last reply."""
    return _cut_after_reply(write_probe(template, bos_token, eos_token, kwargs))


def _cut_after_reply(rendered_probe: str) -> str:
    return rendered_probe.rpartition(_REPLY)[2]


def write_probe(
    template: str,
    bos_token: str,
    eos_token: str,
    kwargs: str = "",
    strftime_now: Callable[[str], str] | None = None,
    messages: Messages = PROBE,
) -> str:
    """Render a trial dialogue, with a tool if the template requires one.

    Args:
        strftime_now: tells the template the date; None makes a template that asks for it fail.
        messages: the dialogue; by default a question and its answer.

    Raises:
        DataError: the template rejects the dialogue, or is invalid.
    """

    def write(text: Messages | Conversation) -> str:
        return render(template, text, bos_token, eos_token, kwargs, strftime_now)

    return for_trials(write)(messages)


def needs_tools(write: Write) -> bool:
    """Tell if a template renders conversations with tools, but rejects those without.

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
    end = _cut_after_reply(write(PROBE)).strip()
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


def render(
    template: str,
    conversation: Messages | Conversation,
    bos_token: str,
    eos_token: str,
    kwargs: str = "",
    strftime_now: Callable[[str], str] | None = None,
    for_answer: bool = False,
) -> str:
    """Render a conversation, reply included, by a chat template in Jinja's sandbox.

    The result is that of ``apply_chat_template(messages, tools=..., documents=..., **kwargs,
    tokenize=False, add_generation_prompt=for_answer)`` of Hugging Face transformers, but without
    today's date (``check_template`` makes sure that templates do not depend on it).

    Args:
        kwargs: further variables as JSON; empty for none.
        strftime_now: the function that tells the date; only for trials.
        for_answer: end with the start of the assistant's next turn, where the template has one.

    Raises:
        DataError: the template rejects the conversation, or is invalid.
    """
    tools = documents = None
    if isinstance(conversation, Conversation):
        tools, documents = conversation.tools, conversation.documents
    elif template in _QUICKER and is_plain(conversation):
        template = _QUICKER[template]
    try:
        return _compile(template).render(
            messages=messages_of(conversation),
            tools=tools,
            documents=documents,
            add_generation_prompt=for_answer,
            bos_token=bos_token,
            eos_token=eos_token,
            **_parse_kwargs(kwargs),
            **({} if strftime_now is None else {"strftime_now": strftime_now}),
        )
    except Exception as error:  # a template may raise any error, even when compiled
        reason = f"{type(error).__name__}: {short(error)}"
        if "'strftime_now' is undefined" in reason:
            reason = (
                "it writes today's date (strftime_now), so scores would change from day to day; "
                "choose a template without a date (model.data.template)"
            )
        raise DataError(f"the chat template cannot render this conversation: {reason}") from error


def _parse_kwargs(kwargs: str) -> dict[str, Any]:
    return json.loads(kwargs) if kwargs else {}


@lru_cache(maxsize=8)
def names_in(template: str) -> frozenset[str]:
    """Return all attribute names and string constants in a template's code.

    They include every key of a message that the template reads.

    Raises:
        DataError: the template is invalid.
    """
    from jinja2 import nodes

    tree = _parse(template)
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(attributes | texts)


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """Return the variables that a template expects from its caller.

    Raises:
        DataError: the template is invalid.
    """
    from jinja2 import pass_context
    from jinja2.meta import TrackingCodeGenerator

    # Like jinja2.meta.find_undeclared_variables, but without evaluating constants: an untrusted
    # 9 ** 9 ** 9 would never end.
    environment = _environment().overlay(finalize=pass_context(lambda context, value: value))
    generator = TrackingCodeGenerator(environment)
    generator.optimizer = None
    generator.visit(_parse(template))
    return frozenset(generator.undeclared_identifiers.difference(_environment().globals))


def _parse(template: str) -> Any:
    import jinja2

    try:
        return _environment().parse(template)
    except (jinja2.TemplateError, RecursionError) as error:
        reason = f"{type(error).__name__}: {short(error)}"
        raise DataError(f"the chat template cannot render this conversation: {reason}") from error


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The options of transformers. With other options white space and thus tokens would differ.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.add_extension(_generation_tag())
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


@lru_cache(maxsize=1)
def _generation_tag() -> Any:
    from jinja2 import ext, nodes, parser

    class GenerationTag(ext.Extension):
        """Jinja extension that accepts the block ``{% generation %}``, and renders only its body.

        Trainers that mask the loss by replies mark them with this block.
        """

        tags = {"generation"}  # noqa: RUF012

        def parse(self, source: parser.Parser) -> list[nodes.Node]:
            next(source.stream)
            return source.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(value: Any, **options: Any) -> str:
    # Replaces Jinja's own filter, which escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
