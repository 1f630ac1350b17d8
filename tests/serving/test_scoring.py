"""Completed turns, foreign chat templates and truncation, through every route of a gateway."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.protocols import ScoredRows, kserve, kserve_body
from nemo_aligner.serving.scoring import insert_refused
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.serving.fake_server import CONTRACT, total
from tests.serving.gateway_calls import GOOD, FakeClient, call, call_async, make, message


def test_a_turn_that_a_policy_has_ended_is_completed_as_the_template_does() -> None:
    """On routes of trainers and other servers, where it is counted; not on ours, or if disabled."""
    turn = TurnEnd("<|im_end|>", "\n", (7,), (8,))
    ended, whole, cut = "a<|im_end|>", "a<|im_end|>\n", "a rose"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    conversation = Conversation(said, tools=[{"type": "function", "function": {"name": "f"}}])
    client = FakeClient()
    client.turn_end_async = AsyncMock(side_effect=[ServingError("nobody"), turn])
    app = make(client)

    async def ask() -> tuple[int, str]:
        gone = await call_async(app, "/get_reward", {"query": [ended]})
        await call_async(app, "/get_reward", {"query": [ended, whole, cut]})
        await call_async(app, "/classify", {"input": ended})
        with_tools = {"messages": conversation.messages, "tools": conversation.tools}
        assert (await call_async(app, "/classify", with_tools)).status == 200
        await call_async(app, "/pooling", {"input": [[5, 7], [5, 7, 8], [5]]})
        await call_async(app, "/remote_rm", {"prompt": "a", "response": "<|im_end|>"})
        await call_async(app, "/classify", {"text": ended})
        await call_async(app, "/predict", {"inputs": ended})
        await call_async(app, "/v1/classify", {"model": "any", "input": ended})
        await call_async(app, "/v1/embeddings", {"model": "any", "input": ended})
        await call_async(app, "/v1/rewards", {"texts": [ended]})
        await call_async(app, "/v1/rewards", {"tokens": [[5, 7]]})
        for inputs in (kserve.encode_sentences([ended]), kserve.encode_tokens([[5, 7]])):
            body, headers = kserve_body.encode_body(inputs)
            path = "/v2/models/reward_model/infer"
            assert (await call_async(app, path, body, headers)).status == 200
        return gone.status, (await call_async(app, "/metrics")).body.decode()

    status, metrics = asyncio.run(ask())
    assert status == 503
    assert client.turn_end_async.await_count == 2
    assert client.asked == [
        [whole, whole, cut], [whole], [conversation], [[5, 7, 8], [5, 7, 8], [5]],
        [whole], [whole], [whole], [whole], [whole], [ended], [[5, 7]], [ended], [[5, 7]],
    ]  # fmt: skip
    counts = {"/get_reward": 1, "/classify": 2, "/pooling": 1, "/remote_rm": 1, "/predict": 1}
    counts |= {"/v1/classify": 1, "/v1/embeddings": 1}
    for path, count in counts.items():
        assert f'rows_total{{outcome="completed",route="{path}"}} {count}.0' in metrics

    for ends, completes in ((turn, False), (None, True)):
        client = FakeClient()
        client.turn_end_async = AsyncMock(return_value=ends)
        off = make(client, complete_turns=completes)
        assert call(off, "/classify", {"input": ended}).status == 200
        assert client.asked == [[ended]]


FRAME = SampleFrame(("<s>user: ",), ((1, 2),), "|bot:", "</s>\n")
OURS, OTHER = "<s>user: a|bot: b", "[INST] a [/INST] b"
# For each route a sample in the model's template and one in another, if it takes two.
IN_TWO_TEMPLATES: dict[str, Any] = {
    "/v1/rewards": {"texts": [OURS, OTHER]},
    "/get_reward": {"query": [OURS, OTHER]},
    "/remote_rm": {"prompt": "[INST] a [/INST]", "response": " b"},
    "/classify": {"input": [OURS, OTHER]},
    "/pooling": {"input": [[1, 2, 9], [2, 1]]},
    "/predict": {"inputs": [[OURS], [OTHER], ["a", "b"]]},
    "/v1/embeddings": {"input": [OURS, OTHER]},
}


def rows_counted(app: Any, path: str, outcome: str) -> float:
    shown = call(app, "/metrics").body.decode()
    found = re.search(rf'rows_total{{outcome="{outcome}",route="{path}"}} (.+)', shown)
    return float(found[1]) if found else 0.0


def test_text_in_another_template_is_counted_logged_and_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On every route for raw texts and ids; messages are written in the model's template."""
    client = FakeClient()
    client.sample_frame_async = AsyncMock(side_effect=[ServingError("nobody"), FRAME])
    app = make(client)
    assert call(app, "/get_reward", {"query": [OTHER]}).status == 503
    for path, body in IN_TWO_TEMPLATES.items():
        row = "0" if path == "/remote_rm" else "1"
        for _ in range(2):
            answer = call(app, path, body)
            assert (answer.status, answer.headers["x-foreign-template-rows"]) == (200, row), path
        assert rows_counted(app, path, "foreign_template") == 2, path
    # One warning per kind of fault and power of ten, because a run has millions of samples.
    unended = "<s>user: a|no reply"
    for _ in range(2):
        assert call(app, "/v1/rewards", {"texts": [unended]}).status == 200
    begins, tenth, lacks = capsys.readouterr().out.splitlines()
    assert tenth.endswith(". It is the 10th of its kind; the 100th is logged next")
    assert begins.startswith("Warning: /v1/rewards, row 1: it begins with '[INST] a [/INST] b'")
    assert begins.endswith(". It is the first of its kind; the 10th is logged next")
    assert lacks.startswith("Warning: /v1/rewards, row 0: it has no ")
    assert len(begins) < 240
    assert call(app, "/classify", {"text": [OTHER]}).headers["x-foreign-template-rows"] == "0"
    for path in ("/score", "/rerank", "/verify", "/compare"):
        assert "x-foreign-template-rows" not in call(app, path, GOOD[path]).headers, path
    assert client.sample_frame_async.await_count == 2
    ours = call(app, "/v1/rewards", {"texts": [OURS]})
    assert "x-foreign-template-rows" not in ours.headers


def test_text_in_another_template_is_rejected_if_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = FakeClient()
    client.sample_frame_async = AsyncMock(return_value=FRAME)
    app = make(client, reject_foreign_templates=True)
    for path, body in IN_TWO_TEMPLATES.items():
        answer = call(app, path, body)
        if path == "/v1/rewards":
            (error,) = answer.json["errors"]
            assert (error["row"], answer.json["rewards"][1]) == (1, None)
            assert answer.json["rewards"][0] == [total(OURS), -total(OURS)]
            assert "it begins with '[INST] a [/INST] b'" in error["message"]
        else:
            assert answer.status == 400, path
            assert "(gateway.reject_foreign_templates). Send messages" in message(answer), path
        assert rows_counted(app, path, "foreign_template") == 1, path
    # A refused_reward would not help: it is not for these samples.
    assert "refused_reward" not in capsys.readouterr().out
    assert client.asked == [[OURS]]
    assert call(app, "/v1/rewards", {"texts": [OTHER]}).json["rewards"] == [None]
    assert call(app, "/classify", {"input": OURS}).status == 200


def test_rejected_sample_gets_the_reward_that_is_set_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the routes of trainers that need a number for each sample; their log has the reason."""
    app = make(FakeClient(), refused_reward=-5.0)
    some = call(app, "/get_reward", {"query": ["a", "", "b", ""]})
    names = ("reward_sum", "reward_minus", "cut_to_seq_length", "foreign_template", "refused")
    assert some.json["rewards"] == some.json["scores"] == [48.5, -5.0, 49.0, -5.0]
    assert list(some.json["extra_logs"]) == [*names]
    assert some.json["extra_logs"]["reward_minus"] == [-97.0, -5.0, -98.0, -5.0]
    assert some.json["extra_logs"]["refused"] == [0.0, 1.0, 0.0, 1.0]
    assert call(app, "/get_reward", {"query": [""]}).json["rewards"] == [-5.0]
    assert call(app, "/get_reward", {"query": ["a"]}).json["extra_logs"]["refused"] == [0.0]
    assert call(app, "/remote_rm", {"prompt": "", "response": ""}).json == -5.0
    assert rows_counted(app, "/get_reward", "refused") == 3
    thought = {"output": [{"type": "reasoning", "id": "t", "summary": []}]}
    group = {**GOOD["/compare"], "response_objs": [thought, *GOOD["/compare"]["response_objs"]]}
    assert call(app, "/compare", group).json["rewards"] == [-5.0, total("ab") / 2]
    lines = capsys.readouterr().out.splitlines()
    no_reply = (
        "response_objs.0.output: got no message of the assistant at its end, wanted the reply"
    )
    empty = "the text is empty"
    assert lines == [
        f"Warning: {path}: a sample without a reward gets -5 (refused_reward): row {row}: {reason}."
        " It is the first of its kind; the 10th is logged next"
        for path, row, reason in (
            ("/get_reward", 1, empty),
            ("/remote_rm", 0, empty),
            ("/compare", 0, no_reply),
        )
    ]
    refused = call(make(), "/compare", group)
    assert (refused.status, message(refused)) == (400, no_reply)
    # The other routes reject it, and a failure of the server is no fault of the sample.
    assert call(app, "/classify", {"input": ""}).status == 400
    failing = FakeClient()
    failing.failure = ServingError("nobody")
    assert call(make(failing, refused_reward=-5.0), "/get_reward", {"query": ["a"]}).status == 503
    with pytest.raises(ConfigError, match="refused_reward: got inf, wanted a finite number"):
        make(FakeClient(), refused_reward=float("inf"))


def test_comparisons_have_the_row_numbers_of_the_request() -> None:
    """Also where rows of it were rejected before they could be compared."""
    pair = {"response_i": 0, "response_j": 1, "score_1": 4.0, "score_2": 2.0}
    rewards = np.array([[1.0], [2.0]], dtype=np.float32)
    scored = ScoredRows(rewards, {}, np.zeros(2, dtype=bool), comparisons=[pair])
    inserted = insert_refused(scored, {0: "no reply", 2: "no reply"})
    assert inserted.comparisons == [{**pair, "response_i": 1, "response_j": 3}]


def test_rejected_request_is_logged_by_path_and_status_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """OpenRLHF shows only the status of an error answer, so the log has to say what is wrong."""
    app = make()
    for _ in range(2):
        call(app, "/get_reward", {"query": ["a", ""]})
        call(app, "/get_reward", {"queries": ["a"]})
        call(app, "/remote_rm", {"prompt": "a"})
        call(app, "/", {"query": ["a"]})
        call(app, "/get_rewards", {"query": ["a"]})
        call(app, "/v1/rewards", {"query": ["a"], "labels": [""]})
        call(app, "/get_reward")
    ends, last = (
        "It is the first of its kind; the 10th is logged next",
        "Further ones are not logged",
    )
    lines = capsys.readouterr().out.splitlines()
    unknown = lines[4]
    assert unknown.startswith("Warning: /v1/rewards: rejected (HTTP 400): query: unknown field")
    assert unknown.endswith(f". A body with these fields belongs to /get_reward. {ends}")
    assert lines == [
        f"Warning: /get_reward: rejected (HTTP 400): row 1: the text is empty. With "
        f"gateway.refused_reward the sample would get that reward. {ends}",
        "Warning: /remote_rm: rejected (HTTP 400): response: required, but missing. " + ends,
        "Warning: '/': rejected (HTTP 404): this server has no such path. Rewards are at "
        "/v1/rewards, and at a trainer's own path, such as /get_reward (OpenRLHF) or /remote_rm "
        f"(slime). GET /docs lists all paths. {last}",
        "Warning: '/get_rewards': rejected (HTTP 404): this server has no such path; did you "
        f"mean /get_reward? GET /docs lists all paths. {last}",
        unknown,
        f"Warning: /get_reward: rejected (HTTP 405): got GET, wanted POST. {ends}",
    ]
    secret = make(token="secret")
    call(secret, "/get_reward", {"query": ["a"]})
    assert "HTTP 401): the bearer token is missing or wrong" in capsys.readouterr().out
    for number in range(200):
        call(app, f"/scan/{number}")
    assert len(capsys.readouterr().out.splitlines()) == 18
    # The scan leaves room for the rejections of routes.
    call(app, "/classify", {})
    assert "Warning: /classify: rejected (HTTP 400): got neither" in capsys.readouterr().out


LONG_TEXT = "z" * 50  # the fake client truncates it
CUT: dict[str, Any] = {
    "/v1/rewards": {"texts": ["a", LONG_TEXT]},
    "/get_reward": {"query": ["a", LONG_TEXT]},
    "/remote_rm": {"prompt": "a", "response": LONG_TEXT},
    "/classify": {"input": ["a", LONG_TEXT]},
    "/pooling": {"input": ["a", LONG_TEXT]},
    "/score": {"text_1": "a", "text_2": ["a", LONG_TEXT]},
    "/predict": {"inputs": [["a"], [LONG_TEXT]]},
    "/rerank": {"query": "a", "texts": ["a", LONG_TEXT]},
    "/v1/rerank": {"query": "a", "documents": ["a", LONG_TEXT]},
    "/v2/rerank": {"query": "a", "documents": ["a", LONG_TEXT]},
    "/v1/score": {"text_1": "a", "text_2": ["a", LONG_TEXT]},
    "/v1/classify": {"input": ["a", LONG_TEXT]},
    "/v1/embeddings": {"input": ["a", LONG_TEXT]},
    "/verify": {
        "responses_create_params": {"input": "a"},
        "response": {"output": [{"role": "assistant", "content": LONG_TEXT}]},
    },
    "/compare": {
        "conversation_history": [{"role": "user", "content": "a"}],
        "response_objs": [
            {"output": [{"role": "assistant", "content": text}]} for text in ("a", LONG_TEXT)
        ],
    },
}


def test_text_that_was_cut_has_a_sign_by_every_door() -> None:
    """Every route has a header, and a field if its protocol has room for one."""
    app, answers = make(), {}
    assert set(CUT) == set(GOOD)
    for path, body in CUT.items():
        answer = call(app, path, body)
        row = "0" if path in ("/remote_rm", "/verify") else "1"
        assert (answer.status, answer.headers.get("x-truncated-rows")) == (200, row), path
        assert rows_counted(app, path, "cut") == 1, path
        answers[path] = answer.json
        assert "x-truncated-rows" not in call(app, path, GOOD[path]).headers, path
    assert answers["/v1/rewards"]["truncated"] == [False, True]
    assert answers["/get_reward"]["extra_logs"]["cut_to_seq_length"] == [0.0, 1.0]
    for path in ("/classify", "/pooling", "/score", "/v1/score", "/v1/classify", "/v1/embeddings"):
        first, second = answers[path]["data"]
        assert ("truncated" in first, second["truncated"]) == (False, True), path
    assert [answers["/v2/rerank"]["results"][0]["truncated"]] == [True]
    (item,) = call(app, "/classify", {"text": [LONG_TEXT]}).json
    assert item["meta_info"]["truncated"] is True
    assert answers["/verify"]["truncated"] is True
    assert answers["/compare"]["metrics"]["truncated_rate"] == 0.5
    # TEI rejects a long text unless truncation is allowed; here only an explicit false rejects.
    for path in ("/predict", "/rerank"):
        refused = call(app, path, {**CUT[path], "truncate": False})
        assert (refused.status, refused.json["error_type"]) == (400, "Validation"), path
        assert refused.json["error"].startswith("row 1: the sample is longer than the model's"), (
            path
        )
        assert call(app, path, {**GOOD[path], "truncate": False}).status == 200


def test_header_of_rows_stays_short() -> None:
    answer = call(make(), "/v1/rewards", {"texts": [LONG_TEXT] * 5000})
    shown = answer.headers["x-truncated-rows"]
    assert shown.startswith("0, 1, 2, ")
    assert shown.endswith(", 99, and 4900 more")


def test_answers_say_whether_rewards_are_probabilities_or_log_odds() -> None:
    """If rewards are probabilities, TEI's scores from 0 to 1 are the rewards themselves."""
    odds = replace(CONTRACT, scored_position="turns", attributes=("right", "other"))
    probability = odds.with_readout(Readout("sigmoid", ((1.0,), (1.0,))))
    body = {"query": "a", "texts": ["b"], "raw_scores": False}
    for contract, scale in ((CONTRACT, "score"), (odds, "log_odds"), (probability, "probability")):
        app = make(FakeClient(contract))
        assert call(app, "/v1/rewards", {"texts": ["ab"]}).json["scale"] == scale
        assert call(app, "/v1/models").json["data"][0]["reward_scale"] == scale
        assert call(app, "/info").json["reward_scale"] == scale
        (rank,) = call(app, "/rerank", body).json
        assert rank["score"] == (total("ab") / 2 if scale == "probability" else 1.0)
    assert call(make(FakeClient(None)), "/v1/rewards", {"texts": ["ab"]}).json["scale"] is None
