"""GPTRewardModel: a pretrained decoder with an fp32 reward head on each sequence's last token."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import wraps
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch, ReplyRows
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.contract.turns import reply_start
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.packed import PackedAttention, slow_attention
from nemo_aligner.models.attention.segments import KeyValuePool, PackedSegments, chains_of
from nemo_aligner.models.backbone import layer_spec, transformer_config, use_transformer_engine
from nemo_aligner.models.internals import fused_output_layer_allowed, scale_rotary_frequencies
from nemo_aligner.models.linear import (
    ColumnLinear,
    RowLinear,
    in_chunks,
    invariant_linear,
    rows_now,
)
from nemo_aligner.models.lora import LoraDropout, attach_adapters
from nemo_aligner.models.shape import HeadShape, ModelShape
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import is_main

# The reward head: hidden states of the scored tokens -> rewards, in fp32.

_HEAD_INIT_STD = 0.02


class _Layer(torch.nn.Module):
    """A weight of fp32 and its bias, on this rank's device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(weight.to(device))
        self.bias = None if bias is None else torch.nn.Parameter(bias.to(device))

    def forward(self, hidden: Tensor, rows: int | None) -> Tensor:
        """``[S, in] -> [S, out]``; ``rows`` as linear layers have them now (``rows_now``).

        Whoever uses a weight calls its module: Megatron waits there for what is on its way.
        """
        if rows is None:
            return F.linear(hidden, self.weight, self.bias)
        return invariant_linear(hidden, self.weight, self.bias, rows)


class RewardHead(_Layer):
    """``[S, hidden] -> [S, outputs]`` in fp32, whole on all TP ranks.

    A linear map without bias, unless ``shape`` says more. Between two layers is a ReLU, which has
    the same bits on every processor. ``invariant_rows`` as linear layers have them.
    """

    invariant_rows: int | None = None

    def __init__(
        self, hidden_size: int, num_outputs: int, seed: int, shape: HeadShape | None = None
    ) -> None:
        sizes = (shape or HeadShape()).tensors(num_outputs, hidden_size)
        # Drawn on the CPU from its own generator: the same head on any device, at any layout.
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: _draw(size, name, generator) for name, size in sizes.items()}
        super().__init__(drawn["weight"], drawn.get("bias"))
        self.learned: torch.nn.Parameter | None = None
        self.hidden = None
        if "hidden.weight" in drawn:
            self.hidden = _Layer(drawn["hidden.weight"], drawn.get("hidden.bias"))

    def learn_beside(self, start: Sequence[float]) -> None:
        """Have numbers that an objective learns stand behind the outputs of every text."""
        if start:
            numbers = torch.tensor(start, dtype=torch.float32, device=self.weight.device)
            self.learned = torch.nn.Parameter(numbers)
            self.learned.is_of_objective = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        outputs = self._outputs(hidden.float(), rows_now(self))
        if self.learned is None:
            return outputs
        return torch.cat([outputs, self.learned.expand(len(outputs), -1)], dim=1)

    def _outputs(self, hidden: Tensor, rows: int | None) -> Tensor:
        if self.hidden is not None:
            hidden = self.hidden(hidden, rows).relu()
        return super().forward(hidden, rows)


def _draw(size: tuple[int, ...], name: str, generator: torch.Generator) -> Tensor:
    tensor = torch.zeros(size, dtype=torch.float32)
    if len(size) == 1:
        return tensor
    # The layer between keeps the size of what it is given (He et al. 2015).
    std = (2 / size[1]) ** 0.5 if name == "hidden.weight" else _HEAD_INIT_STD
    return tensor.normal_(std=std, generator=generator)


# The mean of a reply's hidden states, which is the same whatever stands beside it in a pack.


def find_reply_rows(batch: PackedBatch, marker: Sequence[int]) -> ReplyRows:
    """Which tokens of a pack, on the host, are the reply of each of its S sequences.

    Of a sequence that begins with cached tokens, these end before the last marker.
    """
    rows, lengths = [], []
    for own in _sequences(batch):
        start = reply_start(batch.tokens[own].numpy(), marker)
        rows.append(own[start:])
        lengths.append(len(own) - start)
    return ReplyRows(torch.cat(rows), tuple(lengths))


def _sequences(batch: PackedBatch) -> Iterator[Tensor]:
    """Of every sequence its tokens that are in the pack, as rows, in their order."""
    bounds = batch.cu_seqlens.tolist()
    cached = 0 if batch.cached is None else len(batch.cached.lengths)
    chains = chains_of(batch.prefixes.tolist(), cached)
    ends = torch.searchsorted(batch.cu_seqlens.long(), batch.scored_tokens, right=True) - 1
    for segment in ends.tolist():
        parts = [number - cached for number in chains[segment] if number >= cached]
        spans = [torch.arange(bounds[part], bounds[part + 1]) for part in (*parts, segment)]
        yield torch.cat(spans)


def mean_of_replies(hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """``[M, hidden]``, the rows of replies of these lengths -> ``[S, hidden]`` fp32.

    Each is summed alone: how a sum is rounded depends on its own length.
    """
    return torch.stack([reply.float().mean(dim=0) for reply in hidden.split(list(lengths))])


# What of a model is trained, and how its gradients and weights travel.


def freeze_lower_layers(model: GPTRewardModel, count: int, num_layers: int) -> None:
    """Leave the embeddings and the first ``count`` layers as they are; 0 freezes nothing.

    Raises:
        ConfigError: ``count`` leaves no layer to train.
    """
    check_freezing(count, num_layers)
    if count == 0:
        return
    if model.pre_process:
        model.embedding.requires_grad_(False)
    for layer in model.decoder.layers:
        if layer.layer_number <= count:
            layer.requires_grad_(False)


def check_freezing(count: int, num_layers: int) -> None:
    """Refuse to freeze all of a model; raises as ``freeze_lower_layers``."""
    if count >= num_layers:
        raise ConfigError(f"model.freeze_layers: got {count}, wanted less than {num_layers}")


def wrap_for_training(
    model: GPTRewardModel, bucket_size: int | None = None
) -> DistributedDataParallel:
    """Megatron's data parallel wrapper: fp32 gradients, sharded for the distributed optimizer.

    Among several data parallel ranks the buffers are cut into buckets of about ``bucket_size``
    parameters (Megatron's choice by default). A bucket's gradients are reduced while those before
    it are computed, and its updated weights are gathered while those before it are used.
    """
    overlaps = parallel_state.get_data_parallel_world_size() > 1
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        bucket_size=bucket_size,
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    if overlaps:
        model.config.no_sync_func = wrapped.no_sync
        _gather_in_order_of_use(wrapped)
    return wrapped


def unwrap_after_training(wrapped: DistributedDataParallel) -> None:
    """Let go of model, gradients and process groups, in a process that goes on without them.

    Megatron hangs its hooks on nodes of autograd, and these hold the wrapper: a cycle that Python's
    collector cannot see. What the wrapper holds is therefore taken from it.
    """
    vars(wrapped).clear()


def _gather_in_order_of_use(wrapped: DistributedDataParallel) -> None:
    """Megatron goes through its buffers backwards, and has the fp32 head's at the beginning."""
    index = {parameter: i for i, parameter in enumerate(wrapped.module.parameters())}
    groups = sorted(wrapped.bucket_groups, key=lambda group: min(index[p] for p in group.params))
    for group, following in zip_longest(groups, groups[1:]):
        group.next_param_gather_bucket_group = following


# GPTRewardModel: a pretrained decoder with an fp32 head that reads each sequence's last token.

logger = logging.getLogger(__name__)

_EVALUATED_ROWS = 32


class GPTRewardModel(GPTModel):
    """megatron-core's GPTModel with a reward head instead of the output layer.

    ``reads_every_token`` makes it a critic: the head gives a value for each token of a pack.
    With a ``reply_marker`` the head reads the mean over what follows it, and not the last token.
    ``key_value_pool`` is what packs with cached prefixes take them from.
    """

    key_value_pool: KeyValuePool | None = None
    lora_dropout: LoraDropout | None = None

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
        self.reads_every_token = reads_every_token
        self.reply_marker = reply_marker
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
    reads_every_token: bool = False,
    reply_marker: tuple[int, ...] | None = None,
) -> GPTRewardModel:
    """This rank's piece of a reward model, its backbone not yet loaded, its head freshly drawn."""
    config = transformer_config(shape, layout, precision, recompute, recompute_layers)
    slow = slow_attention(shape, config.params_dtype)
    if slow is not None and is_main():
        logger.warning(slow)
    model = GPTRewardModel(
        config,
        shape,
        layout,
        num_attributes,
        seed,
        reads_every_token=reads_every_token,
        reply_marker=reply_marker,
    )
    return model.to(torch.cuda.current_device())


# Batch invariance: a text's reward has the same bits alone and in any company.
#
# Here its products are given fixed shapes. What else it takes is always so in evaluation mode:
# attention by blocks at fixed positions, packs filled up to whole vectors, threads that get whole
# rows.

logger = logging.getLogger(__name__)

_ENGINE = "megatron.core.extensions.transformer_engine"


def make_batch_invariant(model: GPTRewardModel, rows: int | None) -> None:
    """Have all products of ``model`` computed ``rows`` rows at a time in evaluation mode.

    None leaves them as they come.
    """
    engine = [each for each in model.modules() if type(each).__module__ == _ENGINE]
    if rows is not None and engine and model.config.sequence_parallel:
        if is_main():
            logger.warning(
                "model.batch_invariant does not hold: TransformerEngine gathers what sequence "
                "parallelism has split inside its products; wanted model.sequence_parallel=false"
            )
        return
    if rows is not None and engine and model.config.tensor_model_parallel_size > 2 and is_main():
        logger.warning(
            "model.batch_invariant may not hold: TransformerEngine's sums over more than two "
            "tensor parallel ranks are in an order of NCCL's; wanted at most 2 of them"
        )
    for layer in model.modules():
        if isinstance(layer, ColumnLinear | RowLinear | RewardHead):
            layer.invariant_rows = rows
    for layer in engine:
        layer.invariant_rows = rows
        if "forward" not in vars(layer):
            layer.forward = _in_chunks(layer)  # type: ignore[method-assign]


def _in_chunks(layer: Any) -> Any:
    """Its ``forward``, in pieces of its ``invariant_rows``."""
    forward = layer.forward

    @wraps(forward)
    def in_chunks_of_rows(x: Tensor) -> tuple[Tensor, None]:
        rows = rows_now(layer)
        if rows is None:
            return forward(x)
        # What comes beside the output is a bias to be added later: these layers add their own.
        return in_chunks(lambda piece: forward(piece)[0], x, rows), None

    return in_chunks_of_rows
