"""Attention of a whole pack on a GPU by the packages flash-attn, FlashAttention 3 and flash-attn-4.

flash-attn (FlashAttention 2) supports windows and soft caps since its version 2.6; it computes what
torch's own kernels do not support. FlashAttention 3 is built from source, and is for Hopper.
flash-attn-4 is a package on PyPI whose kernels are compiled at their first use; it is for Hopper
and Blackwell. These two are used only where ``model.attention_kernels`` names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.config.kernels import AttentionChoice
from nemo_aligner.models.attention.segments import PackedSegments, Scores
from nemo_aligner.models.attention.varlen import Tensors, packed_arguments, window_of


@dataclass(frozen=True)
class _Package:
    """A package that ``model.attention_kernels`` can name.

    Attributes:
        module: the module that has ``flash_attn_varlen_func``.
        distribution: the name under which pip installs it.
        capabilities: first numbers of the compute capabilities of GPUs that it can train on.
        installation: how to install it.
    """

    module: str
    distribution: str
    capabilities: tuple[int, ...]
    installation: str


_HOPPER, _BLACKWELL = (9,), (10, 11, 12)
_PACKAGES = {
    AttentionChoice.flash_attn_3: _Package(
        "flash_attn_interface",
        "flash_attn_3",
        _HOPPER,
        "build it from the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    AttentionChoice.flash_attn_4: _Package(
        "flash_attn.cute",
        "flash-attn-4",
        _HOPPER + _BLACKWELL,
        "pip install 'megatron-reward[flash-attention]'",
    ),
}


def has_flash_attn(with_window: bool) -> bool:
    """Tell if flash-attn with soft caps is installed; such versions also support windows."""
    return _flash_attn() is not None


@cache
def _flash_attn() -> Callable[..., Tensor] | None:
    """Return flash-attn's function; None if it is not installed, or has no soft caps."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    has_caps = "softcap" in inspect.signature(flash_attn_varlen_func).parameters
    return flash_attn_varlen_func if has_caps else None


def by_flash_attn(tensors: Tensors, segments: PackedSegments, scores: Scores) -> Tensor:
    """Attend with the package flash-attn, which supports windows and soft caps.

    Arguments and result are those of ``varlen.by_public_function``.
    """
    attend = _flash_attn()
    assert attend is not None
    query, key, value, _ = tensors
    return attend(
        *packed_arguments(query, key, value, segments, scores),
        softmax_scale=scores.scale,
        causal=True,
        window_size=window_of(scores),
        softcap=scores.soft_cap or 0.0,
    )


@cache
def why_unavailable(choice: AttentionChoice) -> str | None:
    """Return why FlashAttention 3 or flash-attn-4 cannot run on this machine; None if it can."""
    package = _PACKAGES[choice]
    major, minor = torch.cuda.get_device_capability()
    if major not in package.capabilities:
        needed = " or ".join(f"{number}.x" for number in package.capabilities)
        return f"it needs compute capability {needed}, and this GPU has {major}.{minor}"
    # Looking for the module is not enough: flash-attn 2.8 has an older one of flash-attn-4's name,
    # and the search imports flash-attn, which may be built for another torch and fail.
    try:
        version(package.distribution)
    except PackageNotFoundError:
        return f"it is not installed ({package.installation})"
    return None


def available_packages() -> tuple[AttentionChoice, ...]:
    """List the packages that this machine's GPU can use; none without a GPU."""
    if not torch.cuda.is_available():
        return ()
    return tuple(choice for choice in _PACKAGES if why_unavailable(choice) is None)


@cache
def load_function(choice: AttentionChoice) -> Callable[..., Any]:
    """Import the ``flash_attn_varlen_func`` of FlashAttention 3 or flash-attn-4.

    Raises:
        ImportError: the package or one of its dependencies is missing.
    """
    function: Callable[..., Any] = import_module(_PACKAGES[choice].module).flash_attn_varlen_func
    return function


def by_flash_attn_3(tensors: Tensors, segments: PackedSegments, scores: Scores) -> Tensor:
    """Attend with FlashAttention 3, which supports windows and soft caps.

    Arguments and result are those of ``varlen.by_public_function``.
    """
    return _call(AttentionChoice.flash_attn_3, tensors, segments, scores, window_of(scores))


def by_flash_attn_4(tensors: Tensors, segments: PackedSegments, scores: Scores) -> Tensor:
    """Attend with flash-attn-4, which supports windows, soft caps and attention sinks.

    Arguments and result are those of ``varlen.by_public_function``.
    """
    keys_before, keys_after = window_of(scores)
    # Here None means all keys; a negative number would be a window.
    window = (None, None) if scores.window is None else (keys_before, keys_after)
    return _call(
        AttentionChoice.flash_attn_4, tensors, segments, scores, window, learnable_sink=tensors[3]
    )


def _call(
    choice: AttentionChoice,
    tensors: Tensors,
    segments: PackedSegments,
    scores: Scores,
    window: tuple[int | None, int | None],
    **options: Any,
) -> Tensor:
    query, key, value, _ = tensors
    arguments = packed_arguments(query, key, value, segments, scores)
    query, key, value, query_bounds, key_bounds, max_queries, max_keys = arguments
    # num_splits=1: if a sequence's keys were split into a number of parts that depends on the pack,
    # so would the bits of its reward.
    output = load_function(choice)(
        query,
        key,
        value,
        cu_seqlens_q=query_bounds,
        cu_seqlens_k=key_bounds,
        max_seqlen_q=max_queries,
        max_seqlen_k=max_keys,
        softmax_scale=scores.scale,
        causal=True,
        window_size=window,
        softcap=scores.soft_cap or 0.0,
        num_splits=1,
        **options,
    )
    # flash-attn-4 and early versions of FlashAttention 3 also return the log-sum-exp.
    attended: Tensor = output[0] if isinstance(output, tuple) else output
    return attended
