"""AdamW through megatron-core's distributed optimizer, and its learning rate over the steps."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    distrib_optimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_aligner.config.model import OptimConfig
from nemo_aligner.parallel.host_memory import host_zeros
from nemo_aligner.training.optimizer.host_moments import MOMENTS, HostMoments
from nemo_aligner.training.optimizer.megatron_internals import (
    load_step_counts,
    read_step_counts_at_once,
)
from nemo_aligner.training.optimizer.optimizer import MIN_LOSS_SCALE, Optimizer
from nemo_aligner.training.optimizer.state import gather_in_reused_memory, load_own_shard

# Times the learning rate, for numbers that an objective learns.
_OBJECTIVE_LR = 100.0


def build_optimizer(
    model: DistributedDataParallel, config: OptimConfig, clip_grad: float, total_steps: int
) -> Optimizer:
    """The optimizer of ``model``'s trainable parameters, wired into Megatron's schedules.

    ``clip_grad`` 0 does not clip. Norms' weights do not decay.

    Raises:
        ConfigError: see ``SchedulerConfig.last_decay_step``.
    """
    model_config = model.module.config
    settings = _settings(model_config, config, clip_grad)
    optimizer = get_megatron_optimizer(settings, [model], _groups(settings))
    for part in optimizer.chained_optimizers:
        _create_moments(part, on_host=config.cpu_offload)
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            _mend_torch_adamw(part)
        gather_in_reused_memory(part)
        load_own_shard(part)
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss
    parts = optimizer.chained_optimizers if config.cpu_offload else ()
    offloaded = [HostMoments(part.optimizer) for part in parts]
    return Optimizer(optimizer, _build_scheduler(optimizer, config, total_steps), offloaded)


def _settings(
    model_config: TransformerConfig, config: OptimConfig, clip_grad: float
) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.sched.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        bf16=model_config.bf16,
        fp16=model_config.fp16,
        # Halved from the second overflow on, doubled after this many steps without one.
        initial_loss_scale=2.0**16,
        min_loss_scale=MIN_LOSS_SCALE,
        loss_scale_window=1000,
        hysteresis=2,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=True,
        clip_grad=clip_grad,
    )


def _groups(settings: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    # megatron-core loses count of a group's parameters where some are fp32 and some are not, so the
    # fp32 head gets a group of its own.
    in_fp32 = ParamPredicate(
        "in_fp32", lambda each: each.dtype is torch.float32 and not _is_of_objective(each)
    )
    # A logarithm has further to go than a weight.
    of_objective = ParamPredicate("of_objective", _is_of_objective)
    faster = ParamGroupOverride(
        max_lr=_OBJECTIVE_LR * settings.lr, min_lr=_OBJECTIVE_LR * (settings.min_lr or 0.0)
    )
    return {
        **get_standard_config_overrides(settings),
        ParamKey(predicate=in_fp32): ParamGroupOverride(max_lr=settings.lr),
        ParamKey(predicate=of_objective): faster,
    }


def _is_of_objective(parameter: torch.nn.Parameter) -> bool:
    """Whether it is a number that a loss learns, and no weight."""
    return getattr(parameter, "is_of_objective", False)


def _build_scheduler(
    optimizer: Any, config: OptimConfig, total_steps: int
) -> OptimizerParamScheduler:
    warmup = config.sched.warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        # As NeMo warms up: step k of w (from 1) has k / (w + 1) of the rate, so none has zero.
        init_lr=config.lr / (warmup + 1),
        max_lr=config.lr,
        min_lr=config.sched.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=config.sched.last_decay_step(total_steps),
        lr_decay_style=config.sched.name.value,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )


def _create_moments(optimizer: Any, on_host: bool) -> None:
    """Adam makes its state at the first step, but a save and a load ask for it before."""
    parameters = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
    wanted = [each.detach() for each in parameters for _ in MOMENTS]
    zeros = iter(host_zeros(wanted) if on_host else map(torch.zeros_like, wanted))
    for parameter in parameters:
        optimizer.optimizer.state[parameter].update({key: next(zeros) for key in MOMENTS})


def _mend_torch_adamw(optimizer: Any) -> None:
    """Help megatron-core with torch's AdamW, which it uses where Apex and TE are absent."""
    for group in optimizer.optimizer.param_groups:
        group["fused"] = True  # one pass over the state instead of a dozen
        for parameter in group["params"]:
            state = optimizer.optimizer.state[parameter]
            state["step"] = torch.tensor(0.0, device=parameter.device)
    load_step_counts(optimizer)
    read_step_counts_at_once(optimizer)
