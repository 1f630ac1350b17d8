"""QA-Feedback: four answers to a question, each compared with every other.

Wu et al. 2023, arXiv:2306.01693. ``preference`` has six labels, of answers 1 and 2, 1 and 3, 1 and
4, 2 and 3, 2 and 4, 3 and 4: 1 where the first is preferred, 2 where the second is, 0 for neither
(allenai/FineGrainedRLHF, tasks/qa_feedback/data/README.md). Answers are ranked by how many they are
preferred to, less how many are preferred to them. That keeps every preference of the published
``dev_feedback.json``; "neither" is not always kept, for of its 500 questions 22 have labels that no
ranking has. The passages that the answers were written from stand before the question.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import read_conversation, read_pair_labels, read_string
from nemo_aligner.data.formats.ranking import ranked
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.errors import DataError

_ANSWERS = tuple(f"prediction {number}" for number in range(1, 5))
_PAIRS = tuple(combinations(range(len(_ANSWERS)), 2))


def _parse(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Comparison:
    value = values[0]
    prompt = "\n\n".join([*_passages(value.get("passages", [])), read_string(value, "question")])
    texts = [read_conversation(prompt, read_string(value, key), key) for key in _ANSWERS]
    labels = read_pair_labels(value, wanted)
    return ranked(texts, _net_losses(value["preference"]), origin, labels)


def _passages(passages: object) -> list[str]:
    """Every passage is its title and its sentences."""
    if not isinstance(passages, list) or not all(
        isinstance(passage, list) and passage and all(isinstance(part, str) for part in passage)
        for passage in passages
    ):
        raise DataError(f"passages: got {passages!r:.60}, wanted lists of a title and sentences")
    return [f"{title}\n{' '.join(sentences)}" for title, *sentences in passages]


def _net_losses(preference: object) -> list[int]:
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
    parse=_parse,
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
