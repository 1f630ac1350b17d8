"""Every public format is read for what it says, and bad input is an error with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.data.malformed import MalformedRule
from nemo_aligner.data.reading import Reading, RecordFile, read_records
from nemo_aligner.data.records import Comparison
from nemo_aligner.errors import ConfigError, DataError

USER = {"role": "user", "content": "why"}
GOOD = {"role": "assistant", "content": "because"}
BAD = {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "be kind"}
HH = "\n\nHuman: why\n\nAssistant:"
PAIR = {"prompt": "why", "chosen": "because", "rejected": "no"}
RATED = {"prompt": "why", "response": "because", "help": 3, "depth": None}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(
    tmp_path: Path, *records: object, kind: RecordKind = RecordKind.comparison, **options: Any
) -> RecordFile:
    return read_records(write(tmp_path / "data.jsonl", *records), Reading(kind, **options))


@pytest.mark.parametrize(
    ("record", "fmt"),
    [
        (PAIR, "chat_pairs"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "chat_pairs"),
        ({"prompt": [USER], "chosen": "because", "rejected": [USER, BAD]}, "chat_pairs"),
        ({"prompt": "why", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "chat_pairs"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD], "score": 3}, "chat_pairs"),
        ({"chosen": f"{HH} because", "rejected": f"{HH} no"}, "hh"),
        ({"prompt": HH, "chosen": " because", "rejected": " no"}, "hh"),
        ({"prompt": HH, "chosen": f"{HH} because", "rejected": f"{HH} no"}, "hh"),
        ({**PAIR, "text": "why because"}, "chat_pairs"),
    ],
)  # fmt: skip
def test_a_pair_means_the_same_in_every_writing(
    tmp_path: Path, record: dict[str, Any], fmt: str
) -> None:
    file = read(tmp_path, record)
    assert file.format == fmt
    assert file.records[0].texts[0] == [USER, GOOD]
    assert file.records[0].texts[1] == [USER, BAD]
    assert file.counts == {"read": 1, "kept": 1}


def test_a_list_prompt_keeps_its_system_turn(tmp_path: Path) -> None:
    record = {"prompt": [SYSTEM, USER], "chosen": "because", "rejected": "no"}
    assert read(tmp_path, record).records[0].texts[0] == [SYSTEM, USER, GOOD]


def test_hh_turns_keep_their_order(tmp_path: Path) -> None:
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nmore\n\nAssistant: {}"
    [pair] = read(tmp_path, {"chosen": text.format("d"), "rejected": text.format("e")}).records
    assert [turn["role"] for turn in pair.texts[0]] == ["user", "assistant"] * 2
    assert [turn["content"] for turn in pair.texts[0]] == ["a", "b", "c\n\nmore", "d"]


def test_comparison_lines_are_raw_text(tmp_path: Path) -> None:
    file = read(tmp_path, {"text": "q a"}, {"text": "q b"}, {"text": "r c"}, {"text": "r d"})
    assert [pair.texts for pair in file.records] == [
        ("q a", "q b"),
        ("r c", "r d"),
    ]
    assert [pair.origin.line for pair in file.records] == [1, 3]


def test_rated_chat_labels_come_in_the_order_asked_for(tmp_path: Path) -> None:
    [rating] = read(tmp_path, RATED, kind=RecordKind.rating, attributes=["depth", "help"]).records
    assert rating.labels == (None, 3.0)
    assert rating.response == [USER, GOOD]


def test_rated_text_knows_null_and_the_mask_value(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": [1, -100, None]}, {"text": "b", "label": [-100, None, -100.0]}]
    file = read(
        tmp_path, *rows, kind=RecordKind.rating, attributes=["x", "y", "z"], loss_mask_val=-100.0
    )
    assert [rating.labels for rating in file.records] == [(1.0, None, None)]
    assert file.counts == {"read": 2, "no_label": 1, "kept": 1}


def test_drops_are_counted(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        {**PAIR, "rejected": "because"},
        {**PAIR, "rejected": " \n"},
        {"prompt": "x", "chosen": "", "rejected": ""},
        {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "how"}, BAD]},
        PAIR,
    )
    assert file.counts == {
        "read": 5, "identical": 1, "empty_reply": 2, "different_prompts": 1, "kept": 2,
    }  # fmt: skip
    assert [record.origin.line for record in file.records] == [4, 5]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz", "json.gz", "txt"])
def test_content_decides_how_a_file_is_read(tmp_path: Path, suffix: str) -> None:
    as_list = suffix.startswith("json") and not suffix.startswith("jsonl")
    text = json.dumps([PAIR, PAIR], indent=1) if as_list else f"{json.dumps(PAIR)}\r\n\n" * 2
    path = tmp_path / f"data.{suffix}"
    content = b"\xef\xbb\xbf" + text.encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    file = read_records(path, Reading(RecordKind.comparison))
    assert file.counts == {"read": 2, "kept": 2}
    assert [record.origin.line for record in file.records] == ([2, 7] if as_list else [1, 3])


def test_line_separators_inside_strings_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**PAIR, "chosen": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    [pair] = read_records(path, Reading(RecordKind.comparison)).records
    assert isinstance(pair, Comparison)
    assert pair.texts[0][-1]["content"] == "a\u2028b\x85c"  # type: ignore[index]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"'], r":1: malformed JSON"),
        (["[1, 2]"], r":1: got '1', wanted a JSON object"),
        (['[{"text": "a"},', "]"], r":2: malformed JSON"),
        (['[{"text": "a"}', '{"text": "b"}]'], r":2: malformed JSON"),
        (['[{"text": "a"}]', "x"], r":1: malformed JSON"),
        (['"a string"'], r":1: got .*, wanted a JSON object"),
        ([PAIR, "no JSON"], r":2: malformed JSON: Expecting value at character 1, near 'no JSON'"),
        ([PAIR, {"prompt": "why", "chosen": "x"}], r":2: got keys .*chat_pairs wants"),
        ([PAIR, {**PAIR, "chosen": 3}], r":2: chosen: got 3, wanted a string or a list"),
        ([PAIR, {**PAIR, "chosen": []}], r":2: chosen: got \[\]"),
        ([PAIR, {**PAIR, "prompt": None}], r":2: missing key 'prompt'"),
        ([PAIR, {**PAIR, "prompt": {"a": 1}}], r":2: prompt: got"),
        ([PAIR, {**PAIR, "chosen": [USER]}], r":2: chosen: .*got role 'user', wanted 'assistant'"),
        ([PAIR, {**PAIR, "chosen": [{"role": "assistant"}]}], r":2: chosen: message 2: got an obj"),
        ([PAIR, {**PAIR, "chosen": [{**GOOD, "content": None}]}], r"message 2, content: got None"),
        ([PAIR, {**PAIR, "chosen": [{**USER, "content": "x"}, GOOD]}], r":2: chosen: .*prompt"),
        ([PAIR, '{"prompt": "a", "chosen": "\\ud800", "rejected": "b"}'], r":2: chosen: .*surrog"),
        ([PAIR, {"text": "a"}, {"text": "b"}], r":2: mixed formats in one file.*comparison_text"),
        ([{"text": "a"}, {"text": "b"}, {"text": "c"}], r":3: .*odd number of .* lines \(3\)"),
        ([{"text": "a"}, {"text": 4}], r":1: text: got 4, wanted a string"),
        ([{"chosen": "a", "reject": "b"}], r":1: got a record with keys .*wanted one of these"),
        ([{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "b"}], r":1: rejected: got 'b'"),
        ([{"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}], r":1: chosen: .*'assistant'"),
        ([{**PAIR, "rejected": "because"}], r"no usable record in it: 1 read, 1 identical"),
        ([""], r"the file has no records"),
    ],
)  # fmt: skip
def test_bad_comparisons_are_errors_with_file_and_line(
    tmp_path: Path, lines: list[object], message: str
) -> None:
    path = tmp_path / "data.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    with pytest.raises(DataError, match=message) as caught:
        read_records(path, Reading(RecordKind.comparison))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"help": "3"}, r":2: help: got '3', wanted a number"),
        ({"help": True}, r":2: help: got True"),
        ({"help": 1e999}, r":2: malformed JSON: Infinity"),
        ({"help": 1e39}, r":2: help: got 1e\+39, wanted a number that 32 bits hold"),
        ({"help": 10**400}, r":2: help: got 1000.*, wanted a number that 32 bits hold"),
        ({"helpful": 3}, None),
    ],
)
def test_bad_labels_are_errors(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    row = {**RATED, **change}
    if message is None:
        del row["help"]
        message = r":2: missing key 'help', an attribute of .*this record has .*'helpful'"
    with pytest.raises(DataError, match=message):
        read(tmp_path, RATED, row, kind=RecordKind.rating, attributes=["help"])


def test_a_label_list_of_another_length_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r":1: label: got 2 numbers, wanted 1, one for each of x"):
        read(tmp_path, {"text": "a", "label": [1, 2]}, kind=RecordKind.rating, attributes=["x"])


def test_a_format_can_be_named(tmp_path: Path) -> None:
    assert read(tmp_path, PAIR, format="chat_pairs").format == "chat_pairs"
    with pytest.raises(
        DataError, match=r":1: mixed formats.*got a record of chat_pairs.*wanted hh"
    ):
        read(tmp_path, PAIR, format="hh")
    with pytest.raises(ConfigError, match=r"model.data.format: got 'rated_chat', wanted auto or"):
        read(tmp_path, PAIR, format="rated_chat")


def test_unreadable_files_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "missing.jsonl", Reading(RecordKind.comparison))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(PAIR).encode())[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "cut.gz", Reading(RecordKind.comparison))
    (tmp_path / "latin.jsonl").write_bytes(b"\n\n\xe9")
    with pytest.raises(DataError, match=r"latin.jsonl:3: not valid UTF-8"):
        read_records(tmp_path / "latin.jsonl", Reading(RecordKind.comparison))


LEFT_OUT = MalformedRule(Malformed.drop, most=0.5)


def test_malformed_records_are_left_out_where_the_rule_says_so(tmp_path: Path) -> None:
    ends_with_the_human = f"{HH} because\n\nHuman: oh"
    good = {"chosen": f"{HH} because", "rejected": f"{HH} no"}
    rows = [{"chosen": ends_with_the_human, "rejected": f"{HH} no"}, good, PAIR, good, good]
    file = read(tmp_path, *rows, rule=LEFT_OUT)
    assert (file.format, [record.origin.line for record in file.records]) == ("hh", [2, 4, 5])
    assert file.counts == {"read": 5, "malformed": 2, "kept": 3}
    first, second = map(str, file.malformed)
    assert "data.jsonl:1: chosen: the last message is the reply that is scored" in first
    assert "data.jsonl:3: mixed formats in one file" in second


def test_the_first_record_may_be_malformed(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = ["{", {"prompt": "why", "chosen": "a"}, PAIR, PAIR]
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    file = read_records(path, Reading(RecordKind.comparison, rule=LEFT_OUT))
    assert (file.format, file.counts["malformed"]) == ("chat_pairs", 2)


def test_ratings_are_left_out_by_the_same_rule(tmp_path: Path) -> None:
    rows = [RATED, {**RATED, "help": "3"}, {"prompt": "why", "response": "a"}, RATED]
    options: dict[str, Any] = {"kind": RecordKind.rating, "attributes": ["help"]}
    file = read(tmp_path, *rows, rule=LEFT_OUT, **options)
    assert file.counts == {"read": 4, "malformed": 2, "kept": 2}
    with pytest.raises(DataError) as caught:
        read(tmp_path, *rows, rule=MalformedRule(Malformed.drop, most=0.4), **options)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("data.jsonl: 2 of its 4 records (50.00%) are malformed")
    assert "data.jsonl:2: help: got '3'" in lines[1]
    assert lines[3].startswith("model.data.max_malformed=0.4 allows 40.00% of a file")


def test_an_error_lists_ten_and_counts_the_others(tmp_path: Path) -> None:
    rows = [PAIR] * 2000 + [{**PAIR, "chosen": n} for n in range(16)]
    with pytest.raises(DataError) as caught:
        read(tmp_path, *rows)
    lines = str(caught.value).splitlines()
    assert len(lines) == 13
    assert lines[0].endswith("data.jsonl: 16 of its 2016 records (0.79%) are malformed")
    assert "data.jsonl:2001: chosen: got 0, wanted a string" in lines[1]
    assert lines[11:] == ["  and 6 more", "model.data.malformed=drop would leave them out"]


def raw_text(*lines: str) -> str:
    """Lines of raw text; those that begin with ``{`` as they are."""
    return "".join(
        (line if line.startswith("{") else json.dumps({"text": line})) + "\n" for line in lines
    )


def test_a_bad_line_takes_the_other_line_of_its_record_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(raw_text("a+", '{"text": "a-', "b+", "b-", "c+", '{"text": 3}', "d+", "d-"))
    rule = MalformedRule(Malformed.drop, most=1.0)
    file = read_records(path, Reading(RecordKind.comparison, rule=rule))
    assert [pair.texts for pair in file.records] == [("b+", "b-"), ("d+", "d-")]
    assert file.counts == {"read": 4, "malformed": 2, "kept": 2}
    assert [record.origin.line for record in file.malformed] == [2, 5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a+", '{"text": ', '{a-"}', "b+", "b-", "c+"], r":2: .*one line in several"),
        (["a+", '{"text": "a-"} {"text": "b+"}', "b-", "c+"], r":2: .*several lines in one"),
        (["a+", '{"text": "a-"]', "b+"], r":3: .*odd number of .* \(3\); line 2: malformed JSON"),
    ],
)
def test_lines_that_may_have_shifted_all_pairs_are_an_error_by_any_rule(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(raw_text(*lines))
    rule = MalformedRule(Malformed.drop, most=1.0)
    with pytest.raises(DataError, match=message):
        read_records(path, Reading(RecordKind.comparison, rule=rule))


def test_a_record_of_another_kind_is_told_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b", "help": 3}) + "\n")
    with pytest.raises(DataError, match=r"It fits rated_chat, for model.reward_model_type=regr"):
        read_records(path, Reading(kind=RecordKind.comparison))


@pytest.mark.parametrize("key", ["question", "instruction"])
def test_a_prompt_in_a_field_of_another_name_is_not_left_out(tmp_path: Path, key: str) -> None:
    record = {key: "why", "chosen": "because", "rejected": "no"}
    with pytest.raises(DataError, match=f"If '{key}' is the prompt, set prompt_key={key}"):
        read(tmp_path, record)
    [pair] = read(tmp_path, {**record, key: None}).records
    assert pair.texts == ("because", "no")


def test_a_reply_that_is_another_conversation_is_malformed(tmp_path: Path) -> None:
    record = {"prompt": HH, "chosen": f"{HH} because", "rejected": "\n\nHuman: what"}
    with pytest.raises(DataError, match=r"rejected: .* that does not begin with the prompt"):
        read(tmp_path, record)


def test_items_of_a_list_on_one_line_have_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([PAIR, {**PAIR, "chosen": "a"}, {"prompt": 1}]))
    rule = MalformedRule(Malformed.drop, 0.5)
    file = read_records(path, Reading(RecordKind.comparison, rule=rule))
    assert [record.origin.line for record in file.records] == [1, 2]
    assert [bad.origin.line for bad in file.malformed] == [3]


def test_json_lines_that_are_all_bad_are_no_table(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": NaN}\n' * 3)
    with pytest.raises(DataError, match=r"pairs.jsonl:1: malformed JSON: NaN is not JSON"):
        read_records(path, Reading(RecordKind.comparison))


def test_a_label_column_with_a_typo_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ratings.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b", "correctness": 3}) + "\n")
    with pytest.raises(DataError, match=r"'corectness', .*; did you mean 'correctness'\? this"):
        read_records(path, Reading(kind=RecordKind.rating, attributes=["corectness"]))
