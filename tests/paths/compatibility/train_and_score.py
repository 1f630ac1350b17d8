"""Train, then score texts with the resulting archive; run in each environment.

    python train_and_score.py ARCHIVE TEXTS OUTPUT SETTING...

TEXTS is JSON. OUTPUT gets the rewards and the version of megatron-core.

"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from nemo_aligner.cli.main import main
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import initialize_layout
from nemo_aligner.serving.engine.scorer import load_scorer


def score(archive: str, texts: list[str]) -> list[list[float]]:
    with launch():
        scorer = load_scorer(archive, initialize_layout(), micro_batch_tokens=4096)
        return score_all(scorer, texts).tolist()


if __name__ == "__main__":
    archive, texts, output, *settings = sys.argv[1:]
    if main(["train", *settings]) != 0:
        sys.exit("it did not train")
    result = {"rewards": score(archive, json.loads(texts)), "megatron": version("megatron-core")}
    Path(output).write_text(json.dumps(result))
