"""Show preference data as training will see it: a table for each file, and whole records.

``nemo-aligner data inspect`` prints them. No model is needed; a tokenizer is optional.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import (
    Text,
    flatten_message,
    messages_of,
    principle_of,
    prompt_of,
)
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.clean import MOST_LISTED
from nemo_aligner.data.dataset import label_columns, report_on
from nemo_aligner.data.formats.teacher import count_teachers
from nemo_aligner.data.label_summary import LabelSummary, SoftLabelSummary
from nemo_aligner.data.readers import ReaderConfig, RecordFile, parse_file
from nemo_aligner.data.records import (
    Comparison,
    Record,
    label_rows,
    principle_key,
    short_hash,
    text_names,
    verdict_keys,
)
from nemo_aligner.data.report import (
    FileReport,
    FileSummary,
    LengthSummary,
    Prompts,
    check_overlap,
    count_principles,
    far_labels,
    find_contradicted,
    longer_chosen,
    measure_replies,
)
from nemo_aligner.data.split import check_names
from nemo_aligner.data.token_index import ArraysInMemory, IndexRules, make_index
from nemo_aligner.utils.errors import DataError

# All except tab and newline.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

TextRules = tuple[Tokenizer, ScoringContract]
"""A tokenizer, and the contract that determines how samples become its tokens."""


@dataclass(frozen=True)
class Inspection:
    """Options of an inspection.

    Attributes:
        rules: tokenizer and contract; None measures lengths in characters.
        show: number of records of each file to print in full.
        reading: rules by which files are read. If ``rules`` has the contract of a regression model,
            the attributes of the contract take the place of those in ``reading``.
        marks: what to print before and after a special token.
    """

    rules: TextRules | None = None
    show: int = 2
    reading: ReaderConfig = field(default_factory=ReaderConfig)
    marks: tuple[str, str] = ("[", "]")


@dataclass(frozen=True)
class Inspected:
    """A part of the text to print, and ``is_good``: False if the file has unusable records."""

    text: str
    is_good: bool = True


def inspect_files(
    files: Sequence[str], train: Sequence[str], options: Inspection
) -> Iterator[Inspected]:
    """Yield a table for each file, the training files first, and some records of ``files``.

    The tables of ``files`` count the prompts that are also in the training files.

    Raises:
        ConfigError: an attribute has no name, or ``options.reading`` names an unknown format.
    """
    check_names(options.reading.attributes)
    training: list[FileReport] = []
    for number, path in enumerate([*train, *files]):
        is_training = number < len(train)
        name = "train" if path in train else "file"
        try:
            file, report = _report_on(path, name, options)
        except DataError as error:
            yield Inspected(f"{name}: {error}", is_good=False)
            continue
        if is_training:
            training.append(report)
        elif training:
            overlap = check_overlap(report, training, allowed=True)
            report = replace(report, prompts_in_training=overlap)
        is_good = bool(report.counts["kept"]) and not report.malformed
        yield Inspected(report.table(MOST_LISTED, with_zeros=True), is_good)
        if not is_training:
            for record in file.records[: options.show]:
                yield Inspected(_escape_controls(render_record(record, options)))


def _report_on(path: str, name: str, options: Inspection) -> tuple[RecordFile, FileReport]:
    reading, rules = options.reading, options.rules
    if rules is not None and rules[1].record_kind is RecordKind.rating:
        reading = replace(reading, attributes=rules[1].attributes)
    file = parse_file(path, reading)
    if rules is None:
        return file, report_in_characters(file, name)
    tokenizer, contract = rules
    index = make_index(path, IndexRules(reading, contract, tokenizer), ArraysInMemory())
    return file, report_on([index], name)[0]


def report_in_characters(file: RecordFile, name: str) -> FileReport:
    """Build the report on a file without a tokenizer, with lengths in characters.

    ``name`` is the name of the data set in the report.
    """
    texts = [text for record in file.records for text in record.texts]
    replies = measure_replies(texts)
    prompts = [sum(len(flatten_message(turn)) for turn in prompt_of(text)) for text in texts]
    lengths = [*map(sum, zip(replies, prompts, strict=True))]
    labels = label_columns(file.records, file.columns)
    summary = FileSummary(
        path=file.path,
        kind=file.kind,
        format=file.format,
        counts=file.counts,
        lengths=LengthSummary.of(np.array(lengths, dtype=np.int64)),
        reply_lengths=LengthSummary.of(np.array(replies, dtype=np.int64)),
        sources=Counter(record.source for record in file.records),
        labels=LabelSummary.of(labels),
        longer_chosen=longer_chosen(file.records, replies),
        malformed=file.malformed,
        far_labels=far_labels(
            labels, [record.origin for record in file.records for _ in label_rows(record)]
        ),
        unread=file.unread,
        principles=count_principles(
            np.array([principle_key(record) for record in file.records], dtype=np.uint64)
        ),
        soft_labels=SoftLabelSummary.of_records(file.records),
        teachers=count_teachers(file.records),
    )
    prompt_table = Prompts.of(file.path, file.records)
    columns = tuple(file.columns)
    counts = {**file.counts, **_count_repeated(file.records)}
    return FileReport(name, summary, counts, prompt_table, "characters", columns)


def _count_repeated(records: Sequence[Record]) -> dict[str, int]:
    """Count records that occur twice and records with opposite verdicts.

    A token index also counts them, but compares tokens; here texts are compared.
    """
    contents = (
        repr((record.texts, record.ranks, *label_rows(record), *record.teacher_rewards))
        for record in records
    )
    # Compare hashes, because a set of the texts would double the memory.
    different = {short_hash(content.encode(errors="surrogatepass")) for content in contents}
    verdicts = [verdict_keys(record) for record in records]
    keys = np.array([key for record_keys in verdicts for key in record_keys], dtype=np.uint64)
    counts = np.array([*map(len, verdicts)], dtype=np.int64)
    return {
        "duplicates": len(records) - len(different),
        "contradicted": int(find_contradicted(keys, counts, [np.unique(keys)]).sum()),
    }


def _escape_controls(text: str) -> str:
    """Write control characters, which would act on the terminal, as escapes such as ``\\x1b``."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def render_record(record: Record, options: Inspection) -> str:
    """Render a record as the text that is tokenized or, without a tokenizer, as it was read."""
    lines = [f"\n{record.origin}" + (f" ({record.source})" if record.source else "")]
    if isinstance(record, Comparison):
        opinions = [f", teacher's reward {reward:g}" for reward in record.teacher_rewards]
        opinions = opinions or [""] * len(record.texts)
        for name, opinion, text in zip(text_names(record), opinions, record.texts, strict=True):
            lines += _text_lines(f"{name}{opinion}", text, [], options)
        return "\n".join(lines)
    rows = [
        " ".join("none" if label is None else f"{label:g}" for label in row)
        for row in label_rows(record)
    ]
    name = f"labels {', '.join(rows)}" if any(rows) else "rated"
    return "\n".join(lines + _text_lines(name, record.texts[0], rows, options))


def _text_lines(name: str, text: Text, labels: Sequence[str], options: Inspection) -> list[str]:
    """Render a sample as lines of text, with its labels next to the steps that they rate.

    ``labels`` has a label for each step or one for the whole sample, already rendered as text.
    ``name`` is the sample's name in the listing, such as ``chosen``.
    """
    if options.rules is None:
        turns = [f"{turn['role']}: {flatten_message(turn)}" for turn in messages_of(text)]
        principle = principle_of(text)
        turns += [] if principle is None else [f"principle: {principle}"]
        return [f"-- {name}", *([text] if isinstance(text, str) else turns)]
    tokenizer, contract = options.rules
    try:
        encoded = contract.encode(tokenizer, text)
    except DataError as error:
        return [f"-- {name}: not used: {error}"]
    ids, reads = encoded.token_ids, encoded.reads
    cut = ", cut on the left" if encoded.truncated else ""
    lines = [f"-- {name}: {len(ids)} tokens{cut}", mark_specials(ids, tokenizer, options.marks)]
    if reads is None:
        last = tokenizer.decode(ids[-1:])
        return [*lines, f"   scored at the last token: {ids[-1]} {last!r}"]
    # There may be fewer labels than steps: a rating of the whole sample has one. Labels are shown
    # at the last steps, and earlier steps show nothing.
    unlabelled = [""] * (encoded.lost + len(reads) - len(labels))
    endings = [*unlabelled, *(f", label {label}" for label in labels)]
    for number, place in enumerate(reads, encoded.lost):
        token = f"{ids[place]} {tokenizer.decode([ids[place]])!r}"
        lines.append(f"   step {number + 1} scored at token {place + 1}: {token}{endings[number]}")
    return lines


def mark_specials(token_ids: Sequence[int], tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """Decode tokens to text, with ``marks[0]`` before and ``marks[1]`` after each special token."""
    start_mark, end_mark = marks
    parts: list[str] = []
    plain: list[int] = []
    for token_id in token_ids:
        if token_id not in tokenizer.special_ids:
            plain.append(token_id)
            continue
        parts += [
            tokenizer.decode(plain) if plain else "",
            start_mark,
            tokenizer.decode([token_id]),
            end_mark,
        ]
        plain = []
    return "".join(parts) + (tokenizer.decode(plain) if plain else "")
