"""Training against TRL's RewardTrainer: the same weights, pairs, batches and loss, turn by turn.

    pip install -e '.[bench]'
    python benchmarks/training.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl

Both train all weights in fp32 on the CPU, in bf16 on a GPU. TRL gets the very token ids; for each
of ``--trl-batch`` it is run as many times as ours, in turn, and the speed-up is the median of the
ratios. The first step of a run is not timed: it waits for memory, and for kernels to be chosen.
``--trl-python`` is another environment's, with a TRL of its own. A TRL that dies, as on a machine
whose memory is too small for its batch, leaves a dash instead of its figures.
Peak memory is the process's on the CPU, the allocator's on a GPU. MFU counts ``6 * parameters`` per
real token, against the rate of a large matrix product measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    WorkerFailed,
    add_device_option,
    choose_device,
    machine,
    matmul_rate,
    median_of_ratios,
    now,
    peak_gib,
    prepare_model,
    render,
    require,
    run_worker,
    start,
    write_json,
)

LR = 1e-5


def main() -> None:
    arguments = _parse()
    require("trl", "datasets", "accelerate", python=arguments.trl_python)
    arguments.device = device = choose_device(arguments.device)
    if arguments.micro_batch_tokens is None:
        arguments.micro_batch_tokens = 16384 if device == "cuda" else 1280

    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    hf, nemo = prepare_model(arguments.model, work)
    head = work / "head.npy"
    hidden = _hidden_size(hf)
    np.save(head, np.random.RandomState(0).normal(0, 0.02, (1, hidden)).astype(np.float32))
    precision = "bf16" if device == "cuda" else "fp32"
    both = {
        "steps": arguments.steps,
        "warm_up": arguments.warm_up,
        "global_batch_size": arguments.global_batch,
        "head": str(head),
        "ids": str(work / "ids.json"),
    }
    ours = {**both, "settings": _settings(arguments, nemo, precision)}
    theirs = {**both, "hf": str(hf), "lr": LR}
    peak_rate = matmul_rate()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for batch_size in arguments.trl_batch:
        found = _compare(arguments, ours, {**theirs, "batch_size": batch_size})
        rows += _rows(found, batch_size, arguments, _parameters(hf), peak_rate)
        print(f"\n{render(rows)}", flush=True)
        if found.failure is not None:
            failures.append(f"TRL, batch {batch_size}: {found.failure}")
            print(f"\n{failures[-1]}", flush=True)
    about = {"machine": machine(), "model": str(arguments.model), "precision": precision}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows, "failures": failures})


def _settings(arguments: argparse.Namespace, nemo: Path, precision: str) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={nemo}",
        f"model.data.data_prefix.train=[{arguments.data}]",
        f"model.global_batch_size={arguments.global_batch}",
        f"model.micro_batch_tokens={arguments.micro_batch_tokens}",
        f"model.data.seq_length={arguments.seq_length}",
        f"model.optim.lr={LR}",
        "model.optim.sched.name=constant",
        "model.optim.sched.warmup_steps=0",
        f"trainer.precision={precision}",
    ]


@dataclass(frozen=True)
class Found:
    """What every run of each has printed, and how TRL failed, if it did: then it has no runs."""

    ours: list[dict[str, Any]]
    trl: list[dict[str, Any]]
    failure: str | None


def _compare(arguments: argparse.Namespace, ours: dict[str, Any], theirs: dict[str, Any]) -> Found:
    runs: list[dict[str, Any]] = []
    trl: list[dict[str, Any]] = []
    failure: str | None = None
    for turn in range(arguments.turns):
        print(f"turn {turn + 1} of {arguments.turns}: ours", end="", flush=True)
        runs.append(run_worker("training.py", "ours", ours, arguments.threads))
        # What has failed once is not asked again.
        if failure is None:
            print(", TRL", end="", flush=True)
            try:
                python = arguments.trl_python
                trl.append(
                    run_worker("training.py", "trl", theirs, arguments.threads, python=python)
                )
            except WorkerFailed as error:
                failure = str(error)
        print(flush=True)
    if failure is not None:
        return Found(runs, [], failure)
    losses = [found[0]["losses"][0] for found in (runs, trl)]
    print(f"loss of the first batch: ours {losses[0]:.6f}, TRL {losses[1]:.6f}")
    # TRL rounds what it logs; 16 bits round everything.
    allowed = 1e-3 if arguments.device == "cpu" else 2e-2
    if abs(losses[0] - losses[1]) > allowed * max(losses):
        sys.exit("the losses differ: these are not the same computations")
    return Found(runs, trl, None)


def _rows(
    found: Found,
    batch_size: int,
    arguments: argparse.Namespace,
    parameters: int,
    peak_rate: float,
) -> list[dict[str, Any]]:
    pairs = arguments.steps * arguments.global_batch
    tokens = found.ours[0]["tokens"]
    ours, trl = ([sum(run["seconds"]) for run in runs] for runs in (found.ours, found.trl))

    def row(label: str, seconds: list[float], runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "trainer": label,
            "pairs/s": pairs / median(seconds) if runs else None,
            "real tokens/s": tokens / median(seconds) if runs else None,
            "MFU": 6 * parameters * tokens / median(seconds) / peak_rate if runs else None,
            "peak GiB": max(run["peak_gib"] for run in runs) if runs else None,
        }

    ratio = median_of_ratios(ours, trl) if found.trl else None
    return [
        {**row("nemo_aligner", ours, found.ours), "ours is faster by": ""},
        {**row(f"TRL, batch {batch_size}", trl, found.trl), "ours is faster by": ratio},
    ]


def _hidden_size(hf: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(hf).hidden_size)


def _parameters(hf: Path) -> int:
    from safetensors import safe_open

    total = 0
    for path in hf.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            total += sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    return total


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a .gguf, or a folder")
    parser.add_argument("--data", type=Path, required=True, help="pairs")
    parser.add_argument("--trl-python", default=sys.executable, help="with TRL; default: this one")
    parser.add_argument("--trl-batch", type=int, nargs="+", default=[8, 1], help="pairs")
    parser.add_argument("--steps", type=int, default=2, help="a run (default 2)")
    parser.add_argument("--warm-up", type=int, default=1, help="untimed steps first (default 1)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each (default 2)")
    parser.add_argument("--global-batch", type=int, default=8, help="pairs a step (default 8)")
    parser.add_argument("--micro-batch-tokens", type=int, help="default 1280 on a CPU")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default 2)")
    add_device_option(parser)
    parser.add_argument("--work", help="a folder to keep the converted model in")
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


# The workers.


def train_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train some steps of nemo_aligner, timed."""
    import torch

    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.data.training_data import TrainLoader
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout
    from nemo_aligner.training.build import build_data, build_learner

    config = load_config(TrainConfig, job["settings"])
    size, options = job["global_batch_size"], config.model
    with launch():
        layout = initialize_layout()
        data = build_data(config)
        loader = TrainLoader(data.train, size, options.micro_batch_tokens, options.seed, 0, 1)
        warm_up = job["warm_up"]
        batches = [loader.global_batch(step) for step in range(warm_up + job["steps"])]
        records = [record for batch in batches for record in batch]
        if "ids" in job:
            texts = map(data.train.record, records)
            pairs = [[np.asarray(text).tolist() for text in pair] for pair in texts]
            Path(job["ids"]).write_text(json.dumps(pairs))
        learner, _, _ = build_learner(config, data, layout)
        head = learner.model.rm_head.weight
        with torch.no_grad():
            head.copy_(torch.from_numpy(np.load(job["head"])))
        seconds, losses = [], []
        for step in range(len(batches)):
            begun = now()
            losses.append(learner.train_step(step)["loss"])
            seconds.append(now() - begun)
    timed = [record for batch in batches[warm_up:] for record in batch]
    return {
        "seconds": seconds[warm_up:],
        "losses": losses,
        "tokens": sum(data.train.num_tokens(record) for record in timed),
        "peak_gib": peak_gib(),
    }


def train_trl(job: dict[str, Any]) -> dict[str, Any]:
    """Train the same steps by TRL's RewardTrainer, timed; its environment needs no more."""
    import torch

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
    seconds = clock.seconds[job["warm_up"] :]
    return {"seconds": seconds, "losses": clock.losses, "peak_gib": peak_gib()}


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
                clock._start = now()

            def on_step_end(self, *unused: Any, **kwargs: Any) -> None:
                clock.seconds.append(now() - clock._start)

            def on_log(self, *unused: Any, **kwargs: Any) -> None:
                if "loss" in kwargs["logs"]:
                    clock.losses.append(float(kwargs["logs"]["loss"]))

        return Callback()


if __name__ == "__main__":
    start(main, ours=train_ours, trl=train_trl)
