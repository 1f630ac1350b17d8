"""An evaluation as a page, as soon as it is made: pairs, ratings, benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def test_page_of_evaluations_of_pairs_ratings_and_benchmarks(
    contracts: Contracts, tmp_path: Path
) -> None:
    contract, origins = contracts(), [Origin("x.jsonl", n) for n in range(1, 20)]
    pairs = [Comparison.of_pair("x" * at.line, "y" * (20 - at.line), at) for at in origins]
    ratings = [Rating("x" * at.line, (float(at.line % 4),), at) for at in origins]
    tasks = []
    for name in ("llmbar", "best_of_n"):
        task, path = find_task(name), tmp_path / f"{name}.jsonl"
        path.write_text(3 * (json.dumps(task.sample) + "\n"))
        tasks.append(run_task(task, path, by_length))
    of_pairs = of_report("pairs", evaluate_comparisons(by_length, pairs), ABOUT, contract)
    rated = of_report("r", evaluate_ratings(by_length, ratings, ["helpful"]), ABOUT, contract)
    llmbar, best = (of_task(each.task, each, ABOUT, contract) for each in tasks)

    page = render_page([of_pairs, rated, llmbar])
    assert contract.hash in page
    assert "margin -18.000: chosen 1.000, rejected 19.000" in page
    assert "helpful: reward 19.000, label 3.000" in page
    assert re.search(r"<td[^>]*>checkpoint</td><td[^>]*>m.nemo</td>", page)
    assert "of 3 pairs" in page
    page += render_page([best])
    assert "There are no pairs here." in page
    for report in tasks:
        assert f"benchmark {report.task}" in page
        assert re.search(rf'<td class="short"[^>]*>{report.rows[-1].value:.4f}</td>', page)
