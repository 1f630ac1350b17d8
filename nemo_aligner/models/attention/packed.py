"""Causal attention over packed sequences, and the choice of its kernel.

On GPUs a variable-length flash kernel, on CPUs torch's flash attention; where neither fits, SDPA or
explicit scores one segment at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils.checkpoint import checkpoint

from nemo_aligner.config.model import ContextExchange
from nemo_aligner.models import kernels
from nemo_aligner.models.attention import cpu_inference, cpu_training, ring
from nemo_aligner.models.attention.segments import (
    Attend,
    PackedSegments,
    Scores,
    attend_by_scores,
    gathering_again,
)
from nemo_aligner.models.internals import gpu_flash_attention
from nemo_aligner.models.layers import learns
from nemo_aligner.models.rotary import rotate, rotation_of
from nemo_aligner.models.shape import ModelShape


class PackedAttention(MegatronModule):
    """Core attention of ``query [T, 1, heads, c]`` on ``key``, ``value [T, 1, groups, c]``.

    Rotates query and key to their positions, if its layer does; then each segment attends causally
    to itself and to its chain of prefixes. Returns ``[T, 1, heads * c]``.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, shape: ModelShape, **unused: Any
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.scores = Scores(
            shape.softmax_scale, shape.window_of(layer_number), shape.attn_logit_softcapping
        )
        self.rotation = rotation_of(shape, layer_number)
        is_ring = config.cp_comm_type == ContextExchange.p2p.value
        self.is_ring = is_ring and why_gathered(shape, config.params_dtype) is None

    @property
    def has_kernel(self) -> bool:
        """True on a GPU where one kernel takes whole packs."""
        config, scores = self.config, self.scores
        if why_no_kernel(config.params_dtype, config.kv_channels) is not None:
            return False
        return varlen_kernel(scores.window is not None, scores.soft_cap is not None) is not None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **unused: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            raise ValueError("attention needs the bounds of the packed sequences")
        if self.rotation is not None:
            tables = packed_seq_params.tables[self.rotation]
            query, key = (rotate(each, *tables) for each in (query, key))
        query, key, value = (each.squeeze(1) for each in (query, key, value))
        return self.attend(query, key, value, packed_seq_params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments) -> Tensor:
        """Attend as ``forward`` does, by rotated queries ``[T, heads, c]`` and keys."""
        scores = self.scores
        if segments.query_scale is not None:
            query = query * segments.query_scale
        if self._goes_round(segments):
            return self._read(ring.attend(query, key, value, segments, scores), segments)
        # Only in training: in inference the choice of kernel must not depend on the pack.
        if learns(self) and scores.window is not None and scores.window >= segments.max_kv_length:
            scores = replace(scores, window=None)
        attend = _attention_for(query, scores)
        if segments.share is not None and learns(self):
            laid, index = segments, segments.share.gathered
            if attend not in (_attend_on_cpu, _attend_one_by_one):
                laid, index = segments.remembered("laid out", segments.laid_out)
            with gathering_again(key, value, index) as (key, value):
                return self._read(attend(query, key, value, laid, scores), segments)
        key, value = segments.gathered(key, value)
        key, value = segments.with_cached(self.layer_number, key, value)
        return self._read(attend(query, key, value, segments, scores), segments)

    def infer_on_cpu(self, turning: Tensor, value: Tensor, segments: PackedSegments) -> Tensor:
        """Attend without gradients, with bits that the pack does not change.

        Args:
            turning: ``[T, groups, repeats + 1, c]``: of each group its query heads, then its key;
                may be overwritten.
            value: ``[T, groups, c]``.
        """
        has_kernel = cpu_inference.can_attend(turning, self.scores)
        if self.rotation is not None:
            turn = kernels.rotate if has_kernel else rotate
            turned = turn(turning, *segments.tables[self.rotation])
        else:
            turned = turning if has_kernel else turning.contiguous()
        if segments.query_scale is not None:
            turned[:, :, :-1] *= segments.query_scale[..., None]
        if self._goes_round(segments):
            query, key = turned[:, :, :-1].flatten(1, 2), turned[:, :, -1]
            return self._read(ring.attend(query, key, value, segments, self.scores), segments)
        attend = cpu_inference.attend_by_kernel if has_kernel else cpu_inference.attend
        out = attend(turned, value, self.layer_number, segments, self.scores)
        return self._read(out, segments)

    def infer_on_gpu(self, turning: Tensor, value: Tensor, segments: PackedSegments) -> Tensor:
        """``infer_on_cpu`` on a GPU, whose kernels read keys and values where they lie."""
        if self.rotation is not None:
            turning = rotate(turning, *segments.tables[self.rotation])
        query, key = turning[:, :, :-1].flatten(1, 2), turning[:, :, -1]
        return self.attend(query, key, value, segments)

    def _goes_round(self, segments: PackedSegments) -> bool:
        """False also beside a prefix cache: of what it has, each rank has the whole texts."""
        return self.is_ring and segments.share is not None and segments.cached is None

    def _read(self, attended: Tensor, segments: PackedSegments) -> Tensor:
        """``[T, heads, c] -> [T, 1, heads * c]``."""
        return attended.flatten(1).unsqueeze(1)


class LastTokenAttention(PackedAttention):
    """PackedAttention that returns the rows ``[R, 1, heads * c]`` at ``segments.last_token``."""

    def _read(self, attended: Tensor, segments: PackedSegments) -> Tensor:
        return super()._read(attended[segments.last_token], segments)


def _attention_for(query: Tensor, scores: Scores) -> Attend:
    """Choose the fastest kernel that fits."""
    if scores.soft_cap is None and query.is_cpu and scores.window is None:
        return _attend_on_cpu
    kernel = None
    if query.is_cuda and why_no_kernel(query.dtype, query.size(-1)) is None:
        kernel = varlen_kernel(scores.window is not None, scores.soft_cap is not None)
    return kernel or _attend_one_by_one


def slow_attention(shape: ModelShape, dtype: torch.dtype) -> str | None:
    """Describe why attention is slow on this GPU; None if a kernel takes whole packs."""
    if not torch.cuda.is_available():
        return None
    why = why_no_kernel(dtype, shape.kv_channels)
    if why is None:
        has_cap = shape.attn_logit_softcapping is not None
        windows = {shape.window_of(number) is not None for number in range(1, shape.num_layers + 1)}
        if all(varlen_kernel(with_window, has_cap) is not None for with_window in windows):
            return None
        wanted = "logit soft-capping" if has_cap else "sliding windows"
        why = f"torch {torch.__version__} has no kernel for {wanted}: install flash-attn >= 2.6"
    if shape.attn_logit_softcapping is None and not takes_equal_heads(dtype, shape.kv_channels):
        why += "; SDPA has no fused kernel for it either, and scores are made twice"
    return f"attention runs one segment at a time, which is slow: {why}"


def why_gathered(shape: ModelShape, dtype: torch.dtype) -> str | None:
    """Say why keys and values cannot go round a ring; None if they can.

    Results are merged by their log-sum-exp, so a kernel has to give it, and to be given it.
    """
    if shape.attn_logit_softcapping is not None:
        return "no kernel of torch's has logit soft-capping"
    if not torch.cuda.is_available():
        return None
    layers = range(1, shape.num_layers + 1)
    has_window = any(shape.window_of(number) is not None for number in layers)
    if has_window and "window_size" not in _varlen_parameters():
        return f"torch {torch.__version__} has no kernel for sliding windows"
    return why_no_kernel(dtype, shape.kv_channels)


def copies_keys(shape: ModelShape, dtype: torch.dtype) -> bool:
    """Tell if attention on this GPU copies keys and values for each query head; for the planner."""
    is_grouped = shape.num_query_groups < shape.num_attention_heads
    return (
        is_grouped
        and shape.attn_logit_softcapping is None
        and slow_attention(shape, dtype) is not None
        and takes_equal_heads(dtype, shape.kv_channels)
    )


def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    lengths, prefixes = segments.all_lengths, segments.prefixes
    return cpu_training.attend(query, key, value, lengths, prefixes, scores.scale, segments.queries)


def _attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Attend segment by segment where no kernel takes a whole pack."""
    attend_segment = _way_of_segments(query, key, scores)
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
    for part, q in zip(parts, queries, strict=True):
        chain, own = segments.chain(part), part.segment
        k, v = (x[own][:, :, : part.end] for x in (keys, values))
        if chain:
            k, v = (
                torch.cat([*(x[i] for i in chain), its], dim=2)
                for x, its in ((keys, k), (values, v))
            )
        mask: Tensor | None = None
        if scores.window is not None or scores.soft_cap is not None:
            mask = _mask(q, k, segments, scores)
        elif chain or part.start:
            is_fused = attend_segment in (_by_sdpa, _with_equal_heads) and not q.is_cpu
            sizes = q.size(2), k.size(2)
            mask = _causal_bias(*sizes) if is_fused else _mask(q, k, segments, scores)
        pieces.append(attend_segment(q, k, v, mask, scores))
    return torch.cat(pieces, dim=2).squeeze(0).transpose(0, 1)


_AttendSegment = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scores], Tensor]
_BLOCK_SCORES = 2**26  # 256 MiB of fp32
_SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _way_of_segments(query: Tensor, key: Tensor, scores: Scores) -> _AttendSegment:
    """Choose a per-segment kernel that keeps little for its backward; see ``takes_equal_heads``."""
    if scores.soft_cap is not None:
        return _recomputed if query.is_cpu else partial(_in_blocks, attend_by_scores)
    if query.is_cpu:
        return _by_sdpa
    if not takes_equal_heads(query.dtype, query.size(-1)):
        return partial(_in_blocks, _by_sdpa)
    return _by_sdpa if query.size(1) == key.size(1) else _with_equal_heads


def _by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    # Without cuDNN's kernel: it gave wrong gradients to segments of a length that an earlier pack
    # had, too (torch 2.11, H200), probably by a plan that was cached for other strides.
    with sdpa_kernel(_SDPA_KERNELS) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=mask is None,
            scale=scores.scale,
            enable_gqa=query.size(1) != key.size(1),
        )


def _with_equal_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Call SDPA with keys and values repeated for every query head.

    The memory-efficient kernel takes no grouped heads. The copies, ``2 * m * heads * c`` numbers,
    are kept for the backward; the math kernel would keep ``heads * n * m`` scores.
    """
    per_group = query.size(1) // key.size(1)
    key, value = (each.repeat_interleave(per_group, dim=1) for each in (key, value))
    return _by_sdpa(query, key, value, mask, scores)


def _recomputed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    return _without_keeping(attend_by_scores, query, key, value, mask, scores)


def _in_blocks(
    attend: _AttendSegment,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scores: Scores,
) -> Tensor:
    """Run ``attend`` on a few queries at a time, for kernels that materialise all their scores.

    The backward recomputes each block, so at most ``_BLOCK_SCORES`` scores exist at a time.
    """
    if mask is None:
        mask = _sees(query.size(2), key.size(2), None, query.device)
    rows = max(1, _BLOCK_SCORES // (query.size(1) * key.size(2)))
    parts = zip(query.split(rows, dim=2), mask.split(rows), strict=True)
    return torch.cat(
        [_without_keeping(attend, part, key, value, sees, scores) for part, sees in parts], dim=2
    )


def _without_keeping(attend: _AttendSegment, *arguments: Any) -> Tensor:
    # Nothing is drawn in attention, so there is no generator's state to bring back.
    return checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False)


def _causal_bias(queries: int, keys: int) -> CausalBias:
    """Build torch's causal bias whose last query stands at the last key, for SDPA on a GPU.

    A mask would make a reward in fp32 depend on its batch: with one, the memory-efficient kernel
    multiplies scores by their scale before it adds the mask, and without one in the exponent. By
    this object it is told the kind of mask, as by ``is_causal``, which a text without a shared or
    cached prefix gets. Where the kernel does not run, SDPA gets the mask itself.
    """
    bias = causal_lower_right(1, 1)
    # Set afterwards: torch's constructor allocates 8 bytes of host memory for each query and key.
    bias.seq_len_q, bias.seq_len_kv = queries, keys
    return bias


def _mask(query: Tensor, key: Tensor, segments: PackedSegments, scores: Scores) -> Tensor:
    """Mask ``[n, m]``: bool on a CPU or with a soft cap, else the float mask that SDPA adds.

    From a bool mask SDPA would make the float one anew in each layer and keep it for the backward.
    Rows are 16 elements apart or a multiple, or the memory-efficient kernel would copy the mask.
    """
    size = query.size(2), key.size(2)
    if query.is_cpu:
        return _sees(*size, scores.window, query.device)

    def make() -> Tensor:
        sees = _sees(*size, scores.window, query.device)
        if scores.soft_cap is not None:
            return sees
        apart = -(-size[1] // 16) * 16
        added = torch.full((size[0], apart), -torch.inf, dtype=query.dtype, device=query.device)
        return added[:, : size[1]].masked_fill_(sees, 0.0)

    return segments.remembered(("mask", *size, scores.window), make)


def _sees(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Mask ``[queries, keys]`` bool; the last query stands at the last key."""
    behind = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
    return mask if window is None else mask.triu(behind - window + 1)


# Variable-length flash attention on GPUs: torch's or flash-attn's, behind one signature.


_LARGEST_HEAD = 256
_AMPERE = (8, 0)
_VOLTA = 7


def why_no_kernel(dtype: torch.dtype, channels: int) -> str | None:
    """Say why FlashAttention 2 cannot run heads of so many channels on this GPU; None if it can."""
    if torch.cuda.get_device_capability() < _AMPERE:
        return "the GPU is older than Ampere"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} is not bf16 or fp16"
    if channels > _LARGEST_HEAD or channels % 8:
        return f"heads have {channels} channels, wanted a multiple of 8 up to {_LARGEST_HEAD}"
    return None


# How torch chooses SDPA's kernel on a GPU: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
# Flash attention takes grouped heads, in 16 bits, from Ampere on, up to 256 channels, and no mask
# (check_for_attn_mask). The memory-efficient kernel takes fp32, any number of channels, and masks,
# but needs as many key heads as query heads (check_batch_size_and_num_heads_dense<false>). cuDNN's
# takes only 16 bits. The rest falls to the math kernel, which keeps heads * n * m scores for the
# backward pass.
def takes_equal_heads(dtype: torch.dtype, channels: int) -> bool:
    """Tell if SDPA's memory-efficient kernel runs on this GPU, given ungrouped heads."""
    major = torch.cuda.get_device_capability()[0]
    is_half = dtype in (torch.bfloat16, torch.float16)
    if dtype is torch.bfloat16 and major < _AMPERE[0]:
        return False
    # minimum_gemm_alignment: 128 bits if there are tensor cores for the dtype.
    has_tensor_cores = major >= _AMPERE[0] or (is_half and major >= _VOLTA)
    alignment = 16 // dtype.itemsize if has_tensor_cores else 1
    return (is_half or dtype is torch.float32) and channels % alignment == 0


@lru_cache(maxsize=4)
def varlen_kernel(with_window: bool, with_cap: bool) -> Attend | None:
    """Find an installed kernel with these features; None if there is none.

    torch has one from 2.8 on, with windows from 2.11 on, and without soft-capping. flash-attn has
    all of it from 2.6 on.
    """
    known = _varlen_parameters()
    if not with_cap and (not with_window or "window_size" in known):
        # The public function without enable_gqa would need a copy of the keys for each query head.
        return _by_varlen_attn if "enable_gqa" in known else _by_operator
    return _by_flash_attn()


def _varlen_parameters() -> frozenset[str]:
    """Parameter names of torch's public function; empty before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _by_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Call the public function of torch 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(  # type: ignore[return-value]
        *_packed(query, key, value, segments, scores),
        scale=scores.scale,
        window_size=_window(scores),
        enable_gqa=query.size(1) != key.size(1),
    )


def _by_operator(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Call the operator below it, which takes grouped heads in torch 2.8 to 2.11."""
    windows: dict[str, Any] = {}
    if scores.window is not None:
        before, after = _window(scores)
        windows = {"window_size_left": before, "window_size_right": after}
    return gpu_flash_attention(
        *_packed(query, key, value, segments, scores),
        dropout_p=0.0,
        is_causal=scores.window is None,
        return_debug_mask=False,
        scale=scores.scale,
        **windows,
    )[0]


def _by_flash_attn() -> Attend | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    if "softcap" not in inspect.signature(flash_attn_varlen_func).parameters:
        return None

    def attend(
        query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
    ) -> Tensor:
        return flash_attn_varlen_func(
            *_packed(query, key, value, segments, scores),
            softmax_scale=scores.scale,
            causal=True,
            window_size=_window(scores),
            softcap=scores.soft_cap or 0.0,
        )

    return attend


def _packed(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """Common arguments: query, keys and values with their prefixes, bounds, and largest lengths.

    These kernels align the causal mask to the end of the keys, as prefixes require.
    """
    if segments.kv_index is None:
        if torch.is_grad_enabled():
            # A saved view would keep the projection's whole output until the backward.
            value = value.contiguous()
    else:
        key, value = key[segments.kv_index], value[segments.kv_index]
    bounds = segments.cu_seqlens, segments.kv_cu_seqlens
    # Upper bounds select the kernel. Exact ones would make it depend on the pack: with one query
    # per sequence they split the keys, and a window as long as the keys is dropped.
    most_keys = max(segments.max_kv_length, 1 + (scores.window or 0))
    return query, key, value, *bounds, max(2, segments.max_length), most_keys


def _window(scores: Scores) -> tuple[int, int]:
    """Number of keys visible before a query's own (-1 for all) and after it."""
    return (-1 if scores.window is None else scores.window - 1), 0
