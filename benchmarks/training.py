"""Compare our training speed with that of TRL's RewardTrainer: same weights, pairs and loss.

    pip install -e '.[bench]'
    python benchmarks/training.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl

Both train all weights, in fp32 on the CPU and in bf16 on a GPU. TRL gets the token ids that we
train on. It runs once with each batch size of ``--trl-batch`` in every turn, after ours, and the
speed-up is the median over the turns of the ratio of times. The first step of a run is not timed:
it allocates memory and chooses kernels. ``--trl-tuned`` also runs TRL with FlashAttention 2, Liger
kernels and the fastest of several batch sizes. ``--trl-python`` is the interpreter of another
environment with TRL. Where TRL dies, for example for lack of memory, a dash replaces its figures.
Peak memory is the process's on the CPU, the allocator's on a GPU. MFU counts ``6 * parameters``
FLOPs for each real token, relative to the rate of a large matmul measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
    hidden = _read_hidden_size(hf)
    np.save(head, np.random.RandomState(0).normal(0, 0.02, (1, hidden)).astype(np.float32))
    precision = "bf16" if device == "cuda" else "fp32"
    shared = {
        "steps": arguments.steps,
        "warm_up": arguments.warm_up,
        "global_batch_size": arguments.global_batch,
        "head": str(head),
        "ids": str(work / "ids.json"),
    }
    ours = {**shared, "settings": _make_settings(arguments, nemo, precision)}
    theirs = {**shared, "hf": str(hf), "lr": LR}
    peers = {
        f"TRL, batch {size}": {**theirs, "batch_sizes": [size]} for size in arguments.trl_batch
    }
    if arguments.trl_tuned:
        peers["TRL, tuned"] = {**theirs, "batch_sizes": arguments.trl_tuned, "is_tuned": True}
    about = {"machine": machine(), "model": str(arguments.model), "precision": precision}
    measure = partial(
        _make_rows, arguments=arguments, parameters=_count_parameters(hf), peak=matmul_rate()
    )
    for measured in _run_turns(arguments, ours, peers):
        rows = measure(measured)
        failures = [f"{name}: {failure}" for name, failure in measured.failures.items()]
        # Write the results after each run, so that stopping this program loses little.
        write_json(arguments.output, {**about, "rows": rows, "failures": failures})
    print(f"\n{render(rows)}", *failures, sep="\n\n", flush=True)
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))


def _make_settings(arguments: argparse.Namespace, nemo: Path, precision: str) -> list[str]:
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
        *arguments.ours,
    ]


@dataclass
class MeasuredRuns:
    """Results of the runs so far.

    Attributes:
        ours: result of each of our runs.
        trl: results of TRL's runs, by the name of TRL's settings in the table.
        failures: how TRL has failed, by the same names. These settings are not run again.
    """

    ours: list[dict[str, Any]]
    trl: dict[str, list[dict[str, Any]]]
    failures: dict[str, str]


def _run_turns(
    arguments: argparse.Namespace, ours: dict[str, Any], peers: Mapping[str, dict[str, Any]]
) -> Iterator[MeasuredRuns]:
    """Run ours, then TRL with each of its settings, in every turn; yield all results so far."""
    measured = MeasuredRuns([], {name: [] for name in peers}, {})
    for turn in range(arguments.turns):
        print(f"turn {turn + 1} of {arguments.turns}: ours", end="", flush=True)
        measured.ours.append(run_worker("training.py", "ours", ours, arguments.threads))
        yield measured
        for name, job in peers.items():
            # TRL is not run again with settings with which it has failed.
            if name in measured.failures:
                continue
            print(f", {name.partition(',')[0] if len(peers) == 1 else name}", end="", flush=True)
            try:
                python = arguments.trl_python
                run = run_worker("training.py", "trl", job, arguments.threads, python=python)
                measured.trl[name].append(run)
            except WorkerFailed as error:
                measured.trl[name] = []
                measured.failures[name] = str(error)
            yield measured
        print(flush=True)
    for name, runs in measured.trl.items():
        if runs:
            _check_losses(arguments, name, measured.ours[0]["losses"][0], runs[0]["losses"][0])


def _check_losses(arguments: argparse.Namespace, name: str, ours: float, theirs: float) -> None:
    print(f"loss of the first batch: ours {ours:.6f}, {name} {theirs:.6f}")
    # TRL rounds the losses that it logs, and bf16 rounds everything.
    allowed = 1e-3 if arguments.device == "cpu" else 2e-2
    if abs(ours - theirs) > allowed * max(ours, theirs):
        sys.exit("the losses differ, so the two sides do not compute the same thing")


def _make_rows(
    measured: MeasuredRuns, arguments: argparse.Namespace, parameters: int, peak: float
) -> list[dict[str, Any]]:
    pairs = arguments.steps * arguments.global_batch
    tokens = measured.ours[0]["tokens"]

    def row(label: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
        seconds = [sum(run["seconds"]) for run in runs]
        ours = [sum(run["seconds"]) for run in measured.ours[: len(runs)]]
        return {
            "trainer": label,
            "pairs/s": pairs / median(seconds) if runs else None,
            "real tokens/s": tokens / median(seconds) if runs else None,
            "MFU": 6 * parameters * tokens / median(seconds) / peak if runs else None,
            "peak GiB": max(run["peak_gib"] for run in runs) if runs else None,
            "ours is faster by": median_of_ratios(ours, seconds) if runs else None,
        }

    rows = [{**row("nemo_aligner", measured.ours), "ours is faster by": ""}]
    for name, runs in measured.trl.items():
        sizes = {run["batch_size"] for run in runs} if name == "TRL, tuned" else {}
        label = ", batch ".join([name, *(str(size) for size in sizes)])
        rows.append(row(label, runs))
    return rows


def _read_hidden_size(hf: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(hf).hidden_size)


def _count_parameters(hf: Path) -> int:
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
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="the base model: a .gguf file or a Hugging Face folder",
    )
    parser.add_argument("--data", type=Path, required=True, help="file of pairs")
    parser.add_argument(
        "--ours", nargs="+", default=[], help="further settings of our side, as KEY=VALUE"
    )
    parser.add_argument(
        "--trl-python",
        default=sys.executable,
        help="Python of an environment with TRL; default: this one",
    )
    parser.add_argument(
        "--trl-batch", type=int, nargs="+", default=[8, 1], help="batch sizes of TRL"
    )
    parser.add_argument(
        "--trl-tuned",
        type=int,
        nargs="+",
        default=[],
        help="also run TRL with FlashAttention and Liger, with the fastest of these batch sizes",
    )
    parser.add_argument("--steps", type=int, default=2, help="timed steps per run (default 2)")
    parser.add_argument(
        "--warm-up", type=int, default=1, help="untimed steps before them (default 1)"
    )
    parser.add_argument(
        "--turns", type=int, default=2, help="number of runs of each side (default 2)"
    )
    parser.add_argument(
        "--global-batch", type=int, default=8, help="pairs per training step (default 8)"
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        help="most tokens of our micro-batches (default 1280 on a CPU)",
    )
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads that each side computes with (default 2)"
    )
    add_device_option(parser)
    parser.add_argument(
        "--work", help="folder that keeps the converted model; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


# The workers.


def train_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train some steps with nemo_aligner; return their seconds, losses and tokens."""
    import torch

    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.data.training_data import TrainLoader
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout
    from nemo_aligner.training.build import build_learner
    from nemo_aligner.training.prepare import prepare_run

    config = load_config(TrainConfig, job["settings"])
    size, options = job["global_batch_size"], config.model
    with launch():
        prepared = prepare_run(config, initialize_layout())
        data = prepared.data
        loader = TrainLoader(data.train, size, options.micro_batch_tokens, options.seed, 0, 1)
        warm_up = job["warm_up"]
        batches = [loader.global_batch(step) for step in range(warm_up + job["steps"])]
        records = [record for batch in batches for record in batch]
        if "ids" in job:
            texts = map(data.train.record, records)
            pairs = [[np.asarray(text).tolist() for text in pair] for pair in texts]
            Path(job["ids"]).write_text(json.dumps(pairs))
        learner, _ = build_learner(prepared)
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
    """Train the same steps with TRL's RewardTrainer; the environment need not have our package.

    All batch sizes of the job are tried, and the result of the fastest is returned. A batch size
    that runs out of memory is skipped.
    """
    import torch

    runs = []
    for size in job["batch_sizes"]:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with suppress(torch.OutOfMemoryError):
            runs.append(_train_trl(job, size))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not runs:
        raise MemoryError(f"none of the batch sizes {job['batch_sizes']} fits into memory")
    return min(runs, key=lambda run: sum(run["seconds"]))


def _train_trl(job: dict[str, Any], batch_size: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(job["hf"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(
        job["hf"],
        num_labels=1,
        dtype=torch.bfloat16 if gpu else torch.float32,
        attn_implementation=_fastest_attention() if job.get("is_tuned") else None,
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
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=job["global_batch_size"] // batch_size,
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
            # Liger's kernels need a GPU. Its fused loss is only for language models.
            use_liger_kernel=gpu and job.get("is_tuned", False),
            liger_kernel_config={"fused_linear_cross_entropy": False},
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
    return {
        "seconds": seconds,
        "losses": clock.losses,
        "peak_gib": peak_gib(),
        "batch_size": batch_size,
    }


def _fastest_attention() -> str:
    """The name of an attention implementation of transformers that runs FlashAttention 2.

    Without the package flash-attn it is torch's kernel. torch's kernel supports no mask. None is
    needed, because sequences are padded on the right and attention is causal.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.utils import is_flash_attn_2_available

    # flash-attn-4 alone is no FlashAttention 2, but has the same name of a module.
    if is_flash_attn_2_available():
        return "flash_attention_2"

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        options["is_causal"] = True
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa_attention_forward(module, query, key, value, None, **options)

    # The name must not contain "flash": transformers would then use its own FlashAttention code.
    AttentionInterface.register("causal_sdpa", attend)
    return "causal_sdpa"


class _Clock:
    """Records the seconds and the loss of every optimizer step of TRL's trainer."""

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
