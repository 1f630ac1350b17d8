"""The mean of a reply's hidden states, which a reward head can read instead of a last token."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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
    if replies.group_lengths is None:
        parts = hidden.split(list(replies.lengths))
        return torch.stack([reply.float().mean(dim=0) for reply in parts])
    group = parallel_state.get_context_parallel_group()
    if not torch.is_grad_enabled():
        assert replies.places is not None
        rows = hidden.new_zeros(sum(replies.group_lengths), hidden.size(1))
        dist.all_reduce(rows.index_copy_(0, replies.places, hidden), group=group)
        return mean_of_replies(rows, ReplyRows(replies.index, replies.group_lengths))
    parts = hidden.split(list(replies.lengths))
    sums: Tensor = all_reduce(torch.stack([part.float().sum(dim=0) for part in parts]), group=group)
    return sums / sums.new_tensor(replies.group_lengths)[:, None]
