"""Reranking of vLLM, Jina and Cohere: ``POST /rerank``, ``/v1/rerank`` and ``/v2/rerank``.

All three send ``query``, ``documents`` (strings, or objects with ``text``), ``top_n`` and
``return_documents``, and read ``results``, best first, each with ``index`` and ``relevance_score``.
Sources: vLLM 0.32 (``vllm/entrypoints/pooling/*/protocol.py``), Cohere's client 6.1 and Jina's
reference of November 2026. The query is the user's message, and a document is the reply. A score is
the model's reward, which may be any number. As in vLLM and Jina, ``document`` is in the answer
unless ``return_documents`` is false.

TEI also has ``/rerank``, but with ``texts`` instead of ``documents`` (``tei.py``).
"""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import Field

from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Route,
    Rows,
    Served,
    as_json,
    refuse_other_samples,
    text_of,
)
from nemo_aligner.serving.protocols.vllm import check_fixed
from nemo_aligner.serving.protocols.vllm import refuse as refuse_like_vllm
from nemo_aligner.utils.errors import ServingError

# Accepted values of ``rank_fields``. In Cohere's first version it lists the fields of a document to
# rank by, but here a document has only ``text``.
_RANK_FIELDS = (None, ["text"])


class DocumentsRequest(Body):
    """A query, and documents that are replies to it."""

    query: str | dict[str, Any] = Field(examples=["What is red?"])
    documents: Rows[str | dict[str, Any]] = Field(min_length=1, examples=[["A rose.", "The sky."]])
    model: str | None = None
    top_n: int | None = Field(None, ge=0, description="return only the best; 0 or null: all")
    return_documents: bool | None = None


class RankedDocument(Body):
    """One result: a document's index in the request, its reward, and its text if requested."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class DocumentsResponse(Body):
    """Documents, best first; one that was cut to the model's length has ``truncated: true``."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: dict[str, int]
    meta: dict[str, Any]


def read(body: DocumentsRequest) -> ScoreRequest:
    """Pair the query with each document; raise ServingError if one of them is not text."""
    check_fixed(body, special_tokens=(True,))
    refuse_other_samples(body, "documents")
    rank_fields = (body.model_extra or {}).get("rank_fields")
    if rank_fields not in _RANK_FIELDS:
        raise ServingError(
            f'rank_fields: got {as_json(rank_fields)}, wanted null or ["text"]: a document has '
            "only text here"
        )
    query = {"role": "user", "content": _read_content(body.query, "query")}
    replies = [
        _read_content(document, f"documents.{row}") for row, document in enumerate(body.documents)
    ]
    return ScoreRequest(
        texts=[[query, {"role": "assistant", "content": reply}] for reply in replies]
    )


def count_rows(body: DocumentsRequest) -> int:
    """Count the conversations that ``read`` would build."""
    return len(body.documents)


def _read_content(value: str | dict[str, Any], location: str) -> str:
    """Return the text of a query or document.

    It is a string, an object with ``text`` (Cohere and Jina), or a list of text parts (vLLM), whose
    texts are joined. ``location`` is its place in the body, for error messages.
    """
    if isinstance(value, str):
        return value
    content = value.get("text", value.get("content"))
    return text_of(value if content is None else content, location)


def answer(body: DocumentsRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """List the documents with the largest rewards; of equal ones, the earlier comes first."""
    # Build only the requested results: a request may have many documents and a small top_n.
    ranked = sorted(enumerate(served.one_reward(scored.rewards)), key=lambda pair: -pair[1])
    results = []
    for index, reward in ranked[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": reward}
        if body.return_documents is not False:
            result["document"] = {"text": _read_content(body.documents[index], "documents")}
        if scored.exceeded[index]:
            result["truncated"] = True
        results.append(result)
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": served.model_name,
        "results": results,
        # Zeros: clients of all three protocols read the field, but the gateway has no tokenizer to
        # count tokens.
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
        "meta": {},
    }


def refuse(failure: RequestError, body: DocumentsRequest | None) -> HttpAnswer:
    """Answer a failed request with vLLM's ``error``, Jina's ``detail`` and Cohere's ``message``."""
    answer = refuse_like_vllm(failure, body)
    messages = {"detail": failure.message, "message": failure.message}
    return HttpAnswer(answer.status, {**answer.content, **messages})


def _make_route(path: str, summary: str, marks: tuple[str, ...] = ()) -> Route[DocumentsRequest]:
    types = (DocumentsRequest, DocumentsResponse)
    return Route(path, summary, *types, read, answer, refuse, marks=marks, count_rows=count_rows)


ROUTES = [
    _make_route("/rerank", "vLLM's reranking: documents by their rewards", ("documents",)),
    _make_route("/v1/rerank", "Jina's reranking, Cohere's first and vLLM's: documents by rewards"),
    _make_route("/v2/rerank", "Cohere's second reranking, and vLLM's: documents by rewards"),
]
