"""Encoding and decoding of KServe tensors, and what decoding rejects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nemo_aligner.contract.messages import Conversation
from nemo_aligner.serving.protocols import ScoredRows, StepRewards, kserve
from tests.serving.protocols.bodies import not_refused

CHAT = [{"role": "user", "content": "Grüße\n\0"}, {"role": "assistant", "content": "hi"}]


def column(*rows: object, dtype: object = np.object_) -> np.ndarray:
    return np.array([[row] for row in rows], dtype=dtype)


def test_kserve_requests_come_back_as_they_were_sent() -> None:
    request = kserve.decode_request(kserve.encode_sentences(["Grüße", "", "a\0"]))
    assert request.texts == ["Grüße", "", "a\0"]
    whole = Conversation(CHAT, [{"type": "function", "function": {"name": "é"}}], [{"text": "a"}])
    request = kserve.decode_request(kserve.encode_conversations([CHAT, whole]))
    assert request.texts == [CHAT, whole]
    request = kserve.decode_request(kserve.encode_tokens([[3, 4, 0], [5]]))
    assert request.token_lists == [[3, 4, 0], [5]]


def test_kserve_reply_comes_back_as_it_was_sent() -> None:
    rewards, exceeded = np.array([[1.5, 2.0], [3.0, 4.0]]), np.array([True, False])
    reply = ScoredRows(rewards, {}, exceeded, "cafe", "f00d")
    outputs = kserve.encode_rewards(reply)
    assert outputs["rewards"].dtype == np.float32
    assert outputs["exceeded"].tolist() == [[1], [0]]
    back = kserve.decode_rewards(outputs)
    np.testing.assert_array_equal(back.rewards, reply.rewards)
    assert back.exceeded.tolist() == [True, False]
    assert (back.contract_hash, back.model_fingerprint) == ("cafe", "f00d")
    silent = kserve.decode_rewards(kserve.encode_rewards(ScoredRows(rewards, {}, exceeded)))
    assert (silent.contract_hash, silent.model_fingerprint) == (None, None)
    old = kserve.decode_rewards({"rewards": np.ones((2, 1), np.float32)})
    assert old.exceeded.tolist() == [False, False]
    assert old.model_fingerprint is None


def test_kserve_reply_has_the_reasons_of_rows_without_a_reward() -> None:
    rewards, steps = np.array([[1.5], [np.nan]], np.float32), np.full(2, None, np.object_)
    steps[0] = StepRewards(rewards[:1], ())
    errors, passed = {1: "too löng"}, np.array([1.0, np.nan], np.float32)
    reply = ScoredRows(rewards, errors, np.zeros(2, bool), "cafe", passed=passed, steps=steps)
    assert kserve.decode_rewards(kserve.encode_rewards(reply)).rejected == errors
    reply = replace(reply, unscored=frozenset({1}))
    assert kserve.decode_rewards(kserve.encode_rewards(reply)).temporary == frozenset()
    outputs = kserve.encode_rewards(replace(reply, temporary=frozenset({1})))
    assert outputs["passed"].tolist() == [[1], [0]]
    back = kserve.decode_rewards(outputs)
    assert (back.errors, str(back.rewards)) == (errors, str(rewards))
    assert (back.unscored, back.temporary, back.rejected) == ({1}, {1}, {})
    assert back.steps is not None
    assert (back.steps[0].rewards.tolist(), back.steps[1]) == ([[1.5]], None)


TOKENS = np.zeros((2, 4), np.int64)
TWO = column(2, 4, dtype=np.int64)
CHATS = b'[{"role": "assistant", "content": "a"}]'
DEEP = b"[" * 200_000 + b"]" * 200_000
UTF8 = r"not UTF-8 \(invalid start byte\)"
MALFORMED: list[tuple[dict[str, np.ndarray], str]] = [
    ({"sentences": column(CHATS, b"a\xff")}, rf"^sentences, row 1: {UTF8}"),
    ({"conversations": column(CHATS, b"a\xff")}, rf"^conversations, row 1: {UTF8}"),
    ({"conversations": column(DEEP)}, "^conversations, row 0: the JSON is nested too deeply"),
    ({}, "got no inputs, wanted exactly one of"),
    ({"sentences": column(b"a"), "conversations": column(b"[]")}, "wanted exactly one of"),
    ({"tokens": TOKENS}, "wanted tokens and sequence_lengths together"),
    ({"sentences": column(b"a"), "sequence_lengths": TWO}, "sequence_lengths together"),
    ({"sentences": np.zeros((0, 1), np.object_)}, "sentences: got no rows"),
    ({"sentences": np.array([[b"a", b"b"]], np.object_)}, r"sentences: got shape \[1, 2\]"),
    ({"sentences": column(b"a"), "add_EOS": column(True, False)}, "add_EOS: got shape"),
    ({"tokens": TOKENS[0], "sequence_lengths": column(1, 1, 1, 1)}, r"wanted \[B, S\]"),
    ({"tokens": TOKENS, "sequence_lengths": TWO[:1]}, r"sequence_lengths: got shape \[1, 1\]"),
    ({"tokens": TOKENS, "sequence_lengths": TWO * 0}, "row 0: got 0, wanted 1 to 4"),
    ({"tokens": TOKENS, "sequence_lengths": TWO + 1}, "row 1: got 5, wanted 1 to 4"),
    ({"conversations": column(b"[{}")}, "row 0: not JSON"),
    ({"conversations": column(b"[]")}, "row 0: got .*, wanted a non-empty list of messages"),
    (
        {"conversations": column(b'{"role": "user"}')},
        "row 0: got .*, wanted a non-empty list of messages",
    ),
    (
        {"conversations": column(b'[{"role": "user", "content": 1}]')},
        r"^row 0: messages\[0\].content: ",
    ),
]


def test_kserve_request_that_is_malformed_is_refused() -> None:
    assert not not_refused(kserve.decode_request, MALFORMED)
