"""SGLang's own ``POST /classify``, beside vLLM's at the same path.

A body with ``text`` or ``input_ids`` is SGLang's: one text (or list of ids), or a list of them, as
``EmbeddingReqInput`` of ``sglang/srt/managers/io_struct.py`` (August 2026) has them. All are scored
as they stand, but for what a chat template has behind an end of turn. The answer is an object for
one, and a list of objects for a list: ``embedding`` has the rewards, ``meta_info`` the request's id
and, of ids, their number. What would make another text of it (images, adapters, prepared
embeddings) is refused.
"""

from __future__ import annotations

import uuid
from typing import Any

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
from nemo_aligner.utils.errors import ServingError

# Fields that would score another input, or with another model, and ask for more than a reward.
_NOT_HERE = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "embed_overrides",
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
    """``text`` or ``input_ids``, one or several."""

    text: str | Rows[str] | None = Field(None, examples=[["What is red? A rose."]])
    input_ids: Items[int] | Rows[Items[int]] | None = None
    rid: str | Items[str] | None = None


class SglangRow(Body):
    """One input's rewards, a number for each attribute."""

    embedding: list[float]
    meta_info: dict[str, Any]


class SglangResponse(RootModel[SglangRow | list[SglangRow]]):
    """An object for one input, a list for a list of them."""


def read(body: SglangRequest) -> ScoreRequest:
    """Read texts or ids; raise ServingError for neither, for both, or for more than a reward."""
    for name in _NOT_HERE:
        value = (body.model_extra or {}).get(name)
        if value not in (None, False, []):
            raise ServingError(f"{name}: got {as_json(value)}, wanted null: rewards are of texts")
    if (body.text is None) == (body.input_ids is None):
        got = "neither text nor" if body.text is None else "both text and"
        raise ServingError(f"got {got} input_ids, wanted one of them")
    name = "input_ids" if body.text is None else "text"
    refuse_other_samples(body, name)
    rows = _rows(body)
    if not rows:
        raise ServingError(f"{name}: got none, wanted at least 1")
    if isinstance(body.rid, list) and (_is_single(body) or len(body.rid) != len(rows)):
        wanted = "a text" if _is_single(body) else f"a list of {len(rows)}"
        raise ServingError(f"rid: got {as_json(body.rid)}, wanted {wanted}, as {name} has")
    return ScoreRequest(token_lists=rows) if body.text is None else ScoreRequest(texts=rows)


def _is_single(body: SglangRequest) -> bool:
    ids: Any = body.input_ids
    return isinstance(body.text, str) or bool(ids and isinstance(ids[0], int))


def _rows(body: SglangRequest) -> list[Any]:
    given: Any = body.input_ids if body.text is None else body.text
    return [given] if _is_single(body) else given


def answer(body: SglangRequest, scored: ScoredRows, served: Served) -> Any:
    """Tokens are counted of ids alone: the gateway has no tokenizer to count a text's.

    ``meta_info`` of a text that was cut to the model's length has ``truncated``.
    """
    found = []
    for number, (row, rewards) in enumerate(zip(_rows(body), scored.rewards.tolist(), strict=True)):
        meta: dict[str, Any] = {"id": _id(body, number)}
        if not isinstance(row, str):
            meta["prompt_tokens"] = len(row)
        if scored.exceeded[number]:
            meta["truncated"] = True
        found.append({"embedding": rewards, "meta_info": meta})
    return found[0] if _is_single(body) else found


def _id(body: SglangRequest, number: int) -> str:
    if isinstance(body.rid, list):
        return body.rid[number]
    whole = body.rid or uuid.uuid4().hex
    return whole if _is_single(body) else f"{whole}_{number}"


def refuse(failure: RequestError, body: SglangRequest | None) -> HttpAnswer:
    """``{"error": {"message"}}``"""
    return HttpAnswer(failure.kind.status, {"error": {"message": failure.message}})


ROUTES = [
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
    )
]
