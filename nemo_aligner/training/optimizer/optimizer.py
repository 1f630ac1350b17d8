"""One step of the optimizer, and its state to save and to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from nemo_aligner.parallel.host_copies import before_writing
from nemo_aligner.training.optimizer.gradients import clip_gradients, gradient_norm
from nemo_aligner.training.optimizer.host_moments import MOMENTS, HostMoments
from nemo_aligner.training.optimizer.megatron_internals import recognise_groups

MIN_LOSS_SCALE = 1.0
# The one form of the optimizer's state that any layout can read; of the ranks that hold the same
# piece of the model, one gathers it in host memory, not each.
_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
_COUNT = "steps"
# What a run that goes on takes from its settings and not from its checkpoint.
_SETTINGS = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps")
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
        self._loss_scale: float | None = None  # of the next step, where it has been asked for
        self.skipped_steps = 0
        groups = optimizer.param_groups
        self._settings = [{key: group[key] for key in _SETTINGS} for group in groups]
        # Of its kind of AdamW: one that was saved by another kind has other keys.
        self._own = [{key: group[key] for key in group if key != "params"} for group in groups]

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @property
    def loss_scale(self) -> float | None:
        """What the next step's loss is multiplied by in fp16; None in fp32 and bf16."""
        if self._loss_scale is None and self._optimizer.config.fp16:
            self._loss_scale = float(self._optimizer.get_loss_scale())  # waits for the device
        return self._loss_scale

    def step(self) -> Update:
        """Update the weights, if the gradient is finite; the same answer on every rank.

        As in Megatron's own loop, a skipped step does not move the learning rate.
        """
        scale, self._loss_scale = self.loss_scale, None
        # Megatron's step is taken apart: in fp32 and bf16 it would put a gradient that is not
        # finite into the weights, and tell of it afterwards.
        if self._optimizer.prepare_grads():
            skipped = scale is not None and scale > MIN_LOSS_SCALE
            self.skipped_steps += skipped
            return Update(math.nan, applied=False, skipped=skipped)
        norm = gradient_norm(self._optimizer.chained_optimizers)
        if not math.isfinite(norm):
            return Update(norm, applied=False, skipped=False)
        self._clip(norm)
        before_writing()  # a save may still be copying weights and moments
        self._optimizer.step_with_ready_grads()
        self._scheduler.step(1)
        return Update(norm, applied=True, skipped=False)

    def state_tensors(self) -> list[Tensor]:
        """What this rank has of each parameter: its fp32 weights and its moments."""
        found = []
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    found += [parameter.data, *(state[key] for key in MOMENTS)]
        return found

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
        if limit > 0:
            clip_gradients(self._optimizer.chained_optimizers, limit, norm)

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        """Megatron's sharded view of the state, for the model's own such view.

        What is to be saved is a copy in host memory: on the first rank of a data parallel group
        12 bytes for each trained parameter that it holds. It may still be on its way: it is there
        when what is next given to ``copy_beside`` is. The next call writes into the same memory:
        by then, the last copy must have been saved.
        """
        self._count_steps_without_parameters()
        for moments in self._offloaded:
            moments.wait()
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
        self._restore_settings()
        recognise_groups(state["optimizer"]["param_groups"], self._optimizer.param_groups)
        self._optimizer.load_state_dict(state)
        self._loss_scale = None
        self._restore_settings()
        for group in self._optimizer.param_groups:
            if distrib_optimizer.HAVE_APEX_OR_TE:
                group["step"] = updates
        self._scheduler.num_steps = 0
        self._scheduler.step(updates)

    def _restore_settings(self) -> None:
        """Every group's own, of which megatron-core makes those of another that decays alike.

        It does so whenever it loads, and also before, to know what there is to be loaded. What
        torch's, Apex's and TransformerEngine's AdamW each have alone is not in another's state.
        """
        groups = self._optimizer.param_groups
        for group, values, own in zip(groups, self._settings, self._own, strict=True):
            group.update(values)
            for key, value in own.items():
                group.setdefault(key, value)

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
