"""Variable-length flash attention on GPUs: torch's or flash-attn's, behind one signature."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.models.attention.segments import Attend, PackedSegments, Scores
from nemo_aligner.models.internals import gpu_flash_attention

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
        # A saved view of the values would keep the projection's whole output until the backward.
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
