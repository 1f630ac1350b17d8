"""The mean of a reply's hidden states, which is the same whatever stands beside it in a pack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nemo_aligner.batch import PackedBatch, ReplyRows
from nemo_aligner.models.attention.segments import chains_of
from nemo_aligner.text.reply_marker import reply_start


def find_reply_rows(batch: PackedBatch, marker: Sequence[int]) -> ReplyRows:
    """Which tokens of a pack, on the host, are the reply of each of its S sequences.

    Of a sequence that begins with cached tokens, these end before the last marker.
    """
    rows, lengths = [], []
    for own in _sequences(batch):
        start = reply_start(batch.tokens[own].numpy(), marker)
        rows.append(own[start:])
        lengths.append(len(own) - start)
    return ReplyRows(torch.cat(rows), tuple(lengths))


def _sequences(batch: PackedBatch) -> Iterator[Tensor]:
    """Of every sequence its tokens that are in the pack, as rows, in their order."""
    bounds = batch.cu_seqlens.tolist()
    cached = 0 if batch.cached is None else len(batch.cached.lengths)
    chains = chains_of(batch.prefixes.tolist(), cached)
    ends = torch.searchsorted(batch.cu_seqlens.long(), batch.scored_tokens, right=True) - 1
    for segment in ends.tolist():
        parts = [number - cached for number in chains[segment] if number >= cached]
        spans = [torch.arange(bounds[part], bounds[part + 1]) for part in (*parts, segment)]
        yield torch.cat(spans)


def mean_of_replies(hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """``[M, hidden]``, the rows of replies of these lengths -> ``[S, hidden]`` fp32.

    Each is summed alone: how a sum is rounded depends on its own length.
    """
    return torch.stack([reply.float().mean(dim=0) for reply in hidden.split(list(lengths))])
