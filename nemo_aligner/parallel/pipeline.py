"""Between pipeline stages: activations and gradients whose lengths every stage knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

_Shape = tuple[int, int, int]
_MOST_ON_THEIR_WAY = 2


class PipelineMessages(P2PCommunicator):
    """Megatron's communicator for micro-batches of different lengths, with less to wait for.

    Its own sends every shape ahead of its tensor, and has the host wait for the GPU to read it. All
    stages have the same micro-batches: ``shapes`` are those of their activations, in order, which
    are of ``dtype``.

    What is received is waited for; what is sent travels while the stage computes on, until
    ``finish``. Messages have the order of Megatron's unbatched ones, so no rank can meet another
    out of order.
    """

    def __init__(
        self, config: ModelParallelConfig, shapes: Sequence[_Shape], dtype: torch.dtype
    ) -> None:
        config = copy(config)
        config.batch_p2p_comm, config.pipeline_dtype = False, dtype
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._forward, self._backward = iter(shapes), iter(shapes)
        # With each message what it reads, which nobody may overwrite or free before.
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def groups(self) -> ProcessGroupCollection:
        """What Megatron's schedules ask for beside a communicator."""
        return ProcessGroupCollection.use_mpu_process_groups()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._wait_for_all_but(0)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[_Shape, _Shape]:
        nothing = (0, 0, 0)
        return (
            next(self._forward) if recv_prev else nothing,
            next(self._backward) if recv_next else nothing,
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
        self._wait_for_all_but(_MOST_ON_THEIR_WAY)
        previous, following = received
        return previous, following, None

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._sending) > count:
            request, _ = self._sending.popleft()
            request.wait()
