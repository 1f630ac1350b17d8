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

All write reasoning before a reply, between ``<think>`` and ``</think>``, every call of a tool
behind it, as JSON between ``<tool_call>`` and ``</tool_call>``, its result as a turn of the tool,
and what tools and documents there are at the end of the system prompt, as lines of JSON.
"""

from __future__ import annotations

import json
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

# A template, or whatever else makes one text of a conversation; it raises DataError.
Write = Callable[[Messages | Conversation], str]

# Templates of versions that wrote role and content alone; contracts that have one keep it.
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
# Common beginning of all built-in templates, and the text of a turn.
_BEFORE_TURNS = (
    "{% set beside = ["
    "('Tools:\\n' + tools | map('tojson') | join('\\n')) if tools else '',"
    "('Documents:\\n' + documents | map('tojson') | join('\\n')) if documents else ''"
    "] | select | join('\\n\\n') %}"
    "{% if beside and messages[0]['role'] != 'system' %}"
    "{% set messages = [{'role': 'system', 'content': ''}] + messages %}"
    "{% endif %}"
)
_OF_TURN = (
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
    """An earlier built-in template, whose turns say more than their content."""
    turns = earlier.replace("message['content']", "turn.said").replace(_TURNS, _TURNS + _OF_TURN)
    return _BEFORE_TURNS + turns


BUILT_IN_TEMPLATES = {name: _with_tools(earlier) for name, earlier in _EARLIER.items()}
# They write plain conversations as the earlier ones do, which are quicker.
_QUICKER = {template: _EARLIER[name] for name, template in BUILT_IN_TEMPLATES.items()}
KWARGS_KEY = "model.data.chat_template_kwargs"
TEMPLATE_KEY = "model.data.template"
_QUESTION, _REPLY = "a question", "the reply"
_CALL_ID = "call00001"
PROBE = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
# Templates read every field of a tool, so that none may be missing.
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
# Placeholder for the content of each turn of a trial, of a character that no template writes.
_CONTENT = re.compile("\ue000[0-9]\ue000")
# Some templates take no system prompt, and some no second question.
_TRIALS = (
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant"),
)


def resolve_template(setting: str, tokenizer: Tokenizer, known: Sequence[str] = ()) -> str:
    """The template text that ``model.data.template`` asks for; empty when the tokenizer has none.

    ``tokenizer`` is the tokenizer's own, others are built in, or files. A built-in one whose
    earlier text is among those that are ``known``, from contracts to go on by, is that.

    Raises:
        ConfigError: there is no such template or file.
    """
    if setting == "tokenizer":
        return tokenizer.chat_template or ""
    if setting in BUILT_IN_TEMPLATES:
        is_earlier = _EARLIER[setting] in known
        return _EARLIER[setting] if is_earlier else BUILT_IN_TEMPLATES[setting]
    path = Path(setting)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise ConfigError(
        f"{TEMPLATE_KEY}: got {setting!r}, wanted 'tokenizer', "
        f"{', '.join(map(repr, BUILT_IN_TEMPLATES))} or the path of a template file"
    )


def name_of(template: str) -> str:
    """Name a built-in template by its text, also by an earlier one; empty for others."""
    known = [(BUILT_IN_TEMPLATES, ""), (_EARLIER, " of an earlier version")]
    return next(
        (f"{name}{of}" for texts, of in known for name, text in texts.items() if text == template),
        "",
    )


def canonical_kwargs(given: Mapping[str, Any]) -> str:
    """Keyword arguments of a template as a contract has them: JSON, by name; empty for none.

    Raises:
        ConfigError: a value is none that JSON has.
    """
    if not given:
        return ""
    try:
        ordered = {str(name): given[name] for name in sorted(given)}
        return json.dumps(ordered, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KWARGS_KEY}: wanted JSON values: {error}") from error


def with_kwargs_inside(template: str, kwargs: str) -> str:
    """A template that has its keyword arguments in itself, for whoever renders it without."""
    values = json.loads(kwargs or "{}")
    return "".join(f"{{% set {name} = {_literal(values[name])} +%}}" for name in values) + template


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, Mapping):
        items = (f"{_literal(key)}: {_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=8)
def end_of_turn(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> str:
    """Text that a template writes after the last reply, stripped."""
    return after_reply(template, bos_token, eos_token, kwargs).strip()


def after_reply(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> str:
    """Text that a template writes after the last reply."""
    return _behind_reply(write_probe(template, bos_token, eos_token, kwargs))


def _behind_reply(probe: str) -> str:
    return probe.rpartition(_REPLY)[2]


def write_probe(
    template: str,
    bos_token: str,
    eos_token: str,
    kwargs: str = "",
    strftime_now: Callable[[str], str] | None = None,
    messages: Messages = PROBE,
) -> str:
    """Render a question and its answer, with a tool where a template writes none without.

    Raises:
        DataError: see ``render``.
    """

    def write(text: Messages | Conversation) -> str:
        return render(template, text, bos_token, eos_token, kwargs, strftime_now)

    return for_trials(write)(messages)


def needs_tools(write: Write) -> bool:
    """True for a template that writes a conversation with a tool, and none without.

    The templates of Hermes and Command R+ for the use of tools loop over them, given or not.
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
    """``write``, or the same with a tool beside conversations without, if it ``needs_tools``."""

    def write_with_tool(text: Messages | Conversation) -> str:
        documents = text.documents if isinstance(text, Conversation) else None
        tools = text.tools if isinstance(text, Conversation) else None
        return write(Conversation(messages_of(text), tools or TRIAL_TOOLS, documents))

    return write_with_tool if needs_tools(write) else write


class CallFrames(NamedTuple):
    """Text that an argument would have to hold to be read as more than one argument of one call.

    Attributes:
        values: what stands between an argument and the next one's name, or the next call's.
        names: what stands behind the name of a function, and behind that of an argument.
    """

    values: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Frames(NamedTuple):
    """Text that a template writes around the contents of messages.

    Attributes:
        around: all of it, in a dialogue.
        between: of it what stands between two messages, whatever the role of the second.
        end: what it writes after the last reply, without white space around it.
        results: what stands between two results of tools, and between the last and a reply.
        calls: what stands in calls of tools whose arguments are written as they are, not as JSON.
    """

    around: tuple[str, ...]
    between: tuple[str, ...]
    end: str
    results: tuple[str, ...] = ()
    calls: CallFrames = CallFrames()


def find_frames(write: Write) -> Frames:
    """The frames of what ``write`` makes of conversations.

    What stands before the last reply is left out where an earlier one tells the same: some
    templates write more there, as tags for thoughts, which a content may have.

    Raises:
        DataError: it cannot write a question and its answer.
    """
    write = for_trials(write)
    end = _behind_reply(write(PROBE)).strip()
    around = next(filter(None, (_around(write, roles) for roles in _TRIALS)), ())
    others = (_around(write, ("user", "assistant", role, "assistant")) for role in ROLES)
    between = [*around[1:-1], *(piece for found in others for piece in found[1:-1])]
    between = [*dict.fromkeys(between)]
    return Frames(around, tuple(between), end, _around_results(write), _find_call_frames(write))


def _around_results(write: Write) -> tuple[str, ...]:
    """Nothing where a template writes no results of tools, or not as they are."""
    asked, answered, *more = _turns_of(("user", "assistant", "user", "assistant"))
    results = [{**tool_result(), "content": f"\ue000{number}\ue000"} for number in (4, 5)]
    # Before the last reply some templates write more, as tags for thoughts: see ``find_frames``.
    for after in (more, []):
        try:
            text = write([asked, tool_call_turn(), *results, answered, *after])
        except DataError:
            continue
        # Without what stands before the first of them, which is the call's.
        _, *found = _CONTENT.split(text)
        return tuple(found[1:3]) if len(found) == len(results) + 2 + len(after) else ()
    return ()


def _find_call_frames(write: Write) -> CallFrames:
    """Nothing where a template writes no calls, or escapes their arguments, as JSON does.

    It does not escape them if a call with two arguments, or two calls, can be written as one
    argument that holds what stands between the two.
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
    """The parts before, between and behind the words; raises ValueError unless in that order."""
    parts = []
    for word in words:
        part, match, text = text.partition(word)
        if not match:
            raise ValueError(word)
        parts.append(part)
    return [*parts, text]


def tool_call_turn(name: str = "look_up", argument: str = "a word", content: str = "") -> Message:
    """A turn that calls a tool, for trials; its id is one that Mistral's templates take."""
    function = {"name": name, "arguments": {"query": argument}}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def tool_result(content: str = "found") -> Message:
    """Answer of the tool that ``tool_call_turn`` calls."""
    return {"role": "tool", "content": content, "name": "look_up", "tool_call_id": _CALL_ID}


def _turns_of(roles: Sequence[str]) -> Messages:
    return [{"role": role, "content": f"\ue000{number}\ue000"} for number, role in enumerate(roles)]


def _around(write: Write, roles: Sequence[str]) -> tuple[str, ...]:
    """Nothing where such a conversation cannot be written."""
    try:
        before, *found = _CONTENT.split(write(_turns_of(roles)))
    except DataError:
        return ()
    last_reply = len(found) - 2
    kept = [piece for number, piece in enumerate(found) if number != last_reply or number == 0]
    return (before, *kept)


def render(
    template: str,
    conversation: Messages | Conversation,
    bos_token: str,
    eos_token: str,
    kwargs: str = "",
    strftime_now: Callable[[str], str] | None = None,
) -> str:
    """The text that a chat template makes of a conversation, reply included.

    It is what ``apply_chat_template(messages, tools=..., documents=..., **kwargs, tokenize=False,
    add_generation_prompt=False)`` of Hugging Face transformers gives, in a sandbox and without
    today's date: ``check_template`` has seen to it that the text does not depend on it. ``kwargs``
    are JSON.

    Raises:
        DataError: the template refuses the conversation, or is no valid template.
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
            add_generation_prompt=False,
            bos_token=bos_token,
            eos_token=eos_token,
            **_parsed(kwargs),
            **({} if strftime_now is None else {"strftime_now": strftime_now}),
        )
    except Exception as error:  # a template may raise anything, and so may its compilation
        reason = f"{type(error).__name__}: {short(error)}"
        if "'strftime_now' is undefined" in reason:
            reason = (
                "it writes today's date (strftime_now), so scores would change from day to day; "
                "wanted a template without it (model.data.template)"
            )
        raise DataError(f"the chat template cannot write this conversation: {reason}") from error


def _parsed(kwargs: str) -> dict[str, Any]:
    return json.loads(kwargs) if kwargs else {}


@lru_cache(maxsize=8)
def names_in(template: str) -> frozenset[str]:
    """The attributes, keys and other short texts that a template's code names.

    Raises:
        DataError: it is no valid template.
    """
    from jinja2 import nodes

    tree = _parse(template)
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(attributes | texts)


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads from whoever renders it.

    Raises:
        DataError: it is no valid template.
    """
    from jinja2 import pass_context
    from jinja2.meta import TrackingCodeGenerator

    # As find_undeclared_variables, but nothing is computed that is constant: 9 ** 9 ** 9 would
    # never end.
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
        raise DataError(f"the chat template cannot write this conversation: {reason}") from error


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # As transformers compiles them: other blocks of white space would be other tokens.
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
