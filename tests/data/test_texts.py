"""Texts to score from a file, and the first replies of preference data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_aligner.data.texts import label_of, labelled_texts, write_first_replies
from nemo_aligner.errors import DataError

USER = {"role": "user", "content": "why?"}
REPLY = {"role": "assistant", "content": "so"}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_gives_texts_messages_and_replies(tmp_path: Path) -> None:
    path = write(
        tmp_path / "asked.jsonl",
        {"text": "a  raw\ntext"},
        {"messages": [USER, REPLY]},
        {"prompt": "why?", "chosen": "so", "rejected": "no"},
        {"chosen": [USER, {"role": "assistant", "content": "so"}]},
    )
    assert list(labelled_texts(path)) == [
        ("a raw text", "a  raw\ntext"),
        ("why? | so", [USER, REPLY]),
        ("chosen    why? | so", [USER, REPLY]),
        ("rejected  why? | no", [USER, {"role": "assistant", "content": "no"}]),
        ("chosen    why? | so", [USER, REPLY]),
    ]


def test_what_is_no_json_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "asked.jsonl", {"text": "a"})
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(DataError, match=r"asked.jsonl:2: malformed JSON"):
        list(labelled_texts(path))


def test_every_line_without_a_text_is_named(tmp_path: Path) -> None:
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


def test_a_long_label_has_its_ends() -> None:
    label = label_of("begin " + "x" * 100 + " end")
    assert len(label) == 80
    assert label.startswith("begin x")
    assert label.endswith("x end")


def test_the_first_pair_is_what_a_server_is_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(3)]
    target = tmp_path / "two.jsonl"
    shown = write_first_replies(write(tmp_path / "pairs.jsonl", *rows), target)
    assert shown.splitlines() == ["user: p0", "reply: c0", "reply: r0"]
    assert [label for label, _ in labelled_texts(target)] == ["p0 | c0", "p0 | r0"]


def test_the_first_two_ratings_are_two_texts(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "response": f"r{n}"} for n in range(3)]
    target = tmp_path / "two.jsonl"
    shown = write_first_replies(write(tmp_path / "rated.jsonl", *rows), target)
    assert shown.splitlines() == ["user: p0", "reply: r0", "reply: r1"]
    assert len(target.read_text().splitlines()) == 2
