"""The table of metrics: where each is shown, which direction is better, metrics by source."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.metrics import table
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.table import (
    Better,
    Shown,
    better_values,
    by_source,
    find_metric,
    is_shown,
    measure_pairs,
)
from tests.harness.tiny import ROOT


def test_better_values_and_where_they_are_shown_are_known_by_the_last_part_of_a_name() -> None:
    expected = {
        "v/loss": Better.lower,
        "v/ece": Better.lower,
        "v/accuracy": Better.higher,
        "v/reward_chosen_mean": Better.neither,
        # An attribute, or a source, may have a metric's name.
        "v/pearson/ties": Better.higher,
        "v/by_source/x/ties": Better.lower,
        "v/by_source/ties/accuracy": Better.higher,
        "v/by_source/x/pearson/ties": Better.higher,
        "v/by_source/math/ties/accuracy": Better.higher,
        "v/by_principle/org/accuracy/loss": Better.lower,
        "v/what_is_this": Better.neither,
    }
    assert {name: better_values(name) for name in expected} == expected
    assert is_shown("accuracy", Shown.step)
    assert is_shown("pearson/help", Shown.validation)
    assert not is_shown("pearson/help", Shown.source)
    assert not is_shown("brier", Shown.validation)


def test_metric_is_a_function_and_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = table.Metric("half", "half of the margin", lambda pairs: float(pairs.margins[0]) / 2)
    monkeypatch.setattr(table, "PAIRS", [*table.PAIRS, row])
    assert measure_pairs(PairRewards.of(torch.tensor([[3.0, 1.0]])))["half"] == 1.0
    assert find_metric("validation-x/half") is row


def test_metrics_page_names_every_row() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    missing = []
    for row in table.all_metrics():
        stem, _, ending = row.name.rpartition("_")
        if f"`{row.name}" not in page and not (stem in page and f"`_{ending}`" in page):
            missing.append(row.name)
    assert missing == []


def test_by_source_reports_two_to_fifty_sources_in_the_order_of_their_names() -> None:
    for count, reported in ((1, 0), (2, 2), (50, 50), (51, 0)):
        sources = [f"source {number:02d}" for number in reversed(range(count))]
        metrics = by_source(sources * 2, lambda records: {"last": float(records[-1])})
        expected = {
            f"by_source/{name}/last": 2 * count - 1 - i for i, name in enumerate(sorted(sources))
        }
        assert list(metrics.items()) == list(expected.items())[:reported], count


def test_by_source_tells_records_without_a_source_from_one_called_none() -> None:
    metrics = by_source(["x", "y", "x", ""], lambda records: {"sum": float(sum(records))})
    assert metrics == {"by_source/none/sum": 3, "by_source/x/sum": 2, "by_source/y/sum": 1}
    metrics = by_source(["none", "", ""], lambda records: {"count": float(len(records))})
    assert metrics == {"by_source/none/count": 1.0, "by_source/(none)/count": 2.0}
