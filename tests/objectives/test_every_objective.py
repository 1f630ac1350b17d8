"""What holds for each objective: its gradient, its sums over batches, and no wait for a device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nemo_aligner.batch import Records
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
from tests.objectives.hand_made import check_any_batch, check_gradient, ranked, rated

NAMES = ("help", "brief")
MISSING = math.nan
RANKED = ranked(
    *([0, 1], [2, 0, 1], [0, 0], [1, 0, 0, 2], [1, 0], [4, 3, 2, 1, 0]),
    label_margins=[1.0, 0.5, 2.0, MISSING, 3.0, 1.5],
)
PAIRS = ranked([0, 1], [0, 1], label_margins=[1.0, MISSING])
RATED = rated(torch.tensor([[1.0, MISSING], [0.0, 0.5], [MISSING, MISSING], [3.0, -1.0]]))


@pytest.mark.parametrize(
    "objective",
    [
        BradleyTerry(),
        BradleyTerry(label_smoothing=0.1, focal_gamma=2.0, ties="half"),
        BradleyTerry(label_margin="subtract", center_rewards_coefficient=0.1, ties="half"),
        BradleyTerry(label_margin="scale", label_smoothing=0.2, focal_gamma=0.5),
        PlackettLuce(),
        RaoKupper(),
        RaoKupper(tie_parameter=1.1),
        RaoKupper(learned=True),
        Davidson(),
        Davidson(tie_parameter=3),
        Davidson(learned=True),
        MaskedMse(NAMES),
        Huber(NAMES, delta=0.5),
        OrdinalBins(NAMES, values={"help": [0, 1, 4], "brief": [-1, 0, 1]}),
        Quantiles(NAMES),
        RankingAndRegression(NAMES),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_gradient_and_sums_do_not_depend_on_the_batch_and_wait_for_no_device(
    objective: Objective,
) -> None:
    for records in (RANKED, PAIRS) if objective.main_metric == "accuracy" else (RATED,):
        shape = (records.num_rewards, count_outputs(objective))
        rewards = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        check_gradient(objective, rewards, records)
        check_any_batch(objective, rewards, records)
        check_on_a_device_without_data(objective, rewards, records)


def check_on_a_device_without_data(
    objective: Objective, rewards: torch.Tensor, records: Records
) -> None:
    """There a loss that asks for a number fails."""
    labels = replace(records.labels, values=records.labels.values.to("meta"))
    there = replace(records, labels=labels)
    rewards = torch.empty_like(rewards, device="meta", requires_grad=True)
    total, count = objective.loss(rewards, there)
    total.backward()
    assert (total.device.type, count.device.type) == ("meta", "meta")
    assert (total.shape, count.dtype) == ((), torch.int64)
    assert rewards.grad is not None
