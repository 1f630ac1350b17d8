"""What is about to be trained, and how, for people."""

from __future__ import annotations

from collections.abc import Callable

from nemo_aligner.checkpoint.runs import RunCheckpoints
from nemo_aligner.config.common import Precision
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.loader import Imbalance
from nemo_aligner.data.mixture import weighted_order
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.objectives import describe_objective
from nemo_aligner.parallel.device import lacks_bf16
from nemo_aligner.parallel.layout import LayoutSizes

_STEPS_FOR_BALANCE = 20


def describe_model(
    config: TrainConfig, shape: ModelShape, layout: LayoutSizes, *, head_is_new: bool
) -> str:
    """The model, its layout, and what of it is trained."""
    frozen = config.model.freeze_layers
    made = "" if shape.head is None else f" ({shape.head})"
    source = config.pretrained_checkpoint.load_rm_head_weights
    of_whom = "a new head" if source is None else f"a new head that begins as that of {source}"
    lines = [
        f"model: {shape.num_parameters() / 1e6:.1f}M parameters, {shape.num_layers} layers, "
        f"{of_whom if head_is_new else 'its own head'}{made}, "
        f"{config.trainer.precision.value}, {layout}"
    ]
    if config.trainer.precision is not Precision.fp32 and lacks_bf16():
        lines.append("note: this CPU has no matrix products in 16 bits: fp32 is many times faster")
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
        f"balance: {imbalance(range(some))} (first {some} steps)",
    ]
    lines += [
        f"{each.name}: {len(each)} of {each.counts['kept']} records, the same ones every time"
        for each in data.validation
        if len(each) < each.counts["kept"]
    ]
    if options.optim.sched.warmup_steps >= total_steps:
        warmup = options.optim.sched.warmup_steps
        lines.append(f"note: the run ends within its warm-up ({warmup} steps)")
    lines.append(f"best checkpoint by: {checkpoints.monitor or 'nothing, the newest counts'}")
    return "\n".join(lines)


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
