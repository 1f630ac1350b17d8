"""W&B and MLflow, told of a run that fails and goes on."""

from __future__ import annotations

import json
import math
import posixpath
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_aligner.config.training import ExpManagerConfig
from nemo_aligner.training import tracking
from nemo_aligner.training.loggers import build_loggers
from nemo_aligner.training.metric_files import read_metrics
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.harness import tiny
from tests.harness.environments import kept_environment, make_environment

# MLflow's own package without its server's parts, with what its database asks for.
REQUIREMENTS = ("wandb>=0.20,<1", "mlflow-skinny>=3,<4", "sqlalchemy>=2,<3", "alembic>=1.13,<2")
STEPS = 7
SAVE_TOP_K = "exp_manager.checkpoint_callback_params.save_top_k"


class FakeLogger:
    """A logger of a service that keeps all that it is told."""

    def __init__(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        self.rows = rows

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if "bad" in metrics:
            raise OSError("no route to host")
        self.rows.append((step, dict(metrics)))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, dict[str, float]]]]:
    """What the runs at a service are told, by their ids."""
    rows: dict[str, list[tuple[int, dict[str, float]]]] = {}

    def open_fake(
        folder: Path, options: Mapping[str, Any], run_id: str | None, settings: Mapping[str, Any]
    ) -> tuple[FakeLogger, str]:
        if "mode" in options:
            raise TypeError("unexpected 'mode'")
        run_id = run_id or f"run {len(rows)}"
        return FakeLogger(rows.setdefault(run_id, [])), run_id

    monkeypatch.setitem(tracking._SERVICES, "wandb", open_fake)
    return rows


def config_of(folder: Path, **more: Any) -> ExpManagerConfig:
    plain = {"create_tensorboard_logger": False, "create_csv_logger": False}
    return ExpManagerConfig(explicit_log_dir=str(folder), **plain, **more)


def run(folder: Path, start: int, *rows: tuple[int, dict[str, float]], **options: Any) -> None:
    """A run that goes on after ``start``, logs these rows, and is killed."""
    config = config_of(folder, create_wandb_logger=True, wandb_logger_kwargs=options)
    loggers = build_loggers(config, {}, start)
    for step, metrics in rows:
        loggers.log(metrics, step)


def test_resumed_run_is_the_same_one(tmp_path: Path, logged: dict[str, Any]) -> None:
    run(tmp_path, 0, *((step, {"loss": step}) for step in (1, 2, 3)))
    run(tmp_path, 1, (2, {"loss": 2.5}))
    # A service takes nothing back: steps after the checkpoint are logged again.
    assert logged == {
        "run 0": [*((step, {"loss": step}) for step in (1, 2, 3)), (2, {"loss": 2.5})]
    }
    # An earlier version kept more in the file.
    content = {"id": "old", "step": 2, "metrics": ["loss"], "is_lost": False}
    (tmp_path / "tracking.json").write_text(json.dumps({"wandb": content}))
    run(tmp_path, 2, (3, {"loss": 3}))
    run(tmp_path, 3, (4, {"loss": 4}))
    # Also after a part of the run in which the service is off.
    build_loggers(config_of(tmp_path), {}, 4).close()
    run(tmp_path, 5, (6, {"loss": 6}))
    assert logged["old"] == [(step, {"loss": step}) for step in (3, 4, 6)]


def test_run_that_begins_anew_is_another_one(tmp_path: Path, logged: dict[str, Any]) -> None:
    run(tmp_path, 0, (1, {"loss": 1}))
    run(tmp_path, 0, (1, {"loss": 1}))
    expected = {"run 0": [(1, {"loss": 1})], "run 1": [(1, {"loss": 1})]}
    assert logged == expected
    # Also where it began without the service, which then hears of all from now on.
    loggers = build_loggers(config_of(tmp_path), {}, 0)
    loggers.log({"loss": 1}, 1)
    run(tmp_path, 1, (2, {"loss": 2}))
    assert logged == {**expected, "run 2": [(2, {"loss": 2})]}


def test_service_that_fails_does_not_end_the_run_and_hears_of_the_next(
    tmp_path: Path, logged: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [(step, {"loss": step}) for step in (1, 2, 3, 4)]
    run(tmp_path, 0, losses[0], (2, {"loss": 2, "bad": 1}), *losses[2:])
    output = capsys.readouterr().out
    assert output.startswith("wandb: logging stopped (OSError: no route to host);")
    assert output.count("\n") == 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    # Not even where it is told what it does not take.
    message = r"create_wandb_logger: got true, .*TypeError: unexpected 'mode'.*wandb_logger_kwargs"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, 1, mode="x")
    run(tmp_path, 1, *losses[1:])
    assert logged == {"run 0": losses}


def test_damaged_file_of_ids_is_named(tmp_path: Path, logged: dict[str, Any]) -> None:
    for text in ("{", "[]", '{"wandb": 3}', '{"wandb": {}}'):
        (tmp_path / "tracking.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tracking\.json: "):
            run(tmp_path, 1)


def test_files_of_a_folder_that_cannot_be_written_name_its_setting_or_end_no_run(
    tmp_path: Path, logged: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tracking.json").mkdir()
    run(tmp_path, 0, (1, {"loss": 1}))
    assert logged == {"run 0": [(1, {"loss": 1})]}
    assert "tracking.json: writing stopped (IsADirectoryError: " in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    file = tmp_path / "metrics.jsonl"
    expected = rf"^exp_manager\.explicit_log_dir: {file} cannot be written: .*Is a directory"
    with pytest.raises(ConfigError, match=expected):
        build_loggers(config_of(tmp_path), {}, 0)


def test_service_that_cannot_be_opened_leaves_no_other_one_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = Mock()
    monkeypatch.setitem(tracking._SERVICES, "wandb", lambda *arguments: (logger, "run 0"))
    monkeypatch.setitem(tracking._SERVICES, "mlflow", Mock(side_effect=OSError("no route to host")))
    config = config_of(tmp_path, create_wandb_logger=True, create_mlflow_logger=True)
    with pytest.raises(ConfigError, match=r"create_mlflow_logger: .*no route to host"):
        build_loggers(config, {}, 0)
    logger.finalize.assert_called_once_with("failed")


def test_wandb_run_ends_with_the_run_also_if_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeWandb:
        """Lightning's logger, as far as it is used."""

        def __init__(self, **arguments: Any) -> None:
            self.experiment = Mock(id="run 0")

        def log_hyperparams(self, settings: dict[str, Any]) -> None:
            pass

        def finalize(self, status: str) -> None:
            pass

    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger", FakeWandb)
    for status, code in (("success", 0), ("failed", 1)):
        logger, run_id = tracking._open_wandb(tmp_path, {}, None, {})
        assert run_id == "run 0"
        logger.finalize(status)
        logger.experiment.finish.assert_called_once_with(exit_code=code)


def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What is asked of Lightning's logger for MLflow, instead of doing it."""
    logger = Mock()

    class FakeMlflow:
        experiment, log_hyperparams = logger.experiment, logger.log_hyperparams
        run_id = "run 0"

        def __init__(self, **arguments: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            logger.log_metrics(metrics, step)

    monkeypatch.setattr("lightning.pytorch.loggers.MLFlowLogger", FakeMlflow)
    return logger


def test_mlflow_takes_the_metrics_of_any_source_and_mixes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ["train/loss", "test-a.b/by_source/gpt_4 x-Y_Xy/accuracy"]
    escaped = {
        "C++": "C_X2b__X2b_",
        "C#": "C_X23_",
        "http://a": "http_X3a__X2f_/a",
        "中": "_X4e2d_",
        "./alpaca": "_X2e_/alpaca",
        "../b..c": "_X2e_./b..c",
        "...": "...",
        "a/": "a_X2f_",
        "_X2b_": "_X5f_X2b_",
    }
    sources = (*escaped, "\ud800" * 60, "\ud800" * 61)  # lone surrogates, as JSON may have them
    names = [f"validation-x/by_source/{source}/loss" for source in sources]
    logger = fake_mlflow(monkeypatch)
    opened, _ = tracking._open_mlflow(tmp_path, {}, None, {})
    opened.log_metrics(dict.fromkeys([*plain, *names], 0.5), 3)
    logged, step = logger.log_metrics.call_args.args
    assert step == 3
    *short, long, other = logged
    assert short == [*plain, *(f"validation-x/by_source/{text}/loss" for text in escaped.values())]
    assert long != other
    for name in (*logged, *map(tracking.mlflow_name, ("/", "//a//", ".", "..", "a/."))):
        assert re.fullmatch("[a-zA-Z0-9_/. -]+", name)
        assert posixpath.normpath(name) == name
        assert not name.startswith(("/", ".."))
        assert len(name) <= 200


def test_mlflow_run_gets_the_parameters_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a run that the user names by its id; MLflow forbids to change parameters."""
    logger = fake_mlflow(monkeypatch)
    logger.experiment.get_run.return_value.data.params = {"model.seed": "1"}
    settings = {"model": {"seed": 2, "optim": {"lr": 0.1}}}
    for options, run_id, parameters in (
        ({}, None, {"model.seed": 2, "model.optim.lr": 0.1}),
        ({"run_id": "mine"}, None, {"model.optim.lr": 0.1}),
        ({}, "resumed", {"model.optim.lr": 0.1}),
    ):
        logger.reset_mock()
        tracking._open_mlflow(tmp_path, options, run_id, settings)
        logger.log_hyperparams.assert_called_once_with(parameters)
        named = [call.args[0] for call in logger.experiment.update_run.call_args_list]
        assert named == list(filter(None, [options.get("run_id") or run_id]))


def arguments(base: Path, folder: Path) -> list[str]:
    train = tiny.write_pairs(folder / "train.jsonl", 24)
    validation = tiny.write_pairs(folder / "validation.jsonl", 4, seed=1)
    return [
        *tiny.training(base, folder / "run", train, validation),
        "exp_manager.create_wandb_logger=true",
        "exp_manager.wandb_logger_kwargs.offline=true",
        "exp_manager.create_mlflow_logger=true",
        f"trainer.rm.max_steps={STEPS}",
        "trainer.rm.val_check_interval=5",
        "trainer.rm.save_interval=3",
    ]


def test_run_that_failed_and_went_on_is_one_run_at_wandb_and_mlflow(
    base: Path, tmp_path: Path
) -> None:
    environment = kept_environment(
        "trackers", REQUIREMENTS, lambda folder: make_environment(folder, *REQUIREMENTS)
    )
    settings = arguments(base, tmp_path)

    def python(script: str, *more: str) -> subprocess.CompletedProcess[str]:
        # In an empty folder, so that nothing may end up there.
        (tmp_path / "here").mkdir(exist_ok=True)
        return subprocess.run(
            [str(environment / "bin/python"), str(tiny.ROOT / script), *more],
            capture_output=True,
            text=True,
            timeout=200,
            env=tiny.environment(),
            cwd=tmp_path / "here",
        )

    # Not killed: that would take what W&B has not written yet along, up to 15 seconds of it.
    in_step_5 = ("nemo_aligner.training.learner:forward_backward", "", "5", "0", "prompt")
    failed = python("tests/training/interrupted.py", "ENOSPC", *in_step_5, *settings)
    assert failed.returncode == 1, failed.stderr
    steps = [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert max(steps) == 4
    resumed = python("nemo_aligner/__main__.py", "train", *settings, f"{SAVE_TOP_K}=2")
    assert resumed.returncode == 0, resumed.stderr
    assert "step_00000003, after 24 records" in resumed.stdout
    read = python("tests/training/read_tracked.py", str(tmp_path / "run"))
    assert read.returncode == 0, read.stderr
    assert list((tmp_path / "here").iterdir()) == []
    check(json.loads(read.stdout), tiny.numbers(tmp_path / "run"))


def check(contents: dict[str, Any], expected: dict[tuple[str, int], float]) -> None:
    """Both services have one run with each number of the run's own file, some of them twice."""
    parts = contents["wandb"]
    assert len(parts) == 2
    assert parts[0]["id"] == parts[1]["id"]
    rows = [row for part in parts for row in part["rows"]]
    logged = [
        (name, row["trainer/global_step"], value)
        for row in rows
        for name, value in row.items()
        if name != "trainer/global_step"
    ]
    compare(logged, expected)
    changed = parts[1]["config"]["exp_manager"]["checkpoint_callback_params"]["save_top_k"]
    assert changed == 2

    (run,) = contents["mlflow"]
    compare([(name, *point) for name, rows in run["metrics"].items() for point in rows], expected)
    assert run["status"] == "FINISHED"
    # MLflow forbids to change parameters.
    assert run["params"][SAVE_TOP_K] == "1"


def compare(logged: list[tuple[str, int, float]], expected: dict[tuple[str, int], float]) -> None:
    timeless = [
        ((name, step), math.nan if math.isnan(value) else value)
        for name, step, value in logged
        if not tiny.is_of_time(name)
    ]
    assert dict(timeless) == expected
