"""vLLM's ``POST /classify``, ``/pooling`` and ``/score``, and ``GET /v1/models``, as in its 0.32.

The shapes are those of ``vllm/entrypoints/pooling/*/protocol.py``. ``input`` is a text, token ids,
or a list of either, all scored as they stand, but for what a chat template has behind an end of
turn; ``messages`` is one conversation, which gets the model's chat template, with ``tools`` and
``documents``. ``/score`` takes pairs, 1 with 1, 1 with N or N with N: the first is what the user
says, the second the reply, and both are scored as a conversation.

``/pooling`` with ``"task": "token_classify"`` answers the rewards of a text's turns or steps, a row
for each, as vLLM does for its step pooling: where they are read is for the scoring contract.

A reward is a reward: there is no activation, ``probs`` and ``data`` have the model's numbers for
each attribute, and ``score`` one of them all. Fields that would have a text scored by other rules
than the scoring contract's (truncation, another template, special tokens) are refused.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Annotated, Any

import numpy as np
from pydantic import Field, WithJsonSchema

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    ModelRoute,
    Route,
    Rows,
    Served,
    as_json,
    conversation_of,
    refuse_other_samples,
)
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.utils.errors import ServingError

_BY_CONTRACT = "how a text is scored is for the model's scoring contract"
_NO_ACTIVATION = "a reward has no activation"
_ONE_FORM = "there is no other here"
# Fields by which a client asks for another score, or another form, than there is here: the values
# that ask for none, and why there is no other.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_activation": ((None, False), _NO_ACTIVATION),
    "activation": ((None, False), _NO_ACTIVATION),
    "normalize": ((None, False), _NO_ACTIVATION),
    "softmax": ((None, False), _NO_ACTIVATION),
    "truncate_prompt_tokens": ((None,), _BY_CONTRACT),
    "truncation_side": ((None,), _BY_CONTRACT),
    "padding": ((None, "do_not_pad"), _BY_CONTRACT),
    "chat_template": ((None,), _BY_CONTRACT),
    "chat_template_kwargs": ((None, {}), _BY_CONTRACT),
    "add_generation_prompt": ((None, False), _BY_CONTRACT),
    "continue_final_message": ((None, False), _BY_CONTRACT),
    "mm_processor_kwargs": ((None, {}), _BY_CONTRACT),
    "media_io_kwargs": ((None, {}), _BY_CONTRACT),
    "cache_salt": ((None,), _ONE_FORM),
    "priority": ((None, 0), _ONE_FORM),
    "task": ((None, "classify", "token_classify"), _ONE_FORM),
    "dimensions": ((None,), _ONE_FORM),
    "encoding_format": ((None, "float"), _ONE_FORM),
    "instruction": ((None,), _BY_CONTRACT),
    "max_tokens_per_query": ((None, 0), _BY_CONTRACT),
    "max_tokens_per_doc": ((None, 0), _BY_CONTRACT),
    "max_chunks_per_doc": ((None, 0), _BY_CONTRACT),
}
_STEPS = "token_classify"
_BESIDE = ("tools", "documents")
# Prompt and reply, by each of vLLM's names.
_PAIRS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)


# A list of objects, or its JSON text; ``read_text`` says what is wrong with it.
JsonObjects = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "string"}]}),
]


class PoolingRequest(Body):
    """``input`` or ``messages``."""

    model: str | None = None
    input: str | Rows[str] | Items[int] | Rows[Items[int]] | None = Field(
        None, examples=[["What is red? A rose."]]
    )
    messages: Items[dict[str, Any]] | None = None
    tools: JsonObjects = None
    documents: JsonObjects = None
    request_id: str | None = None


class PairsRequest(Body):
    """``queries`` and ``documents``, or one of vLLM's other names for the two."""

    model: str | None = None
    queries: str | dict[str, Any] | Rows[str | dict[str, Any]] | None = Field(
        None, examples=["What is red?"]
    )
    documents: str | dict[str, Any] | Rows[str | dict[str, Any]] | None = Field(
        None, examples=[["A rose.", "The sky."]]
    )
    tools: JsonObjects = None
    request_id: str | None = None


class PoolingUsage(Body):
    """Tokens, where the request had token ids: of a text the gateway does not know them."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None


class PoolingResponse(Body):
    """``data`` has an object for each input, with its ``index``.

    ``/classify``: ``label``, ``probs`` (the rewards) and ``num_classes``; ``/pooling``: ``data``
    (the rewards); ``/score``: ``score``. An object has ``truncated``, true, if its text was cut to
    the model's length.
    """

    id: str
    object: str
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: PoolingUsage


def read_input(body: PoolingRequest) -> ScoreRequest:
    """Read a request; raise ServingError for one without texts, or for another score."""
    if (body.input is None) == (body.messages is None):
        got = "neither input nor" if body.input is None else "both input and"
        raise ServingError(f"got {got} messages, wanted one of them")
    refuse_other_samples(body, "messages" if body.input is None else "input")
    # vLLM's default for special tokens: off for messages, whose template writes them, on for texts.
    if body.messages is not None:
        check_fixed(body, special_tokens=False)
        asked = {name: getattr(body, name) for name in ("messages", *_BESIDE)}
        return ScoreRequest(texts=[conversation_of(asked, "messages")])
    check_fixed(body, special_tokens=True)
    for name in _BESIDE:
        if getattr(body, name):
            raise ServingError(f"{name}: got them beside input, wanted messages with them")
    if not body.input:
        raise ServingError("input: got nothing, wanted a text, token ids, or a list of either")
    token_lists = _token_lists(body.input)
    if token_lists is not None:
        return ScoreRequest(token_lists=token_lists)
    texts: Any = [body.input] if isinstance(body.input, str) else body.input
    return ScoreRequest(texts=texts)


def _token_lists(given: Any) -> list[list[int]] | None:
    """The token ids of an input, one list or several; None for texts."""
    if isinstance(given, str) or not given or isinstance(given[0], str):
        return None
    return [given] if isinstance(given[0], int) else given


def read_pairs(body: PairsRequest) -> ScoreRequest:
    """Read pairs; raise ServingError for other names than a pair, or lengths that do not match."""
    check_fixed(body, special_tokens=True)
    fields = dict(body)
    names = [each for each in _PAIRS if all(fields.get(name) is not None for name in each)]
    present = {name for each in _PAIRS for name in each if fields.get(name) is not None}
    if len(names) != 1 or present != {*names[0]}:
        got = ", ".join(sorted(present)) or "no pair"
        got += " alone" if len(present) == 1 else ""
        wanted = ", or ".join(" with ".join(each) for each in _PAIRS)
        raise ServingError(f"got {got}, wanted {wanted}")
    refuse_other_samples(body, names[0][0])
    first, second = ([*_sides(fields[name], name)] for name in names[0])
    if not first or not second or (len(first) > 1 and len(first) != len(second)):
        raise ServingError(
            f"{' and '.join(names[0])}: got {len(first)} and {len(second)}, "
            "wanted 1 and 1, 1 and N, or N and N"
        )
    asked = first * len(second) if len(first) == 1 else first
    texts: list[Text] = []
    for number, (prompt, reply) in enumerate(zip(asked, second, strict=True)):
        sides = {"user": prompt, "assistant": reply}
        messages = [{"role": role, "content": side} for role, side in sides.items()]
        pair = {"messages": messages, "tools": body.tools}
        texts.append(conversation_of(pair, f"{' and '.join(names[0])}, pair {number}"))
    return ScoreRequest(texts=texts)


def _sides(given: Any, name: str) -> list[Any]:
    """Texts, or parts of text."""
    sides = given if isinstance(given, list) else [given]
    contents = [side.get("content") if isinstance(side, dict) else side for side in sides]
    for number, content in enumerate(contents):
        if not isinstance(content, str | list):
            raise ServingError(
                f"{name}.{number}: got {as_json(content)}, wanted a text or a list of parts of text"
            )
    return contents


def read_texts(body: PoolingRequest) -> ScoreRequest:
    """``read_input`` for a route that answers one reward for each text."""
    if (body.model_extra or {}).get("task") == _STEPS:
        raise ServingError(f'task: got "{_STEPS}", wanted "classify", or POST /pooling')
    return read_input(body)


def check_fixed(body: Body, special_tokens: bool) -> None:
    """Raise ServingError if a field asks for what the scoring contract decides."""
    fixed = {**_FIXED, "add_special_tokens": ((None, special_tokens), _BY_CONTRACT)}
    for name, value in (body.model_extra or {}).items():
        if name in fixed and value not in fixed[name][0]:
            values, why = fixed[name]
            allowed = " or ".join(map(json.dumps, values))
            raise ServingError(f"{name}: got {as_json(value)}, wanted {allowed}: {why}")


def answer_classify(body: PoolingRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """``label`` is the attribute with the largest number, as vLLM has it."""
    data = [
        {
            "index": index,
            "label": served.attributes[int(np.argmax(rewards))],
            "probs": rewards.tolist(),
            "num_classes": len(rewards),
        }
        for index, rewards in enumerate(scored.rewards)
    ]
    return _listed("classify", body, served, data, scored)


def answer_pooling(body: PoolingRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """The rewards of each input, or of each of its turns or steps."""
    rows: Any = scored.rewards
    if (body.model_extra or {}).get("task") == _STEPS:
        if scored.steps is None:
            raise ServingError(
                f'task: got "{_STEPS}", wanted "classify": the model has one reward for each text, '
                "or its server shapes it by a rule of whole replies"
            )
        rows = [each.rewards for each in scored.steps]
    data = [
        {"index": index, "object": "pooling", "data": rewards.tolist()}
        for index, rewards in enumerate(rows)
    ]
    return _listed("pool", body, served, data, scored)


def answer_pairs(body: PairsRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """One number for each pair."""
    data = [
        {"index": index, "object": "score", "score": reward}
        for index, reward in enumerate(served.one_reward(scored.rewards))
    ]
    return _listed("score", body, served, data, scored)


def _listed(
    kind: str,
    body: PoolingRequest | PairsRequest,
    served: Served,
    data: list[dict[str, Any]],
    scored: ScoredRows,
) -> dict[str, Any]:
    for item, was_cut in zip(data, scored.exceeded.tolist(), strict=True):
        item |= {"truncated": True} if was_cut else {}
    return {
        "id": f"{kind}-{body.request_id or uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": served.model_name,
        "data": data,
        "usage": _usage(body),
    }


def _usage(body: PoolingRequest | PairsRequest) -> dict[str, int]:
    """Tokens of a request of token ids; the gateway has no tokenizer to count a text's."""
    token_lists = _token_lists(body.input) if isinstance(body, PoolingRequest) else None
    if token_lists is None:
        return {}
    tokens = sum(map(len, token_lists))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def refuse(failure: RequestError, body: Body | None) -> HttpAnswer:
    """``{"error": {"message", "type", "param", "code"}}``"""
    kind = failure.kind
    error = {
        "message": failure.message,
        "type": kind.openai_type,
        "param": None,
        "code": kind.status,
    }
    return HttpAnswer(kind.status, {"error": error})


ROUTES: list[Route[Any]] = [
    Route(
        "/classify",
        "vLLM's classification: a reward for each attribute",
        PoolingRequest,
        PoolingResponse,
        read_texts,
        answer_classify,
        refuse,
        completes_turns=True,
    ),
    Route(
        "/pooling",
        "vLLM's pooling: a reward for each attribute",
        PoolingRequest,
        PoolingResponse,
        read_input,
        answer_pooling,
        refuse,
        completes_turns=True,
    ),
    *(
        Route(
            path,
            "vLLM's score of pairs of texts, a prompt and its reply",
            PairsRequest,
            PoolingResponse,
            read_pairs,
            answer_pairs,
            refuse,
        )
        for path in ("/score", "/v1/score")
    ),
]


def list_models(contract: ScoringContract | None, config: FrontConfig) -> HttpAnswer:
    """OpenAI's list, of one model."""
    model: dict[str, Any] = {
        "id": MODEL_NAME,
        "object": "model",
        "created": 0,
        "owned_by": "nemo_aligner",
        "root": MODEL_NAME,
    }
    if contract is not None:
        model["max_model_len"] = contract.seq_length
        model["reward_scale"] = contract.reward_scale
    return HttpAnswer(200, {"object": "list", "data": [model]})


MODEL_ROUTES = [ModelRoute("/v1/models", "OpenAI's list of models: the reward model", list_models)]
