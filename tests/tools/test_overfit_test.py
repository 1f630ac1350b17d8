"""The probe passes a trainer that follows its labels, and fails one that is blind to them."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.cli.main import main
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.distributed.layout import LayoutSizes
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.tools.overfit_test import (
    _adapt_settings,
    few_records,
    probe,
    swap_labels,
)
from nemo_aligner.training.prepare import prepare_run
from nemo_aligner.utils.errors import TrainingError
from tests.data.test_packing import dataset
from tests.distributed.layouts import archive
from tests.harness import families, tiny


@pytest.fixture(scope="module")
def settings(base: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={base}",
        "model.optim.lr=3e-3",
        "model.micro_batch_tokens=512",
        "model.data.seq_length=128",
    ]


def test_probe_passes_training_on_demo_pairs_and_on_ratings(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tiny.run_verb("probe", "--records=4", *settings)
    assert "passed: training follows its labels" in done.stdout
    assert "4 records, 20 steps" in done.stdout
    rated = tiny.write_ratings(tmp_path / "ratings.jsonl", 12, ("a", "b"))
    regression = ("model.reward_model_type=regression", "model.regression.attributes=[a,b]")
    data = (f"model.data.data_prefix.train=[{rated}]", *regression)
    assert main(["probe", "--records=6", "--steps=60", *settings, *data]) == 0
    shown = capsys.readouterr().out
    assert "passed: training follows its labels" in shown
    assert "pearson_mean on the original labels" in shown


@pytest.mark.parametrize("case", ["qwen3_next", "deepseek_v3", "nemotron_h_moe"])
def test_probe_and_swapped_evaluation_pass_training_of_other_decoders(
    case: str, settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linear and latent attention, Mamba-2; tests/models compares the gradients of all decoders."""
    path = families.write_base_nemo(tmp_path / "base.nemo", case)
    base = f"pretrained_checkpoint.restore_from_path={path}"
    assert main(["probe", "--records=4", base, *settings[1:]]) == 0
    assert "passed: training follows its labels" in capsys.readouterr().out
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 16)
    run = (*tiny.training(path, tmp_path / "run", pairs), *settings[1:], "trainer.rm.max_steps=8")
    assert main(["train", *run]) == 0
    reports = []
    for swapped in ("false", "true"):
        output = tmp_path / f"{swapped}.json"
        arguments = (f"rm_model_file={archive(tmp_path / 'run')}", f"data.path={pairs}")
        assert main(["evaluate", *arguments, f"output={output}", f"swapped={swapped}"]) == 0
        reports.append(json.loads(output.read_text())["metrics"])
    learned, opposite = reports
    assert learned["accuracy"] > 0.9
    assert opposite["accuracy"] == pytest.approx(1 - learned["accuracy"])
    assert opposite["reward_margin"] == -learned["reward_margin"]


def test_probe_ignores_what_fits_only_the_steps_and_files_of_the_run(
    settings: list[str], tmp_path: Path
) -> None:
    files = [tiny.write_pairs(tmp_path / f"{seed}.jsonl", 6, seed) for seed in (0, 1)]
    prefix = "model.data.data_prefix"
    weights = [f"{prefix}.train=[{files[0]},{files[1]}]", f"{prefix}.train_weights=[1,2]"]
    arguments = [*settings, *weights, "model.optim.sched.constant_steps=99"]
    config = load_config(TrainConfig, arguments)
    _adapt_settings(config, 4, 5)
    run = prepare_run(config, LayoutSizes())
    assert replace(run, data=few_records(run.data, 4)).total_steps == 5


def blind(self: BradleyTerry, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
    """Compute a loss that does not depend on which reply was chosen."""
    chosen, rejected = records.pairs().of(rewards[:, 0])
    margins = (chosen - rejected).abs()
    return F.softplus(-margins).sum(), torch.tensor(margins.numel())


def test_probe_fails_a_trainer_that_is_blind_to_its_labels(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BradleyTerry, "loss", blind)
    assert main(["probe", "--records=4", *settings]) == 1
    assert "FAILED: training does not follow its labels" in capsys.readouterr().out


class Rote:
    """A learner that fits the labels in one step if ``looks``; else it ignores them."""

    def __init__(self, data: TrainingData, looks: bool) -> None:
        better, _ = data.train.records.pairs().of(torch.arange(data.train.records.num_rewards))
        self._right = float(better[0] == 0) if looks else 1.0
        self._accuracy = 0.5

    def train_step(self, step: int) -> dict[str, float]:
        self._accuracy = self._right
        return {"loss": 1.0 / (step + 1)}

    def validate(self) -> dict[str, float]:
        return {"validation-probe/accuracy": self._accuracy}

    def release(self) -> None:
        self._accuracy = float("nan")


def test_probe_result() -> None:
    data = few_records(TrainingData(dataset([2, 3] * 4), [], None, BradleyTerry()), 2)  # type: ignore[arg-type]
    assert len(data.train) == len(data.validation[0]) == 2
    result = probe(lambda training_data: Rote(training_data, looks=True), data, 3)
    assert (result.untrained, result.learned, result.swapped) == (0.5, 1.0, 0.0)
    assert result.losses == ((1.0, pytest.approx(1 / 3)),) * 2
    assert result.passed
    assert not probe(lambda training_data: Rote(training_data, looks=False), data, 3).passed


def test_probe_frees_a_learner_before_it_builds_the_next_and_after_an_error() -> None:
    data = few_records(TrainingData(dataset([2, 3] * 4), [], None, BradleyTerry()), 2)  # type: ignore[arg-type]
    alive: weakref.WeakSet[Rote] = weakref.WeakSet()
    released = []

    class Cyclic(Rote):
        """Is freed only by the garbage collector, like Megatron's optimizers."""

        def __init__(self, data: TrainingData) -> None:
            super().__init__(data, looks=True)
            assert not alive
            alive.add(self)
            self._itself = self

        def train_step(self, step: int) -> dict[str, float]:
            if len(released) == 1:
                raise TrainingError("the loss is not finite")
            return super().train_step(step)

        def release(self) -> None:
            released.append(self._right)

    with pytest.raises(TrainingError):
        probe(Cyclic, data, 1)
    assert released == [1.0, 0.0]


def test_probe_swaps_labels_back_when_it_swaps_twice() -> None:
    pairs, rated = dataset([2, 3, 4, 5]), dataset([2, 3, 4], RecordKind.rating)
    better, worse = swap_labels(pairs).records.pairs().of(torch.arange(4))
    assert (better.tolist(), worse.tolist()) == ([1, 3], [0, 2])
    assert torch.equal(swap_labels(swap_labels(pairs)).records.ranks, pairs.records.ranks)
    teacher = torch.tensor([2.0, 1.0, float("nan"), 0.5])
    taught = replace(pairs, records=replace(pairs.records, teacher_rewards=teacher))
    negated = swap_labels(taught).records.teacher_rewards
    assert negated is not None
    assert torch.equal(negated.nan_to_num(9.0), torch.tensor([-2.0, -1.0, 9.0, -0.5]))
    swapped = swap_labels(rated).records.labels.values
    assert torch.equal(swapped, rated.records.labels.values.flip(0))
