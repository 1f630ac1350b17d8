"""Columns next to a prompt: history and system prompts are read, others are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Conversation, messages_of, principle_of
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.inspect import Inspection, inspect_files
from nemo_aligner.data.records import prompt_hash, verdict_keys
from nemo_aligner.utils.errors import DataError
from tests.contract.refusals import assert_refused
from tests.data.files import build, read, write
from tests.harness import tiny
from tests.harness.contracts import Contracts


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


WHY = turn("user", "why")
SYSTEM = turn("system", "You are brief.")
HISTORY = [turn("user", "hi"), turn("assistant", "hello")]
REPLIES = {"chosen": "because", "rejected": "no"}
PAIR = {"prompt": "why", **REPLIES}
HH = "\n\nHuman: why\n\nAssistant:"
ALPACA: dict[str, Any] = {
    "instruction": "Add.",
    "input": "2, 2",
    "chosen": "4",
    "rejected": "5",
    "system": "You are brief.",
    "history": [["hi", "hello"]],
}


def test_prompt_has_the_columns_next_to_it(tmp_path: Path, contracts: Contracts) -> None:
    """Once with ``auto``, and once with the names of the fields."""
    question, bare = turn("user", "Add.\n2, 2"), turn("user", "Add.")
    pairs = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    there = {
        "prompt": [SYSTEM, *HISTORY, WHY],
        "system": "You are brief. ",
        "history": [["hi", "hello"]],
    }
    raw = {"chosen": f"{HH} because", "rejected": f"{HH} no", "system": "You are brief."}
    by_key = {"pair_keys": PairKeys.of("instruction", None, None)}
    orca = {"pair_keys": PairKeys.of("question", None, None)}
    cases: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = [
        (ALPACA, {}, [SYSTEM, *HISTORY, question]),
        (ALPACA, by_key, [SYSTEM, *HISTORY, question]),
        ({**ALPACA, "input": "", "system": "", "history": []}, {}, [bare]),
        ({**ALPACA, "input": None, "system": None, "history": None}, {}, [bare]),
        ({**PAIR, "system": "You are brief."}, {}, [SYSTEM, WHY]),
        ({**PAIR, "system_prompt": "You are brief."}, {}, [SYSTEM, WHY]),
        ({**REPLIES, "question": "why", "system": "You are brief."}, orca, [SYSTEM, WHY]),
        ({**PAIR, "history": HISTORY}, {}, [*HISTORY, WHY]),
        ({**PAIR, "history": pairs}, {}, [*HISTORY, WHY]),
        (raw, {}, [SYSTEM, WHY]),
        # Turns that the conversation already has are not added again.
        ({**REPLIES, **there}, {}, [SYSTEM, *HISTORY, WHY]),
    ]
    for record, how, prompt in cases:
        file = read(tmp_path, record, **how)
        assert [text[:-1] for text in file.records[0].texts] == [prompt] * 2, record
        assert not file.unread, record
    rows = [{**ALPACA, "history": []}, ALPACA]
    file = read(tmp_path, *rows)
    counts = {"system_column": 2, "history_column": 1}
    assert file.counts == {"read": 2, "kept": 2, **counts}
    path = write(tmp_path / "pairs.jsonl", *rows)
    [shown] = inspect_files([str(path)], [], Inspection(show=0))
    assert "  columns in the prompt     system 2, history 1" in shown.text
    [report] = build(contracts, [path], template="chatml").train.reports
    assert ("columns in the prompt", "system 2, history 1") in [*report.rows()]
    rated = {"prompt": "why", "response": "so", "system": "You are brief.", "help": 1}
    [rating] = read(tmp_path, rated, kind=RecordKind.rating, attributes=["help"]).records
    assert rating.response == [SYSTEM, WHY, turn("assistant", "so")]
    # A label column with this name is not a part of the prompt.
    rated["system"] = 2
    [rating] = read(tmp_path, rated, kind=RecordKind.rating, attributes=["system"]).records
    assert (rating.labels, len(rating.response)) == ((2.0,), 2)


def test_prompt_columns_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({**PAIR, "history": [["hi"]]}, r":1: history\[0\]: got \['hi'\], wanted two texts"),
        ({**PAIR, "history": [{"from": "x"}]}, r":1: history: messages\[0\]: got an object with"),
        ({**PAIR, "prompt": [SYSTEM, WHY], "system": "Rhyme."}, r":1: system: got 'Rhyme.' next"),
        ({**ALPACA, "input": 3}, r":1: input: got 3, wanted a string"),
        ({**PAIR, "system": ["Rhyme."]}, r":1: system: got \['Rhyme.'\], wanted a string"),
        ({**PAIR, "system_prompt": 3}, r":1: system_prompt: got 3, wanted a string"),
        ({**PAIR, "System": "Rhyme."}, r":1: System: no column .* to 'system'"),
        ({**PAIR, "systemPrompt": "Rhyme."}, r":1: systemPrompt: .* to 'system_prompt'"),
    ]
    assert_refused(lambda record: read(tmp_path, record), cases, DataError)


def test_principle_column_goes_with_every_sample_of_a_record(tmp_path: Path) -> None:
    rating, ranked = (
        {"prompt": "why", "response": "so", "help": 3},
        tiny.ranked("why", (0, "a"), (1, "b"), (2, "c")),
    )
    for record, options in (
        (PAIR, {}),
        ({**PAIR, "system": "You are brief."}, {}),
        (ALPACA, {}),
        (ranked, {}),
        (rating, {"kind": RecordKind.rating, "attributes": ["help"]}),
    ):
        (found,) = read(tmp_path, {**record, "principle": "be kind"}, **options).records
        (without,) = read(tmp_path, {**record, "principle": None}, **options).records
        assert [*map(principle_of, found.texts)] == ["be kind"] * len(found.texts)
        assert [*map(messages_of, found.texts)] == [*without.texts]
        assert verdict_keys(found) != verdict_keys(without) or record is rating
        assert prompt_hash(found) == prompt_hash(without)
    # A label column of this name is no principle.
    labels = {"kind": RecordKind.rating, "attributes": ["principle"]}
    (found,) = read(tmp_path, {**rating, "principle": 1}, **labels).records
    assert (found.labels, principle_of(found.texts[0])) == ((1.0,), None)
    raw = {"chosen": f"{HH} because", "rejected": f"{HH} no", "principle": "be kind"}
    text = {"text": "a"}
    cases: list[tuple[Any, str]] = [
        ([{**PAIR, "principle": ["be kind"]}], r"data.jsonl:1: principle: got .*wanted a string"),
        ([{**text, "principle": "be kind"}, text], r"1: principle: got a principle with a raw"),
    ]
    (found,) = read(tmp_path, raw).records  # hh_rlhf has conversations
    assert principle_of(found.texts[0]) == "be kind"
    assert_refused(lambda records: read(tmp_path, *records), cases, DataError)


def test_objects_with_messages_give_a_sample_all_that_they_have(tmp_path: Path) -> None:
    """As ``records.as_json`` writes them; Arrow adds keys with null."""
    tools, documents = [{"type": "function", "function": {"name": "look"}}], [{"text": "Rain."}]
    prompt = {"messages": [WHY], "tools": tools, "principle": "be kind", "system": None}
    reply = {"messages": [turn("assistant", "so")], "documents": documents}
    pair = {"prompt": prompt, "chosen": reply, "rejected": "no"}
    without_tools = {key: field for key, field in prompt.items() if key != "tools"}
    whole = {**prompt, **reply, "messages": [WHY, *reply["messages"]]}
    wanted = Conversation([WHY, turn("assistant", "so")], tools, documents, "be kind")
    for record in (
        pair,
        {**pair, "tools": tools, "principle": "be kind"},
        {**pair, "prompt": without_tools, "tools": tools},
        {**REPLIES, "prompt": [WHY], "chosen": whole},
    ):
        (found,) = read(tmp_path, record).records
        assert found.texts[0] == wanted
    other = [{"type": "function", "function": {"name": "hear"}}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({**pair, "prompt": {**prompt, "system": "Rhyme."}}, r":1: prompt: got the key 'system',"),
        ({**pair, "chosen": {**reply, "tools": other}}, r":1: chosen: tools: got tools for a samp"),
        ({**pair, "chosen": {**reply, "principle": "rhyme"}}, r":1: chosen: principle: got 'rhyme"),
        ({**pair, "tools": other}, r":1: tools: got tools for a sample with others"),
    ]
    assert_refused(lambda record: read(tmp_path, record), cases, DataError)


def test_columns_that_are_not_read_are_named(tmp_path: Path, contracts: Contracts) -> None:
    rows: list[dict[str, Any]] = [
        {**PAIR, "id": 1, "input": "2, 2", "label_margin": 2, "source": "s", "note": None},
        {**PAIR, "prompt": "who", "id": 2, "input": "", "tools": [], "history": "hi", "sytem": "s"},
        {**PAIR, "prompt": "what", "id": 3, "score_chosen": 1, "score_rejected": 0},
    ]
    path = write(tmp_path / "pairs.jsonl", *rows)
    row = (
        "columns not read",
        "history 1 (part of the prompt?), input 1 (part of the prompt?), sytem 1 (did you mean "
        "system?), id 3, label_margin 1, score_chosen 1, score_rejected 1",
    )
    [report] = build(contracts, [path]).train.reports
    assert row in [*report.rows()]
    [shown] = inspect_files([str(path)], [], Inspection(show=0))
    assert "  columns not read          history 1 (part of the prompt?), " in shown.text
    # Label columns of the objective count as read.
    rows[1]["label_margin"] = 3
    margins = read(tmp_path, *rows, pair_columns=("label_margin",))
    assert [pair.labels for pair in margins.records] == [(2.0,), (3.0,), (1.0,)]
    assert margins.unread == {"id": 3, "input": 1, "history": 1, "sytem": 1}
    # Raw texts cannot have a system prompt.
    texts = {"chosen": "a", "rejected": "b", "system": "Rhyme.", "tools": [1]}
    assert read(tmp_path, texts, format="text_pairs").unread == {"system": 1, "tools": 1}
    names = {f"c{number:02}": 1 for number in range(14)}
    [shown] = inspect_files([str(write(path, {**PAIR, **names}))], [], Inspection(show=0))
    assert " ".join(shown.text.split()).endswith("c11 1, and 2 more")
