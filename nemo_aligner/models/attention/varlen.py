"""Variable-length flash attention on GPUs, behind one signature: torch's, or flash-attn's."""

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
    """Why FlashAttention 2's kernels refuse heads of so many channels on this GPU, if they do."""
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
# but as many heads of keys as of queries (check_batch_size_and_num_heads_dense<false>). cuDNN's
# takes 16 bits alone. What none of them takes goes to the math kernel, which keeps heads * n * m
# scores for the backward pass.
def takes_equal_heads(dtype: torch.dtype, channels: int) -> bool:
    """Whether SDPA's memory-efficient kernel takes this on this GPU, if no heads are grouped."""
    major = torch.cuda.get_device_capability()[0]
    is_half = dtype in (torch.bfloat16, torch.float16)
    if dtype is torch.bfloat16 and major < _AMPERE[0]:
        return False
    # minimum_gemm_alignment: 128 bits where there are tensor cores for the dtype.
    has_tensor_cores = major >= _AMPERE[0] or (is_half and major >= _VOLTA)
    alignment = 16 // dtype.itemsize if has_tensor_cores else 1
    return (is_half or dtype is torch.float32) and channels % alignment == 0


@lru_cache(maxsize=4)
def varlen_kernel(with_window: bool, with_cap: bool) -> Attend | None:
    """The kernel that has what is asked for; None where no installed one has.

    torch has it from 2.8 on, windows from 2.11 on, and no cap; flash-attn has all of them from 2.6
    on.
    """
    if not with_cap and (not with_window or _torch_has_windows()):
        return _by_torch()
    return _by_flash_attn()


def _varlen_parameters() -> frozenset[str]:
    """What torch's public function takes; nothing before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _torch_has_windows() -> bool:
    return "window_size" in _varlen_parameters()


def _by_torch() -> Attend:
    # Without groups its keys would be copied for each head: then the kernel itself is called.
    return _by_varlen_attn if "enable_gqa" in _varlen_parameters() else _by_operator


def _by_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """By torch 2.12's public function."""
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
    """By the operator behind it, which torch 2.8 to 2.11 have, with groups."""
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
    """What all of them begin with: the keys of every segment, its beginning's included, and bounds.

    The kernels' causal mask counts from the end of the keys, as it has to be here.
    """
    if segments.kv_index is None:
        # As a view the values would keep the projection's whole output until the backward pass.
        value = value.contiguous()
    else:
        key, value = key[segments.kv_index], value[segments.kv_index]
    bounds = segments.cu_seqlens, segments.kv_cu_seqlens
    # They choose by the lengths, which may be larger than they are: for one query a sequence they
    # split the keys, and a window that is no shorter than the keys is left out.
    most_keys = max(segments.max_kv_length, 1 + (scores.window or 0))
    return query, key, value, *bounds, max(2, segments.max_length), most_keys


def _window(scores: Scores) -> tuple[int, int]:
    """How many keys before a query's own it sees, -1 for all of them, and after it."""
    return (-1 if scores.window is None else scores.window - 1), 0
