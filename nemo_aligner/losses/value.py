"""PPO's clipped value loss, for critics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records

RETURNS, PREV_VALUES, MASK = "returns", "prev_values", "mask"


@dataclass(frozen=True)
class ClippedValueLoss:
    """``0.5 * max((v - R)**2, (clip(v, v_old - c, v_old + c) - R)**2)`` over unmasked tokens.

    v is the value of a token, R its return, v_old its value at the time of the rollout, and c is
    ``clip``. The squared error is L^VF of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 9),
    and the clipping is that of OpenAI's baselines (ppo2). The factor, the maximum and the meaning
    of ``clip`` 0 are those of NeMo-Aligner's critic (``model.loss_clip_val``).

    Attributes:
        clip: c, the largest change of a value that still lowers the loss; 0 turns clipping off.
        weights: A factors that merge the head's A attributes into one value.
        means: A label means, added to the head's outputs before they are merged, as for rewards;
            empty if there are none.
    """

    clip: float
    weights: tuple[float, ...] = (1.0,)
    means: tuple[float, ...] = ()
    columns: ClassVar[tuple[str, ...]] = (RETURNS, PREV_VALUES, MASK)

    def loss(self, values: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of unmasked tokens, and the number of these tokens (int).

        ``values [T, A]`` are the head's outputs. Each token is a record with the label columns
        ``returns``, ``prev_values`` and ``mask``. Returns and previous values may be any number
        where the mask is 0.
        """
        returns, previous, mask = records.labels.targets(self.columns).unbind(dim=1)
        counts = mask != 0
        current = self.merge(records.as_single(values))
        # Boolean indexing would wait for the GPU to learn the size, so masked tokens become 0.
        returns, previous, current = (
            torch.where(counts, column, 0.0) for column in (returns, previous, current)
        )
        losses = (current - returns).square()
        if self.clip > 0:
            # Take the maximum of both errors, as in PPO's policy loss: a value that leaves the clip
            # range towards the return does not lower the loss, and its gradient there is 0.
            clipped = previous + (current - previous).clamp(-self.clip, self.clip)
            losses = torch.maximum(losses, (clipped - returns).square())
        return 0.5 * losses.sum(), counts.sum()

    def merge(self, outputs: Tensor) -> Tensor:
        """Merge the head's ``outputs [T, A]`` into values ``[T]``, after adding the label means."""
        if self.means:
            columns = zip(outputs.unbind(dim=1), self.means, strict=True)
            outputs = torch.stack([column + mean for column, mean in columns], dim=1)
        return merge_attributes(outputs, self.weights)


def merge_attributes(values: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Sum A attributes ``[T, A]``, times their ``weights``, into one value ``[T]``."""
    columns = zip(values.unbind(dim=1), weights, strict=True)
    return torch.stack([column * weight for column, weight in columns]).sum(dim=0)
