"""What holds for each objective: its gradient, its sums over batches, and no wait for a device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import Objective, mean_loss, measure_set
from nemo_aligner.losses.multi_head import HeadEnsemble, bootstrap_counts
from nemo_aligner.losses.pairwise import BradleyTerry, Davidson, PlackettLuce, RaoKupper
from nemo_aligner.losses.regression import (
    BinaryCrossEntropy,
    Huber,
    MaskedMse,
    OrdinalBins,
    Quantiles,
    RankingAndRegression,
)
from tests.losses.hand_made import check_any_batch, check_gradient, ranked, rated

NAMES = ("help", "brief")
MISSING = math.nan
RANKED = ranked(
    *([0, 1], [2, 0, 1], [0, 0], [1, 0, 0, 2], [1, 0], [4, 3, 2, 1, 0]),
    label_margins=[1.0, 0.5, 2.0, MISSING, 3.0, 1.5],
)
PAIRS = ranked([0, 1], [0, 1], label_margins=[1.0, MISSING])
TEACHER = torch.randn(18, generator=torch.Generator().manual_seed(2))
TEACHER[2:5] = TEACHER[11:13] = MISSING  # two records of six have hard labels only
SOFT = replace(RANKED, teacher_rewards=TEACHER)
RATED = rated(torch.tensor([[1.0, MISSING], [0.0, 0.5], [MISSING, MISSING], [3.0, -1.0]]))
FAR_APART = [-1000.0, 0.0, 50.0, 1000.0, 50.0]


@pytest.mark.parametrize(
    "objective",
    [
        BradleyTerry(),
        BradleyTerry(label_smoothing=0.1, focal_gamma=2.0, ties="half"),
        BradleyTerry(label_margin="subtract", center_rewards_coefficient=0.1, ties="half"),
        BradleyTerry(label_margin="scale", label_smoothing=0.2, focal_gamma=0.5),
        BradleyTerry(soft_label_weight=0.6, soft_label_temperature=2, ties="half"),
        PlackettLuce(),
        PlackettLuce(soft_label_weight=0.6, soft_label_temperature=0.5),
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
        RankingAndRegression(NAMES, weights=(1.0, -0.5), regression_weight=0.25),
        BinaryCrossEntropy(NAMES),
        HeadEnsemble(heads=3),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_gradient_and_sums_do_not_depend_on_the_batch_and_wait_for_no_device(
    objective: Objective,
) -> None:
    """The first to fail where a gradient is not that of the loss."""
    for records in (RANKED, PAIRS, SOFT) if objective.main_metric == "accuracy" else (RATED,):
        shape = (records.num_rewards, objective.output_columns.count)
        rewards = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        check_gradient(objective, rewards, records)
        check_any_batch(objective, rewards, records)
        check_on_a_device_without_data(objective, rewards, records)
        check_far_apart(objective, rewards, records)
        total, count = objective.loss(rewards[:0], records.select([]))
        assert (float(total), int(count)) == (0.0, 0)


def test_heads_of_an_ensemble_learn_each_from_a_sample_of_its_own() -> None:
    counts = bootstrap_counts(torch.arange(20_000), 4)
    assert torch.equal(counts[70:80], bootstrap_counts(torch.arange(70, 80), 4))
    shares = [float((counts == number).double().mean()) for number in range(4)]
    poisson = [math.exp(-1) / math.factorial(number) for number in range(4)]
    assert shares == pytest.approx(poisson, abs=0.01)
    assert torch.corrcoef(counts.T).fill_diagonal_(0).abs().max() < 0.03
    rewards = torch.randn(4, 2, dtype=torch.float64)
    (weights,) = bootstrap_counts(PAIRS.ids, 2)[None]
    expected = sum(
        float(weights[record, head])
        / 2
        * (math.log1p(math.exp(lost - won)) + 0.01 * (won + lost) ** 2)
        for head, (a, b, c, d) in enumerate(rewards.T.tolist())
        for record, (won, lost) in enumerate([(a, b), (c, d)])
    )
    objective = HeadEnsemble(heads=2)
    assert float(objective.loss(rewards, PAIRS)[0]) == pytest.approx(expected)
    centred = {"center_rewards_coefficient": 0.5}
    all_heads = HeadEnsemble(heads=2, bootstrap=False, **centred).loss(rewards, PAIRS)[0]
    plain = [BradleyTerry(**centred).loss(head[:, None], PAIRS)[0] for head in rewards.unbind(1)]
    assert float(all_heads) == pytest.approx(float(sum(plain)) / 2)
    means = rewards.mean(dim=1)
    accuracy = ((means[::2] > means[1::2]).double().mean()).item()
    assert objective.step_metrics(rewards, PAIRS)["accuracy"] == accuracy


def test_loss_of_a_data_set_is_drawn_by_no_bootstrap() -> None:
    """Which weighs a record by its place in the file."""
    rewards = torch.randn(40, 2, generator=torch.Generator().manual_seed(3))
    records, lengths = Records.of(range(20), [2] * 20), torch.ones(40, dtype=torch.int64)
    for objective in (HeadEnsemble(heads=2), HeadEnsemble(heads=2, bootstrap=False)):
        loss = measure_set(objective, rewards, records, lengths, [""] * 20)["loss"]
        plain = HeadEnsemble(heads=2, bootstrap=False)
        assert (
            loss
            == mean_loss(plain, rewards, records)
            != mean_loss(HeadEnsemble(heads=2), rewards, records)
        )


def check_far_apart(objective: Objective, rewards: torch.Tensor, records: Records) -> None:
    """In fp32, also where a pair is as good as certain or a reward of no use."""
    if objective.initial_scalars:
        rewards = torch.full_like(rewards, objective.initial_scalars[0])
    levels = torch.tensor(FAR_APART).repeat(len(rewards))[: len(rewards)]
    rewards = torch.cat([levels[:, None], rewards[:, 1:]], dim=1).requires_grad_()
    total, _ = objective.loss(rewards, records)
    total.backward()
    assert math.isfinite(total.item())
    assert rewards.grad is not None
    assert bool(torch.isfinite(rewards.grad).all())


def check_on_a_device_without_data(
    objective: Objective, rewards: torch.Tensor, records: Records
) -> None:
    """There a loss that asks for a number fails."""
    labels = replace(records.labels, values=records.labels.values.to("meta"))
    teacher = None if records.teacher_rewards is None else records.teacher_rewards.to("meta")
    there = replace(records, labels=labels, teacher_rewards=teacher)
    rewards = torch.empty_like(rewards, device="meta", requires_grad=True)
    total, count = objective.loss(rewards, there)
    total.backward()
    assert (total.device.type, count.device.type) == ("meta", "meta")
    assert (total.shape, count.dtype) == ((), torch.int64)
    assert rewards.grad is not None
