"""Pairs that are read exactly as TRL's RewardTrainer does (``model.data.format=trl``).

The records have the fields of ``chat_pairs`` and ``text_pairs``, but strings are read differently:
prompt and reply are joined to one raw text without a chat template, and the scoring contract ends
it with EOS (``build_contract``). Lists of messages become a conversation, as in other formats (TRL
1.16, ``RewardTrainer._prepare_dataset``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import TRL_FORMAT
from nemo_aligner.contract.messages import Text
from nemo_aligner.data.formats.base import Format, WantedLabels, check_text, has
from nemo_aligner.data.formats.pairs import read_margin_labels
from nemo_aligner.data.records import PAIR_COLUMNS, Comparison, Origin, normalize_spelling
from nemo_aligner.utils.errors import DataError


def _parse_trl(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Comparison:
    value = values[0]
    chosen, rejected = (_join(value.get("prompt"), value[key], key) for key in PAIR_COLUMNS)
    labels = read_margin_labels(value, columns)
    pair = Comparison.of_pair(chosen, rejected, origin, labels=labels)
    if isinstance(value.get("prompt"), str):
        return replace(pair, known_prompt=normalize_spelling(value["prompt"]))
    return pair


def _join(prompt: Any, reply: Any, key: str) -> Text:
    """Join prompt and reply to a raw text or a conversation, as TRL does.

    ``prompt`` is None if the reply contains it. ``key`` names the reply's field, for errors.
    """
    if prompt is None and isinstance(reply, str | list):
        return cast(Text, check_text(reply, key))
    if isinstance(prompt, str) and isinstance(reply, str):
        return cast(Text, check_text(prompt + reply, key))
    if isinstance(prompt, list) and isinstance(reply, list):
        return cast(Text, check_text([*prompt, *reply], key))
    parts = [part for part in (prompt, reply) if part is not None]
    kinds = " and ".join(type(part).__name__ for part in parts)
    raise DataError(
        f"{key}: got prompt and reply as {kinds}, wanted two texts or two lists of messages"
    )


TRL = Format(
    name=TRL_FORMAT,
    kind=RecordKind.comparison,
    matches=has(*PAIR_COLUMNS),
    wanted="'chosen' and 'rejected', and 'prompt' if they do not have it in them: all of them "
    "texts, or lists of messages",
    parse=_parse_trl,
    sample=({"prompt": "2+2=", "chosen": "4", "rejected": "5"},),
)
