"""Prompt and reply of a sample, the normal form of messages, and malformed messages."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.messages import (
    ALL_ROLES,
    Conversation,
    as_json,
    first_prompt,
    prompt_of,
    question_of,
    read_text,
    reply_of,
)
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import find_marker, make_reply_marker, reply_start
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.harness.contracts import Contracts

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "why"}
AGAIN = {"role": "user", "content": "and why"}
REPLY = {"role": "assistant", "content": "the cat"}
CHAT = [SYSTEM, USER, REPLY, AGAIN, REPLY]


def test_reply_is_the_last_turn_and_the_prompt_all_before_it() -> None:
    assert prompt_of(CHAT) == [SYSTEM, USER, REPLY, AGAIN]
    assert (reply_of(CHAT), first_prompt(CHAT)) == ("the cat", "why")
    assert (prompt_of([REPLY]), first_prompt([REPLY])) == ([], "")
    # The whole raw text is the reply.
    assert (prompt_of("the cat"), reply_of("the cat"), first_prompt("the cat")) == (
        [], "the cat", "",
    )  # fmt: skip


def test_messages_of_every_role_may_come_before_the_reply() -> None:
    for text in ("", CHAT, *([{"role": role, "content": ""}, REPLY] for role in ALL_ROLES)):
        assert read_text(text) is text


WEATHER = {"name": "weather", "arguments": {"city": "Köln"}}
CALL = {"id": "1", "type": "function", "function": WEATHER}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "dry", "tool_call_id": "1"}
TOOL = {"type": "function", "function": {"name": "weather"}}


def as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = '{"city": "K\\u00f6ln"}'
    return {**call, "function": {**call["function"], "arguments": arguments}}


def test_messages_in_every_writing_have_one_form() -> None:
    nulls = dict.fromkeys(("refusal", "audio", "function_call", "name", "tool_call_id"))
    part = {"type": "text", "text": "why"}
    cases: list[tuple[Any, Any]] = [
        ([{**USER, **nulls, "tool_calls": None}, {**REPLY, "annotations": []}], [USER, REPLY]),
        ([USER, {**REPLY, "tool_calls": []}], [USER, REPLY]),
        ([USER, {**CALLING, **nulls}], [USER, CALLING]),
        ([USER, {"role": "assistant", "tool_calls": [as_text(CALL)]}], [USER, CALLING]),
        ([{**CALLING, "tool_calls": [{**CALL, "index": None}]}], [CALLING]),
        ([{**CALLING, "tool_calls": [WEATHER]}], [{**CALLING, "tool_calls": [WEATHER]}]),
        *(
            ([{**REPLY, key: "hm"}], [{**REPLY, "reasoning_content": "hm"}])
            for key in ("reasoning_content", "reasoning", "thinking")
        ),
        (
            [{"role": "user", "content": [{**part, "type": "input_text", "more": 1}]}, REPLY],
            [{"role": "user", "content": [part]}, REPLY],
        ),
        ({"messages": CHAT}, CHAT),
        ({"messages": CHAT, "tools": [], "documents": None}, CHAT),
        (Conversation(CHAT), CHAT),
        ({"messages": CHAT, "tools": [TOOL]}, Conversation(CHAT, [TOOL])),
        ({"messages": CHAT, "tools": f"[{json.dumps(TOOL)}]"}, Conversation(CHAT, [TOOL])),
        ({"messages": CHAT, "documents": [{"a": 1}]}, Conversation(CHAT, None, [{"a": 1}])),
    ]
    for arguments in ("", None, "{}", {}):
        call = {"function": {"name": "now", "arguments": arguments}}
        wanted = {"function": {"name": "now", "arguments": {}}}
        cases.append(([{**CALLING, "tool_calls": [call]}], [{**CALLING, "tool_calls": [wanted]}]))
    wrong = [case for case in cases if read_text(case[0]) != case[1]]
    assert not wrong, wrong
    again = [read_text(wanted) for _, wanted in cases]
    assert again == [wanted for _, wanted in cases]
    assert [read_text(json.loads(json.dumps(as_json(each)))) for each in again] == again


def test_reply_with_calls_of_tools_says_them_and_its_question_is_the_users() -> None:
    text = [SYSTEM, USER, CALLING, RESULT, {**CALLING, "content": "I ask again."}]
    said = '{"name": "weather", "arguments": {"city": "Köln"}}'
    assert reply_of(text) == f"I ask again.\n{said}"
    assert reply_of(text[:3]) == said
    assert reply_of([USER, {**CALLING, "reasoning_content": "hm"}]) == f"hm\n{said}"
    assert question_of(text) == question_of(text[:3]) == [SYSTEM, USER]
    assert question_of(CHAT) == prompt_of(CHAT)
    parts = [{"type": "text", "text": each} for each in ("a", "b")]
    assert first_prompt([{"role": "user", "content": parts}, REPLY]) == "a\nb"


LONGEST_SHOWN = ["x" * 56]  # 60 characters with brackets and quotes
TOO_LONG = ["x" * 57]


def test_integer_that_no_float_holds_is_kept_as_it_is(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    """Nulls in tool calls, schemas and documents are values, also in JSON strings."""
    number = 7 * 10**400
    function = {"name": "f", "arguments": json.dumps({"n": number})}
    text = {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": function}]}],
        "tools": [{"function": {"name": "f", "parameters": {"maximum": -number}}}],
        "documents": [{"pages": number}],
    }
    read = read_text(text)
    assert isinstance(read, Conversation)
    (call,) = read.messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"n": number}
    contract = contracts(template="chatml", seq_length=8192)
    written = tokenizer.decode(contract.encode(tokenizer, text).token_ids)  # type: ignore[arg-type]
    assert written.count(str(number)) == 3


def test_messages_that_are_no_text_are_refused() -> None:
    def calling(**changes: Any) -> list[Any]:
        return [{**CALLING, "tool_calls": [{**CALL, **changes}]}]

    image = {"type": "image_url", "image_url": {"url": "x"}}
    deep: Any = {}
    for _ in range(99):
        deep = {"a": deep}
    cases: list[tuple[Any, str]] = [
        ((REPLY,), "got ({'role': 'assistant', 'content': 'the cat'},), wanted a sample: a string"),
        ({}, "got an object with keys none, wanted a sample"),
        (USER, "got an object with keys 'role', 'content', wanted a sample"),
        ([], "got an empty conversation"),
        ([REPLY, "x"], "messages[1]: got 'x', wanted an object with role and content"),
        ([5, REPLY], "messages[0]: got 5, wanted an object"),
        ([["role", "content"], REPLY], "messages[0]: got ['role', 'content'], wanted an object"),
        ([LONGEST_SHOWN, REPLY], f"messages[0]: got {LONGEST_SHOWN}, wanted an object"),
        ([TOO_LONG, REPLY], f"messages[0]: got ['{'x' * 55}..., wanted an object"),
        ([{"role": "user"}, REPLY], "messages[0]: got an object with keys 'role', wanted content"),
        (
            [{"role": "user", "contents": "a"}, REPLY],
            "messages[0]: got an object with keys 'role', 'contents', wanted content, as there "
            "are no tool calls; did you mean 'content' for 'contents'?",
        ),
        (
            [{"role": "user", "content": None}, REPLY],
            "messages[0].content: got null, wanted a string",
        ),
        ([{"role": "user", "content": 5}, REPLY], "messages[0].content: got 5, wanted text, or"),
        ([{"role": "user", "content": [image]}, REPLY], "content[0]: got a part of type 'image_ur"),
        ([{"role": "user", "content": ["x"]}, REPLY], "content[0]: got a part of type 'x', wanted"),
        ([{"role": 1, "content": ""}, REPLY], "messages[0]: got an object with keys 'role', 'con"),
        ([{"role": "x" * 70, "content": ""}, REPLY], f"got role '{'x' * 59}, wanted one of"),
        ([USER, {"role": "tool", "content": ""}], "got role 'tool', wanted 'assistant'"),
        ("ab\ud800", "half of a surrogate pair at character 3, wanted valid Unicode"),
        ([{"role": "user", "content": "\udfff"}, REPLY], "surrogate pair at character 1"),
        ([{**USER, "name": 5}, REPLY], "messages[0].name: got 5, wanted a string"),
        (
            [{**USER, "tool_calls": [CALL]}, REPLY],
            "messages[0].tool_calls: got tool calls in a message of role 'user'",
        ),
        (
            [{**USER, "thinking": "hm"}, REPLY],
            "messages[0].thinking: got this key in a message of role",
        ),
        (
            [{**REPLY, "thinking": "a", "reasoning": "b"}],
            "messages[0]: got two different reasonin",
        ),
        ([{**REPLY, "tool_calls": "x"}], "messages[0].tool_calls: got 'x', wanted a list of calls"),
        ([{**REPLY, "tool_calls": [5]}], "messages[0].tool_calls[0]: got 5, wanted an object with"),
        (calling(index=0), "tool_calls[0]: got the key 'index', wanted only function, id, type"),
        (calling(type="custom"), "tool_calls[0].type: got 'custom', wanted 'function'"),
        (
            calling(function={}),
            "tool_calls[0].function: got an object with keys none, wanted an ob",
        ),
        (
            calling(function={"name": "f", "arguments": '{"a"'}),
            "messages[0].tool_calls[0].function.arguments: got '{\"a\"', wanted a JSON object",
        ),
        (calling(function={"name": "f", "arguments": "[1]"}), "arguments: got '[1]', wanted a JSO"),
        (
            calling(function={"name": "f", "arguments": {"a": {1}}}),
            "arguments.a: got {1}, wanted a J",
        ),
        (calling(function={"name": "f", "arguments": {"\ud800": 1}}), "half of a surrogate pair"),
        (calling(function={"name": "f", "arguments": {"n": 10**4300}}), "arguments.n: got int, w"),
        (calling(function={"name": "f", "arguments": deep}), "nested more than 64 deep"),
        ({"messages": CHAT, "tools": "x"}, "tools: got 'x', wanted a JSON list"),
        ({"messages": CHAT, "tools": {"a": 1}}, "tools: got an object with keys 'a', wanted a li"),
        ({"messages": CHAT, "tools": [5]}, "tools[0]: got 5, wanted an object"),
        ({"messages": CHAT, "documents": [{"a": float("nan")}]}, "documents[0].a: got nan, wanted"),
        (
            {"messages": CHAT, "chat_template_kwargs": {}},
            "got the key 'chat_template_kwargs', want",
        ),
        ({"messages": "x"}, "messages: got 'x', wanted a list of messages"),
    ]
    escaped = [(text, re.escape(wanted)) for text, wanted in cases]
    assert_refused(read_text, escaped, DataError)


TURNS = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "where"},
    {"role": "assistant", "content": "the cat sings"},
]


def build(contracts: Contracts, template: str) -> ScoringContract:
    config = contracts.config(template=template)
    config.head.reads = ScoredPosition.reply_mean
    return build_contract(config, contracts.tokenizer, Precision.fp32)


def test_reply_marker_finds_the_last_reply_of_every_template(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    for template in BUILT_IN_TEMPLATES:
        contract = build(contracts, template)
        assert contract.reply_marker is not None
        ids = contract.encode(tokenizer, TURNS).token_ids
        reply = tokenizer.decode(ids[reply_start(ids, contract.reply_marker) :])
        assert reply.strip().startswith("the cat sings"), template
        assert "where" not in reply, template
        whole = contract.encode(tokenizer, "the bird sings").token_ids
        assert reply_start(whole, contract.reply_marker) == 0, template


def test_reply_marker_that_comes_last_counts_and_an_empty_reply_is_the_last_token() -> None:
    assert find_marker([1, 2, 3, 1, 2, 4], (1, 2)) == 3
    assert reply_start([1, 2, 3, 1, 2, 4], (1, 2)) == 5
    assert reply_start([5, 1, 2], (1, 2)) == 2
    assert find_marker([1, 3, 2], (1, 2)) == find_marker([1], (1, 2)) == -1


def test_reply_marker_needs_a_template_that_tells_a_reply_from_a_question(
    tokenizer: Tokenizer,
) -> None:
    joined = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    with pytest.raises(ConfigError, match=r"model\.head\.reads: got reply_mean"):
        make_reply_marker(ChatTemplate.of(joined, tokenizer), tokenizer)
    with pytest.raises(ConfigError, match="got reply_mean without a chat template"):
        make_reply_marker(ChatTemplate(""), tokenizer)


def test_reply_marker_is_in_contracts_of_the_mean_alone(contracts: Contracts) -> None:
    plain, mean = contracts(template="chatml"), build(contracts, "chatml")
    assert "reply_marker" not in plain.to_dict()
    assert ScoringContract.from_dict(mean.to_dict()) == mean
    assert set(plain.differences(mean)) == {"scored_position", "reply_marker"}
    for contract, marker in ((plain, (1,)), (mean, None)):
        with pytest.raises(DataError, match=r"reply_marker: got .*reply_mean"):
            dataclasses.replace(contract, reply_marker=marker)
