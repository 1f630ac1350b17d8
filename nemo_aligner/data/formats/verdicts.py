"""Formats of published data sets with verdicts on replies: SHP, WebGPT, Chatbot Arena and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Messages, Text
from nemo_aligner.data.formats.base import (
    LABEL_MARGIN,
    Format,
    WantedLabels,
    check_text,
    has,
    rank_samples,
    read_conversation,
    read_label,
    read_objects,
    read_pair_labels,
    read_source,
    read_string,
)
from nemo_aligner.data.formats.pairs import turns_of
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.utils.errors import DataError, shown


def _read_choice(value: dict[str, Any], key: str) -> int:
    """Read the field ``key``, which must be 0 or 1 and says which reply is better."""
    choice = value[key]
    if isinstance(choice, bool) or choice not in (0, 1):
        raise DataError(f"{key}: got {shown(choice)}, wanted 0 or 1")
    return int(choice)


def _build_pair(
    texts: Sequence[Text],
    better: int,
    value: dict[str, Any],
    origin: Origin,
    columns: WantedLabels,
) -> Comparison:
    """Build a pair from two samples; ``better`` is the index of the better one, 0 or 1."""
    labels = read_pair_labels(value, columns)
    pair = Comparison.of_pair(texts[better], texts[1 - better], origin, labels=labels)
    return replace(pair, positions=(better, 1 - better))


# PKU-SafeRLHF: two responses, which are compared for helpfulness and for safety.
#
# Ji et al. 2024, arXiv:2406.15513, and the card of PKU-Alignment/PKU-SafeRLHF. The reward model
# learns ``better_response_id``; ``safer_response_id``, for a cost model, is not read.

_PKU = ("response_0", "response_1")


def _parse_pku_saferlhf(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    texts = [read_conversation(value["prompt"], value[key], key) for key in _PKU]
    better = _read_choice(value, "better_response_id")
    record = _build_pair(texts, better, value, origin, columns)
    return replace(record, source=read_source(value.get("prompt_source")))


PKU_SAFERLHF = Format(
    name="pku_saferlhf",
    kind=RecordKind.comparison,
    matches=has("prompt", *_PKU, "better_response_id"),
    wanted="'prompt', 'response_0', 'response_1' and 'better_response_id', 0 or 1",
    parse=_parse_pku_saferlhf,
    sample=(
        {
            "prompt": "2+2?",
            "response_0": "5",
            "response_1": "4",
            "better_response_id": 1,
            "safer_response_id": 0,
        },
    ),
)


# SHP: a post on Reddit and two comments on it.
#
# Ethayarajh et al. 2022, "Understanding dataset difficulty with V-usable information", and the card
# of stanfordnlp/SHP: ``history`` is the post, and ``labels`` is 1 if comment A is preferred, else
# 0. ``domain`` is the source.

_SHP = ("human_ref_A", "human_ref_B")


def _parse_shp(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Comparison:
    value = values[0]
    post = read_string(value, "history")
    texts = [read_conversation(post, read_string(value, key), key, "history") for key in _SHP]
    record = _build_pair(texts, 1 - _read_choice(value, "labels"), value, origin, columns)
    return replace(record, source=read_source(value.get("domain")))


SHP = Format(
    name="shp",
    kind=RecordKind.comparison,
    matches=has("history", *_SHP, "labels"),
    wanted="'history', 'human_ref_A', 'human_ref_B' and 'labels', 1 if A is preferred or 0",
    parse=_parse_shp,
    sample=(
        {
            "domain": "askscience_train",
            "history": "2+2?",
            "human_ref_A": "4",
            "human_ref_B": "5",
            "labels": 1,
        },
    ),
)


# WebGPT comparisons: two answers to a question, with scores from -1 to 1.
#
# Nakano et al. 2021, arXiv:2112.09332, and the card of openai/webgpt_comparisons. The prompt is
# only the question; the quotes from which an answer was written are not read.

_ANSWERS = ("answer_0", "answer_1")
_SCORES = ("score_0", "score_1")


def _parse_webgpt(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    question = value["question"]
    text = question.get("full_text") if isinstance(question, dict) else None
    if not isinstance(text, str):
        raise DataError(f"question: got {shown(question)}, wanted an object with a full_text")
    texts = [
        read_conversation(text, read_string(value, key), key, "question.full_text")
        for key in _ANSWERS
    ]
    scores = []
    for key in _SCORES:
        score = read_label(value[key], key, WantedLabels())
        if score is None:
            raise DataError(f"{key}: got null, wanted a number")
        scores.append(score)
    labels = read_pair_labels({LABEL_MARGIN: abs(scores[0] - scores[1]), **value}, columns)
    return rank_samples(texts, [-score for score in scores], origin, labels)


WEBGPT = Format(
    name="webgpt_comparisons",
    kind=RecordKind.comparison,
    matches=has("question", *_ANSWERS, *_SCORES),
    wanted="'question' with 'full_text', 'answer_0', 'score_0', 'answer_1' and 'score_1'",
    parse=_parse_webgpt,
    sample=(
        {
            "question": {"dataset": "eli5", "id": "1", "full_text": "2+2?"},
            "answer_0": "4",
            "score_0": 0.5,
            "answer_1": "5",
            "score_1": -0.5,
        },
    ),
)


# Summarize-from-feedback: two summaries of a post or article.
#
# Stiennon et al. 2020, arXiv:2009.01325; the comparisons of openai/summarize_from_feedback. The
# prompt has the form of TRL's copy of the data (trl-lib/tldr-preference), which replaces the blank
# lines of a post by line ends.


def _read_post(info: Any) -> str:
    if not isinstance(info, dict):
        raise DataError(f"info: got {shown(info)}, wanted an object")
    is_article = info.get("post") is None
    try:
        title = read_string(info, "title")
        body = read_string(info, "article" if is_article else "post").replace("\n\n", "\n")
        if is_article:
            return f"TITLE: {title}\n\n{body}\n\nTL;DR:"
        subreddit = read_string(info, "subreddit")
        return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {body}\n\nTL;DR:"
    except DataError as error:
        raise DataError(f"info: {error}") from error


def _parse_summaries(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    post = _read_post(value["info"])
    summaries = read_objects(value, "summaries", "text")
    if len(summaries) != 2:
        raise DataError(f"summaries: got {len(summaries)} summaries, wanted two")
    texts = [
        read_conversation(post, summary["text"], f"summaries[{number}].text", "info")
        for number, summary in enumerate(summaries)
    ]
    return _build_pair(texts, _read_choice(value, "choice"), value, origin, columns)


SUMMARIZE_FROM_FEEDBACK = Format(
    name="summarize_from_feedback",
    kind=RecordKind.comparison,
    matches=has("info", "summaries", "choice"),
    wanted="'info' with 'title' and 'post' or 'article', 'summaries', two objects with 'text', and "
    "'choice', 0 or 1",
    parse=_parse_summaries,
    sample=(
        {
            "info": {
                "subreddit": "math",
                "title": "Sums",
                "post": "I add 2 and 2.",
                "article": None,
            },
            "summaries": [
                {"text": "I subtract.", "policy": "a"},
                {"text": "I add.", "policy": "b"},
            ],
            "choice": 1,
        },
    ),
)


# Chatbot Arena, and the human judgments of MT-bench: two conversations with the same user.
#
# Zheng et al. 2023, arXiv:2306.05685; lmsys/chatbot_arena_conversations, its successors of
# lmarena-ai, and lmsys/mt_bench_human_judgments. ``turn`` is the number of turns that were judged;
# in MT-bench 1 or 2.

_CONVERSATIONS = ("conversation_a", "conversation_b")
# The vote of each verdict: 1 if the second conversation is better, -1 if the first is, 0 for a tie.
_WINNERS = {
    "model_a": -1,
    "model_b": 1,
    "tie": 0,
    "tie (bothbad)": 0,
    "tie (both bad)": 0,
    "both_bad": 0,
    "bothbad": 0,
}


def _parse_arena(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Comparison:
    value = values[0]
    turns = value.get("turn")
    if turns is not None and (isinstance(turns, bool) or not isinstance(turns, int) or turns < 1):
        raise DataError(f"turn: got {shown(turns)}, wanted a whole number above 0")
    texts: list[Text] = [
        _take_turns(check_text(value[key], key), turns, key) for key in _CONVERSATIONS
    ]
    winner = value["winner"]
    if not isinstance(winner, str) or winner not in _WINNERS:
        raise DataError(f"winner: got {shown(winner)}, wanted one of {', '.join(_WINNERS)}")
    vote = _WINNERS[winner]
    return rank_samples(texts, (vote, -vote), origin, read_pair_labels(value, columns))


def _take_turns(conversation: Text, turns: int | None, key: str) -> Messages:
    """Cut a conversation after its reply number ``turns``, counted from 1; None cuts nothing."""
    if not isinstance(conversation, list):
        raise DataError(f"{key}: got {shown(conversation)}, wanted a list of messages")
    replies = [n for n, turn in enumerate(conversation, 1) if turn["role"] == "assistant"]
    return conversation if turns is None else conversation[: replies[:turns][-1]]


CHATBOT_ARENA = Format(
    name="chatbot_arena",
    kind=RecordKind.comparison,
    matches=has(*_CONVERSATIONS, "winner"),
    wanted="'conversation_a', 'conversation_b', lists of messages, and 'winner'",
    parse=_parse_arena,
    sample=(
        {
            "winner": "model_b",
            "conversation_a": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "5"},
            ],
            "conversation_b": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4"},
            ],
            "turn": 1,
        },
    ),
)


# Nectar: up to seven answers to a prompt in the form of HH-RLHF, ranked by GPT-4.
#
# Zhu et al. 2023, "Starling-7B", and the card of berkeley-nest/Nectar. A lower rank is better. The
# prompt ends with "\n\nAssistant: ".


def _parse_nectar(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    prompt = turns_of(read_string(value, "prompt"), "prompt")
    if prompt[-1] == {"role": "assistant", "content": ""}:
        prompt = prompt[:-1]
    answers = read_objects(value, "answers", "answer", "rank")
    texts = [
        read_conversation(prompt, answer["answer"], f"answers[{number}].answer")
        for number, answer in enumerate(answers)
    ]
    ranks = []
    for number, answer in enumerate(answers):
        rank = read_label(answer["rank"], f"answers[{number}].rank", WantedLabels())
        if rank is None:
            raise DataError(f"answers[{number}].rank: got null, wanted a number")
        ranks.append(rank)
    record = rank_samples(texts, ranks, origin, read_pair_labels(value, columns))
    source = value.get("source")
    first = source[0] if isinstance(source, list) and source else source
    return replace(record, source=read_source(first))


NECTAR = Format(
    name="nectar",
    kind=RecordKind.comparison,
    matches=has("prompt", "answers"),
    wanted="'prompt', in the form of HH, and 'answers', two or more objects with 'answer' and "
    "'rank'",
    parse=_parse_nectar,
    sample=(
        {
            "prompt": "\n\nHuman: 2+2?\n\nAssistant: ",
            "answers": [
                {"answer": "5", "model": "a", "rank": 2.0},
                {"answer": "4", "model": "b", "rank": 1.0},
            ],
        },
    ),
)
