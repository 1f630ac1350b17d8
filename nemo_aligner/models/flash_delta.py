"""The gated delta rule with flash-linear-attention's kernels, for training on a GPU.

Its function ``chunk_gated_delta_rule`` (``fla/ops/gated_delta_rule/chunk.py`` in the package
fla-core 0.6) computes packed sequences, each from its own initial state, and returns the state
after each of them. Gradients flow through both kinds of states. Chunks of 64 tokens begin at the
start of each sequence, as in ``chunk_tree.py``. So one call computes a shared prefix as a sequence,
and the next call computes the rest of each sample as a sequence that starts from the prefix's
state.

Scoring always uses torch instead; ``linear_attention.py`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_aligner.models.chunk_tree import Runs
from nemo_aligner.models.gated_delta import Inputs
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS

MAX_KEY_CHANNELS = 256
"""Most channels of a key that ``fla/ops/common/chunk_delta_h.py`` supports."""


class DeltaFunction(Protocol):
    """The arguments of fla's ``chunk_gated_delta_rule`` that are used here.

    Args:
        q, k: ``[1, T, h, k]`` queries and keys, in the dtype of the matmuls.
        v: ``[1, T, h * r, v]`` values, in the same dtype.
        g: ``[1, T, h * r]`` float32 logarithms of the factors that decay the states.
        beta: ``[1, T, h * r]`` float32 write strengths.
        initial_state: ``[m, h * r, k, v]`` float32 state before each sequence; None means 0.
        output_final_state: also return the states after the sequences.
        use_qk_l2norm_in_kernel: divide queries and keys by their L2 norms.
        cu_seqlens: ``[m + 1]`` int64 bounds of the m sequences.
        chunk_indices: ``[n, 2]`` int64 sequence of each chunk, and the chunk's index in it. Without
            it the function would read ``cu_seqlens`` on the host, and wait for the GPU.

    Returns:
        The outputs ``[1, T, h * r, v]``, in the dtype of ``q``, and the states ``[m, h * r, k, v]``
        float32, or None.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
        chunk_indices: Tensor,
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class FlashDelta:
    """Computes the gated delta rule in the runs of a tree of chunks."""

    function: DeltaFunction

    def compute(self, inputs: Inputs, runs: Runs, dtype: torch.dtype) -> Tensor:
        """Compute the outputs ``[n, h, r, 64, v]`` in fp32.

        Args:
            inputs: inputs for the n chunks, in the order of ``runs``.
            dtype: queries, keys and values are rounded to it, and multiplied in it.
        """
        rounded = (heads.to(dtype) for heads in inputs[:3])
        tokens = list(map(_by_token, (*rounded, *inputs[3:])))
        outputs: list[Tensor] = []
        states: Tensor | None = None
        for level in runs.levels:
            part = slice(level.start * CHUNK_TOKENS, level.end * CHUNK_TOKENS)
            output, states = self.function(
                *(tensor[:, part] for tensor in tokens),
                initial_state=None if states is None else states.index_select(0, level.parents),
                output_final_state=level is not runs.levels[-1],
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=level.bounds,
                chunk_indices=level.chunks,
            )
            outputs.append(output)
        output = torch.cat(outputs, dim=1)
        number, heads, repeats = inputs.value.shape[:3]
        return output.float().view(number, CHUNK_TOKENS, heads, repeats, -1).movedim(1, 3)


def _by_token(chunks: Tensor) -> Tensor:
    """Order ``chunks [n, h, r, 64, ...]`` by token -> ``[1, n * 64, h * r, ...]``, contiguous."""
    return chunks.movedim(3, 1).flatten(2, 3).flatten(0, 1).unsqueeze(0).contiguous()


def load_kernel() -> FlashDelta:
    """Import flash-linear-attention.

    Raises:
        ImportError: it, or a package that it needs, is missing or too old.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return FlashDelta(chunk_gated_delta_rule)
