"""What the start of a run opens, what it rejects before it reads data, and what it closes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_aligner.checkpoint import run as run_checkpoints
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.nemo import archive
from nemo_aligner.checkpoint.nemo.reward_model import CheckpointDescription
from nemo_aligner.checkpoint.run import RunState, Saved
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import load_config
from nemo_aligner.config.model import LORA_TARGETS, ModelConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.distributed.layout import LayoutSizes
from nemo_aligner.models.shapes.lora import LoraShape, with_lora
from nemo_aligner.training import prepare
from nemo_aligner.training import run as run_module
from nemo_aligner.training.dry_run import check_run
from nemo_aligner.training.loggers import MetricLoggers
from nemo_aligner.training.prepare import PreparedRun, prepare_run
from nemo_aligner.training.run import train
from nemo_aligner.training.trainer import SupervisedTrainer
from nemo_aligner.utils.errors import CheckpointError, ConfigError, DataError
from tests.harness import families, tiny

ONE, fp32 = LayoutSizes(), Precision.fp32


class _StartedError(Exception):
    """The first step would come next."""


def test_start_opens_the_base_once_for_the_weights_and_once_for_the_rest(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[Path] = Counter()
    _count(monkeypatch, archive, "_open_tar", opened)
    listed: Counter[Path] = Counter()
    _count(monkeypatch, run_checkpoints, "_list_saved", listed)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    folder = tmp_path / "run"
    # Nulls that are resolved by the base checkpoint, and LoRA, whose base is compared on resuming.
    nulls = ("trainer.precision=null", "model.optim.lr=null", "model.lora.rank=2")
    settings = [*tiny.training(base, folder, pairs, pairs), *nulls]

    def starts(start: Callable[[TrainConfig], object]) -> tuple[int, int]:
        opened.clear()
        listed.clear()
        start(load_config(TrainConfig, settings))
        return opened[base], listed[folder / "checkpoints"]

    def start_run(config: TrainConfig) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(SupervisedTrainer, "fit", _stop)
            with pytest.raises(_StartedError):
                train(config)

    def check(config: TrainConfig) -> None:
        check_run(config, processes=1)

    assert starts(check) == (1, 1)
    assert starts(start_run) == (2, 1)
    train(load_config(TrainConfig, [*settings, "trainer.rm.max_steps=1"]))
    assert starts(check) == (1, 1)
    assert starts(start_run) == (2, 1)


def test_run_that_may_not_resume_is_rejected_before_its_data_is_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    settings = [*tiny.training(base, tmp_path / "run", pairs, pairs), "trainer.rm.max_steps=1"]
    logger = Mock()
    opened = MetricLoggers(loggers={"service": logger})
    with monkeypatch.context() as patched:
        patched.setattr(run_module, "build_loggers", lambda *arguments: opened)
        train(load_config(TrainConfig, settings))
        assert [call.args for call in logger.finalize.call_args_list] == [("success",)]
        patched.setattr(SupervisedTrainer, "fit", _stop)
        with pytest.raises(_StartedError):
            train(load_config(TrainConfig, settings))
        assert logger.finalize.call_args.args == ("failed",)

    monkeypatch.setattr(prepare, "build_training_data", _read_no_data)
    config = load_config(TrainConfig, [*settings, "exp_manager.resume_if_exists=false"])
    with pytest.raises(ConfigError, match=r"exp_manager\.resume_if_exists: got false"):
        check_run(config, processes=1)
    (path,) = (tmp_path / "run" / "checkpoints").glob("step_*/run_state.json")
    state = json.loads(path.read_text())
    state["fingerprint"]["model.objective"] = "odin"
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="odin was removed in nemo_aligner"):
        check_run(load_config(TrainConfig, settings), processes=1)


def test_settings_that_the_model_does_not_support_are_rejected_before_its_data_is_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CheckpointDescription.read(base)
    monkeypatch.setattr(prepare, "build_training_data", _read_no_data)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 4)
    settings = tiny.training(base, tmp_path / "run", pairs, pairs)
    full = "model.activations_checkpoint_granularity=full"
    experts, lora = _described(plain, "mixtral"), "model.lora.rank=3"
    adapted = replace(experts, config=with_lora(experts.config, LoraShape(3, 8.0, LORA_TARGETS)))
    tp = LayoutSizes(tp=2)
    trained = replace(plain, contract=build_contract(ModelConfig(), plain.tokenizer, fp32))
    head = "pretrained_checkpoint.load_rm_head_weights=other.nemo"
    for checkpoint, changes, layout, message in (
        (experts, [lora, "model.lora.dropout=0.1"], ONE, "lora.dropout: got 0.1, which is not"),
        (experts, [lora], tp, "lora.rank: got 3, wanted a multiple of .*=2, which splits"),
        # The adapters of the base are loaded before they are folded.
        (adapted, [], tp, "lora.rank: got 3, wanted a multiple of .*=2, which splits"),
        (plain, [full, "model.activations_checkpoint_num_layers=9"], ONE, "got 9, wanted at most"),
        (_described(plain, "gemma4_small"), [full], ONE, "granularity: got full, which is not"),
        (_described(plain, "qwen3_5"), [], LayoutSizes(cp=2), "context_parallel_size: got 2"),
        (trained, [head], ONE, "load_rm_head_weights: got other.nemo, but training starts from"),
    ):
        monkeypatch.setattr(CheckpointDescription, "read", Mock(return_value=checkpoint))
        with pytest.raises(ConfigError, match=message):
            prepare_run(load_config(TrainConfig, [*settings, *changes]), layout)


def test_schedule_need_not_fit_a_run_that_has_no_step_left() -> None:
    """A stopped run is finished by setting max_steps to the step of its newest checkpoint."""
    config = load_config(TrainConfig, ["model.optim.sched.constant_steps=10"])
    for step, fits in ((None, False), (2, False), (3, True), (4, True)):
        latest = None if step is None else Saved(Path("step"), RunState(step, 8 * step))
        run = PreparedRun(config, ONE, *[Mock()] * 3, latest)
        vars(run)["loader"] = Mock(total_steps=lambda *limits: 3)
        with nullcontext() if fits else pytest.raises(ConfigError, match=r"sched\.constant_steps"):
            assert run.total_steps == 3


def _described(plain: CheckpointDescription, case: str) -> CheckpointDescription:
    """The description of a checkpoint with another decoder."""
    hf_config = families.hf_config(case)
    return replace(plain, config=find_family(hf_config.model_type).to_nemo(hf_config.to_dict()))


def test_missing_file_is_named_with_its_setting_and_the_likely_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    config = load_config(
        TrainConfig, [f"model.data.data_prefix.validation={tmp_path / 'trian.jsonl'}"]
    )
    message = r"^model\.data\.data_prefix\.validation: .*no such file; did you mean .*/train\.jsonl"
    with pytest.raises(DataError, match=message):
        prepare._find_local_files(config.model.data.data_prefix)


def _stop(trainer: SupervisedTrainer) -> None:
    raise _StartedError


def _read_no_data(*arguments: Any, **options: Any) -> None:
    pytest.fail("the data was read")


def _count(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: Counter[Path]) -> None:
    """Count the calls of the function ``name`` by the path that they pass."""
    function = getattr(module, name)

    def counted(path: Path) -> Any:
        calls[path] += 1
        return function(path)

    monkeypatch.setattr(module, name, counted)
