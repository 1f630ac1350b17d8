"""AdamW through megatron-core's distributed optimizer, and its learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor

from nemo_aligner.config.model import OptimConfig
from nemo_aligner.training.host_moments import MOMENTS, HostMoments, host_zeros

# The one form of the optimizer's state that any layout can read; of the ranks that hold the same
# piece of the model, one gathers it in host memory, not each.
_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
# What the optimizer has for each parameter, in fp32.
_STATE = ("param", *MOMENTS)
_COUNT = "steps"
# What a run that goes on takes from its settings and not from its checkpoint.
_SETTINGS = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps")
_MIN_LOSS_SCALE = 1.0
_SKIPPED = "skipped_steps"


@dataclass(frozen=True)
class Update:
    """What became of a step.

    Attributes:
        grad_norm: before clipping; NaN where fp16 overflowed.
        applied: the weights were updated.
        skipped: fp16 overflowed, as a lower loss scale may help; the weights are as they were.
            Neither applied nor skipped is a gradient that nothing helps; the weights are, too.
    """

    grad_norm: float
    applied: bool
    skipped: bool


class Optimizer:
    """Megatron's optimizer and its scheduler: one step, one learning rate, one saved state.

    ``skipped_steps`` counts the overflows of fp16 since the beginning of the run.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: OptimizerParamScheduler,
        offloaded: Sequence[HostMoments] = (),
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._offloaded = offloaded
        self.skipped_steps = 0

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @property
    def loss_scale(self) -> float | None:
        """What the next step's loss is multiplied by in fp16; None in fp32 and bf16."""
        return float(self._optimizer.get_loss_scale()) if self._optimizer.config.fp16 else None

    def step(self) -> Update:
        """Update the weights, if the gradient is finite; the same answer on every rank.

        As in Megatron's own loop, a skipped step does not move the learning rate.
        """
        scale = self.loss_scale
        # Megatron's step is taken apart: in fp32 and bf16 it would put a gradient that is not
        # finite into the weights, and tell of it afterwards.
        if self._optimizer.prepare_grads():
            skipped = scale is not None and scale > _MIN_LOSS_SCALE
            self.skipped_steps += skipped
            return Update(math.nan, applied=False, skipped=skipped)
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return Update(norm, applied=False, skipped=False)
        self._clip(norm)
        self._optimizer.step_with_ready_grads()
        self._scheduler.step(1)
        return Update(norm, applied=True, skipped=False)

    def finish_update(self) -> None:
        """Wait until every rank has all of the updated weights; every rank calls it.

        A training step needs no such call: it waits for the weights as it comes to them.
        """
        for part in self._optimizer.chained_optimizers:
            for model in part.model_chunks:
                if model.ddp_config.overlap_param_gather:
                    _finish_gathering(model)

    def _clip(self, norm: float) -> None:
        limit = self._optimizer.config.clip_grad
        for part in self._optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if limit > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        """Megatron's sharded view of the state, for the model's own such view.

        What is to be saved is a copy in host memory: on the first rank of a data parallel group
        12 bytes for each trained parameter that it holds. The next call writes into the same
        memory: by then, the last copy must have been saved.
        """
        self._count_steps_without_parameters()
        state = self._optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=dict(_SHARDING)
        )
        # Nothing to save on this rank; an empty entry would differ from the other ranks'.
        if not state["param_state"]:
            del state["param_state"]
        if "grad_scaler" in state:
            # Megatron compares what all ranks have in common, and takes two devices for two values.
            state["grad_scaler"]["scale"] = state["grad_scaler"]["scale"].cpu()
        state[_SKIPPED] = self.skipped_steps
        return state

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Take the state after ``step`` steps; learning rate and the like stay as configured."""
        # Not in the checkpoints of earlier versions, which knew no fp16.
        self.skipped_steps = int(state.pop(_SKIPPED, 0))
        updates = step - self.skipped_steps
        groups = self._optimizer.param_groups
        settings = [{key: group[key] for key in _SETTINGS} for group in groups]
        self._optimizer.load_state_dict(state)
        for moments in self._offloaded:
            moments.to_host()
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)
            if distrib_optimizer.HAVE_APEX_OR_TE:
                group["step"] = updates
        self._scheduler.num_steps = 0
        self._scheduler.step(updates)

    def _count_steps_without_parameters(self) -> None:
        """Give torch's AdamW a count on a rank where all is frozen; megatron-core asks for one."""
        for part in self._optimizer.chained_optimizers:
            state = part.optimizer.state
            if not distrib_optimizer.HAVE_APEX_OR_TE and set(state) <= {_COUNT}:
                state[_COUNT] = {"step": torch.tensor(float(self._scheduler.num_steps))}


def _finish_gathering(model: DistributedDataParallel) -> None:
    for group in model.bucket_groups:
        if not group.param_gather_dispatched or group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)


def build_optimizer(
    model: DistributedDataParallel, config: OptimConfig, clip_grad: float, total_steps: int
) -> Optimizer:
    """The optimizer of ``model``'s trainable parameters, wired into Megatron's schedules.

    ``clip_grad`` 0 does not clip. Norms' weights do not decay.
    """
    model_config = model.module.config
    settings = OptimizerConfig(
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
        min_loss_scale=_MIN_LOSS_SCALE,
        loss_scale_window=1000,
        hysteresis=2,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=True,
        clip_grad=clip_grad,
    )
    # megatron-core loses count of a group's parameters where some are fp32 and some are not, so the
    # fp32 head gets a group of its own.
    in_fp32 = ParamPredicate("in_fp32", lambda parameter: parameter.dtype is torch.float32)
    groups = {
        **get_standard_config_overrides(settings),
        ParamKey(predicate=in_fp32): ParamGroupOverride(max_lr=config.lr),
    }
    optimizer = get_megatron_optimizer(settings, [model], groups)
    for part in optimizer.chained_optimizers:
        _create_moments(part, on_host=config.cpu_offload)
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            _mend_torch_adamw(part)
        part.get_parameter_state_dp_zero = partial(_gather_state, part, [])
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss
    parts = optimizer.chained_optimizers if config.cpu_offload else ()
    offloaded = [HostMoments(part.optimizer) for part in parts]
    return Optimizer(optimizer, _build_scheduler(optimizer, config, total_steps), offloaded)


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
        # A run shorter than its warm-up stays in it; Megatron wants a step beyond.
        lr_decay_steps=max(total_steps, warmup + 1),
        lr_decay_style=config.sched.name.value,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )


def _create_moments(optimizer: Any, on_host: bool) -> None:
    """Adam makes its state at the first step, but a save and a load ask for it before."""
    zeros = host_zeros if on_host else torch.zeros_like
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.optimizer.state[parameter]
            state.update({key: zeros(parameter) for key in MOMENTS})


def _mend_torch_adamw(optimizer: Any) -> None:
    """Help megatron-core 0.16 with torch's AdamW, which it uses where Apex and TE are absent.

    AdamW counts steps once per parameter: the loader would forget that count, or share one between
    parameters, each of which then advances it.
    """
    for group in optimizer.optimizer.param_groups:
        group["fused"] = True  # one pass over the state instead of a dozen
        for parameter in group["params"]:
            state = optimizer.optimizer.state[parameter]
            state["step"] = torch.tensor(0.0, device=parameter.device)
    copy = optimizer._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = partial(_copy_with_step, optimizer, copy)


def _copy_with_step(
    optimizer: Any, copy: Any, parameter: Tensor, tensors: dict[str, Tensor]
) -> None:
    group, order = optimizer.model_param_group_index_map[parameter]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    if "step" in state:
        state["step"] = state["step"].clone()
        tensors = {**tensors, "step": state["step"]}
    copy(parameter, tensors)


def _host_memory(optimizer: Any) -> list[dict[str, Tensor]]:
    """Where the state is copied to be saved: for each buffer, flat fp32 tensors.

    The first rank of the data parallel group has all of the state, the others what they send it.
    """
    group = optimizer.data_parallel_group_gloo
    memory = []
    for buffer in optimizer.buffers:
        numel = buffer.numel if group.rank() == 0 else buffer.numel // group.size()
        memory.append({key: torch.empty(numel, dtype=torch.float32) for key in _STATE})
    return memory


def _gather_state(
    optimizer: Any, memory: list[dict[str, Tensor]], empty_data: bool = False, **options: bool
) -> dict[Any, Any] | None:
    """Megatron's ``get_parameter_state_dp_zero``, which copies four times into new memory.

    Here every tensor is copied once, into ``memory``, and only gathered where there are others.
    The tensors are as long as the buffers: Megatron's leave out what pads the buckets, and are then
    read at places that count it (its issue 504). With ``empty_data`` they are to be loaded into.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    places = list(zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True))
    if empty_data:
        for index, (of_dtype, buffer) in enumerate(places):
            (dtype,) = of_dtype
            state[index] = {dtype: {key: torch.empty(buffer.numel) for key in _STATE}}
        return state
    if not memory:
        memory += _host_memory(optimizer)
    group = optimizer.data_parallel_group_gloo
    for index, ((of_dtype, buffer), flat) in enumerate(zip(places, memory, strict=True)):
        ((dtype, ranges),) = of_dtype.items()
        for bucket, in_bucket in zip(buffer.buckets, ranges, strict=True):
            _gather_bucket(optimizer, bucket, in_bucket["param_map"], flat)
        state[index] = {dtype: flat}
    return state if group.rank() == 0 else None


def _gather_bucket(
    optimizer: Any, bucket: Any, param_map: dict[Tensor, Any], flat: dict[str, Tensor]
) -> None:
    """Copy this rank's shard of a bucket into ``flat``; on the first rank, those of all."""
    group = optimizer.data_parallel_group_gloo
    numel = bucket.grad_data.numel()
    # The first rank gathers, so that its own shard is the first of all.
    if group.rank() == 0:
        shards = {k: t[bucket.offset :][:numel].chunk(group.size()) for k, t in flat.items()}
    else:
        start, length = bucket.offset // group.size(), numel // group.size()
        shards = {k: (t[start:][:length],) for k, t in flat.items()}
    for parameter, places in param_map.items():
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        place = places["gbuf_local"]
        for key in _STATE:
            shards[key][0][place.start : place.end].copy_(tensors[key].detach())
    if group.size() > 1:
        for all_of_key in shards.values():
            gathered = list(all_of_key) if group.rank() == 0 else None
            torch.distributed.gather(all_of_key[0], gathered, group=group, group_dst=0)
