"""``SupervisedTrainer``, the training loop: steps, validations, checkpoints, and when to stop.

``early_stopping.py`` has the rules by which it warns of a growing loss, and ends a run that no
longer improves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch.distributed as dist

from nemo_aligner.checkpoint.run import RunCheckpoints
from nemo_aligner.checkpoint.run_state import RunState, Saved
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.cpu.matmuls import FreedMemory
from nemo_aligner.distributed.collectives import (
    agree,
    agree_on,
    current_device,
    gather_objects,
    wait_for_device,
)
from nemo_aligner.metrics.table import Shown, all_metrics, split_name
from nemo_aligner.training.early_stopping import DivergenceWatch, EarlyStopping
from nemo_aligner.training.gauges import Gauges, Timers, describe_gpu_memory
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.progress import StepProgress, render_best, render_validation
from nemo_aligner.training.signals import SignalHandler, StopReason
from nemo_aligner.utils.console import Counter, say, waiting_for
from nemo_aligner.utils.errors import ConfigError, TrainingError, one_line

_LEAK_TIP = (
    "tip: to rule out a leak, evaluate with swapped=true; accuracy must become 1 - accuracy."
)
_MONITOR = "exp_manager.checkpoint_callback_params.monitor"
_SHOWN = [f"train/{metric.name}" for metric in all_metrics() if Shown.step in metric.shown]


class _ValidationInterruptedError(Exception):
    """Raised on every rank to leave a validation early, because the run has to stop now."""


class Logger(Protocol):
    """Interface of the logger that the trainer calls.

    A run uses ``MetricLoggers``; benchmarks use a logger that records other figures.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics after ``step``, the number of steps done."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: number of steps done.
        stopped_by: why the run stopped early; None if it is complete.
        validated_step: step of the last complete validation; None without one since the start or
            the resume.
    """

    step: int
    stopped_by: StopReason | None = None
    validated_step: int | None = None


class SupervisedTrainer:
    """Trains until ``total_steps``, or until a signal, the time limit or early stopping ends it.

    Every rank makes the same calls.

    If a validation is due when a signal stops the run, the run stops without it. The same command
    then continues with this validation. So the two runs together validate at the same steps as a
    run that was never stopped.
    """

    def __init__(
        self,
        learner: RewardLearner,
        config: TrainConfig,
        total_steps: int,
        start: RunState,
        checkpoints: RunCheckpoints,
        logger: Logger,
        stop: SignalHandler,
        early_stopping: EarlyStopping | None = None,
    ) -> None:
        """Store the parts of a run.

        Args:
            start: the state to start from, which the learner has loaded: that of step 0, or that of
                the checkpoint that is resumed.
            early_stopping: None never ends the run early.
        """
        self._learner = learner
        self._loop = config.trainer.rm
        self._global_batch_size = config.model.global_batch_size
        self._total_steps = total_steps
        self._start = start
        self._step = start.step
        self._checkpoints = checkpoints
        self._logger = logger
        self._stop = stop
        self._early_stopping = early_stopping or EarlyStopping()
        self._timers = Timers()
        self._freed = FreedMemory() if current_device().type == "cpu" else None
        self._saving_since = 0.0
        self._progress = StepProgress(total_steps, start.step, self._loop.val_check_interval)
        self._validating = Counter("validation", "records")
        self._validated_step: int | None = None
        self._divergence = DivergenceWatch()
        self._gauges = Gauges.of(current_device(), config.precision)
        self._best: str | None = None
        # The checkpoint to resume has metrics only of the sets on which its step was validated
        # before the run stopped.
        measured = {split_name(name).set_name for name in start.metrics}
        is_validated = bool(measured) and measured >= {*(start.validated_on or ())}
        self._owes_validation = self._validation_is_due() and not is_validated

    def fit(self) -> Outcome:
        """Train, log, validate and save until the run is complete or stopped.

        Raises:
            TrainingError: a reward, the loss or the gradient is not finite. The error names the
                checkpoint to resume from.
            ConfigError: the validation has no metric of the name by which checkpoints are ranked.
        """
        with self._stop.while_training():
            try:
                stopping = self._run()
                self._publish()
            # Publish the checkpoint that is being written, whatever ends the run. This is
            # collective: several ranks may do it only after a TrainingError, which is raised on
            # every rank.
            except TrainingError as error:
                self._publish_after_error()
                raise TrainingError(f"{error}; {self._describe_resume()}") from error
            except Exception:
                if dist.get_world_size() == 1:
                    self._publish_after_error()
                raise
            finally:
                self._progress.close()
        if self._early_stopping.is_over:
            say(f"training ends at step {self._step}: {self._early_stopping.describe()}")
        stopped = stopping and not self._is_over
        reason = self._find_stop_reason() if stopped else None
        return Outcome(self._step, reason, self._validated_step)

    def _describe_resume(self) -> str:
        """Describe, for an error, from which step the same command would continue."""
        latest = self._checkpoints.latest()
        if latest is None:
            return "this run has no checkpoint yet"
        return f"the same command resumes from the checkpoint of step {latest.state.step}"

    def _run(self) -> bool:
        """Run the loop; return True if a signal or the time limit stopped it."""
        # Find the best checkpoint first: a resumed run may already have one to show.
        self._find_best()
        stopping = self._begin()
        while not self._is_over and not stopping:
            self._train()
            # Validate before saving, because checkpoints are ranked by the metrics in them. But if
            # the run has to stop, save without validating: a validation may take minutes, and the
            # process may be killed within seconds. A resumed run then validates that checkpoint
            # first.
            self._owes_validation = self._validation_is_due()
            stopping = self._check_in()
            metrics: dict[str, float] = {}
            if self._owes_validation and not stopping:
                metrics = self._validate()
                stopping = self._check_in()
            if stopping or self._is_over or self._save_is_due(metrics):
                self._save(metrics)
        return stopping

    def _begin(self) -> bool:
        """Validate before the first step, if a validation is due.

        The checkpoint of a resumed run then gets the metrics. Returns True if the run has to stop.
        """
        if not self._owes_validation:
            return False
        metrics = self._validate()
        if metrics and self._step > 0:
            self._checkpoints.amend(self._state(metrics))
            self._find_best()
        self._progress.begin()
        return self._check_in()

    @property
    def _is_over(self) -> bool:
        """True if no step and no validation is left."""
        is_last = self._step >= self._total_steps or self._early_stopping.is_over
        return is_last and not self._owes_validation

    def _train(self) -> None:
        """Train the next step, log its metrics, and show them in the terminal."""
        is_first = self._step == self._start.step
        task = f"step {self._step + 1}, which includes warming up"
        with self._timers.measure("train_step"), waiting_for(task) if is_first else nullcontext():
            metrics = self._learner.train_step(self._step)
            # A single GPU still computes this step's update afterwards, while the host logs the
            # metrics and prepares the next step, whose time then includes the rest of the update.
            # Several ranks exchange flags after each step, and so wait for the update in any case.
            if dist.get_world_size() > 1:
                wait_for_device()
        self._step += 1
        if self._freed is not None:
            self._freed.end_step()
        timing = self._timers.take()
        # Number of tokens of the batch on all ranks, without padding.
        tokens = metrics.pop("tokens")
        seconds = timing["timing/train_step"]
        metrics["tokens_per_second"] = tokens / seconds
        metrics |= self._gauges.read(metrics.pop("flops", None), seconds)
        metrics["consumed_samples"] = float(self._step * self._global_batch_size)
        named = {f"train/{name}": value for name, value in metrics.items()}
        self._logger.log({**named, **timing}, self._step)
        if metrics.get("skipped"):
            scale = metrics["loss_scale"]
            self._progress.say(
                f"step {self._step}: skipped, fp16 overflowed at loss scale {scale:g}"
            )
        memory = describe_gpu_memory(current_device()) if is_first else None
        if memory is not None:
            self._progress.say(memory)
        # Only a new run can detect divergence, because a resumed one does not know the loss of step
        # 1.
        warning = self._divergence.add(metrics["loss"]) if self._start.step == 0 else None
        if warning:
            self._progress.say(warning)
        in_line = {name: named[name] for name in _SHOWN if name in named}
        self._progress.show(self._step, in_line, self._best)

    def _validate(self) -> dict[str, float]:
        """Validate, log and show the metrics, and return them.

        The result is empty if the run has to stop before the validation is complete.
        """
        start = time.perf_counter()
        try:
            with self._timers.measure("validation/total_validation_time"):
                metrics = self._learner.validate(self._watch_validation)
        except _ValidationInterruptedError:
            self._progress.say(
                f"step {self._step}: the validation was interrupted and has no result yet"
            )
            return {}
        finally:
            self._validating.close()
        self._owes_validation = False
        self._progress.add_validation(time.perf_counter() - start)
        if metrics:
            self._logger.log({**metrics, **self._timers.take()}, self._step)
            self._progress.say(render_validation(self._step, metrics))
            if self._validated_step is None:
                self._check_monitor(metrics)
                if self._can_swap(metrics):
                    self._progress.say(_LEAK_TIP)
            self._validated_step = self._step
            # If the checkpoint to resume has metrics, its step has counted already, and is
            # validated again only for a new validation set.
            if self._step > self._start.step or not self._start.metrics:
                self._early_stopping.count_validation(metrics, self._step)
        return metrics

    def _check_monitor(self, metrics: dict[str, float]) -> None:
        """Check that the first validation has a value of the metric that ranks checkpoints.

        The start of a run checks the name, but the metrics of a custom objective may depend on the
        rewards. If the value is NaN, which may change, a warning is printed.

        Raises:
            ConfigError: on every rank, if ``metrics`` have no such metric. The run is saved.
        """
        monitor = self._checkpoints.monitor
        if monitor is None and self._early_stopping.patience is not None:
            monitor = self._early_stopping.monitor
        if monitor is None:
            return
        if monitor not in metrics:
            if self._step > self._start.step:
                self._save(metrics)
                self._publish()
            raise ConfigError(
                f"{_MONITOR}: the validation has no metric {monitor}, wanted one of "
                f"{', '.join(metrics)}; {self._describe_resume()}"
            )
        if math.isnan(metrics[monitor]):
            self._progress.say(
                f"warning: {monitor}, by which checkpoints are ranked, is NaN in this validation, "
                f"so that its checkpoint has no rank. If it stays NaN, set {_MONITOR} to another "
                "metric"
            )

    def _can_swap(self, metrics: Mapping[str, float]) -> bool:
        """True if the tip to find leaks with ``evaluate swapped=true`` makes sense for the data.

        That command swaps the two replies of each pair, so it does not work with ratings.
        """
        has_accuracy = any(name.endswith("/accuracy") for name in metrics)
        return has_accuracy and self._learner.data.train.kind is RecordKind.comparison

    def _watch_validation(self, done: int, total: int) -> None:
        """Show the progress of a validation, and interrupt it if the run has to stop."""
        self._validating.show(done, total)
        # If all records are done, finish the validation: stopping now would save no time.
        if done < total and agree(self._stop.reason is not None, current_device()):
            raise _ValidationInterruptedError

    def _save(self, metrics: dict[str, float]) -> None:
        """Start to write a checkpoint of this step, which contains its validation metrics."""
        # Publish here, because ``save`` would publish the previous checkpoint without logging how
        # long it took.
        self._publish()
        self._progress.mention("saving")
        with self._timers.measure("save"):
            state = self._state(metrics)
            self._checkpoints.save(state, self._learner.model, self._learner.optimizer)
        self._saving_since = time.perf_counter()
        self._logger.log(self._timers.take(), self._step)
        if metrics:
            self._find_best()

    def _state(self, metrics: dict[str, float]) -> RunState:
        """Build the state of the run after the current step, with its validation metrics."""
        return replace(
            self._early_stopping.store_in(self._start),
            step=self._step,
            consumed_samples=self._step * self._global_batch_size,
            metrics=metrics,
        )

    def _find_best(self) -> None:
        """Find the best checkpoint so far, for the lines that show the steps."""
        self._best = render_best(self._checkpoints.leader(), self._checkpoints.monitor)

    def _publish(self) -> None:
        """Wait until the checkpoint that is being written is complete, and give it its final name.

        It does nothing if no checkpoint is being written.
        """
        start = time.perf_counter()
        if self._finish_save() is not None:
            self._timers.add_since(start, "publish")
            self._timers.add_since(self._saving_since, "save_in_background")
            self._logger.log(self._timers.take(), self._step)

    def _finish_save(self) -> Saved | None:
        """Publish the checkpoint that is being written, if there is one, and return it."""
        with waiting_for("writing a checkpoint", self._progress.say):
            saved = self._checkpoints.publish()
        self._progress.mention(None)
        if saved is not None:
            self._progress.say(f"step {saved.state.step}: saved {saved.path}")
        return saved

    def _publish_after_error(self) -> None:
        """Publish the checkpoint that is being written when an error ends the run.

        If this fails, the error is only printed, so that the first error is raised. No metrics are
        logged, because logging them may be what failed.
        """
        try:
            self._finish_save()
        except Exception as error:
            self._progress.say(f"the checkpoint that was being written is lost: {one_line(error)}")

    def _is_due(self, interval: int | None) -> bool:
        """True if the step is a multiple of ``interval``, or the last one.

        An ``interval`` of None means only the last step.
        """
        at_end = self._step >= self._total_steps
        return at_end or (interval is not None and self._step % interval == 0)

    def _validation_is_due(self) -> bool:
        """True if the run validates after this step, and has data to validate on."""
        if not self._learner.data.validation:
            return False
        if self._step == 0:
            return self._loop.val_before_training
        return self._is_due(self._loop.val_check_interval)

    def _save_is_due(self, metrics: Mapping[str, float]) -> bool:
        """True if the step is a multiple of ``save_interval``, or its metrics are among the best.

        Without the second rule, a good checkpoint between two intervals would be lost.
        """
        return self._is_due(self._loop.save_interval) or self._checkpoints.is_among_best(metrics)

    def _check_in(self) -> bool:
        """Agree with all ranks whether the run has to stop; True if it has to.

        If all ranks have finished writing a checkpoint, this also publishes it.
        """
        # A signal or a slow disk may affect only one rank, but saving and publishing need all
        # ranks. One all-reduce makes them decide alike.
        checkpoints = self._checkpoints
        flags = (
            self._stop.reason is not None,
            not checkpoints.is_written,
            checkpoints.has_lost_lock,
        )
        stopping, writing, is_lost = agree_on(flags, current_device())
        if is_lost:
            checkpoints.check_lock()
        if not writing:
            self._publish()
        return stopping

    def _find_stop_reason(self) -> StopReason:
        """Return why the run stops: the reason of the lowest rank that has one; collective.

        A signal may have reached only some of the ranks.
        """
        return next(reason for reason in gather_objects(self._stop.reason) if reason is not None)
