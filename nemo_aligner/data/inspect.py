"""Preference data as training will see it, without a model: tables, and records in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.dataset import label_columns, tokenize_files
from nemo_aligner.data.overlap import check_overlap, first_prompts
from nemo_aligner.data.reading import RecordFile, read_records
from nemo_aligner.data.records import Comparison, Record
from nemo_aligner.data.report import FileReport
from nemo_aligner.data.split import check_names
from nemo_aligner.errors import DataError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.messages import Text, prompt_of, reply_of
from nemo_aligner.text.tokenizer import Tokenizer

# A tokenizer, and the contract that it is used by.
TextRules = tuple[Tokenizer, ScoringContract]


@dataclass(frozen=True)
class Inspection:
    """How files are looked at; without ``rules`` lengths are characters.

    ``show`` is how many records of a file are printed in full, their special tokens between
    ``marks``. The others are as ``read_records`` takes them; the contract of a regression model
    names the attributes itself.
    """

    rules: TextRules | None = None
    show: int = 2
    format: str = "auto"
    attributes: Sequence[str] = ()
    loss_mask_val: float | None = -100.0
    marks: tuple[str, str] = ("[", "]")


def inspect_files(files: Sequence[str], train: Sequence[str], how: Inspection) -> Iterator[str]:
    """A table of each file, those of ``train`` first; ``files`` are compared with them.

    Raises:
        ConfigError: an attribute has no name.
        DataError: a file cannot be read.
    """
    check_names(how.attributes)
    training = [_report_on(path, "train", how)[1] for path in train]
    for report in training:
        yield report.table()
    for path in files:
        name = "train" if path in train else "file"
        file, report = _report_on(path, name, how)
        if training:
            overlap = check_overlap(report, training, allowed=True)
            report = replace(report, prompts_in_training=overlap)
        yield report.table()
        for record in file.records[: how.show]:
            yield render_record(record, how)


def _report_on(path: str, name: str, how: Inspection) -> tuple[RecordFile, FileReport]:
    attributes, rules = how.attributes, how.rules
    if rules is not None and rules[1].record_kind is RecordKind.rating:
        attributes = rules[1].attributes
    file = read_records(path, None, how.format, attributes, how.loss_mask_val)
    if rules is None:
        return file, report_in_characters(file, name)
    tokenizer, contract = rules
    return file, tokenize_files([file], contract, tokenizer, name).reports[0]


def report_in_characters(file: RecordFile, name: str) -> FileReport:
    """What can be told without a tokenizer."""
    texts = [text for record in file.records for text in record.texts]
    replies = torch.tensor([len(reply_of(text)) for text in texts])
    prompts = [sum(len(turn["content"]) for turn in prompt_of(text)) for text in texts]
    return FileReport(
        name=name,
        path=file.path,
        kind=file.kind,
        format=file.format,
        counts=file.counts,
        lengths=replies + torch.tensor(prompts),
        reply_lengths=replies,
        sources=Counter(record.source for record in file.records),
        labels=label_columns(file.records, file.columns),
        prompts=first_prompts(file.records),
        unit="characters",
    )


def render_record(record: Record, how: Inspection) -> str:
    """A record exactly as it is tokenized or, without rules, as it is read."""
    lines = [f"\n{record.origin}" + (f" ({record.source})" if record.source else "")]
    if isinstance(record, Comparison):
        names: tuple[str, ...] = ("chosen", "rejected")
    else:
        labels = ("none" if label is None else f"{label:g}" for label in record.labels)
        names = (f"labels {' '.join(labels)}" if record.labels else "rated",)
    for name, text in zip(names, record.texts, strict=True):
        lines += _text_lines(name, text, how)
    return "\n".join(lines)


def _text_lines(name: str, text: Text, how: Inspection) -> list[str]:
    if how.rules is None:
        turns = [text] if isinstance(text, str) else [f"{t['role']}: {t['content']}" for t in text]
        return [f"-- {name}", *turns]
    tokenizer, contract = how.rules
    try:
        encoded = contract.encode(tokenizer, text)
    except DataError as error:
        return [f"-- {name}: not used: {error}"]
    cut = ", cut on the left" if encoded.truncated else ""
    return [
        f"-- {name}: {len(encoded.token_ids)} tokens{cut}",
        mark_specials(encoded.token_ids, tokenizer, how.marks),
    ]


def mark_specials(token_ids: Sequence[int], tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """The text of the tokens, special ones set apart; the last one is where the reward is read."""
    left, right = marks
    parts: list[str] = []
    plain: list[int] = []
    for token_id in token_ids:
        if token_id not in tokenizer.special_ids:
            plain.append(token_id)
            continue
        parts += [
            tokenizer.decode(plain) if plain else "",
            left,
            tokenizer.decode([token_id]),
            right,
        ]
        plain = []
    text = "".join(parts) + (tokenizer.decode(plain) if plain else "")
    last = tokenizer.decode(token_ids[-1:])
    return f"{text}\n   scored at the last token: {token_ids[-1]} {last!r}"
