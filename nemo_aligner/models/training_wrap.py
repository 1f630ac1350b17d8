"""Prepare a reward model for training: freeze layers and routers, and wrap it in Megatron's DDP."""

from __future__ import annotations

from itertools import zip_longest

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from nemo_aligner.models.experts import routers
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.utils.errors import ConfigError


def freeze_lower_layers(model: GPTRewardModel, count: int, num_layers: int) -> None:
    """Freeze the embeddings and the first ``count`` layers; 0 freezes nothing.

    Layers that are recomputed are then counted from the first layer with a backward pass. Frozen
    layers have none, except in later pipeline stages, whose input needs a gradient.

    Raises:
        ConfigError: ``count`` leaves no layer to train.
    """
    check_freezing(count, num_layers)
    if count == 0:
        return
    for embedding in model.embedding_modules():
        embedding.requires_grad_(False)
    for layer in model.decoder.layers:
        if layer.layer_number <= count:
            layer.requires_grad_(False)
    if model.pre_process:
        num_recomputed = sum(layer.is_recomputed for layer in model.decoder.layers)
        model.recompute_layers(num_recomputed, first=count)


def set_routers(model: GPTRewardModel, *, trained: bool, aux_loss_coeff: float) -> None:
    """Freeze the routers of a mixture-of-experts model, or train them with an auxiliary loss.

    Args:
        trained: train the routers; else freeze them.
        aux_loss_coeff: factor of the auxiliary loss, see ``Router``.
    """
    for router in routers(model).values():
        for name, parameter in router.named_parameters():
            if name != "shared_gate":
                parameter.requires_grad_(trained)
        router.aux_loss_coeff = aux_loss_coeff


def check_freezing(count: int, num_layers: int) -> None:
    """Check that freezing ``count`` of ``num_layers`` layers leaves one to train.

    Raises:
        ConfigError: ``count`` leaves no layer to train.
    """
    if count >= num_layers:
        raise ConfigError(
            f"model.freeze_layers: got {count}, wanted less than {num_layers}, the number of layers"
        )


def wrap_for_training(
    model: GPTRewardModel, bucket_size: int | None = None
) -> DistributedDataParallel:
    """Wrap ``model`` in Megatron's DDP: fp32 gradients, sharded for the distributed optimizer.

    With several data parallel ranks the buffers are cut into buckets of about ``bucket_size``
    parameters; None lets Megatron choose the size. A bucket's gradients are reduced while those of
    earlier layers are computed, and its updated weights are gathered while earlier layers run.
    """
    # Context parallel ranks count here like data parallel ranks, because gradients are summed over
    # both.
    overlaps = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        bucket_size=bucket_size,
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    if overlaps:
        # Megatron's schedules apply no_sync_func to all micro-batches but the last. The last
        # backward pass then reduces the gradients of all micro-batches together.
        model.config.no_sync_func = wrapped.no_sync
        _gather_in_order_of_use(wrapped)
    return wrapped


def unwrap_after_training(wrapped: DistributedDataParallel) -> None:
    """Free the model, its gradients and process groups in a process that keeps running.

    Megatron's hooks on autograd nodes hold a reference to the wrapper. This reference cycle goes
    through C++, where Python's garbage collector cannot see it, so this function clears the
    wrapper's attributes.
    """
    vars(wrapped).clear()


def _gather_in_order_of_use(wrapped: DistributedDataParallel) -> None:
    """Make Megatron gather the buckets' weights in the order in which the forward pass needs them.

    Megatron goes through its buffers backwards, and would begin with the head's fp32 buffer, which
    is needed last.
    """
    index = {parameter: i for i, parameter in enumerate(wrapped.module.parameters())}
    every = wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups
    groups = sorted(every, key=lambda group: min(index[p] for p in group.params))
    for group, following in zip_longest(groups, groups[1:]):
        group.next_param_gather_bucket_group = following
