"""HH-RLHF's writing: ``"\\n\\nHuman: ... \\n\\nAssistant: ..."`` (Bai et al. 2022)."""

from __future__ import annotations

import re
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Messages
from nemo_aligner.data.formats.base import (
    Format,
    WantedLabels,
    checked,
    read_pair_labels,
    read_string,
)
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.utils.errors import DataError

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_hh(value: dict[str, Any]) -> bool:
    """True if a pair's texts are written this way."""
    if not {"chosen", "rejected"} <= set(value):
        return False
    start = value.get("prompt", value["chosen"])
    return isinstance(start, str) and start.startswith("\n\nHuman:")


def _parse(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Comparison:
    prompt = read_string(values[0], "prompt") if "prompt" in values[0] else ""
    chosen, rejected = (
        checked(turns_of(_whole(prompt, read_string(values[0], key), key), key), key)
        for key in ("chosen", "rejected")
    )
    return Comparison.of_pair(chosen, rejected, origin, labels=read_pair_labels(values[0], wanted))


def _whole(prompt: str, text: str, key: str) -> str:
    """Prompt and reply, of which the second field may have both."""
    if text.startswith(prompt):
        return text
    if text.startswith("\n\nHuman:"):
        raise DataError(
            f"{key}: got {text[:40]!r}, a conversation that does not begin with the prompt; "
            "wanted a reply, or the whole conversation"
        )
    return prompt + text


def turns_of(text: str, key: str) -> Messages:
    """The messages of a text in this writing, whoever speaks last.

    Raises:
        DataError: it is in another; ``key`` is the field that it stands in.
    """
    before, *rest = _TURN.split(text)
    if before.strip() or not rest:
        raise DataError(f"{key}: got {text[:40]!r}, wanted a text that begins with '\\n\\nHuman:'")
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(rest[::2], rest[1::2], strict=True)
    ]


HH = Format(
    name="hh",
    kind=RecordKind.comparison,
    matches=is_hh,
    wanted="'chosen' and 'rejected', texts that begin with '\\n\\nHuman:'",
    parse=_parse,
    sample=(
        {
            "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
            "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
        },
    ),
)
