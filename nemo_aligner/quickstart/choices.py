"""What the quickstart chooses: ranks and settings that suit the machine."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

# Pairs of the demo set have about 60 tokens; two cores train some 200 tokens/s of the demo's model.
STEPS = 40
LEARNING_RATE = 2e-4
HELDOUT_LINES = 240


@dataclass(frozen=True)
class LocalMachine:
    """GPUs of this machine, 0 for training on the CPU."""

    gpus: int

    @property
    def tensor_parallel(self) -> int:
        """Two processes share the model, but for one GPU alone."""
        return 1 if self.gpus == 1 else 2

    @property
    def processes(self) -> int:
        """Data parallelism takes what tensor parallelism leaves; an odd GPU stays idle."""
        return self.gpus // self.tensor_parallel * self.tensor_parallel or self.tensor_parallel


def find_local_machine() -> LocalMachine:
    """The machine as nvidia-smi sees it: without torch, which takes seconds to import."""
    if shutil.which("nvidia-smi") is None:
        return LocalMachine(gpus=0)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return LocalMachine(gpus=sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))


def training_settings(machine: LocalMachine, layers: int, is_demo: bool) -> list[str]:
    """Settings of the run that do not name a file.

    On GPUs the whole model is trained in bf16; on a CPU the upper fifth of its ``layers``.
    """
    settings = [
        f"model.tensor_model_parallel_size={machine.tensor_parallel}",
        "trainer.rm.val_before_training=true",
        "model.data.overlong=truncate_left",
        "model.data.seq_length=512",
    ]
    if is_demo:
        # Its replies are short; the model's own template would put a system prompt before each.
        settings.append("model.data.template=chatml")
    if machine.gpus:
        return [
            *settings,
            "trainer.precision=bf16",
            "model.global_batch_size=32",
            "model.micro_batch_tokens=16384",
            "model.optim.lr=3e-5",
        ]
    return [
        *settings,
        f"model.freeze_layers={frozen_layers(layers)}",
        f"trainer.rm.max_steps={STEPS}",
        "trainer.rm.val_check_interval=null",
        f"trainer.rm.save_interval={STEPS}",
        "model.global_batch_size=16",
        "model.micro_batch_tokens=1024",
        f"model.optim.lr={LEARNING_RATE}",
        "model.optim.sched.warmup_steps=5",
    ]


def frozen_layers(layers: int) -> int:
    """The lower layers that a CPU does not train, to be quick."""
    return layers * 4 // 5
