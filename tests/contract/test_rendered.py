"""Texts that a chat template drops for their place or their content are errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.messages import read_text
from nemo_aligner.contract.rendered import check_rendered
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import write_conversation
from nemo_aligner.utils.errors import DataError

USER = {"role": "user", "content": "Will it\n rain?"}
REPLY = {"role": "assistant", "content": "No, it will be dry."}
SYSTEM = {"role": "system", "content": "Answer in French."}
# Like Mistral's: the system prompt is written only in front of a question that is the last message.
LAST_QUESTION = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{% if loop.last and m.role == 'user' %}{{ messages[0].content }}{% endif %}{{ m.content }}\n"
    "{% endfor %}"
)
# Like DeepSeek-R1's: of a reply only what follows its thoughts.
NO_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "turns", "location"),
    [
        (LAST_QUESTION, [SYSTEM, USER, REPLY], r"messages\[0\]\.content"),
        (LAST_QUESTION, [USER, REPLY], None),
        (
            NO_THOUGHTS,
            [USER, {**REPLY, "content": "<think>Clouds.</think>No."}],
            r"messages\[1\]\.content",
        ),
        # Reasoning models' templates drop the thoughts of earlier replies on purpose.
        (NO_THOUGHTS, [USER, {**REPLY, "content": "<think>Clouds.</think>No."}, USER, REPLY], None),
    ],
)
def test_text_that_a_template_drops_is_an_error(
    tokenizer: Tokenizer, template: str, turns: list[dict[str, Any]], location: str | None
) -> None:
    conversation = read_text(turns)
    assert not isinstance(conversation, str)
    rules = ChatTemplate.of(template, tokenizer)
    if location is None:
        write_conversation(rules, conversation, tokenizer)
        return
    with pytest.raises(DataError, match=f"^{location}: the chat template does not render it"):
        write_conversation(rules, conversation, tokenizer)


def test_texts_are_found_in_every_form_in_which_templates_write_them() -> None:
    city = 'Kö"ln\\\n<b>'
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"city": [city]}}}
    thoughts = {"content": "<think>Clouds?</think>\n\nNo.", "role": "assistant"}
    conversation = read_text([USER, {"role": "assistant", "tool_calls": [call, call]}, thoughts])
    assert not isinstance(conversation, str)
    written = "Will it rain?look_up{call}<|think|>Clouds? <|end|>No."
    arguments = {"city": [city]}
    as_json = json.dumps(arguments, ensure_ascii=False)
    for form in (as_json, json.dumps(arguments), json.dumps(as_json, ensure_ascii=False)):
        check_rendered(conversation, written.replace("{call}", form))
    check_rendered(conversation, written.replace("{call}", str(arguments)))
    check_rendered(conversation, written.replace("{call}", f"city={city}"))
    for lost in ("look_up", "city", "Clouds?", "No.", "rain?"):
        with pytest.raises(DataError, match="does not render it in this conversation"):
            check_rendered(conversation, written.replace("{call}", as_json).replace(lost, ""))


def test_texts_of_documents_are_rendered() -> None:
    url = "https://weather.example/today"
    documents: list[dict[str, Any]] = [
        {"url": url, "text": "No wind."},
        {"title": "Sky", "content": "A blue\nsky."},
        {"text": " ", "body": ["It is mild."]},
    ]
    conversation = read_text({"messages": [USER, REPLY], "documents": documents})
    assert not isinstance(conversation, str)
    turns = "Will it rain? No, it will be dry."
    check_rendered(conversation, f"No wind. Sky: A blue sky. It is mild. {turns}")
    with pytest.raises(DataError, match=r"^documents\[0\]: .* would never see 'No wind\.'"):
        check_rendered(conversation, f"{url} Sky: A blue sky. It is mild. {turns}")
    with pytest.raises(DataError, match=r"^documents\[1\]: .* would never see 'A blue\\nsky\.'"):
        check_rendered(conversation, f"No wind. Sky: It is mild. {turns}")
    with pytest.raises(DataError, match=r"^documents\[2\]: .* would never see 'It is mild\.'"):
        check_rendered(conversation, f"No wind. Sky: A blue sky. {turns}")


def test_names_of_tools_are_rendered() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("look_up", "compute")]
    conversation = read_text({"messages": [USER, REPLY], "tools": tools})
    assert not isinstance(conversation, str)
    check_rendered(conversation, "look_up, compute: Will it rain? No, it will be dry.")
    with pytest.raises(DataError, match=r"^tools\[1\], its name: .* would never see 'compute'"):
        check_rendered(conversation, "look_up: Will it rain? No, it will be dry.")
