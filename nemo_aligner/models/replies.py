"""Replies in a pack: their tokens, mean hidden states, and a language model's loss on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch, ReplyRows
from nemo_aligner.contract.turns import reply_start
from nemo_aligner.models.attention.segments import chains_of

# Pooling over the reply. Each reply is reduced on its own, so its mean does not depend on the pack.


def find_reply_rows(batch: PackedBatch, marker: Sequence[int]) -> ReplyRows:
    """Find the reply tokens of each of a pack's S sequences, as row indices on the host.

    If a sequence begins with cached tokens, the cached part must end before the last marker.
    """
    rows, lengths = [], []
    for own in _sequences(batch):
        start = reply_start(batch.tokens[own].numpy(), marker)
        rows.append(own[start:])
        lengths.append(len(own) - start)
    return ReplyRows(torch.cat(rows), tuple(lengths))


def _sequences(batch: PackedBatch) -> Iterator[Tensor]:
    """Yield the row indices of each sequence's tokens in the pack, prefix segments included."""
    bounds = batch.cu_seqlens.tolist()
    cached = 0 if batch.cached is None else len(batch.cached.lengths)
    chains = chains_of(batch.prefixes.tolist(), cached)
    ends = torch.searchsorted(batch.cu_seqlens.long(), batch.scored_tokens, right=True) - 1
    for segment in ends.tolist():
        parts = [number - cached for number in chains[segment] if number >= cached]
        spans = [torch.arange(bounds[part], bounds[part + 1]) for part in (*parts, segment)]
        yield torch.cat(spans)


def mean_of_replies(hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Average ``[M, hidden]`` rows over replies of these lengths -> ``[S, hidden]`` fp32.

    One reduction per reply: a segmented sum would round a reply by what stands beside it.
    """
    return torch.stack([reply.float().mean(dim=0) for reply in hidden.split(list(lengths))])


# The loss of the language model that the body was.


def find_spoken_rows(batch: PackedBatch, marker: Sequence[int]) -> ReplyRows:
    """Find what predicts, and what is, the reply of the best text of each record, on the host.

    Without a ``marker`` a text is all reply, but for its first token, which nothing predicts.
    """
    records, best = batch.records, dict[int, int]()
    owner = torch.arange(len(records)).repeat_interleave(records.sizes).tolist()
    ranks = records.ranks.tolist()
    for text, record in enumerate(owner):
        if record not in best or ranks[text] < ranks[best[record]]:
            best[record] = text
    rows, lengths = [], []
    for text, own in enumerate(_sequences(batch)):
        start = len(own)
        if text < len(owner) and best[owner[text]] == text:  # a pack may be of no record
            ids = batch.tokens[own].numpy()
            start = max(1, reply_start(ids, marker) if marker else 0)
        rows.append(torch.stack([own[start - 1 : -1], own[start:]]))
        lengths.append(len(own) - start)
    return ReplyRows(torch.cat(rows, dim=1), tuple(lengths))


def spoken_losses(
    hidden: Tensor, targets: Tensor, lengths: Sequence[int], words: Any, vocab_size: int, tp: Any
) -> Tensor:
    """Mean ``-log p`` ``[S, 1]`` float32 of each text's spoken tokens; 0 for a text without any.

    Args:
        hidden: ``[M, hidden]``, what predicts them.
        targets: ``[M]`` int64 token ids.
        lengths: of the S texts.
        words: megatron-core's embedding, whose weight is the output layer's.
        tp: the tensor parallel group, over which it is split.
    """
    # Each rank has a part of the vocabulary, and so of the gradient.
    hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, tp)
    logits = F.linear(hidden, words.weight).float()
    own = torch.arange(words.vocab_start_index, words.vocab_end_index, device=logits.device)
    logits = logits.masked_fill(own >= vocab_size, -torch.inf)
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits[:, None], targets[:, None])
    parts = losses[:, 0].split(list(lengths))
    return torch.stack([part.sum() / max(1, len(part)) for part in parts])[:, None]
