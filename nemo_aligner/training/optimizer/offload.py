"""Adam states in host memory, and private names of megatron-core and torch for the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.utils.host_transfer import pieces_of, room_for

# Offloading: moments are on the GPU only while their parameters step.

MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNT = "step"
# Two chunks are on the device at a time: one arrives while the other steps.
_CHUNK_BYTES = 2**28


class OffloadedStates:
    """Offloads Adam's moments, and makes ``optimizer`` step chunk by chunk.

    A chunk's moments are copied to the parameters' device, updated by the optimizer itself and
    copied back. 8 bytes of every parameter lie in host memory instead of the GPU's, and cross the
    bus twice a step.

    Args:
        optimizer: torch's AdamW, or Apex's or TransformerEngine's, with both moments of every
            parameter in its state, allocated by ``host_zeros``.
        chunk_bytes: of the moments in a chunk, which has at least one parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._optimizer = optimizer
        self._step_all = optimizer.step
        self._chunk_bytes = chunk_bytes
        devices = {each.device for group in optimizer.param_groups for each in group["params"]}
        gpu = next((device for device in devices if device.type == "cuda"), None)
        self._ferry = None if gpu is None else _Ferry(gpu)
        optimizer.step = self._step  # type: ignore[method-assign, assignment]
        optimizer.load_state_dict = self._load_settings  # type: ignore[method-assign]

    def wait(self) -> None:
        """Wait until the host may read the moments."""
        if self._ferry is not None:
            self._ferry.wait()

    def _load_settings(self, state_dict: dict[str, Any]) -> None:
        """Load groups and step counts; megatron-core then copies the moments into ours.

        torch's own method would first put all moments on the device.
        """
        self.wait()
        for group, loaded in zip(
            self._optimizer.param_groups, state_dict["param_groups"], strict=True
        ):
            group.update({key: value for key, value in loaded.items() if key != "params"})
            for parameter, index in zip(group["params"], loaded["params"], strict=True):
                count = state_dict["state"].get(index, {}).get(_COUNT)
                if count is not None:
                    own = count.to(parameter.device, torch.float32, copy=True)
                    self._optimizer.state[parameter][_COUNT] = own

    def _step(self) -> None:
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        # Apex and TransformerEngine count steps per group, torch per parameter.
        before = [group.get(_COUNT) for group in groups]
        after = list(before)
        for chunk in self._on_device(list(self._chunks(whole))):
            for group, parameters, count in zip(groups, chunk, before, strict=True):
                _set(group, parameters, count)
            self._step_all()
            for index, (group, parameters) in enumerate(zip(groups, chunk, strict=True)):
                after[index] = group.get(_COUNT) if parameters else after[index]
        for group, parameters, count in zip(groups, whole, after, strict=True):
            _set(group, parameters, count)

    def _chunks(self, whole: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
        """Split the parameters of all groups into chunks, in order."""
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

    def _on_device(self, chunks: list[list[list[Tensor]]]) -> Iterator[list[list[Tensor]]]:
        """Yield each of ``chunks`` with its moments on the parameters' device."""
        if self._ferry is None:
            yield from chunks
            return
        places = [self._places(chunk) for chunk in chunks]
        host = [[state[key] for state, key in of_chunk] for of_chunk in places]
        for index, moments in enumerate(self._ferry.carry(host)):
            _put(places[index], moments)
            yield chunks[index]
            _put(places[index], host[index])

    def _places(self, chunk: list[list[Tensor]]) -> list[tuple[dict[str, Tensor], str]]:
        parameters = [parameter for of_group in chunk for parameter in of_group]
        return [(self._optimizer.state[each], key) for each in parameters for key in MOMENTS]


class _Ferry:
    """Copies tensors to the GPU and back on two streams, overlapping with compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(), torch.cuda.Stream()
        self._all_back: torch.cuda.Event | None = None

    def carry(self, loads: Sequence[list[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield each of ``loads`` on the device; its contents then return to the host."""
        if not loads:
            return
        compute = torch.cuda.current_stream()
        room = max(map(room_for, loads))
        buffers = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for buffer in buffers:
            buffer.record_stream(self._up)
            buffer.record_stream(self._down)
        # Wait for the buffers' memory, and for what the last step sent to the host.
        self._up.wait_stream(compute)
        self._up.wait_stream(self._down)
        near, arrived = self._bring(buffers[0], loads[0])
        for index, load in enumerate(loads):
            compute.wait_event(arrived)
            following = loads[index + 1 : index + 2]
            if following:
                self._up.wait_stream(self._down)  # the previous load has left this buffer
                coming = self._bring(buffers[(index + 1) % 2], following[0])
            yield near
            self._down.wait_stream(compute)
            with torch.cuda.stream(self._down):
                for kept, stepped in zip(load, near, strict=True):
                    kept.copy_(stepped, non_blocking=True)
            if following:
                near, arrived = coming
        self._all_back = self._down.record_event()

    def wait(self) -> None:
        """Wait until everything is back on the host."""
        if self._all_back is not None:
            self._all_back.synchronize()

    def _bring(self, buffer: Tensor, load: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        near = pieces_of(buffer, load)
        with torch.cuda.stream(self._up):
            for there, kept in zip(near, load, strict=True):
                there.copy_(kept, non_blocking=True)
        return near, self._up.record_event()


def _put(places: Sequence[tuple[dict[str, Tensor], str]], moments: Sequence[Tensor]) -> None:
    for (state, key), moment in zip(places, moments, strict=True):
        state[key] = moment


def _set(group: dict[str, Any], parameters: list[Tensor], count: Any) -> None:
    group["params"] = parameters
    group.pop(_COUNT, None)
    if count is not None:
        group[_COUNT] = count


# Private or short-lived names of megatron-core and torch.


def multiply_in_place(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors with as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Gradients that this rank contributes to the global norm; renamed in megatron-core 0.17."""
    newer = getattr(optimizer, "get_grads_for_grad_norm", None)
    return optimizer.get_main_grads_for_grad_norm() if newer is None else newer()


def main_param_and_moments(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """This rank's shards of a parameter: ``param`` in fp32, and the moments by name.

    Their place depends on precision and inner optimizer; only this method knows it.
    """
    return optimizer._get_main_param_and_optimizer_states(parameter)


def put_main_param_and_moments(
    optimizer: Any, parameter: Tensor, tensors: dict[str, Tensor]
) -> None:
    """Copy ``tensors`` into what ``main_param_and_moments`` returns."""
    optimizer._set_main_param_and_optimizer_states(parameter, tensors)


def recognise_groups(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Let a load match ``saved`` groups to ``groups`` when learning rates have changed.

    Since 0.19 megatron-core compares the overrides of a group, rates among them. The order of
    groups is the same in every run.
    """
    for entry, group in zip(saved, groups, strict=False):
        entry.update({key: group[key] for key in ("max_lr", "min_lr", "lr_mult") if key in group})


def load_step_counts(optimizer: Any) -> None:
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


def read_step_counts_at_once(optimizer: Any) -> None:
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
