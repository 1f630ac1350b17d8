"""Tables are read with line or row numbers, and errors say what other files are."""

from __future__ import annotations

import gzip
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.files import AnyLine, BadLine, Line, read_lines
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.tables import NamedColumns
from nemo_aligner.utils.errors import DataError
from tests.contract.refusals import assert_refused
from tests.data.files import build, pair_with_call
from tests.harness.contracts import Contracts

HEAD = "prompt,chosen,rejected\n"


def lines_of(path: Path, text: str) -> list[AnyLine]:
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return read_lines(path)


def test_table_of_texts_is_known_by_its_content(tmp_path: Path) -> None:
    for name, separator in (
        ("a.csv", ","), ("a.jsonl", ","), ("a.txt", "\t"), ("a.csv", ";"), ("a.csv.gz", ","),
    ):  # fmt: skip
        text = "prompt,chosen,rejected\nx,y,z\n".replace(",", separator)
        [line] = lines_of(tmp_path / name, text)
        assert isinstance(line, Line)
        assert (line.number, line.value) == (2, {"prompt": "x", "chosen": "y", "rejected": "z"})
        assert json.loads(line.raw) == line.value


def test_table_cells_may_have_lines_and_separators(tmp_path: Path) -> None:
    text = '\ufeffprompt,chosen\r\n"hi, you","two\nlines"\r\n\r\nwhy,"say ""so"""\r\nlast,\r\n'
    found = lines_of(tmp_path / "a.csv", text)
    assert [line.number for line in found] == [2, 5, 6]
    assert [line.value for line in found if isinstance(line, Line)] == [
        {"prompt": "hi, you", "chosen": "two\nlines"},
        {"prompt": "why", "chosen": 'say "so"'},
        {"prompt": "last", "chosen": ""},
    ]
    [long] = lines_of(tmp_path / "a.csv", f"prompt,chosen\nx,{'y' * 200_000}\n")
    assert isinstance(long, Line)
    assert len(long.value["chosen"]) == 200_000


def test_table_columns_of_numbers_are_labels_and_texts_stay_texts(tmp_path: Path) -> None:
    """In a column of mostly numbers, only the record of a cell that is not one is malformed."""
    path = tmp_path / "ratings.csv"
    path.write_text("prompt,response,help,depth,id\n2+2?,4,3,,a1\n3+3?,6,-1.5e0,2,7\n")
    how = ReaderConfig(RecordKind.rating, attributes=["help", "depth"])
    file = read_records(path, how)
    assert file.format == "rated_chat"
    assert [rating.labels for rating in file.records] == [(3.0, None), (-1.5, 2.0)]
    assert [rating.texts[0][-1]["content"] for rating in file.records] == ["4", "6"]
    ids = [line.value["id"] for line in read_lines(path) if isinstance(line, Line)]
    assert ids == ["a1", "7"]
    texts = ["response1", "response_2", "response_A", "prediction 1", "source", "id", "context"]
    texts += ["human_ref_A", "system", "system_prompt", "principle"]
    names = [*texts, "help", "response_11x", "identity"]
    [line] = lines_of(path, f"{','.join(names)}\n{','.join('7' for _ in names)}\n")
    assert isinstance(line, Line)
    assert {name for name, value in line.value.items() if value == "7"} == set(texts)
    assert repr(line.value["help"]) == "7", "a whole number stays one"
    path.write_text("prompt,response,help,note\np,a,3,1\np,b,N/A,x\np,c,,\np,d,4,2\np,e,1,y\n")
    with pytest.raises(DataError, match=r"^.*: 1 of its 5 records.*\n.*:3: help: got 'N/A', want"):
        read_records(path, ReaderConfig(RecordKind.rating, attributes=["help"]))
    notes = [line.value["note"] for line in read_lines(path) if isinstance(line, Line)]
    assert notes == ["1", "x", "", "2", "y"], "half of them are no numbers"


def test_table_columns_of_true_and_false_are_bools(tmp_path: Path) -> None:
    """As pandas writes them; a text of this content stays one."""
    path = tmp_path / "unpaired.csv"
    path.write_text("prompt,completion,label,note\np,True,True,true\np,False,false,no\np,a,,\n")
    file = read_records(path, ReaderConfig(RecordKind.rating, attributes=["good"]))
    assert (file.format, file.counts["no_label"]) == ("unpaired", 1)
    assert [rating.labels for rating in file.records] == [(1.0,), (0.0,)]
    assert [rating.texts[0][-1]["content"] for rating in file.records] == ["True", "False"]
    named = NamedColumns(texts=["label"], labels=["id"])
    text = "label,id,completion,note\nTRUE,true,True,1\nFalse,,False,true\n"
    path.write_text(text)
    rows = [line.value for line in read_lines(path, named) if isinstance(line, Line)]
    assert [row["label"] for row in rows] == ["TRUE", "False"]
    assert [row["id"] for row in rows] == [True, None]
    assert [row["note"] for row in rows] == ["1", "true"], "it is neither all numbers nor all bools"


def test_table_columns_that_settings_name_are_texts_or_labels(tmp_path: Path) -> None:
    """A reply may be a number, and a label may have the name of a text."""
    path = tmp_path / "pairs.csv"
    path.write_text("problem,good,bad,source\n2+2?,4,5.0,1\n3+3?,6,7,2\n")
    keys = PairKeys("problem", "good", "bad")
    how = ReaderConfig(RecordKind.comparison, pair_keys=keys, pair_columns=["source"])
    file = read_records(path, how, with_lines=True)
    replies = [[text[-1]["content"] for text in pair.texts] for pair in file.records]
    assert replies == [["4", "5.0"], ["6", "7"]]
    assert [pair.labels for pair in file.records] == [(1.0,), (2.0,)]
    # ``data split`` writes these lines, and the same settings read them again.
    assert file.lines[0].raw == '{"problem": "2+2?", "good": "4", "bad": "5.0", "source": 1}'
    path.write_text(
        "instruction,input,response1,response2,annotator1,annotator2,annotator3\n2+2?,,4,5,1,1,2\n"
    )
    [pair] = read_records(path, ReaderConfig(RecordKind.comparison)).records
    assert (pair.texts[0][-1]["content"], pair.ranks) == ("4", (0, 1))


def test_table_with_the_index_of_pandas_is_read_without_it(tmp_path: Path) -> None:
    rows = '0,p1,c1,r1\n12,p2,"1,p3,c3,r3\n",r2\n'
    first, second = lines_of(tmp_path / "a.csv", f",{HEAD}{rows}")
    assert isinstance(first, Line)
    assert isinstance(second, Line)
    assert first.value == {"prompt": "p1", "chosen": "c1", "rejected": "r1"}
    assert (first.holds_rows, second.holds_rows) == (False, True)
    # Cells that are no row numbers may be data.
    with pytest.raises(DataError, match=r"a.csv:1: the columns \['', 'prompt', .* Rename them"):
        lines_of(tmp_path / "a.csv", f",{HEAD}0,p1,c1,r1\nx,p2,c2,r2\n")


def test_table_that_is_malformed_is_refused(tmp_path: Path) -> None:
    good, bad = lines_of(tmp_path / "a.csv", "prompt,chosen,rejected\nx,y,z\nx,y\n")
    assert isinstance(good, Line)
    assert bad == BadLine(3, "", "got 2 cells, wanted 3, one for each column")

    def take(text: str) -> None:
        (tmp_path / "a.csv").write_text(text)
        read_records(tmp_path / "a.csv", ReaderConfig(RecordKind.comparison))

    own_names = r"a.csv:1: the columns .* different names"
    cases = [
        ("prompt,chosen,rejected\nx,y,z\nx,y\n", r"a.csv:3: got 2 cells, wanted 3"),
        ("prompt,prompt\nx,y\n", own_names),
        ("prompt,\nx,y\n", own_names),
        ("question,answer\nx,y\n", r"a.csv:2: got a record with keys 'question', 'answer'; w"),
        ("prompt,chosen,rejected\n", "a.csv: the file has no records"),
    ]
    assert_refused(take, cases, DataError)
    for text in ("hello, you\nthis is text\n", "hello\nyou\n"):
        with pytest.raises(DataError, match=r"a.txt:1: malformed JSON"):
            lines_of(tmp_path / "a.txt", text)


CONVERSATION = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
OTHER = [CONVERSATION[0], {"role": "assistant", "content": "no"}]
ROWS = [
    {"chosen": CONVERSATION, "rejected": OTHER, "label_margin": 2.0},
    {"chosen": CONVERSATION, "rejected": OTHER, "label_margin": None},
    {"chosen": CONVERSATION, "rejected": OTHER, "label_margin": float("nan")},
]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(table, path)
    elif path.name.startswith("data-"):
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        from pyarrow import feather

        feather.write_feather(table, path)


def test_table_of_parquet_or_arrow_has_messages_and_nulls(tmp_path: Path) -> None:
    # The last one has the name and form of a file that ``save_to_disk`` of ``datasets`` writes.
    for name in ("a.parquet", "a.arrow", "data-00000-of-00001.arrow"):
        write_table(tmp_path / name, ROWS)
        how = ReaderConfig(RecordKind.comparison, pair_columns=["label_margin"])
        file = read_records(tmp_path / name, how)
        assert (file.format, file.counts) == ("chat_pairs", {"read": 3, "kept": 3})
        assert [pair.labels for pair in file.records] == [(2.0,), (None,), (None,)]
        assert file.records[0].texts == (CONVERSATION, OTHER)
        [first, *_] = read_lines(tmp_path / name)
        assert json.loads(first.raw) == ROWS[0]
    # Structs of a table have every key in every row, null if the row did not have it.
    rows = [pair_with_call(city="Bonn"), pair_with_call(query="cats")]
    rows[0]["documents"] = [{"text": "Rain.", "page": 3}, {"text": "Sun.", "title": "Sky"}]
    write_table(tmp_path / "a.parquet", rows)
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    of_table, of_lines = (
        read_records(path, ReaderConfig(RecordKind.comparison)).records
        for path in (tmp_path / "a.parquet", lines)
    )
    assert [pair.texts for pair in of_table] == [pair.texts for pair in of_lines]
    write_table(tmp_path / "a.parquet", [*ROWS, {**ROWS[0], "rejected": None}])
    with pytest.raises(DataError, match=r"a.parquet:4: rejected: got None, wanted"):
        read_records(tmp_path / "a.parquet", ReaderConfig(RecordKind.comparison))


def test_table_with_a_date_that_python_cannot_hold_is_an_error(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    days = pyarrow.array([10**8], pyarrow.date32())
    parquet.write_table(pyarrow.table({"prompt": ["p"], "day": days}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: got a Parquet file that cannot be read: date"):
        read_lines(tmp_path / "a.parquet")


def read_binary(folder: Path, start: bytes) -> None:
    path = folder / "data.jsonl"
    path.write_bytes(start + b"\x00\xff" * 8)
    read_lines(path)


def test_binary_files_are_known_by_their_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    kinds = [
        (b"PK\x03\x04", "a zip archive.* Unpack it"),
        (b"\x28\xb5\x2f\xfd", "a file compressed by zstd"),
        (b"PAR1", "got a Parquet file that cannot be read: "),
        (b"ARROW1", "got an Arrow file that cannot be read: "),
        (b"\xff\xff\xff\xff", "got an Arrow file that cannot be read: "),
    ]
    assert_refused(partial(read_binary, tmp_path), kinds, DataError)
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    kinds = [
        (b"PAR1", r"got a Parquet file, .*\[tables\]'.*data.converted.jsonl"),
        (b"ARROW1", r"got an Arrow file, .*pandas.read_feather\(.*data.converted.jsonl"),
        (b"\xff\xff\xff\xff", r"got an Arrow file, .*Dataset.from_file\(.*data.converted.jsonl"),
    ]
    assert_refused(partial(read_binary, tmp_path), kinds, DataError)


def test_table_with_a_stray_quote_loses_that_row_alone(tmp_path: Path) -> None:
    """Only the row with the unpaired quote is malformed, and not the rows after it."""
    stray = "got an unpaired quote in a cell"
    cases = [
        ('p1,"oops,r1\np2,c2,r2\np3,"c3",r3\np4,c4,r4\n', [2], [3, 4, 5]),
        ('p1,c1,r1\np2,"c2,r2\np3,c3,r3\n', [3], [2, 4]),
        ('p1,"c1" said,r1\np2,c2,r2\n', [2], [3]),
        ('p1,c1,r1\n"two\nlines",c2,r2\np3,"c3,r3\n\np4,c4,r4\n', [5], [2, 3, 7]),
    ]
    for text, bad, good in cases:
        found = lines_of(tmp_path / "a.csv", HEAD + text)
        assert [line.number for line in found if isinstance(line, Line)] == good, text
        wrong = [line for line in found if isinstance(line, BadLine)]
        assert [line.number for line in wrong] == bad, text
        assert all(line.reason.startswith(stray) for line in wrong)
    # The first readable row shows that it is a table; the file name does not matter.
    assert len(lines_of(tmp_path / "a.txt", HEAD + cases[0][0])) == 4
    with pytest.raises(DataError, match=r"a.csv:1: malformed JSON"):
        lines_of(tmp_path / "a.csv", '"prompt" x,chosen\np1,c1\n')


def test_table_with_tabs_has_quotes_as_letters(tmp_path: Path) -> None:
    texts = ['"Hello" he said', '"', 'a "b', '"c"', '""', 'x""y']
    text = "prompt\tchosen\n" + "".join(f"p\t{each}\n" for each in texts)
    found = lines_of(tmp_path / "a.tsv", text)
    assert [line.value["chosen"] for line in found if isinstance(line, Line)] == texts
    [bad] = lines_of(tmp_path / "a.tsv", 'prompt\tchosen\np\t"say ""so"""\n')
    assert isinstance(bad, BadLine)
    assert "doubled quotes" in bad.reason
    # In a CSV file this is a quoted cell.
    [good] = lines_of(tmp_path / "a.csv", 'prompt,chosen\np,"say ""so"""\n')
    assert isinstance(good, Line)


def test_table_with_cells_that_look_like_rows_says_so(tmp_path: Path, contracts: Contracts) -> None:
    """Two unpaired quotes may look like a pair and swallow the rows between them."""
    path = tmp_path / "a.csv"
    joined = '"p1,c1,r1\np2",c2,r2\n'
    path.write_text(f'{HEAD}{joined}p3,"two\nlines",r3\np4,"a, b\nc",r4\np5,c5,"x,y,z"\n')
    marked = [isinstance(line, Line) and line.holds_rows for line in read_lines(path)]
    assert marked == [True, False, False, False]
    counts = {"read": 4, "kept": 4, "rows_in_cells": 1}
    assert read_records(path, ReaderConfig(RecordKind.comparison)).counts == counts
    data = build(contracts, [path]).train
    assert data.counts == counts
    assert "  cells with rows in them   1; is a quote missing?" in data.table()
    path.write_text(f"{HEAD}p1,c1,r1\n")
    whole = build(contracts, [path]).train
    assert "rows_in_cells" not in whole.counts
    assert "cells with rows" not in whole.table()


def test_table_with_a_cell_that_has_json_on_a_line_is_a_table(
    tmp_path: Path, contracts: Contracts
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'{HEAD}p1,"an empty one:\n{{}}\n",r1\np2,c2,r2\n')
    file = read_records(path, ReaderConfig(RecordKind.comparison))
    assert file.counts == {"read": 2, "kept": 2}
    assert build(contracts, [path]).train.counts == file.counts
    # A file is JSON lines if its first line, or half of its lines, are objects.
    for text, good in (("a,b\n{}\n", 1), ("a,b\nc,d\n{}\n{}\n", 2), ("{}\na,b\nc,d\n", 1)):
        found = lines_of(tmp_path / "a.jsonl", text)
        assert sum(isinstance(line, Line) for line in found) == good, text
        assert [line.number for line in found][:2] == [1, 2]
    # A file that is not a table has a few records, and its other lines are malformed.
    found = lines_of(tmp_path / "a.jsonl", "x\ny\nz\n{}\n")
    assert [isinstance(line, Line) for line in found] == [False, False, False, True]
    assert lines_of(tmp_path / "a.jsonl", '{"a"\nx,y\nz,a\n{"b": 1}\n')[3] == Line(
        4, '{"b": 1}', {"b": 1}
    )


def test_record_of_a_numbered_source_has_it(tmp_path: Path) -> None:
    def source(text: str, name: str) -> str:
        (tmp_path / name).write_text(text)
        [record] = read_records(tmp_path / name, ReaderConfig(RecordKind.comparison)).records
        return record.source

    assert source("prompt,chosen,rejected,subset\np,a,b,3\n", "a.csv") == "3"
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"source": 3}, "3"), ({"source": 3.0}, "3"), ({"kind": 0.5}, "0.5"), ({"kind": 0}, "0"),
        ({"source": None, "subset": "x"}, "x"), ({"source": [1], "kind": "y"}, "y"),
        ({"source": True}, ""), ({"source": False}, ""), ({"source": "", "kind": 1}, "1"),
    ]  # fmt: skip
    for fields, name in wanted:
        assert source(json.dumps({**pair, **fields}), "a.jsonl") == name, fields
    helpsteer3 = {"context": CONVERSATION[:1], "response1": "a", "response2": "b"}
    of_domain = {**helpsteer3, "overall_preference": 1, "domain": 7, "source": "x"}
    assert source(json.dumps(of_domain), "a.jsonl") == "7"


def test_object_with_a_key_twice_is_malformed(tmp_path: Path) -> None:
    """In JSON lines and in a list, also in nested objects; the other records are read."""
    good = '{"a": 1}'
    bad = ['{"a": 1, "b": 2, "a": 1}', '{"b": [{"c": 1, "c": 2}]}']
    for text in ("\n".join([good, *bad, good]), f"[{good},\n{bad[0]},\n{bad[1]},\n{good}]"):
        found = lines_of(tmp_path / "a.jsonl", text)
        assert [isinstance(line, Line) for line in found] == [True, False, False, True]
        wrong = [line for line in found if isinstance(line, BadLine)]
        for line, raw, key, number in zip(wrong, bad, "ac", (2, 3), strict=True):
            assert (line.number, line.raw) == (number, raw)
            wanted = f"malformed JSON: got the key {key!r} twice in one object, wanted it once"
            assert line.reason == wanted
