"""How a call is split into requests, and what happens to rows that a server rejects."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nemo_aligner.contract.messages import Conversation, read_text
from nemo_aligner.serving.client import RefusedError, RewardClient, partial_requests
from nemo_aligner.serving.client.partial_requests import (
    PartialRequest,
    requests_of_texts,
    requests_of_tokens,
)
from nemo_aligner.serving.client.server import RemoteServer
from nemo_aligner.serving.parts import prompt_keys
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.utils.errors import ConfigError
from tests.serving.client.misbehaving import Misbehaving, eventually, output, refuse, seconds
from tests.serving.fake_server import CONTRACT, total

# A server's message when Triton answers, which has no status 413.
TOO_LARGE = (
    400,
    {"error": "got a request of 9 bytes, wanted at most 8 (server.max_request_bytes)"},
)


TEXTS = ("a", "!one", "b", "!two", "c")


def test_refused_rows_are_nan_with_their_reasons(
    lone: Misbehaving, caplog: pytest.LogCaptureFixture
) -> None:
    for numbered in (True, False):
        lone.answer = partial(refuse, numbered=numbered)
        caplog.clear()
        with RewardClient(lone.url) as client:
            scored = client.score_rows(TEXTS)
            assert scored.errors == {1: "no one", 3: "no two"}
            assert [str(row[0]) for row in scored.rewards] == ["97.0", "nan", "98.0", "nan", "99.0"]
            assert caplog.messages == ["2 of 5 samples have no reward; row 1: no one"]
            same = client.score(TEXTS, on_error="nan")
            assert str(same.tolist()) == str(scored.rewards.tolist())


def test_refused_rows_cost_a_request_each_or_are_found_by_halves(lone: Misbehaving) -> None:
    texts = ["a"] * 32
    texts[3] = texts[17] = "!bad"
    with RewardClient(lone.url) as client:
        assert list(client.score_rows(texts).errors) == [3, 17]
        assert len(lone.asked) == 3
        lone.asked.clear()
        lone.answer = partial(refuse, numbered=False)
        texts[3] = "a"
        assert list(client.score_rows(texts).errors) == [17]
        assert len(lone.asked) == 1 + 2 * 5


def test_refused_rows_in_an_answer_cost_no_request(lone: Misbehaving) -> None:
    def answer(texts: list[str]) -> Any:
        errors = ["no " + text[1:] if text.startswith("!") else "" for text in texts]
        outputs = lone._rewards(texts)["outputs"]
        if all(errors):  # then a gateway may know no contract
            del outputs[1:]
        return 200, {"outputs": [*outputs, output("errors", "BYTES", [len(texts), 1], errors)]}

    lone.answer = answer
    with RewardClient(lone.url) as client:
        assert str(client.score(["!b"], on_error="nan").tolist()) == "[[nan]]"
        scored = client.score_rows(TEXTS)
        assert (scored.errors, scored.contract_hash) == ({1: "no one", 3: "no two"}, CONTRACT.hash)
        assert [str(row[0]) for row in scored.rewards] == ["97.0", "nan", "98.0", "nan", "99.0"]
        lone.answer = lambda texts: (200, {**(wide := lone._rewards(texts)), "outputs": [
            *wide["outputs"], output("errors", "BYTES", [2, 1], ["", "more"])]})  # fmt: skip
        assert "does not have a row" in seconds(client.score_rows, ["a"])[1]
    assert len(lone.asked) == 3


def test_rows_that_a_gateways_judge_fails_on_are_not_refused(lone: Misbehaving) -> None:
    """A trainer gives ``refused_reward`` only to rejected rows."""

    def answer(texts: list[str]) -> Any:
        marks = [[*"!?*"].index(text[0]) + 1 if text[0] in "!?*" else 0 for text in texts]
        reasons = ["", "no", "judge: no", "slow"]
        columns = {"errors": ("BYTES", [reasons[mark] for mark in marks])}
        columns["unscored"] = ("INT32", [max(mark - 1, 0) for mark in marks])
        added = [
            output(name, kind, [len(texts), 1], rows) for name, (kind, rows) in columns.items()
        ]
        return 200, {"outputs": [*lone._rewards(texts)["outputs"], *added]}

    lone.answer, lone.limit = answer, 2
    with RewardClient(lone.url) as client:
        scored = client.score_rows(["a", "b", "c", "?", "!", "d"])
        assert (scored.errors, scored.rejected) == ({3: "judge: no", 4: "no"}, {4: "no"})
        assert scored.take([3, 4]).unscored == {0}
        scored = client.score_rows(["a", "b", "*", "?"])
        assert (scored.unscored, scored.temporary) == ({2, 3}, {2})
        assert scored.take([2, 0]).temporary == {0}
        # With combine.fail_requests, the gateway does not set the row aside.
        lone.answer = lambda texts: (400, {"error": "row 1: judge: no", "kind": "unscored"})
        with pytest.raises(RefusedError, match="row 1: judge: no"):
            client.score_rows(["a", "b"])


def test_probes_are_sent_one_by_one_because_servers_count_larger_requests(
    lone: Misbehaving,
) -> None:
    with RewardClient(lone.url) as client:
        assert client.score_rows(["!a", "b", "!c"], is_probe=True).errors == {0: "no a", 2: "no c"}
    assert sorted(lone.asked) == [["!a"], ["!c"], ["b"]]


def test_refused_rows_are_an_error_with_the_callers_number(lone: Misbehaving) -> None:
    lone.limit = 2
    with RewardClient(lone.url) as client, pytest.raises(RefusedError) as caught:
        client.score(["a", "b", "c", "!d"])
    assert str(caught.value) == f"{lone.url}, reward_model: row 3: no d"
    assert caught.value.status == 400


def test_refused_rows_may_be_all_or_none(lone: Misbehaving) -> None:
    with RewardClient(lone.url) as client:
        assert str(client.score(["!a", "!b"], on_error="nan").tolist()) == "[[nan], [nan]]"
        client.score(["a"])
        assert client.score(["!a"], on_error="nan").shape == (1, 2)
        lone.answer = lambda texts: (400, {"error": "unexpected inference input"})
        assert "unexpected" in seconds(client.score_rows, ["a", "b", "c"])[1]
        with pytest.raises(ConfigError, match="on_error: got 'none', wanted 'raise' or"):
            client.score(["a"], on_error="none")  # type: ignore[arg-type]


def test_refused_rows_may_have_one_reason_and_fill_a_request(lone: Misbehaving) -> None:
    lone.answer = lambda texts: (
        (400, {"error": "sample too long"}) if any(text.startswith("!") for text in texts) else None
    )
    for limit in (32, 2):  # with 2, no other row is in the request of the bad ones
        lone.limit = limit
        with RewardClient(lone.url) as client:
            scored = client.score_rows(["!x", "!y", "a", "b"])
            assert scored.errors == dict.fromkeys((0, 1), "sample too long")
            assert scored.rewards[2:, 0].tolist() == [97, 98]
            assert "sample too long" in seconds(client.score_rows, ["!x", "!y", "!z"])[1]


def test_refused_rows_are_not_those_that_the_model_fails_on(lone: Misbehaving) -> None:
    def answer(texts: list[str]) -> Any:
        return (500, {"error": f"row {texts.index('b')}: not finite"}) if "b" in texts else None

    lone.answer, lone.limit = answer, 2
    with RewardClient(lone.url) as client:
        for ask in (client.score_rows, partial(client.score, on_error="nan")):
            with pytest.raises(RefusedError, match="row 2: not finite") as caught:
                ask(["a", "a", "b"])
            assert caught.value.status == 500
        assert client.score_rows(["a"]).errors == {}


def test_refused_rows_are_those_that_cannot_be_sent(lone: Misbehaving) -> None:
    with RewardClient(lone.url) as client:
        assert str(client.score_tokens([[]], on_error="nan").tolist()) == "[[nan]]"
        with pytest.raises(RefusedError, match="row 1: it has no tokens") as caught:
            client.score_tokens([[5], []])
        assert caught.value.status == 400
        with pytest.raises(TypeError, match="token_lists, row 0: got 5, wanted"):
            client.score_tokens([5, 6])  # type: ignore[list-item]
        assert lone.asked == []
        scored = client.score_rows(["a", "half \ud83d", "b"])
        assert scored.errors[1].startswith("it cannot be sent: 'utf-8' codec")
        assert scored.rewards[:, 0].tolist()[::2] == [97, 98]
        assert "row 1: it cannot be sent" in seconds(client.score, ["a", "\ud83d"])[1]
        endless: list[Any] = []
        endless.append(endless)
        deep: Any = 1
        for _ in range(100_000):
            deep = [deep]
        said = [{"role": "assistant", "content": "a", "of": each} for each in (endless, deep, {1})]
        scored = client.score_rows(["a", *([each] for each in said)])
        assert [*scored.errors] == [1, 2, 3]
        assert all(why.startswith("it cannot be sent: ") for why in scored.errors.values())
        assert scored.rewards[0, 0] == 97


def test_malformed_sample_is_left_to_the_servers(servers: list[Misbehaving]) -> None:
    """With several servers, the client reads the beginning of a sample."""
    samples: list[Any] = [5, None, {"messages": None}, {"messages": {}}, {"role": "assistant"}]
    with RewardClient([server.come().url for server in servers[:2]]) as client:
        for sample in samples[:-1]:
            assert client.score_rows([sample]).rewards[0, 0] == total(json.dumps(sample))
        with pytest.raises(TypeError, match="got the messages of one text"):
            client.score_rows(samples[-1:])


def test_refused_for_its_size_a_request_is_sent_in_parts(lone: Misbehaving) -> None:
    for refusal in ((413, b"<html>too large"), TOO_LARGE):
        with RewardClient(lone.url) as client:
            lone.answer = lambda texts, no=refusal: no if len(texts) > 2 else None
            assert client.score(list("abcde"))[:, 0].tolist() == [97, 98, 99, 100, 101]
            lone.answer = lambda texts, no=refusal: no if "".join(texts) != "a" else None
            seconds(client.score, ["a", "b"])
            assert list(client.score_rows(["a", "b"]).errors) == [1]


def split_texts(texts: list[Any], size: int, limit: int) -> list[PartialRequest]:
    return [part for request in requests_of_texts(texts) for part in request.split(size, limit)]


def test_split_parts_have_one_kind_of_row_and_those_of_like_length() -> None:
    chat = [{"role": "assistant", "content": "hi"}]
    texts = ["a", chat, "b", "c", chat]
    parts = split_texts(texts, 2, 2)
    assert [part.rows for part in parts] == [[0, 2], [3], [1, 4]]
    for part in parts:
        assert kserve.decode_request(part.inputs).texts == [texts[row] for row in part.rows]
    (request,) = requests_of_tokens([[1] * 9, [2], [3] * 8, [4, 4]])
    parts = request.split(2)
    assert [part.rows for part in parts] == [[1, 3], [2, 0]]
    assert [part.inputs["tokens"].shape for part in parts] == [(2, 2), (2, 9)]


def replies(*prompts: int) -> list[Any]:
    """Build a conversation for each prompt; the same number is the same prompt."""
    return [
        [
            {"role": "user", "content": f"prompt {prompt}"},
            {"role": "assistant", "content": f"reply {row}"},
        ]
        for row, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("num_rows", "group", "size", "sizes"),
    [
        (129, 3, 128, [126, 3]),
        (384, 6, 128, [126, 126, 126, 6]),
        (264, 12, 128, [120, 120, 24]),
        (8, 8, 4, [8]),  # one prompt, two servers
        (96, 12, 48, [48, 48]),  # eight prompts, two servers
        (90, 3, 30, [30, 30, 30]),
        (400, 200, 128, [200, 200]),
        (500, 500, 128, [250, 250]),  # the server takes 250
    ],
)
@pytest.mark.parametrize("is_scattered", [False, True])
def test_split_parts_have_all_replies_to_a_prompt(
    num_rows: int, group: int, size: int, sizes: list[int], is_scattered: bool
) -> None:
    num_prompts = num_rows // group
    prompts = [row % num_prompts if is_scattered else row // group for row in range(num_rows)]
    parts = split_texts(replies(*prompts), size, 250)
    assert [len(part.rows) for part in parts] == sizes
    assert sorted(row for part in parts for row in part.rows) == [*range(num_rows)]
    found = [prompt for part in parts for prompt in {prompts[row] for row in part.rows}]
    assert len(found) == max(num_prompts, len(parts) if group > 250 else 0)


def test_split_parts_tell_prompts_by_principle_and_not_by_the_calls_of_a_reply() -> None:
    asked, said = replies(1)[0]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    plain, called = [asked, said], [asked, call, {"role": "tool", "content": "1"}, said]
    judged = {"messages": plain, "principle": "correctness"}
    parts = split_texts([plain, Conversation(plain, principle="correctness"), called, judged], 1, 9)
    assert [part.rows for part in parts] == [[0, 2], [1, 3]]
    malformed: list[Any] = [5, {"messages": [None, {}]}, 5, [{"role": "user", "content": {1j}}] * 2]
    assert [part.rows for part in split_texts(malformed, 2, 9)] == [[0, 1], [2, 3]]
    assert [part.rows for part in split_texts([[said]] * 3, 2, 9)] == [[0, 1], [2]]  # no prompt


def test_split_parts_have_the_groups_of_the_judge_however_a_prompt_is_spelled() -> None:
    asked, said = replies(1)[0]
    spellings = [
        [asked, said],
        [{**asked, "name": None}, said],
        {"messages": [asked, said]},
        {"messages": [asked, said], "tools": []},
        {"messages": [asked, said], "tools": None, "principle": None},
    ]
    assert [part.rows for part in split_texts(spellings, 1, 9)] == [[0, 1, 2, 3, 4]]
    assert len(set(asyncio.run(prompt_keys([read_text(each) for each in spellings])))) == 1


COMBINED = replace(CONTRACT, shaping=json.dumps({"combine": {}, "model": {}, "judge": {}}))
OLD: Any = "the contract of a server of NVIDIA's NeMo-Aligner, which publishes none"
ENSEMBLE = replace(CONTRACT, shaping=json.dumps({"ensemble": {"combine": "mean"}}))


def test_replies_to_a_prompt_go_to_one_gateway_if_it_may_compare_them(
    servers: list[Misbehaving], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = servers[0].come(), servers[1].come()
    cases: list[tuple[Any, Any, list[int]]] = [
        (CONTRACT, [1] * 8, [4, 4]),
        (ENSEMBLE, [1] * 8, [4, 4]),
        (COMBINED, [1] * 8, [8]),
        (COMBINED, [1] * 4 + [2] * 4, [4, 4]),
        (COMBINED, [1] * 3 + [2] * 5, [3, 5]),
        (OLD, [1] * 8, [4, 4]),
        (None, [1] * 8, [8]),
    ]
    for contract, prompts, sizes in cases:
        for each in (one, other):
            each.asked.clear()
            each.contract, each.is_old = contract, contract is OLD
            each.answer = lambda texts: time.sleep(0.02)
        with RewardClient([one.url, other.url]) as client:
            client.score(replies(*prompts))
        assert sorted(map(len, one.asked + other.asked)) == sizes, prompts
    # Requests that are too large are also split between prompts, as long as there are several.
    one.answer = lambda texts: TOO_LARGE if len(texts) > 4 else None
    with RewardClient(one.url) as client:
        client.score(replies(1, 1, 1, 2, 2, 2, 2))
        assert sorted(map(len, one.asked[-3:])) == [3, 4, 7]
        assert not caplog.messages
        client.score(replies(1, 1, 1, 1, 1))
    assert "5 replies to the same prompt are sent in several requests" in caplog.text
    caplog.clear()
    one.contract = CONTRACT
    with RewardClient(one.url) as client:
        client.score(replies(1, 1, 1, 1, 1))
    assert not caplog.messages  # nothing is compared


def test_contract_is_fetched_once_if_replies_to_a_prompt_do_not_fit_into_one_request(
    lone: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[RemoteServer] = []
    check = RemoteServer.check_contract
    monkeypatch.setattr(
        RemoteServer, "check_contract", lambda server: fetched.append(server) or check(server)
    )
    lone.limit = 1024
    cases = [(CONTRACT, [128, 128]), (OLD, [128, 128]), (COMBINED, [256]), (None, [256])]
    for lone.contract, sizes in cases:
        fetched.clear()
        lone.is_old = lone.contract is OLD
        with RewardClient(lone.url) as client:
            client.score(replies(1, 1))
            client.score(["a"] * 256)
            assert not fetched
            for _ in range(2):
                lone.asked.clear()
                client.score(replies(*[1] * 256))
                assert sorted(map(len, lone.asked)) == sizes
        assert len(fetched) == 1


def test_split_parts_are_encoded_when_they_are_sent(
    lone: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a call of millions of rows has all of them in memory twice."""
    encode, encoded, hold = kserve.encode_sentences, [], threading.Event()
    monkeypatch.setattr(
        kserve, "encode_sentences", lambda texts: encoded.append(texts) or encode(texts)
    )
    lone.answer, lone.limit = lambda texts: hold.wait(20) and None, 1
    with RewardClient(lone.url, max_connections=2) as client:
        future = client.score_future(list("abcdef"))
        assert eventually(lambda: len(lone.asked) == 2)
        assert encoded == [["a"], ["b"]]
        hold.set()
        assert future.result()[:, 0].tolist() == [97, 98, 99, 100, 101, 102]
    assert len(encoded) == 6


def test_few_large_requests_are_encoded_at_once(
    lone: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows share their prompt in memory, but each is sent with a copy of it."""
    lone.limit = 2
    for name, limit in {"SHORT_CHARACTERS": 10, "_MOST_IN_FLIGHT": 80}.items():
        monkeypatch.setattr(partial_requests, name, limit)
    encode, threads = kserve.encode_sentences, set()
    monkeypatch.setattr(
        kserve,
        "encode_sentences",
        lambda texts: threads.add(threading.current_thread().name) or encode(texts),
    )
    lone.answer = lambda texts: time.sleep(0.02)
    texts = ["a" * 10] * 12 + ["b" * 200]
    with RewardClient(lone.url) as client:
        assert client.score(texts)[:, 0].tolist() == [total(text) for text in texts]
        assert sorted(map(len, lone.asked)) == [1, 2, 2, 2, 2, 2, 2]
        assert (lone.most_at_once, "reward client" in threads) == (2, False)
        client.score(["a"])
        assert "reward client" in threads


def test_error_about_a_missing_answer_says_how_many_rows_were_answered(
    lone: Misbehaving,
) -> None:
    """Deadlines are those of the whole call, or of a request; or the server is gone."""
    hold = threading.Event()
    lone.answer = lambda texts: hold.wait(20) and None if texts[0] > "c" else refuse(texts)
    lone.limit = 1
    name, progress = f"{lone.url}, reward_model: timed out: no answer", "3 of 6 rows were answered"
    texts = ["a", "!b", "c", "d", "e", "f"]
    for settings, reason in (
        ({"timeout_s": 0.6}, "within 0.6 s (timeout_s)"),
        (
            {"timeout_s": None, "request_timeout_s": 0.6},
            "to a request within 0.6 s (request_timeout_s)",
        ),
    ):
        with RewardClient(lone.url, **settings) as client:
            assert seconds(client.score_rows, texts)[1] == f"{name} {reason}; {progress}"
    with RewardClient(lone.url, retry_s=0) as client:
        future = client.score_future(texts, on_error="nan")
        lone.asked.clear()
        assert eventually(lambda: len(lone.asked) == 6)
        lone.go()
        assert seconds(future.result)[1].endswith(f"(retry_s); {progress}")
    hold.set()


def test_request_timeout_is_not_that_of_a_call_of_many_requests(lone: Misbehaving) -> None:
    lone.answer, lone.limit = lambda texts: time.sleep(0.2), 1
    settings = {"max_connections": 1, "timeout_s": None}
    with RewardClient(lone.url, request_timeout_s=0.8, **settings) as client:
        started_at = time.monotonic()
        assert client.score(list("abcdef")).shape == (6, 2)
        assert time.monotonic() - started_at > 1
