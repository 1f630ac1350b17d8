"""Rows of a model that has a reward for each turn or step, on their way through a server.

The ids that are read are marked, so that a row goes through queue and ranks like any other. No id
that comes from outside is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.serving.protocols import StepRewards


class StepScorer(Protocol):
    """Scorer of turns and steps; ``score_step_outputs`` is collective over the ranks."""

    contract: ScoringContract

    def score_step_outputs(
        self,
        token_lists: Sequence[Sequence[int] | np.ndarray],
        reads: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """``[S, outputs]`` float32 of the head, at all places ``reads`` of the token lists."""

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """``[N, A]`` float32 rewards of ``outputs``, and their spreads, if any."""


def mark_reads(token_ids: Sequence[int], reads: Sequence[int]) -> list[int]:
    """The ids with those at the places ``reads`` as ``-1 - id``."""
    marked = list(token_ids)
    for place in reads:
        marked[place] = ~marked[place]
    return marked


def unmark_reads(row: Sequence[int] | np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The inverse of ``mark_reads``; without marks the last id is read."""
    marked = np.asarray(row, dtype=np.int64)
    reads = np.flatnonzero(marked < 0).tolist() or [len(marked) - 1]
    return np.where(marked < 0, ~marked, marked), reads


def score_marked(scorer: StepScorer, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """``[s, A]`` rewards of each row, of whose ids s are marked; outputs, if there is a readout."""
    found = [unmark_reads(row) for row in rows]
    reads = [own for _, own in found]
    outputs = scorer.score_step_outputs([ids for ids, _ in found], reads)
    if scorer.contract.readout is None:
        outputs, _ = scorer.read_outputs(outputs)
    return np.split(outputs, np.cumsum([len(own) for own in reads])[:-1])


def by_text(
    rewards: np.ndarray, spans: Sequence[tuple[StepSpan, ...]]
) -> tuple[np.ndarray, np.ndarray]:
    """``[N]`` rewards of the steps of each row, of rewards ``[S, A]``, and the last row of each."""
    ends = np.cumsum([max(1, len(own)) for own in spans])
    steps = np.full(len(spans), None, dtype=np.object_)
    parts = np.split(rewards, ends[:-1])
    steps[:] = [StepRewards(part, own) for part, own in zip(parts, spans, strict=True)]
    return steps, ends - 1
