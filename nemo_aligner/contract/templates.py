"""The built-in chat templates, and which template a setting names.

A template is Jinja source, as in Hugging Face tokenizers; ``chat_template.py`` renders it. The four
built-in ones write every turn with its role, and no date:

============  =====================================================================================
``chatml``    ``<|im_start|>user\\n...<|im_end|>\\n``
``llama3``    ``<|start_header_id|>user<|end_header_id|>\\n\\n...<|eot_id|>``, after BOS; Llama 3's
              template, without the dates that Llama 3.1 and later write into the system prompt
``zephyr``    ``<|user|>\\n...`` EOS ``\\n``
``plain``     ``User: ...\\n\\nAssistant: ...`` EOS; for models without chat tokens
============  =====================================================================================

All four write reasoning before the reply between ``<think>`` and ``</think>``, each tool call
after it as JSON between ``<tool_call>`` and ``</tool_call>``, a tool result as a turn of the tool,
and tools and documents at the end of the system prompt as lines of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_aligner.contract.tokenizer import Tokenizer

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
    """Extend an earlier built-in template with reasoning, tool calls, tools and documents."""
    turns = earlier.replace("message['content']", "turn.said").replace(_TURNS, _TURNS + _BUILD_TURN)
    return _BEFORE_TURNS + turns


BUILT_IN_TEMPLATES = {name: _with_tools(earlier) for name, earlier in _EARLIER.items()}
# Maps each built-in template to its earlier version, which renders a conversation of only roles and
# contents to the same text faster.
QUICKER_VERSIONS = {template: _EARLIER[name] for name, template in BUILT_IN_TEMPLATES.items()}
KWARGS_KEY = "model.data.chat_template_kwargs"
TEMPLATE_KEY = "model.data.template"


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
    if os.path.isfile(setting):  # unlike Path.is_file, it does not raise if the name is too long
        try:
            # Some editors begin a file with a byte order mark, which is not part of the template.
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
