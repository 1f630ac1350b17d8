"""The public data formats, a file for each kind; found by sniffing the first record, or by name.

docs/data.md shows a record of each.

But for raw text a string prompt is one user turn, and a string reply one assistant turn. A reply
that is a list either begins with an assistant turn and goes on from the prompt, or is the whole
conversation and must then begin with the prompt (contain it, if the prompt is a string); in
``chat_pairs`` ``prompt`` may be left out then. HelpSteer's way to write several turns into one
prompt is known where its data is (``split_turns``). Conversations of any format get the record's
``tools``, a list of objects or its JSON text, ``documents``, where that is a list of objects, and
its ``system`` prompt and ``history`` (``prompts.py``).
Of other keys only ``source``, ``subset`` or ``kind`` is read, the first of them that holds a text
or a number: metrics are also given apart for each.
Label columns of pairs are fields of their names; where a format says by how much a completion is
better, ``label_margin`` is that, unless the record has a field of this name.

``FORMATS`` is the registry; of several that a first record fits, the first is taken. What a record
lacks makes it a malformed one; what becomes of those is decided elsewhere (``clean.py``).
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Conversation, with_tools
from nemo_aligner.data.files import AnyLine, BadLine, Line
from nemo_aligner.data.formats.base import Fields, Format, PairKeys, WantedLabels, read_source
from nemo_aligner.data.formats.pairs import (
    ALPACA_PAIRS,
    CHAT_PAIRS,
    COMPARISON_TEXT,
    HH,
    MS_SWIFT_PAIRS,
    OPENAI_PREFERENCE,
    SHAREGPT_PAIRS,
    TEXT_PAIRS,
    pairs_by,
)
from nemo_aligner.data.formats.prompts import (
    COLUMN_COUNTS,
    advise_prompt_key,
    prompt_like,
    with_prompt_columns,
)
from nemo_aligner.data.formats.rankings import (
    HELPSTEER2_PREFERENCE,
    HELPSTEER3,
    NEMO_RL_PREFERENCE,
    PANDALM,
    QA_FEEDBACK,
    ULTRAFEEDBACK,
)
from nemo_aligner.data.formats.ratings import (
    LABELLED_TURNS,
    MATH_SHEPHERD,
    PRM800K,
    RATED_CHAT,
    RATED_TEXT,
    STEPWISE,
    UNPAIRED,
)
from nemo_aligner.data.formats.trl import TRL
from nemo_aligner.data.formats.verdicts import (
    CHATBOT_ARENA,
    NECTAR,
    PKU_SAFERLHF,
    SHP,
    SUMMARIZE_FROM_FEEDBACK,
    WEBGPT,
)
from nemo_aligner.data.records import Comparison, MalformedRecord, Origin, Rating, Record
from nemo_aligner.utils.errors import ConfigError, DataError

_BAD_LINES_SHOWN = 3
# The most common formats, which an error spells out.
_COMMON = ("chat_pairs", "rated_chat")
# Endings of TRL's columns of tokens, today's and earlier ones.
_TOKEN_IDS = ("ids", "input_ids")

FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        COMPARISON_TEXT,
        HH,
        TEXT_PAIRS,
        CHAT_PAIRS,
        ALPACA_PAIRS,
        SHAREGPT_PAIRS,
        MS_SWIFT_PAIRS,
        NEMO_RL_PREFERENCE,
        OPENAI_PREFERENCE,
        HELPSTEER3,
        HELPSTEER2_PREFERENCE,
        ULTRAFEEDBACK,
        QA_FEEDBACK,
        PANDALM,
        PKU_SAFERLHF,
        SHP,
        WEBGPT,
        SUMMARIZE_FROM_FEEDBACK,
        CHATBOT_ARENA,
        NECTAR,
        RATED_TEXT,
        RATED_CHAT,
        UNPAIRED,
        STEPWISE,
        MATH_SHEPHERD,
        PRM800K,
        LABELLED_TURNS,
    )
}

# Their records fit a format above, too, and are read in another way: only by name.
NAMED_FORMATS: dict[str, Format] = {TRL.name: TRL}


def choose_format(
    fmt: str,
    kind: RecordKind | None,
    lines: Iterable[Line],
    path: str,
    pair_keys: PairKeys | None = None,
    labels: Sequence[str] = (),
) -> Format:
    """The format called ``fmt``, or for ``auto`` the one that the first record of any fits.

    With ``pair_keys`` it is ``chat_pairs`` by these keys. Columns called ``labels`` say nothing of
    a record's format.

    Raises:
        ConfigError: there is no format of that name, or it holds another kind of records, or has
            no keys to name.
        DataError: the file is empty, or no record of it fits a format of this kind.
    """
    if pair_keys is not None:
        return _pairs_by(pair_keys, fmt, kind)
    fitting = [known for known in FORMATS.values() if kind in (None, known.kind)]
    if fmt != "auto":
        named = [known for known in NAMED_FORMATS.values() if kind in (None, known.kind)]
        by_name = {known.name: known for known in (*fitting, *named)}
        if fmt not in by_name:
            names = ", ".join(by_name)
            raise ConfigError(f"model.data.format: got {fmt!r}, wanted auto or one of {names}")
        return by_name[fmt]
    # Not of the first record alone: that may be the malformed one.
    first = None
    for line in lines:
        first = first or line
        value = {key: cell for key, cell in line.value.items() if key not in labels}
        for known in fitting:
            if known.is_certain(line.value) or known.is_certain(value):
                return known
    if first is None:
        raise DataError(f"{path}: the file has no records")
    raise DataError(
        f"{path}:{first.number}: got a record with keys {_keys(first)}{_hint(first, fitting)}"
    )


def format_named(name: str, pair_keys: PairKeys | None) -> Format:
    """The format that ``choose_format`` gave, by its name and with the same ``pair_keys``."""
    return {**FORMATS, **NAMED_FORMATS}[name] if pair_keys is None else pairs_by(pair_keys)


def _pairs_by(keys: PairKeys, fmt: str, kind: RecordKind | None) -> Format:
    by_keys = pairs_by(keys)
    if fmt not in ("auto", by_keys.name):
        raise ConfigError(
            f"model.data.format: got {fmt!r}, wanted auto or {by_keys.name}, whose fields "
            "model.data.prompt_key, chosen_key and rejected_key name"
        )
    if kind not in (None, by_keys.kind):
        raise ConfigError(
            f"model.data.prompt_key: got {keys.prompt!r}, wanted null, like chosen_key and "
            "rejected_key: they name fields of pairs, and the run reads ratings"
        )
    return by_keys


def _hint(line: Line, fitting: Sequence[Format]) -> str:
    """Advice on a record that fits none of the wanted formats."""
    if any({f"chosen_{ids}", f"rejected_{ids}"} <= set(line.value) for ids in _TOKEN_IDS):
        return (
            ". These are token ids of a data set that TRL has tokenized. Pass the texts that it "
            "was made of: the scoring contract says how texts become token ids"
        )
    for known in FORMATS.values():
        if known.is_certain(line.value):
            needs = "regression" if known.kind is RecordKind.rating else "binary_ranking"
            return f". It fits {known.name}, for model.reward_model_type={needs}"
    prompts = prompt_like(line.value)
    if TEXT_PAIRS in fitting and TEXT_PAIRS.matches(line.value) and prompts:
        return (
            f". {advise_prompt_key(prompts[0])}; where 'chosen' and 'rejected' are whole texts, "
            "set --format text_pairs (model.data.format=text_pairs)"
        )
    if COMPARISON_TEXT in fitting and COMPARISON_TEXT.matches(line.value):
        return (
            ". If every two lines are a pair, the text of the chosen reply and that of the "
            "rejected one, set --format comparison_text (model.data.format=comparison_text)"
        )
    misspelt = _find_misspelt(line.value, fitting)
    if misspelt is not None:
        return f"; {misspelt}"
    common = "; ".join(f"{each.wanted} ({each.name})" for each in fitting if each.name in _COMMON)
    others = ", ".join(each.name for each in fitting if each.name not in _COMMON)
    return (
        f"; wanted {common}; or those of {others} (docs/data.md has their keys). Fields of a pair "
        "that have other names: --prompt-key, --chosen-key, --rejected-key, in training "
        "model.data.prompt_key and so on"
    )


def _find_misspelt(value: dict[str, Any], fitting: Sequence[Format]) -> str | None:
    """Suggest keys of ``value`` that may be misspelt ones of a format; None if none are near."""
    found: list[tuple[int, Format, dict[str, str]]] = []
    for known in fitting:
        keys = set(known.sample[0])
        lacking, other = sorted(keys - set(value)), sorted(set(value) - keys)
        near = {key: difflib.get_close_matches(key, other, n=1) for key in lacking}
        names = {key: close[0] for key, close in near.items() if close}
        if names and known.matches({**value, **{key: value[name] for key, name in names.items()}}):
            found.append((len(keys), known, names))
    if not found:
        return None
    # The more keys fit, the less likely it is by chance.
    _, meant, names = max(found, key=lambda each: each[0])
    fields = ", ".join(f"{key!r} for {name!r}" for key, name in names.items())
    return f"did you mean {fields}? {meant.name} wants {meant.wanted}"


def parse_lines(
    chosen: Format,
    lines: Sequence[AnyLine],
    path: str,
    wanted: WantedLabels,
    counts: Counter[str] | None = None,
    unread: Counter[str] | None = None,
) -> Iterator[Record | MalformedRecord]:
    """The records that lines of the format ``chosen`` make, and what is none, in order.

    ``lines`` are of whole records, as those of a file are that ``check_lines_are_whole`` lets pass.
    In ``counts`` are lines with a column that became a part of the prompt (``COLUMN_COUNTS``), in
    ``unread`` those with each column that was not read.
    """
    size = chosen.lines_per_record
    counts = Counter() if counts is None else counts
    unread = Counter() if unread is None else unread
    for start in range(0, len(lines), size):
        group = lines[start : start + size]
        fields = [Fields(line.value if isinstance(line, Line) else {}) for line in group]
        parsed = _parse_records(chosen, group, fields, path, wanted)
        yield from parsed
        if not any(isinstance(record, MalformedRecord) for record in parsed):
            counts.update(COLUMN_COUNTS[name] for name in fields[0].names_in_prompt)
            # Lines of one record share what is said of it once, as its source.
            names_read = set().union(*(line.names_read for line in fields))
            names = (name for line in fields for name in line.unread(wanted.names))
            unread.update(name for name in names if name not in names_read)


def _parse_records(
    chosen: Format,
    group: Sequence[AnyLine],
    fields: Sequence[Fields],
    path: str,
    wanted: WantedLabels,
) -> Sequence[Record | MalformedRecord]:
    for line in group:
        reason = _why_unfit(chosen, line)
        if isinstance(line, BadLine) or reason:
            return [MalformedRecord(Origin(path, line.number), reason)]
    origin, value = Origin(path, group[0].number), fields[0]
    try:
        parsed = chosen.parse([*fields], origin, wanted)
        parts = [parsed] if isinstance(parsed, Comparison | Rating) else parsed
        # A column may be read by the format itself, and is then what the format says.
        by_format = value.names_read.copy()
        records = []
        for part in parts:
            value.names_read = by_format.copy()
            records.append(_with_tools(with_prompt_columns(part, value, wanted.names), value))
    except DataError as error:
        return [MalformedRecord(origin, str(error))]
    return [replace(record, source=record.source or _source(value)) for record in records]


def _with_tools(record: Record, value: Fields) -> Record:
    """A record of conversations with the tools and documents that its fields have."""
    if isinstance(record.texts[0], str):
        return record
    if value.get("chat_template_kwargs"):
        raise DataError(
            "chat_template_kwargs: got some in a record, wanted none: "
            "model.data.chat_template_kwargs applies to all records"
        )
    tools, documents = value.get("tools"), dict.get(value, "documents")
    # A field of this name may be anything; the documents of a chat template are objects.
    is_list = isinstance(documents, list) and all(isinstance(each, dict) for each in documents)
    documents = value["documents"] if is_list and "documents" in value else None
    if not (tools or documents):
        return record
    if any(isinstance(text, Conversation) for text in record.texts):
        raise DataError("tools: got some next to a conversation that has its own, wanted one")
    if isinstance(record, Rating):
        return replace(record, response=with_tools(record.response, tools, documents))
    texts = tuple(with_tools(text, tools, documents) for text in record.texts)
    return replace(record, texts=texts)


# Two objects on one line.
_JOINED = re.compile(r"\}\s*\{")


def check_lines_are_whole(chosen: Format, lines: Iterable[AnyLine], path: str) -> None:
    """Check a format of several lines per record: one line too many would shift all that follow.

    Raises:
        DataError: which lines of the whole file make a record is not known.
    """
    if chosen.lines_per_record == 1:
        return
    bad: list[BadLine] = []
    joined: list[BadLine] = []
    broken: list[BadLine] = []
    last: AnyLine | None = None
    count = 0
    for line in lines:
        count += 1
        if isinstance(line, BadLine):
            bad.append(line)
            if _JOINED.search(line.raw):
                joined.append(line)
            # One line that was broken in two leaves two in a row that are no JSON.
            if isinstance(last, BadLine):
                broken.append(last)
        last = line
    if joined or broken:
        line = (joined or broken)[0]
        raise DataError(
            f"{path}:{line.number}: {line.reason}; this may be several lines in one, or one line "
            f"in several, and then which lines make a record of {chosen.name} is not known"
        )
    if last is not None and count % chosen.lines_per_record:
        also = "".join(f"; line {line.number}: {line.reason}" for line in bad[:_BAD_LINES_SHOWN])
        raise DataError(
            f"{path}:{last.number}: the chosen text on this line has no rejected text after "
            f"it; got an odd number of comparison lines ({count}){also}"
        )


def _why_unfit(chosen: Format, line: AnyLine) -> str:
    """Why the line is none of the format; empty if it is one."""
    if isinstance(line, BadLine):
        return line.reason
    if chosen.matches(line.value):
        return ""
    known_by = [known.name for known in FORMATS.values() if known.is_certain(line.value)]
    # It may be one of this name whose fields have other keys than were asked for.
    others = [name for name in known_by if name != chosen.name]
    if others:
        return (
            f"mixed formats in one file: got a record of {' or '.join(others)} (keys "
            f"{_keys(line)}), wanted {chosen.name}: {chosen.wanted}"
        )
    misspelt = _find_misspelt(line.value, [chosen])
    return f"got keys {_keys(line)}; {misspelt or f'{chosen.name} wants {chosen.wanted}'}"


def _keys(line: Line) -> str:
    return ", ".join(map(repr, line.value)) or "none"


def _source(value: dict[str, Any]) -> str:
    named = (read_source(value.get(key)) for key in ("source", "subset", "kind"))
    return next(filter(None, named), "")
