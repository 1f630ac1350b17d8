"""What training has gained, from a run's metrics and an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.gain import render_gain

METRICS = """step,train/loss,validation-held/by_source/x/{name},validation-held/{name}
0,,0.9,0.41234
1,0.7,,
2,0.6,0.9,0.8
"""


def written(folder: Path, name: str, **more: float) -> tuple[Path, Path]:
    run, evaluation = folder / "run", folder / "evaluation.json"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "metrics.csv").write_text(METRICS.format(name=name))
    metrics = {name: 0.75, **more}
    evaluation.write_text(json.dumps({"metrics": metrics, "counts": {"kept": 24}}))
    return run, evaluation


def test_gain_of_pairs_is_in_accuracy_and_of_ratings_in_correlation(tmp_path: Path) -> None:
    shown = "held-out {}, 24 records: 0.412 before training, 0.750 after"
    run, evaluation = written(tmp_path / "pairs", "accuracy", longer_reply_accuracy=0.5)
    assert render_gain(run, evaluation).splitlines() == [
        shown.format("accuracy"),
        "(always taking the longer reply: 0.500)",
    ]
    rated = written(tmp_path / "rated", "pearson_mean")
    assert render_gain(*rated) == shown.format("pearson_mean")
    (run / "logs" / "metrics.csv").write_text("step,train/loss\n1,0.7\n")
    with pytest.raises(DataError, match=r"metrics.csv: got no validation"):
        render_gain(run, evaluation)
    (run / "logs" / "metrics.csv").unlink()
    with pytest.raises(DataError, match=r"run: got 0 files metrics.csv, wanted one"):
        render_gain(run, evaluation)
