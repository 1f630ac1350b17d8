"""A call of any size as requests that the server takes, and their replies as one answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import ScoreReply
from nemo_aligner.text.messages import Text

logger = logging.getLogger(__name__)

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class PartialRequest:
    """One request's tensors, and the indices of its rows in the caller's list."""

    rows: list[int]
    inputs: Tensors


def split_texts(texts: Sequence[Text], limit: int) -> list[PartialRequest]:
    """Requests of at most ``limit`` texts each, of raw texts or of conversations.

    Raises:
        TypeError: ``texts`` is one string.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts: got one string ({texts[:40]!r}), wanted a list of texts")
    sentences = [row for row, text in enumerate(texts) if isinstance(text, str)]
    conversations = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    encode: Any
    parts = []
    for indices, encode in (
        (sentences, kserve.encode_sentences),
        (conversations, kserve.encode_conversations),
    ):
        for rows in _chunks(indices, limit):
            parts.append(PartialRequest(rows, encode([texts[row] for row in rows])))
    return parts


def split_tokens(token_lists: Sequence[Sequence[int]], limit: int) -> list[PartialRequest]:
    """Requests of at most ``limit`` token sequences each."""
    # Alike in length, so that a request carries little padding.
    by_length = sorted(range(len(token_lists)), key=lambda row: len(token_lists[row]))
    return [
        PartialRequest(rows, kserve.encode_tokens([token_lists[row] for row in rows]))
        for rows in _chunks(by_length, limit)
    ]


def _chunks(rows: list[int], size: int) -> Iterable[list[int]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def join_replies(parts: Sequence[PartialRequest], replies: Sequence[ScoreReply]) -> np.ndarray:
    """Rewards ``[N, A]`` float32 in the caller's order; warns of texts that the server cut."""
    if not replies:
        return np.zeros((0, 1), dtype=np.float32)
    total = sum(len(part.rows) for part in parts)
    rewards = np.empty((total, replies[0].rewards.shape[1]), dtype=np.float32)
    for part, reply in zip(parts, replies, strict=True):
        rewards[part.rows] = reply.rewards
    _warn_if_exceeded(replies, total)
    return rewards


def _warn_if_exceeded(replies: Sequence[ScoreReply], total: int) -> None:
    exceeded = sum(int(reply.exceeded.sum()) for reply in replies)
    if exceeded:
        logger.warning("%d of %d texts were cut to the model's seq_length", exceeded, total)
