"""Does training see its labels? A few records are learned by heart, then with labels swapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.console import Counter, waiting_for
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.training_data import TrainingData

_NAME = "validation-probe"
# What a model that has learned a handful of records by heart must reach, and with swapped labels
# stay below.
BARS = {"accuracy": (0.9, 0.1), "pearson_mean": (0.8, -0.8)}


class ProbedLearner(Protocol):
    """What is trained, as ``RewardLearner``."""

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
        """Whether both trainings learned the labels that they were given."""
        high, low = BARS[self.metric]
        return self.learned >= high and self.swapped <= low


def few_records(data: TrainingData, count: int) -> TrainingData:
    """The first ``count`` training records, to train on and to validate on."""
    few = data.train.first(count)
    few = replace(few, sources=[""] * len(few))
    return replace(data, train=few, validation=[replace(few, name=_NAME)])


def swap_labels(dataset: TokenizedDataset) -> TokenizedDataset:
    """The worst completion as the best; ratings mirrored at the mean of their attribute."""
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
