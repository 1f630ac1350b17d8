"""Attention one segment at a time, by SDPA or explicit scores, where no kernel takes a whole pack.

A GPU needs it for fp32, for architectures before Ampere, for head sizes that FlashAttention 2 does
not support, and for windows and soft caps where no kernel for them is installed. A CPU needs it for
windows and soft caps in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from nemo_aligner.cpu.flash_attention import cpu_flash_attention, cpu_flash_attention_backward
from nemo_aligner.models.attention.segments import PackedSegments, Scores
from nemo_aligner.utils.explicit_scores import explicit_attention
from nemo_aligner.utils.sinks import join_sinks, sink_gradients

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

    from nemo_aligner.models.attention.backends import Case

_AMPERE, _VOLTA = 8, 7


@dataclass(frozen=True, eq=False)
class SegmentHeads:
    """What a kernel for single segments reads: one segment's heads, and which keys they see.

    Attributes:
        query: ``[1, heads, n, c]`` of the segment, or of a part of it.
        key, value: ``[1, groups, m, c]``, with those of the prefixes first.
        sinks: logits ``[heads]`` of attention sinks; None if there are none.
        mask: ``[n, m]``, see ``plan_masks``; None is a causal mask.
        scores: how the layer computes its scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    mask: Tensor | None
    scores: Scores


def attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    segments: PackedSegments,
    case: Case,
    masks: Sequence[Tensor | None],
) -> Tensor:
    """Attend ``query [n, heads, c]`` to ``key``, ``value [C + T, groups, c]`` -> ``[n, heads, c]``.

    C is the number of cached tokens, T that of the pack's tokens. ``plan_masks`` makes ``masks``.
    The fourth of ``tensors`` has the logits ``[heads]`` of attention sinks, or is None.
    """
    query, key, value, sinks = tensors
    if torch.is_grad_enabled():
        # Autograd saves parts of this tensor. If they were views of the output of linear_qkv, all
        # of that output would stay in memory until the backward pass.
        value = value.contiguous()
    attend_segment = _choose_segment_kernel(case)
    parts = segments.queries
    queries, keys, values = (
        [piece.transpose(0, 1).unsqueeze(0) for piece in packed.split(split)]
        for packed, split in (
            (query, [part.length for part in parts]),
            (key, segments.all_lengths),
            (value, segments.all_lengths),
        )
    )
    pieces = []
    for part, q, mask in zip(parts, queries, masks, strict=True):
        chain = segments.chain(part)
        k, v = (packed[part.segment][:, :, : part.end] for packed in (keys, values))
        if chain:
            k, v = (
                torch.cat([*(packed[number] for number in chain), last], dim=2)
                for packed, last in ((keys, k), (values, v))
            )
        pieces.append(attend_segment(SegmentHeads(q, k, v, sinks, mask, case.scores)))
    return torch.cat(pieces, dim=2).squeeze(0).transpose(0, 1)


def plan_masks(segments: PackedSegments, case: Case) -> list[Tensor | None]:
    """Make a mask ``[n queries, m keys]`` for each part of a segment whose queries this rank has.

    Parts with the same n and m share a mask.

    None stands for a causal mask over the part's own keys, which SDPA makes itself.
    """
    attend_segment, device = _choose_segment_kernel(case), segments.cu_seqlens.device
    has_fused_kernel = (
        attend_segment in (_attend_by_sdpa, _attend_with_equal_heads) and case.device != "cpu"
    )
    is_plain = case.scores.window is None and case.scores.soft_cap is None
    is_plain = is_plain and (case.device == "cpu" or not case.scores.has_sinks)
    made: dict[tuple[int, int], Tensor] = {}
    masks: list[Tensor | None] = []
    for part in segments.queries:
        chain = segments.chain(part)
        if is_plain and not (chain or part.start):
            masks.append(None)
            continue
        keys = part.end + sum(segments.all_lengths[number] for number in chain)
        size = part.length, keys
        if size not in made:
            uses_bias = is_plain and has_fused_kernel
            made[size] = _causal_bias(*size) if uses_bias else _make_mask(*size, case, device)
        masks.append(made[size])
    return masks


_AttendSegment = Callable[[SegmentHeads], Tensor]
"""Computes a segment's output ``[1, heads, n, c]``."""
_BLOCK_SCORES = 2**26  # 256 MiB of fp32
_SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _choose_segment_kernel(case: Case) -> _AttendSegment:
    """Choose a kernel for single segments whose backward pass needs few saved tensors.

    The comment at ``takes_equal_heads`` lists what SDPA's kernels support.
    """
    is_on_cpu = case.device == "cpu"
    if is_on_cpu and case.scores.soft_cap is None:
        return _attend_with_sinks if case.scores.has_sinks else _attend_by_sdpa
    if case.scores.soft_cap is not None or case.scores.has_sinks:
        return (
            _recompute_scores
            if is_on_cpu
            else partial(_attend_in_blocks, _attend_by_explicit_scores)
        )
    if not takes_equal_heads(case.dtype, case.channels):
        return partial(_attend_in_blocks, _attend_by_sdpa)
    return _attend_by_sdpa if case.query_heads == case.key_heads else _attend_with_equal_heads


def _attend_by_explicit_scores(segment: SegmentHeads) -> Tensor:
    query, key, value, mask = segment.query, segment.key, segment.value, segment.mask
    assert mask is not None
    scores, sinks = segment.scores, segment.sinks
    if sinks is not None:
        sinks = sinks.view(1, key.size(1), -1, 1, 1)
    return explicit_attention(query, key, value, mask, scores.scale, scores.soft_cap, sinks)


def _attend_by_sdpa(segment: SegmentHeads) -> Tensor:
    # cuDNN's kernel is excluded: it gave wrong gradients for lengths that had occurred in an
    # earlier pack (torch 2.11, H200), probably because it reused a plan cached for other strides.
    with sdpa_kernel(_SDPA_KERNELS) if segment.query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            segment.query,
            segment.key,
            segment.value,
            segment.mask,
            is_causal=segment.mask is None,
            scale=segment.scores.scale,
            enable_gqa=segment.query.size(1) != segment.key.size(1),
        )


def _attend_with_equal_heads(segment: SegmentHeads) -> Tensor:
    """Call SDPA with keys and values repeated for every query head.

    The memory-efficient kernel does not support grouped heads. The copies, ``2 * m * heads * c``
    values, are saved for the backward pass; the math kernel would save ``heads * n * m`` scores.
    """
    per_group = segment.query.size(1) // segment.key.size(1)
    key, value = (
        heads.repeat_interleave(per_group, dim=1) for heads in (segment.key, segment.value)
    )
    return _attend_by_sdpa(replace(segment, key=key, value=value))


def _recompute_scores(segment: SegmentHeads) -> Tensor:
    return _checkpointed(_attend_by_explicit_scores, segment)


def _attend_with_sinks(segment: SegmentHeads) -> Tensor:
    return _WithSinks.apply(
        segment.query,
        segment.key,
        segment.value,
        segment.sinks,
        segment.mask,
        segment.scores.scale,
    )


class _WithSinks(Function):
    """Attention of a segment with sinks on a CPU; ``utils/sinks.py`` derives the backward pass.

    It calls torch's flash attention, which saves no scores, with the heads in the layout of
    ``training_attention.as_heads``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        groups = key.size(1)
        q, k, v = _by_repeats(groups, query, key, value)
        out, lse = cpu_flash_attention(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
        join_sinks(out, lse, sinks.view(groups, -1).t().unsqueeze(-1))
        ctx.save_for_backward(query, key, value, sinks, mask, out, lse)
        ctx.scale = scale
        return out.transpose(0, 1).flatten(0, 1).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, mask, out, lse = ctx.saved_tensors
        groups = key.size(1)
        d, q, k, v = _by_repeats(groups, grads[0], query, key, value)
        # torch's backward pass on a CPU is slower in 16 bits than in fp32, the dtype of ``lse``.
        d, q, k, v, o = (x.to(lse.dtype) for x in (d, q, k, v, out))
        options = {"attn_mask": mask, "scale": ctx.scale}
        to_query, to_key, to_value = cpu_flash_attention_backward(
            d, q, k, v, o, lse, 0.0, mask is None, **options
        )
        to_query = to_query.transpose(0, 1).reshape(query.shape).to(query.dtype)
        to_key, to_value = (x.sum(0, keepdim=True).to(key.dtype) for x in (to_key, to_value))
        by_query = sink_gradients(d, o, lse, sinks.view(groups, -1).t().unsqueeze(-1))
        return to_query, to_key, to_value, by_query.sum(-1).t().flatten(), None, None


def _by_repeats(groups: int, *heads: Tensor) -> Iterator[Tensor]:
    """View each of ``heads [1, heads, n, c]`` as ``[repeats, groups, n, c]``.

    Keys and values are expanded to ``repeats``, the number of query heads per group.
    """
    repeats = max(x.size(1) for x in heads) // groups
    for x in heads:
        is_key = x.size(1) == groups
        by_group = x.transpose(0, 1) if is_key else x.unflatten(1, (groups, -1)).squeeze(0)
        yield by_group.transpose(0, 1).expand(repeats, -1, -1, -1)


def _attend_in_blocks(attend: _AttendSegment, segment: SegmentHeads) -> Tensor:
    """Run ``attend`` on a few queries at a time, for kernels that materialise all their scores.

    The backward pass recomputes each block, so at most ``_BLOCK_SCORES`` scores exist at a time.
    """
    query, mask, num_keys = segment.query, segment.mask, segment.key.size(2)
    if mask is None:
        mask = _visibility_mask(query.size(2), num_keys, None, query.device)
    rows = max(1, _BLOCK_SCORES // (query.size(1) * num_keys))
    parts = zip(query.split(rows, dim=2), mask.split(rows), strict=True)
    return torch.cat(
        [_checkpointed(attend, replace(segment, query=part, mask=sees)) for part, sees in parts],
        dim=2,
    )


def _checkpointed(attend: _AttendSegment, segment: SegmentHeads) -> Tensor:
    """Compute ``attend(segment)`` now, and again in the backward pass."""
    scores = segment.scores  # the closure must not keep the segment's tensors

    def attend_to_tensors(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        return attend(SegmentHeads(query, key, value, sinks, mask, scores))

    # Pass the tensors themselves, not the record: only then do hooks of saved tensors see them,
    # which offload activations, or gather keys again under context parallelism.
    tensors = segment.query, segment.key, segment.value, segment.sinks, segment.mask
    # Attention draws no random numbers, so there is no generator state to restore.
    return checkpoint(attend_to_tensors, *tensors, use_reentrant=False, preserve_rng_state=False)


def _causal_bias(queries: int, keys: int) -> CausalBias:
    """Build torch's causal bias for SDPA on a GPU, with the last query at the last key.

    A mask would make a reward in fp32 depend on its batch. With a mask, the memory-efficient kernel
    scales scores before it adds the mask; without one, it scales them in the exponent. A sample
    without a shared or cached prefix needs no mask, only ``is_causal``. torch's ``CausalBias``
    tells the kernel that the mask is causal, as ``is_causal`` does. Where the memory-efficient
    kernel does not run, torch makes a mask from the bias.
    """
    # Imported here, because it imports torch._dynamo, and every command would start later.
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(1, 1)
    # Set the lengths after construction, because torch's constructor allocates 8 bytes of host
    # memory for each query and key.
    bias.seq_len_q, bias.seq_len_kv = queries, keys
    return bias


def _make_mask(queries: int, keys: int, case: Case, device: torch.device) -> Tensor:
    """Make a mask ``[queries, keys]``: bool for explicit scores, else float.

    A float mask is added to the scores.

    Given a bool mask, SDPA would convert it to a float mask for every segment in every layer, and
    save that for the backward pass. The rows' stride is a multiple of 16, or the memory-efficient
    kernel would copy the mask.
    """
    sees = _visibility_mask(queries, keys, case.scores.window, device)
    if case.scores.soft_cap is not None or (case.device != "cpu" and case.scores.has_sinks):
        return sees
    apart = -(-keys // 16) * 16
    added = torch.full((queries, apart), -torch.inf, dtype=case.dtype, device=device)
    return added[:, :keys].masked_fill_(sees, 0.0)


def _visibility_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Make a bool mask ``[queries, keys]`` of visible keys; the last query is at the last key."""
    behind = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
    return mask if window is None else mask.triu(behind - window + 1)


# How torch chooses SDPA's kernel on a GPU (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp):
# Flash attention takes grouped heads, but only in 16 bits, from Ampere on, up to 256 channels, and
# without a mask (check_for_attn_mask). The memory-efficient kernel takes fp32, any number of
# channels, and masks, but needs as many key heads as query heads
# (check_batch_size_and_num_heads_dense<false>). cuDNN's kernel takes only 16 bits. All other cases
# go to the math kernel, which saves heads * n * m scores for the backward pass.
def takes_equal_heads(dtype: torch.dtype, channels: int) -> bool:
    """Tell if SDPA's memory-efficient kernel runs on this GPU with a key head per query head."""
    major = torch.cuda.get_device_capability()[0]
    is_half = dtype in (torch.bfloat16, torch.float16)
    if dtype is torch.bfloat16 and major < _AMPERE:
        return False
    # torch's minimum_gemm_alignment is 128 bits if there are tensor cores for the dtype.
    has_tensor_cores = major >= _AMPERE or (is_half and major >= _VOLTA)
    alignment = 16 // dtype.itemsize if has_tensor_cores else 1
    return (is_half or dtype is torch.float32) and channels % alignment == 0
