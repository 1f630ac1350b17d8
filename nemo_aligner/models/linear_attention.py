"""Linear attention as modules for megatron-core's layers: the base class, and Gated DeltaNet.

megatron-core's own modules are not used, because no version of them supports shared prefixes, and
its Gated DeltaNet rejects packs in versions 0.16 and 0.17. By default torch computes everything in
training and on a GPU; on a CPU ``gated_delta.c`` computes a Gated DeltaNet where no gradients are
needed.

``model.linear_attention_kernels=flash_linear_attention`` trains a Gated DeltaNet on a GPU with the
kernels of flash-linear-attention (``flash_delta.py``). Rewards are never computed with them, not
even in validation: every process chooses their tiles by timing, and the tiles determine the order
of sums, so two ranks, or a server before and after a restart, would compute different rewards. They
also multiply fp32 in TF32, and round the states that queries read to the dtype of the keys.
``mamba.py`` implements Mamba-2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from nemo_aligner.cpu.kernel_delta import DeltaLayer, Weights, can_advance
from nemo_aligner.models.chunk_tree import ChunkTree, Level
from nemo_aligner.models.flash_delta import FlashDelta
from nemo_aligner.models.gated_delta import DeltaIntraChunk, Inputs
from nemo_aligner.models.layers import learns
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS, LinearAttentionShape
from nemo_aligner.models.state_pool import StatePool

if TYPE_CHECKING:
    from nemo_aligner.models.pack_context import PackContext

# Number of chunks that inference computes at once. It is fixed, so that every operation has the
# same shape in every pack, and a token's output is bit-identical in all of them.
_CHUNKS_ON_CPU, _CHUNKS_ON_GPU = 1, 16


class IntraChunk(Protocol):
    """The part of linear attention that n chunks of 64 tokens compute from their own tokens alone.

    Implementations are NamedTuples of fp32 tensors ``[n, ...]``. In the shapes, h is the number of
    key heads of this rank, r the number of value heads per key head, k the channels of a key, and v
    those of a value.
    """

    def advance(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the outputs ``[n, h, r, 64, v]``, and the states ``[n, h, r, k, v]`` after them.

        Args:
            state: ``[n, h, r, k, v]`` states before the chunks' first tokens; None means 0.
        """
        ...


class LinearAttention(MegatronModule):
    """Replaces a layer's attention: ``[T, 1, hidden] -> [T, 1, hidden]``.

    The decoder layer calls ``linear_qkv``, ``attend`` and ``linear_proj``, as it does for
    attention. The outputs of ``linear_qkv`` are ordered by key head, and tensor parallelism splits
    them by key head. For each key head those that the convolution reads come first.

    Args:
        linears: classes of the two linear layers.
        reads_rows: ``attend`` returns only the rows that the head reads, as in the last layer; it
            still computes the states of all tokens.

    Attributes:
        why_not_graphed: why CUDA graphs cannot capture this module.
        split_by_head: names of the parameters whose first axis tensor parallelism splits.
    """

    split_by_head: tuple[str, ...] = ("conv_weight", "a_log", "dt_bias")
    why_not_graphed = "linear attention computes a different number of chunks in every batch"

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        shape: LinearAttentionShape,
        linears: tuple[Any, Any],
        reads_rows: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.shape, self.reads_rows = shape, reads_rows
        self.layer_number = layer_number
        ranks = self.group.size()
        self.key_heads = shape.num_key_heads // ranks
        column, row = linears
        options = {"bias": False, "is_expert": False, "tp_group": self.group, "config": config}
        self.linear_qkv = column(
            config.hidden_size,
            shape.projection_width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **options,
        )
        self.linear_proj = row(
            shape.value_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )
        heads = shape.num_value_heads // ranks
        self.conv_weight = self.new_parameter(shape.conv_width // ranks, shape.conv_kernel)
        self.a_log, self.dt_bias = self.new_parameter(heads), self.new_parameter(heads)
        self.add_parameters(shape)
        for name in self.split_by_head:
            set_tensor_model_parallel_attributes(self.get_parameter(name), True, 0, 1)

    def new_parameter(self, *size: int) -> torch.nn.Parameter:
        kind = {"dtype": self.config.params_dtype, "device": torch.cuda.current_device()}
        return torch.nn.Parameter(torch.empty(size, **kind))

    @abstractmethod
    def add_parameters(self, shape: Any) -> None:
        """Add the parameters that this kind of linear attention has and others lack."""

    @abstractmethod
    def compute_chunks(self, chunks: Tensor) -> tuple[Any, Any]:
        """Compute what follows from ``chunks [n, previous + 64, projection]`` alone.

        Returns:
            The ``IntraChunk`` of the chunks, and the argument ``gates`` of ``norm_and_gate``.
        """

    @abstractmethod
    def norm_and_gate(self, output: Tensor, gates: Any, dtype: torch.dtype) -> Tensor:
        """Norm and gate ``output [n, h, r, 64, v]`` -> ``[n, 64, h * r * v]`` of ``dtype``."""

    def infer_by_kernel(self, mixed: Tensor, context: PackContext) -> Tensor | None:
        """Compute the result of ``attend`` without gradients; None if no compiled kernel can."""
        return None

    def attend(self, mixed: Tensor, context: PackContext) -> Tensor:
        """Compute ``[T, 1, value width]`` from ``mixed [T, 1, projection]``, linear_qkv's output.

        Training keeps only ``mixed`` and the output, and computes the rest again in the backward
        pass, because the states and ``IntraChunk`` of all chunks would need several times as much
        memory.
        """
        if not learns(self):
            return self._infer(mixed, context)
        module: Any = self  # mypy does not see torch's __call__ behind Megatron's classes
        if not torch.is_grad_enabled():
            return module(mixed, context)
        return tensor_parallel.checkpoint(partial(module, context=context), False, mixed)

    def forward(self, mixed: Tensor, context: PackContext) -> Tensor:
        """Compute the result of ``attend`` in training, with gradients if they are enabled.

        ``attend`` calls the module rather than this method, because the module's hooks wait for
        weights that Megatron is still gathering.
        """
        by_kernel = self.infer_by_kernel(mixed, context)
        if by_kernel is not None:
            return by_kernel
        tree = _tree_of(context)
        chunks = _rows_of_chunks(_with_empty_row(mixed), tree.rows)
        intra, gates = self.compute_chunks(chunks)
        normed = self.norm_and_gate(advance_levels(intra, tree.levels), gates, mixed.dtype)
        return self._rows_of_pack(normed, tree.places, context)

    @torch.no_grad()
    def _infer(self, mixed: Tensor, context: PackContext) -> Tensor:
        by_kernel = self.infer_by_kernel(mixed, context)
        if by_kernel is not None:
            return by_kernel
        tree = _tree_of(context)
        size = _CHUNKS_ON_CPU if mixed.is_cpu else _CHUNKS_ON_GPU
        outputs = []
        with_cached, states = self.read_pool(mixed, context)
        padded = _with_empty_row(with_cached)
        for level in tree.levels:
            next_states = []
            for start in range(level.start, level.end, size):
                count = min(size, level.end - start)
                rows = _fill_up(tree.rows[start : start + count], size)
                intra, gates = self.compute_chunks(_rows_of_chunks(padded, rows))
                first = None
                if states is not None:
                    place = start - level.start
                    first = states[_fill_up(level.parents[place : place + count], size)]
                output, last = intra.advance(first)
                outputs.append(self.norm_and_gate(output, gates, mixed.dtype)[:count])
                next_states.append(last[:count])
            states = torch.cat(next_states)
            self.write_pool(level, states, mixed, context)
        return self._rows_of_pack(torch.cat(outputs), tree.places, context)

    def read_pool(self, mixed: Tensor, context: PackContext) -> tuple[Tensor, Tensor | None]:
        """Read from the prefix cache what a sequence needs to continue one of P cached prefixes.

        Returns:
            ``mixed`` with ``P * previous`` more rows, those before the chunks, which have only the
            convolution's inputs; and states ``[1 + P, h, r, k, v]``: zeros, then those after the
            cached prefixes. Without cached prefixes, ``mixed`` itself and None.
        """
        slots = _tree_of(context).read_slots
        if slots is None:
            return mixed, None
        states, inputs = _pool_of(context).read(self.layer_number, slots)
        missing = mixed.size(-1) // self.key_heads - inputs.size(-1)
        rows = F.pad(inputs, (0, missing)).flatten(2).flatten(0, 1).unsqueeze(1)
        return torch.cat([mixed, rows]), torch.cat([torch.zeros_like(states[:1]), states])

    def write_pool(self, level: Level, states: Tensor, mixed: Tensor, context: PackContext) -> None:
        """Store in the prefix cache the states after those chunks of ``level`` that it keeps.

        The convolution's inputs at the last tokens of these chunks are stored, too.

        Args:
            states: the states after all chunks of ``level``.
        """
        if level.stored is None or level.slots is None:
            return
        rows = _tree_of(context).rows[level.start + level.stored, CHUNK_TOKENS:]
        inputs = mixed[rows, 0].unflatten(-1, (self.key_heads, -1))
        width = self.shape.conv_width // self.shape.num_key_heads
        _pool_of(context).write(
            self.layer_number, level.slots, states[level.stored], inputs[..., :width]
        )

    def convolve(self, rows: Tensor) -> Tensor:
        """Convolve ``rows [n, previous + 64, h, c]`` causally, per channel -> ``[n, 64, h, c]``."""
        weight = self.conv_weight.float().unflatten(0, (self.key_heads, -1))
        by_tap = weight.permute(2, 0, 1).contiguous()
        total = rows[:, :CHUNK_TOKENS] * by_tap[0]
        for tap in range(1, by_tap.size(0)):
            total = torch.addcmul(total, rows[:, tap : tap + CHUNK_TOKENS], by_tap[tap])
        return total

    def _rows_of_pack(self, normed: Tensor, places: Tensor, context: PackContext) -> Tensor:
        """Return the pack's rows ``[T, 1, width]`` of ``normed [n, 64, width]``, at ``places``.

        In the last layer these are only the rows that the head reads. If several chunks have
        computed a row, one of their equal results is taken.
        """
        if self.reads_rows:
            places = places[context.read_rows]
        return normed.flatten(0, 1).index_select(0, places).unsqueeze(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return entries | make_sharded_tensors_for_checkpoint(
            {name: self.get_parameter(name) for name in self.split_by_head},
            prefix,
            dict.fromkeys(self.split_by_head, 0),
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class GatedDeltaNet(LinearAttention):
    """Gated DeltaNet, the linear attention of Qwen3.5 (Yang et al. 2024, arXiv:2412.06464).

    For each key head ``linear_qkv`` computes its query and its key, and for the value heads of that
    key head their values, output gates, write strengths and decays, in this order.

    Attributes:
        delta_kernel: computes the gated delta rule in training; None leaves it to torch.
    """

    delta_kernel: FlashDelta | None = None

    def add_parameters(self, shape: LinearAttentionShape) -> None:
        self.norm_weight = self.new_parameter(shape.value_head_dim)

    def forward(self, mixed: Tensor, context: PackContext) -> Tensor:
        kernel = self.delta_kernel
        if kernel is None:
            return super().forward(mixed, context)
        runs = _tree_of(context).runs
        if runs is None:
            raise ValueError(
                "flash-linear-attention got a ChunkTree without runs. Build it with "
                "ChunkTree.of(..., has_runs=True)."
            )
        inputs, gates = self.compute_inputs(_rows_of_chunks(_with_empty_row(mixed), runs.rows))
        output = kernel.compute(inputs, runs, mixed.dtype)
        normed = self.norm_and_gate(output, gates, mixed.dtype)
        return self._rows_of_pack(normed, runs.places, context)

    def compute_chunks(self, chunks: Tensor) -> tuple[DeltaIntraChunk, Tensor]:
        """Compute the chunks' ``IntraChunk``, and the output gates of ``compute_inputs``."""
        inputs, gates = self.compute_inputs(chunks)
        return DeltaIntraChunk.of(inputs), gates

    def compute_inputs(self, chunks: Tensor) -> tuple[Inputs, Tensor]:
        """Compute the gated delta rule's inputs, and the output gates ``[n, h, r, 64, v]`` in fp32.

        The gates are those before their activation.
        """
        shape, heads, repeats = self.shape, self.key_heads, self.shape.values_per_key
        by_head = chunks.float().unflatten(-1, (heads, -1))
        keys, values = shape.key_head_dim, repeats * shape.value_head_dim
        parts = by_head.split([2 * keys + values, values, repeats, repeats], dim=-1)
        convolved = F.silu(self.convolve(parts[0]))
        query, key, value = convolved.split([keys, keys, values], dim=-1)
        gate, strength, decay = (part[:, shape.conv_kernel - 1 :] for part in parts[1:])
        rates = self.a_log.float().exp().view(heads, repeats)
        biases = self.dt_bias.float().view(heads, repeats)
        per_value = (repeats, shape.value_head_dim)
        inputs = Inputs(
            query=query.transpose(1, 2).unsqueeze(2),
            key=key.transpose(1, 2).unsqueeze(2),
            value=value.unflatten(-1, per_value).permute(0, 2, 3, 1, 4),
            decay=-(rates * F.softplus(decay + biases)).permute(0, 2, 3, 1),
            strength=strength.sigmoid().permute(0, 2, 3, 1),
        )
        return inputs, gate.unflatten(-1, per_value).permute(0, 2, 3, 1, 4)

    def infer_by_kernel(self, mixed: Tensor, context: PackContext) -> Tensor | None:
        """Compute the result of ``attend`` with ``gated_delta.c``, in one pass over ``mixed``.

        None on a GPU, with gradients, and where the file does not support the sizes.
        """
        shape = self.shape
        sizes = (shape.key_head_dim, shape.value_head_dim, shape.conv_kernel)
        if not (mixed.is_cpu and can_advance(mixed.dtype, *sizes)):
            return None
        tree = _tree_of(context)
        rows, states = self.read_pool(mixed, context)
        weights = Weights(self.conv_weight, self.a_log, self.dt_bias, self.norm_weight)
        kinds = (shape.key_head_dim, self.config.layernorm_epsilon)
        layer = DeltaLayer(rows, tree.rows, tree.places, weights, *kinds)
        for level in tree.levels:
            states = layer.advance(level.start, level.end, level.parents, states)
            self.write_pool(level, states, mixed, context)
        return layer.output[context.read_rows] if self.reads_rows else layer.output

    def norm_and_gate(self, output: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.norm_weight
        if self.group.size() > 1 and learns(self):
            # This call changes nothing in the forward pass. Its backward pass sums the gradient
            # over the ranks, because each rank has only some of the heads.
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight, self.group)
        mean = output.square().mean(-1, keepdim=True)
        normed = output * torch.rsqrt(mean + self.config.layernorm_epsilon) * weight.float()
        return (normed * F.silu(gates)).permute(0, 3, 1, 2, 4).flatten(2).to(dtype)


def advance_levels(intra: Any, levels: Sequence[Level]) -> Tensor:
    """Compute the outputs ``[N, h, r, 64, v]`` of all N chunks of a tree, level by level.

    ``intra`` is the ``IntraChunk`` of these N chunks.
    """
    outputs: list[Tensor] = []
    state: Tensor | None = None
    sizes = [level.end - level.start for level in levels]
    for level, of_level in zip(levels, _split(intra, sizes), strict=True):
        first = None if state is None else state.index_select(0, level.parents)
        output, state = of_level.advance(first)
        outputs.append(output)
    return torch.cat(outputs)


def _tree_of(context: PackContext) -> ChunkTree:
    if context.chunks is None:
        raise ValueError(
            "linear attention got a PackContext without chunks. Build them with ChunkTree.of."
        )
    return context.chunks


def _pool_of(context: PackContext) -> StatePool:
    pool = context.segments.pool
    if pool is None or pool.states is None:
        raise ValueError(
            "a pack uses cached states, but got no pool to read them from. Pass a KeyValuePool "
            "that has states."
        )
    return pool.states


def _with_empty_row(mixed: Tensor) -> Tensor:
    """Append a row of zeros to ``mixed [T, 1, c]`` -> ``[T + 1, c]``, for ``_rows_of_chunks``."""
    return F.pad(mixed.squeeze(1), (0, 0, 0, 1))


def _rows_of_chunks(padded: Tensor, rows: Tensor) -> Tensor:
    """Gather ``padded [T + 1, c]`` at ``rows [n, previous + 64]``; rows of -1 are its last one."""
    gathered = padded.index_select(0, (rows % padded.size(0)).flatten())
    return gathered.view(*rows.shape, -1)


def _split(intra: Any, sizes: Sequence[int]) -> list[IntraChunk]:
    """Split the chunks into consecutive parts of ``sizes`` chunks, one for each tree level."""
    parts = zip(*(field.split(list(sizes)) for field in intra), strict=True)
    return [type(intra)(*fields) for fields in parts]


def _fill_up(rows: Tensor, size: int) -> Tensor:
    """Repeat the last of ``rows [n, ...]`` until there are ``size``."""
    missing = size - rows.size(0)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows
