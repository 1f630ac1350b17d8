"""StatePool: states of linear attention that outlive their pack, for prefixes of later packs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape


class StatePool:
    """Memory for ``slots`` snapshots, for every linear attention layer of this rank.

    A snapshot is what a layer needs to continue a sequence after a chunk: the states of its value
    heads, and the inputs of the convolution at the last tokens. The pool is allocated once. The
    prefix cache keeps track of which slot holds which prefix's snapshot.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        slots: int,
        shape: LinearAttentionShape,
        tp: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        heads, repeats = shape.num_key_heads // tp, shape.values_per_key
        states = (slots, heads, repeats, shape.key_head_dim, shape.value_head_dim)
        inputs = (slots, shape.conv_kernel - 1, heads, shape.conv_width // shape.num_key_heads)
        self.slots = slots
        self._states = {
            number: torch.empty(states, dtype=torch.float32, device=device)
            for number in layer_numbers
        }
        self._inputs = {
            number: torch.empty(inputs, dtype=dtype, device=device) for number in layer_numbers
        }

    @property
    def num_bytes(self) -> int:
        tensors = (*self._states.values(), *self._inputs.values())
        return sum(tensor.nbytes for tensor in tensors)

    def touch(self) -> None:
        """Write to the whole pool once, because Linux allocates host memory at the first write."""
        for tensor in (*self._states.values(), *self._inputs.values()):
            tensor.zero_()

    def read(self, number: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read the snapshots in ``slots [n]`` int64 of layer ``number``.

        Returns:
            States ``[n, h, r, k, v]`` fp32: for each of this rank's h key heads and its r value
            heads a matrix of k key channels by v value channels. Then the inputs of the convolution
            at the last tokens, ``[n, taps - 1, h, c]`` in the model's dtype: the convolution reads
            ``taps`` tokens at a time, and c channels (query, key and values) for each key head.
        """
        return self._states[number][slots], self._inputs[number][slots]

    def write(self, number: int, slots: Tensor, states: Tensor, inputs: Tensor) -> None:
        """Store n snapshots of layer ``number`` in ``slots [n]`` int64.

        Args:
            states, inputs: as ``read`` returns them.
        """
        self._states[number][slots] = states
        self._inputs[number][slots] = inputs
