"""The same five steps at every layout: equal losses, gradient norms and, afterwards, rewards."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.parallel.layout import ParallelLayout
from tests import tiny
from tests.once import Once

STEPS = 5
LAYOUTS = {
    "tp2": (2, ["model.tensor_model_parallel_size=2"]),
    "tp2_sp": (2, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
    "pp2": (2, ["model.pipeline_model_parallel_size=2"]),
    "dp2": (2, []),
    "tp2_pp2": (
        4,
        ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"],
    ),
    "recompute": (1, ["model.activations_checkpoint_granularity=full"]),
    "recompute_one_layer": (
        1,
        [
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_num_layers=1",
        ],
    ),
}

SMOKE = ("tp2_sp", "pp2", "dp2")


def train(
    folder: Path,
    base: Path,
    pairs: Path,
    processes: int,
    overrides: list[str],
    script: str = "examples/train_reward_model.py",
) -> Path:
    """Run the training example, or another script that trains; its results folder."""
    tiny.run_script(
        script,
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{pairs}]",
        f"model.data.data_prefix.validation=[{pairs}]",
        "model.data.allow_prompt_overlap=true",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=160",
        "model.global_batch_size=8",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        f"trainer.rm.max_steps={STEPS}",
        "trainer.rm.max_epochs=10",
        f"trainer.rm.val_check_interval={STEPS}",
        *overrides,
        processes=processes,
        fresh=processes > 2,
    )
    return folder


def curves(folder: Path) -> dict[str, list[float]]:
    """Loss and gradient norm of every step, as the CSV logger wrote them."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("train/loss")]
    return {name: [float(row[f"train/{name}"]) for row in rows] for name in ("loss", "grad_norm")}


def validated(folder: Path) -> dict[str, float]:
    """Every metric of the last validation: 37 pairs, so uneven shards and a last pack half full."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("validation-pairs/loss")]
    return {
        name: float(value)
        for name, value in rows[-1].items()
        if name.startswith("validation-") and value
    }


def score(archive: Path, texts: Path, layout: ParallelLayout) -> np.ndarray:
    """The rewards of the chosen replies, in one process."""
    from nemo_aligner.scoring.scorer import load_scorer

    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    conversations = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["chosen"]},
        ]
        for row in rows
    ]
    return load_scorer(archive, layout).score(conversations)[:, 0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", 37)


@pytest.fixture(scope="module")
def reference(once: Once, base: Path, pairs: Path) -> Path:
    return once("one_process", lambda folder: train(folder, base, pairs, 1, []))


def check_same(folder: Path, reference: Path, texts: Path, layout: ParallelLayout) -> None:
    """Two runs had the same losses and gradient norms, and made the same reward model."""
    got, wanted = curves(folder), curves(reference)
    assert len(wanted["loss"]) == STEPS
    np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["grad_norm"], wanted["grad_norm"], rtol=1e-5)
    metrics, expected = validated(folder), validated(reference)
    assert {"validation-pairs/ece", "validation-pairs/reward_margin_p95"} <= set(expected)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
    archives = [next(path.rglob("megatron_gpt.nemo")) for path in (folder, reference)]
    rewards = [score(archive, texts, layout) for archive in archives]
    assert np.ptp(rewards[1]) > 0.01
    np.testing.assert_allclose(rewards[0], rewards[1], atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.smoke] if name in SMOKE else []) for name in LAYOUTS],
)
def test_layout_trains_like_one_process(
    name: str, base: Path, pairs: Path, reference: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    processes, overrides = LAYOUTS[name]
    folder = train(tmp_path, base, pairs, processes, overrides)
    check_same(folder, reference, pairs, layout)


@pytest.mark.parametrize("name", ["tp2", "tp2_sp", "dp2", "recompute"])
def test_products_by_onednn_train_alike(
    name: str, base: Path, pairs: Path, reference: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    script = "tests/distributed/train_by_onednn.py"
    folder = train(tmp_path, base, pairs, *LAYOUTS[name], script)
    check_same(folder, reference, pairs, layout)


def test_query_groups_of_zeros_do_not_train(
    pairs: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    """Three query groups and one of zeros at TP=2, against the three at one process."""
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    plain = tiny.write_base_nemo(tmp_path / "plain.nemo", **heads)
    padded = tmp_path / "padded.nemo"
    tiny.run_verb(
        "convert",
        f"--input={plain.with_suffix('.hf')}",
        f"--output={padded}",
        "--tensor-parallel=2",
    )
    folder = train(tmp_path / "tp2", padded, pairs, *LAYOUTS["tp2"])
    check_same(folder, train(tmp_path / "one", plain, pairs, 1, []), pairs, layout)
