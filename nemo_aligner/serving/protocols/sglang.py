"""SGLang's own ``POST /classify``, at the same path as vLLM's, and its routes in OpenAI's form.

A body with ``text`` or ``input_ids`` is SGLang's; shapes follow ``EmbeddingReqInput`` of
``sglang/srt/managers/io_struct.py`` (August 2026). The body has one text or list of token ids, or a
list of these. Samples are scored unchanged, unless they end with an end-of-turn token: then they
are completed with the text that the chat template writes after that token. The answer is one
object, or a list of objects for a list: ``embedding`` has the rewards, ``meta_info`` the request's
id and, for token ids, their number. Fields that change the sample (images, adapters, prepared
embeddings) are rejected.

``POST /v1/classify`` and ``/v1/embeddings`` take ``input``, like vLLM's ``/classify``; shapes
follow ``sglang/srt/entrypoints/openai/protocol.py``. verl's reward loop reads the last number of an
``embedding``. Unlike SGLang's, ``probs`` are the rewards, without a softmax.
"""

from __future__ import annotations

import base64
import uuid
from typing import Any, Literal

import numpy as np
from pydantic import Field, RootModel

from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    Route,
    Rows,
    Served,
    as_json,
    refuse_other_samples,
)
from nemo_aligner.serving.protocols.vllm import (
    PoolingRequest,
    PoolingResponse,
    answer_classify,
    list_answer,
    read_samples,
    read_texts,
    refuse_steps,
)
from nemo_aligner.serving.protocols.vllm import refuse as refuse_like_vllm
from nemo_aligner.utils.errors import ServingError

# Unsupported fields: they change the sample or the model, or request more than rewards.
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "embed_overrides",
    "embed_override_token_id",
    "positional_embed_overrides",
    "multi_item_delimiter_indices",
    "is_cross_encoder_request",
    "lora_path",
    "lora_id",
    "dimensions",
    "return_pooled_hidden_states",
    "return_prompt_token_ids",
)


class SglangRequest(Body):
    """A request with ``text`` or ``input_ids``, which have one sample or several."""

    text: str | Rows[str] | None = Field(None, examples=[["What is red? A rose."]])
    input_ids: Items[int] | Rows[Items[int]] | None = None
    rid: str | Items[str] | None = None
    model: str | None = None


class SglangRow(Body):
    """The rewards of one sample, one number per attribute."""

    embedding: list[float]
    meta_info: dict[str, Any]


class SglangResponse(RootModel[SglangRow | list[SglangRow]]):
    """One object for a request of a single sample; a list of objects for a list of samples."""


def read(body: SglangRequest) -> ScoreRequest:
    """Read texts or token ids of a request.

    Raises:
        ServingError: the request has both, neither, or an unsupported field.
    """
    _check_unsupported(body)
    if (body.text is None) == (body.input_ids is None):
        state = "neither text nor" if body.text is None else "both text and"
        raise ServingError(f"got {state} input_ids, wanted one of them")
    name = "input_ids" if body.text is None else "text"
    refuse_other_samples(body, name)
    rows = _list_samples(body)
    if not rows:
        raise ServingError(f"{name}: got no samples, wanted at least 1")
    if isinstance(body.rid, list) and (_is_single(body) or len(body.rid) != len(rows)):
        expected = "a string" if _is_single(body) else f"a list of {len(rows)} strings"
        raise ServingError(
            f"rid: got {as_json(body.rid)}, wanted {expected}, one for each sample of {name}"
        )
    return ScoreRequest(token_lists=rows) if body.text is None else ScoreRequest(texts=rows)


def _check_unsupported(body: Body) -> None:
    for name in _UNSUPPORTED:
        value = (body.model_extra or {}).get(name)
        if value not in (None, False, []):
            raise ServingError(
                f"{name}: got {as_json(value)}, wanted null: this server scores only texts and "
                "token ids"
            )


def _is_single(body: SglangRequest) -> bool:
    ids: Any = body.input_ids
    return isinstance(body.text, str) or bool(ids and isinstance(ids[0], int))


def _list_samples(body: SglangRequest) -> list[Any]:
    value: Any = body.input_ids if body.text is None else body.text
    return [value] if _is_single(body) else value


def answer(body: SglangRequest, scored: ScoredRows, served: Served) -> Any:
    """Build the answer, in which each sample's ``embedding`` has its rewards.

    ``meta_info`` has ``truncated`` if the sample was cut to the model's length, and
    ``prompt_tokens`` only for token ids, because the gateway has no tokenizer.
    """
    answers = []
    samples = _list_samples(body)
    for number, (row, rewards) in enumerate(zip(samples, scored.rewards.tolist(), strict=True)):
        meta: dict[str, Any] = {"id": _request_id(body, number)}
        if not isinstance(row, str):
            meta["prompt_tokens"] = len(row)
        if scored.exceeded[number]:
            meta["truncated"] = True
        answers.append({"embedding": rewards, "meta_info": meta})
    return answers[0] if _is_single(body) else answers


def _request_id(body: SglangRequest, number: int) -> str:
    if isinstance(body.rid, list):
        return body.rid[number]
    request_id = body.rid or uuid.uuid4().hex
    return request_id if _is_single(body) else f"{request_id}_{number}"


def refuse(failure: RequestError, body: SglangRequest | None) -> HttpAnswer:
    """Answer a failed request with ``{"error": {"message"}}``."""
    return HttpAnswer(failure.kind.status, {"error": {"message": failure.message}})


class EmbeddingsRequest(Body):
    """Samples as ``input``: a text, a list of token ids, or a list of either.

    With the ``encoding_format`` ``base64``, which OpenAI's client requests, an embedding is the
    bytes of its numbers (float32, little-endian) in base64.
    """

    model: str | None = None
    input: str | Rows[str] | Items[int] | Rows[Items[int]] = Field(
        examples=[["What is red? A rose."]]
    )
    encoding_format: Literal["float", "base64"] | None = None
    request_id: str | None = None


def read_classify(body: PoolingRequest) -> ScoreRequest:
    """Read samples like vLLM's ``/classify``; also reject unsupported fields of SGLang."""
    _check_unsupported(body)
    return read_texts(body)


def read_embeddings(body: EmbeddingsRequest) -> ScoreRequest:
    """Read samples like ``/v1/classify``, but not conversations."""
    _check_unsupported(body)
    refuse_steps(body)
    return read_samples(body, body.input)


def answer_embeddings(body: EmbeddingsRequest, scored: ScoredRows, served: Served) -> Any:
    """Build the answer, in which each sample's ``embedding`` has its rewards."""
    rows = scored.rewards
    embeddings = map(_encode_base64, rows) if body.encoding_format == "base64" else rows.tolist()
    data = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(embeddings)
    ]
    return list_answer("embd", served, data, scored, body.request_id, body.input)


def _encode_base64(rewards: np.ndarray) -> str:
    return base64.b64encode(rewards.astype("<f4").tobytes()).decode()


ROUTES: list[Route[Any]] = [
    Route(
        "/classify",
        "SGLang's native classification: the rewards as an embedding",
        SglangRequest,
        SglangResponse,
        read,
        answer,
        refuse,
        completes_turns=True,
        marks=("text", "input_ids"),
    ),
    Route(
        "/v1/classify",
        "SGLang's classification in OpenAI's form: a reward for each attribute",
        PoolingRequest,
        PoolingResponse,
        read_classify,
        answer_classify,
        refuse_like_vllm,
        completes_turns=True,
    ),
    Route(
        "/v1/embeddings",
        "OpenAI's embeddings, as SGLang has them for reward models: the rewards as an embedding",
        EmbeddingsRequest,
        PoolingResponse,
        read_embeddings,
        answer_embeddings,
        refuse_like_vllm,
        completes_turns=True,
    ),
]
