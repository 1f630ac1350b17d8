"""Of several ranks one makes an index, the others wait, and an error is one error."""

from __future__ import annotations

import json
from pathlib import Path

from tests import tiny


def test_one_rank_makes_what_all_map_and_says_what_fails(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    good, bad = tiny.write_pairs(tmp_path / "a.jsonl", 40), tmp_path / "b.jsonl"
    bad.write_bytes(b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n\xff\n')
    place = tmp_path / "index"
    arguments = map(str, (tokenizer_folder, place, good, good, bad))
    done = tiny.run_script("tests/data/store/ranks.py", *arguments, processes=2, check=False)
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line[0] == "[")
    assert [made for made, *_ in first] == [1, 0]
    assert [made for made, *_ in second] == [0, 0]
    assert [rest for _, *rest in first] == [rest for _, *rest in second]
    digests, batches, tokens = zip(*(rest for _, *rest in first), strict=True)
    assert digests[0] == digests[1]
    assert batches[0] == batches[1]
    assert tokens[0] != tokens[1]
    assert done.returncode == 1
    assert done.stderr.count("not valid UTF-8") == 1
    assert "DataError" in done.stderr
    assert "b.jsonl:2: not valid UTF-8" in done.stderr
    assert [path.name.partition(".index-")[0] for path in place.iterdir()] == ["a.jsonl"]
