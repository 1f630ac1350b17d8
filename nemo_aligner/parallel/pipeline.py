"""Between pipeline stages: activations and gradients whose lengths every stage knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

_Shape = tuple[int, int, int]


class KnownShapes(P2PCommunicator):
    """Megatron's communicator for micro-batches of different lengths, without asking for them.

    Its own sends every shape ahead of its tensor, and has the host wait for the GPU to read it. All
    stages have the same micro-batches: ``shapes`` are those of their activations, in order.
    """

    def __init__(self, config: ModelParallelConfig, shapes: Sequence[_Shape]) -> None:
        # Else the host waits for the device after every message, too, for a fault of old torch.
        config.batch_p2p_sync = False
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._forward, self._backward = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[_Shape, _Shape]:
        nothing = (0, 0, 0)
        return (
            next(self._forward) if recv_prev else nothing,
            next(self._backward) if recv_next else nothing,
        )


def pipeline_options(config: ModelParallelConfig, shapes: Sequence[_Shape]) -> dict[str, Any]:
    """What Megatron's schedules take of ``KnownShapes`` and the groups that belong to it."""
    return {
        "p2p_communicator": KnownShapes(config, shapes),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }
