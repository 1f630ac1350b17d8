"""Overfit test: can training memorise a few records, and the same records with labels swapped?"""

from __future__ import annotations

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
from nemo_aligner.data.records import write_lines
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.distributed.launch import launch
from nemo_aligner.training.build import build_learner
from nemo_aligner.training.prepare import check_settings, prepare_run
from nemo_aligner.training.run import layout_of
from nemo_aligner.utils.console import Counter, say, waiting_for
from nemo_aligner.utils.errors import ConfigError

_NAME = "validation-probe"
# Bounds for a model that has overfitted a handful of records: reached, and with swapped labels not.
BARS = {"accuracy": (0.9, 0.1), "pearson_mean": (0.8, -0.8)}


class ProbedLearner(Protocol):
    """Learner to probe, as ``RewardLearner``."""

    def train_step(self, step: int) -> dict[str, float]: ...

    def validate(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class ProbeResult:
    """``metric`` on the labels as they are: untrained, after training on them, and on the swapped.

    ``losses`` are the first and the last of each of the two trainings.
    """

    metric: str
    untrained: float
    learned: float
    swapped: float
    losses: tuple[tuple[float, float], tuple[float, float]]

    @property
    def passed(self) -> bool:
        """True if both trainings learned the labels that they were given."""
        high, low = BARS[self.metric]
        return self.learned >= high and self.swapped <= low


def few_records(data: TrainingData, count: int) -> TrainingData:
    """Data of the first ``count`` training records, to train and to validate on."""
    few = data.train.first(count)
    few = replace(few, sources=[""] * len(few))
    return replace(data, train=few, validation=[replace(few, name=_NAME)])


def swap_labels(dataset: TokenizedDataset) -> TokenizedDataset:
    """Reverse rankings, and mirror ratings at the mean of their attribute."""
    records = dataset.records
    if dataset.kind is RecordKind.comparison:
        return replace(dataset, records=replace(records, ranks=-records.ranks))
    labels = records.labels
    means = torch.tensor(labels.measured_means(), dtype=torch.float32)
    mirrored = replace(labels, values=2 * means - labels.values)
    return replace(dataset, records=replace(records, labels=mirrored))


def probe(
    build: Callable[[TrainingData], ProbedLearner], data: TrainingData, steps: int
) -> ProbeResult:
    """Train ``steps`` steps on ``data``, and anew on ``data`` with its labels swapped.

    ``build`` makes a learner from the same start each time; ``data`` is as ``few_records`` makes
    it, small enough to be learned by heart.
    """
    metric = data.objective.main_metric
    swapped = replace(data, train=swap_labels(data.train))
    found, losses = [], []
    for each, name in ((data, "probe"), (swapped, "probe, labels swapped")):
        with waiting_for(f"{name}: loading the model"):
            learner = build(each)
        found.append(learner.validate()[f"{_NAME}/{metric}"])
        run, counter = [], Counter(name, "steps")
        for step in range(steps):
            counter.show(step, steps)
            run.append(learner.train_step(step)["loss"])
        counter.close()
        losses.append((run[0], run[-1]))
        found.append(learner.validate()[f"{_NAME}/{metric}"])
    return ProbeResult(metric, found[0], found[1], found[3], (losses[0], losses[1]))


# The probe: from the settings of a training run to a verdict.


def run_probe(config: TrainConfig, records: int, steps: int) -> ProbeResult:
    """Probe on the first ``records`` of the training files, or of the demo set if there are none.

    ``config`` is changed: every step sees all records, at a constant rate.

    Raises:
        AlignerError: settings, data or checkpoint are unfit, or a number is not finite.
    """
    check_settings(config)
    with tempfile.TemporaryDirectory() as folder, launch():
        if not config.model.data.data_prefix.train:
            config.model.data.data_prefix.train = [str(_demo_file(Path(folder), records))]
        _set_for_probe(config, records, steps)
        run = prepare_run(config, layout_of(config.model))
        data = few_records(run.data, records)
        _check_bar(data.objective.main_metric)
        say(f"{len(data.train)} records, {steps} steps each way")
        return probe(lambda part: build_learner(replace(run, data=part))[0], data, steps)


def render_probe(result: ProbeResult) -> str:
    """Render the table and the verdict."""
    high, low = BARS[result.metric]
    (first, last), (first_swapped, last_swapped) = result.losses
    return "\n".join(
        (
            f"{result.metric} on the labels as they are{'loss, first -> last step':>42}",
            f"  untrained                {result.untrained:>8.3f}",
            f"  trained on them          {result.learned:>8.3f}   wanted {high} or more"
            f"{first:>16.4f} -> {last:.4f}",
            f"  trained on swapped ones  {result.swapped:>8.3f}   wanted {low} or less"
            f"{first_swapped:>16.4f} -> {last_swapped:.4f}",
            "passed: training follows its labels"
            if result.passed
            else "FAILED: training does not follow its labels (or is too short or slow to show it: "
            "see steps and model.optim.lr)",
        )
    )


def _set_for_probe(config: TrainConfig, records: int, steps: int) -> None:
    config.exp_manager.resume_if_exists = True  # the probe neither reads nor writes checkpoints
    config.model.global_batch_size = records
    config.model.optim.sched.name = Schedule.constant
    config.model.optim.sched.warmup_steps = 0
    config.trainer.rm.max_epochs = steps
    config.trainer.rm.max_steps = steps
    config.model.data.data_prefix.validation = []


def _check_bar(metric: str) -> None:
    if metric not in BARS:
        raise ConfigError(
            f"model.objective: got one that is measured by {metric}, wanted one by "
            f"{' or '.join(BARS)}, for which is known what a probe must reach"
        )


def _demo_file(folder: Path, records: int) -> Path:
    path = folder / "demo.jsonl"
    write_lines(path, demo_lines(build_demo_pairs(2400, 0.1, 1)[0][:records]))
    return path
