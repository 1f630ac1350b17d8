"""What of a model is trained, and how its gradients and weights travel."""

from __future__ import annotations

from itertools import zip_longest

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from nemo_aligner.errors import ConfigError
from nemo_aligner.models.reward_model import GPTRewardModel


def freeze_lower_layers(model: GPTRewardModel, count: int, num_layers: int) -> None:
    """Leave the embeddings and the first ``count`` layers as they are; 0 freezes nothing.

    Raises:
        ConfigError: ``count`` leaves no layer to train.
    """
    check_freezing(count, num_layers)
    if count == 0:
        return
    if model.pre_process:
        model.embedding.requires_grad_(False)
    for layer in model.decoder.layers:
        if layer.layer_number <= count:
            layer.requires_grad_(False)


def check_freezing(count: int, num_layers: int) -> None:
    """Refuse to freeze all of a model; raises as ``freeze_lower_layers``."""
    if count >= num_layers:
        raise ConfigError(f"model.freeze_layers: got {count}, wanted less than {num_layers}")


def wrap_for_training(
    model: GPTRewardModel, bucket_size: int | None = None
) -> DistributedDataParallel:
    """Megatron's data parallel wrapper: fp32 gradients, sharded for the distributed optimizer.

    Among several data parallel ranks the buffers are cut into buckets of about ``bucket_size``
    parameters (Megatron's choice by default). A bucket's gradients are reduced while those before
    it are computed, and its updated weights are gathered while those before it are used.
    """
    overlaps = parallel_state.get_data_parallel_world_size() > 1
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        bucket_size=bucket_size,
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    if overlaps:
        model.config.no_sync_func = wrapped.no_sync
        _gather_in_order_of_use(wrapped)
    return wrapped


def unwrap_after_training(wrapped: DistributedDataParallel) -> None:
    """Let go of model, gradients and process groups, in a process that goes on without them.

    Megatron hangs its hooks on nodes of autograd, and these hold the wrapper: a cycle that Python's
    collector cannot see. What the wrapper holds is therefore taken from it.
    """
    vars(wrapped).clear()


def _gather_in_order_of_use(wrapped: DistributedDataParallel) -> None:
    """Megatron goes through its buffers backwards, and has the fp32 head's at the beginning."""
    index = {parameter: i for i, parameter in enumerate(wrapped.module.parameters())}
    groups = sorted(wrapped.bucket_groups, key=lambda group: min(index[p] for p in group.params))
    for group, following in zip_longest(groups, groups[1:]):
        group.next_param_gather_bucket_group = following
