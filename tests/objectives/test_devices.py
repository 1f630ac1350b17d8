"""No loss asks a device for a number: on one without data, where that fails, all are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_aligner.batch import LabelColumns, Records
from nemo_aligner.objectives.base import Objective, count_outputs
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.davidson import Davidson
from nemo_aligner.objectives.huber import Huber
from nemo_aligner.objectives.masked_mse import MaskedMse
from nemo_aligner.objectives.ordinal_bins import OrdinalBins
from nemo_aligner.objectives.plackett_luce import PlackettLuce
from nemo_aligner.objectives.quantiles import Quantiles
from nemo_aligner.objectives.ranking_and_regression import RankingAndRegression
from nemo_aligner.objectives.rao_kupper import RaoKupper
from tests.objectives.hand_made import ranked

RANKED = ranked([0, 1], [2, 0, 1], [0, 0], label_margins=[1.0, 2.0, 3.0])
PAIRS = ranked([0, 1], [0, 1], label_margins=[1.0, 2.0])
RATED = Records.of([0, 1], [1, 1], LabelColumns.of(["help"], torch.tensor([[1.0], [2.0]])))


@pytest.mark.parametrize(
    "objective",
    [
        BradleyTerry(),
        BradleyTerry(label_margin="subtract", ties="half", label_smoothing=0.1),
        BradleyTerry(label_margin="scale", focal_gamma=2, center_rewards_coefficient=0.1),
        PlackettLuce(),
        RaoKupper(),
        Davidson(),
        RaoKupper(learned=True),
        Davidson(learned=True),
        MaskedMse(("help",)),
        Huber(("help",)),
        OrdinalBins(("help",), values=[0, 1, 2]),
        Quantiles(("help",)),
        RankingAndRegression(("help",)),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_a_loss_waits_for_no_device(objective: Objective) -> None:
    for records in (RANKED, PAIRS) if objective.main_metric == "accuracy" else (RATED,):
        labels = replace(records.labels, values=records.labels.values.to("meta"))
        there = replace(records, labels=labels)
        shape = (records.num_rewards, count_outputs(objective))
        rewards = torch.zeros(shape, device="meta", requires_grad=True)
        total, count = objective.loss(rewards, there)
        total.backward()
        assert (total.device.type, count.device.type) == ("meta", "meta")
        assert (total.shape, count.dtype) == ((), torch.int64)
        assert rewards.grad is not None
