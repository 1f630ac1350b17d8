"""Of several ranks one makes an index, the others wait, and an error is one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

SCRIPT = "tests/data/store/ranks.py"


def start(*arguments: Path | str, check: bool = True) -> Any:
    return tiny.run_script(SCRIPT, *map(str, arguments), processes=2, check=check)


@pytest.mark.slow(seconds=15)
def test_one_rank_makes_what_all_map(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tiny.write_pairs(tmp_path / "a.jsonl", 40)
    first, second = (
        json.loads(start(path, tokenizer_folder, tmp_path / "index").stdout.splitlines()[-1])
        for _ in range(2)
    )
    assert [made for made, *_ in first] == [1, 0]
    assert [made for made, *_ in second] == [0, 0]
    assert [rest for _, *rest in first] == [rest for _, *rest in second]
    digests, batches, tokens = zip(*(rest for _, *rest in first), strict=True)
    assert digests[0] == digests[1]
    assert batches[0] == batches[1]
    assert tokens[0] != tokens[1]


@pytest.mark.slow(seconds=8)
def test_what_fails_on_the_rank_that_makes_it_is_said_once(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n\xff\n')
    failed = start(tmp_path / "a.jsonl", tokenizer_folder, tmp_path / "index", check=False)
    assert failed.returncode == 1
    assert failed.stderr.count("not valid UTF-8") == 1
    assert "DataError" in failed.stderr
    assert "a.jsonl:2: not valid UTF-8" in failed.stderr
    assert list((tmp_path / "index").iterdir()) == []
