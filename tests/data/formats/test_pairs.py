"""Formats of pairs, and errors about malformed records with file and line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.data.clean import MalformedRule, check_malformed, list_first
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.records import MalformedRecord, Origin
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.data.files import read, write

USER = {"role": "user", "content": "why"}
GOOD = {"role": "assistant", "content": "because"}
BAD = {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "be kind"}
HH = "\n\nHuman: why\n\nAssistant:"
PAIR = {"prompt": "why", "chosen": "because", "rejected": "no"}
RATED = {"prompt": "why", "response": "because", "help": 3, "depth": None}
LEFT_OUT = MalformedRule(Malformed.drop, max_fraction=0.5)


def test_pair_means_the_same_in_every_writing(tmp_path: Path) -> None:
    pairs: list[tuple[dict[str, Any], str]] = [
        (PAIR, "chat_pairs"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "chat_pairs"),
        ({"prompt": [USER], "chosen": "because", "rejected": [USER, BAD]}, "chat_pairs"),
        ({"prompt": "why", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "chat_pairs"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD], "score": 3}, "chat_pairs"),
        ({"chosen": f"{HH} because", "rejected": f"{HH} no"}, "hh"),
        ({"prompt": HH, "chosen": " because", "rejected": " no"}, "hh"),
        ({"prompt": HH, "chosen": f"{HH} because", "rejected": f"{HH} no"}, "hh"),
        ({**PAIR, "text": "why because"}, "chat_pairs"),
        # allenai/llama-3.1-tulu-3-8b-preference-mixture, Skywork-Reward-Preference-80K-v0.2,
        # HuggingFaceH4/ultrafeedback_binarized, and argilla's cleaned one.
        ({"id": "a-1", **PAIR, "source": "wildchat"}, "chat_pairs"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD], "source": "magpie"}, "chat_pairs"),
        ({**PAIR, "messages": [USER, GOOD], "score_chosen": 8, "score_rejected": 4}, "chat_pairs"),
        ({**PAIR, "source": "flan", "chosen-rating": 5, "rejected-rating": 1}, "chat_pairs"),
    ]
    kept = [SYSTEM, USER]
    pairs += [
        ({"prompt": kept, "chosen": "because", "rejected": "no"}, "chat_pairs"),
        ({"chosen": [*kept, GOOD], "rejected": [*kept, BAD]}, "chat_pairs"),
    ]
    for record, fmt in pairs:
        file = read(tmp_path, record)
        [pair] = file.records
        assert (file.format, file.counts) == (fmt, {"read": 1, "kept": 1}), record
        prompt = kept if SYSTEM in (*record.get("prompt", ()), *record["chosen"]) else [USER]
        assert pair.texts == ([*prompt, GOOD], [*prompt, BAD]), record
        assert pair.ranks == (0, 1), record
        assert pair.source == record.get("source", ""), record


def test_pair_of_texts_with_an_implicit_prompt_stays_raw(tmp_path: Path) -> None:
    record = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    file = read(tmp_path, record)
    assert file.format == "text_pairs"
    assert file.records[0].texts == ("The sky is blue.", "The sky is green.")
    with pytest.raises(DataError, match=r":2: rejected: got \[.*wanted a string"):
        read(tmp_path, record, {**record, "rejected": [BAD]})
    # If another field may be the prompt, the file is not read as text_pairs.
    names = ["question", "problem", "post", "Prompt", "history", "conversation", "user", "input"]
    names += ["system", "system_prompt", "userQuery", "Math Problem", "dialogue", "context 1"]
    names += ["problem_statement", "questionBody"]
    for key in names:
        with pytest.raises(
            DataError, match=rf"--prompt-key {key} \(data inspect.* data\.prompt_key={key} "
        ):
            read(tmp_path, {key: "why", **record})
        assert read(tmp_path, {key: None, **record}).format == "text_pairs"
        assert read(tmp_path, {key: "why", **record}, format="text_pairs").counts["kept"] == 1
    with pytest.raises(DataError, match=r"'system', 'user', 'chosen', .*set --prompt-key user "):
        read(tmp_path, {"system": "be kind", "user": "why", **record})
    for key in ("prompt_id", "system_fingerprint", "topic", "inputs_sha256", "posted", "user_rank"):
        assert read(tmp_path, {key: "why", **record}).format == "text_pairs", key
    others: list[tuple[list[dict[str, Any]], str]] = [
        # Messages may be the prompt whatever the name, but not if they end with a reply.
        ([{"talk": [USER, GOOD]}], ":1: .*set --prompt-key talk"),
        ([{"talk": [USER], "turns": [USER]}], ":1: .*set --prompt-key talk"),
        ([{"question": "why", "talk": [USER]}], ":1: .*set --prompt-key question"),
        (
            [{"question": {"id": 1, "full_text": "why"}}],
            ":1: .*If 'question' holds .* 'prompt'; wh",
        ),
        # A later record, or an earlier one, has the prompt.
        ([{"talk": []}, {"talk": [USER]}], ":2: .*set --prompt-key talk"),
        ([{"question": "why"}, {"question": None}], ":1: .*set --prompt-key question"),
    ]
    assert_refused(
        lambda rows: read(tmp_path, *({**row, **record} for row in rows)), others, DataError
    )
    assert read(tmp_path, {"replies": [GOOD, BAD], **record}).format == "text_pairs"


def test_object_with_text_among_other_fields_is_no_line_of_a_pair(tmp_path: Path) -> None:
    """Otherwise lines of messages, corpora and ratings would be compared with their neighbours."""
    others: list[dict[str, Any]] = [
        {"message_id": "1", "parent_id": None, "role": "prompter", "lang": "en"},
        {"url": "a.org", "timestamp": "2026"},
        {"score": 0.5},
    ]
    for other in others:
        rows = [{"text": text, **other} for text in ("a", "b")]
        with pytest.raises(DataError, match=r":1: .*--format comparison_text .*model.data.format="):
            read(tmp_path, *rows)
        assert read(tmp_path, *rows, format="comparison_text").counts["kept"] == 1
    # Such lines may have a source, and the labels that the objective reads.
    rows = [{"text": text, "source": "s", "label_margin": 1, "sure": 2} for text in ("a", "b")]
    [pair] = read(tmp_path, *rows, pair_columns=("sure",)).records
    assert (pair.texts, pair.source, pair.labels) == (("a", "b"), "s", (2.0,))


def test_hh_turns_keep_their_order(tmp_path: Path) -> None:
    text = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nmore\n\nAssistant: {}"
    [pair] = read(tmp_path, {"chosen": text.format("d"), "rejected": text.format("e")}).records
    assert [turn["role"] for turn in pair.texts[0]] == ["user", "assistant"] * 2
    assert [turn["content"] for turn in pair.texts[0]] == ["a", "b", "c\n\nmore", "d"]


def test_rated_labels_come_in_the_order_asked_for_with_null_and_the_mask_value(
    tmp_path: Path,
) -> None:
    [rating] = read(tmp_path, RATED, kind=RecordKind.rating, attributes=["depth", "help"]).records
    assert rating.labels == (None, 3.0)
    assert rating.response == [USER, GOOD]
    rows = [{"text": "a", "label": [1, -100, None]}, {"text": "b", "label": [-100, None, -100.0]}]
    how = {"attributes": ["x", "y", "z"], "loss_mask_val": -100.0}
    file = read(tmp_path, *rows, kind=RecordKind.rating, **how)
    assert [rating.labels for rating in file.records] == [(1.0, None, None)]
    assert file.counts == {"read": 2, "no_label": 1, "kept": 1}


def test_dropped_records_are_counted(tmp_path: Path) -> None:
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
    unseen = [
        "\u200b",
        "\ufeff",
        "\0",
        "\xa0",
        "\u2060\u200d",
        "\u3164",
        "\u2800",
        "\ufe0f",
        "\u034f",
    ]
    file = read(tmp_path, *({**PAIR, "rejected": f" {text}\n"} for text in unseen), PAIR)
    assert file.counts == {"read": len(unseen) + 1, "empty_reply": len(unseen), "kept": 1}
    seen = ["a\u200b", "\ufeff0", "\u2764\ufe0f", "\u202e-", "\u4f60", "\U0001f468\u200d", "\ue000"]
    file = read(tmp_path, *({**PAIR, "rejected": text} for text in seen))
    assert file.counts == {"read": len(seen), "kept": len(seen)}
    steps = {"prompt": "why", "completions": ["a", "\u200b"], "labels": [1, 0]}
    with pytest.raises(
        DataError, match=r":1: completions\[1\]: got '\\u200b', wanted a string that is"
    ):
        read(tmp_path, steps, kind=RecordKind.rating)


def test_file_is_read_by_its_content(tmp_path: Path) -> None:
    """JSON lines have line numbers, and items of a list on one line have item numbers."""
    for suffix in ("jsonl", "json", "jsonl.gz", "json.gz", "txt"):
        as_list = suffix.startswith("json") and not suffix.startswith("jsonl")
        text = json.dumps([PAIR, PAIR], indent=1) if as_list else f"{json.dumps(PAIR)}\r\n\n" * 2
        path = tmp_path / f"data.{suffix}"
        content = b"\xef\xbb\xbf" + text.encode()
        path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
        file = read_records(path, ReaderConfig(RecordKind.comparison))
        assert file.counts == {"read": 2, "kept": 2}
        lines = [record.origin.line for record in file.records]
        assert lines == ([2, 7] if as_list else [1, 3]), suffix
    path.write_text(json.dumps([PAIR, {**PAIR, "chosen": "a"}, {"prompt": 1}]))
    file = read_records(path, ReaderConfig(RecordKind.comparison, rule=LEFT_OUT))
    assert [record.origin.line for record in file.records] == [1, 2]
    assert [bad.origin.line for bad in file.malformed] == [3]
    path.write_text(json.dumps({**PAIR, "chosen": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    [pair] = read_records(path, ReaderConfig(RecordKind.comparison)).records
    assert pair.texts[0][-1]["content"] == "a\u2028b\x85c"  # type: ignore[union-attr,index]


def test_bad_comparisons_are_errors_with_file_and_line(tmp_path: Path) -> None:
    cases: list[tuple[list[object], str]] = [
        (['{"prompt": "a"'], r":1: malformed JSON"),
        (["[1, 2]"], r":1: got '1', wanted a JSON object"),
        (['[{"text": "a"},', "]"], r":2: malformed JSON"),
        (['[{"text": "a"}', '{"text": "b"}]'], r":2: malformed JSON"),
        (['[{"text": "a"}]', "x"], r":1: malformed JSON"),
        (['"a string"'], r":1: got .*, wanted a JSON object"),
        ([PAIR, "no JSON"], r":2: malformed JSON: Expecting value at character 1, near 'no JSON'"),
        ([PAIR, f'{{"a": {"[" * 101}{"]" * 101}}}'], r":2: got lists or objects nested more th"),
        ([PAIR, {"prompt": "why", "chosen": "x"}], r":2: got keys .*chat_pairs wants"),
        ([PAIR, {**PAIR, "chosen": 3}], r":2: chosen: got 3, wanted a string or a list"),
        ([PAIR, {**PAIR, "chosen": []}], r":2: chosen: got \[\]"),
        ([PAIR, {**PAIR, "prompt": None}], r":2: missing key 'prompt'"),
        ([PAIR, {**PAIR, "prompt": []}], r":2: prompt: got an empty list, and chosen begins with"),
        ([PAIR, {**PAIR, "prompt": {"a": 1}}], r":2: prompt: got"),
        (
            [{"question": "why", "chosen": [GOOD], "rejected": [BAD]}],
            r":1: missing key 'prompt': chosen begins with the reply. If 'question' is .*key q",
        ),
        ([PAIR, {**PAIR, "chosen": [USER]}], r":2: chosen: .*got role 'user', wanted 'assistant'"),
        ([PAIR, {**PAIR, "chosen": [{"role": "assistant"}]}], r":2: chosen: messages\[0\]: got an"),
        ([PAIR, {**PAIR, "chosen": [{**GOOD, "content": None}]}], r"messages\[0\].content: got n"),
        ([PAIR, {**PAIR, "prompt": [{"role": "human", "content": "a"}]}], r":2: prompt: messages"),
        ([PAIR, {"prompt": "a", "choosen": "b", "rejected": "c"}], r"'chosen' for 'choosen'"),
        ([PAIR, {**PAIR, "chosen": [{**USER, "content": "x"}, GOOD]}], r":2: chosen: .*prompt"),
        ([PAIR, '{"prompt": "a", "chosen": "\\ud800", "rejected": "b"}'], r":2: chosen: .*surrog"),
        ([PAIR, {"text": "a"}, {"text": "b"}], r":2: mixed formats in one file.*comparison_text"),
        ([{"text": "a"}, {"text": "b"}, {"text": "c"}], r":3: .*odd number of .* lines \(3\)"),
        ([{"text": "a"}, {"text": 4}], r":1: text: got 4, wanted a string"),
        ([{"prompt": HH, "chosen": f"{HH} a", "rejected": "\n\nHuman: b"}], r"rejected: .*begin"),
        (['{"prompt": "a", "chosen": NaN}'] * 3, r":1: malformed JSON: NaN is not JSON"),
        ([{"prompt": "a", "response": "b", "help": 3}], r"rated_chat: .*attributes=\[\.\.\.\]$"),
        (
            [{"prompt": "a", "completions": ["b"], "labels": [True]}],
            r"stepwise: .*model\.regression\.attributes=.*step_ends, and model.objective=binary_",
        ),
        ([{"chosen": "a", "reject": "b"}], r":1: .*'rejected' for 'reject'.*text_pairs"),
        # Both replies are near 'response_0' and 'response_1' of one format.
        (
            [{"prompt": "a", "response_a": "b", "response_b": "c", "preference": 1}],
            r"; wanted .*likewise chosen_key and rejected_key for its replies",
        ),
        ([{"a": 1}], r":1: got a record with keys 'a'; wanted .*chat_pairs.*ultrafeedback"),
        ([{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "b"}], r":1: rejected: got 'b'"),
        ([{"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}], r":1: chosen: .*'assistant'"),
        ([{**PAIR, "rejected": "because"}], r"no usable record: 1 read, 1 identical"),
        ([""], r"the file has no records"),
    ]  # fmt: skip
    where = re.escape(str(tmp_path / "data.jsonl"))
    named = [(lines, f"(?s)^(?=.*{where}).*{message}") for lines, message in cases]
    assert_refused(lambda lines: read(tmp_path, *lines), named, DataError)


def test_bad_labels_are_errors_with_file_and_line(tmp_path: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"help": "3"}, r":2: help: got '3', wanted a number"),
        ({"help": True}, r":2: help: got True"),
        ({"help": 1e999}, r":2: malformed JSON: Infinity"),
        ({"help": 1e39}, r":2: help: got 1e\+39, wanted a number that fits float32"),
        ({"help": 10**400}, r":2: help: got 1000.*, wanted a number that fits float32"),
    ]
    rated: dict[str, Any] = {"kind": RecordKind.rating, "attributes": ["help"]}
    cases = [((RATED, {**RATED, **change}), message) for change, message in changes]
    named = {"prompt": "why", "response": "because", "helpful": 3}
    cases += [
        ((RATED, named), r":2: missing key 'help', an attribute of .*this record has .*'helpful'"),
        (({"text": "a", "label": [1, 2]},), r":1: label: got 2 numbers, wanted 1, .*of help"),
    ]
    assert_refused(lambda rows: read(tmp_path, *rows, **rated), cases, DataError)
    with pytest.raises(DataError, match=r"'helpfull', .*did you mean 'helpful'\?"):
        read(tmp_path, named, kind=RecordKind.rating, attributes=["helpfull"])


def test_format_can_be_named(tmp_path: Path) -> None:
    assert read(tmp_path, PAIR, format="chat_pairs").format == "chat_pairs"
    with pytest.raises(DataError, match=r":1: .*got a record of chat_pairs.*wanted hh"):
        read(tmp_path, PAIR, format="hh")
    with pytest.raises(ConfigError, match=r"model.data.format: got 'rated_chat', wanted auto, "):
        read(tmp_path, PAIR, format="rated_chat")


def test_column_that_a_format_needs_may_be_a_label(tmp_path: Path) -> None:
    """Without it, a line of this file would be one of ``comparison_text``."""
    path = write(tmp_path / "rated.jsonl", {"text": "a", "label": 2}, {"text": "b", "label": 3})
    file = read_records(path, ReaderConfig(attributes=["label"]))
    assert file.format == "rated_text"
    assert [rating.labels for rating in file.records] == [(2.0,), (3.0,)]


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.jsonl: there is no such file"):
        read_records(tmp_path / "missing.jsonl", ReaderConfig(RecordKind.comparison))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(PAIR).encode())[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "cut.gz", ReaderConfig(RecordKind.comparison))
    for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        said = name.upper().replace("-LE", "LE").replace("-BE", "BE")
        for text in (json.dumps(PAIR), "prompt,chosen,rejected\na,b,c\n", "\n[\n]"):
            (tmp_path / "wide.jsonl").write_bytes(text.encode(name))
            with pytest.raises(DataError, match=f"got text in {said}, .* `iconv -f {said} -t UTF"):
                read_records(tmp_path / "wide.jsonl", ReaderConfig(RecordKind.comparison))
    for count in (2, 3):
        (tmp_path / "mac.jsonl").write_bytes(b"\r".join([json.dumps(PAIR).encode()] * count))
        problem = r"mac.jsonl:1: .* end with a carriage return .*`tr '"
        with pytest.raises(DataError, match=problem):
            read_records(tmp_path / "mac.jsonl", ReaderConfig(RecordKind.comparison))
    # Items of a list and rows of a table need no line feed between them, and are read.
    for text in (f"[{json.dumps(PAIR)},\r{json.dumps(PAIR)}\r]", f"{','.join(PAIR)}\ra,b,c\rd,e,f"):
        (tmp_path / "mac.jsonl").write_text(text, newline="")
        file = read_records(tmp_path / "mac.jsonl", ReaderConfig(RecordKind.comparison))
        assert file.counts == {"read": 2, "kept": 2}
    (tmp_path / "latin.jsonl").write_bytes(b"\n\n\xe9")
    with pytest.raises(DataError, match=r"latin.jsonl:3: not valid UTF-8"):
        read_records(tmp_path / "latin.jsonl", ReaderConfig(RecordKind.comparison))


def test_malformed_records_are_left_out_by_the_rule(tmp_path: Path) -> None:
    ends_with_the_human = f"{HH} because\n\nHuman: oh"
    good = {"chosen": f"{HH} because", "rejected": f"{HH} no"}
    rows = [{"chosen": ends_with_the_human, "rejected": f"{HH} no"}, good, PAIR, good, good]
    file = read(tmp_path, *rows, rule=LEFT_OUT)
    assert (file.format, [record.origin.line for record in file.records]) == ("hh", [2, 4, 5])
    assert file.counts == {"read": 5, "malformed": 2, "kept": 3}
    first, second = map(str, file.malformed)
    assert "data.jsonl:1: chosen: the last message is the reply that is scored" in first
    assert "data.jsonl:3: mixed formats in one file" in second


def test_malformed_first_records_and_ratings_are_left_out_too(tmp_path: Path) -> None:
    file = read(tmp_path, "{", {"prompt": "why", "chosen": "a"}, PAIR, PAIR, rule=LEFT_OUT)
    assert (file.format, file.counts["malformed"]) == ("chat_pairs", 2)
    ratings = [RATED, {**RATED, "help": "3"}, {"prompt": "why", "response": "a"}, RATED]
    file = read(tmp_path, *ratings, rule=LEFT_OUT, kind=RecordKind.rating, attributes=["help"])
    assert file.counts == {"read": 4, "malformed": 2, "kept": 2}


ANY = MalformedRule(Malformed.drop, max_fraction=1.0)


def raw_texts(*lines: str) -> list[object]:
    """Write lines of raw text; those that begin with ``{`` are written unchanged."""
    return [line if line.startswith("{") else {"text": line} for line in lines]


def test_malformed_comparison_line_takes_its_other_line_with_it(tmp_path: Path) -> None:
    lines = raw_texts("a+", '{"text": "a-', "b+", "b-", "c+", '{"text": 3}', "d+", "d-")
    file = read(tmp_path, *lines, rule=ANY)
    assert [pair.texts for pair in file.records] == [("b+", "b-"), ("d+", "d-")]
    assert file.counts == {"read": 4, "malformed": 2, "kept": 2}
    assert [record.origin.line for record in file.malformed] == [2, 5]


def test_malformed_lines_that_may_have_shifted_all_pairs_are_an_error_by_any_rule(
    tmp_path: Path,
) -> None:
    cases = [
        (("a+", '{"text": ', '{a-"}', "b+", "b-", "c+"), r":2: .*, or one broken"),
        (("a+", '{"text": "a-"} {"text": "b+"}', "b-", "c+"), r":2: .* Several lines .* joined"),
        (("a+", '{"text": "a-"]', "b+"), r":3: .*odd number of .* \(3\); line 2: malformed JSON"),
    ]

    def take(lines: tuple[str, ...]) -> None:
        read(tmp_path, *raw_texts(*lines), rule=ANY)

    assert_refused(take, cases, DataError)


def file_of(malformed: int, read: int, path: str = "a.jsonl", reason: str = "bad") -> RecordFile:
    records = [MalformedRecord(Origin(path, line), reason) for line in range(1, malformed + 1)]
    return RecordFile(path, RecordKind.comparison, "hh", [], (), {"read": read}, records)


def test_malformed_rule_allows_a_fraction_of_each_file() -> None:
    rule = MalformedRule(Malformed.drop, max_fraction=0.01)
    check_malformed([file_of(1, 100), file_of(0, 0)], rule)
    with pytest.raises(DataError) as caught:
        check_malformed([file_of(1, 1000), file_of(1, 99, "b.jsonl")], rule)
    assert str(caught.value).splitlines() == [
        "b.jsonl: 1 of its 99 records (1.01%) are malformed",
        "  b.jsonl:1: bad",
        "model.data.max_malformed=0.01 allows 1.00% of a file. Fix the data, or raise the limit",
    ]
    # A file that occurs twice is listed once, and a long reason is shortened.
    with pytest.raises(DataError) as caught:
        check_malformed([file_of(1, 1000), file_of(1, 1000)], MalformedRule())
    assert str(caught.value).count("a.jsonl:1: bad") == 1
    (line,) = list_first(file_of(1, 1, reason="x" * 9999).malformed, 3)
    assert len(line) < 400
    with pytest.raises(ConfigError, match=r"^max_malformed: got 1.5, wanted"):
        MalformedRule(max_fraction=1.5, section="")
