"""``torchrun python_api_on_two_ranks.py FOLDER SETTINGS``: training by the Python API."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nemo_aligner as na
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import is_first_rank

QUESTION = {"role": "user", "content": "what is the river"}
TEXTS: list[Any] = [[QUESTION, {"role": "assistant", "content": "thank you"}], "a raw text"]


def main(folder: Path, settings: dict[str, Any]) -> None:
    read = [json.loads(line) for line in (folder / "pairs.jsonl").open()]
    heldout = [json.loads(line) for line in (folder / "heldout.jsonl").open()]
    told: list[na.TrainingProgress] = []
    model = na.train(
        folder / "base.nemo",
        read,
        validation=heldout,
        output=folder / "two_ranks",
        callback=told.append,
        **settings,
    )
    found = {
        "rewards": model.score(TEXTS).tolist(),
        "accuracy": model.evaluate(heldout).accuracy,
        "records": len((folder / "two_ranks/data/train/records.jsonl").open().readlines()),
    }
    try:
        model.export(folder / "hf_of_two")
    except ConfigError as error:
        found["export"] = str(error)
    # The callback is called only on rank 0.
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")
    assert bool(told) == is_first_rank()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
