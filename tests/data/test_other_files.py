"""A file that is no JSON is told what it is, and how to convert it."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from nemo_aligner.data.sources import read_lines
from nemo_aligner.errors import DataError


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            'prompt,chosen\n"hi, you","two\nlines"\n',
            "a CSV file with the columns 'prompt',",
        ),
        (
            "a.jsonl",
            "prompt,chosen,rejected\nx,y,z\n",
            "'prompt', 'chosen', 'rejected', wanted JSON",
        ),
        ("a.txt", "prompt\tchosen\nx\ty, z\n", r"a TSV file .*read_csv\(.*sep='\\t'\)"),
        ("a.csv", "prompt;chosen\nx;y\n", r"a CSV file .*read_csv\(.*sep=';'\)"),
        ("a.CSV", "prompt\nhello\n", "a CSV file with the columns 'prompt'"),
    ],
)
def test_a_table_is_known_by_its_content(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_lines(path)
    assert str(caught.value).startswith(f"{path}: got ")


def test_a_packed_table_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"prompt,chosen\nx,y\n"))
    with pytest.raises(DataError, match=r"got a CSV file with the columns 'prompt', 'chosen'"):
        read_lines(path)


def test_the_conversion_writes_another_file(tmp_path: Path) -> None:
    for name, target in (("a.csv", "a.jsonl"), ("a.jsonl", "a.converted.jsonl")):
        path = tmp_path / name
        path.write_text("prompt,chosen\nx,y\n")
        line = (
            f"import pandas; pandas.read_csv({str(path)!r})"
            f'.to_json({str(tmp_path / target)!r}, orient="records", lines=True)'
        )
        with pytest.raises(DataError, match=re.escape(line) + "$"):
            read_lines(path)


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"PAR1", r"a Parquet file.*pandas.read_parquet\("),
        (b"PK\x03\x04", "a zip archive.*: unpack it"),
        (b"\x28\xb5\x2f\xfd", "a file compressed by zstd"),
    ],
)
def test_binary_files_are_known_by_their_first_bytes(
    tmp_path: Path, start: bytes, kind: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(start + b"\x00\xff" * 8)
    with pytest.raises(DataError, match=kind):
        read_lines(path)


@pytest.mark.parametrize("text", ["hello, you\nthis is text\n", "hello\nyou\n"])
def test_other_text_is_no_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"data.txt:1: malformed JSON.*no line of the file is a"):
        read_lines(path)
