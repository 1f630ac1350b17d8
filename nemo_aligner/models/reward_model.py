"""GPTRewardModel: a pretrained decoder with an fp32 reward head on each sequence's last token.

``training_wrap.py`` wraps it for training, ``batch_invariance.py`` makes its rewards independent of
their batch, and ``step.py`` runs packs through it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.batch.cache_use import NO_STATES, StateUse
from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.config.common import Precision
from nemo_aligner.config.kernels import DEFAULT_KERNELS, AttentionChoice, KernelChoices
from nemo_aligner.config.model import Recompute
from nemo_aligner.cpu.matmuls import (
    row_multiple,
    training_row_multiple,
)
from nemo_aligner.distributed import gpu_matmuls
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.backends import slow_attention, why_gathered
from nemo_aligner.models.attention.choice import try_attention_choice, use_attention_kernels
from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.attention.segments import (
    KeyValuePool,
    PackedSegments,
    rotations_of,
    sum_of_group,
)
from nemo_aligner.models.backbone import (
    check_recompute,
    layer_spec,
    transformer_config,
    use_transformer_engine,
)
from nemo_aligner.models.chunk_tree import ChunkTree
from nemo_aligner.models.cuda_graphs import (
    Capture,
    CudaCapture,
    DecoderGraphs,
    DecoderInputs,
    why_not_graphed,
    why_not_graphed_in_training,
)
from nemo_aligner.models.fixed_sizes import round_up_rows
from nemo_aligner.models.flash_delta import FlashDelta
from nemo_aligner.models.gemma4 import PerLayerEmbedding
from nemo_aligner.models.internals import fused_output_layer_allowed
from nemo_aligner.models.layers import (
    learns,
)
from nemo_aligner.models.linear_attention import LinearAttention
from nemo_aligner.models.lora import LoraDropout, attach_adapters
from nemo_aligner.models.pack_context import Balance, PackContext
from nemo_aligner.models.pointwise.choice import choose_kernels
from nemo_aligner.models.pointwise.operations import use_pointwise_kernels
from nemo_aligner.models.readout import mean_of_replies
from nemo_aligner.models.reward_head import RewardHead
from nemo_aligner.models.rotary import ByLength, query_scale, rotations
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import check_dropout
from nemo_aligner.models.state_pool import StatePool
from nemo_aligner.utils.host_transfer import to_device
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)


class GPTRewardModel(GPTModel):
    """megatron-core's GPTModel with a reward head instead of the output layer.

    Args:
        num_attributes: number of outputs of the head.
        seed: seed of a new head's weights.
        reads_every_token: make it a critic, whose head computes a value for each token of a pack.
        reply_marker: token ids that precede a reply. If given, the head reads the mean over the
            tokens after the last occurrence of the marker, rather than the last token.
        lora_dropout: dropout of the inputs of LoRA's adapters in training.

    Attributes:
        length_dependent_rope: the method of ``ModelShape``, from which the packer tells which
            sequences may share a prefix.
        has_states: some layers have linear attention, whose states the prefix cache stores, too.
        graphs: CUDA graphs of the decoder, see ``use_cuda_graphs``; None without graphs.
        smallest_chunk: fewest rows of a batch invariant matmul on a GPU, on any rank of the model;
            None on a CPU, and where rewards may depend on the batch.
        delta_kernel: computes the Gated DeltaNets in training, see ``use_delta_kernel``.
    """

    graphs: DecoderGraphs | None = None
    delta_kernel: FlashDelta | None = None

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        layout: ParallelLayout,
        num_attributes: int,
        seed: int,
        *,
        reads_every_token: bool = False,
        reply_marker: tuple[int, ...] | None = None,
        lora_dropout: LoraDropout | None = None,
    ) -> None:
        with fused_output_layer_allowed():  # the output layer is deleted below
            super().__init__(
                config,
                layer_spec(config, shape, layout.is_last_stage),
                vocab_size=shape.padded_vocab_size(layout.tp),
                max_sequence_length=shape.max_position_embeddings,
                pre_process=layout.is_first_stage,
                post_process=layout.is_last_stage,
                position_embedding_type="rope",
                rotary_percent=shape.rotary_percentage,
                rotary_base=shape.rotary_base,
                seq_len_interpolation_factor=shape.seq_len_interpolation_factor,
            )
        self.reads_every_token = reads_every_token
        self.reply_marker = reply_marker
        self.smallest_chunk: int | None = None
        self._rotations = rotations(shape, self.rotary_pos_emb)
        self.length_dependent_rope = shape.length_dependent_rope
        self._has_one_rotation = shape.one_rotation_until is None
        self._query_scaling = shape.query_scaling
        self._linear_attention = shape.linear_attention
        self._latent_attention = shape.latent_attention
        self.has_states = shape.linear_attention is not None
        self._has_engine = use_transformer_engine(shape, config.params_dtype)
        # Round the embeddings' factor to the model's dtype, as in Gemma's own training.
        scale = torch.tensor(shape.hidden_size**0.5, dtype=config.params_dtype)
        self._embedding_scale = shape.embedding_multiplier
        if shape.apply_embedding_scaling:
            self._embedding_scale *= scale.item()
        if self.pre_process:
            # Padding rows of the vocabulary are neither read nor loaded. They are set to 0, because
            # uninitialised memory could hold a NaN and spread it.
            torch.nn.init.zeros_(self.embedding.word_embeddings.weight)
        self.per_layer_embedding = None
        if shape.gemma4 is not None and shape.gemma4.per_layer_width is not None:
            self.per_layer_embedding = PerLayerEmbedding(
                config, shape, shape.padded_vocab_size(layout.tp)
            )
        if self.post_process:
            # Delete the output layer: its parameters would get no gradient, and Megatron would not
            # reduce the gradient bucket that they are in.
            del self.output_layer
            self.rm_head = RewardHead(shape.hidden_size, num_attributes, seed, shape.head)
        self._step, self._losses_per_record = 0, 1.0
        self.lora_dropout = lora_dropout
        if shape.lora is not None:
            attach_adapters(self, shape.lora, lora_dropout)

    def embedding_modules(self) -> list[torch.nn.Module]:
        """List this stage's modules that come before its first layer, with all embeddings."""
        modules = [self.embedding] if self.pre_process else []
        return modules + ([] if self.per_layer_embedding is None else [self.per_layer_embedding])

    def use_cuda_graphs(self, capture: Capture | None = None) -> None:
        """Run packs with CUDA graphs if that is possible; otherwise log the reason.

        Packs are then padded to fixed sizes (``fixed_sizes.py``).

        Args:
            capture: replaces ``CudaCapture`` in tests.
        """
        reason = why_not_graphed(self) if capture is None else None
        if reason is not None:
            if is_main():
                logger.warning(f"model.cuda_graphs: not used, because {reason}")
            return
        reason_in_training = partial(why_not_graphed_in_training, self)
        modules = [self.embedding, self.decoder]
        capture = capture or CudaCapture()
        self.graphs = DecoderGraphs(self._decode, modules, capture, reason_in_training)

    def recompute_layers(self, count: int, first: int = 0) -> None:
        """Let ``count`` layers of this stage, from the index ``first`` on, keep only their input.

        The backward pass computes these layers again.
        """
        for index, layer in enumerate(self.decoder.layers):
            layer.is_recomputed = first <= index < first + count

    def begin_step(self, step: int, losses_per_record: float = 1.0) -> None:
        """Prepare for the forward passes of a training step.

        Args:
            step: number of the step, from 0; LoRA's dropout draws different masks in every step.
            losses_per_record: how many losses the step's mean counts for each of its records, which
                scales the auxiliary loss of a mixture-of-experts model.
        """
        self._step, self._losses_per_record = step, losses_per_record

    def forward(self, batch: PackedBatch, pool: KeyValuePool | None = None) -> Tensor:
        """Score a pack, or this rank's part of it. The pack has to be on the model's device.

        Args:
            pool: the keys and values of the prefixes that the pack reads from a cache.

        Returns:
            On the last pipeline stage the head's outputs ``[S, columns]`` float32, in the order of
            ``OutputColumns``, or a critic's values ``[T, num_attributes]``; on the others hidden
            states ``[T, 1, hidden]`` for the next stage (``T / tp`` tokens under sequence
            parallelism).
        """
        rows, count = self._read_rows(batch)
        context = self._make_context(batch, rows, pool)
        tokens, positions = batch.of_own(batch.tokens), batch.of_own(batch.position_ids)
        inputs, by_length = DecoderInputs(tokens, positions, context), self._rope_of_tokens(batch)
        if self.graphs is None or batch.sizes is None or by_length is not None:
            hidden = self._decode(inputs, by_length)
        else:
            hidden = self.graphs.run(inputs, self.training)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # Every rank computes the whole head and gets the same gradient, so nothing has to be
            # summed.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        read = hidden[: len(rows), 0]
        if batch.replies is not None:
            read = mean_of_replies(read, batch.replies)
            if batch.share is not None:
                read = read[batch.share.reads]
        outputs = self.rm_head(read)
        if batch.share is not None:
            outputs = sum_of_group(outputs, batch.share.reads, count)
        return outputs

    def _decode(self, inputs: DecoderInputs, by_length: ByLength | None = None) -> Tensor:
        """Compute the hidden states that the head reads.

        It reads only the tensors and sizes in ``inputs``, as CUDA graphs require.
        """
        positions, dtype = inputs.positions, self.config.params_dtype
        embedded = self._embed(inputs.tokens, positions) if self.pre_process else None
        per_layer_inputs = None
        if self.per_layer_embedding is not None:
            per_layer_inputs = self.per_layer_embedding(inputs.tokens, embedded)
        context = replace(
            inputs.context,
            tables=tuple(
                rotation.tables(positions, dtype, by_length) for rotation in self._rotations
            ),
            query_scale=self._query_scale(positions),
            per_layer_inputs=per_layer_inputs,
        )
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            # RoPE is left to PackedAttention, which needs far fewer passes over memory.
            rotary_pos_emb=None,
            packed_seq_params=context,
        )
        # Selective recomputation keeps the context in the autograd graph, and keys in the context
        # keep that graph: a cycle that Python cannot free, so every pack would stay in memory.
        context.lent_keys.clear()
        return hidden

    def _make_context(
        self, batch: PackedBatch, rows: Tensor, pool: KeyValuePool | None
    ) -> PackContext:
        """Make a pack's context for the layers; ``_decode`` adds RoPE's tables to it.

        Args:
            rows: indices of this rank's rows that the head reads.
        """
        read_rows = self._rows_of_head(rows, batch)
        segments = PackedSegments.of(batch, read_rows.device, pool)
        keys, balance, balance_of_rows = None, Balance(), Balance()
        if self.lora_dropout is not None and self.training:
            keys = batch.of_own(self.lora_dropout.token_keys(batch, self._step))
        records = len(batch.records)
        if records:  # empty packs only keep expert parallel ranks in step
            tokens = batch.num_own_tokens - batch.num_own_filled
            balance = Balance(records, tokens, self._losses_per_record)
            balance_of_rows = replace(balance, tokens=len(rows))
        chunks = None
        if self._linear_attention is not None:
            taps = self._linear_attention.conv_kernel - 1
            chunks = ChunkTree.of(
                segments.lengths,
                segments.prefixes,
                taps,
                read_rows.device,
                _states_of(batch),
                has_runs=self.delta_kernel is not None and learns(self),
            )
        return PackContext(segments, read_rows, balance, balance_of_rows, keys, chunks=chunks)

    def _read_rows(self, batch: PackedBatch) -> tuple[Tensor, int]:
        """Return which of this rank's rows the head reads, and how many it reads on all ranks."""
        rows = batch.scored_tokens
        if self.reads_every_token:
            rows = torch.arange(batch.num_tokens, device=rows.device)
        count = len(rows)
        if batch.replies is not None:
            rows = batch.replies.index
        elif batch.share is not None:
            rows = batch.share.read_rows
        return rows, count

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed ``tokens [T]`` at these ``positions`` -> ``[T, 1, hidden]``."""
        embedded = self.embedding(tokens[None], positions[None])
        embedded = embedded.to(self.stream_dtype)
        if self._embedding_scale != 1:
            embedded = embedded * self._embedding_scale
        return embedded

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the residual stream: fp32 in inference, so that rounding errors do not add up.

        In training an fp32 stream would double the activations saved for the backward pass, and
        TransformerEngine's norms accept only the model's dtype.
        """
        dtype = self.config.params_dtype
        if learns(self) or self._has_engine:
            return dtype
        return torch.float32

    def row_multiple(self, count: int) -> int:
        """Return the multiple to which ``count`` tokens, or rows that the head reads, are padded.

        Sequence parallelism has to split the rows evenly over the ranks. In evaluation the padding
        also keeps torch from using special kernels for a single row or for the remainder of a
        vector. On a GPU it also means that batch invariant matmuls need no padding of their own.
        Training on a CPU pads to few sizes, see ``training_row_multiple``.
        """
        ranks = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        if self.training:
            is_on_cpu = not torch.cuda.is_available()
            return ranks * (training_row_multiple(count // ranks) if is_on_cpu else 1)
        if self.smallest_chunk is not None:
            return ranks * gpu_matmuls.row_multiple(count // ranks, self.smallest_chunk)
        return ranks * row_multiple(count // ranks)

    def new_key_value_pool(self, slots: int, states: int = 0) -> KeyValuePool:
        """Allocate a pool for this rank's layers and heads, in the model's dtype.

        With latent attention it stores latents, and every tensor parallel rank has all of them.

        Args:
            slots: number of tokens whose keys and values, or latents, fit.
            states: number of snapshots of linear attention's states that fit.
        """
        layers = [module for module in self.modules() if isinstance(module, PackedAttention)]
        tp = self.config.tensor_model_parallel_size
        kind = {"dtype": self.config.params_dtype, "device": next(self.parameters()).device}
        sizes = {
            layer.layer_number: (layer.config.num_query_groups // tp, layer.config.kv_channels)
            for layer in layers
        }
        tensors = 2
        if self._latent_attention is not None:
            tensors, size = 1, (1, self._latent_attention.latent_width)
            sizes = dict.fromkeys(sizes, size)
        pool = KeyValuePool(sizes, slots, **kind, tensors=tensors)
        if self._linear_attention is not None:
            numbers = [
                module.layer_number
                for module in self.modules()
                if isinstance(module, LinearAttention)
            ]
            pool.states = StatePool(numbers, states, self._linear_attention, tp, **kind)
        return pool

    def _rope_of_tokens(self, batch: PackedBatch) -> ByLength | None:
        """Return which RoPE every token has; None if all have the RoPE of short sequences."""
        numbers = [] if self._has_one_rotation else rotations_of(batch, self.length_dependent_rope)
        distinct = sorted(set(numbers))
        if distinct in ([], [0]):
            return None
        of_segments = torch.tensor([distinct.index(number) for number in numbers])
        of_tokens = of_segments.repeat_interleave(batch.cu_seqlens.diff())
        return distinct, batch.of_own(to_device(of_tokens, batch.position_ids.device))

    def _query_scale(self, position_ids: Tensor) -> Tensor | None:
        """Compute factors ``[T, 1, 1]`` of queries at ``position_ids [T]``; None for no scaling."""
        if self._query_scaling is None:
            return None
        return query_scale(self._query_scaling, position_ids, self.config.params_dtype)

    def _rows_of_head(self, rows: Tensor, batch: PackedBatch) -> Tensor:
        """Pad ``rows``, the indices of the rows that the head reads, with zeros.

        Their number becomes a multiple of ``row_multiple``, or a fixed size for CUDA graphs. The
        head runs even if it reads none of this rank's rows, so at least one row is returned.
        """
        count = max(rows.numel(), 1)
        padded = count + -count % self.row_multiple(count)
        if batch.sizes is not None:
            padded = round_up_rows(count)
        return F.pad(rows, (0, padded - rows.numel()))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        # Skip LanguageModule's sharded_state_dict, which expects an output layer.
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)


def _states_of(batch: PackedBatch) -> StateUse:
    """Return which cached states a pack reads and stores.

    Raises:
        ValueError: a cached prefix has no state, without which linear attention cannot go on.
    """
    if batch.cached is None:
        return NO_STATES
    states, prefixes = batch.cached.states, len(batch.cached.lengths)
    if len(states.read_slots) != prefixes:
        raise ValueError(
            f"a pack has {prefixes} cached prefixes and {len(states.read_slots)} cached states. "
            "Linear attention needs a state after each prefix: pass CachedPrefix.state."
        )
    return states


def _warn_of_attention(
    shape: ModelShape, dtype: torch.dtype, layout: ParallelLayout, kernels: AttentionChoice
) -> None:
    """Log if attention is slow for this model on this device, or cannot exchange keys in a ring."""
    slow = slow_attention(shape, dtype, kernels)
    if slow is not None and is_main():
        logger.warning(slow)
    gathered = why_gathered(shape, dtype) if layout.ring else None
    if gathered is not None and is_main():
        logger.warning(
            f"model.cp_comm_type=p2p is not used, because {gathered}. Keys and values are gathered "
            "instead."
        )
    if layout.ring and gathered is None and kernels is not AttentionChoice.torch and is_main():
        logger.warning(
            f"model.attention_kernels={kernels.value} is used only after cached prefixes, because "
            "model.cp_comm_type=p2p merges partial results of torch's kernels."
        )


def build_reward_model(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    num_attributes: int,
    precision: Precision,
    recompute: Recompute = Recompute.none,
    recompute_layers: int | None = None,
    seed: int = 1234,
    reads_every_token: bool = False,
    reply_marker: tuple[int, ...] | None = None,
    lora_dropout: LoraDropout | None = None,
    kernels: KernelChoices = DEFAULT_KERNELS,
    frees_body: bool = False,
    learns: bool = True,
) -> GPTRewardModel:
    """Build this rank's shard of a reward model, with a new head and an uninitialised backbone.

    Args:
        num_attributes: number of outputs of the head.
        recompute_layers: how many layers of each pipeline stage ``Recompute.full`` recomputes, from
            its first layer with a backward pass on (``freeze_lower_layers``); None is all.
        seed: seed of the head's weights.
        reads_every_token, reply_marker, lora_dropout: see ``GPTRewardModel``.
        kernels: implementations of norms, SwiGLU and RoPE, and of attention.
        frees_body: free the weights of linear layers at once, because ``share_body`` replaces them.
        learns: the model will be trained, so kernels have to compute gradients.

    Raises:
        ConfigError: the model does not support the layout, the recomputation or the dropout, or
            the kernels cannot run here.
    """
    pointwise = choose_kernels(kernels.pointwise)
    config = transformer_config(shape, layout, precision, recompute)
    check_recompute(shape, layout.pp, recompute, recompute_layers)
    if lora_dropout is not None:
        check_dropout(shape, lora_dropout.rate)
    # A GPU may lack the memory for all dense weights, so layers free theirs when they are built.
    is_quantized = shape.lora is not None and shape.lora.base_precision is not None
    config.frees_linear_weights = is_quantized or frees_body
    config.frees_expert_weights = frees_body
    try_attention_choice(kernels, shape, config.params_dtype, learns=learns)
    _warn_of_attention(shape, config.params_dtype, layout, kernels.attention)
    model = GPTRewardModel(
        config,
        shape,
        layout,
        num_attributes,
        seed,
        reads_every_token=reads_every_token,
        reply_marker=reply_marker,
        lora_dropout=lora_dropout,
    )
    if recompute is Recompute.full:
        model.recompute_layers(recompute_layers or len(model.decoder.layers))
    use_pointwise_kernels(model, pointwise)
    use_attention_kernels(model, kernels.attention)
    return model.to(torch.cuda.current_device())
