"""Prompt, chosen and rejected reply, each a string or a list of messages.

TRL's conversational pairs, UltraFeedback as binarized, Tulu 3's and Skywork's preferences are so,
and under other names what NeMo RL's ``BinaryPreferenceDataset`` reads (NVIDIA-NeMo/RL,
docs/guides/rm.md, "Datasets").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, PairKeys, WantedLabels
from nemo_aligner.data.formats.fields import read_conversation
from nemo_aligner.data.formats.hh import is_hh
from nemo_aligner.data.formats.scored_pairs import read_margin_labels
from nemo_aligner.data.records import Comparison, Origin

_CHAT_PAIRS = "chat_pairs"
_CHAT_SAMPLE = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def pairs_by(keys: PairKeys) -> Format:
    """Pairs whose fields are called by ``keys``."""

    def matches(value: dict[str, Any]) -> bool:
        return {keys.chosen, keys.rejected} <= set(value) and (
            keys.prompt in value or not isinstance(value[keys.chosen], str)
        )

    def parse(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Comparison:
        prompt = values[0].get(keys.prompt)
        chosen, rejected = (
            read_conversation(prompt, values[0][key], key, keys.prompt)
            for key in (keys.chosen, keys.rejected)
        )
        labels = read_margin_labels(values[0], wanted)
        return Comparison.of_pair(chosen, rejected, origin, labels=labels)

    return Format(
        name=_CHAT_PAIRS,
        kind=RecordKind.comparison,
        matches=matches,
        wanted=f"{keys.prompt!r}, {keys.chosen!r} and {keys.rejected!r}, "
        "strings or lists of messages",
        parse=parse,
        sample=({getattr(keys, key): text for key, text in _CHAT_SAMPLE.items()},),
    )


_WITH_USUAL_KEYS = pairs_by(PairKeys())
CHAT_PAIRS = replace(
    _WITH_USUAL_KEYS, matches=lambda value: _WITH_USUAL_KEYS.matches(value) and not is_hh(value)
)
