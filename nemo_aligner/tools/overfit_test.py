"""``nemo-aligner probe``: an overfit test that shows whether training follows its labels.

The command trains on a few records until the model has memorized them, then trains again on the
same records with swapped labels. A trainer that ignores the labels, or mixes them up, fails this
test.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import Schedule
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.demo import build_demo_pairs, demo_lines
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.distributed.launch import launch
from nemo_aligner.training.build import build_learner
from nemo_aligner.training.prepare import check_settings, prepare_run
from nemo_aligner.training.run import layout_of
from nemo_aligner.utils.console import Counter, say, waiting_for
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.writing import write_lines

_NAME = "validation-probe"
# For each metric, measured on the original labels: the value that training on these labels must
# reach, and the value below which training on swapped labels must push it.
BOUNDS = {"accuracy": (0.9, 0.1), "pearson_mean": (0.8, -0.8)}


class ProbedLearner(Protocol):
    """The methods of a learner that the probe calls; ``RewardLearner`` has them."""

    def train_step(self, step: int) -> dict[str, float]:
        """Train one step; return its metrics, among them ``loss``."""
        ...

    def validate(self) -> dict[str, float]:
        """Return the metrics of all validation sets by name, ``<set>/<metric>``."""
        ...

    def release(self) -> None:
        """Free the model and its gradients; the learner cannot be used afterwards."""
        ...


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe: values of ``metric``, always measured on the original labels.

    Attributes:
        metric: name of the metric.
        untrained: the metric before training.
        learned: the metric after training on the original labels.
        swapped: the metric after training on swapped labels.
        losses: (first, last) training loss with the original labels, then with the swapped labels.
    """

    metric: str
    untrained: float
    learned: float
    swapped: float
    losses: tuple[tuple[float, float], tuple[float, float]]

    @property
    def passed(self) -> bool:
        """True if the model learned the original labels, and from swapped labels their opposite."""
        high, low = BOUNDS[self.metric]
        return self.learned >= high and self.swapped <= low


def few_records(data: TrainingData, count: int) -> TrainingData:
    """Keep only the first ``count`` training records, both for training and for validation."""
    records = data.train.first(count)
    records = replace(records, sources=[""] * len(records))
    return replace(data, train=records, validation=[replace(records, name=_NAME)])


def swap_labels(dataset: TokenizedDataset) -> TokenizedDataset:
    """Return the data with opposite labels.

    Rankings are reversed, a teacher's rewards negated, and ratings mirrored at their mean.
    """
    records = dataset.records
    if dataset.kind is RecordKind.comparison:
        teacher = records.teacher_rewards
        swapped = replace(
            records,
            ranks=-records.ranks,
            teacher_rewards=None if teacher is None else -teacher,
        )
        return replace(dataset, records=swapped)
    labels = records.labels
    means = torch.tensor(labels.measured_means(), dtype=torch.float32)
    mirrored = replace(labels, values=2 * means - labels.values)
    return replace(dataset, records=replace(records, labels=mirrored))


def probe(
    build: Callable[[TrainingData], ProbedLearner], data: TrainingData, steps: int
) -> ProbeResult:
    """Train on ``data``, and again from the start on ``data`` with swapped labels.

    Args:
        build: builds a learner for some data, from the same initial weights each time.
        data: few enough records to be memorized; see ``few_records``.
        steps: number of training steps each time.
    """
    metric = data.objective.main_metric
    swapped = replace(data, train=swap_labels(data.train))
    values, losses = [], []
    for training_data, name in ((data, "probe"), (swapped, "probe, labels swapped")):
        with waiting_for(f"{name}: loading the model"):
            learner = build(training_data)
        try:
            values.append(learner.validate()[f"{_NAME}/{metric}"])
            losses.append(_train(learner, steps, name))
            values.append(learner.validate()[f"{_NAME}/{metric}"])
        finally:
            learner.release()
        # The optimizer's state and the weights are in reference cycles, and the memory may not hold
        # them twice.
        del learner
        gc.collect()
    return ProbeResult(metric, values[0], values[1], values[3], (losses[0], losses[1]))


def _train(learner: ProbedLearner, steps: int, name: str) -> tuple[float, float]:
    """Train ``steps`` steps, and return the losses of the first and of the last one."""
    losses, counter = [], Counter(name, "steps")
    for step in range(steps):
        counter.show(step, steps)
        losses.append(learner.train_step(step)["loss"])
    counter.close()
    return losses[0], losses[-1]


# The code below runs the probe with the settings of a training run.


def run_probe(config: TrainConfig, records: int, steps: int) -> ProbeResult:
    """Run the probe with the settings of a training run.

    Args:
        config: the settings, which are changed in place: every step sees all records, and the
            learning rate is constant.
        records: number of records, the first ones of the training files, or of the demo set if no
            files are set.
        steps: number of steps of each training.

    Raises:
        AlignerError: the settings, the data or the checkpoint cannot be used, or a loss is not
            finite.
    """
    check_settings(config)
    with tempfile.TemporaryDirectory() as folder, launch():
        if not config.model.data.data_prefix.train:
            config.model.data.data_prefix.train = [str(_write_demo_file(Path(folder), records))]
        _adapt_settings(config, records, steps)
        run = prepare_run(config, layout_of(config.model))
        data = few_records(run.data, records)
        _check_metric(data.objective.main_metric)
        say(f"{len(data.train)} records, {steps} steps with each kind of labels")
        return probe(
            lambda training_data: build_learner(replace(run, data=training_data))[0],
            data,
            steps,
        )


def render_probe(result: ProbeResult) -> str:
    """Render the result as a table, with the verdict in the last line."""
    high, low = BOUNDS[result.metric]
    (first, last), (first_swapped, last_swapped) = result.losses
    return "\n".join(
        (
            f"{result.metric} on the original labels{'loss, first -> last step':>44}",
            f"  untrained                {result.untrained:>8.3f}",
            f"  trained on these labels  {result.learned:>8.3f}   wanted {high} or more"
            f"{first:>16.4f} -> {last:.4f}",
            f"  trained on swapped ones  {result.swapped:>8.3f}   wanted {low} or less"
            f"{first_swapped:>16.4f} -> {last_swapped:.4f}",
            "passed: training follows its labels"
            if result.passed
            else "FAILED: training does not follow its labels, or it is too short or too slow to "
            "show it (raise --steps or model.optim.lr)",
        )
    )


def _adapt_settings(config: TrainConfig, records: int, steps: int) -> None:
    """Change ``config`` so that every step trains on all records, at a constant learning rate."""
    # Allow resuming: otherwise an earlier run in the same folder would raise an error, although the
    # probe neither reads nor writes checkpoints.
    config.exp_manager.resume_if_exists = True
    config.model.global_batch_size = records
    config.model.optim.sched.name = Schedule.constant
    config.model.optim.sched.warmup_steps = 0
    config.trainer.rm.max_epochs = steps
    config.trainer.rm.max_steps = steps
    config.model.data.data_prefix.validation = []
    # The few records come from the first files, so there is nothing to weight.
    config.model.data.data_prefix.train_weights = []


def _check_metric(metric: str) -> None:
    if metric not in BOUNDS:
        raise ConfigError(
            f"model.objective: its main metric is {metric}, and the probe does not know which "
            f"values of {metric} pass. Use an objective whose main metric is "
            f"{' or '.join(BOUNDS)}."
        )


def _write_demo_file(folder: Path, records: int) -> Path:
    path = folder / "demo.jsonl"
    write_lines(path, demo_lines(build_demo_pairs(2400, 0.1, 1)[0][:records]))
    return path
