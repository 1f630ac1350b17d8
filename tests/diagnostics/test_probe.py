"""The probe passes a trainer that follows its labels, and fails one that is blind to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.diagnostics.probe import few_records, probe, swap_labels
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from tests import tiny
from tests.data.test_packing import dataset

PROBE = "probe"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")
    return [
        f"pretrained_checkpoint.restore_from_path={base}",
        "model.optim.lr=3e-3",
        "model.micro_batch_tokens=512",
        "model.data.seq_length=128",
    ]


@pytest.mark.slow(seconds=8)
def test_training_on_demo_pairs_passes(settings: list[str]) -> None:
    done = tiny.run_verb(PROBE, "--records=4", *settings)
    assert "passed: training follows its labels" in done.stdout
    assert "4 records, 20 steps each way" in done.stdout


@pytest.mark.slow(seconds=8)
def test_regression_passes(settings: list[str], tmp_path: Path) -> None:
    ratings = tiny.write_ratings(tmp_path / "ratings.jsonl", 12, ("a", "b"))
    done = tiny.run_verb(
        PROBE,
        "--records=6",
        "--steps=60",
        *settings,
        f"model.data.data_prefix.train=[{ratings}]",
        "model.reward_model_type=regression",
        "model.regression.attributes=[a,b]",
    )
    assert "passed: training follows its labels" in done.stdout
    assert "pearson_mean on the labels as they are" in done.stdout


@pytest.mark.slow(seconds=6)
def test_a_trainer_that_is_blind_to_its_labels_fails(settings: list[str]) -> None:
    done = tiny.run_script("tests/training/blind.py", "--records=4", *settings, check=False)
    assert done.returncode == 1
    assert "FAILED: training does not follow its labels" in done.stdout


class Rote:
    """Learns at once what the labels say, if it looks at them."""

    def __init__(self, data: TrainingData, looks: bool) -> None:
        better, _ = data.train.records.pairs().of(torch.arange(data.train.records.num_rewards))
        self._right = float(better[0] == 0) if looks else 1.0
        self._accuracy = 0.5

    def train_step(self, step: int) -> dict[str, float]:
        self._accuracy = self._right
        return {"loss": 1.0 / (step + 1)}

    def validate(self) -> dict[str, float]:
        return {"validation-probe/accuracy": self._accuracy}


def test_what_passes() -> None:
    data = few_records(TrainingData(dataset([2, 3] * 4), [], None, BradleyTerry()), 2)  # type: ignore[arg-type]
    assert len(data.train) == len(data.validation[0]) == 2
    result = probe(lambda each: Rote(each, looks=True), data, 3)
    assert (result.untrained, result.learned, result.swapped) == (0.5, 1.0, 0.0)
    assert result.losses == ((1.0, pytest.approx(1 / 3)),) * 2
    assert result.passed
    assert not probe(lambda each: Rote(each, looks=False), data, 3).passed


def test_swapped_twice_is_as_it_was() -> None:
    pairs, rated = dataset([2, 3, 4, 5]), dataset([2, 3, 4], RecordKind.rating)
    better, worse = swap_labels(pairs).records.pairs().of(torch.arange(4))
    assert (better.tolist(), worse.tolist()) == ([1, 3], [0, 2])
    assert torch.equal(swap_labels(swap_labels(pairs)).records.ranks, pairs.records.ranks)
    swapped = swap_labels(rated).records.labels.values
    assert torch.equal(swapped, rated.records.labels.values.flip(0))
