"""Formats of ranked replies, and of several pairs on a line, for tests of both."""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import (
    Format,
    WantedLabels,
    has,
    read_conversation,
    read_pair_labels,
)
from nemo_aligner.data.records import Comparison, Origin


def parse(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Comparison:
    ranks, replies = zip(*values[0]["ranked"], strict=True)
    texts = tuple(read_conversation(values[0]["question"], reply, "ranked") for reply in replies)
    return Comparison(texts, ranks, origin, labels=read_pair_labels(values[0], columns))


FORMAT = Format(
    name="ranked_replies",
    kind=RecordKind.comparison,
    matches=has("question", "ranked"),
    wanted="'question' and 'ranked', a list of [rank, reply]",
    parse=parse,
    sample=({"question": "2+2?", "ranked": [[0, "4"], [1, "5"]]},),
)


def parse_several(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> list[Comparison]:
    return [
        Comparison.of_pair(*(read_conversation(prompt, text, "pairs") for text in replies), origin)
        for prompt, *replies in values[0]["pairs"]
    ]


SEVERAL = Format(
    name="chat_pairs",
    kind=RecordKind.comparison,
    matches=has("pairs"),
    wanted="'pairs', a list of [prompt, chosen, rejected]",
    parse=parse_several,
    sample=({"pairs": [["2+2?", "4", "5"], ["3+3?", "6", "7"]]},),
)
