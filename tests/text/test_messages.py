"""What of a text is the prompt and what the reply, by words and by ids; what is no text."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.contract_settings import build_contract
from nemo_aligner.text.messages import ROLES, check_text, first_prompt, prompt_of, reply_of
from nemo_aligner.text.reply_marker import find_marker, make_reply_marker, reply_start
from nemo_aligner.text.templates import BUILT_IN_TEMPLATES
from nemo_aligner.text.tokenizer import Tokenizer
from tests.contracts import Contracts
from tests.text.refusals import assert_refused

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "why"}
AGAIN = {"role": "user", "content": "and why"}
REPLY = {"role": "assistant", "content": "the cat"}
CHAT = [SYSTEM, USER, REPLY, AGAIN, REPLY]


def test_reply_is_the_last_turn_and_the_prompt_all_before_it() -> None:
    assert prompt_of(CHAT) == [SYSTEM, USER, REPLY, AGAIN]
    assert (reply_of(CHAT), first_prompt(CHAT)) == ("the cat", "why")
    assert (prompt_of([REPLY]), first_prompt([REPLY])) == ([], "")
    # A raw text is all reply.
    assert (prompt_of("the cat"), reply_of("the cat"), first_prompt("the cat")) == (
        [], "the cat", "",
    )  # fmt: skip


def test_messages_of_every_role_may_come_before_the_reply() -> None:
    for text in ("", CHAT, *([{"role": role, "content": ""}, REPLY] for role in ROLES)):
        check_text(text)


LONGEST_SHOWN = ["x" * 56]  # with its brackets and quotes 60 characters
TOO_LONG = ["x" * 57]


def test_messages_that_are_no_text_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ((REPLY,), "got ({'role': 'assistant', 'content': 'the cat'},), wanted a text or a list"),
        ({}, "got an object with keys none, wanted a text"),
        (USER, "got an object with keys 'role', 'content', wanted a text"),
        ([], "got an empty conversation"),
        ([REPLY, "x"], "message 2: got 'x', wanted exactly 'role' and 'content'"),
        ([5, REPLY], "message 1: got 5, wanted exactly"),
        ([["role", "content"], REPLY], "message 1: got ['role', 'content'], wanted exactly"),
        ([LONGEST_SHOWN, REPLY], f"message 1: got {LONGEST_SHOWN}, wanted exactly"),
        ([TOO_LONG, REPLY], f"message 1: got ['{'x' * 55}..., wanted exactly"),
        ([{"role": "user"}, REPLY], "message 1: got an object with keys 'role', wanted exactly"),
        ([{**USER, "name": "n"}, REPLY], "message 1: got an object with keys 'role', 'content', "),
        ([{"role": "user", "content": None}, REPLY], "message 1, content: got None, wanted a str"),
        ([{"role": 1, "content": ""}, REPLY], "message 1, role: got 1, wanted a string"),
        ([{"role": "x" * 70, "content": ""}, REPLY], f"got role '{'x' * 59}, wanted one of"),
        ([USER, {"role": "tool", "content": ""}], "got role 'tool', wanted 'assistant'"),
        ("ab\ud800", "half of a surrogate pair at character 2, wanted valid Unicode"),
        ([{"role": "user", "content": "\udfff"}, REPLY], "surrogate pair at character 0"),
    ]
    escaped = [(text, re.escape(wanted)) for text, wanted in cases]
    assert_refused(check_text, escaped, DataError)


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
        make_reply_marker(joined, tokenizer)
    with pytest.raises(ConfigError, match="to know the reply by"):
        make_reply_marker("", tokenizer)


def test_reply_marker_is_in_contracts_of_the_mean_alone(contracts: Contracts) -> None:
    plain, mean = contracts(template="chatml"), build(contracts, "chatml")
    assert "reply_marker" not in plain.to_dict()
    assert ScoringContract.from_dict(mean.to_dict()) == mean
    assert set(plain.differences(mean)) == {"scored_position", "reply_marker"}
    for contract, marker in ((plain, (1,)), (mean, None)):
        with pytest.raises(DataError, match=r"reply_marker: got .* for reply_mean"):
            dataclasses.replace(contract, reply_marker=marker)
