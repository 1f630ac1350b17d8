"""vLLM's ``POST /classify``, ``/pooling`` and ``/score``, and ``GET /v1/models``, as in vLLM 0.32.

Shapes follow ``vllm/entrypoints/pooling/*/protocol.py``. ``input`` is a text, a list of token ids,
or a list of either. An input is scored unchanged, unless it ends with an end-of-turn token: then it
is completed with the text that the chat template writes after that token. ``messages`` is one
conversation, and is written in the model's chat template. Its ``tools`` and ``documents`` are in
``chat_template_kwargs``, or beside it, where vLLM ignores them.
``/score`` takes pairs of a user's message and a reply: 1 with 1, 1 with N, or N with N. A pair is
scored as a conversation.

``/pooling`` returns one row of rewards per turn or step of a sample, as vLLM's step pooling does,
if the model has them and ``task`` is ``token_classify`` or not sent. The scoring contract decides
where the rewards are read. With the task ``classify`` or ``score`` it returns the sample's rewards.

No sigmoid or softmax is applied: ``probs`` and ``data`` are the model's rewards for each attribute,
and ``score`` is their weighted sum. The scoring contract sets the rules of scoring, so fields that
request other rules (truncation, another template) are rejected. ``add_special_tokens: false`` is
rejected for a text to which the contract adds BOS or EOS; a gateway rejects it if the contract adds
one to any text. For token ids it does not matter.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, WithJsonSchema

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import (
    Text,
    messages_of,
    read_messages,
    with_messages,
    with_tools,
)
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
    locate_errors,
    read_prompt,
    refuse_other_samples,
)
from nemo_aligner.utils.errors import ServingError

_BY_CONTRACT = "the model's scoring contract decides how a sample is scored"
_NO_ACTIVATION = "a reward has no activation"
_ONE_FORM = "no other value is supported"
_TEMPLATE_VARIABLES = "chat_template_kwargs"
# Fields by which a client of vLLM can change how samples are scored, or the form of the answer.
# This server supports neither: field -> (values that are accepted because they change nothing,
# reason why others are not supported).
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_activation": ((None, False), _NO_ACTIVATION),
    "activation": ((None, False), _NO_ACTIVATION),
    "normalize": ((None, False), _NO_ACTIVATION),
    "softmax": ((None, False), _NO_ACTIVATION),
    "truncate_prompt_tokens": ((None,), _BY_CONTRACT),
    "truncation_side": ((None,), _BY_CONTRACT),
    "padding": ((None, "do_not_pad"), _BY_CONTRACT),
    "chat_template": ((None,), _BY_CONTRACT),
    _TEMPLATE_VARIABLES: ((None, {}), _BY_CONTRACT),
    "add_generation_prompt": ((None, False), _BY_CONTRACT),
    "continue_final_message": ((None, False), _BY_CONTRACT),
    "mm_processor_kwargs": ((None, {}), _BY_CONTRACT),
    "media_io_kwargs": ((None, {}), _BY_CONTRACT),
    "cache_salt": ((None,), _ONE_FORM),
    "priority": ((None, 0), _ONE_FORM),
    "task": ((None, "classify", "score", "token_classify"), _ONE_FORM),
    "dimensions": ((None,), _ONE_FORM),
    "encoding_format": ((None, "float"), _ONE_FORM),
    "instruction": ((None,), _BY_CONTRACT),
    "max_tokens_per_query": ((None, 0), _BY_CONTRACT),
    "max_tokens_per_doc": ((None, 0), _BY_CONTRACT),
    "max_chunks_per_doc": ((None, 0), _BY_CONTRACT),
}
_STEPS = "token_classify"
_TEMPLATE_FIELDS = ("tools", "documents")
# Names of prompt and reply: vLLM accepts each of these pairs.
_PAIRS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)


# A list of objects, or such a list as a JSON string. pydantic does not validate it, because
# ``read_text`` describes errors better.
JsonObjects = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "string"}]}),
]


class PoolingRequest(Body):
    """Samples as ``input``, or one conversation as ``messages``."""

    model: str | None = None
    input: str | Rows[str] | Items[int] | Rows[Items[int]] | None = Field(
        None, examples=[["What is red? A rose."]]
    )
    messages: Items[dict[str, Any]] | None = None
    tools: JsonObjects = None
    documents: JsonObjects = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: str | None = None


class PairsRequest(Body):
    """Pairs of a user's message and a reply.

    They are in ``queries`` and ``documents``, or under another pair of vLLM's names.
    """

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
    """Number of tokens if the request had token ids.

    The gateway cannot count the tokens of a text.
    """

    prompt_tokens: int | None = None
    total_tokens: int | None = None


class PoolingResponse(Body):
    """The answer of ``/classify``, ``/pooling``, ``/score`` and ``/v1/embeddings``.

    ``data`` has an object for each input, with its ``index``. For ``/classify`` it has ``label``,
    ``probs`` (the rewards) and ``num_classes``; for ``/pooling``, ``data`` (the rewards); for
    ``/score``, ``score``; for ``/v1/embeddings``, ``embedding`` (the rewards). If the sample was
    cut to the model's length, it has ``truncated: true``.
    """

    id: str
    object: str
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: PoolingUsage


def read_input(body: PoolingRequest) -> ScoreRequest:
    """Read the samples in ``input``, or the single conversation in ``messages``.

    Raises:
        ServingError: there are no samples, or both ``input`` and ``messages``; or a field requests
            scoring that differs from the scoring contract's, such as another chat template.
    """
    if (body.input is None) == (body.messages is None):
        state = "neither input nor" if body.input is None else "both input and"
        raise ServingError(f"got {state} messages, wanted one of them")
    if body.messages is not None:
        refuse_other_samples(body, "messages")
        # The template writes the special tokens, so vLLM's default is false.
        check_fixed(body, special_tokens=(False,))
        variables = _read_template_variables(body)
        conversation = {name: getattr(body, name) for name in ("messages", *_TEMPLATE_FIELDS)}
        text = conversation_of(conversation, "messages")
        with locate_errors(_TEMPLATE_VARIABLES):
            return ScoreRequest(texts=[with_tools(text, **variables)])
    for name in (*_TEMPLATE_FIELDS, _TEMPLATE_VARIABLES):
        if getattr(body, name):
            raise ServingError(f"{name}: got it together with input; send it with messages")
    return read_samples(body, body.input)


def _read_template_variables(body: PoolingRequest) -> dict[str, Any]:
    """Return ``tools`` and ``documents`` of ``chat_template_kwargs``; reject other variables."""
    variables = body.chat_template_kwargs or {}
    if not variables.keys() <= {*_TEMPLATE_FIELDS}:
        raise ServingError(
            f"{_TEMPLATE_VARIABLES}: got {as_json(variables)}, wanted only "
            f"{' and '.join(_TEMPLATE_FIELDS)}: {_BY_CONTRACT}"
        )
    return {name: variables.get(name) for name in _TEMPLATE_FIELDS}


def read_samples(body: Body, value: Any) -> ScoreRequest:
    """Read the samples in ``value``, the field ``input`` of a body.

    Raises:
        ServingError: there are no samples, or also samples under another name; or a field requests
            scoring that differs from the scoring contract's.
    """
    refuse_other_samples(body, "input")
    token_lists = _token_lists(value)
    check_fixed(body, special_tokens=(False, True))
    if not value:
        raise ServingError("input: got nothing, wanted a text, token ids, or a list of either")
    if token_lists is not None:
        return ScoreRequest(token_lists=token_lists)
    texts = [value] if isinstance(value, str) else value
    flag = (body.model_extra or {}).get("add_special_tokens")
    return ScoreRequest(texts=texts, adds_special_tokens=flag in (None, True))


def _token_lists(value: Any) -> list[list[int]] | None:
    """Return the token ids of ``input``, one list or several; None if ``input`` has texts."""
    if isinstance(value, str) or not value or isinstance(value[0], str):
        return None
    return [value] if isinstance(value[0], int) else value


def read_pairs(body: PairsRequest) -> ScoreRequest:
    """Read pairs of a user's message and a reply as conversations.

    Raises:
        ServingError: the fields are not one of vLLM's pairs of names, or their lengths do not
            match.
    """
    check_fixed(body, special_tokens=(True,))
    fields = dict(body)
    pairs = [pair for pair in _PAIRS if all(fields.get(name) is not None for name in pair)]
    present = {name for pair in _PAIRS for name in pair if fields.get(name) is not None}
    if len(pairs) != 1 or present != {*pairs[0]}:
        actual = ", ".join(sorted(present)) or "no pair"
        actual = f"only {actual}" if len(present) == 1 else actual
        expected = ", or ".join(" with ".join(pair) for pair in _PAIRS)
        raise ServingError(f"got {actual}, wanted {expected}")
    names = pairs[0]
    refuse_other_samples(body, names[0])
    first, second = ([*_read_contents(fields[name], name)] for name in names)
    if not first or not second or (len(first) > 1 and len(first) != len(second)):
        raise ServingError(
            f"{' and '.join(names)}: got {len(first)} and {len(second)} texts, "
            "wanted 1 and 1, 1 and N, or N and N"
        )
    return ScoreRequest(texts=_pair_up(first, second, body.tools, " and ".join(names)))


def count_pairs(body: PairsRequest) -> int:
    """Count the pairs that ``read_pairs`` would build."""
    fields = dict(body)
    sides = [fields.get(name) for pair in _PAIRS for name in pair]
    return max(len(side) if isinstance(side, list) else 1 for side in sides)


def _pair_up(first: list[Any], second: list[Any], tools: Any, location: str) -> list[Text]:
    """Build a conversation for each reply in ``second``, with the only prompt or each its own.

    Pairs share the tools and the only prompt, which are read once.
    """
    users = [{"role": "user", "content": side} for side in first]
    replies = [{"role": "assistant", "content": side} for side in second]
    pairs = [[reply] for reply in replies]
    if len(users) > 1:
        pairs = [[user, reply] for user, reply in zip(users, replies, strict=True)]
        users = []
    with locate_errors(location):
        shared = read_prompt(users, tools)
    texts: list[Text] = []
    for number, pair in enumerate(pairs):
        with locate_errors(f"{location}, pair {number}"):
            turns = read_messages(pair, len(users))
        texts.append(with_messages(shared, [*messages_of(shared), *turns]))
    return texts


def _read_contents(value: Any, name: str) -> list[Any]:
    """Return one side of the pairs, prompts or replies: strings, or lists of text parts."""
    sides = value if isinstance(value, list) else [value]
    contents = [side.get("content") if isinstance(side, dict) else side for side in sides]
    for number, content in enumerate(contents):
        if not isinstance(content, str | list):
            raise ServingError(
                f"{name}.{number}: got {as_json(content)}, wanted a string or a list of text parts"
            )
    return contents


def read_texts(body: PoolingRequest) -> ScoreRequest:
    """Read samples for ``/classify``, which returns one reward per sample and not one per step."""
    refuse_steps(body)
    return read_input(body)


def refuse_steps(body: Body) -> None:
    """Raise ServingError if a body requests rewards of steps, which only ``/pooling`` returns."""
    if (body.model_extra or {}).get("task") == _STEPS:
        raise ServingError(
            f'task: got "{_STEPS}", wanted "classify"; post to /pooling for rewards of steps'
        )


def check_fixed(body: Body, special_tokens: tuple[bool, ...]) -> None:
    """Check the fields of a body that would change how samples are scored, or the answer's form.

    Args:
        special_tokens: the accepted values of ``add_special_tokens``, in addition to null.

    Raises:
        ServingError: ``add_special_tokens`` or a field of ``_FIXED`` has a value that is not
            accepted.
    """
    fixed = {**_FIXED, "add_special_tokens": ((None, *special_tokens), _BY_CONTRACT)}
    for name, value in (body.model_extra or {}).items():
        if name in fixed and value not in fixed[name][0]:
            values, reason = fixed[name]
            allowed = " or ".join(map(json.dumps, values))
            raise ServingError(f"{name}: got {as_json(value)}, wanted {allowed}: {reason}")


def answer_classify(body: PoolingRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """List each sample's rewards; ``label`` is the attribute with the largest one, as in vLLM."""
    data = [
        {
            "index": index,
            "label": served.attributes[int(np.argmax(rewards))],
            "probs": rewards.tolist(),
            "num_classes": len(rewards),
        }
        for index, rewards in enumerate(scored.rewards)
    ]
    return list_answer("classify", served, data, scored, body.request_id, body.input)


def answer_pooling(body: PoolingRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """List the rewards of each sample, or of its turns or steps, which are vLLM's default."""
    task = (body.model_extra or {}).get("task")
    if task == _STEPS and scored.steps is None:
        raise ServingError(
            f'task: got "{_STEPS}", wanted "classify": the model has one reward per sample, or '
            "its server shapes rewards by a rule for whole replies"
        )
    rows: Any = scored.rewards
    if task in (None, _STEPS) and scored.steps is not None:
        rows = [steps.rewards for steps in scored.steps]
    data = [
        {"index": index, "object": "pooling", "data": rewards.tolist()}
        for index, rewards in enumerate(rows)
    ]
    return list_answer("pool", served, data, scored, body.request_id, body.input)


def answer_pairs(body: PairsRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """List one score per pair: its reward, merged over the attributes by their weights."""
    data = [
        {"index": index, "object": "score", "score": reward}
        for index, reward in enumerate(served.one_reward(scored.rewards))
    ]
    return list_answer("score", served, data, scored, body.request_id)


def list_answer(
    kind: str,
    served: Served,
    data: list[dict[str, Any]],
    scored: ScoredRows,
    request_id: str | None,
    value: Any = None,
) -> dict[str, Any]:
    """Build the answer around ``data``, the objects of the samples.

    Args:
        kind: what the answer's id begins with.
        value: the field ``input`` of the request, whose token ids are counted.
    """
    for item, was_cut in zip(data, scored.exceeded.tolist(), strict=True):
        item |= {"truncated": True} if was_cut else {}
    return {
        "id": f"{kind}-{request_id or uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": served.model_name,
        "data": data,
        "usage": _count_tokens(value),
    }


def _count_tokens(value: Any) -> dict[str, int]:
    """Count the token ids of an ``input``; empty for texts, as the gateway has no tokenizer."""
    token_lists = _token_lists(value)
    if token_lists is None:
        return {}
    tokens = sum(map(len, token_lists))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def refuse(failure: RequestError, body: Body | None) -> HttpAnswer:
    """Answer a failed request with ``{"error": {"message", "type", "param", "code"}}``."""
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
            count_rows=count_pairs,
        )
        for path in ("/score", "/v1/score")
    ),
]


def list_models(contracts: Mapping[str, ScoringContract | None], config: FrontConfig) -> HttpAnswer:
    """Answer OpenAI's list of models."""
    models = [_describe_model(name, contract) for name, contract in contracts.items()]
    return HttpAnswer(200, {"object": "list", "data": models})


def _describe_model(name: str, contract: ScoringContract | None) -> dict[str, Any]:
    model: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "nemo_aligner",
        "root": name,
    }
    if contract is not None:
        model["max_model_len"] = contract.seq_length
        model["reward_scale"] = contract.reward_scale
    return model


MODEL_ROUTES = [ModelRoute("/v1/models", "OpenAI's list of models: the reward models", list_models)]
