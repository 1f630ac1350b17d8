"""The optimizer of a run: AdamW with learning rate schedule, gradient clipping and fp16 loss scale.

``Optimizer`` takes a step, and saves and loads its state. ``build_optimizer`` groups the model's
parameters by their hyperparameters and builds the optimizer. ``adamw.py`` computes the update.
``optimizer_state.py`` shards weights and moments over the data parallel ranks.
"""

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
from nemo_aligner.training.adamw import AdamW, MomentStreamer
from nemo_aligner.training.optimizer_state import MOMENTS, Shard, ShardedState
from nemo_aligner.utils.host_transfer import wait_for_host_copies

# The first part takes a step, and saves and loads the optimizer's state.

_SKIPPED = "skipped_steps"
_EPSILON = 1e-6  # added to the gradient norm before dividing by it, as in Megatron and torch


@dataclass(frozen=True)
class Update:
    """Outcome of an optimizer step.

    Attributes:
        grad_norm: L2 norm of the gradient before clipping; NaN if fp16 overflowed.
        applied: True if the weights were updated.
        skipped: True if fp16 overflowed but a lower loss scale may help; the weights are unchanged.

    If neither ``applied`` nor ``skipped`` is True, the gradient is not finite for another reason.
    The weights are unchanged, and the run must end.
    """

    grad_norm: float
    applied: bool
    skipped: bool


class Optimizer:
    """AdamW on this rank's shards of the model's weights, and its learning rate schedule.

    Attributes:
        param_groups: hyperparameters of each group of parameters, the same on every rank.
        skipped_steps: steps skipped since the start of the run because fp16 overflowed.
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
        """Store the parts that ``build_optimizer`` has built.

        Args:
            model: Megatron's data parallel wrapper.
            states: the state of the dense weights and, for a mixture-of-experts model, a second one
                of the experts' weights.
            param_groups: hyperparameters of each group of parameters.
            clip_grad: largest gradient norm; 0 does not clip.
        """
        self._model = model
        self._states = states
        self.param_groups = param_groups
        self._adamw = adamw
        self._scheduler = scheduler
        self._clip_grad = clip_grad
        self._loss_scale = LossScale() if model.module.config.fp16 else None
        self.skipped_steps = 0
        self._gradients = [shard.gradients for state in states for shard in state.shards]
        self._norm_gradients = [_select_for_norm(state.shards) for state in states]

    @property
    def lr(self) -> float:
        """Learning rate of the next step, for parameters whose ``lr_mult`` is 1."""
        return float(self._scheduler.get_lr({"lr_mult": 1.0}))

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the next step in fp16; None in fp32 and bf16."""
        return None if self._loss_scale is None else self._loss_scale.value

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply ``loss`` by the loss scale; in fp32 and bf16 return it unchanged."""
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    @torch.no_grad()
    def step(self) -> Update:
        """Update the weights if the gradient is finite.

        Every rank must call it, and all get the same result. As in Megatron's training loop, a
        skipped step does not advance the learning rate schedule.
        """
        overflows, norm = self._measure_gradients()
        if self._loss_scale is not None:
            # At the lowest loss scale, the scale is not the cause of an overflow: the gradient
            # itself is not finite.
            skipped = overflows and self._loss_scale.value > MIN_LOSS_SCALE
            self._loss_scale.update(overflows)
            if overflows:
                self.skipped_steps += skipped
                return Update(math.nan, applied=False, skipped=skipped)
        if not math.isfinite(norm):
            return Update(norm, applied=False, skipped=False)
        factor = self._clip_grad / (norm + _EPSILON)  # clip by norm (Pascanu et al. 2013)
        if 0 < factor < 1 and self._gradients:
            torch._foreach_mul_(self._gradients, factor)
        wait_for_host_copies()  # a save may still be copying the values that change now
        self._adamw.step(self.param_groups, self._scheduler.num_steps + 1)
        # Each rank has updated only its shards. With ``overlap_param_gather``, the next forward
        # pass gathers the updated weights of each bucket when it reaches the bucket (see
        # ``finish_update``). Otherwise gather all of them now.
        if not self._model.ddp_config.overlap_param_gather:
            self._model.start_param_sync()
        self._scheduler.step(1)
        return Update(norm, applied=True, skipped=False)

    def _measure_gradients(self) -> tuple[bool, float]:
        """Divide fp16 gradients by the loss scale, and compute the norm of all gradients.

        Every rank must call it.

        Returns:
            True if a gradient overflowed fp16, and the L2 norm of the gradients of all ranks.
        """
        # Each rank sums its own squares: shards do not overlap, and only one tensor parallel rank
        # counts a replicated parameter. So the sum over the ranks is the global sum of squares. A
        # rank without gradients adds 0.
        sums = torch.zeros(1 + len(self._norm_gradients), device=current_device())
        if self._loss_scale is not None and self._gradients:
            inverse = torch.full((1,), 1 / self._loss_scale.value, device=sums.device)
            torch._amp_foreach_non_finite_check_and_unscale_(self._gradients, sums[:1], inverse)
        for index, gradients in enumerate(self._norm_gradients, 1):
            if gradients:
                # get_total_norm gets one tensor per parameter: on a CPU, a single sum over billions
                # of squares would lose precision.
                sums[index] = get_total_norm(gradients) ** 2.0
        dist.all_reduce(sums, group=parallel_state.get_intra_distributed_optimizer_instance_group())
        overflows, *squares = sums.tolist()
        return overflows > 0, math.sqrt(sum(squares))

    def state_tensors(self) -> list[Tensor]:
        """List this rank's fp32 weights and moments.

        Each parameter has three views in a row: its weights, and its first and second moments.
        """
        return [
            shard.state[key][segment.start : segment.stop]
            for state in self._states
            for shard in state.shards
            for segment in shard.segments
            for key in ("param", *MOMENTS)
        ]

    def finish_update(self) -> None:
        """Gather the updated weights on every rank now; collective.

        Call it after training and before anything else reads the weights. The forward pass of a
        training step needs no such call, because it waits for the weights of each bucket before it
        uses them.
        """
        if not self._model.ddp_config.overlap_param_gather:
            return
        for group in self._model.bucket_groups + self._model.expert_parallel_bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        """Build the optimizer's sharded state dict for megatron-core's checkpoints; collective.

        For a save, the result holds copies in host memory: 12 bytes per trained parameter on the
        first rank of each data parallel group. The copies may not be complete on return. To wait
        for them, call ``start_host_copies`` afterwards (an empty list of tensors will do), and call
        the function that it returns: copies finish in the order of their start. The next call of
        this method reuses the memory, so the result must be written to disk before that.

        Args:
            model_state: the model's sharded state dict, which says how each weight is sharded.
            is_loading: build the state dict to read a checkpoint into.
        """
        self._adamw.wait()
        parts = [
            self._sharded_part(state, bool(index), model_state, is_loading)
            for index, state in enumerate(self._states)
        ]
        combined: dict[Any, Any] = dict(enumerate(parts)) if len(parts) > 1 else parts[0]
        return {**combined, _SKIPPED: self.skipped_steps}

    def _sharded_part(
        self, state: ShardedState, is_expert: bool, model_state: dict[str, Any], is_loading: bool
    ) -> dict[str, Any]:
        """Build the state dict of dense or expert parameters, in megatron-core's format."""
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
        # Omit the entry on a rank with nothing to save: an empty one would conflict with the
        # entries of other ranks.
        if tensors:
            part["param_state"] = tensors
        if self._loss_scale is not None:
            part["grad_scaler"] = self._loss_scale.state_dict()
        return part

    def load_state_dict(self, state: dict[Any, Any], step: int) -> None:
        """Load the optimizer's state that was saved after ``step`` steps.

        Hyperparameters keep the values of this run's settings.
        """
        self._adamw.wait()
        # The entry is missing in checkpoints of old versions, which could not train in fp16.
        self.skipped_steps = int(state.get(_SKIPPED, 0))
        count = len(self._states)
        parts = [state] if count == 1 else [state[index] for index in range(count)]
        for sharded, part in zip(self._states, parts, strict=True):
            sharded.copy_loaded(part.get("param_state", {}))
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(parts[0]["grad_scaler"])
        self._scheduler.num_steps = 0
        self._scheduler.step(step - self.skipped_steps)


def _select_for_norm(shards: Sequence[Shard]) -> list[Tensor]:
    """List the gradients that this rank adds to the norm, as a view for each parameter.

    Matrices come before vectors, as in megatron-core's parameter groups. Earlier versions summed in
    that order, so a run that resumes from their checkpoints gets the same rounding.
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
    """Loss scale of fp16: halved from the second overflow on, doubled after 1,000 good steps.

    Rules and saved state are those of megatron-core's ``DynamicGradScaler``. Unlike there, the
    value is a Python float, so that reading it does not wait for the GPU.
    """

    value: float = 2.0**16
    growth_tracker: int = 0
    hysteresis_tracker: int = _HYSTERESIS

    def update(self, overflows: bool) -> None:
        """Adapt the scale after a step; ``overflows`` is True if a gradient overflowed fp16."""
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
        """Return the state, with the keys of megatron-core's ``DynamicGradScaler``."""
        return {
            "scale": torch.tensor([self.value]),
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""
        self.value = float(state["scale"])
        self.growth_tracker = state["growth_tracker"]
        self.hysteresis_tracker = state["hysteresis_tracker"]


# The second part builds the optimizer and its schedule.

# Learning rate multiplier for scalars that an objective learns, such as the log of a scale, because
# they have to change much more than weights do.
_OBJECTIVE_LR = 100.0


class _Group(NamedTuple):
    """The properties of a group of parameters with the same hyperparameters.

    Groups are sorted by these fields, so dense groups come before expert groups.

    Attributes:
        is_expert: the parameters belong to experts of a mixture-of-experts model.
        is_of_objective: the parameters are scalars that the loss learns.
        lr_mult: learning rate multiplier.
        decays: the parameters have weight decay; norms and biases do not.
    """

    is_expert: bool
    is_of_objective: bool
    lr_mult: float
    decays: bool

    def hyperparameters(self, config: OptimConfig) -> dict[str, Any]:
        """Return the hyperparameters of the group, under megatron-core's names.

        The learning rate scheduler reads ``max_lr`` and ``lr_mult``. When a checkpoint is loaded,
        megatron-core uses all of them to find the group's saved state.
        """
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
    """Build the optimizer of ``model``'s trainable parameters, and connect it to the model.

    Norms and biases have no weight decay. Settings may give lower layers lower learning rates, and
    the head a different one (Howard and Ruder 2018, "Universal language model fine-tuning for text
    classification", section 3.2; Clark et al. 2020, "ELECTRA", appendix B).

    Args:
        model: Megatron's data parallel wrapper.
        config: settings whose ``lr`` is set (``ModelConfig.with_learning_rate`` sets a default).
        clip_grad: largest gradient norm; 0 does not clip.
        total_steps: steps of the run, for the learning rate schedule.

    Raises:
        ConfigError: warm-up and constant steps leave no step for the decay.
    """
    device, group_of = current_device(), _group_parameters(model, config)
    # Collect the groups of all pipeline parallel ranks: they have different parameters, but must
    # save the same groups.
    groups = sorted(set().union(*gather_objects(set(group_of.values()))))
    param_groups = [group.hyperparameters(config) for group in groups]
    states = _build_states(model, any(group.is_expert for group in groups), config.cpu_offload)
    adamw = AdamW(
        [shard for state in states for shard in state.shards],
        {parameter: groups.index(group) for parameter, group in group_of.items()},
        # None without a GPU: all moments are in host memory then, and there is nothing to copy.
        MomentStreamer(device) if config.cpu_offload and device.type == "cuda" else None,
    )
    scheduler = _build_scheduler(param_groups, config, total_steps)
    optimizer = Optimizer(model, states, param_groups, adamw, scheduler, clip_grad)
    # Megatron's pipeline schedules call two functions that the model's config holds.
    # ``grad_scale_func`` scales the loss. ``finalize_model_grads_func`` is called after the last
    # micro-batch.
    model_config = model.module.config
    model_config.finalize_model_grads_func = _finalize_gradients
    model_config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _finalize_gradients(
    model: list[DistributedDataParallel], num_losses: Tensor | None = None, **options: Any
) -> None:
    """Complete the gradients of a step after its last micro-batch; collective.

    Gradients are reduced over data parallel ranks, those of norms are summed over tensor parallel
    ranks (with sequence parallelism), and all are divided by the global count of losses. Megatron's
    ``finalize_model_grads`` also does the last, but the host reads the count for it, and waits for
    the GPU.

    Args:
        model: Megatron's data parallel wrapper, as the only element of a list.
        num_losses: ``[]`` integer: how many losses this data parallel rank has summed. Only the
            last pipeline stage has the number. None divides by nothing.
    """
    finalize_model_grads(model, None, **options)
    if num_losses is None:
        return
    last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
    stages = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(num_losses, src=last_stage, group=stages)
    dist.all_reduce(num_losses, group=parallel_state.get_data_parallel_group(True))
    factor = 1.0 / num_losses.clamp(min=1)  # without any loss, all gradients are 0
    for wrapped in model:
        wrapped.scale_gradients(factor)


def _build_states(
    model: DistributedDataParallel, has_experts: bool, moments_on_host: bool
) -> list[ShardedState]:
    """Build one state for the dense parameters and, if any rank has experts, one for the experts.

    The two states are separate because they are sharded over different ranks: with expert
    parallelism, fewer ranks have a copy of an expert than of a dense parameter.
    """
    dense, expert = model.buffers, model.expert_parallel_buffers
    group = parallel_state.get_data_parallel_group_gloo(True, partial_data_parallel=True)
    if not has_experts:
        return [ShardedState(dense, group, "", moments_on_host)]
    expert_group = parallel_state.get_expert_data_parallel_group_gloo(True)
    return [
        ShardedState(dense, group, "chained_0.", moments_on_host),
        ShardedState(expert, expert_group, "chained_1.", moments_on_host),
    ]


def _group_parameters(
    model: DistributedDataParallel, config: OptimConfig
) -> dict[torch.nn.Parameter, _Group]:
    """Map each trained parameter to its group, the parameters with the same hyperparameters."""
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
    """Map parameters to their learning rate multipliers; a parameter that is missing has 1."""
    multiples: dict[torch.nn.Parameter, float] = {}
    if config.layer_lr_decay != 1:
        parts = [(layer, layer.layer_number) for layer in model.decoder.layers]
        parts += [(embedding, 0) for embedding in model.embedding_modules()]
        for part, number in parts:
            multiple = config.layer_lr_decay ** (model.config.num_layers - number)
            multiples |= dict.fromkeys(part.parameters(), multiple)
    if config.head_lr_mult != 1 and model.post_process:
        parameters = model.rm_head.parameters()
        weights = (parameter for parameter in parameters if not _is_of_objective(parameter))
        multiples |= dict.fromkeys(weights, config.head_lr_mult)
    return multiples


def _is_of_objective(parameter: torch.nn.Parameter) -> bool:
    """True for a scalar that belongs to the loss, such as a learned scale, not to the model."""
    return getattr(parameter, "is_of_objective", False)


class _Scheduler(OptimizerParamScheduler):
    """Megatron's learning rate schedule, scaled for each group from warm-up to decay.

    A group's learning rates are in proportion to its ``max_lr`` and its ``lr_mult``.
    """

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the next step's learning rate of a group."""
        # Megatron's own get_lr would begin the warm-up of every group at the same learning rate.
        scale = param_group.get("max_lr", self.max_lr) / self.max_lr
        return super().get_lr({}) * scale * param_group["lr_mult"]


def _build_scheduler(
    param_groups: Sequence[dict[str, Any]], config: OptimConfig, total_steps: int
) -> OptimizerParamScheduler:
    """Build the learning rate schedule, from warm-up to the end of the decay."""
    assert config.lr is not None
    warmup = config.sched.warmup_steps
    return _Scheduler(
        SimpleNamespace(param_groups=param_groups),
        # Warm-up as in NeMo: step k (from 1) of w warm-up steps has k / (w + 1) of the learning
        # rate, so that no step has a learning rate of 0.
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
