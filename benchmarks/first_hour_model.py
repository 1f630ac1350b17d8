"""Worker of gpu_first_hour.py: the model and the pairs that its comparisons take, in ``work``.

    python benchmarks/first_hour_model.py JOB OUTPUT

``hf`` and ``base.nemo`` are the same weights: of the GGUF, ``.nemo`` or Hugging Face folder of the
job, or random at its shape. ``pairs.jsonl`` is the job's data, or pairs of random words whose
lengths are spread as those of chats.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from common import prepare_model
from serving_model import WORDS, export, write_reward_model, write_tiny

PROMPT, REPLY = (10, 200), (10, 300)  # words


def main() -> None:
    job, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    work = Path(job["work"])
    source = None if job["model"] is None else Path(job["model"])
    hf = prepare(source, work, job["shape"])
    pairs = work / "pairs.jsonl"
    if job["data"] is not None:
        shutil.copy(job["data"], pairs)
    else:
        write_pairs(pairs, job["pairs"])
    size = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    rows = [
        {"what": "model", "found": str(source or "random weights")},
        {"what": "shape", "found": _shape_of(hf)},
        {"what": "its weights", "found": f"{size / 2**30:.3g} GiB"},
        {"what": "pairs", "found": str(job["data"] or f"{job['pairs']} of random words")},
    ]
    output.write_text(json.dumps(rows))


def prepare(source: Path | None, work: Path, shape: dict[str, Any]) -> Path:
    """``work / "hf"`` and ``work / "base.nemo"``; the former is returned."""
    hf, nemo = work / "hf", work / "base.nemo"
    if source is not None and source.suffix == ".nemo":
        nemo.symlink_to(source.resolve())
        write_reward_model(nemo, work / "reward.nemo")
        return export(work / "reward.nemo", hf)
    if source is None:
        source = write_tiny(hf, **shape)
    found, _ = prepare_model(source, work)
    if found != hf:
        hf.symlink_to(found.resolve())
    return hf


def write_pairs(path: Path, count: int) -> None:
    """Pairs that share their prompt; a reply is as likely short as long."""
    rng = random.Random(0)
    words = WORDS.split()

    def text(least: int, most: int) -> str:
        length = round(least * (most / least) ** rng.random())
        return " ".join(rng.choices(words, k=length))

    with path.open("w") as lines:
        for index in range(count):
            pair = {
                "prompt": f"{text(*PROMPT)} {index}",
                "chosen": text(*REPLY),
                "rejected": text(*REPLY),
            }
            lines.write(json.dumps(pair) + "\n")


def _shape_of(hf: Path) -> str:
    config = json.loads((hf / "config.json").read_text())
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    return ", ".join(f"{key} {config.get(key)}" for key in keys)


if __name__ == "__main__":
    main()
