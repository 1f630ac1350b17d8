"""What is about to be trained, and how, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nemo_aligner.checkpoint.runs import RunCheckpoints
from nemo_aligner.config.common import Precision
from nemo_aligner.config.idle import idle_notes
from nemo_aligner.config.model import Recompute
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.console import join_fields, show_number
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.loader import Imbalance
from nemo_aligner.data.mixture import weighted_order
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.objectives import describe_objective
from nemo_aligner.parallel.device import lacks_bf16
from nemo_aligner.parallel.layout import LayoutSizes
from nemo_aligner.subcommand import show_command

_STEPS_FOR_BALANCE, _MOST_EVEN = 20, 1.05
# What a model is measured by, and what the length of a reply alone would give.
_BASELINES = {
    "accuracy": ("longer_reply_accuracy", "always the longer reply"),
    "pearson_mean": ("length_only_pearson_mean", "length of the reply alone"),
}


def describe_model(
    config: TrainConfig, shape: ModelShape, layout: LayoutSizes, *, head_is_new: bool
) -> str:
    """The model, its layout, and what of it is trained."""
    frozen = config.model.freeze_layers
    made = "" if shape.head is None else f" ({shape.head})"
    source = config.pretrained_checkpoint.load_rm_head_weights
    lines = [
        f"model: {shape.num_parameters() / 1e6:.1f}M parameters, {shape.num_layers} layers, "
        f"{'a new head' if head_is_new else 'its own head'}{made}, "
        f"{config.trainer.precision.value}, {layout}"
    ]
    if head_is_new and source is not None:
        lines.append(f"the head begins as that of {source}")
    if config.trainer.precision is not Precision.fp32 and lacks_bf16():
        lines.append("note: this CPU has no matrix products in 16 bits: fp32 is many times faster")
    if shape.lora is not None:
        lines.append(f"trained: LoRA of {shape.lora}, and the head")
    if frozen:
        lines.append(f"frozen: the embeddings and {frozen} of {shape.num_layers} layers")
    return "\n".join(lines)


def describe_steps(
    config: TrainConfig,
    data: TrainingData,
    total_steps: int,
    imbalance: Callable[[range], Imbalance],
    checkpoints: RunCheckpoints,
) -> str:
    """The steps, what they learn, how evenly their work falls, and what becomes the model."""
    options = config.model
    some = min(total_steps, _STEPS_FOR_BALANCE)
    lines = [
        f"run: {total_steps} steps of {options.global_batch_size} records",
        *_mixture(config, data),
        f"objective: {describe_objective(options, data.objective)}",
        *_uneven_work(imbalance(range(some)), some, config.model.pipeline_model_parallel_size),
    ]
    lines += [
        f"{each.name}: {len(each)} of {each.counts['kept']} records, the same ones every time"
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
            "note: model.freeze_layers saves memory, and no time",
            "  with model.activations_checkpoint_granularity=full the backward goes through them",
        ]
    lines.append(f"best checkpoint by: {checkpoints.monitor or 'nothing, the newest counts'}")
    return "\n".join(lines)


def _uneven_work(found: Imbalance, steps: int, stages: int) -> list[str]:
    """A note where ranks wait for others, as one has more than its part of a step's work."""
    most = {"the busiest rank": found.ranks}
    if stages > 1:  # whose stages wait for the largest micro-batch; else it costs no time
        most["the largest micro-batch"] = found.micro_batches
    parts = [
        f"{name} has {share - 1:.0%} more to do than the mean"
        for name, share in most.items()
        if share > _MOST_EVEN
    ]
    if not parts:
        return []
    return [
        f"note: in the first {steps} steps {', and '.join(parts)}",
        "  the others wait meanwhile; a larger model.global_batch_size evens it out",
    ]


def _mixture(config: TrainConfig, data: TrainingData) -> list[str]:
    """How much of an epoch is of which file, where weights say it."""
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
        return "held out: it was not validated"
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
