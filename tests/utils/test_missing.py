"""Messages about files that are not there."""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.utils.missing import describe_missing, describe_unreadable


def test_missing_files_and_folders_are_named_with_the_likely_file(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.touch()
    assert describe_missing(train) is None
    near = f"trian.jsonl: there is no such file; did you mean {train}?"
    assert str(describe_missing(tmp_path / "trian.jsonl")).endswith(near)
    assert str(describe_missing(tmp_path / "other")).endswith("other: there is no such file")
    away = str(describe_missing(tmp_path / "data" / "train.jsonl"))
    assert away.endswith(f"there is no folder {tmp_path / 'data'} either")
    assert describe_missing(tmp_path) == f"{tmp_path}: is a folder; name its files (train.jsonl)"
    assert describe_unreadable(train, OSError("broken")) == f"{train}: cannot be read: broken"
