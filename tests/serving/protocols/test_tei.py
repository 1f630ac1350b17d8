"""/predict and /rerank of Text Embeddings Inference: bodies, answers and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoreRequest
from nemo_aligner.serving.protocols.base import Served
from nemo_aligner.serving.protocols.tei import ROUTES
from tests.serving.protocols.bodies import not_refused, parsed, scored

PREDICT, RERANK = ROUTES
SERVED = Served("reward_model", ("helpful", "long"), (1.0, 0.5))
FIRST = [{"score": 2.0, "label": "long"}, {"score": 1.5, "label": "helpful"}]
SECOND = [{"score": -0.5, "label": "helpful"}, {"score": -3.0, "label": "long"}]


def read(route: Any, body: dict[str, Any]) -> ScoreRequest:
    return route.read(parsed(route, body))


def pair(query: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": query}, {"role": "assistant", "content": reply}]


def test_tei_predicts_a_text_a_pair_or_a_batch_of_both() -> None:
    cases: list[tuple[Any, list[Any], Any]] = [
        ("a", ["a"], FIRST),
        (["a"], ["a"], FIRST),
        (["a", "b"], [pair("a", "b")], FIRST),
        ([["a"]], ["a"], [FIRST]),
        ([["a"], ["b", "c"]], ["a", pair("b", "c")], [FIRST, SECOND]),
    ]
    for inputs, texts, wanted in cases:
        for more in ({}, {"truncate": None}, {"truncate": False, "truncation_direction": "left"}):
            body = {"inputs": inputs, **more}
            assert read(PREDICT, body).texts == texts
        rewards = scored(*[[1.5, 2.0], [-0.5, -3.0]][: len(texts)])
        found = PREDICT.answer(parsed(PREDICT, {"inputs": inputs}), rewards, SERVED)
        PREDICT.response.model_validate(found)
        assert found == wanted, inputs


def test_tei_ranks_texts_by_one_reward_the_best_first() -> None:
    body = {"query": "a", "texts": ["b", "c", "d"], "raw_scores": True}
    assert read(RERANK, body).texts == [pair("a", text) for text in "bcd"]
    rewards = scored([1.0, 2.0], [5.0, -1.0], [2.0, 0.0])
    ranks = [{"index": 1, "score": 4.5}, {"index": 2, "score": 2.0}, {"index": 0, "score": 2.0}]
    found = RERANK.answer(parsed(RERANK, body), rewards, SERVED)
    RERANK.response.model_validate(found)
    assert found == ranks
    with_texts = RERANK.answer(parsed(RERANK, {**body, "return_text": True}), rewards, SERVED)
    assert with_texts == [{**rank, "text": "bcd"[int(rank["index"])]} for rank in ranks]


def test_tei_answers_sigmoids_where_no_raw_scores_are_asked_for() -> None:
    """Scores are from 0 to 1, like TEI's, in the order of the rewards, however large these are."""
    rewards = scored([0.0, 0.0], [2.0, 2.0], [-800.0, 0.0], [800.0, 0.0])
    body = {"query": "a", "texts": ["b", "c", "d", "e"], "raw_scores": False}
    found = RERANK.answer(parsed(RERANK, body), rewards, SERVED)
    sigmoid_of_3 = 1 / (1 + np.exp(-3.0))
    wanted = [(3, 1.0), (1, pytest.approx(sigmoid_of_3)), (0, 0.5), (2, 0.0)]
    assert [(rank["index"], rank["score"]) for rank in found] == wanted
    body = {"inputs": "a", "raw_scores": False}
    (first, second) = PREDICT.answer(parsed(PREDICT, body), scored([-1.0, 0.0]), SERVED)
    assert first == {"score": 0.5, "label": "long"}
    assert second == {"score": pytest.approx(1 / (1 + np.e)), "label": "helpful"}


def test_tei_refuses_what_would_be_another_score() -> None:
    rank = {"query": "a", "texts": ["b"]}
    wrong: list[tuple[Any, Any, str]] = [
        (PREDICT, {"inputs": "a", "truncate": True}, "truncate: got true, .*scoring contract"),
        (RERANK, {**rank, "truncate": True}, "truncate: got true, .*scoring contract"),
        (PREDICT, {"inputs": []}, "inputs: got none, wanted a text"),
        (PREDICT, {"inputs": ["a", "b", "c"]}, "row 0: got 3 texts, wanted one or a pair"),
        (PREDICT, {"inputs": [["a"], []]}, "row 1: got 0 texts"),
        (PREDICT, {"inputs": [["a"], "b"]}, "inputs.*wanted"),
        (PREDICT, {"inputs": "a", "truncation_direction": "up"}, "truncation_direction: got"),
        (RERANK, {"query": "a", "texts": []}, "texts: got 0, wanted at least 1"),
        (RERANK, {"query": "a", "documents": ["b"]}, "texts: required, but missing"),
    ]
    assert not not_refused(read, wrong)


def test_tei_errors_have_its_types() -> None:
    types = {}
    for kind in FailureKind:
        refused = PREDICT.refuse(RequestError("why", kind), None)
        types[kind.name] = refused.content.pop("error_type")
        assert refused.content == {"error": "why"}
    assert types == {
        "bad_request": "Validation",
        "unauthorized": "Validation",
        "unknown_model": "Validation",
        "too_large": "Validation",
        "unscored": "Validation",
        "busy": "Overloaded",
        "unreachable": "Unhealthy",
        "slow": "Overloaded",
        "internal": "Backend",
    }
