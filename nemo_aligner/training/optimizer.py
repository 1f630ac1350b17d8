"""The optimizer of a run: AdamW on DDP's flat buffers, its schedule, clipping and loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor
from torch.nn.utils import get_total_norm

from nemo_aligner.config.model import OptimConfig
from nemo_aligner.distributed.collectives import current_device, gather_objects
from nemo_aligner.training.adamw import AdamW, Ferry
from nemo_aligner.training.optimizer_state import MOMENTS, Shard, ShardedState
from nemo_aligner.utils.host_transfer import wait_for_host_copies

# A step, and the state to save and load.

_SKIPPED = "skipped_steps"
_EPSILON = 1e-6  # added to a norm that divides, as in Megatron and torch


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
    """AdamW on this rank's shards of the model's weights, and its schedule.

    Attributes:
        param_groups: hyperparameters of each group of parameters, the same on every rank.
        loss_scale: of the next step in fp16; None in fp32 and bf16.
        skipped_steps: overflows of fp16 since the start of the run.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        states: Sequence[ShardedState],
        param_groups: Sequence[dict[str, Any]],
        adamw: AdamW,
        scheduler: OptimizerParamScheduler,
        clip_grad: float,
    ) -> None:
        """Take what ``build_optimizer`` builds: ``states`` of dense parameters, then of experts."""
        self._model = model
        self._states = states
        self.param_groups = param_groups
        self._adamw = adamw
        self._scheduler = scheduler
        self._clip_grad = clip_grad
        self._loss_scale = LossScale() if model.module.config.fp16 else None
        self.skipped_steps = 0
        self._gradients = [shard.gradients for state in states for shard in state.shards]
        self._counted = [_gradients_to_count(state.shards) for state in states]

    @property
    def lr(self) -> float:
        """Learning rate of the next step, where none of its own multiplies it."""
        return float(self._scheduler.get_lr({"lr_mult": 1.0}))

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the next step in fp16; None in fp32 and bf16."""
        return None if self._loss_scale is None else self._loss_scale.value

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply ``loss`` by the loss scale; unchanged in fp32 and bf16."""
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    @torch.no_grad()
    def step(self) -> Update:
        """Update the weights if the gradient is finite; collective, same result on every rank.

        As in Megatron's training loop, a skipped step does not advance the learning rate.
        """
        overflows, norm = self._measure_gradients()
        if self._loss_scale is not None:
            # At the least scale there is no lower one to try: the gradient itself is at fault.
            skipped = overflows and self._loss_scale.value > MIN_LOSS_SCALE
            self._loss_scale.update(overflows)
            if overflows:
                self.skipped_steps += skipped
                return Update(math.nan, applied=False, skipped=skipped)
        if not math.isfinite(norm):
            return Update(norm, applied=False, skipped=False)
        factor = self._clip_grad / (norm + _EPSILON)  # Pascanu et al. 2013
        if 0 < factor < 1 and self._gradients:
            torch._foreach_mul_(self._gradients, factor)
        wait_for_host_copies()  # a save may still be copying weights and moments
        self._adamw.step(self.param_groups, self._scheduler.num_steps + 1)
        # Each rank has updated its shards. If gathering overlaps, the next forward pass gathers the
        # weights as it comes to them, bucket by bucket (see ``finish_update``).
        if not self._model.ddp_config.overlap_param_gather:
            self._model.start_param_sync()
        self._scheduler.step(1)
        return Update(norm, applied=True, skipped=False)

    def _measure_gradients(self) -> tuple[bool, float]:
        """Tell if any gradient overflowed fp16, and their L2 norm over all ranks; collective.

        In fp16 it divides the gradients by the loss scale. The host waits for the GPU once.
        """
        # A rank without gradients takes part with 0. Shards do not overlap, and copies on other
        # tensor parallel ranks are left out, so the squares of all ranks add up to the whole.
        sums = torch.zeros(1 + len(self._counted), device=current_device())
        if self._loss_scale is not None and self._gradients:
            inverse = torch.full((1,), 1 / self._loss_scale.value, device=sums.device)
            torch._amp_foreach_non_finite_check_and_unscale_(self._gradients, sums[:1], inverse)
        for number, gradients in enumerate(self._counted, 1):
            if gradients:
                # Parameter by parameter: on a CPU one sum of billions of squares loses digits.
                sums[number] = get_total_norm(gradients) ** 2.0
        dist.all_reduce(sums, group=parallel_state.get_intra_distributed_optimizer_instance_group())
        overflows, *squares = sums.tolist()
        return overflows > 0, math.sqrt(sum(squares))

    def state_tensors(self) -> list[Tensor]:
        """List this rank's fp32 weights and moments, a view for each parameter."""
        return [
            shard.state[key][segment.start : segment.stop]
            for state in self._states
            for shard in state.shards
            for segment in shard.segments
            for key in ("param", *MOMENTS)
        ]

    def finish_update(self) -> None:
        """Wait until every rank has all updated weights; collective.

        A training step needs no such call: its forward pass waits for weights as it uses them.
        """
        if not self._model.ddp_config.overlap_param_gather:
            return
        for group in self._model.bucket_groups + self._model.expert_parallel_bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        """Sharded state dict of the optimizer, given that of the model.

        For a save it holds copies in host memory: 12 bytes for each trained parameter on the first
        rank of a data parallel group. They may still be in flight; they have arrived when the next
        tensors given to ``start_host_copies`` have. The next call reuses the memory, so this one's
        result must have been written by then.
        """
        self._adamw.wait()
        parts = [
            self._sharded_part(state, bool(number), model_state, is_loading)
            for number, state in enumerate(self._states)
        ]
        whole: dict[Any, Any] = dict(enumerate(parts)) if len(parts) > 1 else parts[0]
        return {**whole, _SKIPPED: self.skipped_steps}

    def _sharded_part(
        self, state: ShardedState, is_expert: bool, model_state: dict[str, Any], is_loading: bool
    ) -> dict[str, Any]:
        """What megatron-core's optimizer saves for dense parameters, or for those of experts."""
        step = float(self._scheduler.num_steps)
        groups = [
            {**group, "step": step}
            for group in self.param_groups
            if group["is_expert_parallel"] == is_expert
        ]
        part: dict[str, Any] = {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        }
        tensors = state.to_load(model_state) if is_loading else state.to_save(model_state)
        # A rank may have nothing to save; an empty entry would differ from other ranks'.
        if tensors:
            part["param_state"] = tensors
        if self._loss_scale is not None:
            part["grad_scaler"] = self._loss_scale.state_dict()
        return part

    def load_state_dict(self, state: dict[Any, Any], step: int) -> None:
        """Load the state after ``step`` steps; hyperparameters stay as configured."""
        self._adamw.wait()
        # Missing in checkpoints of versions before fp16.
        self.skipped_steps = int(state.get(_SKIPPED, 0))
        count = len(self._states)
        parts = [state] if count == 1 else [state[number] for number in range(count)]
        for sharded, part in zip(self._states, parts, strict=True):
            sharded.put(part.get("param_state", {}))
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(parts[0]["grad_scaler"])
        self._scheduler.num_steps = 0
        self._scheduler.step(step - self.skipped_steps)


def _gradients_to_count(shards: Sequence[Shard]) -> list[Tensor]:
    """List the gradients of each parameter that this rank adds to the norm.

    Matrices come first, as in megatron-core's groups: earlier versions added squares in that order,
    so a run that goes on keeps its rounding.
    """
    pairs = [(shard, segment) for shard in shards for segment in shard.segments]
    pairs.sort(key=lambda pair: pair[1].parameter.dim() == 1)
    return [
        shard.gradients[segment.start : segment.stop]
        for shard, segment in pairs
        if param_is_not_tensor_parallel_duplicate(segment.parameter)
    ]


MIN_LOSS_SCALE = 1.0
_LOSS_SCALE_WINDOW = 1000
_HYSTERESIS = 2


@dataclass
class LossScale:
    """Loss scale of fp16: halved from the second overflow on, doubled after 1,000 steps without.

    It counts as megatron-core's ``DynamicGradScaler`` does and has its state, but on the host,
    which would have to wait for the GPU to read it.
    """

    value: float = 2.0**16
    growth_tracker: int = 0
    hysteresis_tracker: int = _HYSTERESIS

    def update(self, overflows: bool) -> None:
        """Count a step."""
        if overflows:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.value = max(self.value / 2, MIN_LOSS_SCALE)
            return
        self.growth_tracker += 1
        if self.growth_tracker == _LOSS_SCALE_WINDOW:
            self.growth_tracker, self.hysteresis_tracker = 0, _HYSTERESIS
            self.value *= 2

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": torch.tensor([self.value]),
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["scale"])
        self.growth_tracker = state["growth_tracker"]
        self.hysteresis_tracker = state["hysteresis_tracker"]


# Construction and schedule.

# Multiple of the learning rate for scalars that an objective learns: logarithms have further to go
# than weights.
_OBJECTIVE_LR = 100.0


class _Group(NamedTuple):
    """What parameters of a group have in common; sorted, dense ones come before experts'."""

    is_expert: bool
    is_of_objective: bool
    lr_mult: float
    decays: bool

    def hyperparameters(self, config: OptimConfig) -> dict[str, Any]:
        """What the scheduler reads, and by what megatron-core's loader tells groups."""
        assert config.lr is not None
        scale = _OBJECTIVE_LR if self.is_of_objective else 1.0
        return {
            "max_lr": scale * config.lr,
            "min_lr": scale * config.sched.min_lr,
            "lr_mult": self.lr_mult,
            "wd_mult": float(self.decays),
            "betas": tuple(config.betas),
            "eps": config.eps,
            "is_expert_parallel": self.is_expert,
            "is_decoupled_lr": False,
        }


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
    device, group_of = current_device(), _groups(model, config)
    # Ranks have other parameters under pipeline parallelism, and save the same groups.
    groups = sorted(set().union(*gather_objects(set(group_of.values()))))
    param_groups = [group.hyperparameters(config) for group in groups]
    states = _build_states(model, any(group.is_expert for group in groups), config.cpu_offload)
    adamw = AdamW(
        [shard for state in states for shard in state.shards],
        {parameter: groups.index(group) for parameter, group in group_of.items()},
        # Without a GPU, weights and moments are in host memory both.
        Ferry(device) if config.cpu_offload and device.type == "cuda" else None,
    )
    scheduler = _build_scheduler(param_groups, config, total_steps)
    optimizer = Optimizer(model, states, param_groups, adamw, scheduler, clip_grad)
    # Megatron's schedules look for both in the model's config. The first runs after the last
    # micro-batch: it waits for gradients to be reduced over data parallel ranks, sums those of
    # norms over tensor parallel ones under sequence parallelism, and divides by the global count.
    model_config = model.module.config
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _build_states(
    model: DistributedDataParallel, has_experts: bool, moments_on_host: bool
) -> list[ShardedState]:
    """Build the state of dense parameters and, if any rank has some, that of experts.

    Copies of an expert are on other ranks than those of the rest, so its buffers are, too.
    """
    dense, expert = model.buffers, model.expert_parallel_buffers
    group = parallel_state.get_data_parallel_group_gloo(True, partial_data_parallel=True)
    if not has_experts:
        return [ShardedState(dense, group, "", moments_on_host)]
    of_expert = parallel_state.get_expert_data_parallel_group_gloo(True)
    return [
        ShardedState(dense, group, "chained_0.", moments_on_host),
        ShardedState(expert, of_expert, "chained_1.", moments_on_host),
    ]


def _groups(
    model: DistributedDataParallel, config: OptimConfig
) -> dict[torch.nn.Parameter, _Group]:
    """The group of each trained parameter."""
    multiples = _lr_multiples(model.module, config)
    return {
        parameter: _Group(
            is_expert=not getattr(parameter, "allreduce", True),
            is_of_objective=_is_of_objective(parameter),
            lr_mult=multiples.get(parameter, 1.0),
            decays=parameter.dim() != 1 and not name.endswith(".bias"),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _lr_multiples(model: Any, config: OptimConfig) -> dict[torch.nn.Parameter, float]:
    """Multiples of the learning rate, of the parameters that have one."""
    multiples: dict[torch.nn.Parameter, float] = {}
    if config.layer_lr_decay != 1:
        parts = [(layer, layer.layer_number) for layer in model.decoder.layers]
        parts += [(model.embedding, 0)] if model.pre_process else []
        for part, number in parts:
            multiple = config.layer_lr_decay ** (model.config.num_layers - number)
            multiples |= dict.fromkeys(part.parameters(), multiple)
    if config.head_lr_mult != 1 and model.post_process:
        of_head = (each for each in model.rm_head.parameters() if not _is_of_objective(each))
        multiples |= dict.fromkeys(of_head, config.head_lr_mult)
    return multiples


def _is_of_objective(parameter: torch.nn.Parameter) -> bool:
    """True for a scalar that a loss learns, as opposed to a weight."""
    return getattr(parameter, "is_of_objective", False)


class _Scheduler(OptimizerParamScheduler):
    """Megatron's, with each group's ``lr_mult``, over warm-up and decay alike."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        return super().get_lr(param_group) * param_group["lr_mult"]


def _build_scheduler(
    param_groups: Sequence[dict[str, Any]], config: OptimConfig, total_steps: int
) -> OptimizerParamScheduler:
    assert config.lr is not None
    warmup = config.sched.warmup_steps
    return _Scheduler(
        SimpleNamespace(param_groups=param_groups),
        # NeMo's warmup: step k of w (from 1) has k / (w + 1) of the rate, so none has zero.
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
