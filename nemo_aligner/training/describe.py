"""The text that a training run prints about its model, steps, checkpoints and result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nemo_aligner.checkpoint.run import RunCheckpoints
from nemo_aligner.checkpoint.run_state import Saved
from nemo_aligner.config.common import Precision, RecordKind, as_yaml
from nemo_aligner.config.evaluation import EvaluateDataConfig
from nemo_aligner.config.ineffective import describe_ineffective_settings
from nemo_aligner.config.model import DataPrefixConfig, ModelConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.dataset import weighted_order
from nemo_aligner.data.training_data import Imbalance, TrainingData
from nemo_aligner.distributed.collectives import gpu_computes_bf16, lacks_bf16
from nemo_aligner.losses import describe_objective
from nemo_aligner.metrics.table import split_name
from nemo_aligner.training.prepare import PreparedRun
from nemo_aligner.utils.console import join_fields, show_number
from nemo_aligner.utils.processes import show_command

# Number of steps that are checked for an even distribution of work over the ranks. It is reported
# as uneven if the busiest rank has more than this multiple of the mean.
_STEPS_FOR_BALANCE, _UNEVEN_FROM = 20, 1.05
# Baselines that know only the lengths of the replies: metric of the model -> (metric of the
# baseline, its description).
_BASELINES = {
    "accuracy": ("longer_reply_accuracy", "always the longer reply"),
    "pearson_mean": ("length_only_pearson_mean", "length of the reply alone"),
}


def describe_model(run: PreparedRun, *, head_is_new: bool) -> str:
    """Describe the model, its parallel layout, and which of its weights are trained."""
    config, shape = run.config, run.shape
    frozen = config.model.freeze_layers
    head = "" if shape.head is None else f" ({shape.head})"
    source = config.pretrained_checkpoint.load_rm_head_weights
    lines = [
        f"model: {shape.num_parameters() / 1e6:.1f}M parameters, {shape.num_layers} layers of "
        f"{shape.hidden_size}, {'a new head' if head_is_new else 'its own head'}{head}, "
        f"{config.precision.value}, {run.layout}"
    ]
    if head_is_new and source is not None:
        lines.append(f"the head starts from the head of {source}")
    if config.precision is not Precision.fp32 and lacks_bf16():
        lines.append("note: this CPU has no 16-bit matmuls; fp32 is many times faster")
    if config.precision is Precision.fp32 and torch.cuda.is_available():
        faster = "bf16" if gpu_computes_bf16() else "fp16"
        lines.append(
            f"note: fp32 is several times slower than trainer.precision={faster} on this GPU"
        )
    seq_length, positions = run.data.contract.seq_length, shape.max_position_embeddings
    start = run.base.contract
    if start is not None and start.seq_length == seq_length:
        lines.append(
            f"samples: up to {seq_length} tokens, as the reward model to start from "
            "(model.data.seq_length)"
        )
    if seq_length > positions:
        lines += [
            f"note: model.data.seq_length is {seq_length}, but the base model was trained on "
            f"{positions} positions",
            "  rewards of longer samples may be unreliable; lower model.data.seq_length",
        ]
    if shape.lora is not None:
        lines.append(f"trained: LoRA of {shape.lora}, and the head")
    if frozen:
        lines.append(f"frozen: the embeddings and {frozen} of {shape.num_layers} layers")
    return "\n".join(lines)


def describe_steps(run: PreparedRun, checkpoints: RunCheckpoints) -> str:
    """Describe the steps, the objective, and by which metric the best checkpoint is chosen.

    The text has notes on settings that waste time, such as uneven work among the ranks.
    """
    config, data, total_steps = run.config, run.data, run.total_steps
    options = config.model
    num_inspected = min(total_steps, _STEPS_FOR_BALANCE)
    imbalance = run.loader.imbalance(range(num_inspected))
    records = config.trainer.rm.max_epochs * len(data.train)
    unused = records - total_steps * options.global_batch_size
    # If ``max_steps`` ends the run, more are unused, which needs no note.
    has_rest = 0 < unused < options.global_batch_size
    note = f" ({unused} of {records} fill no step)" if has_rest else ""
    lines = [
        f"run: {total_steps} steps of {options.global_batch_size} records{note}, "
        f"learning rate {options.optim.lr:.3g}",
        *_describe_mixture(config, data),
        f"objective: {describe_objective(options, data.objective)}",
        f"results: {config.exp_manager.explicit_log_dir}",
        *_describe_imbalance(imbalance, num_inspected, options.pipeline_model_parallel_size),
    ]
    lines += [
        f"{dataset.name}: validates on {len(dataset)} of {dataset.counts['kept']} records, always "
        "the same ones"
        for dataset in data.validation
        if len(dataset) < dataset.counts["kept"]
    ]
    if options.optim.sched.warmup_steps >= total_steps:
        warmup = options.optim.sched.warmup_steps
        lines += [
            f"note: the run ends within its warm-up ({warmup} steps)",
            "  lower model.optim.sched.warmup_steps, or model.global_batch_size for more steps",
        ]
    lines += describe_ineffective_settings(config)
    monitor = checkpoints.monitor
    lines.append(
        f"best checkpoint by: {monitor}"
        if monitor
        else "no validation data: the newest checkpoint becomes the model"
    )
    return "\n".join(lines)


def _describe_imbalance(imbalance: Imbalance, steps: int, stages: int) -> list[str]:
    """Describe uneven work over the ranks in the first ``steps`` steps; empty if it is even.

    If it is uneven, all ranks wait in every step for the rank that has the most work.
    """
    largest = {"the busiest rank": imbalance.ranks}
    # In a pipeline, all stages wait for the stage that computes the largest micro-batch.
    if stages > 1:
        largest["the largest micro-batch"] = imbalance.micro_batches
    parts = [
        f"{name} has {share - 1:.0%} more work than the mean"
        for name, share in largest.items()
        if share > _UNEVEN_FROM
    ]
    if not parts:
        return []
    return [
        f"note: in the first {steps} steps {', and '.join(parts)}",
        "  the others wait for it; a larger model.global_batch_size evens it out",
    ]


def _describe_mixture(config: TrainConfig, data: TrainingData) -> list[str]:
    """Describe how many of an epoch's records come from each file.

    Empty without ``train_weights``.
    """
    weights, sizes = config.model.data.data_prefix.train_weights, data.train.file_sizes
    if not weights:
        return []
    shares = weighted_order(sizes, config.model.seed, weights).shares()
    return [
        f"mixture: {share} of {sum(sizes)} records of an epoch come from {report.path}, which has "
        f"{size} ({share / size:.2f} passes)"
        for share, size, report in zip(shares, sizes, data.train.reports, strict=True)
    ]


def describe_heldout(metrics: Mapping[str, float]) -> str:
    """Render the exported model's metrics on each held-out set (validation and test).

    Next to them are the metrics of baselines that know only the lengths of the replies.
    """
    if not metrics:
        return "held out: not validated"
    lines = []
    for name in dict.fromkeys(split_name(full_name).set_name for full_name in metrics):
        fields = [
            f"{metric} {show_number(metrics[f'{name}/{metric}'])} "
            f"({description}: {show_number(metrics[f'{name}/{baseline}'])})"
            for metric, (baseline, description) in _BASELINES.items()
            if f"{name}/{metric}" in metrics and f"{name}/{baseline}" in metrics
        ]
        loss = f"loss {show_number(metrics[f'{name}/loss'])}"
        lines += [f"held out: {name}", join_fields([*fields, loss], first="  ")]
    return "\n".join(lines)


def list_heldout_files(data: TrainingData, prefix: DataPrefixConfig) -> list[str]:
    """List the test and validation files as the settings name them, the test files first.

    Files of comparisons that are all tied are left out, because ``evaluate`` cannot use them.
    """
    names = data.names_given(prefix)
    return [
        names[report.path]
        for dataset in (*data.test, *data.validation)
        if dataset.kind is RecordKind.rating or dataset.records.pairs().num_records
        for report in dataset.reports
    ]


def next_commands(
    model: Path, heldout: Sequence[str], config: ModelConfig, can_export: bool = True
) -> str:
    """Render the user's next commands: evaluate, serve and, if ``can_export``, export the model.

    ``config`` has the settings by which the run read its records; evaluate gets the same, and the
    first of the ``heldout`` files.
    """
    data_setting = f"data.path={heldout[0] if heldout else 'heldout.jsonl'}"
    model_setting = f"rm_model_file={model}"
    export = ["--input", str(model), "--output", str(model.with_suffix(".hf"))]
    reading = _reading_settings(config)
    commands = {"evaluate": [model_setting, data_setting, *reading], "serve": [model_setting]}
    if can_export:
        commands["export"] = export
    lines = {verb: show_command(verb, arguments, "  ") for verb, arguments in commands.items()}
    wrapped_by = [key for key in _PROMPT_SETTINGS if getattr(config.data, key) is not None]
    if wrapped_by:
        names = " and ".join(wrapped_by)
        lines["serve"] += f"\n  # clients must send samples in the form that {names} gives them"
    return "\n".join(["next:", *lines.values()])


# Settings that add text to the prompts of a data file. A server does not add it: it scores samples
# as they are.
_PROMPT_SETTINGS = ("system_prompt_file", "prompt_file", "input_template")


def _reading_settings(config: ModelConfig) -> list[str]:
    """Return the settings of ``evaluate`` with which it reads records as the run did.

    Settings at their default are omitted.
    """
    values = {**vars(config.data), "loss_mask_val": config.regression.loss_mask_val}
    defaults = vars(EvaluateDataConfig())
    changed = {
        key: values[key] for key in defaults if key in values and values[key] != defaults[key]
    }
    return [
        f"data.{key}={value if isinstance(value, str) else as_yaml(value)}"
        for key, value in changed.items()
    ]


# The functions below describe the checkpoints of a run.

_MOST_LISTED = 8


def render_candidates(
    checkpoints: RunCheckpoints, ranked: Sequence[Saved], latest: Saved | None, chosen: int = 1
) -> str:
    """List the checkpoints of a run with the metrics by which they are ranked.

    Args:
        ranked: checkpoints with a validation, the best first.
        latest: the newest checkpoint. It is listed even if it has no validation.
        chosen: number of checkpoints whose mean is the exported model. They are marked in the list;
            they are the first ones of ``ranked``.
    """
    monitor, tie_break = checkpoints.monitor, checkpoints.tie_break
    names = [name for name in dict.fromkeys((monitor, tie_break)) if name is not None]
    heading = "checkpoints"
    if ranked:
        heading += f", the best first by {names[0]}"
        heading += "".join(f",\n  ties by {name}" for name in names[1:])
    unranked = [latest] if latest is not None and latest not in ranked else []
    lines = [heading + ":"]
    for saved in (*ranked[:_MOST_LISTED], *unranked):
        values = [f"{split_name(name).metric} {render_metric(saved, name)}" for name in names]
        is_validated = any(name in saved.state.metrics for name in names)
        result = "  ".join(values) if is_validated else "not validated"
        if is_validated and not checkpoints.is_comparable(saved):
            result += "  (on other validation records)"
        lines.append(f"  step {saved.state.step:<8}{result}")
    if len(ranked) > _MOST_LISTED:
        lines.append(f"  and {len(ranked) - _MOST_LISTED} checkpoints with worse metrics")
    lines[1 : 1 + chosen] = [f"{line}  (chosen)" for line in lines[1 : 1 + chosen]]
    return "\n".join(lines)


def render_metric(saved: Saved, name: str | None) -> str:
    """Render the metric ``name`` of a checkpoint; ``nan`` if the checkpoint does not have it."""
    return f"{saved.state.metrics.get(str(name), math.nan):.4g}"
