"""Formats of ranked replies: NeMo RL, HelpSteer, UltraFeedback, QA-Feedback, PandaLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Text
from nemo_aligner.data.formats.base import (
    LABEL_MARGIN,
    Format,
    WantedLabels,
    has,
    rank_samples,
    read_conversation,
    read_label,
    read_objects,
    read_pair_labels,
    read_source,
    read_string,
    split_turns,
)
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.utils.errors import DataError

# NeMo RL's ``PreferenceDataset``: a context, and completions with ranks.
#
# A lower rank is better (NVIDIA-NeMo/RL, docs/guides/rm.md, "Datasets"). NeMo RL trains on two
# completions. Here there may be more, and equal ranks are a tie.


def _parse_nemo_rl_preference(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    completions = read_objects(value, "completions", "rank", "completion")
    texts = [
        read_conversation(
            value["context"], item["completion"], f"completions[{number}].completion", "context"
        )
        for number, item in enumerate(completions)
    ]
    ranks = [
        _read_rank(item["rank"], f"completions[{number}].rank")
        for number, item in enumerate(completions)
    ]
    return rank_samples(texts, ranks, origin, read_pair_labels(value, columns))


def _read_rank(rank: object, name: str) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise DataError(f"{name}: got {rank!r:.60}, wanted a whole number")
    return rank


NEMO_RL_PREFERENCE = Format(
    name="nemo_rl_preference",
    kind=RecordKind.comparison,
    matches=has("context", "completions"),
    wanted="'context' and 'completions', two or more objects with 'rank' and 'completion'",
    parse=_parse_nemo_rl_preference,
    sample=(
        {
            "context": [{"role": "user", "content": "2+2?"}],
            "completions": [
                {"rank": 0, "completion": [{"role": "assistant", "content": "4"}]},
                {"rank": 1, "completion": [{"role": "assistant", "content": "5"}]},
                {"rank": 1, "completion": [{"role": "assistant", "content": "3"}]},
            ],
        },
    ),
)


# HelpSteer2-Preference: two responses to a prompt, and by how much the second is better.
#
# Wang et al. 2024, arXiv:2410.01257. ``preference_strength`` is from -3 (response 1 is much better)
# to 3 (response 2 is much better; see the card of nvidia/HelpSteer2). A prompt may have several
# turns (``split_turns``).


def _parse_helpsteer2_preference(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    prompt = split_turns(value["prompt"])
    texts = [read_conversation(prompt, value[key], key) for key in ("response_1", "response_2")]
    return ranked_by_strength(texts, "preference_strength", value, origin, columns)


HELPSTEER2_PREFERENCE = Format(
    name="helpsteer2_preference",
    kind=RecordKind.comparison,
    matches=has("prompt", "response_1", "response_2", "preference_strength"),
    wanted="'prompt', 'response_1', 'response_2' and 'preference_strength', from -3 to 3",
    parse=_parse_helpsteer2_preference,
    sample=({"prompt": "2+2?", "response_1": "5", "response_2": "4", "preference_strength": 3},),
)


# HelpSteer3-Preference: two responses to a context, and by how much the second is better.
#
# Wang et al. 2025, arXiv:2505.11475. ``overall_preference`` is from -3 (response 1 is much better)
# to 3 (response 2 is much better; see the card of nvidia/HelpSteer3), as NeMo RL reads it, too.
# ``domain`` is the source.


def _parse_helpsteer3(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    texts = [
        read_conversation(value["context"], value[key], key, "context")
        for key in ("response1", "response2")
    ]
    record = ranked_by_strength(texts, "overall_preference", value, origin, columns)
    return replace(record, source=read_source(value.get("domain")))


HELPSTEER3 = Format(
    name="helpsteer3",
    kind=RecordKind.comparison,
    matches=has("context", "response1", "response2", "overall_preference"),
    wanted="'context', 'response1', 'response2' and 'overall_preference', from -3 to 3",
    parse=_parse_helpsteer3,
    sample=(
        {
            "domain": "stem",
            "context": [{"role": "user", "content": "2+2?"}],
            "response1": "4",
            "response2": "5",
            "overall_preference": -2,
        },
    ),
)


_STRONGEST = 3


def ranked_by_strength(
    texts: Sequence[Text], key: str, value: dict[str, Any], origin: Origin, columns: WantedLabels
) -> Comparison:
    """Compare two samples by the field ``key``, which says by how much the second is better.

    The field is a number from -3 (the first is much better) to 3 (the second is much better); 0 is
    a tie. Its absolute value becomes the label ``label_margin``, unless the record has a field of
    this name.
    """
    strength = value[key]
    is_number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not is_number or not -_STRONGEST <= strength <= _STRONGEST:
        raise DataError(
            f"{key}: got {strength!r:.60}, wanted a number from -{_STRONGEST} (the first response "
            f"is much better) to {_STRONGEST} (the second is); 0 is a tie"
        )
    labels = read_pair_labels({LABEL_MARGIN: abs(strength), **value}, columns)
    return rank_samples(texts, (strength, -strength), origin, labels)


# UltraFeedback: an instruction, and completions with scores.
#
# Cui et al. 2023, arXiv:2310.01377. Completions are ranked by ``fine-grained_score``, the mean of
# the ratings of four aspects, if all completions have it, else by ``overall_score``. The latter is
# less reliable: the first version of the data has 10 for many completions that were scored 1
# (OpenBMB/UltraFeedback, "Update"). Equal scores are a tie.

_SCORES = ("fine-grained_score", "overall_score")


def _parse_ultrafeedback(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    completions = read_objects(value, "completions", "response")
    texts = [
        read_conversation(
            value["instruction"], item["response"], f"completions[{n}].response", "instruction"
        )
        for n, item in enumerate(completions)
    ]
    scores = _read_scores(completions)
    # Derive ``label_margin`` only for pairs: more than two completions have several margins.
    margin = {LABEL_MARGIN: abs(scores[0] - scores[1])} if len(scores) == 2 else {}
    labels = read_pair_labels({**margin, **value}, columns)
    return rank_samples(texts, [-score for score in scores], origin, labels)


def _read_scores(completions: list[dict[str, Any]]) -> list[float]:
    for key in _SCORES:
        scores = [
            read_label(item.get(key), f"completions[{number}].{key}", WantedLabels())
            for number, item in enumerate(completions)
        ]
        present = [score for score in scores if score is not None]
        if len(present) == len(scores):
            return present
    raise DataError(
        f"completions: wanted a number in all of them, as {' or as '.join(_SCORES)}; some have none"
    )


ULTRAFEEDBACK = Format(
    name="ultrafeedback",
    kind=RecordKind.comparison,
    matches=has("instruction", "completions"),
    wanted="'instruction' and 'completions', two or more objects with 'response' and a score, "
    "'fine-grained_score' or 'overall_score'",
    parse=_parse_ultrafeedback,
    sample=(
        {
            "instruction": "2+2?",
            "completions": [
                {"response": "5", "fine-grained_score": 1.5, "overall_score": 2.0},
                {"response": "4", "fine-grained_score": 4.75, "overall_score": 8.5},
                {"response": "Four.", "fine-grained_score": 4.75, "overall_score": 8.0},
            ],
        },
    ),
)


# A prompt and its responses, such as samples of a policy that a teacher has rewarded: without
# ``ranks`` all responses are tied.


def _parse_responses(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    responses, ranks = value["responses"], value.get("ranks")
    if not isinstance(responses, list) or len(responses) < 2:
        raise DataError(f"responses: got {responses!r:.60}, wanted a list of two or more responses")
    if ranks is None:
        ranks = [0] * len(responses)
    if not isinstance(ranks, list) or len(ranks) != len(responses):
        raise DataError(
            f"ranks: got {ranks!r:.60}, wanted a list of {len(responses)} whole numbers, one for "
            "each response"
        )
    texts = [
        read_conversation(value["prompt"], response, f"responses[{number}]")
        for number, response in enumerate(responses)
    ]
    ranks = [_read_rank(rank, f"ranks[{number}]") for number, rank in enumerate(ranks)]
    return rank_samples(texts, ranks, origin, read_pair_labels(value, columns))


RESPONSES = Format(
    name="responses",
    kind=RecordKind.comparison,
    matches=has("prompt", "responses"),
    wanted="'prompt' and 'responses', two or more; 'ranks', a list of whole numbers, if known",
    parse=_parse_responses,
    sample=({"prompt": "2+2?", "responses": ["5", "4", "3"], "ranks": [1, 0, 1]},),
)


# QA-Feedback: four answers to a question, and a preference for each pair of the answers.
#
# Wu et al. 2023, arXiv:2306.01693. ``preference`` has six labels, for answers 1 and 2, 1 and 3, 1
# and 4, 2 and 3, 2 and 4, 3 and 4: 1 if the first is preferred, 2 if the second is, 0 for neither
# (allenai/FineGrainedRLHF, tasks/qa_feedback/data/README.md). Answers are ranked by their number of
# wins minus losses. In the published ``dev_feedback.json`` this agrees with all preferences, but
# not with every "neither": the labels of 22 of its 500 questions do not fit any ranking. The
# passages from which the answers were written are put before the question.

_ANSWERS = tuple(f"prediction {number}" for number in range(1, 5))
_PAIRS = tuple(combinations(range(len(_ANSWERS)), 2))


def _parse_qa_feedback(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    passages = _read_passages(value.get("passages", []))
    prompt = "\n\n".join([*passages, read_string(value, "question")])
    texts = [read_conversation(prompt, read_string(value, key), key) for key in _ANSWERS]
    labels = read_pair_labels(value, columns)
    return rank_samples(texts, _count_net_losses(value["preference"]), origin, labels)


def _read_passages(passages: object) -> list[str]:
    """Read passages, each a list of a title and sentences; return one text for each passage."""
    if not isinstance(passages, list) or not all(
        isinstance(passage, list) and passage and all(isinstance(part, str) for part in passage)
        for passage in passages
    ):
        raise DataError(f"passages: got {passages!r:.60}, wanted lists of a title and sentences")
    return [f"{title}\n{' '.join(sentences)}" for title, *sentences in passages]


def _count_net_losses(preference: object) -> list[int]:
    if (
        not isinstance(preference, list)
        or len(preference) != len(_PAIRS)
        or any(isinstance(label, bool) or label not in (0, 1, 2) for label in preference)
    ):
        raise DataError(
            f"preference: got {preference!r:.60}, wanted {len(_PAIRS)} labels, each 0, 1 or 2"
        )
    losses = [0] * len(_ANSWERS)
    for (first, second), label in zip(_PAIRS, preference, strict=True):
        if label:
            winner, loser = (first, second) if label == 1 else (second, first)
            losses[winner] -= 1
            losses[loser] += 1
    return losses


QA_FEEDBACK = Format(
    name="qa_feedback",
    kind=RecordKind.comparison,
    matches=has("question", *_ANSWERS, "preference"),
    wanted=f"'question', {', '.join(map(repr, _ANSWERS))} and 'preference', six labels",
    parse=_parse_qa_feedback,
    sample=(
        {
            "question": "2+2?",
            "passages": [["Sums", "Two and two are four."]],
            "prediction 1": "5",
            "prediction 2": "4",
            "prediction 3": "Four.",
            "prediction 4": "3",
            "preference": [2, 2, 1, 0, 1, 1],
        },
    ),
)


# PandaLM's test set: two responses to an instruction, judged by three annotators.
#
# Wang et al. 2023, arXiv:2306.05087. An annotator's label is 1 or 2, the better response, or 0 for
# a tie (WeOpenML/PandaLM, README, "Test data"). The majority decides; three different labels are a
# tie. The input is appended to the instruction.

_RESPONSES = ("response1", "response2")
_ANNOTATORS = ("annotator1", "annotator2", "annotator3")
# The vote of each label: 1 if the second response is better, -1 if the first is, 0 for a tie.
_VOTES = {0: 0, 1: -1, 2: 1}


def _parse_pandalm(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    parts = [read_string(value, key) for key in ("instruction", "input") if key in value]
    prompt = "\n\n".join(part for part in parts if part.strip())
    texts = [read_conversation(prompt, read_string(value, key), key) for key in _RESPONSES]
    # The median of three votes is the vote of the majority, or 0 if all three differ.
    vote = median(_read_vote(value, key) for key in _ANNOTATORS)
    return rank_samples(texts, (vote, -vote), origin, read_pair_labels(value, columns))


def _read_vote(value: dict[str, Any], key: str) -> int:
    label = value[key]
    if isinstance(label, bool) or not isinstance(label, int) or label not in _VOTES:
        raise DataError(
            f"{key}: got {label!r:.60}, wanted 1 or 2, the better response, or 0 for a tie"
        )
    return _VOTES[label]


PANDALM = Format(
    name="pandalm",
    kind=RecordKind.comparison,
    matches=has("instruction", *_RESPONSES, *_ANNOTATORS),
    wanted="'instruction', 'response1', 'response2', and 0, 1 or 2 of "
    f"{', '.join(map(repr, _ANNOTATORS))}",
    parse=_parse_pandalm,
    sample=(
        {
            "instruction": "Add the numbers.",
            "input": "2, 2",
            "response1": "5",
            "response2": "4",
            "annotator1": 2,
            "annotator2": 2,
            "annotator3": 0,
        },
    ),
)
