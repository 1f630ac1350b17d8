"""Raw text with a number or null for each attribute, as NeMo-Aligner has it."""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import checked, read_label
from nemo_aligner.data.records import Origin, Rating
from nemo_aligner.errors import DataError


def _parse_rated_text(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Rating:
    given = values[0]["label"]
    given = given if isinstance(given, list) else [given]
    if wanted.names and len(given) != len(wanted.names):
        raise DataError(
            f"label: got {len(given)} numbers, wanted {len(wanted.names)}, one for each of "
            f"{', '.join(wanted.names)}"
        )
    named = zip([f"label of {name}" for name in wanted.names], given, strict=False)
    labels = tuple(read_label(value, name, wanted) for name, value in named)
    return Rating(checked(values[0]["text"], "text"), labels, origin)


RATED_TEXT = Format(
    name="rated_text",
    kind=RecordKind.rating,
    matches=has("text", "label"),
    wanted="'text' and 'label'",
    parse=_parse_rated_text,
    sample=({"text": "User: 2+2?\nAssistant: 4", "label": [4, 0]},),
)
