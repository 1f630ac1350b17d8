"""The mean of a reply's hidden states, which a reward head can read instead of the last token's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from nemo_aligner.batch.packed import ReplyRows
from nemo_aligner.utils.host_transfer import to_device


def mean_of_replies(hidden: Tensor, replies: ReplyRows) -> Tensor:
    """Average the hidden states ``[M, hidden]`` of the tokens of S replies -> ``[S, hidden]`` fp32.

    Every reply is reduced by its own call, because a segmented sum would round a reply differently
    depending on the other replies. Under context parallelism every rank has parts of the replies.
    In training each rank sums its part, and an all-reduce adds these sums, as well as their
    gradients. In inference the ranks gather all rows first, so that the result is bit-identical to
    that of one process.

    Args:
        replies: which rows belong to which reply.
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
    counts = to_device(torch.tensor(replies.group_lengths, dtype=sums.dtype), sums.device)
    return sums / counts[:, None]
