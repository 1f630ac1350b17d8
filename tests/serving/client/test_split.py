"""Calls of any size as requests that fit, and their replies in the caller's order."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from nemo_aligner.serving.client.split import join_replies, split_texts, split_tokens
from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import ScoreReply

CHAT = [{"role": "user", "content": "hi"}]


def replies(parts: list, cut: int = 0) -> list[ScoreReply]:
    """Each row's reward is its index in the caller's list; the first ``cut`` rows were cut."""
    return [
        ScoreReply(
            np.array([[row, -row] for row in part.rows], dtype=np.float32),
            np.array([row < cut for row in part.rows]),
        )
        for part in parts
    ]


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


def test_one_string_is_no_list() -> None:
    with pytest.raises(TypeError, match=r"got one string \('oops'\), wanted a list of texts"):
        split_texts("oops", 2)


def test_rewards_come_back_in_the_callers_order() -> None:
    parts = split_texts([CHAT, "a", "b", CHAT, "c"], 2)
    rewards = join_replies(parts, replies(parts))
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [[row, -row] for row in range(5)]
    assert join_replies([], []).shape == (0, 1)


def test_texts_that_were_cut_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    parts = split_texts(["a", "b", "c"], 2)
    with caplog.at_level(logging.WARNING):
        join_replies(parts, replies(parts))
        assert not caplog.records
        join_replies(parts, replies(parts, cut=2))
    assert caplog.messages == ["2 of 3 texts were cut to the model's seq_length"]
