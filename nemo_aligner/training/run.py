"""A training run from its settings to the reward model's archive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.nemo.fingerprint import read_fingerprint
from nemo_aligner.checkpoint.nemo.reward_model import PretrainedModel, save_reward_model
from nemo_aligner.checkpoint.run import RunCheckpoints, Saved
from nemo_aligner.checkpoint.run_folder import MODEL_NAME
from nemo_aligner.checkpoint.run_lock import lock_run
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import idle_notes
from nemo_aligner.config.model import ModelConfig, Recompute, layout_sizes
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_plain_reading
from nemo_aligner.data.dataset import TokenizedDataset, weighted_order
from nemo_aligner.data.training_data import Imbalance, TrainingData, how_to_read
from nemo_aligner.distributed.collectives import gpu_computes_bf16, lacks_bf16
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.losses import describe_objective
from nemo_aligner.training.build import build_learner
from nemo_aligner.training.learner import KeepHeldout, RewardLearner
from nemo_aligner.training.loggers import Callback, build_loggers
from nemo_aligner.training.prepare import PreparedRun, check_settings, open_run_folder, prepare_run
from nemo_aligner.training.resume import RunFacts, resume
from nemo_aligner.training.signals import SignalHandler
from nemo_aligner.training.trainer import HeldoutRewards, Outcome, SupervisedTrainer
from nemo_aligner.utils.console import Counter, join_fields, say, show_number, unfold, waiting_for
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.processes import is_main, show_command


def layout_of(model: ModelConfig) -> ParallelLayout:
    """Build the process groups of a run."""
    return initialize_layout(**layout_sizes(model), seed=model.seed)


def train(
    config: TrainConfig, callback: Callback | None = None, in_program: bool = False
) -> Outcome:
    """Build the parts in the order in which data flows through them, and let the trainer run.

    Args:
        callback: told on rank 0 of all metrics that are logged; what it raises ends the run.
        in_program: the process goes on after the run, see ``SignalHandler``.

    Raises:
        AlignerError: settings, data or checkpoint are unfit, or a number is not finite.
    """
    check_settings(config)
    stop = SignalHandler(config.trainer.max_time, in_program=in_program)
    with stop, launch() as world, ExitStack() as held:
        lock = held.enter_context(lock_run(Path(config.exp_manager.explicit_log_dir)))
        layout = layout_of(config.model)
        with waiting_for("reading and tokenizing"):
            run = prepare_run(config, layout)
        config, data = run.config, run.data
        say(data.table())
        folder = open_run_folder(run, lock)
        checkpoints, patience = folder.checkpoints, folder.early_stopping
        with waiting_for("loading the model"):
            facts = RunFacts(Path(config.exp_manager.explicit_log_dir), data, world.world_size)
            keep = heldout_writer(config, data, facts) if is_main() else None
            learner, pretrained = build_learner(run, layout, keep)
        held.callback(learner.release)  # after an error, too, for a notebook that goes on
        described: list[str] = []
        if is_main():
            described = [
                describe_model(run, head_is_new=pretrained.head_is_new),
                describe_steps(run, checkpoints),
            ]
            say("\n".join(described))
        start, total_steps = resume(folder, config, learner), run.total_steps
        if is_main():
            facts.begin([line for text in described for line in unfold(text)])
        patience.go_on_from(start)
        if start.step >= total_steps or patience.is_over:
            say(f"step {start.step} was the last; writing the model again")
        loggers = build_loggers(config.exp_manager, start.config, start.step, callback, total_steps)
        trainer = SupervisedTrainer(
            learner, config, total_steps, start, checkpoints, loggers, stop, world.device, patience
        )
        outcome = trainer.fit()
        average_best = config.exp_manager.checkpoint_callback_params.average_best
        tested = finish(outcome, checkpoints, learner, pretrained, average_best)
        if tested:
            loggers.log(tested, outcome.step)
        loggers.close()
    return outcome


def heldout_writer(config: TrainConfig, data: TrainingData, facts: RunFacts) -> KeepHeldout:
    """Write a validation's rewards, and the facts anew, into the run's folder, for its report."""
    folder = Path(config.exp_manager.explicit_log_dir)
    heldout = HeldoutRewards(folder, how_to_read(config.model, data.objective), data.contract)

    def keep(dataset: TokenizedDataset, rewards: Tensor) -> None:
        heldout.keep(dataset, rewards)
        facts.write()

    return keep


# The model that comes out of a run.

_MOST_LISTED = 8


def finish(
    outcome: Outcome,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
    average_best: int = 1,
) -> dict[str, float]:
    """Export the model of a run that came to its end; tell how to go on with one that did not.

    Returns:
        The model's metrics on the test sets, named ``set/metric``.
    """
    if outcome.step == 0:
        say(f"stopped by {outcome.stopped_by} before the first step: there is nothing to save")
        return {}
    if outcome.stopped_by is None:
        path = checkpoints.folder / MODEL_NAME
        return export(path, checkpoints, learner, pretrained, average_best)
    say(
        f"stopped by {outcome.stopped_by} after step {outcome.step}, which is saved: the same "
        f"command goes on from there; trainer.rm.max_steps={outcome.step} makes that step the "
        f"last: it is validated, and {MODEL_NAME} is written"
    )
    return {}


def export(
    path: Path,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
    average_best: int = 1,
) -> dict[str, float]:
    """Write the reward model's ``.nemo``: the best checkpoint's weights, else the newest's.

    With ``average_best`` above 1 it is the mean of so many of the best, which is validated anew.

    Returns:
        Its metrics on the test sets, named ``set/metric``.

    Raises:
        CheckpointError: nothing was saved.
    """
    best, latest = checkpoints.best(), checkpoints.latest()
    chosen = best or latest
    if chosen is None:
        raise CheckpointError(f"{checkpoints.folder}: there is no checkpoint to export")
    averaged = list(filter(checkpoints.is_comparable, checkpoints.ranked()))[:average_best]
    say(render_candidates(checkpoints, checkpoints.candidates(), latest, len(averaged) or 1))
    checkpoints.check_lock()
    say(f"writing {path} ...")
    if len(averaged) > 1:
        chosen, what = _average(averaged, checkpoints, learner)
    else:
        checkpoints.load_model(chosen, learner.model)
        why = "the newest"
        if best is not None:
            why = f"the best {checkpoints.monitor}, {_value(chosen, checkpoints.monitor)}"
        what = f"the weights of step {chosen.state.step} ({why})"
    contract = _with_statistics(learner.data.contract, chosen)
    config = {
        **pretrained.config,
        "reward_model_type": contract.reward_model_type,
        # What NeMo makes the head's width.
        "regression": {"num_attributes": contract.num_outputs},
    }
    with waiting_for(f"writing {path}"):
        save_reward_model(path, learner.model, config, pretrained.tokenizer, contract)
    say(f"wrote {path}\n  with {what}")
    say(f"scoring contract: {contract.hash}")
    say(f"model fingerprint: {read_fingerprint(path)}")
    tested: dict[str, float] = {}
    if learner.data.test:
        tested = learner.measure(learner.data.test, Counter("test", "records").show)
    say(describe_heldout({**chosen.state.metrics, **tested}))
    heldout = [*learner.data.test, *learner.data.validation]
    say(next_commands(path, heldout, _can_export(contract)))
    return tested


def _can_export(contract: ScoringContract) -> bool:
    """True if a Hugging Face reward model can hold this head."""
    try:
        check_plain_reading(contract, "", "")
    except CheckpointError:
        return False
    return True


def _average(
    saved: Sequence[Saved], checkpoints: RunCheckpoints, learner: RewardLearner
) -> tuple[Saved, str]:
    """Load the mean of their weights: what it is as a checkpoint, and what people are told."""
    _load_mean(saved, checkpoints, learner.model)
    best = saved[0]
    watch = Counter("validation of the mean", "records").show
    mean = replace(best, state=replace(best.state, metrics=learner.validate(watch)))
    steps = ", ".join(str(each.state.step) for each in saved)
    name = checkpoints.monitor
    return mean, (
        f"the mean of the weights of steps {steps}: {name} {_value(mean, name)}, "
        f"{_value(best, name)} of the best alone"
    )


def _load_mean(saved: Sequence[Saved], checkpoints: RunCheckpoints, model: Any) -> None:
    """Load the mean of their weights, summed in float64 in host memory and rounded once.

    With LoRA it is that of its matrices, which is not the mean of what they add.
    """
    # One checkpoint at a time, into the model itself: host memory for one sum is all it takes.
    sums: dict[str, Tensor] = {}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for each in saved:
        checkpoints.load_model(each, model)
        for name, parameter in trained.items():
            value = parameter.detach().cpu().double()
            sums[name] = sums[name] + value if name in sums else value
    for name, parameter in trained.items():
        parameter.data.copy_(sums[name] / len(saved))


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


def _with_statistics(contract: ScoringContract, chosen: Saved) -> ScoringContract:
    """The contract with the rewards' mean and deviation on the first validation set."""
    metrics = chosen.state.metrics
    first = next((name for name in metrics if "/reward_mean/" in name), None)
    if first is None:
        return contract
    prefix = first.partition("/")[0]
    columns = [
        [metrics[f"{prefix}/reward_{which}/{name}"] for name in contract.attributes]
        for which in ("mean", "std")
    ]
    return contract.with_statistics(columns[0], columns[1], measured_on=prefix)


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
