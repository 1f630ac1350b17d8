"""Text of a run for people: what is about to be trained, its checkpoints, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nemo_aligner.checkpoint.run import RunCheckpoints, Saved
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import idle_notes
from nemo_aligner.config.model import Recompute
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.dataset import TokenizedDataset, weighted_order
from nemo_aligner.data.training_data import Imbalance, TrainingData
from nemo_aligner.distributed.collectives import gpu_computes_bf16, lacks_bf16
from nemo_aligner.losses import describe_objective
from nemo_aligner.training.prepare import PreparedRun
from nemo_aligner.utils.console import join_fields, show_number
from nemo_aligner.utils.processes import show_command

# Description of what is about to be trained, for people.

_STEPS_FOR_BALANCE, _MOST_EVEN = 20, 1.05
# Metrics of a model, and what the length of a reply alone would score.
_BASELINES = {
    "accuracy": ("longer_reply_accuracy", "always the longer reply"),
    "pearson_mean": ("length_only_pearson_mean", "length of the reply alone"),
}


def describe_model(run: PreparedRun, *, head_is_new: bool) -> str:
    """The model, its layout, and what of it is trained."""
    config, shape = run.config, run.shape
    frozen = config.model.freeze_layers
    made = "" if shape.head is None else f" ({shape.head})"
    source = config.pretrained_checkpoint.load_rm_head_weights
    lines = [
        f"model: {shape.num_parameters() / 1e6:.1f}M parameters, {shape.num_layers} layers, "
        f"{'a new head' if head_is_new else 'its own head'}{made}, "
        f"{config.precision.value}, {run.layout}"
    ]
    if head_is_new and source is not None:
        lines.append(f"the head starts from that of {source}")
    if config.precision is not Precision.fp32 and lacks_bf16():
        lines.append("note: this CPU has no 16-bit matrix products; fp32 is many times faster")
    if config.precision is Precision.fp32 and torch.cuda.is_available():
        faster = "bf16" if gpu_computes_bf16() else "fp16"
        lines.append(
            f"note: fp32 is several times slower than trainer.precision={faster} on this GPU"
        )
    seq_length, positions = config.model.data.seq_length, shape.max_position_embeddings
    if seq_length > positions:
        lines += [
            f"note: model.data.seq_length is {seq_length}, but the base model was trained on "
            f"{positions} positions",
            "  rewards of samples longer than that may mean little; lower model.data.seq_length",
        ]
    if shape.lora is not None:
        lines.append(f"trained: LoRA on {shape.lora}, and the head")
    if frozen:
        lines.append(f"frozen: the embeddings and {frozen} of {shape.num_layers} layers")
    return "\n".join(lines)


def describe_steps(run: PreparedRun, checkpoints: RunCheckpoints) -> str:
    """The steps, what they learn, how evenly their work falls, and what becomes the model."""
    config, data, total_steps = run.config, run.data, run.total_steps
    options = config.model
    some = min(total_steps, _STEPS_FOR_BALANCE)
    imbalance = run.loader.imbalance(range(some))
    lines = [
        f"run: {total_steps} steps of {options.global_batch_size} records, "
        f"learning rate {options.optim.lr:.3g}",
        *_mixture(config, data),
        f"objective: {describe_objective(options, data.objective)}",
        *_uneven_work(imbalance, some, options.pipeline_model_parallel_size),
    ]
    lines += [
        f"{each.name}: {len(each)} of {each.counts['kept']} records, the same ones each time"
        for each in data.validation
        if len(each) < each.counts["kept"]
    ]
    if options.optim.sched.warmup_steps >= total_steps:
        warmup = options.optim.sched.warmup_steps
        lines += [
            f"note: the run ends within its warm-up ({warmup} steps)",
            "  lower model.optim.sched.warmup_steps, or model.global_batch_size for more steps",
        ]
    lines += idle_notes(config)
    recomputed = options.activations_checkpoint_granularity is Recompute.full
    if options.freeze_layers and recomputed and options.activations_checkpoint_num_layers is None:
        lines += [
            "note: model.freeze_layers saves memory but no time",
            "  with model.activations_checkpoint_granularity=full the backward goes through them",
        ]
    monitor = checkpoints.monitor
    lines.append(
        f"best checkpoint by: {monitor}"
        if monitor
        else "no validation data: the newest checkpoint becomes the model"
    )
    return "\n".join(lines)


def _uneven_work(found: Imbalance, steps: int, stages: int) -> list[str]:
    """A note where ranks wait for others, as one has more than its part of a step's work."""
    most = {"the busiest rank": found.ranks}
    if stages > 1:  # whose stages wait for the largest micro-batch; else it costs no time
        most["the largest micro-batch"] = found.micro_batches
    parts = [
        f"{name} has {share - 1:.0%} more work than the mean"
        for name, share in most.items()
        if share > _MOST_EVEN
    ]
    if not parts:
        return []
    return [
        f"note: in the first {steps} steps {', and '.join(parts)}",
        "  the others wait for it; a larger model.global_batch_size evens it out",
    ]


def _mixture(config: TrainConfig, data: TrainingData) -> list[str]:
    """Shares of an epoch by file, where weights are set."""
    weights, sizes = config.model.data.data_prefix.train_weights, data.train.file_sizes
    if not weights:
        return []
    shares = weighted_order(sizes, config.model.seed, weights).shares()
    return [
        f"mixture: {share} of {sum(sizes)} records of an epoch are of {report.path}, which has "
        f"{size} ({share / size:.2f} passes)"
        for share, size, report in zip(shares, sizes, data.train.reports, strict=True)
    ]


def describe_heldout(metrics: Mapping[str, float]) -> str:
    """The figures of the exported model on each validation set, beside the length-only baseline."""
    if not metrics:
        return "held out: not validated"
    lines = []
    for name in dict.fromkeys(key.partition("/")[0] for key in metrics):
        fields = [
            f"{metric} {show_number(metrics[f'{name}/{metric}'])} "
            f"({what}: {show_number(metrics[f'{name}/{baseline}'])})"
            for metric, (baseline, what) in _BASELINES.items()
            if f"{name}/{metric}" in metrics and f"{name}/{baseline}" in metrics
        ]
        loss = f"loss {show_number(metrics[f'{name}/loss'])}"
        lines += [f"held out: {name}", join_fields([*fields, loss], first="  ")]
    return "\n".join(lines)


def next_commands(model: Path, heldout: Sequence[TokenizedDataset], can_export: bool = True) -> str:
    """Commands to type next: measure, serve and, if it can be, export the model of a run."""
    paths = [report.path for dataset in heldout for report in dataset.reports]
    measured = f"data.path={paths[0]}" if paths else "data.path=heldout.jsonl"
    setting = f"rm_model_file={model}"
    export = ["--input", str(model), "--output", str(model.with_suffix(".hf"))]
    commands = {"evaluate": [setting, measured], "serve": [setting]}
    if can_export:
        commands["export"] = export
    shown = [show_command(verb, arguments, "  ") for verb, arguments in commands.items()]
    return "\n".join(["next:", *shown])


# The checkpoints of a run.

_MOST_LISTED = 8


def render_candidates(
    checkpoints: RunCheckpoints, ranked: Sequence[Saved], latest: Saved | None, chosen: int = 1
) -> str:
    """The checkpoints of a run, the best first, so many of them chosen, and how they are ranked."""
    monitor, tie_break = checkpoints.monitor, checkpoints.tie_break
    names = [name for name in dict.fromkeys((monitor, tie_break)) if name is not None]
    heading = "checkpoints"
    if ranked:
        heading += f", the best first by {names[0]}"
        heading += "".join(f",\n  ties by {name}" for name in names[1:])
    others = [latest] if latest is not None and latest not in ranked else []
    lines = [heading + ":"]
    for saved in (*ranked[:_MOST_LISTED], *others):
        values = [f"{name.partition('/')[2]} {_value(saved, name)}" for name in names]
        is_known = any(name in saved.state.metrics for name in names)
        found = "  ".join(values) if is_known else "not validated"
        if is_known and not checkpoints.is_comparable(saved):
            found += "  (on other validation records)"
        lines.append(f"  step {saved.state.step:<8}{found}")
    if len(ranked) > _MOST_LISTED:
        lines.append(f"  and {len(ranked) - _MOST_LISTED} that are not as good")
    lines[1 : 1 + chosen] = [f"{line}  (chosen)" for line in lines[1 : 1 + chosen]]
    return "\n".join(lines)


def _value(saved: Saved, name: str | None) -> str:
    return f"{saved.state.metrics.get(str(name), math.nan):.4g}"
