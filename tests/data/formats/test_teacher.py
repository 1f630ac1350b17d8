"""A teacher's opinion on replies: ``teacher_rewards`` and ``chosen_probability``, in any format."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import reply_of
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.inspect import Inspection, inspect_files
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.records import Comparison
from nemo_aligner.data.split import Split, split_file
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.files import build, read, rows_of, write
from tests.harness import tiny
from tests.harness.contracts import Contracts

PAIR = {"prompt": "why", "chosen": "because", "rejected": "no"}
OF_PAIRS = [known for known in FORMATS.values() if known.kind is RecordKind.comparison]


def read_one(folder: Path, *rows: dict[str, Any], **options: Any) -> Comparison:
    (record,) = read(folder, *rows, **options).records
    assert isinstance(record, Comparison)
    return record


@pytest.mark.parametrize("known", OF_PAIRS, ids=lambda known: known.name)
def test_rewards_of_every_format_stay_with_their_replies(known: Any, tmp_path: Path) -> None:
    """The samples of a record are sorted by rank, and a swapped record keeps its rewards, too."""
    first, *others = known.sample
    count = len(read_one(tmp_path, *known.sample).texts)
    rewards = [0.5 - number for number in range(count)]
    soft = {**first, "teacher_rewards": rewards, "teacher": [{"name": "t"}], "teacher_spread": 1}
    file = read(tmp_path, soft, *others)
    (record,) = file.records
    assert file.format == known.name
    assert not {"teacher", "teacher_spread", "teacher_rewards"} & {*file.unread}
    assert record.teacher_rewards == tuple(rewards[place] for place in record.positions_in_record)
    assert record.teacher == '[{"name": "t"}]'
    swapped = record.swapped()
    of_texts = dict(zip(map(repr, record.texts), record.teacher_rewards, strict=True))
    for text, reward in zip(swapped.texts, swapped.teacher_rewards, strict=True):
        assert of_texts[repr(text)] == reward


def test_teacher_of_a_table_may_have_a_date(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {**PAIR, "teacher_rewards": [1.0, 0.0], "teacher": {"day": date(2026, 5, 4)}}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "soft.parquet")
    (record,) = read_records(tmp_path / "soft.parquet", ReaderConfig()).records
    assert isinstance(record, Comparison)
    assert record.teacher == '{"day": "2026-05-04"}'


def test_rewards_are_in_the_order_of_the_record(tmp_path: Path) -> None:
    ranked = tiny.ranked("why", (2, "no"), (0, "because"), (1, "so"))
    helpsteer = {"prompt": "why", "response_1": "no", "response_2": "so", "preference_strength": 2}
    pku = {"prompt": "why", "response_0": "no", "response_1": "so", "better_response_id": 1}
    for row, rewards in ((ranked, [1, 2, 3]), (helpsteer, [1, 2]), (pku, [1, 2]), (PAIR, [2, 1])):
        record = read_one(tmp_path, {**row, "teacher_rewards": rewards})
        found = dict(zip(map(reply_of, record.texts), record.teacher_rewards, strict=True))
        expected = {"no": 1, "because": 2, "so": 3 if row is ranked else 2}
        assert found == {reply: expected[reply] for reply in found}


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.25, 0.5, 0.7, 1.0])
def test_probability_is_that_of_the_difference_of_rewards(p: float, tmp_path: Path) -> None:
    better, worse = read_one(tmp_path, {**PAIR, "chosen_probability": p}).teacher_rewards
    assert math.isfinite(better)
    assert 1 / (1 + math.exp(min(700, worse - better))) == pytest.approx(p, rel=1e-12, abs=1e-300)
    missing = {**PAIR, "chosen_probability": None, "teacher_rewards": None}
    assert read_one(tmp_path, missing).teacher_rewards == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen_probability": 1.5}, "chosen_probability: got 1.5, wanted a number from 0 to 1"),
        ({"chosen_probability": True}, "chosen_probability: got True, wanted a number"),
        ({"chosen_probability": "0.5"}, "chosen_probability: got '0.5', wanted a number"),
        ({"teacher_rewards": 1}, "teacher_rewards: got 1, wanted a list of 2 numbers, one for"),
        ({"teacher_rewards": [1, 2, 3]}, "wanted a list of 2 numbers"),
        ({"teacher_rewards": [1, None]}, r"teacher_rewards\[1\]: got null, wanted a number"),
        ({"teacher_rewards": [1, "2"]}, r"teacher_rewards\[1\]: got '2', wanted a number"),
        ({"teacher_rewards": [1e39, 2]}, r"teacher_rewards\[0\]: .* fits float32"),
        (
            {"teacher_rewards": [1, 2], "chosen_probability": 0.5},
            "got both 'teacher_rewards' and 'chosen_probability'. Remove one",
        ),
    ],
)
def test_wrong_opinion_names_file_line_and_field(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"data.jsonl:2: {message}|data.jsonl:2: .*{message}"):
        read(tmp_path, PAIR, {**PAIR, **fields})


def test_probability_needs_a_pair_with_an_order(tmp_path: Path) -> None:
    half = {"chosen_probability": 0.5}
    ranked = tiny.ranked("why", (0, "a"), (1, "b"), (2, "c"))
    tied = tiny.ranked("why", (0, "a"), (0, "b"))
    for row, found in ((ranked, "3 replies"), (tied, "a tie")):
        with pytest.raises(DataError, match=f":1: chosen_probability: got a record of {found}"):
            read(tmp_path, {**row, **half})
    several = {"pairs": [["2+2?", "4", "5"], ["3+3?", "6", "7"]], "teacher_rewards": [1, 2]}
    with pytest.raises(DataError, match=":1: teacher_rewards: not supported by this format"):
        read(tmp_path, several, format="tests.data.ranked_format:SEVERAL")


def test_inspect_shows_how_soft_and_split_keeps_the_fields(tmp_path: Path) -> None:
    rows = [
        {**PAIR, "prompt": f"why {n}", "chosen_probability": p}
        for n, p in enumerate((0.05, 0.3, 0.55, 0.9, 0.95, 1.0, None, None))
    ]
    path = write(tmp_path / "soft.jsonl", *rows)
    table, record = [part.text for part in inspect_files([str(path)], [], Inspection(show=1))]
    words = " ".join(table.split())
    assert "soft labels 6 records, 6 pairs; mean |p - 0.5| 0.342, 33.3% with p below 0.5" in words
    parts = "from 0 to 0.2 16.7%, to 0.4 16.7%, to 0.6 16.7%, to 0.8 0.0%, to 1 50.0%"
    assert f"p of the better reply {parts}" in words
    assert "chosen, teacher's reward -2.94444" in record
    split_file(path, tmp_path / "parts", Split(heldout=0.25, reading=ReaderConfig()))
    sides = [rows_of(tmp_path / "parts" / f"{side}.jsonl") for side in ("train", "heldout")]
    assert sorted(map(repr, sides[0] + sides[1])) == sorted(map(repr, rows))


def test_digest_covers_soft_labels_and_other_objectives_reject_them(
    tmp_path: Path, contracts: Contracts
) -> None:
    def made(rewards: list[float] | None, **how: Any) -> Any:
        more = {} if rewards is None else {"teacher_rewards": rewards}
        return build(contracts, [write(tmp_path / "d.jsonl", {**PAIR, **more}, PAIR)], **how)

    hard, soft, other = made(None).train, made([1, 2]).train, made([1, 3]).train
    assert hard.records.teacher_rewards is None
    assert repr(soft.records.teacher_rewards) == "tensor([1., 2., nan, nan])"
    assert len({data.digest for data in (hard, soft, other)}) == 3
    assert [data.counts.get("duplicates", 0) for data in (hard, soft)] == [1, 0]
    for objective in ("davidson", "rao_kupper"):
        with pytest.raises(ConfigError, match=r"does not learn soft labels, but .*d.jsonl"):
            made([1, 2], objective=objective)
    for objective in ("bradley_terry", "plackett_luce", "head_ensemble"):
        assert made([1, 2], objective=objective).objective.learns_soft_labels
