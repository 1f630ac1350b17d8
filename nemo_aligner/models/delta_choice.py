"""Choose the kernels that train Gated DeltaNets, as ``model.linear_attention_kernels`` says.

A trial on a small pack checks flash-linear-attention's kernels before the first step.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from nemo_aligner.config.kernels import DeltaChoice
from nemo_aligner.distributed.collectives import current_device, raise_everywhere
from nemo_aligner.models.chunk_tree import ChunkTree
from nemo_aligner.models.flash_delta import MAX_KEY_CHANNELS, FlashDelta, load_kernel
from nemo_aligner.models.gated_delta import DeltaIntraChunk, Inputs
from nemo_aligner.models.kernel_trial import check_deviations, relative_deviations
from nemo_aligner.models.linear_attention import GatedDeltaNet, advance_levels
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape, Mamba2Shape
from nemo_aligner.utils.errors import ConfigError, one_line

SETTING = "model.linear_attention_kernels"
# The trial's pack: two samples that share a prefix of 130 tokens, and a third sample.
_TRIED_LENGTHS, _TRIED_PREFIXES = (130, 40, 70, 100), (-1, 0, 0, -1)


def use_delta_kernel(model: GPTRewardModel, choice: DeltaChoice, shape: ModelShape) -> None:
    """Make ``model`` train its Gated DeltaNets with the kernels in ``choice``.

    Collective unless ``choice`` is torch.

    Raises:
        ConfigError: on some rank they cannot run, or a trial in the sizes of the layers failed.
    """
    if choice is DeltaChoice.torch:
        return
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
    dtype, device = model.config.params_dtype, current_device()

    def load_and_try() -> FlashDelta:
        check_delta_choice(choice, shape, dtype, device)
        try:
            kernel = load_kernel()
            for layer in layers[:1]:  # all have the same sizes; a pipeline stage may have none
                try_kernel(kernel, layer.shape, layer.key_heads, dtype, device)
        except Exception as error:
            raise _make_error(f"its trial failed: {one_line(error)}") from error
        return kernel

    kernel = raise_everywhere(load_and_try)
    model.delta_kernel = kernel
    for layer in layers:
        layer.delta_kernel = kernel


def check_delta_choice(
    choice: DeltaChoice, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Check that the kernels in ``choice`` are installed and support the model; compute nothing.

    Raises:
        ConfigError: they are not installed, or do not support the model, its dtype or the device.
    """
    if choice is DeltaChoice.torch:
        return
    layer, reason = shape.linear_attention, None
    if not isinstance(layer, LinearAttentionShape) or isinstance(layer, Mamba2Shape):
        reason = "the model has no Gated DeltaNet layers"
    elif device.type != "cuda":
        reason = f"its kernels are for GPUs, and this process uses a {device.type.upper()}"
    elif dtype is torch.float32:
        reason = "it multiplies fp32 in TF32, and trainer.precision is fp32 (bf16 would work)"
    elif layer.key_head_dim > MAX_KEY_CHANNELS:
        reason = (
            f"linear_key_head_dim is {layer.key_head_dim}, and its kernels support up to "
            f"{MAX_KEY_CHANNELS}"
        )
    elif find_spec("fla") is None or find_spec("triton") is None:
        reason = "it is not installed (pip install 'megatron-reward[gpu]')"
    if reason is not None:
        raise _make_error(reason)


def _make_error(reason: str) -> ConfigError:
    return ConfigError(
        f"{SETTING}: {DeltaChoice.flash_linear_attention.value} cannot be used: {reason}. "
        f"Choose {DeltaChoice.torch.value}."
    )


def try_kernel(
    kernel: FlashDelta,
    shape: LinearAttentionShape,
    key_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compare a small pack's outputs and gradients to those of torch.

    Some versions of Triton compile kernels that compute wrong gradients; flash-linear-attention
    rejects those that it knows of in its first backward pass. The trial also makes it compile and
    time its tiles for these sizes, so the first step does not have to.

    Raises:
        RuntimeError: an output or a gradient differs by more than rounding explains.
    """
    check_deviations(measure_deviations(kernel, shape, key_heads, dtype, device))


def measure_deviations(
    kernel: FlashDelta,
    shape: LinearAttentionShape,
    key_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, float]:
    """Measure how outputs and gradients of a pack with shared prefixes deviate from torch's.

    Returns:
        Root mean square of the difference, relative to that of torch's result, by name.
    """
    tree = ChunkTree.of(_TRIED_LENGTHS, _TRIED_PREFIXES, 0, device, has_runs=True)
    runs = tree.runs
    assert runs is not None
    tokens, factors = _draw_tokens(shape, key_heads, dtype, device)

    def by_torch(inputs: Inputs) -> Tensor:
        return advance_levels(DeltaIntraChunk.of(inputs), tree.levels)

    by_kernel = partial(kernel.compute, runs=runs, dtype=dtype)
    results = []
    for order, compute in ((tree, by_torch), (runs, by_kernel)):
        leaves = [tensor.clone().requires_grad_() for tensor in tokens]
        with torch.enable_grad():
            # The last row stands for the rows beyond a sample's end, as in linear_attention.py.
            chunks = Inputs(*(leaf[order.rows].movedim(1, 3) for leaf in leaves))
            output = compute(chunks).movedim(3, 1).flatten(0, 1)[order.places]
            gradients = torch.autograd.grad((output * factors).sum(), leaves)
        results.append((output.detach(), *gradients))
    names = ("output", *(f"gradient of {field}" for field in Inputs._fields))
    return relative_deviations(names, *results)


def _draw_tokens(
    shape: LinearAttentionShape, key_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Draw inputs ``[T + 1, h, r, ...]`` of tokens, and factors of the loss ``[T, h, r, v]``."""
    generator = torch.Generator().manual_seed(0)  # leaves the random state of the run alone
    count, repeats = sum(_TRIED_LENGTHS), shape.values_per_key

    def draw(*size: int) -> Tensor:
        return torch.randn(count + 1, key_heads, *size, generator=generator)

    heads = [draw(1, shape.key_head_dim), draw(1, shape.key_head_dim)]
    heads.append(draw(repeats, shape.value_head_dim))
    # Both compute with the same inputs, so that only the matmuls are rounded differently.
    tokens = [tensor.to(dtype).float() for tensor in heads]
    tokens += [-0.1 * draw(repeats).abs(), draw(repeats).sigmoid()]
    factors = draw(repeats, shape.value_head_dim)[:-1]
    return [tensor.to(device) for tensor in tokens], factors.to(device)
