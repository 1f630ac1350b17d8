"""``POST /predict`` and ``/rerank`` of Hugging Face's Text Embeddings Inference (TEI).

The shapes are those of its ``router/src/http/types.rs`` (July 2026). ``inputs`` of ``/predict`` is
a text, a pair (two texts), or a list of lists of one text or two; the answer is the attributes with
their rewards, the largest first, for each. A text is scored as it stands, but for what a chat
template has behind an end of turn; a pair is what the user says and the reply, as a conversation.
``/rerank`` has one ``query``, the user's, with ``texts``, the replies; the answer is their numbers,
one reward for each, the best first.

``raw_scores`` left out is true here: a score is a reward. An explicit false, which litellm sends,
asks for a number from 0 to 1 and gets the reward's sigmoid, as from TEI; it orders texts the same
way. ``truncate: true`` is refused: how a long text is cut is for the scoring contract.

``GET /info`` is what TEI says of itself, of this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, RootModel

import nemo_aligner
from nemo_aligner.config.common import Overlong
from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.readout import PROBABILITY, sigmoid
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    ModelRoute,
    Route,
    Rows,
    Served,
    refuse_other_samples,
)
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.utils.errors import ServingError

Direction = Literal["left", "right", "Left", "Right"]


class PredictRequest(Body):
    """A text, a pair, or a list of lists of one or two texts."""

    inputs: str | Rows[str] | Rows[Items[str]] = Field(examples=["What is red? A rose."])
    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    raw_scores: bool = True


class Prediction(Body):
    """The reward of one attribute."""

    score: float
    label: str


class PredictResponse(RootModel[list[Prediction] | list[list[Prediction]]]):
    """For one input its attributes, for a list a list of these."""


class RerankRequest(Body):
    """What the user says, and replies to it."""

    query: str = Field(examples=["What is red?"])
    texts: Rows[str] = Field(min_length=1, examples=[["A rose.", "The sky."]])
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    raw_scores: bool = True


class Rank(Body):
    """One of the texts, by its place in the request."""

    index: int
    score: float
    text: str | None = None


class RerankResponse(RootModel[list[Rank]]):
    """The best first."""


def read_predict(body: PredictRequest) -> ScoreRequest:
    """Read texts and pairs; raise ServingError for none, for three, or for another score."""
    _check_options(body)
    refuse_other_samples(body, "inputs")
    given: Any = body.inputs
    rows = given if _is_batch(body) else [[given] if isinstance(given, str) else given]
    if not rows:
        raise ServingError("inputs: got none, wanted a text, a pair, or a list of lists of them")
    return ScoreRequest(texts=[_text(row, number) for number, row in enumerate(rows)])


def _is_batch(body: PredictRequest) -> bool:
    given: Any = body.inputs
    return not isinstance(given, str) and (not given or not isinstance(given[0], str))


def _text(row: list[str], number: int) -> Text:
    """A text, or a pair as a conversation."""
    if len(row) not in (1, 2):
        raise ServingError(f"inputs, row {number}: got {len(row)} texts, wanted one or a pair")
    return row[0] if len(row) == 1 else _conversation(*row)


def _conversation(query: str, reply: str) -> Text:
    return [{"role": "user", "content": query}, {"role": "assistant", "content": reply}]


def read_rerank(body: RerankRequest) -> ScoreRequest:
    """Read a query with each of its texts; raise ServingError for another score."""
    _check_options(body)
    refuse_other_samples(body, "texts")
    return ScoreRequest(texts=[_conversation(body.query, text) for text in body.texts])


def _check_options(body: PredictRequest | RerankRequest) -> None:
    if body.truncate:
        raise ServingError(
            "truncate: got true, wanted false or null: how a long text is cut is for the model's "
            "scoring contract"
        )


def _check_not_cut(body: PredictRequest | RerankRequest, scored: ScoredRows) -> None:
    """Refuse a text that was cut although the request says that none may be.

    Raises:
        RequestError: it names the row.
    """
    if body.truncate is False and scored.exceeded.any():
        row = int(np.argmax(scored.exceeded))
        raise RequestError(
            f"row {row}: the text is longer than the model's seq_length, and truncate is false; "
            "send a shorter text, or truncate=null to have its end scored",
            FailureKind.bad_request,
            row=row,
        )


def _activated(
    rewards: Sequence[float], body: PredictRequest | RerankRequest, served: Served
) -> Sequence[float]:
    """Rewards, or their sigmoids where a request asks for no raw scores.

    Probabilities are from 0 to 1 already.
    """
    needs_no_sigmoid = body.raw_scores or served.scale == PROBABILITY
    return rewards if needs_no_sigmoid else sigmoid(np.asarray(rewards)).tolist()


def answer_predict(body: PredictRequest, scored: ScoredRows, served: Served) -> Any:
    """Each attribute with its reward, the largest first."""
    _check_not_cut(body, scored)
    found = []
    for row in scored.rewards.tolist():
        rewards = _activated(row, body, served)
        labelled = zip(rewards, served.attributes, strict=True)
        named: list[dict[str, Any]] = [
            {"score": reward, "label": label} for reward, label in labelled
        ]
        found.append(sorted(named, key=lambda each: -each["score"]))
    return found if _is_batch(body) else found[0]


def answer_rerank(body: RerankRequest, scored: ScoredRows, served: Served) -> Any:
    """One number for each text, the best first; TEI puts the later of two equal ones first."""
    _check_not_cut(body, scored)
    ranks: list[dict[str, Any]] = []
    for index, reward in enumerate(_activated(served.one_reward(scored.rewards), body, served)):
        text = {"text": body.texts[index]} if body.return_text else {}
        ranks.append({"index": index, **text, "score": reward})
    return sorted(ranks, key=lambda rank: (rank["score"], rank["index"]), reverse=True)


def refuse(failure: RequestError, body: Body | None) -> HttpAnswer:
    """``{"error", "error_type"}``"""
    kind = failure.kind
    return HttpAnswer(kind.status, {"error": failure.message, "error_type": kind.tei_type})


ROUTES: list[Route[Any]] = [
    Route(
        "/predict",
        "Text Embeddings Inference: the reward of each attribute",
        PredictRequest,
        PredictResponse,
        read_predict,
        answer_predict,
        refuse,
        completes_turns=True,
    ),
    Route(
        "/rerank",
        "Text Embeddings Inference: replies to a query, the best first",
        RerankRequest,
        RerankResponse,
        read_rerank,
        answer_rerank,
        refuse,
    ),
]


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def describe_model(contract: ScoringContract | None, config: FrontConfig) -> HttpAnswer:
    """TEI's ``/info``; the numbers of a batch are the gateway's, as no batch is made here."""
    attributes = ("reward",) if contract is None else contract.attributes
    labels = {str(column): name for column, name in enumerate(attributes)}
    numbers = {name: column for column, name in enumerate(attributes)}
    length = 0 if contract is None else contract.seq_length
    cuts = contract is not None and contract.overlong == Overlong.truncate_left.value
    content = {
        "model_id": MODEL_NAME,
        "model_sha": None if contract is None else contract.hash,
        "model_dtype": "float32" if contract is None else _DTYPES[contract.dtype],
        "model_type": {"reranker": {"id2label": labels, "label2id": numbers}},
        "max_concurrent_requests": config.max_queue_rows,
        "max_input_length": length,
        "max_batch_tokens": length,
        "max_batch_requests": None,
        "max_client_batch_size": config.max_queue_rows,
        "auto_truncate": cuts,
        "reward_scale": None if contract is None else contract.reward_scale,
        "tokenization_workers": 1,
        "version": nemo_aligner.__version__,
    }
    return HttpAnswer(200, content)


MODEL_ROUTES = [ModelRoute("/info", "Text Embeddings Inference: what the model is", describe_model)]
