"""Terms of Bradley-Terry against a preference for long replies; lengths are in tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.batch.pairs import PairRows
from nemo_aligner.utils.host_transfer import to_device

REPLIES, PAIRS = "replies", "pairs"


def reply_lengths(rewards: Tensor, records: Records) -> Tensor:
    """Tokens ``[Q]`` of each sample's reply, in the dtype of the rewards and on their device.

    Raises:
        ValueError: they were not counted.
    """
    lengths = records.reply_lengths[records.reward_bounds[1:] - 1]
    if bool((lengths < 0).any()):
        raise ValueError("got records whose replies were not counted, wanted their lengths")
    return to_device(lengths, rewards.device).to(rewards.dtype)


def explained_by_length(bias: Tensor | float, lengths: Tensor, pairs: PairRows) -> Tensor:
    """Log-odds ``[P]`` that lengths alone predict: ``bias * log(n_better / n_worse)``.

    ``lengths`` are ``[S]``, and ``bias`` is a number or ``[P]``.
    """
    better, worse = pairs.of(lengths.clamp(min=1).log())
    return bias * (better - worse)


def weigh_longer_chosen(losses: Tensor, weight: float, lengths: Tensor, pairs: PairRows) -> Tensor:
    """Multiply ``losses [P]`` by ``weight`` where the longer reply was chosen."""
    better, worse = pairs.of(lengths)
    return torch.where(better > worse, weight * losses, losses)


def length_correlation(rewards: Tensor, lengths: Tensor, pairs: PairRows, of: str) -> Tensor:
    """Correlation of ``rewards [S]`` and ``lengths [S]``, over all replies or over pairs.

    Over ``pairs`` it is the correlation of margins and differences of length. It is not centred,
    because either reply of a pair may come first.
    """
    if of == REPLIES:
        return pearson(rewards, lengths)
    (better, worse), (longer, shorter) = pairs.of(rewards), pairs.of(lengths)
    return _cosine(better - worse, longer - shorter)


def pearson(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's r of two tensors ``[N]``; 0, without a gradient, if one of them is constant."""
    if first.numel() == 0:
        return first.sum()
    return _cosine(first - first.mean(), second - second.mean())


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of the angle between two vectors; 0 if one of them is zero."""
    squares = first.square().sum() * second.square().sum()
    # Without the first ``where``, the gradient of the unused branch would be 0 times infinity.
    scale = torch.where(squares > 0, squares, 1.0).sqrt()
    return torch.where(squares > 0, (first * second).sum() / scale, 0.0)
