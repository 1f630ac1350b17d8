"""Choose the library of attention kernels, as ``model.attention_kernels`` says.

A trial on a small pack compares the library's kernels to torch's before a model uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.config.kernels import AttentionChoice, KernelChoices
from nemo_aligner.distributed.collectives import current_device, is_main, raise_everywhere
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

# The trial's pack: two samples that share a prefix of 130 tokens, and two others.
_TRIED_LENGTHS, _TRIED_GROUPS = (170, 200, 100, 8), (Group(2, 130), Group(1, 0), Group(1, 0))
_TRIED_WINDOW = 64  # smaller than the samples, which the window of a real model may not be
_NUM_SHORT = 300  # samples in a pack of short ones; more than a GPU has multiprocessors


def try_attention_choice(
    choices: KernelChoices, shape: ModelShape, dtype: torch.dtype, *, learns: bool
) -> None:
    """Check that all ranks can use the attention kernels in ``choices``, also by a trial.

    Layers that the kernels do not support will keep torch's kernels, and a warning names them.
    Collective unless ``choices`` names torch.

    Args:
        learns: the model will be trained, so try the gradients, too.

    Raises:
        ConfigError: on some rank the kernels cannot run, support no layer, or failed their trial.
    """
    if choices.attention is not AttentionChoice.torch:
        raise_everywhere(partial(_try_on_this_rank, choices, shape, dtype, learns=learns))


def _try_on_this_rank(
    choices: KernelChoices, shape: ModelShape, dtype: torch.dtype, *, learns: bool
) -> None:
    choice, device = choices.attention, current_device()
    check_attention_choice(choice, shape, dtype, device)
    supported, unsupported = _split_cases(choice, shape, dtype)
    if unsupported and is_main():
        reasons = dict.fromkeys(_why_unsupported(case) for case in unsupported)
        logger.warning(
            f"{SETTING}: {choice.value} does not support some layers, which keep torch's kernels: "
            + "; ".join(reasons)
        )
    try:
        for case in supported:
            try_kernels(replace(case, learns=learns), device, choices.batch_invariant)
    except Exception as error:
        raise _make_error(choice, f"its trial failed: {one_line(error)}") from error


def use_attention_kernels(model: torch.nn.Module, choice: AttentionChoice) -> None:
    """Make the layers of ``model`` compute attention with the kernels in ``choice``."""
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.library = choice


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
    supported = [case for case in cases if choose_backend(case).library is choice]
    return supported, [case for case in cases if case not in supported]


def _why_unsupported(case: Case) -> str:
    features = ", ".join(sorted(feature.value for feature in case.features))
    return why_no_kernel(case.dtype, case.channels) or f"it does not support {features}"


def try_kernels(case: Case, device: torch.device, batch_invariant: bool) -> None:
    """Compare a small pack's outputs to torch's, and its gradients if ``case`` learns.

    Args:
        batch_invariant: also check that the bits of a sample's output do not depend on the others.

    Raises:
        RuntimeError: an output or a gradient differs by more than rounding explains, or an output
            depends on other samples.
    """
    if case.scores.window is not None:
        window = min(case.scores.window, _TRIED_WINDOW)
        case = replace(case, scores=replace(case.scores, window=window))
    check_deviations(measure_deviations(case, device))
    if batch_invariant:
        _check_batch_invariance(replace(case, learns=False), device)


def measure_deviations(case: Case, device: torch.device) -> dict[str, float]:
    """Measure how the results of a pack with a shared prefix deviate from torch's.

    The results are the outputs, and the gradients if ``case`` learns.

    Returns:
        Root mean square of the difference, relative to that of torch's result, by name.
    """
    segments = _make_segments(_TRIED_LENGTHS, _TRIED_GROUPS, device)
    results = []
    for library in (AttentionChoice.torch, case.library):
        leaves = [tensor.clone().requires_grad_() for tensor in _draw_inputs(case, device)]
        with torch.set_grad_enabled(case.learns):
            output = _attend(replace(case, library=library), leaves, segments)
        gradients: tuple[Tensor, ...] = ()
        if case.learns:
            # A gradient that differs from token to token and from channel to channel.
            gradients = torch.autograd.grad(output, leaves, leaves[0].detach())
        results.append((output.detach(), *gradients))
    names = ("output", *(f"gradient of {of}" for of in ("queries", "keys", "values", "sinks")))
    return relative_deviations(names[: len(results[0])], *results)


def _check_batch_invariance(case: Case, device: torch.device) -> None:
    """Check the outputs of two samples in the trial's pack, alone, and in a pack of short ones.

    Kernels may choose their algorithm by the longest sample of a pack, or by the number of samples.

    Raises:
        RuntimeError: the bits of an output depend on the pack.
    """
    inputs = _draw_inputs(case, device)
    together = _attend(case, inputs, _make_segments(_TRIED_LENGTHS, _TRIED_GROUPS, device))
    short = _TRIED_LENGTHS[-1]
    end = len(together)
    for length, last, copies in (
        (_TRIED_LENGTHS[-2], end - short, 1),
        (short, end, 1),
        (short, end, _NUM_SHORT),
    ):
        rows = slice(last - length, last)
        sample = [
            tensor[rows].repeat(copies, 1, 1) if tensor.dim() == 3 else tensor for tensor in inputs
        ]
        segments = _make_segments((length,) * copies, (Group(1, 0),) * copies, device)
        for output in _attend(case, sample, segments).split(length):
            if not torch.equal(output, together[rows]):
                raise RuntimeError("the output of a sample depends on other samples")


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
