"""Pairs as TRL's RewardTrainer reads them, which only ``model.data.format=trl`` asks for.

The records are those of ``chat_pairs`` and ``text_pairs``. Strings are read in another way: prompt
and reply are joined to one raw text, which no chat template sees, and the scoring contract ends it
with EOS (``build_contract``). Lists of messages are joined to a conversation, as everywhere (TRL
1.16, ``RewardTrainer._prepare_dataset``).
"""

from __future__ import annotations

from typing import Any, cast

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import TRL_FORMAT
from nemo_aligner.contract.messages import Text
from nemo_aligner.data.formats.base import Format, WantedLabels, checked, has
from nemo_aligner.data.formats.pairs import read_margin_labels
from nemo_aligner.data.records import PAIR_COLUMNS, Comparison, Origin
from nemo_aligner.utils.errors import DataError


def _parse_trl(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Comparison:
    value = values[0]
    chosen, rejected = (_join(value.get("prompt"), value[key], key) for key in PAIR_COLUMNS)
    labels = read_margin_labels(value, wanted)
    return Comparison.of_pair(chosen, rejected, origin, labels=labels)


def _join(prompt: Any, reply: Any, key: str) -> Text:
    """A prompt, None where the reply has it in it, and a reply."""
    if prompt is None and isinstance(reply, str | list):
        return cast(Text, checked(reply, key))
    if isinstance(prompt, str) and isinstance(reply, str):
        return cast(Text, checked(prompt + reply, key))
    if isinstance(prompt, list) and isinstance(reply, list):
        return cast(Text, checked([*prompt, *reply], key))
    kinds = " and ".join(type(each).__name__ for each in (prompt, reply) if each is not None)
    raise DataError(f"{key}: got prompt and reply as {kinds}, wanted two texts or two lists")


TRL = Format(
    name=TRL_FORMAT,
    kind=RecordKind.comparison,
    matches=has(*PAIR_COLUMNS),
    wanted="'chosen' and 'rejected', and 'prompt' if they do not have it in them: all of them "
    "texts, or lists of messages",
    parse=_parse_trl,
    sample=({"prompt": "2+2=", "chosen": "4", "rejected": "5"},),
)
