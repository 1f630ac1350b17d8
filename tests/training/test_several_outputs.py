"""Heads with several outputs an attribute: trained at any layout, read alike, refused elsewhere."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.reward_model import load_critic, read_text_rules
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.layout import ParallelLayout
from tests import tiny
from tests.checkpoint.hf.exporting import export
from tests.distributed.test_layouts import LAYOUTS, curves, train
from tests.once import Once

ATTRIBUTES = ("helpful", "clear")
REGRESSION = [
    "model.reward_model_type=regression",
    f"model.regression.attributes=[{','.join(ATTRIBUTES)}]",
]
MORE_HEAD = ["model.head.bias=true", "model.head.mlp_size=24"]
KINDS = {
    "bins": [*REGRESSION, "model.objective=ordinal_bins", *MORE_HEAD],
    "quantiles": [*REGRESSION, "model.objective=quantiles"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_ratings(tmp_path_factory.mktemp("data") / "ratings.jsonl", 37, ATTRIBUTES)


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, once: Once, base: Path, ratings: Path) -> tuple[str, Path]:
    """Which kind, and the folder of a run of one process."""
    kind = request.param
    return kind, once(
        f"outputs_{kind}", lambda folder: train(folder, base, ratings, 1, KINDS[kind])
    )


def archive(folder: Path) -> Path:
    return next(folder.rglob("megatron_gpt.nemo"))


def last_validation(folder: Path) -> dict[str, float]:
    (path,) = folder.rglob("metrics.csv")
    prefix = "validation-ratings/"
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get(f"{prefix}loss")]
    found = {name.removeprefix(prefix): value for name, value in rows[-1].items()}
    return {name: float(value) for name, value in found.items() if value}


def test_another_layout_trains_like_one_process(
    run: tuple[str, Path], base: Path, ratings: Path, tmp_path: Path
) -> None:
    kind, folder = run
    processes, overrides = LAYOUTS[{"bins": "tp2", "quantiles": "dp2"}[kind]]
    parallel = train(tmp_path, base, ratings, processes, [*overrides, *KINDS[kind]])
    got, wanted = curves(parallel), curves(folder)
    np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["grad_norm"], wanted["grad_norm"], rtol=1e-5)


def test_evaluation_repeats_the_validation_and_says_how_sure_it_is(
    run: tuple[str, Path], ratings: Path, tmp_path: Path
) -> None:
    kind, folder = run
    report, rewards = tmp_path / "report.json", tmp_path / "rewards.jsonl"
    done = tiny.run_script(
        "examples/evaluate_reward_model.py",
        f"rm_model_file={archive(folder)}",
        f"data.path={ratings}",
        f"output={report}",
        f"output_rewards={rewards}",
    )
    assert "spread/helpful" in done.stdout
    validation = last_validation(folder)
    metrics = json.loads(report.read_text())["metrics"]
    for name in (
        "pearson/helpful",
        "spearman_mean",
        "spread/clear",
        "spread_error_correlation/clear",
    ):
        assert metrics[name] == pytest.approx(validation[name], rel=1e-6), name
    rows = [json.loads(line) for line in rewards.read_text().splitlines()]
    assert set(rows[0]["rewards"]) == set(rows[0]["spread"]) == set(ATTRIBUTES)
    mean = np.mean([row["rewards"]["helpful"] for row in rows])
    assert mean == pytest.approx(validation["reward_mean/helpful"], rel=1e-5)
    _, contract = read_text_rules(archive(folder))
    assert contract is not None
    readout = contract.output_readout
    assert readout is not None
    numbers = {"bins": (0.0, 1.0, 2.0, 3.0, 4.0), "quantiles": (0.1, 0.5, 0.9)}
    assert readout.numbers == (numbers[kind],) * 2
    assert any(contract.label_means) == (kind == "quantiles")


def test_what_reads_one_output_an_attribute_refuses_them(
    run: tuple[str, Path], base: Path, ratings: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    kind, folder = run
    message = f"its head has . outputs for each attribute .{kind}., wanted one: a "
    with pytest.raises(CheckpointError, match=message + "reward model of Hugging Face"):
        export(archive(folder), tmp_path / "out", layout)
    with pytest.raises(CheckpointError, match=message + "critic"):
        load_critic(archive(folder), layout)
    goes_on = tiny.run_script(
        "examples/train_reward_model.py",
        "--dry-run",
        f"pretrained_checkpoint.restore_from_path={archive(folder)}",
        f"model.data.data_prefix.train=[{ratings}]",
        "model.data.seq_length=128",
        f"exp_manager.explicit_log_dir={tmp_path}",
        "model.global_batch_size=8",
        *REGRESSION,
        check=False,
    )
    assert goes_on.returncode != 0
    assert "model.objective: got one with one output for each attribute" in goes_on.stderr
