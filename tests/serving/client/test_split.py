"""Calls of any size as requests that fit."""

from __future__ import annotations

from nemo_aligner.serving.client.split import split_texts, split_tokens
from nemo_aligner.serving.wire import kserve

CHAT = [{"role": "user", "content": "hi"}]


def test_texts_and_conversations_are_requests_of_their_own_that_fit() -> None:
    texts = ["a", CHAT, "b", "c", CHAT]
    parts = split_texts(texts, 2)
    assert [part.rows for part in parts] == [[0, 2], [3], [1, 4]]
    for part in parts:
        assert kserve.decode_request(part.inputs).texts == [texts[row] for row in part.rows]


def test_token_sequences_stand_with_those_of_their_length() -> None:
    parts = split_tokens([[1] * 9, [2], [3] * 8, [4, 4]], 2)
    assert [part.rows for part in parts] == [[1, 3], [2, 0]]
    assert [part.inputs["tokens"].shape for part in parts] == [(2, 2), (2, 9)]
