"""What of megatron-core and torch has no public name here, or no lasting one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def multiply_in_place(tensors: list[Tensor], factor: float) -> None:
    """In as few kernels as a GPU needs for all of them."""
    torch._foreach_mul_(tensors, factor)


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Those that this rank counts in the norm of all; the method has another name since 0.17."""
    newer = getattr(optimizer, "get_grads_for_grad_norm", None)
    return optimizer.get_main_grads_for_grad_norm() if newer is None else newer()


def main_param_and_moments(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """This rank's shard of a parameter in fp32, ``param``, and of its moments by their names.

    Where they lie depends on the precision and on the optimizer inside; only this method knows.
    """
    return optimizer._get_main_param_and_optimizer_states(parameter)


def put_main_param_and_moments(
    optimizer: Any, parameter: Tensor, tensors: dict[str, Tensor]
) -> None:
    """Copy into what ``main_param_and_moments`` gives."""
    optimizer._set_main_param_and_optimizer_states(parameter, tensors)


def recognise_groups(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Have a load find the ``saved`` entry of each of ``groups`` under other learning rates, too.

    Since 0.19 megatron-core compares what a group overrides, rates among it. Groups are in the same
    order in every run, by what they override.
    """
    for entry, group in zip(saved, groups, strict=False):
        entry.update({key: group[key] for key in ("max_lr", "min_lr") if key in group})


def load_step_counts(optimizer: Any) -> None:
    """Have a load keep torch's AdamW's count of steps, a tensor for each parameter.

    Megatron's loader has one count for a group, as Apex and TransformerEngine do. It would forget
    this one, or use one for several parameters, each of which then advances it.
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


def read_step_counts_at_once(optimizer: Any) -> None:
    """Have torch's AdamW give its counts of steps on the host, by one copy of all of them.

    megatron-core asks for each parameter's, and each time waits for the GPU.
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
