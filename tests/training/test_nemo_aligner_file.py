"""A run by NeMo-Aligner's own file: all its keys, and the test set that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.config.nemo_aligner_files import write_file
from tests.training import jobs


def test_file_of_nemo_aligner_trains_and_measures_its_test_set(tmp_path: Path) -> None:
    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    train, validation, other, test = (
        tiny.write_pairs(tmp_path / f"{name}.jsonl", count, seed)
        for seed, (name, count) in enumerate({"a": 24, "b": 8, "c": 8, "d": 9}.items())
    )
    prefix = (
        f"train: [{train}], validation: [{validation}], validation_c: [{other}], test: [{test}]"
    )
    command = [
        "--config",
        str(write_file(tmp_path, "training_rm.yaml")),
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix={{{prefix}}}",
        f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
        "model.encoder_seq_length=64",
        "model.global_batch_size=8",
        "trainer.precision=32",
        "model.data.allow_prompt_overlap=true",
    ]
    model = tmp_path / "run/checkpoints/megatron_gpt.nemo"
    evaluated = [f"rm_model_file={model}", f"data.path={test}", f"output={tmp_path / 'found.json'}"]
    refused, done, _ = jobs.run(
        [
            jobs.Job("train", command, fails=True),
            jobs.Job("train", [*command, "model.optim.sched.constant_steps=0"]),
            jobs.Job("evaluate", evaluated),
        ]
    )
    assert "model.optim.sched.constant_steps: got 1000, wanted at most 0" in refused.stderr
    assert "trainer.devices, trainer.num_nodes: ignored: the launcher says" in done.stdout
    assert "best checkpoint by: validation-b/loss" in done.stdout
    assert "held out: test-d" in done.stdout

    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    (tested,) = [row for row in rows if "test-d/accuracy" in row]
    assert tested["step"] == rows[-1]["step"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["metrics"]["loss"] == pytest.approx(tested["test-d/loss"], rel=1e-6)
