"""The choice between implementations of the pointwise operations."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

from nemo_aligner.config.model import PointwiseChoice
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels
from nemo_aligner.utils.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

SETTING = "model.pointwise_kernels"


def available_kernels(device: torch.device | None = None) -> tuple[PointwiseChoice, ...]:
    """List the implementations that can run on ``device``, by default this rank's."""
    return tuple(each for each in PointwiseChoice if why_unavailable(each, device) is None)


def why_unavailable(choice: PointwiseChoice, device: torch.device | None = None) -> str | None:
    """Say why an implementation cannot run on ``device``; None if it can."""
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
    """Build an implementation; packages that only it needs are imported here.

    Raises:
        ImportError: such a package is missing, or too old.
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
        choice: the setting; None is ``triton`` on a GPU where it works, and ``eager`` elsewhere.

    Raises:
        ConfigError: the stated choice cannot run here.
    """
    if choice is None:
        return _default(current_device().type)
    why = why_unavailable(choice)
    if why is None:
        try:
            return load_kernels(choice)
        except ImportError as error:
            why = one_line(error)
    usable = ", ".join(each.value for each in available_kernels() if each is not choice)
    raise ConfigError(
        f"{SETTING}: {choice.value} cannot be used: {why}. Choose one of {usable}, or null for the "
        "default of this device."
    )


@cache
def _default(kind: str) -> PointwiseKernels:
    """The default on a kind of device."""
    choice = PointwiseChoice.triton
    if kind != "cuda" or why_unavailable(choice, torch.device(kind)) is not None:
        return EAGER
    try:
        kernels = load_kernels(choice)
        # Triton compiles by the machine's C compiler, which may lack Python's headers.
        row = torch.zeros(1, 8, device=kind)
        kernels.rms_norm(row, row[0], 1e-5, 0.0, row.dtype)
    except Exception as error:
        logger.warning(
            "Triton cannot compile its kernels here, so %s=eager is used, which is slower: %s",
            SETTING,
            one_line(error),
        )
        return EAGER
    return kernels
