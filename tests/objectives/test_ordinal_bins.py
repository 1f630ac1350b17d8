"""Cross-entropy over ordinal bins: against its formula, and what a model learns by it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from nemo_aligner.objectives.base import count_outputs, label_limits, rewards_of, spreads_of
from nemo_aligner.objectives.ordinal_bins import OrdinalBins
from nemo_aligner.readout import Readout
from tests.objectives.hand_made import accepted, learn, rated

NAMES = ("help", "brief")
VALUES = {"help": [0, 1, 4], "brief": [-1, 0, 1]}


def test_ordinal_bins_are_the_cross_entropy_of_a_label_or_of_the_two_values_around_it() -> None:
    outputs = torch.tensor([[0.5, -1.0, 2.0, 9.0, 9.0, 9.0], [0.0, 1.0, 0.0, 0.2, 0.4, 0.1]])
    records = rated(torch.tensor([[4.0, math.nan], [2.5, -1.0]]))
    total, count = OrdinalBins(NAMES, values=VALUES).loss(outputs, records)

    def log_probability(logits: list[float], index: int) -> float:
        return logits[index] - math.log(sum(map(math.exp, logits)))

    rows = outputs.tolist()
    wanted = -log_probability(rows[0][:3], 2)
    # 2.5 is half way from 1 to 4.
    wanted -= (log_probability(rows[1][:3], 1) + log_probability(rows[1][:3], 2)) / 2
    wanted -= log_probability(rows[1][3:], 0)
    assert (total.item(), int(count)) == (pytest.approx(wanted, rel=1e-6), 3)


def test_ordinal_bins_values_are_given_for_all_by_name_or_taken_from_the_labels() -> None:
    labels = rated(torch.tensor([[1.0, -2.0], [3.0, 6.0], [math.nan, 0.0]])).labels
    measured = OrdinalBins(NAMES, bins=3).fitted(labels, None)
    assert measured.readout == Readout("bins", ((1.0, 2.0, 3.0), (-2.0, 2.0, 6.0)))
    assert OrdinalBins(NAMES, bins=3).readout is None
    for_all = OrdinalBins(NAMES, values=[0, 1]).fitted(labels, None)
    assert for_all.readout == Readout("bins", ((0.0, 1.0),) * 2)
    kept = Readout("bins", ((0.0, 5.0),) * 2)
    assert OrdinalBins(NAMES).fitted(labels, kept).readout == kept
    assert count_outputs(measured) == 6
    assert label_limits(measured, NAMES).tolist() == [[1.0, 3.0], [-2.0, 6.0]]


def test_ordinal_bins_labels_without_a_range_give_no_values() -> None:
    with pytest.raises(ValueError, match="wanted them, as all labels of brief are one"):
        OrdinalBins(NAMES).fitted(rated(torch.tensor([[1.0, 2.0], [3.0, 2.0]])).labels, None)


def test_linear_model_learns_grades_and_where_it_cannot_know_them() -> None:
    generator = torch.Generator().manual_seed(2)
    side = torch.randint(2, (300, 1), generator=generator).double()
    # On one side the label is 1, on the other 0 or 4 by chance.
    chance = 4.0 * torch.randint(2, (300, 1), generator=generator)
    objective = OrdinalBins(("help",), values=[0, 1, 4])
    records = rated(torch.where(side > 0, chance, 1.0).float())
    outputs = learn(objective, torch.cat([side, 1 - side], dim=1), records, steps=600)
    rewards, spreads = (of(objective.readout, outputs) for of in (rewards_of, spreads_of))
    assert spreads is not None
    sure = side[:, 0] == 0
    assert float((rewards[sure] - 1).abs().max()) < 0.1
    assert float((rewards[~sure] - chance[~sure].mean()).abs().max()) < 0.1
    assert float(spreads[sure].max()) < 0.3
    assert float((spreads[~sure] - 2).abs().max()) < 0.1
    report = objective.report(outputs, records, torch.ones(300, dtype=torch.int64))
    assert report["spread_error_correlation/help"] > 0.8
    assert report["spread/help"] == pytest.approx(float(spreads.mean()))


def test_ordinal_bins_settings_that_make_no_bins_are_refused() -> None:
    assert not accepted(
        partial(OrdinalBins, NAMES),
        ({"bins": 1}, "bins: got 1, wanted a whole number from 2 on"),
        ({"bins": 2.5}, "bins: got 2.5, wanted a whole number"),
        ({"values": [1]}, "wanted 2 to 1000 numbers that go up"),
        ({"values": [1, "2"]}, "wanted a list of numbers"),
        ({"values": 3}, "values: got 3, wanted a list of numbers"),
        ({"values": {"help": [0, 1]}}, "values: got those of ['help'], wanted ['help', 'br"),
        ({"values": {"help": [0, 1], "brief": [0, 1, 2]}}, "different numbers of outputs"),
    )
