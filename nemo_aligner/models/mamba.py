"""Mamba-2, as a module for megatron-core's layers.

Each head has a state ``S [n, p]``. A token with input x [p], time step dt > 0, and the vectors B
and C [n] of the head's group changes it to ``S <- exp(dt A) S + B (dt x)^T``, with a learned A < 0,
and reads ``y = C^T S + D x`` (Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, section
7). This is linear attention with a query C, a key B and a value dt x, without the delta rule's
correction. Chunks are computed with matmuls, as in section 6 of that paper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.models.chunk_tree import decays_of_chunk
from nemo_aligner.models.linear_attention import LinearAttention
from nemo_aligner.models.shapes.linear_attention import Mamba2Shape


class MambaIntraChunk(NamedTuple):
    """The ``IntraChunk`` of Mamba-2.

    The first axes of all fields are ``[n, h, r]``, for h groups with r heads each. "First state" is
    the state before a chunk's first token, and "last state" the state after its last token.

    Attributes:
        query: ``[..., 64, k]`` vectors C, decayed from the chunk's start, that read the first
            state.
        inner: ``[..., 64, 64]`` weight with which each token reads the value of another token of
            the chunk.
        values: ``[..., 64, v]`` inputs times their time steps.
        write_keys: ``[..., 64, k]`` vectors B, decayed to the chunk's end, that write to the last
            state.
        decay: ``[..., 1, 1]`` factor of the first state in the last state.
    """

    query: Tensor
    inner: Tensor
    values: Tensor
    write_keys: Tensor
    decay: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, values: Tensor, decay: Tensor) -> MambaIntraChunk:
        """Compute the fields.

        Args:
            query, key: ``[n, h, 1, 64, k]``, C and B.
            values: ``[n, h, r, 64, v]``.
            decay: ``[n, h, r, 64]`` logarithms of the factors that decay the state; at most 0.
        """
        total, between = decays_of_chunk(decay)
        return cls(
            query=query * total.exp().unsqueeze(-1),
            inner=query @ key.mT * between,
            values=values,
            write_keys=key * (total[..., -1:] - total).exp().unsqueeze(-1),
            decay=total[..., -1].exp()[..., None, None],
        )

    def advance(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the outputs ``[..., 64, v]`` and the last states ``[..., k, v]``.

        Args:
            state: ``[..., k, v]`` first states; None means 0.
        """
        output, written = self.inner @ self.values, self.write_keys.mT @ self.values
        if state is None:
            return output, written
        return self.query @ state + output, state * self.decay + written


class Mamba2(LinearAttention):
    """Mamba-2 in place of a layer's attention: ``[T, 1, hidden] -> [T, 1, hidden]``.

    For each group ``linear_qkv`` computes the inputs x of its heads, B, C, the gates z of its
    heads, and their time steps, in this order.
    """

    shape: Mamba2Shape
    split_by_head = (*LinearAttention.split_by_head, "norm_weight", "skip")

    def add_parameters(self, shape: Mamba2Shape) -> None:
        ranks = self.group.size()
        self.norm_weight = self.new_parameter(shape.value_width // ranks)
        self.skip = self.new_parameter(shape.num_value_heads // ranks)
        self.register_parameter("conv_bias", None)
        if shape.conv_bias:
            self.conv_bias = self.new_parameter(shape.conv_width // ranks)
            self.split_by_head = (*self.split_by_head, "conv_bias")

    def compute_chunks(self, chunks: Tensor) -> tuple[MambaIntraChunk, tuple[Tensor, Tensor]]:
        """Compute the chunks' ``IntraChunk``, and gates and skipped inputs ``[n, h, r, 64, v]``.

        All are in fp32; the gates are those before their activation.
        """
        shape, heads, repeats = self.shape, self.key_heads, self.shape.values_per_key
        by_group = chunks.float().unflatten(-1, (heads, -1))
        states, values = shape.key_head_dim, repeats * shape.value_head_dim
        parts = by_group.split([values + 2 * states, values, repeats], dim=-1)
        convolved = self.convolve(parts[0])
        if self.conv_bias is not None:
            convolved = convolved + self.conv_bias.float().view(heads, -1)
        value, key, query = F.silu(convolved).split([values, states, states], dim=-1)
        gate, step = (part[:, shape.conv_kernel - 1 :] for part in parts[1:])
        per_value = (repeats, shape.value_head_dim)
        inputs, gates = (
            part.unflatten(-1, per_value).permute(0, 2, 3, 1, 4) for part in (value, gate)
        )
        steps = F.softplus(step + self.dt_bias.float().view(heads, repeats))
        steps = steps.clamp(min=shape.least_step).permute(0, 2, 3, 1)
        rates = self.a_log.float().exp().view(heads, repeats, 1)
        intra = MambaIntraChunk.of(
            query=query.transpose(1, 2).unsqueeze(2),
            key=key.transpose(1, 2).unsqueeze(2),
            values=inputs * steps.unsqueeze(-1),
            decay=-(rates * steps),
        )
        return intra, (gates, inputs * self.skip.float().view(heads, repeats, 1, 1))

    def norm_and_gate(
        self, output: Tensor, gates: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> Tensor:
        gate, skipped = gates
        gated = (output + skipped) * F.silu(gate)
        # The norm comes after the gate, and takes its statistics over the heads of a group.
        mean = gated.square().mean((2, 4), keepdim=True)
        weight = self.norm_weight.float().view(*gated.shape[1:3], 1, -1)
        normed = gated * torch.rsqrt(mean + self.config.layernorm_epsilon) * weight
        return normed.permute(0, 3, 1, 2, 4).flatten(2).to(dtype)
