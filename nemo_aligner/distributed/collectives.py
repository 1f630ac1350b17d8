"""Collectives on Python objects and flags, this rank's device, messages between pipeline stages."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nemo_aligner.cpu.matmuls import multiplies_bf16
from nemo_aligner.utils.errors import AlignerError
from nemo_aligner.utils.host_transfer import to_device
from nemo_aligner.utils.processes import find_process, is_main

# Collectives on Python objects and flags. All ranks must call them in the same order.

T = TypeVar("T")
# A function's result, or the error that it raised; the other one is None.
_Outcome: TypeAlias = tuple[T | None, BaseException | None]
_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 1.0


def barrier() -> None:
    device = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
    dist.barrier(device_ids=device)  # without an id, torch warns that it guesses the device


def broadcast_object(value: T) -> T:
    """Send rank 0's ``value`` to all ranks, as a pickle; return it on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank; they are sent as pickles."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def agree(flag: bool, device: torch.device | str) -> bool:
    """Return True on every rank if ``flag`` is True on at least one rank, else False.

    The flags are exchanged as a tensor on ``device``, which the group's backend must support.
    """
    return agree_on([flag], device)[0]


def agree_on(flags: Sequence[bool], device: torch.device | str) -> list[bool]:
    """Return for each of ``flags`` whether it is True on at least one rank.

    All ranks pass equally many flags and get the same result.
    """
    if dist.get_world_size() == 1:
        return list(flags)
    box = to_device(torch.tensor([int(flag) for flag in flags]), device)
    # One all-reduce for all flags, because each all-reduce costs a round trip through the GPU.
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [bool(value) for value in box.tolist()]


def max_over_model_ranks(count: int) -> int:
    """Return the largest ``count`` that the tensor and pipeline parallel ranks of a replica pass.

    All ranks of the replica (this rank's copy of the model) must call this function.
    """
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return count
    box = to_device(torch.tensor(count), current_device())
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    return int(box)


def on_main(function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 only; return its result, or raise its error, on every rank.

    All ranks must call this function, and wait for rank 0 in one collective, which has a time
    limit. Use ``run_on_some`` for work that may take many minutes.
    """
    if not dist.is_initialized():
        return function()
    outcome: _Outcome[T] = _attempt(function) if is_main() else (None, None)
    return _unwrap(broadcast_object(outcome))


def run_on_all(function: Callable[[], T]) -> list[T]:
    """Run ``function`` on every rank, and return the results of all ranks, in rank order.

    Collective. If it raises on any rank, every rank raises the error of the first such rank.
    """
    if not dist.is_initialized():
        return [function()]
    outcome = _attempt(function)
    outcomes = gather_objects(outcome)
    outcomes[dist.get_rank()] = outcome  # unlike its copy, this rank's own error has a traceback
    failed = [outcome for outcome in outcomes if outcome[1] is not None]
    return [_unwrap(outcome) for outcome in failed or outcomes]


def raise_everywhere(function: Callable[[], T]) -> T:
    """Do what ``run_on_all`` does, but return only this rank's result, which is not sent."""
    results: list[T] = []
    run_on_all(lambda: results.append(function()))
    return results[0]


def run_on_some(function: Callable[[], T] | None) -> list[T | None]:
    """Run a function on those ranks that pass one, and wait for them on all ranks.

    Waiting ranks poll with short collectives, because a single collective would time out if the
    function takes long. The function runs in a thread, and must not call collectives. If it raises
    on one rank, all ranks raise the error, even a SystemExit. A single process calls it directly.

    Args:
        function: what this rank runs; None runs nothing.

    Returns:
        The results of all ranks, in rank order; None for ranks that ran nothing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [None if function is None else function()]
    box: list[_Outcome[T]] = []
    if function is None:
        box.append((None, None))
    else:
        # Catch even a SystemExit from a user's code: it would end only the thread, and all ranks
        # would wait.
        work = partial(_attempt, function, BaseException)
        Thread(target=lambda: box.append(work()), daemon=True).start()
    wait = _FIRST_WAIT_S
    while True:
        outcomes = gather_objects(box[0] if box else None)
        failed = [outcome for outcome in outcomes if outcome is not None and outcome[1] is not None]
        if failed or None not in outcomes:
            return [_unwrap(outcome) for outcome in (failed or outcomes) if outcome is not None]
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


def once_per_node(function: Callable[[], T]) -> T:
    """Run ``function`` on the first rank of each node; return its node's result on every rank.

    All ranks must call this. Rank 0 runs first, so that nodes that share its disk find the files
    that it has written. See ``run_on_some`` for what the function may do. A single process calls
    the function directly.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    process, host = find_process(os.environ), socket.gethostname()

    def on_node() -> tuple[str, T]:
        return host, function()

    results = run_on_some(on_node if process.rank == 0 else None)
    if process.local_world_size < process.world_size:
        first_elsewhere = process.local_rank == 0 and process.rank > 0
        results += run_on_some(on_node if first_elsewhere else None)
    return next(result for name, result in filter(None, results) if name == host)


def _attempt(function: Callable[[], T], caught: type[BaseException] = Exception) -> _Outcome[T]:
    """Return the outcome of ``function``, whose error can be sent to other ranks."""
    try:
        return function(), None
    except caught as error:
        return None, _sendable(error)


def _sendable(error: BaseException) -> BaseException:
    """Return ``error``, or an error with its text if its own pickle cannot be read.

    The collective that sends it would otherwise fail on this rank, and the others would wait.
    """
    try:
        is_same = str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        is_same = False
    if is_same:
        return error
    if isinstance(error, AlignerError):
        return AlignerError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def _unwrap(outcome: _Outcome[T]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


# The device on which this rank computes.


def current_device() -> torch.device:
    """Return the device on which this rank computes."""
    return torch.device(torch.cuda.current_device())


def wait_for_device() -> None:
    """Wait until the GPU has finished all queued work; without a GPU return at once."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lacks_bf16() -> bool:
    """Tell whether this rank computes on a CPU that has no bf16 instructions for matmuls.

    On such a CPU, a bf16 matmul takes many times as long as an fp32 matmul.
    """
    return not torch.cuda.is_available() and not multiplies_bf16()


def gpu_computes_bf16() -> bool:
    """Tell whether this rank computes on a GPU whose hardware supports bf16 matmuls."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


# Messages between pipeline stages: activations and gradients whose shapes are known in advance.

_Shape = tuple[int, int, int]
_MOST_PENDING_SENDS = 2


class PipelineMessages(P2PCommunicator):
    """Megatron's communicator between pipeline stages, for micro-batches of known lengths.

    If micro-batches have different lengths, Megatron's own communicator sends the shape of each
    tensor first, and the host has to wait for the GPU to read the shape. Here every stage knows all
    shapes in advance, so only tensors are sent.

    Receiving a tensor blocks. Sending does not: a stage computes while its tensors are sent, and
    ``finish`` waits for the last ones. The order of messages is the same on all ranks, as for
    Megatron's unbatched messages.

    Args:
        shapes: ``(tokens, batch, hidden)`` of the activations of each micro-batch, in order.
        dtype: dtype of the activations and their gradients.
    """

    def __init__(
        self, config: ModelParallelConfig, shapes: Sequence[_Shape], dtype: torch.dtype
    ) -> None:
        config = copy(config)
        config.batch_p2p_comm, config.pipeline_dtype = False, dtype
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._forward, self._backward = iter(shapes), iter(shapes)
        # Requests of sends in progress. Their tensors are kept here, because they must not be freed
        # before they are sent.
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def groups(self) -> ProcessGroupCollection:
        """Return the process groups that Megatron's schedules need next to a communicator."""
        return ProcessGroupCollection.use_mpu_process_groups()

    def finish(self) -> None:
        """Wait until all tensors have been sent, so that their memory may be freed."""
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
