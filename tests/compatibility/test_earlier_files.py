"""Checkpoints, runs and rewards of version 0.1.0 are those of today; see ``files/README.md``."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.scoring.scorer import load_scorer
from tests import tiny

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
HELD_OUT = {"ranking": "held_out.jsonl", "regression": "held_out_ratings.jsonl"}
# On the machine that wrote the files the numbers are equal; another CPU may round otherwise.
TOLERANCE = 1e-6

both_kinds = pytest.mark.parametrize("kind", HELD_OUT)


def arguments(folder: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={FILES / 'base.nemo'}",
        f"model.data.data_prefix.train=[{FILES / 'pairs.jsonl'}]",
        f"model.data.data_prefix.validation=[{FILES / 'held_out.jsonl'}]",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=256",
        "model.global_batch_size=4",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        "trainer.precision=fp32",
        "trainer.rm.max_epochs=2",
        "trainer.rm.max_steps=8",
        "trainer.rm.val_check_interval=2",
        "trainer.rm.save_interval=4",
        "exp_manager.create_tensorboard_logger=false",
        "exp_manager.create_csv_logger=true",
        "exp_manager.checkpoint_callback_params.monitor=validation-held_out/loss",
        "exp_manager.checkpoint_callback_params.save_top_k=9",
        f"exp_manager.explicit_log_dir={folder}",
    ]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The earlier run after today's code went on with it, and what it printed."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    shutil.copytree(FILES / "run", folder)
    return folder, tiny.run_script("examples/train_reward_model.py", *arguments(folder)).stdout


def logged_in(folder: Path) -> dict[str, dict[str, float]]:
    """Metric -> step -> number."""
    logged: dict[str, dict[str, float]] = {}
    with (folder / "csv" / "metrics.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if name != "step" and value:
                    logged.setdefault(name, {})[row["step"]] = float(value)
    return logged


def as_numbers(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def reward_rows(rows: list[dict[str, float]]) -> np.ndarray:
    return np.array([list(row.values()) for row in rows])


def test_an_earlier_run_goes_on_as_it_would_have(resumed: tuple[Path, str]) -> None:
    folder, printed = resumed
    assert f"resumed from {folder / 'checkpoints' / 'step_00000004'}, after 16 records" in printed
    logged = logged_in(folder)
    for name, expected in EXPECTED["ranking"]["logged"].items():
        assert logged[name] == pytest.approx(expected, rel=0, abs=TOLERANCE), name


def test_a_resumed_run_exports_the_same_reward_model(
    resumed: tuple[Path, str], layout: ParallelLayout
) -> None:
    archive = resumed[0] / "checkpoints" / "megatron_gpt.nemo"
    scorer = load_scorer(str(archive), layout, micro_batch_tokens=4096)
    assert scorer.contract.hash == EXPECTED["ranking"]["contract"]
    rewards = scorer.score(EXPECTED["texts"])
    np.testing.assert_allclose(rewards, EXPECTED["ranking"]["rewards"], rtol=0, atol=TOLERANCE)


@both_kinds
def test_an_earlier_reward_model_scores_the_same(kind: str, layout: ParallelLayout) -> None:
    expected = EXPECTED[kind]
    scorer = load_scorer(str(FILES / f"{kind}.nemo"), layout, micro_batch_tokens=4096)
    assert scorer.contract.hash == expected["contract"]
    assert list(scorer.attributes) == expected["attributes"]
    rewards = scorer.score(EXPECTED["texts"])
    np.testing.assert_allclose(rewards, expected["rewards"], rtol=0, atol=TOLERANCE)


@both_kinds
def test_an_earlier_reward_model_is_evaluated_the_same(kind: str, tmp_path: Path) -> None:
    report, rewards = tmp_path / "evaluation.json", tmp_path / "rewards.jsonl"
    tiny.run_script(
        "examples/evaluate_reward_model.py",
        f"rm_model_file={FILES / f'{kind}.nemo'}",
        f"data.path={FILES / HELD_OUT[kind]}",
        f"output={report}",
        f"output_rewards={rewards}",
    )
    expected: dict[str, Any] = EXPECTED[kind]
    today = json.loads(report.read_text())
    assert today["contract"] == expected["contract"]
    # A temperature, or a correlation of four records, changes by more than what is rounded.
    wanted = pytest.approx(as_numbers(expected["evaluation"]), rel=1e-4, abs=TOLERANCE, nan_ok=True)
    assert as_numbers({name: today["metrics"][name] for name in expected["evaluation"]}) == wanted
    rows = [json.loads(line)["rewards"] for line in rewards.read_text().splitlines()]
    assert [list(row) for row in rows] == [list(row) for row in expected["evaluated_rewards"]]
    np.testing.assert_allclose(
        reward_rows(rows), reward_rows(expected["evaluated_rewards"]), rtol=0, atol=TOLERANCE
    )
