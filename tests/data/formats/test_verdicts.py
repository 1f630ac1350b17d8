"""Published data sets with verdicts, with the columns that their cards describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import principle_of, prompt_of, reply_of
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.utils.errors import DataError
from tests.contract.refusals import assert_refused
from tests.data.files import read

PKU: dict[str, Any] = {
    "prompt": "why",
    "response_0": "because",
    "response_1": "no",
    "prompt_source": "Beavertails",
    "response_0_source": "Alpaca-7B",
    "response_1_source": "Alpaca3-8B",
    "is_response_0_safe": False,
    "is_response_1_safe": True,
    "response_0_harm_category": {"Privacy Violation": True},
    "response_1_harm_category": {"Privacy Violation": False},
    "response_0_severity_level": 2,
    "response_1_severity_level": 0,
    "better_response_id": 0,
    "safer_response_id": 1,
    "response_0_sha256": "0a",
    "response_1_sha256": "0b",
}
SHP: dict[str, Any] = {
    "post_id": "a1",
    "domain": "askbaking_test",
    "upvote_ratio": 0.98,
    "history": "why",
    "c_root_id_A": "b1",
    "c_root_id_B": "b2",
    "created_at_utc_A": 1,
    "created_at_utc_B": 2,
    "score_A": 5,
    "score_B": 55,
    "human_ref_A": "no",
    "human_ref_B": "because",
    "labels": 0,
    "seconds_difference": 1.0,
    "score_ratio": 11.0,
}
WEBGPT: dict[str, Any] = {
    "question": {"dataset": "eli5", "id": "x", "full_text": "why"},
    "quotes_0": {"title": ["t (a.org)"], "extract": ["words"]},
    "answer_0": "no",
    "tokens_0": {"prefix": [1], "completion": [2]},
    "score_0": -0.25,
    "quotes_1": {"title": [], "extract": []},
    "answer_1": "because",
    "tokens_1": {"prefix": [1], "completion": [2]},
    "score_1": 0.25,
}
SUMMARIES: dict[str, Any] = {
    "info": {
        "id": "t3_a",
        "post": "one\n\ntwo",
        "title": "Why?",
        "subreddit": "ask",
        "site": None,
        "article": None,
    },
    "summaries": [
        {"text": " no", "policy": "sup1", "note": None},
        {"text": " because", "policy": "ref", "note": "ok"},
    ],
    "choice": 1,
    "worker": "w1",
    "batch": "batch3",
    "split": "train",
    "extra": {"confidence": 7},
}
NEWS = {**SUMMARIES["info"], "post": None, "subreddit": None, "article": "one\n\ntwo"}


def talk(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(texts)
    return [{"content": text, "role": role} for text, role in zip(texts, roles, strict=False)]


ARENA: dict[str, Any] = {
    "question_id": "q1",
    "model_a": "x",
    "model_b": "y",
    "winner": "model_b",
    "judge": "arena_user_1",
    "conversation_a": talk("why", "no", "and?", "never"),
    "conversation_b": talk("why", "because", "and?", "so"),
    "turn": 2,
    "anony": True,
    "language": "English",
    "tstamp": 1.5,
    "openai_moderation": {},
    "toxic_chat_tag": {},
}
PARTS = [
    {
        **turn,
        "content": [{"type": "text", "text": turn["content"], "image": None, "mimeType": None}],
    }
    for turn in talk("why", "because")
]
NECTAR: dict[str, Any] = {
    "prompt": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why\n\nAssistant: ",
    "answers": [
        {"answer": "no", "model": "x", "rank": 3.0},
        {"answer": "because", "model": "y", "rank": 1.0},
        {"answer": "so", "model": "z", "rank": 2.0},
    ],
    "turns": 2,
    "num_responses": 3,
    "source": ["lmsys-chat-1m"],
    "good_natured": True,
}


def test_verdicts_of_published_sets_put_replies_in_order(tmp_path: Path) -> None:
    reddit = "SUBREDDIT: r/ask\n\nTITLE: Why?\n\nPOST: one\ntwo\n\nTL;DR:"
    why = [{"role": "user", "content": "why"}]
    greeted = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "hello"))]
    pair = ["because", "no"]
    cases: list[tuple[dict[str, Any], str, Any, list[str], str]] = [
        (PKU, "pku_saferlhf", why, pair, "Beavertails"),
        ({**PKU, "better_response_id": 1}, "pku_saferlhf", why, pair[::-1], "Beavertails"),
        (SHP, "shp", why, pair, "askbaking_test"),
        ({**SHP, "labels": 1}, "shp", why, pair[::-1], "askbaking_test"),
        (WEBGPT, "webgpt_comparisons", why, pair, ""),
        ({**WEBGPT, "score_0": 1}, "webgpt_comparisons", why, pair[::-1], ""),
        (SUMMARIES, "summarize_from_feedback", [{**why[0], "content": reddit}],
         [" because", " no"], ""),
        ({**SUMMARIES, "info": NEWS, "choice": 0}, "summarize_from_feedback",
         [{**why[0], "content": "TITLE: Why?\n\none\ntwo\n\nTL;DR:"}], [" no", " because"], ""),
        ({**ARENA, "turn": 1}, "chatbot_arena", why, pair, ""),
        ({**ARENA, "turn": 1, "winner": "model_a"}, "chatbot_arena", why, pair[::-1], ""),
        (NECTAR, "nectar", [*greeted, *why], ["because", "so", "no"], "lmsys-chat-1m"),
    ]  # fmt: skip
    for record, fmt, prompt, replies, source in cases:
        [comparison] = read(tmp_path, record).records
        assert read(tmp_path, record).format == fmt, record
        assert [prompt_of(text) for text in comparison.texts] == [prompt] * len(replies), record
        assert [reply_of(text) for text in comparison.texts] == replies, record
        assert comparison.ranks == (*range(len(replies)),), record
        assert comparison.source == source, record
        # The order of the columns does not matter, nor records of other formats in the list.
        reordered = dict(reversed([*record.items()]))
        assert [each.name for each in FORMATS.values() if each.is_certain(reordered)] == [fmt]


def test_verdicts_of_an_arena_are_of_the_turns_that_were_judged(tmp_path: Path) -> None:
    for turn in (2, None):
        [both] = read(tmp_path, {**ARENA, "turn": turn}).records
        assert both.texts == (ARENA["conversation_b"], ARENA["conversation_a"])
    modern = {**ARENA, "conversation_a": talk("why", "no"), "conversation_b": PARTS}
    del modern["turn"]
    [pair] = read(tmp_path, modern).records
    assert [reply_of(text) for text in pair.texts] == ["because", "no"]
    ties = ["tie", "tie (bothbad)", "both_bad"]
    file = read(tmp_path, *({**ARENA, "winner": winner} for winner in ties), ARENA)
    assert file.counts == {"read": 4, "tied": 3, "different_prompts": 1, "kept": 1}


def test_verdicts_with_scores_have_their_margin_and_ties(tmp_path: Path) -> None:
    [pair] = read(tmp_path, WEBGPT, pair_columns=("label_margin",)).records
    assert pair.labels == (0.5,)
    tie = {**WEBGPT, "score_0": 0.25}
    assert read(tmp_path, tie, WEBGPT).counts == {"read": 2, "tied": 1, "kept": 1}
    assert read(tmp_path, tie, ties=True).records[0].ranks == (0, 0)
    equal = {**NECTAR, "answers": [{**each, "rank": 1.0} for each in NECTAR["answers"]]}
    assert read(tmp_path, equal, NECTAR).counts == {"read": 2, "tied": 1, "kept": 1}


def test_verdicts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({**PKU, "better_response_id": 2}, r"better_response_id: got 2, wanted 0 or 1"),
        ({**PKU, "better_response_id": True}, r"better_response_id: got True, wanted 0 or 1"),
        ({**PKU, "response_1": None}, r"response_1: got None, wanted a string"),
        ({**SHP, "labels": [1]}, r"labels: got \[1\], wanted 0 or 1"),
        ({**SHP, "history": ["why"]}, r"history: got \['why'\], wanted a string"),
        ({**WEBGPT, "question": "why"}, r"question: got 'why', wanted an object with a full_text"),
        ({**WEBGPT, "score_1": None}, r"score_1: got null, wanted a number"),
        ({**WEBGPT, "score_1": "1"}, r"score_1: got '1', wanted a number"),
        ({**SUMMARIES, "info": {"post": "a"}}, r"info: missing key 'title', got 'post'"),
        ({**SUMMARIES, "info": {}}, r"info: missing key 'title', got none"),
        ({**SUMMARIES, "info": None}, r"info: got None, wanted an object"),
        ({**SUMMARIES, "choice": None}, r"choice: got None, wanted 0 or 1"),
        ({**SUMMARIES, "summaries": SUMMARIES["summaries"] * 2}, r"summaries: got 4 summaries"),
        ({**ARENA, "winner": "model_c"}, r"winner: got 'model_c', wanted one of model_a, model_b"),
        ({**ARENA, "winner": ["tie"]}, r"winner: got \['tie'\], wanted one of"),
        ({**ARENA, "turn": 0}, r"turn: got 0, wanted a whole number above 0"),
        ({**ARENA, "conversation_a": "why"}, r"conversation_a: got 'why', wanted a list of mess"),
        ({**ARENA, "conversation_b": talk("why")}, r"conversation_b: .*got role 'user'"),
        ({**NECTAR, "prompt": "why"}, r"prompt: got 'why', wanted a string that begins with"),
        ({**NECTAR, "answers": [{"answer": "a", "rank": None}] * 2}, r"answers\[0\].rank: got nu"),
        ({**NECTAR, "answers": NECTAR["answers"][:1]}, r"answers: .*list of two or more objects"),
    ]
    where = [(record, f"data.jsonl:1: {message}") for record, message in cases]
    assert_refused(lambda record: read(tmp_path, record), where, DataError)


def test_unpaired_labels_rate_one_reply(tmp_path: Path) -> None:
    good, bad = {"prompt": "why", "completion": "because", "label": True}, talk("why", "no")
    rated: dict[str, Any] = {"kind": RecordKind.rating, "attributes": ["good"]}
    rows: list[dict[str, Any]] = [
        good,
        {"messages": bad, "label": False},
        {**good, "prompt": talk("why"), "completion": talk("", "so")[1:], "label": 0.5},
        {**good, "label": None},
    ]
    file = read(tmp_path, *rows, **rated)
    assert (file.format, file.counts["no_label"]) == ("unpaired", 1)
    assert [rating.labels for rating in file.records] == [(1.0,), (0.0,), (0.5,)]
    assert [prompt_of(rating.response) for rating in file.records] == [talk("why")] * 3
    assert [reply_of(rating.response) for rating in file.records] == ["because", "no", "so"]
    cases = [
        ({**good, "label": "yes"}, r":1: label: got 'yes', wanted a number"),
        ({**good, "completion": None}, r":1: completion: got None, wanted a string"),
        ({"messages": talk("why"), "completion": "so", "label": True}, r":1: messages: .*'user'"),
    ]
    assert_refused(lambda record: read(tmp_path, record, **rated), cases, DataError)


def test_fulfilment_of_a_principle_rates_a_reply_by_it(tmp_path: Path) -> None:
    """The columns, and their spelling, are those of the card of nvidia/HelpSteer3."""
    row: dict[str, Any] = {
        "domain": "stem",
        "language": "english",
        "context": talk("why"),
        "response": "because",
        "principle": "clarity",
        "fulfilment": "Yes",
    }
    rated: dict[str, Any] = {"kind": RecordKind.rating, "attributes": ["fulfilment"]}
    file = read(tmp_path, row, {**row, "principle": "brevity", "fulfilment": "No"}, **rated)
    assert file.format == "helpsteer3_principle"
    assert [rating.labels for rating in file.records] == [(1.0,), (0.0,)]
    assert [principle_of(rating.response) for rating in file.records] == ["clarity", "brevity"]
    assert [rating.source for rating in file.records] == ["stem"] * 2
    assert [reply_of(rating.response) for rating in file.records] == ["because"] * 2
    cases = [
        ({**row, "fulfilment": True}, r":1: fulfilment: got True, wanted Yes or No"),
        ({**row, "fulfilment": "Maybe"}, r":1: fulfilment: got 'Maybe', wanted Yes or No"),
    ]
    assert_refused(lambda record: read(tmp_path, record, **rated), cases, DataError)
