"""The gated delta rule, computed over the chunks of a pack.

Each value head has a state ``S [k, v]``. A token with query q, key k, value v, decay g <= 0 and
write strength beta changes it to ``S <- exp(g) S + k (beta (v - k^T exp(g) S))^T`` and reads
``o = q^T S`` (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464). Chunks of 64 tokens are
computed with matmuls, as in section 3.3 of that paper; only the state passes from one chunk to the
next (``chunk_tree.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.models.chunk_tree import decays_of_chunk

_EPSILON = 1e-6  # added to the squared L2 norm of queries and keys before the root


class Inputs(NamedTuple):
    """Inputs of the gated delta rule for n chunks, in fp32.

    h is the number of key heads of this rank, and r the number of value heads per key head.

    Attributes:
        query, key: ``[n, h, 1, 64, k]``.
        value: ``[n, h, r, 64, v]``.
        decay: ``[n, h, r, 64]`` logarithm g of the factor that decays the state; at most 0.
        strength: ``[n, h, r, 64]`` write strength beta, from 0 to 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor


class DeltaIntraChunk(NamedTuple):
    """The ``IntraChunk`` of the gated delta rule.

    The first axes of all fields are ``[n, h, r]``. "First state" is the state before the first
    token of a chunk, and "last state" the state after its last token.

    Attributes:
        query: ``[..., 64, k]`` queries, decayed from the chunk's start, that read the first state.
        inner: ``[..., 64, 64]`` weight with which each token reads the value that another token of
            the chunk writes.
        values: ``[..., 64, v]`` values that the tokens would write if the first state were 0.
        read_keys: ``[..., 64, k]`` keys; ``read_keys @ first state`` is subtracted from
            ``values``.
        write_keys: ``[..., 64, k]`` keys, decayed to the chunk's end, that write to the last state.
        decay: ``[..., 1, 1]`` factor of the first state in the last state.
    """

    query: Tensor
    inner: Tensor
    values: Tensor
    read_keys: Tensor
    write_keys: Tensor
    decay: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> DeltaIntraChunk:
        """Compute the fields from the inputs of the chunks."""
        query, key = map(_normalize, (inputs.query, inputs.key))
        query = query * query.size(-1) ** -0.5
        total, between = decays_of_chunk(inputs.decay)
        strength = inputs.strength.unsqueeze(-1)
        from_start = total.exp().unsqueeze(-1)
        # Token i writes strength_i * (v_i - k_i^T S), where S holds what the earlier tokens of the
        # chunk have written. That is a triangular system with ones on the diagonal.
        overlap = key @ key.mT * strength * between
        right = torch.cat([inputs.value * strength, key * strength * from_start], dim=-1)
        solved = cast(Tensor, _TriangularSolve.apply(overlap, right))
        values, read_keys = solved.split([inputs.value.size(-1), key.size(-1)], dim=-1)
        to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
        return cls(
            query=query * from_start,
            inner=query @ key.mT * between,
            values=values,
            read_keys=read_keys,
            write_keys=key * to_end,
            decay=total[..., -1].exp()[..., None, None],
        )

    def advance(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the outputs ``[..., 64, v]`` and the last states ``[..., k, v]``.

        Args:
            state: ``[..., k, v]`` first states; None means 0.
        """
        if state is None:
            return self.inner @ self.values, self.write_keys.mT @ self.values
        written = self.values - self.read_keys @ state
        output = self.query @ state + self.inner @ written
        return output, state * self.decay + self.write_keys.mT @ written


class _TriangularSolve(Function):
    """Solve ``(1 + L) x = right``, with the strict lower triangle L of ``matrix [..., 64, 64]``.

    It keeps the inverse, because multiplying by a 64 x 64 inverse takes less time than solving for
    all columns of ``right [..., 64, c]``, especially in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor) -> Tensor:
        ones = torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(
            matrix, ones.expand_as(matrix), upper=False, unitriangular=True
        )
        solved = inverse @ right
        ctx.save_for_backward(inverse, solved)
        return solved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inverse, solved = ctx.saved_tensors
        to_right = inverse.mT @ grads[0]
        return -(to_right @ solved.mT).tril(-1), to_right


def _normalize(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _EPSILON)
