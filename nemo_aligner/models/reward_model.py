"""GPTRewardModel: a pretrained decoder with an fp32 head that reads each sequence's last token."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.models.adapters import attach_adapters
from nemo_aligner.models.attention.packed import PackedAttention, slow_attention
from nemo_aligner.models.attention.pool import KeyValuePool
from nemo_aligner.models.attention.segments import PackedSegments
from nemo_aligner.models.backbone import layer_spec, transformer_config, use_transformer_engine
from nemo_aligner.models.dropout import LoraDropout
from nemo_aligner.models.heads import RewardHead
from nemo_aligner.models.internals import fused_output_layer_allowed, scale_rotary_frequencies
from nemo_aligner.models.pooling import mean_of_replies
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.processes import is_main

logger = logging.getLogger(__name__)

_EVALUATED_ROWS = 32


class GPTRewardModel(GPTModel):
    """megatron-core's GPTModel with a reward head instead of the output layer.

    ``reads_every_token`` makes it a critic: the head gives a value for each token of a pack.
    With a ``reply_marker`` the head reads the mean over what follows it, and not the last token.
    ``key_value_pool`` is what packs with cached prefixes take them from.
    """

    reads_every_token = False
    reply_marker: tuple[int, ...] | None = None
    key_value_pool: KeyValuePool | None = None
    lora_dropout: LoraDropout | None = None

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        layout: ParallelLayout,
        num_attributes: int,
        seed: int,
    ) -> None:
        with fused_output_layer_allowed():  # it is deleted below
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
        if shape.rope_scaling is not None:
            self.rotary_pos_emb.inv_freq = scale_rotary_frequencies(
                self.rotary_pos_emb, shape.rope_scaling
            )
        self._has_engine = use_transformer_engine(shape, config.params_dtype)
        # In the model's dtype, as those who trained Gemma had it.
        scale = torch.tensor(shape.hidden_size**0.5, dtype=config.params_dtype)
        self._embedding_scale = scale.item() if shape.apply_embedding_scaling else None
        if self.pre_process:
            # Rows past the vocabulary are never read nor loaded; zero, they cannot spread a NaN.
            torch.nn.init.zeros_(self.embedding.word_embeddings.weight)
        if self.post_process:
            del self.output_layer
            self.rm_head = RewardHead(shape.hidden_size, num_attributes, seed, shape.head)
        if shape.lora is not None:
            attach_adapters(self, shape.lora)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Score a pack (on this model's device).

        Returns:
            Rewards ``[S, num_attributes]`` float32 on the last stage, a critic's values
            ``[T, num_attributes]``; on the others the hidden states ``[T, 1, hidden]`` (``T / tp``
            tokens under sequence parallelism) for the next.
        """
        embedded = None
        if self.pre_process:
            embedded = self.embedding(batch.tokens[None], batch.position_ids[None])
            embedded = embedded.to(self.stream_dtype)
            if self._embedding_scale is not None:
                embedded = embedded * self._embedding_scale
            if self.training and self.config.recompute_granularity == "full":
                # A recomputed layer is differentiated only if its input asks for it, and behind a
                # frozen embedding nothing does.
                embedded.requires_grad_()
        rows = batch.scored_tokens if batch.replies is None else batch.replies.index
        if self.reads_every_token:
            rows = torch.arange(batch.num_tokens, device=rows.device)
        segments = PackedSegments.of(
            batch,
            *self._rotation(batch.position_ids),
            self._rows_of_head(rows),
            self.key_value_pool,
        )
        if self.lora_dropout is not None and self.training:
            self.lora_dropout.begin(batch, segments)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            # The attention rotates; megatron-core's way takes many more passes over memory.
            rotary_pos_emb=None,
            packed_seq_params=segments,
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # The head is whole on every rank, and its gradient the same: nothing to reduce.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        read = hidden[: len(rows), 0]
        if batch.replies is not None:
            read = mean_of_replies(read, batch.replies.lengths)
        return self.rm_head(read)

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the residual stream, now: fp32 where nothing is learnt, or rounding adds up in it.

        In training it would be kept for the backward at twice its size; and TransformerEngine's
        norms take nothing but the model's dtype.
        """
        dtype = self.config.params_dtype
        if self.training or torch.is_grad_enabled() or self._has_engine:
            return dtype
        return torch.float32

    @property
    def row_multiple(self) -> int:
        """What packs, and the rows that the head reads, are to be filled up to multiples of.

        Under sequence parallelism they are split over the ranks; and torch has other kernels for
        one row, and for what is left over of a vector.
        """
        ranks = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        return ranks if self.training else ranks * _EVALUATED_ROWS

    def new_key_value_pool(self, slots: int) -> KeyValuePool:
        """A pool for this rank's layers and query groups, on the model's device, in its dtype."""
        layers = [each for each in self.modules() if isinstance(each, PackedAttention)]
        config = self.config
        return KeyValuePool(
            [layer.layer_number for layer in layers],
            slots,
            config.num_query_groups // config.tensor_model_parallel_size,
            config.kv_channels,
            config.params_dtype,
            next(self.parameters()).device,
        )

    def _rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[T, 1, 1, rotary channels / 2]`` at ``position_ids [T]``."""
        rope = self.rotary_pos_emb
        positions = position_ids.float()
        if rope.seq_len_interpolation_factor is not None:
            positions = positions / rope.seq_len_interpolation_factor
        angles = torch.outer(positions, rope.inv_freq.to(positions.device))[:, None, None]
        dtype = self.config.params_dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _rows_of_head(self, rows: Tensor) -> Tensor:
        """``rows``, filled up to a multiple of what ``row_multiple`` says."""
        return F.pad(rows, (0, -rows.numel() % self.row_multiple))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        # LanguageModule's version looks for the output layer, which is not here.
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)


def build_reward_model(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    num_attributes: int,
    precision: Precision,
    recompute: Recompute = Recompute.none,
    recompute_layers: int | None = None,
    seed: int = 1234,
) -> GPTRewardModel:
    """This rank's piece of a reward model, its backbone not yet loaded, its head freshly drawn."""
    config = transformer_config(shape, layout, precision, recompute, recompute_layers)
    slow = slow_attention(shape, config.params_dtype)
    if slow is not None and is_main():
        logger.warning(slow)
    return GPTRewardModel(config, shape, layout, num_attributes, seed).to(
        torch.cuda.current_device()
    )
