"""Pairs that the example makes of rated replies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nemo_aligner.data.reading import Reading, read_records
from tests import tiny

SCRIPT = tiny.ROOT / "examples/data/pairs_from_ratings.py"
RATINGS = (5, 1, None, 3, 3)


def test_the_better_rated_reply_is_the_chosen_one(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"prompt\u2028{number}", "response": f"{rating}", "helpfulness": rating}
        for number, rating in enumerate(RATINGS)
    ]
    source, output = tmp_path / "ratings.jsonl", tmp_path / "pairs.jsonl"
    source.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    command = [sys.executable, str(SCRIPT), str(source), "--attribute=helpfulness"]
    done = subprocess.run(
        [*command, f"--output={output}", "--each=3"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{output}: 10 pairs by helpfulness\n"
    records = read_records(output, Reading()).records
    # Three others have another rating than 5 or 1, two another than 3.
    assert len(records) == 3 + 3 + 2 + 2
    for record in records:
        chosen, rejected = (int(text[-1]["content"]) for text in record.texts)
        assert chosen > rejected
