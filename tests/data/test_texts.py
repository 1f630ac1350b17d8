"""Texts to score from a file, and the first replies of preference data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_aligner.data.texts import label_of, labelled_texts, write_first_replies
from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import Conversation
from tests.data.files import write

USER = {"role": "user", "content": "why?"}
REPLY = {"role": "assistant", "content": "so"}


TOOL = {"type": "function", "function": {"name": "f"}}


def test_texts_of_a_file_are_texts_messages_and_replies(tmp_path: Path) -> None:
    path = write(
        tmp_path / "asked.jsonl",
        {"text": "a  raw\ntext"},
        {"messages": [USER, REPLY]},
        {"prompt": "why?", "chosen": "so", "rejected": "no"},
        {"chosen": [USER, {"role": "assistant", "content": "so"}]},
        {"messages": [USER, REPLY], "tools": [TOOL]},
        {"prompt": "why?", "chosen": "so", "tools": json.dumps([TOOL])},
    )
    assert list(labelled_texts(path)) == [
        ("a raw text", "a  raw\ntext"),
        ("why? | so", [USER, REPLY]),
        ("chosen    why? | so", [USER, REPLY]),
        ("rejected  why? | no", [USER, {"role": "assistant", "content": "no"}]),
        ("chosen    why? | so", [USER, REPLY]),
        ("why? | so", Conversation([USER, REPLY], [TOOL])),
        ("chosen    why? | so", Conversation([USER, REPLY], [TOOL])),
    ]


def test_texts_are_missing_from_lines_that_are_named(tmp_path: Path) -> None:
    rows = [{"text": 3}, {"texts": "a"}, {"messages": [USER]}, {"prompt": 3, "chosen": "a"}]
    path = write(tmp_path / "asked.jsonl", {"text": "a"}, *rows)
    with pytest.raises(DataError) as caught:
        list(labelled_texts(path))
    assert str(caught.value).splitlines() == [
        f"{path}: 4 of its 5 lines are malformed",
        f"  {path}:2: text: got 3, wanted a text or a list of messages",
        f"  {path}:3: got keys 'texts'; wanted 'text', 'messages', or 'chosen' and 'rejected'",
        f"  {path}:4: messages: the last message is the reply that is scored: got role 'user', "
        "wanted 'assistant'",
        f"  {path}:5: got 3, wanted a string or a list of messages",
    ]
    with pytest.raises(DataError, match=r"asked.jsonl:2: malformed JSON"):
        list(labelled_texts(write(tmp_path / "asked.jsonl", {"text": "a"}, "{")))


def test_texts_that_are_long_have_labels_of_their_ends() -> None:
    label = label_of("begin " + "x" * 100 + " end")
    assert len(label) == 80
    assert label.startswith("begin x")
    assert label.endswith("x end")


def test_texts_to_ask_a_server_for_are_the_first_replies(tmp_path: Path) -> None:
    pairs = [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(3)]
    target = tmp_path / "two.jsonl"
    shown = write_first_replies(write(tmp_path / "pairs.jsonl", *pairs), target)
    assert shown.splitlines() == ["user: p0", "reply: c0", "reply: r0"]
    assert [label for label, _ in labelled_texts(target)] == ["p0 | c0", "p0 | r0"]
    row = {"messages": [USER, REPLY], "tools": [TOOL]}
    with_tools = {"prompt": [USER], "chosen": [REPLY], "rejected": "no", "tools": [TOOL]}
    write_first_replies(write(tmp_path / "tools.jsonl", with_tools), target)
    assert json.loads(target.read_text().splitlines()[0]) == row
    ratings = [{"prompt": f"p{n}", "response": f"r{n}"} for n in range(3)]
    shown = write_first_replies(write(tmp_path / "rated.jsonl", *ratings), target)
    assert shown.splitlines() == ["user: p0", "reply: r0", "reply: r1"]
    assert len(target.read_text().splitlines()) == 2
