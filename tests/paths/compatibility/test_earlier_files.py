"""Today's code reads the checkpoints and runs of version 0.1.0; see ``files/README.md``."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.scorer import load_scorer
from tests.harness import tiny
from tests.training import jobs

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
HELD_OUT = {"ranking": "held_out.jsonl", "regression": "held_out_ratings.jsonl"}
# On the machine that wrote the files results are equal; another CPU may round differently.
TOLERANCE = 1e-6


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
def today(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the results of today's code, and the output of the resumed run.

    It has the resumed run in ``run``, and each model's evaluation in KIND.json and KIND.jsonl.
    """
    folder = tmp_path_factory.mktemp("today")
    shutil.copytree(FILES / "run", folder / "run")
    evaluations = [
        jobs.Job(
            "evaluate",
            [
                f"rm_model_file={FILES / f'{kind}.nemo'}",
                f"data.path={FILES / name}",
                f"output={folder / f'{kind}.json'}",
                f"output_rewards={folder / f'{kind}.jsonl'}",
            ],
        )
        for kind, name in HELD_OUT.items()
    ]
    done, *_ = jobs.run([jobs.Job("train", arguments(folder / "run")), *evaluations])
    return folder, done.stdout


def logged_in(folder: Path) -> dict[str, dict[str, float]]:
    """The logged values, by metric and step."""
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


def test_earlier_run_goes_on_as_it_would_have(
    today: tuple[Path, str], layout: ParallelLayout
) -> None:
    run = today[0] / "run"
    assert f"resumed from {run / 'checkpoints' / 'step_00000004'}, after 16 records" in today[1]
    logged = logged_in(run)
    for name, expected in EXPECTED["ranking"]["logged"].items():
        # The earlier run was stopped before a validation, which today's code does first.
        made_up = {"4"} if name.startswith("validation-") else set()
        assert logged[name].keys() == expected.keys() | made_up, name
        values = {step: logged[name][step] for step in expected}
        assert values == pytest.approx(expected, rel=0, abs=TOLERANCE), name
    check_rewards(run / "checkpoints" / "megatron_gpt.nemo", EXPECTED["ranking"], layout)


def check_rewards(archive: Path, expected: dict[str, Any], layout: ParallelLayout) -> None:
    scorer = load_scorer(str(archive), layout, micro_batch_tokens=4096)
    assert scorer.contract.hash == expected["contract"]
    assert list(scorer.attributes) == expected["attributes"]
    rewards = score_all(scorer, EXPECTED["texts"])
    np.testing.assert_allclose(rewards, expected["rewards"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", HELD_OUT)
def test_earlier_reward_model_scores_and_is_evaluated_the_same(
    kind: str, today: tuple[Path, str], layout: ParallelLayout
) -> None:
    expected: dict[str, Any] = EXPECTED[kind]
    check_rewards(FILES / f"{kind}.nemo", expected, layout)
    report = json.loads((today[0] / f"{kind}.json").read_text())
    assert report["contract"] == expected["contract"]
    # A temperature, or a correlation over four records, amplifies rounding errors.
    metrics = pytest.approx(
        as_numbers(expected["evaluation"]), rel=1e-4, abs=TOLERANCE, nan_ok=True
    )
    assert as_numbers({name: report["metrics"][name] for name in expected["evaluation"]}) == metrics
    lines = (today[0] / f"{kind}.jsonl").read_text().splitlines()
    rows = [json.loads(line)["rewards"] for line in lines]
    assert [list(row) for row in rows] == [list(row) for row in expected["evaluated_rewards"]]
    np.testing.assert_allclose(
        reward_rows(rows), reward_rows(expected["evaluated_rewards"]), rtol=0, atol=TOLERANCE
    )


def test_earlier_run_by_a_built_in_template_goes_on_by_the_text_that_it_had(tmp_path: Path) -> None:
    """The template of that name has learned to write tools since."""
    run = tmp_path / "run"
    shutil.copytree(FILES / "run", run)
    path = run / "checkpoints" / "step_00000004" / "run_state.json"
    state = json.loads(path.read_text())
    template = (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}"
    )
    earlier = replace(ScoringContract.from_dict(state["contract"]), template=template)
    state["contract"] = earlier.to_dict()
    state["fingerprint"]["scoring contract"] = earlier.hash
    path.write_text(json.dumps(state))
    lines = []
    for more in ((), ("model.data.template=plain",)):
        settings = [*arguments(run), "model.data.template=chatml", *more]
        done = tiny.run_verb("train --dry-run", *settings, folder=tmp_path, check=False)
        lines.append(f"{done.returncode}: {done.stdout}{done.stderr}")
    assert lines[0].startswith("0: ")
    assert f"scoring contract: {earlier.hash}" in lines[0]
    assert lines[1].startswith("1: ")
    assert "model.data.template: the checkpoint has" in lines[1]
