"""The public data formats (docs/formats.md), and how the format of a file is found.

- ``base.py``: ``Format``, and functions that read fields.
- ``pairs.py``: a chosen and a rejected reply; ``trl.py``: pairs that are read exactly as TRL does.
- ``rankings.py``: several replies with ranks, scores or the strength of a preference.
- ``verdicts.py``: published data sets of two or more replies and a verdict.
- ``ratings.py``: a reply with labels, or with labels for each of its turns or steps.
- ``prompts.py``: columns with a part of the prompt, for all formats.
- ``teacher.py``: a teacher's opinion on the replies of a comparison, for all formats.

To add a format, define it in one of these modules and list it in ``FORMATS``. ``choose_format``
takes the first format that recognizes a record of the file, or the format that
``model.data.format`` names, which may be ``package.module:NAME`` of a user's code. ``parse_lines``
turns lines into records. A record without a key that its format needs is malformed, and
``clean.py`` decides what happens to it.

Rules that all formats share:

- Except in raw text, a string prompt is one user turn, and a string reply one assistant turn. A
  reply that is a list may begin with an assistant turn; it then continues the prompt. Otherwise it
  is the whole conversation, which must begin with a prompt that is a list, and contain a prompt
  that is a string. In ``chat_pairs`` a whole conversation needs no ``prompt``.
- Conversations get the record's ``tools`` (a list of objects, or its JSON), ``documents`` (a list
  of objects), and its ``system`` prompt and ``history`` (``prompts.py``).
- Conversations also get the record's ``principle``, a string, by which their replies are rewarded.
- The source of a record is the first of ``source``, ``subset`` and ``kind`` that is a string or a
  number. Metrics are also computed by source.
- A comparison may have the opinion of a teacher, ``teacher_rewards`` or ``chosen_probability``
  (``teacher.py``). No other keys are read.
- A label column of pairs is the field with the name of the column. If a format tells by how much a
  reply is better, this number is the ``label_margin`` of a record without a field of this name.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.data.files import AnyLine, BadLine, Line
from nemo_aligner.data.formats.base import (
    Fields,
    Format,
    OtherKindError,
    PairKeys,
    WantedLabels,
    read_source,
)
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
    advise_prompt,
    every_form,
    prompt_like,
    with_record_columns,
)
from nemo_aligner.data.formats.rankings import (
    HELPSTEER2_PREFERENCE,
    HELPSTEER3,
    NEMO_RL_PREFERENCE,
    PANDALM,
    QA_FEEDBACK,
    RESPONSES,
    ULTRAFEEDBACK,
)
from nemo_aligner.data.formats.ratings import (
    HELPSTEER3_PRINCIPLE,
    LABELLED_TURNS,
    MATH_SHEPHERD,
    PRM800K,
    RATED_CHAT,
    RATED_TEXT,
    STEPWISE,
    UNPAIRED,
)
from nemo_aligner.data.formats.teacher import with_teacher
from nemo_aligner.data.formats.trl import TRL
from nemo_aligner.data.formats.verdicts import (
    CHATBOT_ARENA,
    NECTAR,
    PKU_SAFERLHF,
    SHP,
    SUMMARIZE_FROM_FEEDBACK,
    WEBGPT,
)
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Origin,
    Rating,
    Record,
)
from nemo_aligner.utils.dotted import import_dotted, source_digest
from nemo_aligner.utils.errors import ConfigError, DataError

_SECTION = "model.data."
_BAD_LINES_SHOWN = 3
# The most common formats. An error about an unknown record lists the keys of these formats.
_COMMON = ("chat_pairs", "rated_chat")
# Endings of the names of columns with token ids (``chosen_ids``, ``chosen_input_ids``), which
# current and earlier versions of TRL write.
_TOKEN_IDS = ("ids", "input_ids")

FORMATS: dict[str, Format] = {
    registered.name: registered
    for registered in (
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
        HELPSTEER3_PRINCIPLE,
        RESPONSES,
    )
}

# Formats that are chosen only by name, never by ``auto``: their records also fit a format above,
# which reads them differently.
NAMED_FORMATS: dict[str, Format] = {TRL.name: TRL}


def choose_format(
    fmt: str,
    kind: RecordKind | None,
    lines: Iterable[Line],
    path: str,
    pair_keys: PairKeys | None = None,
    labels: Sequence[str] = (),
    section: str = _SECTION,
) -> Format:
    """Choose the format called ``fmt``, or for ``auto`` the first one that recognizes a record.

    Args:
        kind: kind of records that the format must have; None allows comparisons and ratings.
        lines: lines of the file.
        pair_keys: names of the fields of pairs; if given, the format is ``chat_pairs``.
        labels: label columns. A format also recognizes a record that has its keys, if it certainly
            has the format without these columns.
        section: prefix of the names of settings in errors, as in ``MalformedRule``.

    Raises:
        ConfigError: there is no format called ``fmt`` with records of this ``kind``, or
            ``pair_keys`` do not apply to it.
        DataError: the file has no records, or no format of this ``kind`` recognizes one.
    """
    if pair_keys is not None:
        return _choose_pairs(pair_keys, fmt, kind, section)
    fitting = [candidate for candidate in FORMATS.values() if kind in (None, candidate.kind)]
    if ":" in fmt:
        return _choose_custom(fmt, kind, section)
    if fmt != "auto":
        named = [
            candidate for candidate in NAMED_FORMATS.values() if kind in (None, candidate.kind)
        ]
        by_name = {candidate.name: candidate for candidate in (*fitting, *named)}
        if fmt not in by_name:
            names = ", ".join(by_name)
            raise ConfigError(
                f"{section}format: got {fmt!r}, wanted auto, one of {names}, or package.module:NAME"
            )
        return by_name[fmt]
    return _recognize_format(fitting, lines, path, labels)


def _recognize_format(
    fitting: Sequence[Format], lines: Iterable[Line], path: str, labels: Sequence[str]
) -> Format:
    """Return the first of the formats ``fitting`` that recognizes a record; see ``choose_format``.

    ``text_pairs`` is returned only if no record of the file has a column that may hold the prompt,
    because the prompt would not be read.
    """
    first, with_prompt, chosen = None, None, None
    # Try all records, because the first one may be malformed.
    for line in lines:
        first = first or line
        value = {key: cell for key, cell in line.value.items() if key not in labels}
        if chosen is None:
            certain = (
                fmt.is_certain(line.value) or (fmt.matches(line.value) and fmt.is_certain(value))
                for fmt in fitting
            )
            chosen = next(itertools.compress(fitting, certain), None)
        if chosen is not None and chosen is not TEXT_PAIRS:
            return chosen
        if TEXT_PAIRS.matches(value) and not TEXT_PAIRS.is_certain(value):
            with_prompt = with_prompt or line
        if chosen is not None and with_prompt is not None:
            break
    if chosen is not None and with_prompt is None:
        return chosen
    if first is None:
        raise DataError(f"{path}: the file has no records")
    unknown = with_prompt if chosen is not None and with_prompt is not None else first
    summary = f"{path}:{unknown.number}: got a record with keys {_list_keys(unknown)}"
    other_format = next((fmt for fmt in FORMATS.values() if fmt.is_certain(unknown.value)), None)
    if (
        other_format is not None
        and other_format not in fitting
        and not _has_token_ids(unknown.value)
    ):
        summary += f". It fits {other_format.name}"
        reads = None if other_format.reads is None else other_format.reads.value
        raise OtherKindError(f"{summary}: {_advise_training(other_format)}", summary, reads)
    raise DataError(f"{summary}{_advise_unknown(unknown, fitting)}")


def format_named(name: str, pair_keys: PairKeys | None) -> Format:
    """Return the format called ``name``; if ``pair_keys`` are given, pairs with these field names.

    Worker processes get the name of the format that ``choose_format`` chose, and call this
    function, because a ``Format`` has functions that cannot be pickled.
    """
    if ":" in name:
        return _import_format(name)
    return {**FORMATS, **NAMED_FORMATS}[name] if pair_keys is None else pairs_by(pair_keys)


def custom_format_source(name: str) -> dict[str, str]:
    """Return ``{"format_source": digest}`` of a user's code; empty for a format of this package.

    Token caches made with an earlier version of that code are then rebuilt.
    """
    if ":" not in name:
        return {}
    _import_format(name)
    return {"format_source": source_digest(name)}


def _choose_custom(name: str, kind: RecordKind | None, section: str) -> Format:
    """Return the format of a user's code; ConfigError if its records are not of this ``kind``."""
    custom = _import_format(name, section)
    if kind not in (None, custom.kind):
        needs = "regression" if custom.kind is RecordKind.rating else "binary_ranking"
        raise ConfigError(
            f"{section}format: {name} reads records of the kind {custom.kind.value}, which are for "
            f"model.reward_model_type={needs}"
        )
    return custom


def _import_format(name: str, section: str = _SECTION) -> Format:
    """Import the ``Format`` that ``package.module:NAME`` names.

    The name replaces the format's own, so that worker processes can import it, too.
    """
    key = f"{section}format"
    custom = import_dotted(name, key, "wanted package.module:NAME of a format")
    if not isinstance(custom, Format):
        raise ConfigError(
            f"{key}: {name}: got {type(custom).__name__}, wanted a Format "
            "(nemo_aligner.data.formats.base)"
        )
    return replace(custom, name=name)


def _choose_pairs(keys: PairKeys, fmt: str, kind: RecordKind | None, section: str) -> Format:
    by_keys = pairs_by(keys)
    if fmt not in ("auto", by_keys.name):
        raise ConfigError(
            f"{section}format: got {fmt!r}, wanted auto or {by_keys.name}, because "
            f"{section}prompt_key, chosen_key and rejected_key apply only to that format"
        )
    if kind not in (None, by_keys.kind):
        raise ConfigError(
            f"{section}prompt_key: got {keys.prompt!r}, wanted null, like chosen_key and "
            "rejected_key: they name fields of pairs, and the run reads ratings"
        )
    return by_keys


def _has_token_ids(value: dict[str, Any]) -> bool:
    return any({f"chosen_{ids}", f"rejected_{ids}"} <= set(value) for ids in _TOKEN_IDS)


def _advise_training(fitting: Format) -> str:
    """Write which settings train a model on records of the format ``fitting``."""
    if fitting.kind is RecordKind.comparison:
        return "to train on it, set model.reward_model_type=binary_ranking"
    advice = (
        "to train on it, set model.reward_model_type=regression and the names of its labels, "
        "model.regression.attributes=[...]"
    )
    if fitting.reads is None:
        return advice
    labelled = "turns" if fitting.reads is ScoredPosition.turns else "steps"
    return (
        f"{advice}. It has labels of {labelled}, so also set "
        f"model.head.reads={fitting.reads.value}, and model.objective=binary_cross_entropy if each "
        "is right or wrong"
    )


def _advise_unknown(line: Line, fitting: Sequence[Format]) -> str:
    """Write the advice in the error about a record that no format recognizes.

    ``fitting`` has the formats that were tried: those of the wanted kind, comparisons or ratings.
    """
    if _has_token_ids(line.value):
        return (
            ". These are token ids of a data set that TRL has tokenized. Pass the texts that it "
            "was made of: the scoring contract determines how texts become token ids"
        )
    prompts = prompt_like(line.value)
    if TEXT_PAIRS in fitting and TEXT_PAIRS.matches(line.value) and prompts:
        return (
            f". {advise_prompt(line.value, prompts[0])}; where 'chosen' and 'rejected' are whole "
            f"texts, set {every_form('format', 'text_pairs')}"
        )
    if COMPARISON_TEXT in fitting and COMPARISON_TEXT.matches(line.value):
        return (
            ". If every two lines are a pair, the text of the chosen reply and that of the "
            f"rejected one, set {every_form('format', 'comparison_text')}"
        )
    misspelt = _find_misspelt(line.value, fitting)
    if misspelt is not None:
        return f"; {misspelt}"
    common = "; ".join(f"{fmt.wanted} ({fmt.name})" for fmt in fitting if fmt.name in _COMMON)
    less_common = ", ".join(fmt.name for fmt in fitting if fmt.name not in _COMMON)
    return (
        f"; wanted {common}; or those of {less_common} (docs/formats.md lists their keys). If the "
        f"prompt of a pair has another name, set {every_form('prompt_key', 'NAME')}; likewise "
        "chosen_key and rejected_key for its replies"
    )


def _find_misspelt(value: dict[str, Any], fitting: Sequence[Format]) -> str | None:
    """Suggest how to correct misspelt keys of the record ``value``.

    Returns:
        The question "did you mean ...?" with the keys of a format in ``fitting`` that the
        corrected record matches; None if there is no such format.
    """
    matches: list[tuple[int, Format, dict[str, str]]] = []
    for candidate in fitting:
        keys = set(candidate.sample[0])
        lacking, extra = sorted(keys - set(value)), sorted(set(value) - keys)
        nearest = {key: _find_nearest(key, extra) for key in lacking}
        names = {key: name for key, name in nearest.items() if name is not None}
        corrected = {**value, **{key: value[name] for key, name in names.items()}}
        # A field is misspelt for at most one key.
        is_distinct = len({*names.values()}) == len(names)
        if names and is_distinct and candidate.matches(corrected):
            matches.append((len(keys), candidate, names))
    if not matches:
        return None
    # Take the format with the most keys, because many keys are less likely to match by chance.
    _, likely, names = max(matches, key=lambda match: match[0])
    fields = ", ".join(f"{key!r} for {name!r}" for key, name in names.items())
    return f"did you mean {fields}? {likely.name} wants {likely.wanted}"


def _find_nearest(key: str, names: Sequence[str]) -> str | None:
    """Return the name that is most like ``key``; None if none is like it, or two equally so."""
    close = difflib.get_close_matches(key, names, n=2)
    ratios = [difflib.SequenceMatcher(None, name, key).ratio() for name in close]
    return close[0] if len({*ratios}) == len(close) > 0 else None


def parse_lines(
    chosen: Format,
    lines: Sequence[AnyLine],
    path: str,
    columns: WantedLabels,
    counts: Counter[str] | None = None,
    unread: Counter[str] | None = None,
) -> Iterator[Record | MalformedRecord]:
    """Yield the records of ``lines``, read by the format ``chosen``, and malformed ones, in order.

    Args:
        lines: lines of complete records (see ``check_lines_are_whole``).
        columns: label columns to read.
        counts: counter of lines with a column that became a part of the prompt, such as ``system``,
            under the key that ``COLUMN_COUNTS`` has for the column.
        unread: counter of lines with a column that was not read, by the name of the column.
    """
    size = chosen.lines_per_record
    counts = Counter() if counts is None else counts
    unread = Counter() if unread is None else unread
    for start in range(0, len(lines), size):
        group = lines[start : start + size]
        fields = [Fields(line.value if isinstance(line, Line) else {}) for line in group]
        parsed = _parse_records(chosen, group, fields, path, columns)
        yield from parsed
        if not any(isinstance(record, MalformedRecord) for record in parsed):
            counts.update(COLUMN_COUNTS[name] for name in fields[0].names_in_prompt)
            # A field that was read from one line of a record counts as read in its other lines.
            names_read = set().union(*(line.names_read for line in fields))
            names = (name for line in fields for name in line.unread(columns.names))
            unread.update(name for name in names if name not in names_read)


def _parse_records(
    chosen: Format,
    group: Sequence[AnyLine],
    fields: Sequence[Fields],
    path: str,
    columns: WantedLabels,
) -> Sequence[Record | MalformedRecord]:
    for line in group:
        reason = _explain_mismatch(chosen, line)
        if isinstance(line, BadLine) or reason:
            return [MalformedRecord(Origin(path, line.number), reason)]
    origin, value = Origin(path, group[0].number), fields[0]
    try:
        parsed = chosen.parse([*fields], origin, columns)
        parts = [parsed] if isinstance(parsed, Comparison | Rating) else parsed
        # Remember which columns the format itself has read: it has put them where they belong, so
        # they must not be added to the prompt a second time.
        by_format = value.names_read.copy()
        records = []
        for part in parts:
            value.names_read = by_format.copy()
            record = with_record_columns(part, value, columns.names)
            records.append(with_teacher(record, value, has_parts=len(parts) > 1))
    except DataError as error:
        return [MalformedRecord(origin, str(error))]
    return [replace(record, source=record.source or _find_source(value)) for record in records]


# Matches the end of one JSON object and the beginning of another on the same line.
_JOINED = re.compile(r"\}\s*\{")


def check_lines_are_whole(chosen: Format, lines: Iterable[AnyLine], path: str) -> None:
    """Check that the lines of a format with several lines per record belong together.

    One line too many or too few would pair the wrong lines in all later records.

    Raises:
        DataError: it is not certain which lines of the file belong to the same record.
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
            # A line break inside a record leaves two adjacent lines that are not JSON. A single bad
            # line takes the place of a good one, so the other lines still belong together.
            if isinstance(last, BadLine):
                broken.append(last)
        last = line
    if joined or broken:
        line = (joined or broken)[0]
        raise DataError(
            f"{path}:{line.number}: {line.reason}. Several lines may have been joined here, or one "
            f"broken, so that it is not certain which lines make a record of {chosen.name}. Fix "
            "this line"
        )
    if last is not None and count % chosen.lines_per_record:
        also = "".join(f"; line {line.number}: {line.reason}" for line in bad[:_BAD_LINES_SHOWN])
        raise DataError(
            f"{path}:{last.number}: the chosen text on this line has no rejected text after "
            f"it; got an odd number of comparison lines ({count}){also}"
        )


def _explain_mismatch(chosen: Format, line: AnyLine) -> str:
    """Explain why ``line`` does not have the format ``chosen``; return "" if it has."""
    if isinstance(line, BadLine):
        return line.reason
    if chosen.matches(line.value):
        return ""
    recognized = [fmt.name for fmt in FORMATS.values() if fmt.is_certain(line.value)]
    # The line may have the usual keys of ``chosen``, while the user set other keys for this format.
    # That is a missing key, not a mixture of formats.
    different = [name for name in recognized if name != chosen.name]
    if different:
        return (
            f"mixed formats in one file: got a record of {' or '.join(different)} (keys "
            f"{_list_keys(line)}), wanted {chosen.name}: {chosen.wanted}"
        )
    misspelt = _find_misspelt(line.value, [chosen])
    return f"got keys {_list_keys(line)}; {misspelt or f'{chosen.name} wants {chosen.wanted}'}"


def _list_keys(line: Line) -> str:
    return ", ".join(map(repr, line.value)) or "none"


def _find_source(value: dict[str, Any]) -> str:
    sources = (read_source(value.get(key)) for key in ("source", "subset", "kind"))
    return next(filter(None, sources), "")
