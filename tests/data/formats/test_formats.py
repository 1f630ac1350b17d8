"""Public data sets in their published form: order, ties, margins, malformed records."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.contract.messages import Conversation, reply_of
from nemo_aligner.data.clean import MalformedRule
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.formats.base import WantedLabels
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.utils.errors import DataError
from tests.contract.refusals import assert_refused
from tests.data.files import published, read

USER = {"role": "user", "content": "why"}
GOOD = {"role": "assistant", "content": "because"}
SYSTEM = {"role": "system", "content": "be kind"}
BAD = {"role": "assistant", "content": "no"}

NEMO_RL: dict[str, Any] = {
    "context": [USER],
    "completions": [
        {"rank": 2, "completion": [BAD]},
        {"rank": 0, "completion": [GOOD]},
        {"rank": 2, "completion": [{**BAD, "content": "nope"}]},
        {"rank": 1, "completion": [{**GOOD, "content": "so"}]},
    ],
}
HELPSTEER3: dict[str, Any] = {
    "domain": "stem",
    "language": "english",
    "context": [USER],
    "response1": "no",
    "response2": "because",
    "overall_preference": 2,
    "individual_preference": [{"score": 2, "reasoning": "it says why"}],
}
HELPSTEER2: dict[str, Any] = {
    "split": "train",
    "prompt": "why",
    "response_1": "because",
    "response_2": "no",
    "preference_strength": -3,
    "preference_statement": "@Response 1 is much better",
}
ULTRA: dict[str, Any] = {
    "source": "sharegpt",
    "instruction": "why",
    "completions": [
        {"model": "a", "response": "no", "fine-grained_score": 1.25, "overall_score": 10},
        {"model": "b", "response": "because", "fine-grained_score": 4.5, "overall_score": 8.5},
        {"model": "c", "response": "so", "fine-grained_score": 4.5, "overall_score": 7},
    ],
}
QA: dict[str, Any] = {
    "question": "why",
    "passages": [],
    "prediction 1": "no",
    "prediction 2": "because",
    "prediction 3": "so",
    "prediction 4": "nope",
    # 2 is better than all others, 3 is better than 1 and 4, and these are tied.
    "preference": [2, 2, 0, 1, 1, 1],
}
PANDALM: dict[str, Any] = {
    "idx": 0,
    "instruction": "why",
    "input": "",
    "response1": "no",
    "response2": "because",
    "annotator1": 2,
    "annotator2": 1,
    "annotator3": 2,
}
PAIR: dict[str, Any] = {"prompt": "why", "chosen": [USER, GOOD], "rejected": [USER, BAD]}


def parse(fmt: str, record: dict[str, Any], *wanted: str) -> Comparison:
    """Parse one record, which may be tied."""
    parsed = FORMATS[fmt].parse([record], Origin("file", 1), WantedLabels(wanted))
    assert isinstance(parsed, Comparison)
    return parsed


def changed(record: dict[str, Any], *numbers: int, **change: object) -> dict[str, Any]:
    """The record with some of its completions changed, or all if none is named."""
    completions = [dict(one) for one in record["completions"]]
    for number in numbers or range(len(completions)):
        completions[number].update(change)
    return {**record, "completions": completions}


def replies(record: Comparison) -> list[str]:
    return [reply_of(text) for text in record.texts]


FINE_MISSING = changed(ULTRA, 1, **{"fine-grained_score": None})


def test_completions_come_best_first(tmp_path: Path) -> None:
    other_2 = {**HELPSTEER2, "preference_strength": 1}
    cases: list[tuple[dict[str, Any], str, list[str], tuple[int, ...]]] = [
        (NEMO_RL, "nemo_rl_preference", ["because", "so", "no", "nope"], (0, 1, 2, 2)),
        (HELPSTEER3, "helpsteer3", ["because", "no"], (0, 1)),
        (HELPSTEER2, "helpsteer2_preference", ["because", "no"], (0, 1)),
        (ULTRA, "ultrafeedback", ["because", "so", "no"], (0, 0, 1)),
        (QA, "qa_feedback", ["because", "so", "no", "nope"], (0, 1, 2, 2)),
        (PANDALM, "pandalm", ["because", "no"], (0, 1)),
        # Overall scores are used if a fine-grained one is missing.
        (FINE_MISSING, "ultrafeedback", ["no", "because", "so"], (0, 1, 2)),
        # The opposite sign prefers the other response.
        ({**HELPSTEER3, "overall_preference": -1}, "helpsteer3", ["no", "because"], (0, 1)),
        (other_2, "helpsteer2_preference", ["no", "because"], (0, 1)),
        ({**PANDALM, "annotator3": 1}, "pandalm", ["no", "because"], (0, 1)),
    ]
    for record, fmt, best_first, ranks in cases:
        file = read(tmp_path, record)
        [comparison] = file.records
        assert (file.format, replies(comparison), comparison.ranks) == (fmt, best_first, ranks)
        assert all(text[:-1] == [USER] for text in comparison.texts), fmt


def test_completions_neither_better_nor_worse_are_tied(tmp_path: Path) -> None:
    """A cycle of preferences is a tie, too; ties are counted and dropped."""
    cases: list[tuple[dict[str, Any], str]] = [
        (changed(NEMO_RL, rank=4), "nemo_rl_preference"),
        ({**HELPSTEER3, "overall_preference": 0}, "helpsteer3"),
        ({**HELPSTEER2, "preference_strength": 0}, "helpsteer2_preference"),
        (changed(ULTRA, **{"fine-grained_score": 3}), "ultrafeedback"),
        ({**QA, "preference": [0] * 6}, "qa_feedback"),
        ({**QA, "preference": [1, 0, 2, 1, 0, 1]}, "qa_feedback"),
        ({**PANDALM, "annotator1": 0}, "pandalm"),
        ({**PANDALM, "annotator1": 0, "annotator2": 0}, "pandalm"),
    ]
    for record, fmt in cases:
        assert set(parse(fmt, record).ranks) == {0}, record
        file = read(tmp_path, record, FORMATS[fmt].sample[0])
        assert file.counts == {"read": 2, "tied": 1, "kept": 1}, record


def test_margin_of_a_strength_is_its_size() -> None:
    for strength in (-3, -2, -1, 0, 1, 2, 3):
        record = {**HELPSTEER3, **HELPSTEER2}
        record.update(overall_preference=strength, preference_strength=strength)
        for fmt in ("helpsteer3", "helpsteer2_preference"):
            assert parse(fmt, record, "label_margin").labels == (abs(strength),)
            own = parse(fmt, {**record, "label_margin": 7}, "label_margin")
            assert own.labels == (7.0,)


def test_margin_of_a_pair_is_that_of_its_scores(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({"score_chosen": 8.5, "score_rejected": 6}, 2.5),
        ({"score_chosen": 6, "score_rejected": 8.5}, -2.5),
        ({"chosen-rating": 4.75, "rejected-rating": 4.0}, 0.75),
        ({"chosen_rating": 5, "rejected_rating": 2}, 3.0),
        ({"chosen_score": 0.5, "rejected_score": 0.25}, 0.25),
        ({"metadata": {"score_chosen": 9.0, "score_rejected": 7.0}}, 2.0),
        ({"margin": 1.5}, 1.5),
        ({"score_chosen": None, "score_rejected": 6}, None),
        ({"label_margin": 4, "score_chosen": 8.5, "score_rejected": "?"}, 4.0),
        ({"label_margin": None, "margin": 1.5, "score_chosen": 8.5, "score_rejected": 6}, None),
    ]
    for scores, margin in cases:
        [pair] = read(tmp_path, {**PAIR, **scores}, pair_columns=("label_margin",)).records
        assert (replies(pair), pair.labels) == (["because", "no"], (margin,)), scores
        texts = {"chosen": "a", "rejected": "b", **scores}
        assert parse("text_pairs", texts, "label_margin").labels == (margin,), scores


def test_margin_is_read_where_it_is_wanted(tmp_path: Path) -> None:
    pair = {**PAIR, "score_chosen": "high", "score_rejected": 1}
    assert read(tmp_path, pair).counts == {"read": 1, "kept": 1}
    cases = [
        (pair, r":1: score_chosen: got 'high', wanted a number"),
        ({**PAIR, "metadata": "none"}, r":1: missing key 'label_margin'"),
        (ULTRA, r":1: missing key 'label_margin'"),  # without a single margin
    ]
    wanted = {"pair_columns": ("label_margin",)}
    assert_refused(lambda record: read(tmp_path, record, **wanted), cases, DataError)
    two = {**ULTRA, "completions": ULTRA["completions"][:2]}
    comparison = parse("ultrafeedback", two, "label_margin")
    assert (replies(comparison), comparison.labels) == (["because", "no"], (3.25,))


def test_prompt_has_passages_and_inputs_and_a_record_its_source(tmp_path: Path) -> None:
    passages = [["Bloom", "It is an album.", "It came out in 2018."], ["Hell"]]
    comparison = parse("qa_feedback", {**QA, "passages": passages})
    [prompt] = {text[0]["content"] for text in comparison.texts}
    assert prompt == "Bloom\nIt is an album. It came out in 2018.\n\nHell\n\n\nwhy"
    sources = {"stem": HELPSTEER3, "": {**HELPSTEER3, "domain": None}, "sharegpt": ULTRA}
    assert {read(tmp_path, each).records[0].source: each for each in sources.values()} == sources
    comparison = parse("pandalm", {**PANDALM, "input": "the sky"})
    assert comparison.texts[0][0] == {"role": "user", "content": "why\n\nthe sky"}


def several_turns(*roles: str) -> str:
    return "q" + "".join(f"\n<extra_id_1>{role}\nt{n}" for n, role in enumerate(roles, start=1))


def test_helpsteer_prompts_of_several_turns_are_messages(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "t1"},
        {"role": "user", "content": "t2"},
    ]
    prompt = several_turns("Assistant", "User")
    comparison = parse("helpsteer2_preference", {**HELPSTEER2, "prompt": prompt})
    assert comparison.texts[0] == [*turns, GOOD]
    rated = {"prompt": prompt, "response": "because", "helpfulness": 3}
    file = read(tmp_path, rated, kind=RecordKind.rating, attributes=["helpfulness"])
    assert file.records[0].response == [*turns, GOOD]
    for roles in (["Assistant"], ["User"], ["Assistant", "User", "Assistant"]):
        with pytest.raises(DataError, match=r"got turns of user, .*wanted"):
            parse("helpsteer2_preference", {**HELPSTEER2, "prompt": several_turns(*roles)})


def test_records_have_the_tools_that_their_replies_call(tmp_path: Path) -> None:
    """OpenAI's format has them in its input, all others next to the messages."""
    tool = {"type": "function", "function": {"name": "weather"}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "content": "dry", "tool_call_id": "1"}
    asked = {"messages": [USER], "tools": [tool], "parallel_tool_calls": True}
    replies = [[calling, result, GOOD], [BAD]]
    openai = {"input": asked, "preferred_output": replies[0], "non_preferred_output": replies[1]}
    pair = dict(zip(("chosen", "rejected"), replies, strict=True))
    records: list[dict[str, Any]] = [
        openai,
        {"prompt": [USER], **pair, "tools": [tool]},
        {"prompt": [USER], **pair, "tools": json.dumps([tool])},
        {**{key: [USER, *reply] for key, reply in pair.items()}, "tools": [tool]},
        {
            "context": [USER],
            "completions": [{"rank": n, "completion": each} for n, each in enumerate(replies)],
            "tools": [tool],
        },
    ]
    done = {**call, "function": {"name": "weather", "arguments": {}}}
    better = [USER, {"role": "assistant", "content": None, "tool_calls": [done]}, result, GOOD]
    wanted = (Conversation(better, [tool]), Conversation([USER, BAD], [tool]))
    for number, record in enumerate(records):
        [found] = read(tmp_path, record).records
        assert found.texts == wanted, number
        assert read(tmp_path, record).counts == {"read": 1, "kept": 1}, number
    # A prompt may end with a tool's result; ratings may have tools, too.
    rated = {"prompt": better[:3], "response": "so", "tools": [tool], "helpfulness": 1}
    [rating] = read(tmp_path, rated, kind=RecordKind.rating).records
    assert rating.response == Conversation([*better[:3], {**GOOD, "content": "so"}], [tool])
    # Fields of other types, and tools next to raw texts, are not read.
    for more in ({"documents": "a.txt"}, {"documents": [1]}, {"tools": None}, {"tools": "[]"}):
        [plain] = read(tmp_path, {**PAIR, **more}).records
        assert plain.texts == ([USER, GOOD], [USER, BAD])
    with pytest.raises(DataError, match=r":1: chat_template_kwargs of single records"):
        read(tmp_path, {**records[1], "chat_template_kwargs": {"a": 1}})
    with pytest.raises(DataError, match=r":1: tools: got 'x', wanted a JSON list"):
        read(tmp_path, {**records[1], "tools": "x"})


def test_bad_records_of_public_formats_are_errors_with_their_field(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({**NEMO_RL, "completions": [{"rank": 0}]}, r"completions: got \[.*list of two or more"),
        ({**NEMO_RL, "completions": {"rank": 0}}, r"completions: got \{.*list of two or more"),
        ({**NEMO_RL, "completions": [{"rank": 0}] * 2}, r"completions\[0\]: .*'rank' and 'complet"),
        (changed(NEMO_RL, 1, rank=0.5), r"completions\[1\].rank: got 0.5, wanted a whole number"),
        (changed(NEMO_RL, 1, rank=None), r"completions\[1\].rank: got None, wanted a whole number"),
        (changed(NEMO_RL, 1, completion=[]), r".*\[1\].completion: got \[\], wanted a string"),
        (changed(NEMO_RL, 1, completion=[GOOD, USER]), r".*\[1\].completion: .*got role 'user'"),
        ({**NEMO_RL, "context": 3}, r"context: got 3, wanted a string or a list of messages"),
        ({**HELPSTEER3, "overall_preference": 4}, r"overall_preference: got 4, wanted a number f"),
        ({**HELPSTEER3, "overall_preference": None}, r"overall_preference: got None, wanted a"),
        ({**HELPSTEER3, "overall_preference": True}, r"overall_preference: got True, wanted a"),
        ({**HELPSTEER3, "response2": None}, r"response2: got None, wanted a string or a list"),
        ({**HELPSTEER2, "preference_strength": "1"}, r"preference_strength: got '1', wanted"),
        (changed(ULTRA, 2, response=None), r".*\[2\].response: got None, wanted a string"),
        (changed(FINE_MISSING, 1, overall_score=None), r"completions: wanted a number in all of"),
        (changed(ULTRA, 0, **{"fine-grained_score": "?"}), r".*\[0\].fine-grained_score: go"),
        ({**ULTRA, "completions": []}, r"completions: got \[\], wanted a list of two or more"),
        ({**ULTRA, "instruction": ["why"]}, r"instruction: messages\[0\]: got 'why', wanted an"),
        ({**QA, "preference": [1] * 5}, r"preference: got .*wanted 6 labels, each 0, 1 or 2"),
        ({**QA, "preference": [1, 2, 0, 3, 1, 1]}, r"preference: got .*wanted 6 labels"),
        ({**QA, "prediction 3": None}, r"prediction 3: got None, wanted a string"),
        ({**QA, "passages": [["a"], []]}, r"passages: got .*wanted lists of a title and sentences"),
        ({**PANDALM, "annotator2": 3}, r"annotator2: got 3, wanted 1 or 2, the better respo"),
        ({**PANDALM, "annotator2": "1"}, r"annotator2: got '1', wanted 1 or 2"),
        ({**PANDALM, "input": None}, r"input: got None, wanted a string"),
    ]  # fmt: skip

    def read_second(record: dict[str, Any]) -> None:
        [fmt] = [known for known in FORMATS.values() if known.matches(record)]
        read(tmp_path, fmt.sample[0], record)

    named = [(record, f"data.jsonl:2: {message}") for record, message in cases]
    assert_refused(read_second, named, DataError)
    lacking = {key: value for key, value in HELPSTEER3.items() if key != "overall_preference"}
    with pytest.raises(DataError, match=r":2: got keys .* helpsteer3 wants"):
        read(tmp_path, HELPSTEER3, lacking)


def test_pairs_of_trainers_mean_what_their_trainers_read(tmp_path: Path) -> None:
    """Formats of LLaMA-Factory and ms-swift, also with ShareGPT's messages and tool calls."""
    human, gpt = {"from": "human", "value": "why"}, {"from": "gpt", "value": "because"}
    other, weather = (
        {"from": "gpt", "value": "no"},
        {"name": "weather", "arguments": {"city": "Bonn"}},
    )
    called = [
        {"from": "system", "value": "be kind"},
        human,
        {"from": "function_call", "value": json.dumps(weather)},
        {"from": "observation", "value": "dry"},
    ]
    calling = {"role": "assistant", "content": None, "tool_calls": [weather]}
    result = {"role": "tool", "content": "dry"}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    swift_call = {"role": "tool_call", "content": json.dumps(weather)}
    swift_result = {"role": "tool_response", "content": "dry"}
    before = [SYSTEM, USER, calling, result]
    pair = {"chosen": gpt, "rejected": other}
    cases: list[tuple[dict[str, Any], str, Any, Any]] = [
        ({"conversations": [human], **pair}, "sharegpt_pairs", [USER, GOOD], [USER, BAD]),
        ({"conversations": [human], "chosen": {"from": "bot", "value": GOOD["content"]},
          "rejected": {"from": "bot", "value": BAD["content"]}},
         "sharegpt_pairs", [USER, GOOD], [USER, BAD]),
        ({"messages": [USER], "chosen": GOOD, "rejected": BAD}, "sharegpt_pairs",
         [USER, GOOD], [USER, BAD]),
        ({"conversations": [human], "chosen": "because", "rejected": "no"}, "sharegpt_pairs",
         [USER, GOOD], [USER, BAD]),
        # The only column that may hold the prompt has another name (UltraInteract).
        ({"trajectory": [human], "chosen": "because", "rejected": "no"}, "sharegpt_pairs",
         [USER, GOOD], [USER, BAD]),
        ({"turns": [USER], "chosen": [GOOD], "rejected": [BAD], "system": "be kind"},
         "sharegpt_pairs", [SYSTEM, USER, GOOD], [SYSTEM, USER, BAD]),
        ({"conversation": {"messages": [USER]}, "chosen": "because", "rejected": "no"},
         "sharegpt_pairs", [USER, GOOD], [USER, BAD]),
        ({"conversations": called, **pair, "tools": json.dumps(tools)}, "sharegpt_pairs",
         Conversation([*before, GOOD], tools), Conversation([*before, BAD], tools)),
        ({"conversations": [human], **pair, "system": "be kind"}, "sharegpt_pairs",
         [SYSTEM, USER, GOOD], [SYSTEM, USER, BAD]),
        ({"chosen": [human, gpt], "rejected": [human, other]}, "chat_pairs",
         [USER, GOOD], [USER, BAD]),
        ({"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "chat_pairs",
         [USER, GOOD], [USER, BAD]),
        ({"messages": [USER, GOOD], "rejected_response": "no"}, "ms_swift_pairs",
         [USER, GOOD], [USER, BAD]),
        ({"messages": [SYSTEM, USER, GOOD], "rejected_messages": [SYSTEM, USER, BAD]},
         "ms_swift_pairs", [SYSTEM, USER, GOOD], [SYSTEM, USER, BAD]),
        # The rejected reply replaces the chosen one with its tool calls.
        ({"messages": [USER, swift_call, swift_result, GOOD], "rejected_response": [BAD]},
         "ms_swift_pairs", [USER, calling, result, GOOD], [USER, BAD]),
    ]  # fmt: skip
    for record, fmt, chosen, rejected in cases:
        file = read(tmp_path, record)
        assert (file.format, file.records[0].texts) == (fmt, (chosen, rejected)), record
        # A dump of the chosen conversation in another field is not read.
        assert [*file.unread] == ["messages"] * (fmt == "chat_pairs" and "messages" in record)
    bad: list[tuple[dict[str, Any], str]] = [
        (
            {"messages": [GOOD], "rejected_response": "no"},
            r":1: messages: got turns of assistant, w",
        ),
        ({"messages": [USER], "rejected_response": "no"}, r":1: messages: .*got role 'user'"),
        ({"messages": [USER, GOOD], "rejected_response": None}, r":1: rejected_response: got None"),
        ({"messages": [USER, GOOD], "rejected_messages": None}, r":1: rejected_response: got None"),
        (
            {"conversations": [{"from": "alien", "value": "hi"}], **pair},
            r":1: conversations: messages\[0\]: got role 'alien', wanted one of",
        ),
        (
            {"conversations": [human, {"from": "function_call", "value": "{"}, called[3]], **pair},
            r":1: conversations: messages\[1\]: got '{' of function_call, wanted JSON",
        ),
    ]
    assert_refused(lambda record: read(tmp_path, record), bad, DataError)


def objects(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return list(json.load(file))


def test_published_qa_feedback_keeps_every_preference_in_its_ranks() -> None:
    path = published("pairs/qa_feedback/dev_feedback.json.gz")
    file = read_records(path, ReaderConfig(RecordKind.comparison))
    assert (file.format, file.counts["read"], file.counts["tied"]) == ("qa_feedback", 500, 12)
    preferred = 0
    for value in objects(path):
        comparison = parse("qa_feedback", value)
        rank = dict(zip(replies(comparison), comparison.ranks, strict=True))
        ranks = [rank[value[f"prediction {number}"]] for number in range(1, 5)]
        for (one, other), label in zip(
            itertools.combinations(ranks, 2), value["preference"], strict=True
        ):
            preferred += label != 0
            assert label == 0 or (one < other) == (label == 1) != (one > other)
    assert preferred == 2616


def test_published_pandalm_has_the_majorities_that_its_readme_counts() -> None:
    path = published("pairs/pandalm/testset-v1.json.gz")
    judged = [
        parse("pandalm", {**value, "response1": "1", "response2": "2"}) for value in objects(path)
    ]
    best = Counter("tie" if one.ranks == (0, 0) else replies(one)[0] for one in judged)
    assert best == {"tie": 105, "1": 422, "2": 472}
    rule = MalformedRule(Malformed.drop, max_fraction=0.01)
    file = read_records(path, ReaderConfig(RecordKind.comparison, rule=rule))
    # In six records a response is the JSON value true.
    assert (file.counts["read"], file.counts["malformed"]) == (999, 6)
