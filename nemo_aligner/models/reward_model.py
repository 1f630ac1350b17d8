"""GPTRewardModel: a pretrained decoder with an fp32 reward head on each sequence's last token.

Also here: freezing, Megatron's data parallel wrapper, and batch invariance.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, wraps
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

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ROWS_BY_DEVICE, PointwiseChoice, Recompute
from nemo_aligner.cpu.products import (
    BATCH_INVARIANT_ROWS,
    reordered_for_products,
    row_multiple,
    try_all_sizes,
)
from nemo_aligner.distributed import gpu_products
from nemo_aligner.distributed.collectives import max_over_model_ranks
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.backends import slow_attention, why_gathered
from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.attention.segments import (
    KeyValuePool,
    PackedSegments,
    rotations_of,
    sum_of_group,
)
from nemo_aligner.models.backbone import layer_spec, transformer_config, use_transformer_engine
from nemo_aligner.models.cuda_graphs import (
    Capture,
    CudaCapture,
    DecoderGraphs,
    DecoderInputs,
    why_not_graphed,
    why_not_graphed_in_training,
)
from nemo_aligner.models.experts import (
    COUNTED,
    Counted,
    ExpertLinear,
    MixtureOfExperts,
    Router,
    routers,
)
from nemo_aligner.models.fixed_sizes import round_up_rows
from nemo_aligner.models.internals import engine_layers, fused_output_layer_allowed
from nemo_aligner.models.layers import (
    ColumnLinear,
    RowLinear,
    in_chunks,
    learns,
    rows_now,
)
from nemo_aligner.models.lora import LoraDropout, attach_adapters
from nemo_aligner.models.pointwise.choice import choose_kernels
from nemo_aligner.models.pointwise.operations import use_pointwise_kernels
from nemo_aligner.models.readout import mean_of_replies
from nemo_aligner.models.reward_head import HeadLayer, RewardHead
from nemo_aligner.models.rotary import ByLength, query_scale, rotations
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.host_transfer import to_device
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)


class GPTRewardModel(GPTModel):
    """megatron-core's GPTModel with a reward head instead of the output layer.

    Args:
        num_attributes: outputs of the head.
        seed: of a new head's weights.
        reads_every_token: make it a critic, whose head gives a value for each token of a pack.
        reply_marker: token ids; the head reads the mean over what follows their last occurrence
            instead of the last token.
        lora_dropout: of the inputs of LoRA's adapters, in training.

    Attributes:
        rotation_by_length: of ``ModelShape``: which texts may share a beginning.
        graphs: CUDA graphs by which packs run (``use_cuda_graphs``); None without.
        smallest_chunk: fewest rows of a batch invariant product on a GPU, on any rank of the model;
            None on a CPU, and where rewards may depend on the batch.
    """

    graphs: DecoderGraphs | None = None

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
        self.rotation_by_length = shape.rotation_by_length
        self._has_one_rotation = shape.one_rotation_until is None
        self._query_scaling = shape.query_scaling
        self._has_engine = use_transformer_engine(shape, config.params_dtype)
        # Rounded to the model's dtype, as in Gemma's own training.
        scale = torch.tensor(shape.hidden_size**0.5, dtype=config.params_dtype)
        self._embedding_scale = shape.embedding_multiplier
        if shape.apply_embedding_scaling:
            self._embedding_scale *= scale.item()
        if self.pre_process:
            # Padding rows of the vocabulary are neither read nor loaded; zeros cannot spread a NaN.
            torch.nn.init.zeros_(self.embedding.word_embeddings.weight)
        if self.post_process:
            # A parameter that gets no gradient would keep its bucket from being reduced.
            del self.output_layer
            self.rm_head = RewardHead(shape.hidden_size, num_attributes, seed, shape.head)
        self.lora_dropout = lora_dropout
        if shape.lora is not None:
            attach_adapters(self, shape.lora, lora_dropout)

    def use_cuda_graphs(self, capture: Capture | None = None) -> None:
        """Run packs by CUDA graphs from now on, where it can be; says why if not.

        Packs then have fixed sizes (``fixed_sizes``). ``capture`` is a test's.
        """
        why = why_not_graphed(self) if capture is None else None
        if why is not None:
            if is_main():
                logger.warning(f"model.cuda_graphs: not used, because {why}")
            return
        why_not_training = partial(why_not_graphed_in_training, self)
        modules = [self.embedding, self.decoder]
        capture = capture or CudaCapture()
        self.graphs = DecoderGraphs(self._decode, modules, capture, why_not_training)

    def begin_step(self, step: int, losses_per_record: float = 1.0) -> None:
        """Prepare for the forward passes of a training step, counted from 0.

        ``losses_per_record`` is how many losses the step's mean counts for each of its records.
        """
        if self.lora_dropout is not None:
            self.lora_dropout.begin_step(step)
        for router in routers(self).values():
            router.losses_per_record = losses_per_record

    def forward(self, batch: PackedBatch, pool: KeyValuePool | None = None) -> Tensor:
        """Score a pack, or this rank's share of it, that lies on this model's device.

        ``pool`` has the keys and values of the beginnings that the pack takes from a cache.

        Returns:
            On the last pipeline stage the head's outputs ``[S, columns]`` float32, in the order of
            ``OutputColumns``, or a critic's values ``[T, num_attributes]``; on the others hidden
            states ``[T, 1, hidden]`` for the next stage (``T / tp`` tokens under sequence
            parallelism).
        """
        rows, count = self._read_rows(batch)
        # The last layer goes on with these rows alone.
        segments = PackedSegments.of(batch, (), self._rows_of_head(rows, batch), pool)
        if self.lora_dropout is not None and self.training:
            self.lora_dropout.begin(batch, segments)
        # megatron-core gives its layers nothing else of the pack: a router asks the segments.
        segments.remembered(COUNTED, lambda: _counted(batch, len(rows)))
        tokens, positions = batch.of_own(batch.tokens), batch.of_own(batch.position_ids)
        inputs, by_length = DecoderInputs(tokens, positions, segments), self._by_length(batch)
        if self.graphs is None or batch.sizes is None or by_length is not None:
            hidden = self._decode(inputs, by_length)
        else:
            hidden = self.graphs.run(inputs, self.training)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # Every rank computes the whole head and gets the same gradient: nothing to reduce.
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
        """Compute all but the head; reads nothing of a pack but ``inputs``' tensors and sizes."""
        positions, dtype = inputs.positions, self.config.params_dtype
        segments = replace(
            inputs.segments,
            tables=tuple(each.tables(positions, dtype, by_length) for each in self._rotations),
            query_scale=self._query_scale(positions),
        )
        return self.decoder(
            hidden_states=self._embedded(inputs.tokens, positions) if self.pre_process else None,
            attention_mask=None,
            # PackedAttention rotates, in far fewer passes over memory than megatron-core.
            rotary_pos_emb=None,
            packed_seq_params=segments,
        )

    def _read_rows(self, batch: PackedBatch) -> tuple[Tensor, int]:
        """Which of this rank's tokens the head reads, and how many outputs all ranks have."""
        rows = batch.scored_tokens
        if self.reads_every_token:
            rows = torch.arange(batch.num_tokens, device=rows.device)
        count = len(rows)
        if batch.replies is not None:
            rows = batch.replies.index
        elif batch.share is not None:
            rows = batch.share.read_rows
        return rows, count

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed ``tokens [T]`` at these ``positions`` -> ``[T, 1, hidden]``."""
        embedded = self.embedding(tokens[None], positions[None])
        embedded = embedded.to(self.stream_dtype)
        if self._embedding_scale != 1:
            embedded = embedded * self._embedding_scale
        if self.training and self.config.recompute_granularity == "full":
            # Reentrant checkpointing gives no gradients unless an input requires one, and behind a
            # frozen embedding none does.
            embedded.requires_grad_()
        return embedded

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the residual stream now: fp32 for inference, where rounding would add up.

        In training an fp32 stream would double what is kept for the backward pass, and
        TransformerEngine's norms accept only the model's dtype.
        """
        dtype = self.config.params_dtype
        if learns(self) or self._has_engine:
            return dtype
        return torch.float32

    def row_multiple(self, count: int) -> int:
        """Multiple to which packs of ``count`` tokens, or rows that the head reads, are padded.

        Sequence parallelism splits them evenly over the ranks. In evaluation it also keeps torch
        from its other kernels for a single row and for the remainder of a vector, and on a GPU
        batch invariant products from padding each by itself.
        """
        ranks = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        if self.training:
            return ranks
        if self.smallest_chunk is not None:
            return ranks * gpu_products.row_multiple(count // ranks, self.smallest_chunk)
        return ranks * row_multiple(count // ranks)

    def new_key_value_pool(self, slots: int) -> KeyValuePool:
        """Allocate a pool for this rank's layers and query groups, in the model's dtype."""
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

    def _by_length(self, batch: PackedBatch) -> ByLength | None:
        """Which rotations a pack's texts have; None if all have the one of short texts."""
        numbers = [] if self._has_one_rotation else rotations_of(batch, self.rotation_by_length)
        distinct = sorted(set(numbers))
        if distinct in ([], [0]):
            return None
        of_segments = torch.tensor([distinct.index(number) for number in numbers])
        of_tokens = of_segments.repeat_interleave(batch.cu_seqlens.diff())
        return distinct, batch.of_own(to_device(of_tokens, batch.position_ids.device))

    def _query_scale(self, position_ids: Tensor) -> Tensor | None:
        """Factors of queries at ``position_ids [T]``; None if they are not scaled by position."""
        if self._query_scaling is None:
            return None
        return query_scale(self._query_scaling, position_ids, self.config.params_dtype)

    def _rows_of_head(self, rows: Tensor, batch: PackedBatch) -> Tensor:
        """Pad ``rows`` with 0 to a multiple of ``row_multiple``, above 0, or to a fixed size."""
        count = max(rows.numel(), 1)
        padded = count + -count % self.row_multiple(count)
        if batch.sizes is not None:
            padded = round_up_rows(count)
        return F.pad(rows, (0, padded - rows.numel()))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        # Skip LanguageModule's version, which expects an output layer.
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)


def _counted(batch: PackedBatch, rows: int) -> Counted:
    """Count a pack for its routers; one of no record is there for other ranks' experts alone."""
    if not len(batch.records):
        return Counted()
    return Counted(len(batch.records), batch.num_own_tokens - batch.num_own_filled, rows)


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
    pointwise_kernels: PointwiseChoice | None = None,
) -> GPTRewardModel:
    """Build this rank's shard of a reward model: head freshly drawn, backbone not yet loaded.

    Args:
        num_attributes: outputs of the head.
        recompute_layers: see ``transformer_config``.
        seed: of the head's weights.
        reads_every_token, reply_marker, lora_dropout: see ``GPTRewardModel``.
        pointwise_kernels: see ``choose_kernels``.

    Raises:
        ConfigError: the layout does not divide the model, or the kernels cannot run here.
    """
    kernels = choose_kernels(pointwise_kernels)
    config = transformer_config(shape, layout, precision, recompute, recompute_layers)
    slow = slow_attention(shape, config.params_dtype)
    if slow is not None and is_main():
        logger.warning(slow)
    gathered = why_gathered(shape, config.params_dtype) if layout.ring else None
    if gathered is not None and is_main():
        logger.warning(
            f"model.cp_comm_type=p2p: keys and values are gathered all the same, because {gathered}"
        )
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
    use_pointwise_kernels(model, kernels)
    return model.to(torch.cuda.current_device())


# Training: frozen layers, and Megatron's data parallel wrapper.


def freeze_lower_layers(model: GPTRewardModel, count: int, num_layers: int) -> None:
    """Freeze the embeddings and the first ``count`` layers; 0 freezes nothing.

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


def set_routers(model: GPTRewardModel, *, trained: bool, aux_loss_coeff: float) -> None:
    """Freeze the routers of a mixture of experts, or train them with an auxiliary loss."""
    for router in routers(model).values():
        router.weight.requires_grad_(trained)
        router.aux_loss_coeff = aux_loss_coeff


def check_freezing(count: int, num_layers: int) -> None:
    """Raise ConfigError if ``count`` frozen layers would leave none of ``num_layers`` to train."""
    if count >= num_layers:
        raise ConfigError(f"model.freeze_layers: got {count}, wanted less than {num_layers}")


def wrap_for_training(
    model: GPTRewardModel, bucket_size: int | None = None
) -> DistributedDataParallel:
    """Wrap ``model`` in Megatron's DDP: fp32 gradients, sharded for the distributed optimizer.

    With several data parallel ranks the buffers are cut into buckets of about ``bucket_size``
    parameters (Megatron's choice by default). A bucket's gradients are reduced while those of
    earlier layers are computed, and its updated weights are gathered while earlier layers run.
    """
    # A gradient is also a sum over the ranks of a context parallel group.
    overlaps = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        bucket_size=bucket_size,
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    if overlaps:
        # Megatron's schedules enter it for all micro-batches but the last, whose backward pass
        # reduces the gradients of all.
        model.config.no_sync_func = wrapped.no_sync
        _gather_in_order_of_use(wrapped)
    return wrapped


def unwrap_after_training(wrapped: DistributedDataParallel) -> None:
    """Release model, gradients and process groups in a process that lives on.

    Megatron's hooks on autograd nodes hold a reference to the wrapper. That cycle passes through
    C++, where Python's collector cannot see it, so the wrapper's attributes are dropped instead.
    """
    vars(wrapped).clear()


def _gather_in_order_of_use(wrapped: DistributedDataParallel) -> None:
    """Gather buckets in forward order.

    Megatron walks its buffers backwards, and would begin with the head's fp32 buffer, which the
    forward pass uses last.
    """
    index = {parameter: i for i, parameter in enumerate(wrapped.module.parameters())}
    every = wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups
    groups = sorted(every, key=lambda group: min(index[p] for p in group.params))
    for group, following in zip_longest(groups, groups[1:]):
        group.next_param_gather_bucket_group = following


# Batch invariance: a text's reward has the same bits alone and in any batch.
#
# Matrix products get a fixed number of rows here, because a GEMM picks its kernel, and with it the
# order of its sums, by that number. The rest holds in evaluation mode anyway: attention in blocks
# at fixed positions, packs padded to whole vectors, whole rows per thread.


def make_batch_invariant(model: GPTRewardModel, rows: int | None) -> None:
    """Compute all products of ``model`` in chunks of ``rows`` rows in evaluation mode.

    ``ROWS_BY_DEVICE`` leaves the number to the device; None switches it off. On a GPU other sizes
    are tried here, not at the first texts. Every rank of the model calls it.
    """
    is_on_gpu = next(model.parameters()).is_cuda
    engine = engine_layers(model)
    if rows == ROWS_BY_DEVICE:
        # TransformerEngine's layers have chunks of one size, to which short packs are padded.
        has_trial = is_on_gpu and not engine
        rows = gpu_products.default_rows() if has_trial else BATCH_INVARIANT_ROWS
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
            "tensor parallel ranks are in NCCL's order; wanted at most 2 of them"
        )
    for layer in model.modules():
        if isinstance(layer, ColumnLinear | RowLinear | RewardHead | MixtureOfExperts):
            layer.invariant_rows = rows
    for layer in engine:
        layer.invariant_rows = rows
        if "forward" not in vars(layer):
            layer.forward = _in_chunks(layer)  # type: ignore[method-assign]
    model.smallest_chunk = None
    if is_on_gpu and rows is not None:
        model.smallest_chunk = _try_on_gpu(model, rows)


def _try_on_gpu(model: GPTRewardModel, rows: int) -> int:
    """Try the products of a model on its GPU, and return the fewest rows of a decoder's."""
    for weight, bias in _products(model):
        gpu_products.chunk_sizes(weight, bias, rows)
    layers = _invariant_layers(model)
    smallest = [min(gpu_products.chunk_sizes(each.weight, each.bias, rows)) for each in layers]
    # TransformerEngine's layers, which are not among these, have chunks of one size. All ranks of
    # the model have to make the same packs.
    return max_over_model_ranks(max(smallest, default=rows))


def _products(model: GPTRewardModel) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the weight ``[o, i]`` and the bias of every product; of equal experts the first."""
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear | HeadLayer | torch.nn.Linear):
            yield module.weight, module.bias
        elif isinstance(module, Router):
            yield module.weight.float(), None
        elif isinstance(module, ExpertLinear):
            yield module.weight[0].flatten(0, -2), None


def freeze_for_scoring(model: GPTRewardModel) -> None:
    """Keep the weights of linear layers only in the layout that a CPU multiplies fastest in.

    For a batch invariant model that is neither trained nor saved from here on. One layer's weight
    is there twice at a time.
    """
    for layer in _invariant_layers(model):
        weight = reordered_for_products(layer.weight.detach())
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def try_all_products(model: GPTRewardModel) -> None:
    """Meet all sizes of a batch invariant model's products on a CPU now, not at the first texts."""
    for layer in _invariant_layers(model):
        try_all_sizes(layer.weight, getattr(layer, "bias", None), layer.invariant_rows)


def _invariant_layers(model: GPTRewardModel) -> list[Any]:
    """Linear layers of the decoder whose products have a fixed number of rows."""
    layers = [each for each in model.modules() if isinstance(each, ColumnLinear | RowLinear)]
    return [each for each in layers if each.invariant_rows is not None]


def _in_chunks(layer: Any) -> Any:
    """Wrap a TransformerEngine layer's ``forward`` to run in chunks of its ``invariant_rows``."""
    forward = layer.forward

    @wraps(forward)
    def in_chunks_of_rows(x: Tensor) -> tuple[Tensor, None]:
        rows = rows_now(layer)
        if rows is None:
            return forward(x)
        # The second output is a bias for the caller to add; these layers have already added theirs.
        return in_chunks(lambda piece: forward(piece)[0], x, rows), None

    return in_chunks_of_rows
