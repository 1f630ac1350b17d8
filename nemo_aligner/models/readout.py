"""What a reward model reads of its replies beside their last tokens: the mean, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from nemo_aligner.batch.packed import ReplyRows


def mean_of_replies(hidden: Tensor, replies: ReplyRows) -> Tensor:
    """Average the rows ``hidden [M, hidden]`` of replies over each -> ``[S, hidden]`` fp32.

    One reduction per reply: a segmented sum would round a reply by what stands beside it. Ranks of
    a context parallel group that have parts of them add up their sums, and the gradients of these.
    Where nothing is learned they gather the rows, for the bits of one process: how a text is cut
    depends on the others that begin as it does.
    """
    if replies.whole is None:
        parts = hidden.split(list(replies.lengths))
        return torch.stack([reply.float().mean(dim=0) for reply in parts])
    group = parallel_state.get_context_parallel_group()
    if not torch.is_grad_enabled():
        assert replies.places is not None
        rows = hidden.new_zeros(sum(replies.whole), hidden.size(1))
        dist.all_reduce(rows.index_copy_(0, replies.places, hidden), group=group)
        return mean_of_replies(rows, ReplyRows(replies.index, replies.whole))
    parts = hidden.split(list(replies.lengths))
    sums: Tensor = all_reduce(torch.stack([part.float().sum(dim=0) for part in parts]), group=group)
    return sums / sums.new_tensor(replies.whole)[:, None]


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
