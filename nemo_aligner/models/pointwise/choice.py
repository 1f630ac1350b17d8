"""Choose between the implementations of the pointwise operations.

The setting ``model.pointwise_kernels`` names one. The default on a GPU is tried out before its use.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_aligner.config.kernels import PointwiseChoice
from nemo_aligner.distributed.collectives import agree, current_device, gpu_computes_bf16
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels
from nemo_aligner.utils.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

SETTING = "model.pointwise_kernels"


def available_kernels(device: torch.device | None = None) -> tuple[PointwiseChoice, ...]:
    """List the implementations that can run on ``device``, which defaults to this rank's device."""
    return tuple(choice for choice in PointwiseChoice if why_unavailable(choice, device) is None)


def why_unavailable(choice: PointwiseChoice, device: torch.device | None = None) -> str | None:
    """Return why an implementation cannot run on ``device``; None if it can."""
    kind = (device or current_device()).type
    if choice is PointwiseChoice.eager:
        return None
    if choice is PointwiseChoice.compile and kind == "cpu":
        return None
    if kind != "cuda":
        return f"its kernels are for GPUs, and this process uses a {kind.upper()}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if choice is PointwiseChoice.liger and find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed"
    return None


@cache
def load_kernels(choice: PointwiseChoice) -> PointwiseKernels:
    """Build an implementation; packages that only this implementation needs are imported here.

    Raises:
        ImportError: such a package is missing or too old.
    """
    if choice is PointwiseChoice.eager:
        return EAGER
    if choice is PointwiseChoice.compile:
        from nemo_aligner.models.pointwise.compiled import compiled_kernels

        return compiled_kernels()
    if choice is PointwiseChoice.liger:
        from nemo_aligner.models.pointwise.liger import LIGER

        return LIGER
    from nemo_aligner.models.pointwise.triton_kernels import TRITON

    return TRITON


def choose_kernels(choice: PointwiseChoice | None) -> PointwiseKernels:
    """Choose the implementation for this rank's device.

    Args:
        choice: the value of ``model.pointwise_kernels``. None chooses ``triton`` on a GPU where it
            works, and ``eager`` elsewhere.

    Raises:
        ConfigError: the implementation in ``choice`` cannot run here.
    """
    if choice is None:
        return _default_of_all_ranks(current_device())
    reason = why_unavailable(choice)
    if reason is None:
        try:
            return load_kernels(choice)
        except ImportError as error:
            reason = one_line(error)
    usable = ", ".join(
        available.value for available in available_kernels() if available is not choice
    )
    raise ConfigError(
        f"{SETTING}: {choice.value} cannot be used: {reason}. Choose one of {usable}, or null for "
        "the default of this device."
    )


def _default_of_all_ranks(device: torch.device) -> PointwiseKernels:
    """Return the default implementation; if one rank has to use ``eager``, all ranks do.

    Otherwise a reward would depend on which data parallel rank computes it.
    """
    kernels = _default(device.type)
    if device.type == "cuda" and dist.is_initialized() and agree(kernels is EAGER, device):
        return EAGER
    return kernels


@cache
def _default(kind: str) -> PointwiseKernels:
    """Return this rank's default implementation for a device type, ``cpu`` or ``cuda``."""
    choice = PointwiseChoice.triton
    if kind != "cuda" or why_unavailable(choice, torch.device(kind)) is not None:
        return EAGER
    try:
        # Triton needs the machine's C compiler, which may be missing or lack Python's headers.
        kernels = load_kernels(choice)
        try_kernels(kernels, torch.device(kind))
    except Exception as error:
        logger.warning(
            "Triton's kernels do not work here, so %s=eager is used, which is slower: %s",
            SETTING,
            one_line(error),
        )
        return EAGER
    return kernels


_TRIED_ROWS, _TRIED_WIDTH = 48, 256


def try_kernels(kernels: PointwiseKernels, device: torch.device) -> None:
    """Run all operations forward and backward on ``device``, and check their batch invariance.

    Raises:
        RuntimeError: a row's result is not bit-identical in a batch of one, or a kernel failed.
    """
    is_half = device.type != "cuda" or gpu_computes_bf16()
    dtype = torch.bfloat16 if is_half else torch.float32
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_TRIED_ROWS, 1, 2 * _TRIED_WIDTH, generator=generator)
    rows = rows.to(device, dtype)
    together = _results(kernels, rows)
    for number in (0, _TRIED_ROWS // 2, _TRIED_ROWS - 1):
        alone = _results(kernels, rows[number : number + 1])
        for name, result in alone.items():
            if not torch.equal(result[0], together[name][number]):
                raise RuntimeError(
                    f"{kernels.name}: the result of {name} for a row depends on other rows"
                )


def _results(kernels: PointwiseKernels, rows: Tensor) -> dict[str, Tensor]:
    """Compute each operation on ``rows [T, 1, 2 c]``, and the gradient of ``rows``, by name."""
    dtype = rows.dtype
    weight = torch.linspace(0.5, 1.5, rows.size(-1), device=rows.device, dtype=dtype)
    with torch.enable_grad():
        leaf = rows.detach().clone().requires_grad_()
        total, normed = kernels.add_rms_norm(leaf, leaf, weight, 1e-5, 0.0, dtype, 1.0)
        results = {
            "rms_norm": kernels.rms_norm(leaf, weight, 1e-5, 0.0, dtype),
            "add_rms_norm": normed,
            "sum": total,
            "gated_silu": kernels.gated_silu(leaf),
        }
        ones, places = rows.new_ones(len(rows), 1), torch.arange(len(rows), device=rows.device)
        results["sum_outputs"] = kernels.sum_outputs(leaf.squeeze(1), ones, places[:, None])
        if kernels.split_and_rotate is not None:
            # The rows hold four groups of heads with 32 channels each: two query heads, a key and a
            # value.
            angles = torch.ones(rows.size(0), 1, 1, 16, device=rows.device)
            tables = angles.cos().to(dtype), angles.sin().to(dtype)
            parts = kernels.split_and_rotate(leaf, *tables, 4, 32)
            results |= dict(zip(("query", "key", "value"), parts, strict=True))
        loss = torch.stack([result.float().sum() for result in results.values()]).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
    return {**results, "gradient": gradient}
