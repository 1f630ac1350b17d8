"""The public data formats, one file each; found by sniffing the first record, or by name.

=================  ==========  ==================================================================
name               kind        one record
=================  ==========  ==================================================================
comparison_text    comparison  two adjacent lines, ``{"text": prompt + chosen}`` and then
                               ``{"text": prompt + rejected}``: raw text, as NeMo-Aligner has it
hh                 comparison  ``{"chosen", "rejected"}`` in HH-RLHF's writing, ``"\\n\\nHuman:
                               ... \\n\\nAssistant: ..."``; a ``"prompt"`` goes in front of both
chat_pairs         comparison  ``{"prompt", "chosen", "rejected"}``: strings or lists of messages
rated_text         rating      ``{"text", "label"}``: raw text, a number or null per attribute
rated_chat         rating      ``{"prompt", "response", "<attribute>": number or null, ...}``
=================  ==========  ==================================================================

In ``chat_pairs`` and ``rated_chat`` a string prompt is one user turn, and a string reply one
assistant turn. A reply that is a list either begins with an assistant turn and goes on from the
prompt, or is the whole conversation and must then begin with the prompt (contain it, if the prompt
is a string); with whole conversations ``prompt`` may be left out. Of other keys only ``source``,
``subset`` or ``kind`` is read, the first of them that holds a string: metrics are also given apart
for each.

``FORMATS`` is the registry; of several that a first record fits, the first is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats import chat_pairs, comparison_text, hh, rated_chat, rated_text
from nemo_aligner.data.formats.base import Format, WantedLabels
from nemo_aligner.data.records import Origin, Record
from nemo_aligner.data.sources import Line
from nemo_aligner.errors import ConfigError, DataError

FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        comparison_text.FORMAT,
        hh.FORMAT,
        chat_pairs.FORMAT,
        rated_text.FORMAT,
        rated_chat.FORMAT,
    )
}


def choose_format(fmt: str, kind: RecordKind | None, lines: list[Line], path: str) -> Format:
    """The format called ``fmt``, or for ``auto`` the one that the first record fits.

    Raises:
        ConfigError: there is no format of that name, or it holds another kind of records.
        DataError: the file is empty, or its first record fits no format of this kind.
    """
    fitting = [known for known in FORMATS.values() if kind in (None, known.kind)]
    names = ", ".join(known.name for known in fitting)
    if fmt != "auto":
        if fmt not in {known.name for known in fitting}:
            raise ConfigError(f"model.data.format: got {fmt!r}, wanted auto or one of {names}")
        return FORMATS[fmt]
    if not lines:
        raise DataError(f"{path}: the file has no records")
    for known in fitting:
        if known.matches(lines[0].value):
            return known
    keys = ", ".join(map(repr, lines[0].value)) or "none"
    raise DataError(
        f"{path}:{lines[0].number}: got a record with keys {keys}; wanted one of these formats: "
        + "; ".join(f"{known.name}: {known.wanted}" for known in fitting)
    )


def parse_lines(
    chosen: Format, lines: list[Line], path: str, wanted: WantedLabels
) -> Iterator[Record]:
    """The records of a whole file of the format ``chosen``.

    Raises:
        DataError: a record is not of this format; the message says file:line.
    """
    for start in range(0, len(lines), chosen.lines_per_record):
        group = lines[start : start + chosen.lines_per_record]
        for line in group:
            _check(chosen, line, path)
        origin = Origin(path, group[0].number)
        if len(group) < chosen.lines_per_record:
            raise DataError(
                f"{origin}: the chosen text on this line has no rejected text after it; got an "
                f"odd number of comparison lines ({len(lines)})"
            )
        try:
            record = chosen.parse([line.value for line in group], origin, wanted)
        except DataError as error:
            raise DataError(f"{origin}: {error}") from error
        yield replace(record, source=_source(group[0].value))


def _check(chosen: Format, line: Line, path: str) -> None:
    if chosen.matches(line.value):
        return
    others = [known.name for known in FORMATS.values() if known.matches(line.value)]
    keys = ", ".join(map(repr, line.value)) or "none"
    if others:
        raise DataError(
            f"{path}:{line.number}: mixed formats in one file: got a record of "
            f"{' or '.join(others)} (keys {keys}), wanted {chosen.name}: {chosen.wanted}"
        )
    raise DataError(f"{path}:{line.number}: got keys {keys}; {chosen.name} wants {chosen.wanted}")


def _source(value: dict[str, Any]) -> str:
    named = (value.get(key) for key in ("source", "subset", "kind"))
    return next((name for name in named if isinstance(name, str)), "")
