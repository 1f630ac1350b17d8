"""AdamW through megatron-core's distributed optimizer: construction, schedule, clipping, steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from torch import Tensor
from torch.nn.utils import get_total_norm

from nemo_aligner.config.model import OptimConfig
from nemo_aligner.training.optimizer_state import (
    MOMENTS,
    OffloadedStates,
    gather_in_reused_memory,
    load_own_shard,
)
from nemo_aligner.utils.host_transfer import before_writing, host_zeros

# A step, and the state to save and load.

MIN_LOSS_SCALE = 1.0
# The form of the optimizer's state that any layout can read. Of data parallel ranks with the same
# shard of the model, only one gathers it, in host memory.
_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
_COUNT = "steps"
# Settings that a resumed run takes from its config, not from its checkpoint.
_SETTINGS = ("lr", "max_lr", "min_lr", "lr_mult", "weight_decay", "betas", "eps")
_SKIPPED = "skipped_steps"


@dataclass(frozen=True)
class Update:
    """Outcome of a step.

    Attributes:
        grad_norm: before clipping; NaN if fp16 overflowed.
        applied: the weights were updated.
        skipped: fp16 overflowed, and a lower loss scale may help; the weights are unchanged. If
            neither is true, the gradient is not finite for another reason, and they are, too.
    """

    grad_norm: float
    applied: bool
    skipped: bool


class Optimizer:
    """Megatron's optimizer and its scheduler.

    Attributes:
        skipped_steps: overflows of fp16 since the start of the run.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: OptimizerParamScheduler,
        offloaded: Sequence[OffloadedStates] = (),
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._offloaded = offloaded
        self._loss_scale: float | None = None  # cached for the next step
        self.skipped_steps = 0
        groups = optimizer.param_groups
        self._settings = [{key: group[key] for key in _SETTINGS} for group in groups]
        # Keys depend on the AdamW implementation: a checkpoint of another one has others.
        self._own = [{key: group[key] for key in group if key != "params"} for group in groups]

    @property
    def lr(self) -> float:
        """Learning rate of the next step, where none of its own multiplies it."""
        group = self._optimizer.param_groups[0]
        return float(group["lr"] / group["lr_mult"])

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the next step in fp16; None in fp32 and bf16."""
        if self._loss_scale is None and self._optimizer.config.fp16:
            self._loss_scale = float(self._optimizer.get_loss_scale())  # synchronises
        return self._loss_scale

    def step(self) -> Update:
        """Update the weights if the gradient is finite; collective, same result on every rank.

        As in Megatron's training loop, a skipped step does not advance the learning rate.
        """
        scale, self._loss_scale = self.loss_scale, None
        # Megatron's step() split up: in fp32 and bf16 it would apply a gradient that is not finite,
        # and report it afterwards.
        # prepare_grads copies this rank's shard of the summed gradients to the fp32 weights. In
        # fp16 it also divides by the loss scale, tells if any rank overflowed, and sets the next.
        if self._optimizer.prepare_grads():
            # At the least scale there is no lower one to try: the gradient itself is at fault.
            skipped = scale is not None and scale > MIN_LOSS_SCALE
            self.skipped_steps += skipped
            return Update(math.nan, applied=False, skipped=skipped)
        norm = gradient_norm(self._optimizer.chained_optimizers)
        if not math.isfinite(norm):
            return Update(norm, applied=False, skipped=False)
        limit = self._optimizer.config.clip_grad
        if limit > 0:
            clip_gradients(self._optimizer.chained_optimizers, limit, norm)
        before_writing()  # a save may still be copying weights and moments
        # Each rank updates its shard. With several, the next forward pass gathers the weights as it
        # comes to them, bucket by bucket (see ``finish_update``).
        self._optimizer.step_with_ready_grads()
        self._scheduler.step(1)
        return Update(norm, applied=True, skipped=False)

    def state_tensors(self) -> list[Tensor]:
        """List this rank's fp32 weights and moments of all parameters."""
        found = []
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    found += [parameter.data, *(state[key] for key in MOMENTS)]
        return found

    def finish_update(self) -> None:
        """Wait until every rank has all updated weights; collective.

        A training step needs no such call: its forward pass waits for weights as it uses them.
        """
        for part in self._optimizer.chained_optimizers:
            for model in part.model_chunks:
                if model.ddp_config.overlap_param_gather:
                    _finish_gathering(model)

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        """Megatron's sharded state dict of the optimizer, given that of the model.

        For a save it holds copies in host memory: 12 bytes for each trained parameter on the first
        rank of a data parallel group. They may still be in flight; they have arrived when the next
        tensors given to ``copy_beside`` have. The next call reuses the memory, so this one's result
        must have been written by then.
        """
        self._count_steps_without_parameters()
        for moments in self._offloaded:
            moments.wait()
        state = self._optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=dict(_SHARDING)
        )
        for part in self._parts(state):
            # This rank has nothing to save; an empty entry would differ from other ranks'.
            if not part["param_state"]:
                del part["param_state"]
            if "grad_scaler" in part:
                # Megatron compares entries across ranks, and tensors on two devices differ.
                part["grad_scaler"]["scale"] = part["grad_scaler"]["scale"].cpu()
        state[_SKIPPED] = self.skipped_steps
        return state

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Load the state after ``step`` steps; learning rate and similar stay as configured."""
        # Missing in checkpoints of versions before fp16.
        self.skipped_steps = int(state.pop(_SKIPPED, 0))
        updates = step - self.skipped_steps
        self._restore_settings()
        parts = zip(self._parts(state), self._optimizer.chained_optimizers, strict=True)
        for saved, part in parts:
            _recognise_groups(saved["optimizer"]["param_groups"], part.param_groups)
        self._optimizer.load_state_dict(state)
        self._loss_scale = None
        self._restore_settings()
        for group in self._optimizer.param_groups:
            if distrib_optimizer.HAVE_APEX_OR_TE:
                group["step"] = updates
        self._scheduler.num_steps = 0
        self._scheduler.step(updates)

    def _parts(self, state: dict[Any, Any]) -> list[dict[str, Any]]:
        """The state of each of Megatron's optimizers; that of experts has buffers of its own."""
        count = len(self._optimizer.chained_optimizers)
        return [state] if count == 1 else [state[number] for number in range(count)]

    def _restore_settings(self) -> None:
        """Restore each group's own settings after megatron-core has overwritten them.

        It copies those of a saved group with the same weight decay, whenever it loads and before,
        to learn what to load. Keys differ between torch's, Apex's and TransformerEngine's AdamW.
        """
        groups = self._optimizer.param_groups
        for group, values, own in zip(groups, self._settings, self._own, strict=True):
            group.update(values)
            for key, value in own.items():
                group.setdefault(key, value)

    def _count_steps_without_parameters(self) -> None:
        """Give torch's AdamW a step count where all is frozen, as megatron-core reads one."""
        for part in self._optimizer.chained_optimizers:
            state = part.optimizer.state
            if not distrib_optimizer.HAVE_APEX_OR_TE and set(state) <= {_COUNT}:
                state[_COUNT] = {"step": torch.tensor(float(self._scheduler.num_steps))}


def _finish_gathering(model: DistributedDataParallel) -> None:
    for group in model.bucket_groups + model.expert_parallel_bucket_groups:
        if not group.param_gather_dispatched or group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)


def _recognise_groups(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Let a load match ``saved`` groups to ``groups`` when learning rates have changed.

    Since 0.19 megatron-core compares the overrides of a group, rates among them. The order of
    groups is the same in every run.
    """
    for entry, group in zip(saved, groups, strict=False):
        entry.update({key: group[key] for key in ("max_lr", "min_lr", "lr_mult") if key in group})


# Construction and schedule.

# Multiple of the learning rate for scalars that an objective learns.
_OBJECTIVE_LR = 100.0


def build_optimizer(
    model: DistributedDataParallel, config: OptimConfig, clip_grad: float, total_steps: int
) -> Optimizer:
    """Build the optimizer of ``model``'s trainable parameters, and hook it into its schedules.

    Norms' weights do not decay. Layers may have lower rates the lower they are, and the head its
    own (Howard and Ruder 2018, "Universal language model fine-tuning for text classification",
    section 3.2; Clark et al. 2020, "ELECTRA", appendix B).

    Args:
        config: with a number as ``lr`` (``ModelConfig.with_learning_rate``).
        clip_grad: largest gradient norm; 0 does not clip.
        total_steps: of the run, for the learning rate schedule.

    Raises:
        ConfigError: see ``SchedulerConfig.last_decay_step``.
    """
    model_config = model.module.config
    settings = _settings(model_config, config, clip_grad)
    groups = {**_groups(settings), **_rates(model, config)}
    optimizer = get_megatron_optimizer(settings, [model], groups)
    for part in optimizer.chained_optimizers:
        _create_moments(part, on_host=config.cpu_offload)
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            _mend_torch_adamw(part)
        gather_in_reused_memory(part)
        load_own_shard(part)
    # Megatron's schedules look for both in the model's config. The first runs after the last
    # micro-batch: it waits for gradients to be reduced over data parallel ranks, sums those of
    # norms over tensor parallel ones under sequence parallelism, and divides by the global count.
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss
    parts = optimizer.chained_optimizers if config.cpu_offload else ()
    offloaded = [OffloadedStates(part.optimizer) for part in parts]
    scheduler = _build_scheduler(optimizer, config, settings.lr, total_steps)
    return Optimizer(optimizer, scheduler, offloaded)


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
    # megatron-core miscounts the parameters of a group with mixed dtypes, so the fp32 head gets its
    # own group.
    in_fp32 = ParamPredicate(
        "in_fp32", lambda each: each.dtype is torch.float32 and not _is_of_objective(each)
    )
    # Logarithms have further to go than weights.
    of_objective = ParamPredicate("of_objective", _is_of_objective)
    faster = ParamGroupOverride(
        max_lr=_OBJECTIVE_LR * settings.lr, min_lr=_OBJECTIVE_LR * (settings.min_lr or 0.0)
    )
    return {
        **get_standard_config_overrides(settings),
        ParamKey(predicate=in_fp32): ParamGroupOverride(max_lr=settings.lr),
        ParamKey(predicate=of_objective): faster,
    }


def _rates(
    model: DistributedDataParallel, config: OptimConfig
) -> dict[ParamKey, ParamGroupOverride]:
    """Groups of the parameters with rates of their own, by the multiple that each has."""
    inside, multiples = model.module, dict[torch.nn.Parameter, float]()
    layers = inside.config.num_layers
    if config.layer_lr_decay != 1:
        parts = [(layer, layer.layer_number) for layer in inside.decoder.layers]
        parts += [(inside.embedding, 0)] if inside.pre_process else []
        for part, number in parts:
            multiple = config.layer_lr_decay ** (layers - number)
            multiples |= dict.fromkeys(part.parameters(), multiple)
    if config.head_lr_mult != 1 and inside.post_process:
        of_head = (each for each in inside.rm_head.parameters() if not _is_of_objective(each))
        multiples |= dict.fromkeys(of_head, config.head_lr_mult)
    return {
        ParamKey(
            predicate=ParamPredicate(
                f"lr_mult_{multiple}", lambda each, own=multiple: multiples.get(each) == own
            )
        ): ParamGroupOverride(lr_mult=multiple)
        for multiple in sorted(set(multiples.values()) - {1.0})
    }


class _Scheduler(OptimizerParamScheduler):
    """Megatron's, with each group's ``lr_mult``, over warm-up and decay alike."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        return super().get_lr(param_group) * param_group["lr_mult"]


def _is_of_objective(parameter: torch.nn.Parameter) -> bool:
    """True for a scalar that a loss learns, as opposed to a weight."""
    return getattr(parameter, "is_of_objective", False)


def _build_scheduler(
    optimizer: Any, config: OptimConfig, lr: float, total_steps: int
) -> OptimizerParamScheduler:
    warmup = config.sched.warmup_steps
    return _Scheduler(
        optimizer,
        # NeMo's warmup: step k of w (from 1) has k / (w + 1) of the rate, so none has zero.
        init_lr=lr / (warmup + 1),
        max_lr=lr,
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
    """Create Adam's state, which a save or load needs before the first step does."""
    parameters = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
    wanted = [each.detach() for each in parameters for _ in MOMENTS]
    zeros = iter(host_zeros(wanted) if on_host else map(torch.zeros_like, wanted))
    for parameter in parameters:
        optimizer.optimizer.state[parameter].update({key: next(zeros) for key in MOMENTS})


def _mend_torch_adamw(optimizer: Any) -> None:
    """Adapt torch's AdamW, which megatron-core uses without Apex and TransformerEngine."""
    for group in optimizer.optimizer.param_groups:
        group["fused"] = True  # one pass over the state instead of a dozen
        for parameter in group["params"]:
            state = optimizer.optimizer.state[parameter]
            state["step"] = torch.tensor(0.0, device=parameter.device)
    _load_step_counts(optimizer)
    _read_step_counts_at_once(optimizer)


def _load_step_counts(optimizer: Any) -> None:
    """Let a load keep the step counts of torch's AdamW, one tensor per parameter.

    Megatron's loader has one count per group, as Apex and TransformerEngine do. It would drop
    these, or share one tensor among parameters, each of which then increments it.
    """
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


def _read_step_counts_at_once(optimizer: Any) -> None:
    """Make torch's AdamW return its step counts on the host, with a single copy.

    megatron-core reads each parameter's, and would wait for the GPU each time.
    """
    give = optimizer.optimizer.state_dict
    optimizer.optimizer.state_dict = partial(_with_counts_on_host, give)


def _with_counts_on_host(give: Any) -> dict[str, Any]:
    given = give()
    states = {key: state for key, state in given["state"].items() if "step" in state}
    if not states:
        return given
    counts = torch.stack([state["step"] for state in states.values()]).cpu()
    on_host = {
        key: {**state, "step": count}
        for (key, state), count in zip(states.items(), counts, strict=True)
    }
    return {**given, "state": {**given["state"], **on_host}}


# Gradient norm and clipping with one synchronisation; without Apex and TransformerEngine
# megatron-core synchronises for every parameter.

_EPSILON = 1e-6  # as in Megatron and torch


def gradient_norm(optimizers: Sequence[Any]) -> float:
    """L2 norm of the gradients of all ranks, each parameter counted once; collective."""
    squares = []
    # Every rank, in the order of ``optimizers``, which is that of the parameter groups on all. One
    # without gradients in a group takes part with 0. Shards do not overlap, and Megatron leaves out
    # copies on other tensor parallel ranks, so the squares of all ranks add up to the whole.
    for optimizer in optimizers:
        gradients = _gradients_for_norm(optimizer)
        square = torch.zeros(1, device=torch.cuda.current_device())
        if gradients:
            square += get_total_norm(gradients) ** 2.0
        dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
        squares.append(square)
    return math.sqrt(sum(torch.cat(squares).tolist()))


def _gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Gradients that this rank contributes to the global norm; renamed in megatron-core 0.17."""
    newer = getattr(optimizer, "get_grads_for_grad_norm", None)
    return optimizer.get_main_grads_for_grad_norm() if newer is None else newer()


def clip_gradients(optimizers: Sequence[Any], limit: float, norm: float) -> None:
    """Scale gradients of norm ``norm`` down to ``limit`` if it is larger (Pascanu et al. 2013)."""
    factor = limit / (norm + _EPSILON)
    if factor >= 1.0:
        return
    for optimizer in optimizers:
        gradients = [each.grad for each in optimizer.get_parameters() if each.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)  # all of them with as few kernels as possible
