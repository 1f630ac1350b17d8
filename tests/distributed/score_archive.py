"""``score_archive.py ARCHIVE PAIRS``: the rewards of the chosen replies, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(archive: str, pairs: str) -> None:
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.scoring.scorer import load_scorer

    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    conversations = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["chosen"]},
        ]
        for row in rows
    ]
    with launch():
        rewards = load_scorer(archive, initialize_layout()).score(conversations)
    print(json.dumps(rewards[:, 0].tolist()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
