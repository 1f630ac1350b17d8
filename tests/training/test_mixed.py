"""Comparisons and ratings are learned together, alike at any layout, by weights of names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from tests import tiny
from tests.distributed.test_layouts import LAYOUTS, curves, train, validated

SETTINGS = [
    "model.reward_model_type=regression",
    "model.objective=ranking_and_regression",
    "model.regression.attributes=[helpful,clear]",
    "model.regression.attribute_weights={clear: -0.5, helpful: 0.8}",
    "model.head.bias=true",
    "model.head.mlp_size=24",
    "model.head.reads=reply_mean",
]


def test_mixed_files_train_like_one_process(tmp_path: Path) -> None:
    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 18)
    ratings = tiny.write_ratings(tmp_path / "ratings.jsonl", 19, ("helpful", "clear"), seed=1)
    both = Path(f"{pairs},{ratings}")
    processes, overrides = LAYOUTS["pp2"]
    parallel = train(tmp_path / "two", base, both, processes, [*overrides, *SETTINGS])
    single = train(tmp_path / "one", base, both, 1, SETTINGS)
    got, wanted = curves(parallel), curves(single)
    np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["grad_norm"], wanted["grad_norm"], rtol=1e-5)
    metrics = validated(single)
    assert validated(parallel) == pytest.approx(metrics, rel=1e-4, abs=1e-5, nan_ok=True)
    assert {"validation-pairs/accuracy", "validation-ratings/pearson_mean"} <= set(metrics)
    assert "validation-pairs/pearson_mean" not in metrics
    (archive,) = single.rglob("megatron_gpt.nemo")
    _, contract = read_text_rules(archive)
    assert contract is not None
    assert (contract.attributes, contract.attribute_weights) == (("helpful", "clear"), (0.8, -0.5))
    tiny.run_script(
        "examples/evaluate_reward_model.py",
        f"rm_model_file={archive}",
        f"data.path={pairs}",
        f"output={tmp_path / 'report.json'}",
        "model.tensor_model_parallel_size=2",
        "model.sequence_parallel=true",
        processes=2,
    )
    found = json.loads((tmp_path / "report.json").read_text())["metrics"]
    for name in ("accuracy", "reward_margin", "reward_chosen_mean", "reward_margin_p95"):
        assert found[name] == pytest.approx(metrics[f"validation-pairs/{name}"], abs=1e-5), name
