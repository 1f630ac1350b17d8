"""``POST /predict`` and ``/rerank`` of Hugging Face's Text Embeddings Inference (TEI).

Shapes follow ``router/src/http/types.rs`` of TEI (July 2026).

``/predict``: ``inputs`` is a text, a pair of two texts, or a list of such inputs, each written as a
list of one or two texts. The answer lists the attributes with their rewards, largest first, for
each input. A text is scored unchanged, unless it ends with an end-of-turn token: then it is
completed with the text that the chat template writes after that token. A pair is scored as a
conversation: the user's message and the reply.

``/rerank``: ``query`` is the user's message, ``texts`` are replies. The answer has the index and
one reward of each reply, best first.

``raw_scores`` defaults to true here, unlike in TEI: a score is a reward. If a request sets it to
false, as litellm does, scores are the sigmoids of the rewards, as in TEI, which keeps the order.
``truncate: true`` is rejected, because the scoring contract decides how a long sample is cut.

``GET /info`` describes the model in TEI's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from nemo_aligner.utils.errors import ServingError

Direction = Literal["left", "right", "Left", "Right"]


class PredictRequest(Body):
    """A text, a pair of texts, or a list of lists of one or two texts."""

    inputs: str | Rows[str] | Rows[Items[str]] = Field(examples=["What is red? A rose."])
    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    raw_scores: bool = True


class Prediction(Body):
    """The reward of one attribute (``score``) and its name (``label``)."""

    score: float
    label: str


class PredictResponse(RootModel[list[Prediction] | list[list[Prediction]]]):
    """The attributes of one input with their rewards.

    For a list of inputs, one such list for each.
    """


class RerankRequest(Body):
    """A user's message, and replies to it."""

    query: str = Field(examples=["What is red?"])
    texts: Rows[str] = Field(min_length=1, examples=[["A rose.", "The sky."]])
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    raw_scores: bool = True


class Rank(Body):
    """A reply's index in the request, its reward, and its text with ``return_text``."""

    index: int
    score: float
    text: str | None = None


class RerankResponse(RootModel[list[Rank]]):
    """All replies, the one with the largest reward first."""


def read_predict(body: PredictRequest) -> ScoreRequest:
    """Read texts and pairs of texts as samples.

    Raises:
        ServingError: there are no inputs, or an option is not supported.
    """
    _check_options(body)
    refuse_other_samples(body, "inputs")
    inputs: Any = body.inputs
    rows = inputs if _is_batch(body) else [[inputs] if isinstance(inputs, str) else inputs]
    if not rows:
        raise ServingError(
            "inputs: got none, wanted a text, two texts, or a list of lists of one or two texts"
        )
    return ScoreRequest(texts=[_read_input(row, number) for number, row in enumerate(rows)])


def _is_batch(body: PredictRequest) -> bool:
    inputs: Any = body.inputs
    return not isinstance(inputs, str) and (not inputs or not isinstance(inputs[0], str))


def _read_input(row: list[str], number: int) -> Text:
    """Return a single text unchanged, and a pair as a conversation."""
    if len(row) not in (1, 2):
        raise ServingError(f"inputs, row {number}: got {len(row)} texts, wanted one or a pair")
    return row[0] if len(row) == 1 else _make_conversation(*row)


def _make_conversation(query: str, reply: str) -> Text:
    return [{"role": "user", "content": query}, {"role": "assistant", "content": reply}]


def read_rerank(body: RerankRequest) -> ScoreRequest:
    """Pair the query with each reply; raise ServingError if an option is unsupported."""
    _check_options(body)
    refuse_other_samples(body, "texts")
    return ScoreRequest(texts=[_make_conversation(body.query, text) for text in body.texts])


def _check_options(body: PredictRequest | RerankRequest) -> None:
    if body.truncate:
        raise ServingError(
            "truncate: got true, wanted false or null: the model's scoring contract decides how a "
            "long sample is cut"
        )


def _check_not_cut(body: PredictRequest | RerankRequest, scored: ScoredRows) -> None:
    """Reject the request if it sets ``truncate`` to false, and a sample was cut.

    Raises:
        RequestError: a sample was cut; the message names its row.
    """
    if body.truncate is False and scored.exceeded.any():
        row = int(np.argmax(scored.exceeded))
        raise RequestError(
            f"row {row}: the sample is longer than the model's seq_length, and truncate is false; "
            "send a shorter sample, or truncate=null to have its end scored",
            FailureKind.bad_request,
            row=row,
        )


def _apply_sigmoid(
    rewards: Sequence[float], body: PredictRequest | RerankRequest, served: Served
) -> Sequence[float]:
    """Return the rewards, or their sigmoids if the request sets ``raw_scores`` to false.

    Rewards that are probabilities are returned unchanged: they are between 0 and 1 already.
    """
    needs_no_sigmoid = body.raw_scores or served.scale == PROBABILITY
    return rewards if needs_no_sigmoid else sigmoid(np.asarray(rewards)).tolist()


def answer_predict(body: PredictRequest, scored: ScoredRows, served: Served) -> Any:
    """List the attributes of each input with their rewards, the largest reward first."""
    _check_not_cut(body, scored)
    predictions = []
    for row in scored.rewards.tolist():
        rewards = _apply_sigmoid(row, body, served)
        labelled = zip(rewards, served.attributes, strict=True)
        prediction: list[dict[str, Any]] = [
            {"score": reward, "label": label} for reward, label in labelled
        ]
        predictions.append(sorted(prediction, key=lambda attribute: -attribute["score"]))
    return predictions if _is_batch(body) else predictions[0]


def answer_rerank(body: RerankRequest, scored: ScoredRows, served: Served) -> Any:
    """Rank the replies, best first; if rewards are equal, the later one comes first, as in TEI."""
    _check_not_cut(body, scored)
    ranks: list[dict[str, Any]] = []
    for index, reward in enumerate(_apply_sigmoid(served.one_reward(scored.rewards), body, served)):
        text = {"text": body.texts[index]} if body.return_text else {}
        ranks.append({"index": index, **text, "score": reward})
    return sorted(ranks, key=lambda rank: (rank["score"], rank["index"]), reverse=True)


def refuse(failure: RequestError, body: Body | None) -> HttpAnswer:
    """Answer a failed request with ``{"error", "error_type"}``, TEI's form."""
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


def describe_model(
    contracts: Mapping[str, ScoringContract | None], config: FrontConfig
) -> HttpAnswer:
    """Answer TEI's ``/info``; its limits of requests are this server's limit of queued rows."""
    name, contract = next(iter(contracts.items()))
    attributes = ("reward",) if contract is None else contract.attributes
    labels = {str(column): name for column, name in enumerate(attributes)}
    numbers = {name: column for column, name in enumerate(attributes)}
    length = 0 if contract is None else contract.seq_length
    cuts = contract is not None and contract.overlong == Overlong.truncate_left.value
    content = {
        "model_id": name,
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
