"""Run training, from the settings to the reward model's ``.nemo`` file.

``train`` builds the parts and runs the trainer. ``finish`` and ``export`` write the model of the
best checkpoint, or the mean of several checkpoints' weights. ``describe.py`` writes the text that a
run prints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_aligner.checkpoint.nemo.fingerprint import read_fingerprint
from nemo_aligner.checkpoint.nemo.reward_model import PretrainedModel, save_reward_model
from nemo_aligner.checkpoint.nemo.training_data import with_training_data
from nemo_aligner.checkpoint.run import RunCheckpoints
from nemo_aligner.checkpoint.run_folder import MODEL_NAME
from nemo_aligner.checkpoint.run_lock import lock_run
from nemo_aligner.checkpoint.run_state import Saved
from nemo_aligner.config.model import ModelConfig, layout_sizes
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_plain_reading
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.training_data import TrainingData, how_to_read
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.metrics.table import split_name
from nemo_aligner.training.build import build_learner
from nemo_aligner.training.describe import (
    describe_heldout,
    describe_model,
    describe_steps,
    list_heldout_files,
    next_commands,
    render_candidates,
    render_metric,
)
from nemo_aligner.training.heldout import HeldoutRewards, delete_earlier_rewards
from nemo_aligner.training.learner import KeepHeldout, RewardLearner
from nemo_aligner.training.loggers import Callback, build_loggers
from nemo_aligner.training.prepare import PreparedRun, check_settings, open_run_folder, prepare_run
from nemo_aligner.training.resume import resume
from nemo_aligner.training.run_facts import RunFacts
from nemo_aligner.training.signals import SignalHandler
from nemo_aligner.training.trainer import Outcome, SupervisedTrainer
from nemo_aligner.utils.console import Counter, say, unfold, waiting_for
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.processes import is_main


def layout_of(model: ModelConfig) -> ParallelLayout:
    """Build the process groups of a run, with the parallel sizes of its settings."""
    return initialize_layout(**layout_sizes(model), seed=model.seed)


def train(
    config: TrainConfig, callback: Callback | None = None, in_program: bool = False
) -> Outcome:
    """Train a reward model: build the parts in the order of the data flow, and run the trainer.

    Args:
        callback: function that rank 0 calls with all metrics that are logged. If it raises, the run
            ends.
        in_program: the process continues after the run, as a notebook does, so Ctrl-C raises
            KeyboardInterrupt instead of ending the process.

    Raises:
        AlignerError: settings, data or checkpoint are invalid, or a reward, loss or gradient is not
            finite.
    """
    check_settings(config)
    stop = SignalHandler(config.trainer.max_time, in_program=in_program)
    run_folder = Path(config.exp_manager.explicit_log_dir)
    # exit_stack also cleans up after an error, because the process of a notebook lives on.
    with stop, launch() as world, ExitStack() as exit_stack:
        lock = exit_stack.enter_context(lock_run(run_folder))
        layout = layout_of(config.model)
        with waiting_for("reading and tokenizing"):
            run = prepare_run(config, layout)
        config, data = run.config, run.data
        say(data.overview())
        folder = open_run_folder(run, lock)
        checkpoints, early_stopping = folder.checkpoints, folder.early_stopping
        with waiting_for("loading the model"):
            facts = RunFacts(config, data, world.world_size)
            keep_heldout = heldout_writer(config, data, facts) if is_main() else None
            learner, pretrained = build_learner(run, keep_heldout)
        exit_stack.callback(learner.release)
        descriptions = _say_descriptions(run, checkpoints, pretrained) if is_main() else []
        start, total_steps = resume(folder, config, learner), run.total_steps
        if is_main():
            facts.begin(descriptions)
        early_stopping.restore(start)
        if start.step >= total_steps or early_stopping.is_over:
            done = f"step {start.step} was the last"
            if start.step > total_steps:
                done = f"the run has {start.step} steps already, and the settings {total_steps}"
            say(f"{done}; writing the model again")
        loggers = exit_stack.enter_context(
            build_loggers(config.exp_manager, start.config, start.step, callback, total_steps)
        )
        trainer = SupervisedTrainer(
            learner, config, total_steps, start, checkpoints, loggers, stop, early_stopping
        )
        if is_main():
            delete_earlier_rewards(run_folder, folder.unchanged_sets)
        outcome = trainer.fit()
        exported = finish(outcome, checkpoints, learner, pretrained, config)
        if exported is not None:
            if is_main():
                facts.end(exported.weights, exported.metrics)
            if exported.test_metrics:
                loggers.log(exported.test_metrics, outcome.step)
    return outcome


def _say_descriptions(
    run: PreparedRun, checkpoints: RunCheckpoints, pretrained: PretrainedModel
) -> list[str]:
    """Print the descriptions of model and steps.

    Returns:
        The printed lines, for the run's report. A line that was wrapped on the terminal is one
        line.
    """
    descriptions = [
        describe_model(run, head_is_new=pretrained.head_is_new),
        describe_steps(run, checkpoints),
    ]
    say("\n".join(descriptions))
    return [line for text in descriptions for line in unfold(text)]


def heldout_writer(config: TrainConfig, data: TrainingData, facts: RunFacts) -> KeepHeldout:
    """Build the function that every validation calls with a set and its rewards.

    It writes the rewards and updates ``run_facts.json``, both for ``nemo-aligner report``.
    """
    folder = Path(config.exp_manager.explicit_log_dir)
    heldout = HeldoutRewards(folder, how_to_read(config.model, data.objective), data.contract)

    def keep(dataset: TokenizedDataset, rewards: Tensor) -> None:
        heldout.keep(dataset, rewards)
        facts.write()

    return keep


# The code below exports the model at the end of a run.


@dataclass(frozen=True)
class Exported:
    """The model that a run has written.

    Attributes:
        weights: the steps whose weights it has, for people.
        metrics: its metrics on the validation sets, named ``set/metric``.
        test_metrics: its metrics on the test sets, named ``set/metric``.
    """

    weights: str
    metrics: dict[str, float]
    test_metrics: dict[str, float]


def finish(
    outcome: Outcome,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
    config: TrainConfig,
) -> Exported | None:
    """Export the model if the run is complete; if it was stopped, print how to continue it.

    Returns:
        The exported model; None if the run was stopped.
    """
    if outcome.stopped_by is None:
        path = checkpoints.folder / MODEL_NAME
        return export(path, checkpoints, learner, pretrained, config, outcome.validated_step)
    if outcome.step == 0:
        say(f"stopped by {outcome.stopped_by} before the first step: there is nothing to save")
        return None
    say(
        f"stopped by {outcome.stopped_by} after step {outcome.step}, which is saved. The same "
        "command continues from there. To finish here instead, add "
        f"trainer.rm.max_steps={outcome.step} to it: it then validates this step and writes "
        f"{MODEL_NAME}"
    )
    return None


def export(
    path: Path,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
    run_config: TrainConfig,
    validated_step: int | None,
) -> Exported:
    """Write the reward model's ``.nemo`` with the weights of the best checkpoint.

    If no checkpoint was validated, the newest one is taken. If ``average_best`` is above 1, the
    model gets the mean of the weights of that many best checkpoints. Unless it is of the step
    validated last, ``validated_step``, another validation writes its held-out rewards.

    Raises:
        CheckpointError: no checkpoint was saved.
    """
    best, latest = checkpoints.best(), checkpoints.latest()
    chosen = best or latest
    if chosen is None:
        raise CheckpointError(f"{checkpoints.folder}: there is no checkpoint to export")
    average_best = run_config.exp_manager.checkpoint_callback_params.average_best
    averaged = list(filter(checkpoints.is_comparable, checkpoints.ranked()))[:average_best]
    say(render_candidates(checkpoints, checkpoints.candidates(), latest, len(averaged) or 1))
    checkpoints.check_lock()
    say(f"writing {path} ...")
    if len(averaged) > 1:
        weights = f"mean of steps {_list_steps(averaged)}"
        chosen, description = _average(averaged, checkpoints, learner)
    else:
        weights = f"step {chosen.state.step}"
        value = render_metric(chosen, checkpoints.monitor)
        reason = "the newest" if best is None else f"the best {checkpoints.monitor}, {value}"
        description = f"the weights of {weights} ({reason})"
        checkpoints.load_model([chosen], learner.model)
        if chosen.state.step != validated_step:
            chosen = _validate_again(chosen, learner, "the model")
    contract = _with_statistics(learner.data.contract, chosen)
    config = {
        **pretrained.config,
        "reward_model_type": contract.reward_model_type,
        # NeMo reads the number of the head's outputs from ``num_attributes``.
        "regression": {"num_attributes": contract.num_outputs},
    }
    config = with_training_data(config, _list_files(learner.data))
    with waiting_for(f"writing {path}"):
        save_reward_model(path, learner.model, config, pretrained.tokenizer, contract)
    say(f"wrote {path}\n  with {description}")
    say(f"scoring contract: {contract.hash}")
    say(f"model fingerprint: {read_fingerprint(path)}")
    test_metrics: dict[str, float] = {}
    if learner.data.test:
        test_metrics = learner.measure(learner.data.test, Counter("test", "records").show)
    say(describe_heldout({**chosen.state.metrics, **test_metrics}))
    heldout = list_heldout_files(learner.data, run_config.model.data.data_prefix)
    say(next_commands(path, heldout, run_config.model, _can_export(contract)))
    return Exported(weights, chosen.state.metrics, test_metrics)


def _list_files(data: TrainingData) -> list[dict[str, Any]]:
    """List the training files for the archive, each with the digest of what was tokenized.

    ``data label`` uses the digests to warn if a model labels the records that it learned, and the
    teachers of a distilled model go into its model card.
    """
    files = []
    for report in data.train.reports:
        file: dict[str, Any] = {
            "name": Path(report.path).name,
            "sha256": report.content_digest,
            "records": report.counts["kept"],
        }
        if report.summary.teachers:
            file["teachers"] = list(map(json.loads, report.summary.teachers))
        files.append(file)
    return files


def _can_export(contract: ScoringContract) -> bool:
    """True if ``nemo-aligner export`` can write a model with this contract for transformers."""
    try:
        check_plain_reading(contract, "", "")
    except CheckpointError:
        return False
    return True


def _average(
    saved: Sequence[Saved], checkpoints: RunCheckpoints, learner: RewardLearner
) -> tuple[Saved, str]:
    """Load the mean of the weights of ``saved`` into the learner's model, and validate the model.

    Args:
        saved: the checkpoints to average, the best first.

    Returns:
        The best checkpoint with its metrics replaced by those of the mean, and a text for the log.
    """
    checkpoints.load_model(saved, learner.model)
    best = saved[0]
    mean = _validate_again(best, learner, "the mean")
    name = checkpoints.monitor
    return mean, (
        f"the mean of the weights of steps {_list_steps(saved)}: {name} "
        f"{render_metric(mean, name)}; the best of them has {render_metric(best, name)}"
    )


def _list_steps(saved: Sequence[Saved]) -> str:
    return ", ".join(str(checkpoint.state.step) for checkpoint in saved)


def _validate_again(saved: Saved, learner: RewardLearner, subject: str) -> Saved:
    """Return ``saved`` with the metrics of the weights that the learner's model has now.

    ``subject`` is the name of the weights in the line that shows the progress. Without validation
    sets, ``saved`` is returned unchanged.
    """
    if not learner.data.validation:
        return saved
    watch = Counter(f"validation of {subject}", "records").show
    return replace(saved, state=replace(saved.state, metrics=learner.validate(watch)))


def _with_statistics(contract: ScoringContract, chosen: Saved) -> ScoringContract:
    """Add the mean and standard deviation of the model's rewards to the scoring contract.

    They come from the metrics of the checkpoint ``chosen`` on the first validation set. If there is
    no validation set, the contract is not changed.
    """
    metrics = chosen.state.metrics
    first = next((name for name in metrics if "/reward_mean/" in name), None)
    if first is None:
        return contract
    set_name = split_name(first).set_name
    means, deviations = (
        [metrics[f"{set_name}/reward_{statistic}/{name}"] for name in contract.attributes]
        for statistic in ("mean", "std")
    )
    return contract.with_statistics(means, deviations, measured_on=set_name)
