"""Worker of training.py, in an environment with TRL: the same steps by its RewardTrainer, timed."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


class _Clock:
    """Seconds and loss of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._start = 0.0

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *unused: Any, **kwargs: Any) -> None:
                clock._start = time.perf_counter()

            def on_step_end(self, *unused: Any, **kwargs: Any) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                clock.seconds.append(time.perf_counter() - clock._start)

            def on_log(self, *unused: Any, **kwargs: Any) -> None:
                if "loss" in kwargs["logs"]:
                    clock.losses.append(float(kwargs["logs"]["loss"]))

        return Callback()


def main() -> None:
    job = json.loads(sys.stdin.read())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(job["hf"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(
        job["hf"], num_labels=1, dtype=torch.bfloat16 if gpu else torch.float32
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(np.load(job["head"])))
    pairs = json.loads(Path(job["ids"]).read_text())
    rows = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs]
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = RewardConfig(
            output_dir=folder,
            per_device_train_batch_size=job["batch_size"],
            gradient_accumulation_steps=job["global_batch_size"] // job["batch_size"],
            max_steps=job["warm_up"] + job["steps"],
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            max_length=None,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=gpu,
            use_cpu=not gpu,
            disable_tqdm=True,
        )
        trainer = RewardTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock.callback()],
        )
        trainer.train()
    peak = (
        torch.cuda.max_memory_allocated() / 2**30
        if gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    seconds = clock.seconds[job["warm_up"] :]
    print(json.dumps({"seconds": seconds, "losses": clock.losses, "peak_gib": peak}))


if __name__ == "__main__":
    main()
