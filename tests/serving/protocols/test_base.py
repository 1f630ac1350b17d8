"""What all protocols share, and /v1/rewards, OpenRLHF's /get_reward and slime's /remote_rm."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from pydantic import ValidationError

from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.front.app import ROUTES
from nemo_aligner.serving.protocols import ScoredRows, kserve, openrlhf, slime
from nemo_aligner.serving.protocols.base import MOST_ROWS, Served, text_of
from nemo_aligner.serving.protocols.rewards import ROUTES as REWARDS_ROUTES
from nemo_aligner.serving.protocols.strict_json import MOST_KEYS, MOST_LEVELS, read_json
from nemo_aligner.utils.errors import ServingError
from tests.serving.protocols.bodies import not_refused, parsed, scored

(REWARDS,) = REWARDS_ROUTES
(OPENRLHF,) = openrlhf.ROUTES
(SLIME,) = slime.ROUTES
TWO = np.array([[0.1, 0.7], [2.0, -4.0]], dtype=np.float32)
SERVED = Served("reward_model", ("helpfulness", "verbosity"), (1.0, 0.5))
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_one_reward_of_several_attributes_is_added_by_the_contracts_weights() -> None:
    one = Served("reward_model", ("reward",), (1.0,))
    assert one.one_reward(TWO[:, :1]) == [float(np.float32(0.1)), 2.0]  # unchanged
    wanted = [float(np.float32(np.float64(TWO[0, 0]) + TWO[0, 1] / 2)), 0.0]
    assert SERVED.one_reward(TWO) == wanted
    with pytest.raises(ServingError, match=r"the model has 2 attributes, .*wanted one reward"):
        Served("reward_model", ("a", "b"), None).one_reward(TWO)


def test_text_may_come_in_parts_and_what_is_none_is_refused() -> None:
    parts = [{"type": "input_text", "text": "a "}, {"type": "text", "text": "b"}]
    assert text_of(parts, "here") == "a b"
    assert text_of("a", "here") == "a"
    none: list[Any] = [None, 5, [{"type": "image_url"}], ["a"], [{"text": None}]]
    wanted = r"^here: got .*, wanted a string"
    assert not not_refused(lambda each: text_of(each, "here"), [(each, wanted) for each in none])


def test_routes_are_all_there_once_and_their_failures_have_statuses() -> None:
    paths = sorted(route.path for route in ROUTES if not route.marks)
    assert paths == [
        *("/classify", "/compare", "/get_reward", "/pooling", "/predict", "/remote_rm", "/rerank"),
        *("/score", "/v1/classify", "/v1/embeddings", "/v1/rerank", "/v1/rewards", "/v1/score"),
        *("/v2/rerank", "/verify"),
    ]
    assert [route.path for route in ROUTES if route.marks] == ["/classify", "/rerank"]
    statuses = {kind.label: kind.status for kind in FailureKind}
    assert statuses == {
        "bad request": 400,
        "unauthorized": 401,
        "unknown model": 404,
        "too large": 413,
        "unscored": 400,
        "busy": 503,
        "unreachable": 503,
        "slow": 503,
        "internal": 500,
    }
    for route in ROUTES:
        for kind in FailureKind:  # before the body was parsed
            answer = route.refuse(RequestError("the reason", kind), None)
            assert answer.status == kind.status, (route.path, kind)
            assert "the reason" in str(answer.content), (route.path, kind)
    answer = REWARDS.refuse(RequestError("why", FailureKind.unreachable), None)
    assert answer.content == {"error": {"kind": "unreachable", "message": "why"}}


LONG: list[tuple[str, str, list[Any]]] = [
    ("/v1/rewards", "texts", [5] * 1000),
    ("/v1/rewards", "tokens", [["a"] * 1000] * 5),
    ("/get_reward", "query", [5] * 1000),
    ("/classify", "input", [[None] * 1000] * 5),
    ("/pooling", "messages", [5] * 1000),
    ("/score", "queries", [5] * 1000),
    ("/score", "documents", [5] * 1000),
    ("/remote_rm", "prompt", [5] * 1000),
    ("/predict", "inputs", [["a", 5] * 1000] * 5),
    ("/rerank", "texts", [5] * 1000),
    ("/compare", "response_objs", [5] * 1000),
]


def test_lists_are_left_at_their_first_unfit_element() -> None:
    for path, field, wrong in LONG:
        route = next(each for each in ROUTES if each.path == path)
        body = {"query": ["a"], "queries": "a", "documents": "a"} if path != "/v1/rewards" else {}
        with pytest.raises(ServingError) as caught:
            route.read(parsed(route, {**body, field: wrong}))
        assert isinstance(caught.value.__cause__, ValidationError)
        # One case for each form that a list may have.
        assert caught.value.__cause__.error_count() <= 6, (path, field)


def test_rewards_are_read_of_texts_conversations_or_tokens() -> None:
    for form, rows in (("texts", ["a", "b"]), ("conversations", [TURNS])):
        request = REWARDS.read(parsed(REWARDS, {form: rows}))
        assert (request.texts, request.token_lists) == (rows, None)
    request = REWARDS.read(parsed(REWARDS, {"tokens": [[1, 2], [3]]}))
    assert (request.texts, request.token_lists) == (None, [[1, 2], [3]])


NO_REWARDS: list[tuple[Any, str]] = [
    ({}, "got no samples, wanted one of texts, conversations and tokens"),
    ({"texts": ["a"], "tokens": [[1]]}, "got texts and tokens, wanted one of"),
    ({"texts": []}, "texts: got 0, wanted at least 1"),
    ({"texts": "a"}, 'texts: got "a", wanted a list'),
    ({"texts": [1]}, "texts.0: got 1, wanted a string"),
    ({"tokens": [[1.5]]}, "tokens.0.0: got 1.5, wanted an integer"),
    ({"tokens": [[True]]}, "tokens.0.0: got true, wanted an integer"),
    ({"text": ["a"]}, r"text: unknown field; did you mean texts\?; known are texts, "),
    ({"seed": 1}, "seed: unknown field; known are texts, "),
    ({"a\nb": 1}, r'^"a\\nb": unknown field; known are texts, '),
    ({"texts": "a" * 99}, "a{50}[.]{3}, wanted a list"),
    ([], r"body: got \[\], wanted an object"),
    ({"texts": [1, 2, 3, 4, 5]}, "texts.0: got 1, wanted a string$"),
    (dict.fromkeys("vwxyz", 1), "and 2 more"),
]
NO_CONVERSATIONS: list[tuple[Any, str]] = [
    ([{"role": "user"}], "messages[0]: got an object with keys 'role', wanted content"),
    ([{"role": "nobody", "content": ""}], "messages[0]: got role 'nobody', wanted"),
    ("a", 'got "a", wanted a list of messages'),
    (5, "got 5, wanted"),
    ({"messages": TURNS, "kwargs": {}}, "got the key 'kwargs', wanted messages"),
    ({"messages": TURNS, "tools": [1]}, "tools[0]: got 1, wanted an object"),
    (
        [TURNS[0], {**TURNS[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "messages[1].tool_calls[0].function.arguments: got '{', wanted a JSON object",
    ),
    ([{"role": "user", "content": [{"type": "image_url"}]}, TURNS[1]], "messages[0].content[0]: "),
]
NO_JSON = [b"", b"{", b"\xff", b"[" * 100_000, b'{"texts": ["\\ud800"]}']


def test_rewards_of_another_body_are_refused_in_a_line() -> None:
    assert not not_refused(lambda body: REWARDS.read(parsed(REWARDS, body)), NO_REWARDS)
    assert not not_refused(REWARDS.parse, [(body, "JSON") for body in NO_JSON])


def test_rewards_of_a_conversation_that_cannot_be_read_are_an_error_of_its_row() -> None:
    given = [TURNS, *(each for each, _ in NO_CONVERSATIONS), TURNS]
    request = REWARDS.read(parsed(REWARDS, {"conversations": given}))
    assert request.texts == [TURNS, TURNS]
    assert [*request.refused] == [*range(1, len(given) - 1)]
    wanted = [pattern for _, pattern in NO_CONVERSATIONS]
    found = [*request.refused.values()]
    assert not [pair for pair in zip(found, wanted, strict=True) if not pair[0].startswith(pair[1])]


DUPLICATES: list[tuple[bytes, str]] = [
    (b'{"texts": ["a"], "texts": ["b"]}', 'got the key "texts" twice in one object; send it once'),
    # The same key with other escapes, and inside a message.
    (b'{"a": 1, "\\u0061": 2}', 'got the key "a" twice'),
    (
        b'{"conversations": [[{"role": "user", "content": "a", "name": 1, "content": "b"}]]}',
        'got the key "content" twice in one object next to "role", "name"',
    ),
    (b'{"\\ud800": 1, "\\ud800": 2}', r'got the key "\\ud800" twice'),
    (b'{"a": {"": 1, "": 2}}', 'got the key "" twice'),
]


def test_keys_that_come_twice_are_refused_by_name() -> None:
    assert not not_refused(REWARDS.parse, DUPLICATES)
    twice = b'[{"role": "user", "content": "a", "content": "b"}]'
    conversation = {"conversations": np.array([[twice]], np.object_)}
    named = 'conversations, row 0: got the key "content" twice in one object next to "role"'
    assert not not_refused(kserve.decode_request, [(conversation, named)])
    # Different objects may have the same key.
    assert OPENRLHF.parse(b'{"query": ["a"], "b": {"c": 1}, "d": {"c": 1}}').query == ["a"]


def _nested(levels: int) -> bytes:
    return b'{"query": ["a"], "b": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def _keys(count: int) -> bytes:
    return json.dumps({"query": ["a"], **{str(key): key for key in range(count - 1)}}).encode()


def test_json_is_read_as_deep_and_wide_as_is_documented_and_no_further() -> None:
    assert OPENRLHF.parse(_nested(MOST_LEVELS)).query == ["a"]
    assert OPENRLHF.parse(_keys(MOST_KEYS)).query == ["a"]
    beyond = [
        (_nested(MOST_LEVELS + 2), "Invalid JSON: recursion limit exceeded"),
        (_keys(MOST_KEYS + 1), "got an object of 10001 keys, wanted at most 10000"),
        (b'{"query": ["a"], "b": ' + b"1" * 5000 + b"}", "Invalid JSON: number out of range"),
    ]
    assert not not_refused(OPENRLHF.parse, beyond)
    # The parser of KServe's rows has the same limits.
    assert read_json(_nested(MOST_LEVELS).decode())["query"] == ["a"]
    beyond[0] = (_nested(MOST_LEVELS + 1), "nested too deeply; wanted at most 200 levels")
    beyond[2] = (beyond[2][0], r"not JSON \(Exceeds the limit")
    assert not not_refused(lambda body: read_json(body.decode()), beyond)


def test_rewards_have_their_rows_or_their_errors() -> None:
    rewards = np.array([[0.1, -2.0], [np.nan, np.nan]], dtype=np.float32)
    scored = ScoredRows(rewards, {1: "the text is empty"}, np.array([True, False]), "cafe", "f00d")
    shaped = replace(
        scored,
        raw_rewards=np.array([[2.0, 3.0], [np.nan, np.nan]]),
        deviation=np.array([[0.25], [np.nan]]),
        passed=np.array([1.0, np.nan]),
    )
    request = parsed(REWARDS, {"texts": ["a", ""]})
    answer, of_shaped = (REWARDS.answer(request, each, SERVED) for each in (scored, shaped))
    assert answer == {
        "rewards": [[float(np.float32(0.1)), -2.0], None],
        "attributes": ["helpfulness", "verbosity"],
        "scale": None,
        "contract_hash": "cafe",
        "model_fingerprint": "f00d",
        "truncated": [True, False],
        "errors": [{"row": 1, "message": "the text is empty"}],
    }
    assert np.float32(json.loads(json.dumps(answer))["rewards"][0][0]) == rewards[0, 0]
    # Fields that a server adds if it shapes rewards.
    added = {"raw_rewards": [[2.0, 3.0], None], "deviation": [[0.25], None], "passed": [True, None]}
    assert str(of_shaped) == str({**answer, **added})
    # Requested outputs of a model with several outputs per attribute.
    read = replace(scored, spread=np.array([[0.5, 1.0], [np.nan] * 2]), outputs=np.ones((2, 6)))
    asked = parsed(REWARDS, {"texts": ["a", ""], "outputs": True})
    plain, of_outputs = (REWARDS.answer(each, read, SERVED) for each in (request, asked))
    assert plain == answer
    assert of_outputs == {**answer, "spread": [[0.5, 1.0], None], "outputs": [[1.0] * 6] * 2}
    for each in (answer, of_shaped, of_outputs):
        REWARDS.response.model_validate(each)


def _pairs(*names: str) -> dict[str, Any]:
    return {"text_1": "a", "text_2": "b", **dict.fromkeys(names, "c")}


# Bodies with samples under two names, one of which would be ignored.
BOTH: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/rewards", {"texts": ["a"], "conversations": [TURNS]}, "got texts and conversations"),
    ("/v1/rewards", {"texts": ["a"], "input": "b"}, "input: unknown field"),
    ("/get_reward", {"query": ["a"], "texts": ["b"]}, "got query and texts"),
    ("/remote_rm", {"prompt": "a", "response": "b", "messages": TURNS}, "got prompt and messages"),
    ("/classify", {"input": "a", "messages": TURNS}, "got both input and messages"),
    ("/classify", {"input": "a", "prompt": "b"}, "got input and prompt"),
    ("/classify sglang", {"text": "a", "input": "b"}, "got text and input"),
    ("/classify sglang", {"input_ids": [1], "messages": TURNS}, "got input_ids and messages"),
    ("/pooling", {"messages": TURNS, "text": "b"}, "got messages and text"),
    ("/pooling", {"input": [1, 2], "input_ids": [1]}, "got input and input_ids"),
    ("/v1/classify", {"input": "a", "messages": TURNS}, "got both input and messages"),
    ("/v1/embeddings", {"input": "a", "messages": TURNS}, "got input and messages"),
    (
        "/score",
        _pairs("queries", "documents"),
        "got documents, queries, text_1, text_2, wanted",
    ),
    ("/score", _pairs("data_1"), "got data_1, text_1, text_2, wanted"),
    ("/v1/score", _pairs("input"), "got text_1 and input"),
    ("/predict", {"inputs": "a", "texts": ["b"]}, "got inputs and texts"),
    ("/rerank", {"query": "a", "texts": ["b"], "messages": TURNS}, "got texts and messages"),
    (
        "/rerank documents",
        {"query": "a", "documents": ["b"], "texts": ["c"]},
        "documents and texts",
    ),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "texts": ["c"]}, "documents and texts"),
]


def test_samples_by_two_names_are_refused_by_both_of_them() -> None:
    routes = {route.path: route for route in reversed(ROUTES)}
    marked = {"/classify": "/classify sglang", "/rerank": "/rerank documents"}
    routes |= {marked[route.path]: route for route in ROUTES if route.marks}

    def read(path: str, body: Any) -> Any:
        return routes[path].read(parsed(routes[path], body))

    assert not not_refused(read, BOTH)
    # A name with an empty value is accepted.
    empty = {"input": "a", "messages": None, "prompt": "", "text": None}
    assert read("/pooling", empty).texts == ["a"]
    assert read("/score", {**_pairs(), "queries": None, "data_1": None}).num_rows == 1


TOO_MANY: list[tuple[str, str, Any]] = [
    ("/v1/rewards", "texts", "a"),
    ("/v1/rewards", "conversations", 5),
    ("/v1/rewards", "tokens", [1]),
    ("/get_reward", "query", "a"),
    ("/classify", "input", [1]),
    ("/score", "documents", "a"),
    ("/predict", "inputs", ["a"]),
    ("/rerank", "texts", "a"),
    ("/v1/rerank", "documents", "a"),
    ("/compare", "response_objs", {"output": []}),
]


def test_samples_beyond_every_limit_are_refused_before_each_is_looked_at() -> None:
    for path, field, sample in TOO_MANY:
        route = next(route for route in ROUTES if route.path == path)
        required = {"queries": "a", "query": "a", "conversation_history": TURNS[:1]}
        rest = {} if path == "/v1/rewards" else required
        body = {**rest, field: [sample] * MOST_ROWS}
        assert len(getattr(parsed(route, body), field)) == MOST_ROWS
        body[field].append(sample)
        with pytest.raises(RequestError, match="got more than 65536 samples") as caught:
            parsed(route, body)
        assert caught.value.kind is FailureKind.too_large
    # The token ids that accompany a text are not samples.
    classify = next(route for route in ROUTES if route.path == "/classify")
    assert classify.read(parsed(classify, {"input": [1] * (MOST_ROWS + 1)})).num_rows == 1


def test_openrlhf_queries_are_raw_texts_and_the_rest_has_no_part_in_it() -> None:
    body = {"query": ["a b", "c"], "prompts": ["a", "c"], "labels": [None, "7"], "more": 1}
    assert OPENRLHF.read(parsed(OPENRLHF, body)).texts == ["a b", "c"]
    wrong: list[tuple[Any, str]] = [
        ({}, "query: required, but missing"),
        ({"query": []}, "query: .*at least 1"),
        ({"query": "a"}, "query: .*wanted a list"),
        ({"query": [None]}, "query.0: got null, wanted a string"),
    ]
    assert not not_refused(lambda body: parsed(OPENRLHF, body), wrong)


def test_openrlhf_has_the_answer_of_its_own_server_and_fastapis_errors() -> None:
    request = parsed(OPENRLHF, {"query": ["a"]})
    one = OPENRLHF.answer(
        request, scored([1.5], [-2.0]), Served("reward_model", ("reward",), (1.0,))
    )
    logged = {"cut_to_seq_length": [0.0, 0.0], "foreign_template": [0.0, 0.0]}
    assert one == {"rewards": [1.5, -2.0], "scores": [1.5, -2.0], "extra_logs": logged}
    # Several attributes are merged to one reward, and each is logged.
    served = Served("reward_model", ("helpful", "long"), (1.0, 0.25))
    two = OPENRLHF.answer(request, scored([1.5, 2.0]), served)
    assert two["rewards"] == two["scores"] == [2.0]
    columns = {"reward_helpful": [1.5], "reward_long": [2.0]}
    assert two["extra_logs"] == {**columns, "cut_to_seq_length": [0.0], "foreign_template": [0.0]}
    refused = OPENRLHF.refuse(RequestError("row 1: empty", FailureKind.bad_request), None)
    assert (refused.status, refused.content) == (400, {"detail": "row 1: empty"})


def test_slimes_sample_is_a_text_or_a_conversation_and_its_reward_a_bare_number() -> None:
    # As remote_rm of slime/rollout/rm_hub/__init__.py sends it.
    body = {"prompt": "a ", "response": "b", "label": {"answer": 7}}
    assert SLIME.read(parsed(SLIME, body)).texts == ["a b"]
    of_messages = {**body, "prompt": TURNS[:1]}
    assert SLIME.read(parsed(SLIME, of_messages)).texts == [TURNS]
    found = SLIME.answer(parsed(SLIME, body), scored([1.5, 2.0]), SERVED)
    assert SLIME.response.model_validate(found)
    assert json.dumps(found) == "2.5"
    wrong: list[tuple[Any, str]] = [
        ({"prompt": "a"}, "response: required, but missing"),
        ({"prompt": "a", "response": None}, "response: got null, wanted a string"),
        ({"prompt": [], "response": "b"}, "prompt: got no message, wanted a string or"),
        ({"prompt": [{"role": "user"}], "response": "b"}, r"messages\[0\]: got .*wanted content"),
    ]
    assert not not_refused(lambda body: SLIME.read(parsed(SLIME, body)), wrong)
