"""Choose the library of attention kernels, as ``model.attention_kernels`` says.

A trial on a small pack compares the library's kernels to torch's before a model uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.config.kernels import AttentionChoice
from nemo_aligner.distributed.collectives import current_device, is_main
from nemo_aligner.models.attention import flash_packages
from nemo_aligner.models.attention.backends import Case, Heads, choose_backend, gpu_cases
from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.attention.segments import PackedSegments
from nemo_aligner.models.attention.varlen import why_no_kernel
from nemo_aligner.models.kernel_trial import check_deviations, relative_deviations
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

SETTING = "model.attention_kernels"

# The trial's pack: two samples that share a prefix of 130 tokens, and a third sample.
_TRIED_LENGTHS, _TRIED_GROUPS = (170, 200, 100), (Group(2, 130), Group(1, 0))


def try_attention_choice(choice: AttentionChoice, shape: ModelShape, dtype: torch.dtype) -> None:
    """Check that this rank can use the kernels in ``choice`` for a model, also by a trial.

    Layers that the kernels do not support will keep torch's kernels, and a warning names them.

    Raises:
        ConfigError: the kernels cannot run here, support no layer, or failed their trial.
    """
    device = current_device()
    check_attention_choice(choice, shape, dtype, device)
    if choice is AttentionChoice.torch:
        return
    supported, unsupported = _split_cases(choice, shape, dtype)
    if unsupported and is_main():
        reasons = dict.fromkeys(_why_unsupported(case) for case in unsupported)
        logger.warning(
            f"{SETTING}: {choice.value} does not support some layers, which keep torch's kernels: "
            + "; ".join(reasons)
        )
    try:
        for case in supported:
            try_kernels(case, device)
    except Exception as error:
        raise _make_error(choice, f"its trial failed: {one_line(error)}") from error


def use_attention_kernels(model: torch.nn.Module, choice: AttentionChoice) -> None:
    """Make the layers of ``model`` compute attention with the kernels in ``choice``."""
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.kernels = choice


def check_attention_choice(
    choice: AttentionChoice, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Check that the kernels in ``choice`` are installed and support a layer; compute nothing.

    Raises:
        ConfigError: they are not installed, or do not support the model, its dtype or the device.
    """
    if choice is not AttentionChoice.torch:
        reason = _why_unusable(choice, shape, dtype, device)
        if reason is not None:
            raise _make_error(choice, reason)


def _make_error(choice: AttentionChoice, reason: str) -> ConfigError:
    return ConfigError(
        f"{SETTING}: {choice.value} cannot be used: {reason}. Choose {AttentionChoice.torch.value}."
    )


def _why_unusable(
    choice: AttentionChoice, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> str | None:
    if device.type != "cuda":
        return f"its kernels are for GPUs, and this process uses a {device.type.upper()}"
    reason = flash_packages.why_unavailable(choice)
    supported, unsupported = _split_cases(choice, shape, dtype)
    return reason or (None if supported else _why_unsupported(unsupported[0]))


def _split_cases(
    choice: AttentionChoice, shape: ModelShape, dtype: torch.dtype
) -> tuple[list[Case], list[Case]]:
    """List the distinct cases of the layers: those that the kernels compute, and the others."""
    cases = list(dict.fromkeys(gpu_cases(shape, dtype, choice)))
    supported = [case for case in cases if choose_backend(case).kernels is choice]
    return supported, [case for case in cases if case not in supported]


def _why_unsupported(case: Case) -> str:
    features = ", ".join(sorted(feature.value for feature in case.features))
    return why_no_kernel(case.dtype, case.channels) or f"it does not support {features}"


def try_kernels(case: Case, device: torch.device) -> None:
    """Compare a small pack's outputs and gradients to torch's, and check their batch invariance.

    Raises:
        RuntimeError: an output or a gradient differs by more than rounding explains, or the bits of
            a sample's output depend on the other samples.
    """
    check_deviations(measure_deviations(case, device))
    scored = replace(case, learns=False)
    inputs, last = _draw_inputs(case, device), _TRIED_LENGTHS[-1]
    together = _attend(scored, inputs, _make_segments(_TRIED_LENGTHS, _TRIED_GROUPS, device))
    alone = [tensor[-last:] if tensor.dim() == 3 else tensor for tensor in inputs]
    by_itself = _attend(scored, alone, _make_segments((last,), (Group(1, 0),), device))
    if not torch.equal(by_itself, together[-last:]):
        raise RuntimeError("the output of a sample depends on other samples")


def measure_deviations(case: Case, device: torch.device) -> dict[str, float]:
    """Measure how outputs and gradients of a pack with a shared prefix deviate from torch's.

    Returns:
        Root mean square of the difference, relative to that of torch's result, by name.
    """
    segments = _make_segments(_TRIED_LENGTHS, _TRIED_GROUPS, device)
    results = []
    for kernels in (AttentionChoice.torch, case.kernels):
        leaves = [tensor.clone().requires_grad_() for tensor in _draw_inputs(case, device)]
        with torch.enable_grad():
            output = _attend(replace(case, kernels=kernels, learns=True), leaves, segments)
            # A gradient that differs from token to token and from channel to channel.
            gradients = torch.autograd.grad(output, leaves, leaves[0].detach())
        results.append((output.detach(), *gradients))
    names = ("output", *(f"gradient of {of}" for of in ("queries", "keys", "values", "sinks")))
    return relative_deviations(names[: len(results[0])], *results)


def _make_segments(
    lengths: Sequence[int], groups: Sequence[Group], device: torch.device
) -> PackedSegments:
    batch = PackedBatch.pack([[0] * length for length in lengths], groups=groups)
    return PackedSegments.of(batch.to(device), device)


def _attend(case: Case, inputs: Sequence[Tensor], segments: PackedSegments) -> Tensor:
    query, key, value, *sinks = inputs
    heads = Heads(1, (query, key), value, *sinks)
    return choose_backend(case).attend(heads, segments, case)


def _draw_inputs(case: Case, device: torch.device) -> list[Tensor]:
    """Draw queries, keys and values of the trial's pack, and sinks if the case has them."""
    generator = torch.Generator().manual_seed(0)  # leaves the random state of the run alone
    prefix = _TRIED_GROUPS[0].prefix
    tokens = sum(_TRIED_LENGTHS) - prefix

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    kind: dict[str, Any] = {"device": device, "dtype": case.dtype}
    inputs = [
        draw(tokens, heads, case.channels).to(**kind)
        for heads in (case.query_heads, case.key_heads, case.key_heads)
    ]
    if case.scores.has_sinks:
        inputs.append(draw(case.query_heads).to(device))
    return inputs
