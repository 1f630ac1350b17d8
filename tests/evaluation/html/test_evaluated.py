"""An evaluation as a page, as soon as it is made: pairs, ratings, benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.data.records import Comparison, Origin, Rating
from nemo_aligner.evaluation.evaluate import evaluate_comparisons, evaluate_ratings
from nemo_aligner.evaluation.html.evaluated import of_report, of_task
from nemo_aligner.evaluation.html.page import render_page
from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.text.messages import reply_of
from tests.contracts import Contracts

ABOUT = {"checkpoint": "m.nemo", "contract": "a hash", "data": "x.jsonl"}


def by_length(texts: Sequence[Any]) -> np.ndarray:
    return np.array([[len(reply_of(text))] for text in texts], dtype=np.float32)


def test_pairs(contracts: Contracts) -> None:
    pairs = [
        Comparison.of_pair("x" * n, "y" * (20 - n), Origin("x.jsonl", n)) for n in range(1, 20)
    ]
    report = evaluate_comparisons(by_length, pairs)
    page = render_page([of_report("found", report, ABOUT, contracts())])
    assert contracts().hash in page
    assert "margin -18.000: chosen 1.000, rejected 19.000" in page
    assert re.search(r"<td[^>]*>checkpoint</td><td[^>]*>m.nemo</td>", page)


def test_ratings(contracts: Contracts) -> None:
    ratings = [Rating("x" * n, (float(n % 4),), Origin("x.jsonl", n)) for n in range(1, 20)]
    report = evaluate_ratings(by_length, ratings, ["helpful"])
    page = render_page([of_report("found", report, ABOUT, contracts())])
    assert "helpful: reward 19.000, label 3.000" in page


@pytest.mark.parametrize(
    ("name", "shown"), [("llmbar", "of 3 pairs"), ("best_of_n", "There are no pairs here.")]
)
def test_benchmarks(name: str, shown: str, contracts: Contracts, tmp_path: Path) -> None:
    task, path = find_task(name), tmp_path / "task.jsonl"
    path.write_text(3 * (json.dumps(task.sample) + "\n"))
    report = run_task(task, path, by_length)
    page = render_page([of_task("found", report, ABOUT, contracts())])
    assert f"benchmark {name}" in page
    assert f'<td class="short">{report.rows[-1].value:.4f}</td>' in page
    assert shown in page
