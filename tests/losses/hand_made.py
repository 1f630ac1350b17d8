"""Records and rewards for the tests of losses, and a model that is small enough to learn by any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.losses.base import Objective, mean_loss


def ranked(*ranks: Sequence[int], label_margins: Sequence[float] | None = None) -> Records:
    """A record of each list of ranks, and its ``label_margin``."""
    labels = None
    if label_margins is not None:
        labels = LabelColumns.of(["label_margin"], torch.tensor(label_margins).view(-1, 1))
    flat = torch.tensor(
        [rank for record_ranks in ranks for rank in record_ranks], dtype=torch.int64
    )
    return Records.of(
        range(len(ranks)), [len(record_ranks) for record_ranks in ranks], labels, flat
    )


def rated(labels: Tensor, names: Sequence[str] = ("help", "brief")) -> Records:
    """A record of each row of labels, of the first of ``names``."""
    columns = LabelColumns.of(names[: labels.shape[1]], labels)
    return Records.of(range(len(labels)), [1] * len(labels), columns)


def accepted(kind: Callable[..., object], *cases: tuple[dict[str, object], str]) -> list[str]:
    """Which settings, all of them wrong, are no ValueError that has the text beside them."""
    metrics = []
    for settings, expected in cases:
        try:
            metrics.append(f"{settings}: made {kind(**settings)}")
        except ValueError as error:
            if expected not in str(error):
                metrics.append(f"{settings}: {error}; wanted {expected}")
    return metrics


def loss_of(objective: Objective, rewards: Sequence[float], records: Records) -> tuple[float, int]:
    """The sum of the losses, in float64, and how many."""
    total, count = objective.loss(torch.tensor(rewards, dtype=torch.float64)[:, None], records)
    return float(total), int(count)


def check_gradient(objective: Objective, rewards: Tensor, records: Records) -> None:
    """The gradient is the one of finite differences."""
    leaf = rewards.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda outputs: objective.loss(outputs, records)[0], (leaf,))


def check_any_batch(objective: Objective, rewards: Tensor, records: Records) -> None:
    """Sums over parts are the sum over all, also of records in another order."""
    total_of_all, count = objective.loss(rewards.double(), records)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(3)).tolist()
    for size in (1, 2, 3):
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        sums = [
            objective.loss(rewards[records.rows(part)].double(), records.select(part))
            for part in parts
        ]
        torch.testing.assert_close(sum(total for total, _ in sums), total_of_all)
        assert sum(int(number) for _, number in sums) == int(count)


def learn(objective: Objective, features: Tensor, records: Records, steps: int = 200) -> Tensor:
    """``[S, outputs]`` of a linear model of ``features [S, F]`` after some steps of Adam.

    Its loss is checked to have come down.
    """
    model = torch.nn.Linear(features.shape[1], objective.output_columns.count, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    previous = mean_loss(objective, model(features.double()).detach(), records)
    for _ in range(steps):
        optimizer.zero_grad()
        total, count = objective.loss(model(features.double()), records)
        (total / count).backward()
        optimizer.step()
    rewards = model(features.double()).detach()
    assert mean_loss(objective, rewards, records) < previous
    return rewards
