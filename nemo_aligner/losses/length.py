"""Terms of the Bradley-Terry loss that counter a preference for long replies.

All lengths are in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.batch.pairs import PairRows
from nemo_aligner.utils.host_transfer import to_device

REPLIES, PAIRS = "replies", "pairs"


def reply_lengths(rewards: Tensor, records: Records) -> Tensor:
    """Return the length ``[Q]`` of each sample's reply, in the dtype and on the device of rewards.

    Raises:
        ValueError: ``records`` have no lengths, because their replies were not counted.
    """
    lengths = records.reply_lengths[records.reward_bounds[1:] - 1]
    if bool((lengths < 0).any()):
        raise ValueError(
            "reply_lengths: got -1 (not counted) for some replies, but this loss depends on the "
            "lengths of replies. Count their tokens when the records are built"
        )
    return to_device(lengths, rewards.device).to(rewards.dtype)


def explained_by_length(bias: Tensor | float, lengths: Tensor, pairs: PairRows) -> Tensor:
    """Compute the log-odds, predicted from lengths alone, that the better reply is preferred.

    The result is ``bias * log(n_better / n_worse)``, ``[P]``, where n is the length of a reply.
    ``lengths`` are ``[Q]``, and ``bias`` is a number or ``[P]``.
    """
    better, worse = pairs.of(lengths.clamp(min=1).log())
    return bias * (better - worse)


def weigh_longer_chosen(losses: Tensor, weight: float, lengths: Tensor, pairs: PairRows) -> Tensor:
    """Multiply the losses of pairs in which the longer reply is the better one by ``weight``.

    A tied pair has no better reply. ``losses`` are ``[P]``, and ``lengths [Q]`` has the length of
    each sample's reply.
    """
    better, worse = pairs.of(lengths)
    is_weighed = better > worse
    if pairs.are_ties is not None:
        is_weighed = is_weighed & ~to_device(pairs.are_ties, losses.device)
    return torch.where(is_weighed, weight * losses, losses)


def length_correlation(rewards: Tensor, lengths: Tensor, pairs: PairRows, of: str) -> Tensor:
    """Compute the correlation of ``rewards [Q]`` and ``lengths [Q]``, a scalar.

    If ``of`` is ``replies``, it is Pearson's r over all replies. If ``of`` is ``pairs``, reward
    margins are correlated with differences of length, without subtracting the means of these:
    the order of the two replies in a pair is arbitrary, and swapping them must not change the
    result.
    """
    if of == REPLIES:
        return pearson(rewards, lengths)
    (better, worse), (longer, shorter) = pairs.of(rewards), pairs.of(lengths)
    return _cosine(better - worse, longer - shorter)


def pearson(first: Tensor, second: Tensor) -> Tensor:
    """Compute Pearson's r of two tensors ``[N]``; 0, without a gradient, if one is constant."""
    if first.numel() == 0:
        return first.sum()
    return _cosine(first - first.mean(), second - second.mean())


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    """Compute the cosine of the angle between two vectors; 0 if one of them is zero."""
    squares = first.square().sum() * second.square().sum()
    # Without the first ``where``, the unused branch would have the gradient 0 * infinity = NaN.
    scale = torch.where(squares > 0, squares, 1.0).sqrt()
    return torch.where(squares > 0, (first * second).sum() / scale, 0.0)
