"""vLLM's /classify, /pooling and /score, and SGLang's routes: bodies, answers and errors."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from nemo_aligner.contract.messages import Conversation, messages_of
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoreRequest, StepRewards, rerank, sglang
from nemo_aligner.serving.protocols.base import Served
from nemo_aligner.serving.protocols.vllm import ROUTES
from tests.serving.protocols.bodies import not_refused, parsed, scored

CLASSIFY, POOLING, SCORE, _ = ROUTES
SGLANG, SGLANG_CLASSIFY, EMBEDDINGS = sglang.ROUTES
RERANK, *_ = rerank.ROUTES
SERVED = Served("reward_model", ("helpful", "long"), (1.0, 0.5))


def read(route: Any, body: dict[str, Any]) -> ScoreRequest:
    return route.read(parsed(route, body))


def answer(route: Any, **body: Any) -> Any:
    found = route.answer(parsed(route, body), scored([1.5, 2.0], [-0.5, -3.0]), SERVED)
    route.response.model_validate(found)
    return found


def test_vllm_input_is_read_in_every_form() -> None:
    forms: list[tuple[Any, list[str] | None, list[list[int]] | None]] = [
        ("a", ["a"], None),
        (["a", "b"], ["a", "b"], None),
        ([1, 2], None, [[1, 2]]),
        ([[1, 2], [3]], None, [[1, 2], [3]]),
    ]
    for route in (CLASSIFY, POOLING):
        for given, texts, token_lists in forms:
            body = {"model": "any", "input": given, "use_activation": False, "user": "me"}
            request = read(route, body)
            assert (request.texts, request.token_lists) == (texts, token_lists), route.path


def test_vllm_messages_are_one_conversation() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None},
        {"role": "assistant", "content": "b"},
    ]
    (conversation,) = read(CLASSIFY, {"messages": messages}).texts or ()
    assert conversation == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    documents = [{"text": "c"}]
    for beside in ({"tools": tools}, {"tools": tools, "documents": documents}):
        (whole,) = read(CLASSIFY, {"messages": messages, **beside}).texts or ()
        assert whole == Conversation(conversation, **beside)  # type: ignore[arg-type]
        as_text = {name: json.dumps(each) for name, each in beside.items()}
        for form in (as_text, {"chat_template_kwargs": beside}):
            assert read(CLASSIFY, {"messages": messages, **form}).texts == [whole]


def test_vllm_pair_is_a_prompt_and_its_reply() -> None:
    parts = {"content": [{"type": "text", "text": "a"}]}
    cases: list[tuple[dict[str, Any], list[Any]]] = [
        ({"text_1": "a", "text_2": "b"}, ["ab"]),
        ({"queries": "a", "documents": ["b", "c"]}, ["ab", "ac"]),
        ({"queries": ["a"], "items": ["b", "c"]}, ["ab", "ac"]),
        ({"data_1": ["a", "b"], "data_2": ["c", "d"]}, ["ac", "bd"]),
        ({"text_1": parts, "text_2": "b"}, [(parts["content"], "b")]),
    ]
    for body, pairs in cases:
        assert read(SCORE, body).texts == [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
            for prompt, reply in pairs
        ], body
    tools = [{"type": "function", "function": {"name": "f"}}]
    pair = {"text_1": "a", "text_2": "b"}
    (whole,) = read(SCORE, {**pair, "tools": tools}).texts or ()
    assert read(SCORE, {**pair, "tools": json.dumps(tools)}).texts == [whole]
    assert isinstance(whole, Conversation)
    assert whole.tools == tools


def test_pairs_share_their_prompt_and_tools() -> None:
    """A body of a few KB would otherwise become millions of parts of messages."""
    parts = {"content": [{"type": "text", "text": ""}] * 3}
    body = {"tools": json.dumps([{"function": {"name": "f"}}]), "documents": ["a", "b"]}
    texts = read(SCORE, {**body, "queries": parts}).texts or []
    assert len({id(messages_of(text)[0]) for text in texts}) == 1
    for queries in (parts, [parts, parts]):
        conversations = read(SCORE, {**body, "queries": queries}).texts or []
        assert len({id(text.tools) for text in conversations}) == 1  # type: ignore[union-attr]
    documents = read(RERANK, {"query": "a", "documents": ["b", "c"]}).texts or []
    assert len({id(messages_of(text)[0]) for text in documents}) == 1


TOOLS = [{"role": "assistant", "content": "", "tool_calls": [{}]}]
IMAGE = [{"content": [{"type": "image_url"}]}]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (CLASSIFY, {}, "got neither input nor messages, wanted one of them"),
    (CLASSIFY, {"input": "a", "messages": []}, "got both input and messages, wanted"),
    (CLASSIFY, {"input": []}, "input: got nothing"),
    (CLASSIFY, {"input": ["a", 1]}, "input.*: "),
    (CLASSIFY, {"messages": []}, "messages: got an empty conversation"),
    (CLASSIFY, {"messages": [{"content": "a"}]}, r"messages\[0\]: got .*, wanted an object"),
    (CLASSIFY, {"messages": TOOLS}, r"messages\[0\].tool_calls\[0\]: got .*, wanted an obj"),
    (CLASSIFY, {"input": "a", "tools": [{}]}, "tools: got it together with input"),
    (CLASSIFY, {"messages": TOOLS, "chat_template_kwargs": {"a": 1}}, "kwargs: got .* contract"),
    (
        CLASSIFY,
        {
            "messages": [{"role": "assistant", "content": "a"}],
            "tools": [{"function": {"name": "f"}}],
            "chat_template_kwargs": {"tools": [{"function": {"name": "g"}}]},
        },
        "^chat_template_kwargs: tools: got tools for a sample with others",
    ),
    (CLASSIFY, {"input": "a", "chat_template_kwargs": {"tools": [{}]}}, "together with input"),
    (CLASSIFY, {"input": "a", "use_activation": True}, "got true, wanted .* no activation$"),
    *(
        (route, {"input": "a", name: True}, f"{name}: got true")
        for route in (CLASSIFY, POOLING)
        for name in ("use_activation", "activation", "softmax", "normalize")
    ),
    (CLASSIFY, {"input": "a", "truncate_prompt_tokens": 5}, "tokens: got 5, .* scoring contract"),
    (
        CLASSIFY,
        {"messages": TOOLS, "add_special_tokens": True},
        "tokens: got true, wanted null or f",
    ),
    (SCORE, {"text_1": "a", "text_2": "b", "add_special_tokens": False}, "tokens: got false, wan"),
    (POOLING, {"input": [1], "add_special_tokens": 2}, "tokens: got 2, wanted null or false or tr"),
    (POOLING, {"input": "a", "encoding_format": "base64"}, 'encoding_format: got "base64"'),
    (POOLING, {"input": "a", "task": "embed"}, 'task: got "embed"'),
    (CLASSIFY, {"input": "a", "task": "token_classify"}, 'task: got "token_classify"'),
    (SCORE, {"queries": "a"}, "got only queries, wanted queries with documents, or"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "got 2 and 1 texts, wanted 1 and 1"),
    (SCORE, {"text_1": [], "text_2": ["c"]}, "got 0 and 1 texts"),
    (SCORE, {"text_1": "a", "text_2": IMAGE}, r"content\[0\]: got a part of type 'image_url', wan"),
    (SCORE, {"text_1": "a", "text_2": "b", "instruction": "c"}, 'instruction: got "c"'),
]
TAKEN: list[dict[str, Any]] = [
    {"use_activation": None},
    *({name: False} for name in ("use_activation", "activation", "softmax", "normalize")),
    {"padding": "do_not_pad"},
    {"add_special_tokens": True},
    {"priority": 0},
    {"encoding_format": "float"},
    {"task": "classify"},
    {"task": "score"},
    {"unknown": 1},
]


def test_vllm_field_is_refused_where_it_asks_for_another_score() -> None:
    assert not not_refused(read, REFUSED)
    for field in TAKEN:
        assert read(POOLING, {"input": "a", **field}).texts == ["a"], field


def test_vllm_flag_for_special_tokens_does_not_matter_for_token_ids() -> None:
    """A client that renders and tokenizes by itself sends false; vLLM does not read it then."""
    for route in (CLASSIFY, POOLING, SGLANG_CLASSIFY, EMBEDDINGS):
        for flag in (True, False, None):
            for given in ([1, 2], [[1, 2], [3]]):
                request = read(route, {"input": given, "add_special_tokens": flag})
                assert request.num_rows == (1 if given == [1, 2] else 2)
            # A server rejects a text only if it would add BOS or EOS to it.
            request = read(route, {"input": "a", "add_special_tokens": flag})
            assert request.adds_special_tokens is (flag is not False)


def test_vllm_classify_has_the_rewards_as_probs() -> None:
    found = answer(CLASSIFY, input=["a", "b"], request_id="mine")
    names = (found["id"], found["object"], found["model"])
    assert names == ("classify-mine", "list", "reward_model")
    assert found["data"] == [
        {"index": 0, "label": "long", "probs": [1.5, 2.0], "num_classes": 2},
        {"index": 1, "label": "helpful", "probs": [-0.5, -3.0], "num_classes": 2},
    ]
    assert found["usage"] == {}


def test_vllm_pooling_and_score_have_their_own_rows() -> None:
    pooled = answer(POOLING, input=[[1, 2], [3]])
    assert pooled["data"][1] == {"index": 1, "object": "pooling", "data": [-0.5, -3.0]}
    assert pooled["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert answer(SCORE, text_1="a", text_2=["b", "c"])["data"] == [
        {"index": 0, "object": "score", "score": 2.5},
        {"index": 1, "object": "score", "score": -2.0},
    ]


def test_vllm_pooling_has_the_steps_of_a_model_that_scores_them() -> None:
    """vLLM's default task of such a model is token_classify; others answer the sample's rewards."""
    values = [np.array([[0.5, 1.0], [1.5, 2.0]], np.float32), np.array([[-0.5, -3.0]], np.float32)]
    steps = np.empty(2, dtype=object)
    steps[:] = [StepRewards(rows, ()) for rows in values]
    rows = replace(scored([1.5, 2.0], [-0.5, -3.0]), steps=steps)
    by_step, by_sample = [rows.tolist() for rows in values], [[1.5, 2.0], [-0.5, -3.0]]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, by_step),
        ({"task": None}, by_step),
        ({"task": "token_classify"}, by_step),
        ({"task": "classify"}, by_sample),
        ({"task": "score"}, by_sample),
    ]
    for more, wanted in cases:
        found = POOLING.answer(parsed(POOLING, {"input": ["a", "b"], **more}), rows, SERVED)
        POOLING.response.model_validate(found)
        assert [each["data"] for each in found["data"]] == wanted, more


def test_documents_are_ranked_for_vllm_jina_and_cohere() -> None:
    """The query is the user's message, a document a reply; the earlier of equal ones is first."""
    parts = {"content": [{"type": "text", "text": "d"}]}
    body: dict[str, Any] = {"query": "a", "documents": ["b", {"text": "c"}, parts], "model": "any"}
    texts = read(RERANK, body).texts
    assert texts == [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}]
        for reply in "bcd"
    ]
    rewards = scored([1.0, 2.0], [5.0, -1.0], [2.0, 0.0])
    ranks = [
        {"index": index, "relevance_score": score, "document": {"text": text}}
        for index, score, text in ((1, 4.5, "c"), (0, 2.0, "b"), (2, 2.0, "d"))
    ]
    bare = [{name: rank[name] for name in ("index", "relevance_score")} for rank in ranks]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, ranks),
        ({"top_n": 0}, ranks),
        ({"top_n": 9, "return_documents": True}, ranks),
        ({"top_n": 2}, ranks[:2]),
        ({"return_documents": False, "rank_fields": ["text"]}, bare),
    ]
    for more, wanted in cases:
        found = RERANK.answer(parsed(RERANK, {**body, **more}), rewards, SERVED)
        RERANK.response.model_validate(found)
        assert found["results"] == wanted, more
    refused = RERANK.refuse(RequestError("why", FailureKind.bad_request), None)
    assert refused.content["error"]["message"] == refused.content["detail"] == "why"


def test_documents_that_are_no_texts_or_want_another_score_are_refused() -> None:
    body = {"query": "a", "documents": ["b"]}
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (RERANK, {"query": "a"}, "documents: required, but missing"),
        (RERANK, {**body, "documents": []}, "documents: got 0, wanted at least 1"),
        (RERANK, {**body, "documents": [5]}, "documents.0"),
        (RERANK, {**body, "documents": [{"title": "b"}]}, r"documents.0: got .*title.*wanted a s"),
        (RERANK, {**body, "query": IMAGE[0]}, "query: got .*wanted a string"),
        (RERANK, {**body, "top_n": -1}, "top_n"),
        (RERANK, {**body, "rank_fields": ["title"]}, "rank_fields: got .*title.*wanted null"),
        (RERANK, {**body, "use_activation": True}, "use_activation: got true"),
        (RERANK, {**body, "max_tokens_per_doc": 5}, "max_tokens_per_doc: got 5"),
        (RERANK, {**body, "max_chunks_per_doc": 10}, "max_chunks_per_doc: got 10, wanted null or"),
    ]
    assert not not_refused(read, wrong)


def test_vllm_errors_are_its_own() -> None:
    refused = CLASSIFY.refuse(RequestError("why", FailureKind.busy), None)
    assert refused.status == 503
    assert refused.content == {
        "error": {"message": "why", "type": "ServiceUnavailableError", "param": None, "code": 503}
    }


def test_sglang_has_an_object_for_one_input_and_a_list_for_a_list() -> None:
    one, two = scored([1.5, 2.0]), scored([1.5, 2.0], [-0.5, -3.0])
    cases: list[tuple[dict[str, Any], Any, Any]] = [
        ({"text": "a", "rid": "mine"}, ["a"], {"id": "mine"}),
        (
            {"text": ["a", "b"], "model": "any", "rid": "r"},
            ["a", "b"],
            [{"id": "r_0"}, {"id": "r_1"}],
        ),
        ({"text": ["a"], "rid": ["r"], "image_data": None}, ["a"], [{"id": "r"}]),
        ({"input_ids": [1, 2], "rid": "r"}, [[1, 2]], {"id": "r", "prompt_tokens": 2}),
        (
            {"input_ids": [[1, 2], [3]], "rid": ["r", "s"]},
            [[1, 2], [3]],
            [{"id": "r", "prompt_tokens": 2}, {"id": "s", "prompt_tokens": 1}],
        ),
    ]
    for body, rows, metas in cases:
        request = read(SGLANG, body)
        assert (request.texts or request.token_lists) == rows
        found = SGLANG.answer(parsed(SGLANG, body), one if len(rows) == 1 else two, SERVED)
        SGLANG.response.model_validate(found)
        several = found if isinstance(found, list) else [found]
        assert [each["embedding"] for each in several] == [[1.5, 2.0], [-0.5, -3.0]][: len(rows)]
        infos = [each["meta_info"] for each in several]
        assert (infos if isinstance(found, list) else infos[0]) == metas
    anonymous = SGLANG.answer(parsed(SGLANG, {"text": "a"}), one, SERVED)
    assert len(anonymous["meta_info"]["id"]) == 32


def test_sglang_refuses_what_is_no_text_and_more_than_a_reward() -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (SGLANG, {"text": "a", "input_ids": [1]}, "got both text and input_ids, wanted"),
        (SGLANG, {"input_ids": None}, "got neither text nor input_ids, wanted one"),
        (SGLANG, {"text": []}, "text: got no samples, wanted at least 1"),
        (SGLANG, {"input_ids": []}, "input_ids: got no samples, wanted at least 1"),
        (SGLANG, {"text": [["a", "b"]]}, "text.*wanted a string"),
        (SGLANG, {"text": "a", "rid": ["r"]}, r'rid: got \["r"\], wanted a string'),
        (SGLANG, {"text": ["a", "b"], "rid": ["r"]}, "rid: .*wanted a list of 2"),
        (SGLANG, {"text": "a", "image_data": "x.png"}, 'image_data: got "x.png", wanted null'),
        (SGLANG, {"text": "a", "lora_path": "x"}, 'lora_path: got "x", wanted null'),
        (SGLANG, {"text": "a", "return_pooled_hidden_states": True}, "states: got true, wanted"),
    ]
    assert not not_refused(read, wrong)
    refused = SGLANG.refuse(RequestError("why", FailureKind.bad_request), None)
    assert (refused.status, refused.content) == (400, {"error": {"message": "why"}})


def test_sglang_has_routes_in_openai_s_form() -> None:
    """verl's reward loop posts model and input, and reads the last number of the embedding."""
    for route in (SGLANG_CLASSIFY, EMBEDDINGS):
        forms: list[tuple[Any, Any]] = [("a", ["a"]), (["a", "b"], ["a", "b"])]
        forms += [([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])]
        for given, rows in forms:
            request = read(route, {"model": "any", "input": given, "user": "me", "rid": "r"})
            assert (request.texts or request.token_lists) == rows, route.path
    found = answer(EMBEDDINGS, model="any", input=["a", "b"])
    assert found["data"][-1] == {"object": "embedding", "index": 1, "embedding": [-0.5, -3.0]}
    assert (found["object"], found["model"], found["usage"]) == ("list", "reward_model", {})
    assert answer(EMBEDDINGS, input=[[1, 2], [3]])["usage"]["total_tokens"] == 3
    found = answer(SGLANG_CLASSIFY, model="any", input=["a", "b"])
    assert found["data"] == answer(CLASSIFY, input=["a", "b"])["data"]
    # OpenAI's client asks for base64, and decodes float32.
    found = answer(EMBEDDINGS, input=["a", "b"], encoding_format="base64")
    decoded = [base64.b64decode(each["embedding"]) for each in found["data"]]
    assert np.frombuffer(b"".join(decoded), np.float32).tolist() == [1.5, 2.0, -0.5, -3.0]


def test_sglang_s_routes_in_openai_s_form_refuse_what_changes_the_sample() -> None:
    both: list[tuple[dict[str, Any], str]] = [
        ({"input": "a", "lora_path": "x"}, 'lora_path: got "x", wanted null'),
        ({"input": "a", "dimensions": 2}, "dimensions: got 2, wanted null"),
        ({"input": [1], "embed_overrides": [[[0.5]]]}, "embed_overrides: got .*, wanted null"),
        ({"input": [1], "embed_override_token_id": 1}, "token_id: got 1, wanted null"),
        ({"input": "a", "text": "b"}, "got input and text, which are both samples"),
        ({"input": []}, "input: got nothing"),
        ({"input": "a", "task": "token_classify"}, "post to /pooling for rewards of steps"),
        ({"input": "a", "encoding_format": "int8"}, 'encoding_format: got "int8", wanted'),
    ]
    wrong = [(route, *case) for route in (SGLANG_CLASSIFY, EMBEDDINGS) for case in both]
    wrong += [(EMBEDDINGS, {"input": "a", "messages": [{"role": "user"}]}, "input and messages")]
    assert not not_refused(read, wrong)
    refused = EMBEDDINGS.refuse(RequestError("why", FailureKind.bad_request), None)
    assert (refused.status, refused.content["error"]["message"]) == (400, "why")
