"""``ChatTemplate``: render a conversation to text with Jinja, as Hugging Face tokenizers do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nemo_aligner.contract.messages import Conversation, Messages, is_plain, messages_of
from nemo_aligner.contract.template_trials import PROBE, cut_after_reply, for_trials
from nemo_aligner.contract.templates import QUICKER_VERSIONS
from nemo_aligner.utils.errors import DataError, short

if TYPE_CHECKING:
    import jinja2

    from nemo_aligner.contract.tokenizer import Tokenizer

# Size of the caches that each sample needs: more than the models of one server, which may all have
# templates of their own. Analysing a template takes much longer than rendering a sample.
CACHED_TEMPLATES = 256


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with everything that decides what it renders for a conversation.

    Attributes:
        source: its Jinja source; "" if conversations cannot be rendered.
        bos_token: text of the tokenizer's BOS token, which the template may write; "" for none.
        eos_token: the same for EOS.
        kwargs: further variables as JSON (``canonical_kwargs``); "" for none.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""
    kwargs: str = ""

    @classmethod
    def of(cls, source: str, tokenizer: Tokenizer, kwargs: str = "") -> ChatTemplate:
        """Return the template ``source`` with the tokenizer's BOS and EOS."""
        return cls(source, tokenizer.bos_token, tokenizer.eos_token, kwargs)

    def render(
        self,
        conversation: Messages | Conversation,
        strftime_now: Callable[[str], str] | None = None,
        for_answer: bool = False,
    ) -> str:
        """Render a conversation, reply included, in Jinja's sandbox.

        The result is that of ``apply_chat_template(messages, tools=..., documents=..., **kwargs,
        tokenize=False, add_generation_prompt=for_answer)`` of Hugging Face transformers, but
        without today's date (``check_template`` makes sure that templates do not depend on it).

        Args:
            strftime_now: the function that formats today's date; only for trials.
            for_answer: end with the start of the assistant's next turn, where the template has one.

        Raises:
            DataError: the template rejects the conversation, or is invalid.
        """
        source, tools, documents = self.source, None, None
        if isinstance(conversation, Conversation):
            tools, documents = conversation.tools, conversation.documents
        elif source in QUICKER_VERSIONS and is_plain(conversation):
            source = QUICKER_VERSIONS[source]
        try:
            return _compile(source).render(
                messages=messages_of(conversation),
                tools=tools,
                documents=documents,
                add_generation_prompt=for_answer,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                **_parse_kwargs(self.kwargs),
                **({} if strftime_now is None else {"strftime_now": strftime_now}),
            )
        except Exception as error:  # a template may raise any error, even when compiled
            reason = f"{type(error).__name__}: {short(error)}"
            if "'strftime_now' is undefined" in reason:
                reason = (
                    "it writes today's date (strftime_now), so scores would change from day to "
                    "day; choose a template without a date (model.data.template)"
                )
            raise DataError(
                f"the chat template cannot render this conversation: {reason}"
            ) from error

    def render_probe(
        self, messages: Messages = PROBE, strftime_now: Callable[[str], str] | None = None
    ) -> str:
        """Render a trial dialogue, with a tool if the template requires one.

        Args:
            messages: the dialogue; by default a question and its answer.
            strftime_now: the function that formats today's date. If it is None, a template that
                calls it fails.

        Raises:
            DataError: the template rejects the dialogue, or is invalid.
        """

        def write(text: Messages | Conversation) -> str:
            return self.render(text, strftime_now)

        return for_trials(write)(messages)

    def after_reply(self) -> str:
        """Return what the template writes after the last reply."""
        return cut_after_reply(self.render_probe())

    def with_kwargs_inside(self) -> str:
        """Return the source with ``set`` statements for ``kwargs`` in front of it.

        For exports: other programs render the template without passing variables.
        """
        values = _parse_kwargs(self.kwargs)
        statements = (
            f"{{% set {name} = {_to_jinja_literal(value)} +%}}" for name, value in values.items()
        )
        return "".join(statements) + self.source

    @property
    def names(self) -> frozenset[str]:
        """All attribute names and string constants in the code.

        They include every key of a message that the template reads. Raises DataError if the
        template is invalid.
        """
        return _names_in(self.source)

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template expects from its caller.

        Raises DataError if the template is invalid.
        """
        return _variables_of(self.source)


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


def _parse_kwargs(kwargs: str) -> dict[str, Any]:
    return json.loads(kwargs) if kwargs else {}


@lru_cache(maxsize=CACHED_TEMPLATES)
def _names_in(source: str) -> frozenset[str]:
    from jinja2 import nodes

    tree = _parse(source)
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(attributes | texts)


@lru_cache(maxsize=8)
def _variables_of(source: str) -> frozenset[str]:
    from jinja2 import pass_context
    from jinja2.meta import TrackingCodeGenerator

    # Like jinja2.meta.find_undeclared_variables, but without evaluating constants: an untrusted
    # 9 ** 9 ** 9 would never end.
    environment = _environment().overlay(finalize=pass_context(lambda context, value: value))
    generator = TrackingCodeGenerator(environment)
    generator.optimizer = None
    generator.visit(_parse(source))
    return frozenset(generator.undeclared_identifiers.difference(_environment().globals))


def _parse(source: str) -> Any:
    import jinja2

    try:
        return _environment().parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        reason = f"{type(error).__name__}: {short(error)}"
        raise DataError(f"the chat template cannot render this conversation: {reason}") from error


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The options of transformers. With others, the whitespace and thus the tokens would differ.
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
