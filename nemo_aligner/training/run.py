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
