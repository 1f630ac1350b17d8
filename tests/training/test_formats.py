"""Every format of pairs is trained on, with ties and several completions, at TP=2."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats import FORMATS
from tests import tiny

OF_PAIRS = [known for known in FORMATS.values() if known.kind is RecordKind.comparison]


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_one_run_learns_from_files_of_all_formats_and_another_by_named_fields(
    tmp_path: Path,
) -> None:
    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    files = [write(tmp_path / f"{known.name}.jsonl", *known.sample) for known in OF_PAIRS]
    common = [
        f"pretrained_checkpoint.restore_from_path={base}",
        f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
        "model.tensor_model_parallel_size=2",
        "model.data.allow_prompt_overlap=true",
        "model.data.seq_length=512",
        "model.micro_batch_tokens=2048",
        "model.global_batch_size=4",
        "trainer.rm.max_steps=3",
        "trainer.rm.max_epochs=2",
    ]
    done = tiny.run_script(
        "examples/train_reward_model.py",
        *common,
        f"model.data.data_prefix.train=[{','.join(files)}]",
        f"model.data.data_prefix.validation=[{files[-1]}]",
        processes=2,
    )
    for known, path in zip(OF_PAIRS, files, strict=True):
        assert f"{path} ({known.name})" in done.stdout
    with (tmp_path / "run/csv/metrics.csv").open(newline="") as lines:
        losses = [float(row["train/loss"]) for row in csv.DictReader(lines) if row["train/loss"]]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))

    named = write(tmp_path / "named.jsonl", {"question": "why", "good": "a cat", "bad": "no"})
    done = tiny.run_script(
        "examples/evaluate_reward_model.py",
        f"rm_model_file={tmp_path / 'run/checkpoints/megatron_gpt.nemo'}",
        f"data.path={named}",
        "data.prompt_key=question",
        "data.chosen_key=good",
        "data.rejected_key=bad",
    )
    assert "1 read, 1 kept" in done.stdout
