"""A training run from its settings to the reward model's archive."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME
from nemo_aligner.checkpoint.runs import RunCheckpoints
from nemo_aligner.config.training import (
    CheckpointCallbackConfig,
    ExpManagerConfig,
    MonitorMode,
    TrainConfig,
)
from nemo_aligner.console import say, unfold, waiting_for
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.training_data import TrainingData, how_to_read
from nemo_aligner.errors import ConfigError
from nemo_aligner.metrics.table import Better, better_values
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import initialize_layout
from nemo_aligner.processes import is_main
from nemo_aligner.training.build import build_data, build_learner
from nemo_aligner.training.describe import describe_model, describe_steps
from nemo_aligner.training.export import finish
from nemo_aligner.training.facts import RunFacts
from nemo_aligner.training.heldout import HeldoutRewards
from nemo_aligner.training.learner import RewardLearner, validation_metric_names
from nemo_aligner.training.loggers import Callback, build_loggers, check_loggers
from nemo_aligner.training.patience import Patience
from nemo_aligner.training.resume import check_goes_on, resume
from nemo_aligner.training.stop import StopRequest
from nemo_aligner.training.trainer import Outcome, SupervisedTrainer


def train(
    config: TrainConfig, callback: Callback | None = None, in_program: bool = False
) -> Outcome:
    """Build the parts in the order in which data flows through them, and let the trainer run.

    Args:
        callback: told on rank 0 of all metrics that are logged; what it raises ends the run.
        in_program: the process goes on after the run, see ``StopRequest``.

    Raises:
        AlignerError: settings, data or checkpoint are unfit, or a number is not finite.
    """
    check_settings(config)
    stop = StopRequest(config.trainer.max_time, in_program=in_program)
    with stop, launch() as world, ExitStack() as held:
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
            config.model.seed,
        )
        with waiting_for("reading and tokenizing"):
            data = build_data(config)
        say(data.table())
        checkpoints = open_checkpoints(config.exp_manager, data)
        check_goes_on(config, data, checkpoints)
        with waiting_for("loading the model"):
            learner, pretrained, total_steps = build_learner(config, data, layout)
        held.callback(learner.release)
        patience = open_patience(config.exp_manager, data)
        described: list[str] = []
        if is_main():
            shape = ModelShape.from_config(pretrained.config)
            described = [
                describe_model(config, shape, layout, head_is_new=pretrained.head_is_new),
                describe_steps(config, data, total_steps, learner.imbalance, checkpoints),
            ]
            say("\n".join(described))
        start = resume(checkpoints, config, pretrained.config, learner)
        if is_main():
            keep_for_report(config, data, learner, described, world.world_size)
        patience.go_on_from(start)
        if start.step >= total_steps or patience.is_over:
            say(f"step {start.step} is the last; the model is written again")
        loggers = build_loggers(config.exp_manager, start.config, start.step)
        if callback is not None:
            loggers.call(callback, total_steps)
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


def keep_for_report(
    config: TrainConfig,
    data: TrainingData,
    learner: RewardLearner,
    described: Sequence[str],
    ranks: int,
) -> None:
    """Have the run's folder hold what a report shows beside metrics and settings; on rank 0."""
    folder = Path(config.exp_manager.explicit_log_dir)
    lines = [line for text in described for line in unfold(text)]
    facts = RunFacts(folder, data, lines, ranks)
    heldout = HeldoutRewards(folder, how_to_read(config.model, data.objective), data.contract)

    def keep(dataset: TokenizedDataset, rewards: Tensor) -> None:
        heldout.keep(dataset, rewards)
        facts.write()

    learner.keep_heldout = keep


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


def open_checkpoints(config: ExpManagerConfig, data: TrainingData) -> RunCheckpoints:
    """The run's checkpoints, ranked by ``monitor``: null is the first validation set's main metric.

    ``mode`` null is the metric's own: losses, ties and calibration errors are better small.

    Raises:
        ConfigError: validation gives no metric of that name, or ``mode`` is against its own.
    """
    monitor, mode = _find_monitor(config.checkpoint_callback_params, data)
    folder = Path(config.explicit_log_dir) / CHECKPOINTS_NAME
    return RunCheckpoints(folder, monitor, mode, config.checkpoint_callback_params.save_top_k)


def open_patience(config: ExpManagerConfig, data: TrainingData) -> Patience:
    """How long the run waits for a better validation, by the metric of the best checkpoints.

    Raises:
        ConfigError: it is to end early, and there is no validation data.
    """
    monitor, mode = _find_monitor(config.checkpoint_callback_params, data)
    settings = config.early_stopping_callback_params
    if settings.patience is not None and monitor is None:
        raise ConfigError(
            f"exp_manager.early_stopping_callback_params.patience: got {settings.patience}, wanted "
            "null, as there is no validation data"
        )
    return Patience(monitor, mode, settings.patience, settings.min_delta)


def _find_monitor(
    settings: CheckpointCallbackConfig, data: TrainingData
) -> tuple[str | None, MonitorMode]:
    """The metric by which validations are compared, None where there are none; what is better."""
    objective, datasets = data.objective, data.validation
    monitor = settings.monitor
    if monitor is None and datasets:
        monitor = f"{datasets[0].name}/{objective.main_metric}"
    elif monitor is not None:
        given = monitor
        if "/" not in given and datasets:
            monitor = f"{datasets[0].name}/{given}"
        # Every metric of all data is computed to know the names.
        available = validation_metric_names(objective, datasets)
        if monitor not in available:
            raise ConfigError(
                f"exp_manager.checkpoint_callback_params.monitor: got {given!r}, wanted one of "
                f"{', '.join(available) or 'none, as there is no validation data'}"
            )
    return monitor, _find_mode(settings.mode, monitor)


def _find_mode(given: MonitorMode | None, monitor: str | None) -> MonitorMode:
    """The given one, or the metric's own; where it has one, they are the same."""
    better = Better.neither if monitor is None else better_values(monitor)
    own = MonitorMode.min if better is Better.lower else MonitorMode.max
    if given not in (None, own) and better is not Better.neither:
        raise ConfigError(
            f"exp_manager.checkpoint_callback_params.mode: got {given.value}, but of {monitor} "
            f"{better.name} values are better; wanted {own.value}, or null"
        )
    return given or own
