"""Adam's moments in host memory: on the GPU only while the parameters that they belong to step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNT = "step"
_CHUNK_BYTES = 2**30


class HostMoments:
    """Has ``optimizer`` (torch's AdamW, or Apex's or TransformerEngine's) step chunk by chunk.

    A chunk's moments are copied to the parameters' device, updated and copied back. So 8 bytes of
    every parameter lie in host memory instead of the GPU's, and cross the bus twice a step. The
    updates are those of the optimizer itself.

    Args:
        optimizer: with both moments of every parameter in its state, made by ``host_zeros``.
        chunk_bytes: of moments that are on the device at a time, at least those of a parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._optimizer = optimizer
        self._step_all = optimizer.step
        self._chunk_bytes = chunk_bytes
        optimizer.step = self._step  # type: ignore[method-assign, assignment]

    def to_host(self) -> None:
        """Move the moments that are on a device, as they are after the state was loaded."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state[parameter]
                for key in MOMENTS:
                    if not state[key].is_cpu:
                        state[key] = host_zeros(parameter).copy_(state[key])

    def _step(self) -> None:
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        # Apex and TransformerEngine count steps by group, torch by parameter.
        before = [group.get(_COUNT) for group in groups]
        after = list(before)
        for chunk in self._chunks(whole):
            for group, parameters, count in zip(groups, chunk, before, strict=True):
                _set(group, parameters, count)
            self._step_chunk([parameter for of_group in chunk for parameter in of_group])
            for index, (group, parameters) in enumerate(zip(groups, chunk, strict=True)):
                after[index] = group.get(_COUNT) if parameters else after[index]
        for group, parameters, count in zip(groups, whole, after, strict=True):
            _set(group, parameters, count)
        if torch.cuda.is_available():  # what is in host memory may be read next
            torch.cuda.synchronize()

    def _chunks(self, whole: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
        """The parameters of all groups, in order, group by group."""
        chunk: list[list[Tensor]] = [[] for _ in whole]
        held = 0
        for index, parameters in enumerate(whole):
            for parameter in parameters:
                size = sum(self._optimizer.state[parameter][key].nbytes for key in MOMENTS)
                if held and held + size > self._chunk_bytes:
                    yield chunk
                    chunk, held = [[] for _ in whole], 0
                chunk[index].append(parameter)
                held += size
        if held:
            yield chunk

    def _step_chunk(self, parameters: list[Tensor]) -> None:
        states = [self._optimizer.state[parameter] for parameter in parameters]
        host = [{key: state[key] for key in MOMENTS} for state in states]
        for parameter, state in zip(parameters, states, strict=True):
            for key in MOMENTS:
                state[key] = state[key].to(parameter.device, non_blocking=True)
        self._step_all()
        for state, kept in zip(states, host, strict=True):
            for key, tensor in kept.items():
                state[key] = tensor.copy_(state[key], non_blocking=True)


def _set(group: dict[str, Any], parameters: list[Tensor], count: Any) -> None:
    group["params"] = parameters
    group.pop(_COUNT, None)
    if count is not None:
        group[_COUNT] = count


def host_zeros(parameter: Tensor) -> Tensor:
    """As ``parameter``; page-locked where there is a GPU to read it without the host's help."""
    return torch.zeros_like(parameter, device="cpu", pin_memory=torch.cuda.is_available())
