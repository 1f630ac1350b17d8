"""One rule says whether malformed records end a run."""

from __future__ import annotations

import pytest

from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.data.malformed import MalformedRule, check_malformed, list_first
from nemo_aligner.data.reading import RecordFile
from nemo_aligner.data.records import MalformedRecord, Origin
from nemo_aligner.data.split import Split
from nemo_aligner.errors import ConfigError, DataError


def file_of(malformed: int, read: int, path: str = "a.jsonl", reason: str = "bad") -> RecordFile:
    records = [MalformedRecord(Origin(path, line), reason) for line in range(1, malformed + 1)]
    return RecordFile(path, RecordKind.comparison, "hh", [], (), {"read": read}, records)


def test_the_allowed_fraction_is_of_each_file_and_is_allowed_itself() -> None:
    rule = MalformedRule(Malformed.drop, most=0.01)
    check_malformed([file_of(1, 100), file_of(0, 0)], rule)
    with pytest.raises(DataError) as caught:
        check_malformed([file_of(1, 1000), file_of(1, 99, "b.jsonl")], rule)
    assert str(caught.value).splitlines() == [
        "b.jsonl: 1 of its 99 records (1.01%) are malformed",
        "  b.jsonl:1: bad",
        "model.data.max_malformed=0.01 allows 1.00% of a file; mend the data, or raise it",
    ]


def test_a_file_that_is_read_twice_is_named_once() -> None:
    with pytest.raises(DataError) as caught:
        check_malformed([file_of(1, 1000), file_of(1, 1000)], MalformedRule())
    assert str(caught.value).count("a.jsonl:1: bad") == 1


def test_a_long_reason_is_cut() -> None:
    (line,) = list_first(file_of(1, 1, reason="x" * 9999).malformed, 3)
    assert len(line) < 400


def test_a_fraction_is_one() -> None:
    with pytest.raises(ConfigError, match=r"^max_malformed: got 1.5, wanted a number from 0 to 1"):
        Split(max_malformed=1.5)
