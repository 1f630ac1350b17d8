"""All ranks of a ring in one process: threads that hand each other what they pass on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.models.attention import ring
from nemo_aligner.models.attention.segments import PackedSegments, Scores


def attend_in_ring(
    ranks: int,
    batch: PackedBatch,
    inputs: Sequence[Tensor],
    sinks: Tensor | None,
    grad: Tensor,
    scores: Scores,
) -> list[Tensor]:
    """The output of ``inputs``, query, key and value of a pack's tokens, and their gradients.

    The last gradient is that of the ``sinks``, if there are any.
    """
    here = threading.local()
    queues: dict[Any, Queue[Tensor]] = {
        (rank, tag): Queue() for rank in range(ranks) for tag in range(2)
    }

    def pass_on(held: Tensor, tag: int, received: Tensor | None = None) -> Callable[[], Tensor]:
        queues[(here.rank + 1) % ranks, tag].put(held.clone())
        mine = queues[here.rank, tag]
        into = torch.empty_like(held) if received is None else received
        return lambda: into.copy_(mine.get(timeout=60))

    def of_rank(rank: int) -> tuple[Tensor, list[Tensor]]:
        here.rank = rank
        shared = batch.shared(rank, ranks, 1)
        assert shared.share is not None
        rows = shared.share.rows.to(grad.device)
        fill = shared.num_tokens - batch.num_tokens
        *leaves, given = (
            torch.cat([x, filler.expand(fill, -1, -1)])[rows].detach()
            for x, filler in (*((x, x[:1]) for x in inputs), (grad, torch.zeros_like(grad[:1])))
        )
        leaves = [each.requires_grad_() for each in leaves]
        segments = PackedSegments.of(shared, grad.device)
        plan = ring.plan_ring(segments, scores.window)
        # Else all that is on one GPU would run in one thread.
        with torch.autograd.set_multithreading_enabled(False):
            if sinks is not None:
                leaves.append(sinks.detach().clone().requires_grad_())
            out = ring.attend(
                *leaves[:3], leaves[3] if len(leaves) > 3 else None, plan, scores.scale
            )
            found = [out.detach(), *torch.autograd.grad(out, leaves, given)]
        return rows, found

    group = SimpleNamespace(size=lambda: ranks, rank=lambda: here.rank)
    state = SimpleNamespace(get_context_parallel_group=lambda: group)
    with (
        mock.patch.object(ring, "_pass_on", pass_on),
        mock.patch.object(ring, "parallel_state", state),
        ThreadPoolExecutor(ranks) as threads,
    ):
        shares = list(threads.map(of_rank, range(ranks)))
    rows = torch.cat([own for own, _ in shares]).argsort()[: batch.num_tokens]
    of_ranks = [found for _, found in shares]
    to_sinks = [] if sinks is None else [sum(found.pop() for found in of_ranks)]
    return [*(torch.cat(parts)[rows] for parts in zip(*of_ranks, strict=True)), *to_sinks]
