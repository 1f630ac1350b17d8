"""Collectives on Python objects and flags, the device of this rank, and pipeline messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nemo_aligner.cpu.products import multiplies_bf16
from nemo_aligner.utils.host_transfer import to_device
from nemo_aligner.utils.processes import is_main

# Collectives on Python objects and flags. All ranks must call them in the same order.

T = TypeVar("T")
_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 1.0


def barrier() -> None:
    device = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
    dist.barrier(device_ids=device)  # without an id, torch warns that it guesses the device


def broadcast_object(value: T) -> T:
    """Return rank 0's ``value`` on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Return the list of all ranks' values, in rank order, on every rank."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def agree(flag: bool, device: torch.device | str) -> bool:
    """Tell on every rank whether ``flag`` is set on any rank."""
    return agree_on([flag], device)[0]


def agree_on(flags: Sequence[bool], device: torch.device | str) -> list[bool]:
    """Tell on every rank which of ``flags`` are set on any rank, with one all-reduce."""
    if dist.get_world_size() == 1:
        return list(flags)
    box = to_device(torch.tensor([int(flag) for flag in flags]), device)
    # One collective for all flags, because each costs a round trip through the GPU.
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [bool(value) for value in box.tolist()]


def max_over_model_ranks(count: int) -> int:
    """Return the largest ``count`` of the tensor and pipeline parallel ranks of one model."""
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return count
    box = to_device(torch.tensor(count), current_device())
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    return int(box)


def on_main(function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0; on every rank, return its result or raise its error."""
    outcome: tuple[T | None, Exception | None] = (None, None)
    if is_main():
        outcome = _attempt(function)
    if dist.is_initialized():
        outcome = broadcast_object(outcome)
    return _unwrap(outcome)


def run_on_some(function: Callable[[], T] | None) -> list[T | None]:
    """Run ``function`` on the ranks that pass one; return all ranks' results, in rank order.

    The other ranks poll with short collectives, because a single one would time out during long
    work. ``function`` runs in a thread and must not call collectives. An error of one rank is
    raised on all ranks.
    """
    if not dist.is_initialized():
        return [None if function is None else function()]
    box: list[tuple[T | None, Exception | None]] = []
    if function is None:
        box.append((None, None))
    else:
        work = partial(_attempt, function)
        Thread(target=lambda: box.append(work()), daemon=True).start()
    wait = _FIRST_WAIT_S
    while True:
        outcomes = gather_objects(box[0] if box else None)
        failed = [outcome for outcome in outcomes if outcome is not None and outcome[1] is not None]
        if failed or None not in outcomes:
            return [_unwrap(outcome) for outcome in (failed or outcomes) if outcome is not None]
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _unwrap(outcome: tuple[T | None, Exception | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


# Device.


def current_device() -> torch.device:
    """Return the device on which this rank computes."""
    return torch.device(torch.cuda.current_device())


def wait_for_device() -> None:
    """Wait until the GPU has finished all queued work, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lacks_bf16() -> bool:
    """Tell whether this rank computes on a CPU without bf16 instructions for matmuls.

    On such a CPU, bf16 matmuls take many times as long as fp32 ones.
    """
    return not torch.cuda.is_available() and not multiplies_bf16()


def gpu_computes_bf16() -> bool:
    """Tell whether this rank computes on a GPU with bf16 matmuls in hardware."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


# Pipeline messages: activations and gradients whose shapes every stage knows in advance.

_Shape = tuple[int, int, int]
_MOST_PENDING_SENDS = 2


class PipelineMessages(P2PCommunicator):
    """Megatron's communicator for micro-batches of different lengths, with fewer waits.

    Megatron's own sends every shape before its tensor, and the host waits for the GPU to read it.
    Here all stages know the ``shapes`` ``(tokens, batch, hidden)`` of their activations in order,
    which have ``dtype``.

    A receive blocks. Sends proceed while the stage computes, until ``finish``. Messages have the
    order of Megatron's unbatched ones, so that all ranks see them in the same order.
    """

    def __init__(
        self, config: ModelParallelConfig, shapes: Sequence[_Shape], dtype: torch.dtype
    ) -> None:
        config = copy(config)
        config.batch_p2p_comm, config.pipeline_dtype = False, dtype
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._forward, self._backward = iter(shapes), iter(shapes)
        # Pending requests, with their tensors: these must not be overwritten or freed before.
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def groups(self) -> ProcessGroupCollection:
        """Return the process groups that Megatron's schedules need next to a communicator."""
        return ProcessGroupCollection.use_mpu_process_groups()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._wait_for_sends(0)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[_Shape, _Shape]:
        no_shape = (0, 0, 0)
        return (
            next(self._forward) if recv_prev else no_shape,
            next(self._backward) if recv_next else no_shape,
        )

    def _communicate(self, **options: Any) -> tuple[Tensor | None, Tensor | None, None]:
        options["wait_on_reqs"] = False
        *received, requests = super()._communicate(**options)
        for end in ("next", "prev"):
            tensor = options[f"tensor_send_{end}"]
            if tensor is not None:
                self._sending.append((requests[f"send_{end}"], tensor.detach()))
            if f"recv_{end}" in requests:
                requests[f"recv_{end}"].wait()
        self._wait_for_sends(_MOST_PENDING_SENDS)
        previous, following = received
        return previous, following, None

    def _wait_for_sends(self, remaining: int) -> None:
        while len(self._sending) > remaining:
            request, _ = self._sending.popleft()
            request.wait()
