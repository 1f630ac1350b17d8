"""How much rewards go with the length of replies."""

from __future__ import annotations

from torch import Tensor

from nemo_aligner.metrics.statistics import correlation, ordered_right


def length_metrics(rewards: Tensor, reply_lengths: Tensor) -> dict[str, float]:
    """How much the rewards of comparisons go with the length of the replies.

    Args:
        rewards: ``[N, 2]``, chosen then rejected.
        reply_lengths: ``[N, 2]``.

    Returns:
        ``length_correlation``, Pearson's r over all replies; ``accuracy_longer_chosen`` and
        ``accuracy_shorter_chosen``, on the pairs where people chose the longer and the shorter
        reply (NaN where there are none); ``longer_reply_accuracy``, of taking the longer reply.
    """
    rewards, lengths = rewards.double().cpu(), reply_lengths.double().cpu()
    right = ordered_right(rewards[:, 0] - rewards[:, 1])
    longer_by = lengths[:, 0] - lengths[:, 1]
    return {
        "length_correlation": correlation(rewards.flatten(), lengths.flatten()),
        "accuracy_longer_chosen": float(right[longer_by > 0].mean()),
        "accuracy_shorter_chosen": float(right[longer_by < 0].mean()),
        "longer_reply_accuracy": float(ordered_right(longer_by).mean()),
    }
