"""Folders of training runs as a report reads them, written without training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.run_folder import CONFIG_NAME, FACTS_NAME, HELDOUT_NAME, METRICS_NAME
from tests.data.files import write

EVIL = "</style></pre><script>alert(1)</script><img src=http://example.com/x onerror=alert(2)>"
# Sections of the page of ``write_run``, in order; robustness was not checked.
SECTIONS = (
    "overview", "summary", "curves", "accuracy", "rewards", "calibration", "length", "mistakes",
    "data", "contract", "settings", "throughput",
)  # fmt: skip


def pair_rows(count: int, seed: int = 0, words: int = 8) -> list[dict[str, Any]]:
    """Build rows of ``output_rewards``; the first is the worst mistake, and contains HTML."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        prompt = [{"role": "user", "content": f"question {number} {EVIL if number == 0 else ''}"}]
        texts = {side: "word " * rng.randint(1, words) for side in ("chosen", "rejected")}
        replies = {
            side: [*prompt, {"role": "assistant", "content": text}] for side, text in texts.items()
        }
        chosen, rejected = rng.gauss(0.8, 1), rng.gauss(0, 1)
        if number == 0:
            chosen, rejected = -7.0, 7.0
            replies["rejected"][-1]["content"] = EVIL
        rows.append(
            {
                "record": f"held<b>out.jsonl:{number + 1}",
                "rewards": {"chosen": chosen, "rejected": rejected},
                "source": f"source {number % 3} & <i>$x^2$</i> {EVIL if number % 3 == 0 else ''}",
                "texts": replies,
            }
        )
    return rows


def write_run(folder: Path, steps: int = 40, seed: int = 0, words: int = 8) -> Path:
    """Write the folder of a run with a validation at every tenth step."""
    (folder / HELDOUT_NAME).mkdir(parents=True)
    rows = pair_rows(60, seed, words)
    write(folder / HELDOUT_NAME / "validation-held.jsonl", *rows)
    (folder / CONFIG_NAME).write_text(
        f"model:\n  seed: {seed}\n  name: '{EVIL}'\n"
        "pretrained_checkpoint:\n  restore_from_path: models/base.nemo\n"
    )
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        train = {"loss": 0.7 - step / 100, "accuracy": 0.6, "lr": 1e-4, "tokens_per_second": 900.0}
        lines.append({"step": step, **{f"train/{k}": v for k, v in train.items()}})
        if step % 10 == 0:
            metrics = {"loss": 0.69 - step / 200, "accuracy": 0.5 + step / 200, "ece": None}
            lines.append({"step": step, **{f"validation-held/{k}": v for k, v in metrics.items()}})
    write(folder / METRICS_NAME, *lines)
    (folder / FACTS_NAME).write_text(json.dumps(_build_facts()))
    return folder


def _build_facts() -> dict[str, Any]:
    file = {"name": "train", "path": f"{EVIL}.jsonl", "format": "chat_pairs"}
    return {
        "ranks": 2,
        "described": ["model: 0.2M parameters"],
        "data": [{**file, "rows": [["records", "60"], ["kept", "60"]], "malformed": [EVIL]}],
        "validation_records": {"validation-held": 600},
        "contract_hash": "abc123",
        "contract": {"template": EVIL, "seq_length": 64, "hash": "abc123"},
        "versions": {"nemo_aligner": "1.0"},
        "peak_memory": {"host": 2_000_000_000},
    }
