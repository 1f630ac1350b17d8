"""What is to be planned: the batch, the GPUs, and what is assumed of their speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_aligner.config.common import Precision
from nemo_aligner.config.data import DataConfig
from nemo_aligner.config.lora import LoraConfig
from nemo_aligner.config.model import ModelConfig, Recompute
from nemo_aligner.errors import ConfigError
from nemo_aligner.models.lora import LoraShape
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.cost import Machine
from nemo_aligner.planning.planner import Planner

GIB = 2**30


@dataclass(frozen=True)
class PlanRequest:
    """The settings of a plan; None is the default of training's settings.

    ``gpu_memory`` and ``reserve`` (left to CUDA, NCCL and the allocator's gaps) are GiB, ``tflops``
    the peak of a GPU in TFLOP/s of which ``mfu`` is reached, ``intra_node``, ``inter_node`` and
    ``host`` GB/s of a GPU. ``global_batch_tokens`` goes before ``global_batch_size``.
    """

    gpu_memory: float = 80
    reserve: float = 4
    seq_length: int | None = None
    global_batch_size: int | None = None
    global_batch_tokens: int | None = None
    micro_batch_tokens: int | None = None
    precision: str = "bf16"
    freeze_layers: int = 0
    lora_rank: int = 0
    cpu_offload: bool = False
    recompute: str = "auto"
    tflops: float = 989
    mfu: float = 0.4
    intra_node: float = 450
    inter_node: float = 50
    host: float = 50
    gpus_per_node: int = 8

    def planner(self, shape: ModelShape) -> Planner:
        """The planner of a model under these settings.

        Raises:
            ConfigError: one has a value that cannot be.
        """
        length = self.seq_length or DataConfig().seq_length
        batch = self.global_batch_size or ModelConfig().global_batch_size
        if self.global_batch_tokens is not None:
            batch = max(1, self.global_batch_tokens // (2 * length))
        self._check(shape, 2 * length)
        lora = LoraShape.from_settings(LoraConfig(rank=self.lora_rank)) if self.lora_rank else None
        return Planner(
            replace(shape, lora=lora or shape.lora),
            self._machine(),
            usable=(self.gpu_memory - self.reserve) * GIB,
            batch=batch,
            length=length,
            budget=self.micro_batch_tokens or max(ModelConfig().micro_batch_tokens, 2 * length),
            precision=Precision(self.precision),
            recompute=None if self.recompute == "auto" else Recompute(self.recompute),
            freeze_layers=self.freeze_layers,
            cpu_offload=self.cpu_offload,
        )

    def _machine(self) -> Machine:
        return Machine(
            flops=self.tflops * 1e12,
            efficiency=self.mfu,
            intra_node=self.intra_node * 1e9,
            inter_node=self.inter_node * 1e9,
            ranks_per_node=self.gpus_per_node,
            host=self.host * 1e9,
        )

    def _check(self, shape: ModelShape, pair: int) -> None:
        last, reserve = shape.num_layers - 1, self.reserve
        budget = self.micro_batch_tokens or pair
        above_zero = "a number above 0"
        checks = [
            ("tflops", self.tflops > 0, above_zero),
            ("mfu", 0 < self.mfu <= 1, "more than 0, at most 1"),
            ("intra_node", self.intra_node > 0, above_zero),
            ("inter_node", self.inter_node > 0, above_zero),
            ("host", self.host > 0, above_zero),
            ("reserve", reserve >= 0, "0 or more"),
            ("gpu_memory", self.gpu_memory > reserve, f"more than the {reserve:g} of reserve"),
            ("micro_batch_tokens", budget >= pair, f"{pair} (a pair) or more"),
            ("lora_rank", self.lora_rank >= 0, "0 (no LoRA) or more"),
            ("freeze_layers", not (self.freeze_layers and self.lora_rank), "0 beside LoRA"),
            ("freeze_layers", 0 <= self.freeze_layers <= last, f"0 to {last}"),
        ]
        for name, is_good, wanted in checks:
            if not is_good:
                raise ConfigError(f"{name}: got {getattr(self, name):g}, wanted {wanted}")
