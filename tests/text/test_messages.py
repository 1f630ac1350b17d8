"""What of a text is the prompt and what the reply, and what is no text at all."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import ROLES, check_text, first_prompt, prompt_of, reply_of

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "why"}
AGAIN = {"role": "user", "content": "and why"}
REPLY = {"role": "assistant", "content": "the cat"}
CHAT = [SYSTEM, USER, REPLY, AGAIN, REPLY]


def test_the_reply_is_the_last_turn_and_the_prompt_all_before_it() -> None:
    assert prompt_of(CHAT) == [SYSTEM, USER, REPLY, AGAIN]
    assert reply_of(CHAT) == "the cat"
    assert first_prompt(CHAT) == "why"
    assert prompt_of([REPLY]) == []
    assert first_prompt([REPLY]) == ""


def test_a_raw_text_is_all_reply() -> None:
    assert prompt_of("the cat") == []
    assert reply_of("the cat") == "the cat"
    assert first_prompt("the cat") == ""


def test_every_role_may_come_before_the_reply() -> None:
    for role in ROLES:
        check_text([{"role": role, "content": ""}, REPLY])
    check_text("")
    check_text(CHAT)


LONGEST_SHOWN = ["x" * 56]  # with its brackets and quotes 60 characters
TOO_LONG = ["x" * 57]


@pytest.mark.parametrize(
    ("text", "message"),
    [
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
    ],
)
def test_what_is_no_text_is_told_with_what_was_wanted(text: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        check_text(text)
    assert message in str(caught.value)
