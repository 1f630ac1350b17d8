"""A training run from its settings to the reward model's archive."""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.checkpoint.nemo.reward_model import PretrainedModel
from nemo_aligner.checkpoint.runs import RunCheckpoints
from nemo_aligner.config.common import Precision
from nemo_aligner.config.training import ExpManagerConfig, MonitorMode, TrainConfig
from nemo_aligner.errors import ConfigError
from nemo_aligner.metrics.table import lower_is_better
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.objectives import describe_objective
from nemo_aligner.parallel.collectives import is_main, say
from nemo_aligner.parallel.device import lacks_bf16
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, initialize_layout
from nemo_aligner.training.build import build_data, build_learner
from nemo_aligner.training.clock import StopRequest
from nemo_aligner.training.export import finish
from nemo_aligner.training.learner import RewardLearner, validation_metric_names
from nemo_aligner.training.loggers import build_loggers, check_loggers
from nemo_aligner.training.resume import resume
from nemo_aligner.training.trainer import SupervisedTrainer

_STEPS_FOR_BALANCE = 20


def train(config: TrainConfig) -> None:
    """Build the parts in the order in which data flows through them, and let the trainer run.

    Raises:
        AlignerError: settings, data or checkpoint are unfit, or a number is not finite.
    """
    stop = StopRequest(config.trainer.max_time)
    check_settings(config)
    with launch() as world:
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
            config.model.seed,
        )
        data = build_data(config)
        say(data.table())
        learner, pretrained, total_steps = build_learner(config, data, layout)
        checkpoints = open_checkpoints(config.exp_manager, learner)
        describe(config, pretrained, layout, total_steps, checkpoints, learner)
        start = resume(checkpoints, config, pretrained.config, learner)
        loggers = build_loggers(config.exp_manager, start.config, start.step)
        trainer = SupervisedTrainer(
            learner, config, total_steps, start, checkpoints, loggers, stop, world.device
        )
        outcome = trainer.fit()
        loggers.close()
        finish(outcome, checkpoints, learner, pretrained)


def check_settings(config: TrainConfig) -> None:
    """Refuse what cannot work before anything is built.

    Raises:
        ConfigError: no base checkpoint, or a logger that is not installed.
    """
    if config.pretrained_checkpoint.restore_from_path is None:
        raise ConfigError(
            "pretrained_checkpoint.restore_from_path: it is not set, wanted a .nemo file"
        )
    check_loggers(config.exp_manager)


def open_checkpoints(config: ExpManagerConfig, learner: RewardLearner) -> RunCheckpoints:
    """The run's checkpoints, ranked by ``monitor``: null is the first validation set's main metric.

    ``mode`` null is the metric's own: losses, ties and calibration errors are better small.

    Raises:
        ConfigError: validation gives no metric of that name.
    """
    settings = config.checkpoint_callback_params
    objective, datasets = learner.objective, learner.data.validation
    available = validation_metric_names(objective, datasets)
    monitor = settings.monitor
    if monitor is None and datasets:
        monitor = f"{datasets[0].name}/{objective.main_metric}"
    elif monitor is not None and monitor not in available:
        raise ConfigError(
            f"exp_manager.checkpoint_callback_params.monitor: got {monitor!r}, wanted one of "
            f"{', '.join(available) or 'none, as there is no validation data'}"
        )
    folder = Path(config.explicit_log_dir) / "checkpoints"
    mode = settings.mode or (
        MonitorMode.min if monitor is not None and lower_is_better(monitor) else MonitorMode.max
    )
    return RunCheckpoints(folder, monitor, mode, settings.save_top_k)


def describe(
    config: TrainConfig,
    pretrained: PretrainedModel,
    layout: ParallelLayout,
    total_steps: int,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
) -> None:
    """Say on rank 0 what is about to be trained, and how."""
    options, shape = config.model, ModelShape.from_config(pretrained.config)
    head = "a new head" if pretrained.head_is_new else "its own head"
    say(
        f"model: {shape.num_parameters() / 1e6:.1f}M parameters, {shape.num_layers} layers, "
        f"{head}, {config.trainer.precision.value}, {layout}"
    )
    if config.trainer.precision is not Precision.fp32 and lacks_bf16():
        say("note: this CPU has no matrix products in 16 bits: fp32 is many times faster")
    if options.freeze_layers:
        say(f"frozen: the embeddings and {options.freeze_layers} of {shape.num_layers} layers")
    say(f"run: {total_steps} steps of {options.global_batch_size} records")
    say(f"objective: {describe_objective(options, learner.objective)}")
    if is_main():
        steps = min(total_steps, _STEPS_FOR_BALANCE)
        say(f"balance: {learner.imbalance(range(steps))} (first {steps} steps)")
    if options.optim.sched.warmup_steps >= total_steps:
        say(f"note: the run ends within its warm-up ({options.optim.sched.warmup_steps} steps)")
    say(f"best checkpoint by: {checkpoints.monitor or 'nothing, the newest counts'}")
