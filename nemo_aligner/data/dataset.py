"""Tokenized records, ready to be packed; whatever is dropped or altered on the way is counted.

To the reasons of ``reading.py`` these are added, and a record whose text the contract refuses is
malformed:

================  ===============================================================================
``overlong``      dropped: a sequence is longer than ``seq_length`` and the rule is ``drop`` (a
                  comparison goes as a whole; with ``error`` it is a DataError with file:line)
``same_tokens``   dropped: chosen and rejected differ as texts and not as tokens
``truncated``     kept: ``truncate_left`` cut a sequence of it
``duplicates``    kept: the same record, token for token and label for label, came before
``all_tied``      kept, as the objective learns from ties: no completion is better than another
``some_tied``     kept: some of three or more completions are tied
================  ===============================================================================
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from nemo_aligner.batch import LabelColumns, Records, common_prefix
from nemo_aligner.config.common import Overlong, RecordKind
from nemo_aligner.data.labels import far_labels
from nemo_aligner.data.length_baseline import longer_chosen
from nemo_aligner.data.malformed import MalformedRule, check_malformed
from nemo_aligner.data.overlap import first_prompts
from nemo_aligner.data.reading import RecordFile
from nemo_aligner.data.records import Comparison, MalformedRecord, Origin, Record
from nemo_aligner.data.report import FileReport
from nemo_aligner.errors import DataError
from nemo_aligner.text.contract import (
    EncodedText,
    NoTemplateError,
    OverlongError,
    ScoringContract,
)
from nemo_aligner.text.tokenizer import Tokenizer

_RECORDS_AT_ONCE = 1024
# The token ids of a record's texts, unless the contract refuses one of them.
_Tokenized: TypeAlias = list[list[int]] | MalformedRecord


@dataclass(frozen=True)
class TokenizedDataset:
    """N records of one kind with S sequences, as token ids.

    Attributes:
        kind: what a record is.
        name: what logs call it.
        sequences: S of them, in record order; lists, or ``[L]`` int32 tensors.
        records: which sequences each record owns, and its labels.
        origins: file and line of every record.
        reply_lengths: ``[S]`` int64 tokens of every reply, before any cut.
        sources: where every record says it is from; "" where it says nothing.
        reports: what became of every file.
        prefixes: ``[N]`` int64 tokens that all sequences of a record begin with; 0 for a lone one.
    """

    kind: RecordKind
    name: str
    sequences: Sequence[Sequence[int] | Tensor]
    records: Records
    origins: Sequence[Origin]
    reply_lengths: Tensor
    sources: Sequence[str]
    reports: Sequence[FileReport]
    prefixes: Tensor

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Records that were kept of every file, in their order."""
        return tuple(report.counts["kept"] for report in self.reports)

    @property
    def counts(self) -> dict[str, int]:
        """``read``, ``kept``, and every reason that occurred, over all files."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(report.counts)
        return dict(total)

    def record(self, index: int) -> Sequence[Sequence[int] | Tensor]:
        """The sequences of one record."""
        return self.sequences[int(self.records.bounds[index]) : int(self.records.bounds[index + 1])]

    def num_tokens(self, index: int) -> int:
        """Tokens of one record, all its sequences together."""
        return sum(len(sequence) for sequence in self.record(index))

    def first(self, count: int) -> TokenizedDataset:
        """The first ``count`` records, without the reports of files."""
        return replace(self.select(range(min(count, len(self)))), reports=[])

    def draw(self, count: int, seed: int) -> TokenizedDataset:
        """``count`` records, the same ones for the same seed, in their order; all if it has less.

        The reports are still of whole files.
        """
        if count >= len(self):
            return self
        return self.select(sorted(random.Random(seed).sample(range(len(self)), count)))

    def select(self, indices: Sequence[int]) -> TokenizedDataset:
        """The records at ``indices``, numbered anew in that order, with the reports of all."""
        rows, chosen = self.records.rows(indices), self.records.select(indices)
        return replace(
            self,
            sequences=[self.sequences[row] for row in rows.tolist()],
            records=replace(chosen, ids=torch.arange(len(chosen))),
            origins=[self.origins[index] for index in indices],
            reply_lengths=self.reply_lengths[rows],
            sources=[self.sources[index] for index in indices],
            prefixes=self.prefixes[torch.as_tensor(indices, dtype=torch.int64)],
        )

    def centred_on(self, means: Mapping[str, float]) -> TokenizedDataset:
        """The same data, whose label columns of these names are learned minus their means."""
        labels = self.records.labels.centred_on(means)
        return replace(self, records=replace(self.records, labels=labels))

    def table(self) -> str:
        """What became of every file."""
        return "\n".join(report.table() for report in self.reports)


def tokenize_files(
    files: Sequence[RecordFile],
    contract: ScoringContract,
    tokenizer: Tokenizer,
    name: str,
    rule: MalformedRule,
) -> TokenizedDataset:
    """The dataset of files of one kind, and with the same label columns, that were read before.

    Raises:
        DataError: a record is too long and the contract's rule is ``error``, more are malformed
            than ``rule`` allows, or none is left.
    """
    seen: set[tuple[object, ...]] = set()
    parts = [tokenize_file(file, contract, tokenizer, name, seen) for file in files]
    check_malformed([part.report for part in parts], rule)
    kept = [item for part in parts for item in part.kept]
    if not kept:
        counts = [dict(part.report.counts) for part in parts]
        raise DataError(f"{name}: no usable record in {[file.path for file in files]}: {counts}")
    return TokenizedDataset(
        kind=files[0].kind,
        name=name,
        sequences=_as_views([text.token_ids for _, encoded in kept for text in encoded]),
        records=as_records([record for record, _ in kept], files[0].columns),
        origins=[record.origin for record, _ in kept],
        reply_lengths=torch.cat([part.report.reply_lengths for part in parts]),
        sources=[record.source for record, _ in kept],
        reports=[part.report for part in parts],
        prefixes=torch.cat([part.prefixes for part in parts]),
    )


def prefixes_of(records: Sequence[Sequence[Sequence[int] | Tensor]]) -> Tensor:
    """``[N]`` int64 tokens that all sequences of every record begin with; 0 for a lone one."""
    prefixes = [
        min((common_prefix(first, other) for other in others), default=0)
        for first, *others in records
    ]
    return torch.tensor(prefixes, dtype=torch.int64)


def as_records(records: Sequence[Record], columns: Sequence[str]) -> Records:
    """What owns the rewards of all their texts, with labels that are not centred."""
    return Records.of(
        range(len(records)),
        [len(record.texts) for record in records],
        label_columns(records, columns),
        torch.tensor([rank for record in records for rank in record.ranks], dtype=torch.int64),
    )


def label_columns(records: Sequence[Record], columns: Sequence[str]) -> LabelColumns:
    """The labels of ``records`` as ``columns``, not centred, NaN where one is missing."""
    missing = float("nan")
    # Comparisons among ratings have none at all.
    labels = [record.labels or (None,) * len(columns) for record in records]
    rows = [[missing if label is None else label for label in own] for own in labels]
    values = torch.tensor(rows, dtype=torch.float32).view(len(records), len(columns))
    return LabelColumns.of(columns, values)


@dataclass(frozen=True)
class TokenizedFile:
    """The records that are left of one file, and what became of all.

    Attributes:
        kept: the records, with their texts encoded.
        prefixes: as in ``TokenizedDataset``.
    """

    kept: list[tuple[Record, list[EncodedText]]]
    report: FileReport
    prefixes: Tensor


def tokenize_file(
    file: RecordFile,
    contract: ScoringContract,
    tokenizer: Tokenizer,
    name: str,
    seen: set[tuple[object, ...]],
) -> TokenizedFile:
    """Tokenize one file, whatever number of its records is malformed, or left to use.

    ``seen`` are the records of the files before it, and then of this one, too.

    Raises:
        DataError: a record is too long and the contract's rule is ``error``, or there is no chat
            template.
    """
    counts: Counter[str] = Counter(file.counts)
    kept: list[tuple[Record, list[EncodedText]]] = []
    malformed = list(file.malformed)
    for record, ids in _tokenize_all(file.records, contract, tokenizer):
        if isinstance(ids, MalformedRecord):
            malformed.append(ids)
            counts["malformed"] += 1
            continue
        encoded = [_fit(sequence, contract, record.origin) for sequence in ids]
        reason = _why_drop(encoded)
        if reason is not None:
            counts[reason] += 1
            continue
        counts["truncated"] += any(text is not None and text.truncated for text in encoded)
        counts["duplicates"] += _seen_before(record, encoded, seen)
        if isinstance(record, Comparison) and record.has_ties:
            counts["all_tied" if record.is_tied else "some_tied"] += 1
        kept.append((record, [text for text in encoded if text is not None]))
    counts["kept"] = len(kept)
    records = [record for record, _ in kept]
    lengths = [len(text.token_ids) for _, encoded in kept for text in encoded]
    prefixes = prefixes_of([[text.token_ids for text in encoded] for _, encoded in kept])
    labels = label_columns(records, file.columns)
    lengths_of_replies = _reply_lengths(records, contract, tokenizer)
    report = FileReport(
        name=name,
        path=file.path,
        kind=file.kind,
        format=file.format,
        counts={reason: count for reason, count in counts.items() if count or reason == "kept"},
        lengths=torch.tensor(lengths, dtype=torch.int64),
        reply_lengths=lengths_of_replies,
        sources=Counter(record.source for record in records),
        labels=labels,
        longer_chosen=longer_chosen(records, lengths_of_replies.tolist()),
        prefixes=prefixes,
        prompts=first_prompts(records),
        malformed=sorted(malformed, key=lambda record: record.origin.line),
        far_labels=far_labels(labels, [record.origin for record in records]),
    )
    return TokenizedFile(kept, report, prefixes)


def _reply_lengths(
    records: list[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Tensor:
    lengths: list[int] = []
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        block = records[start : start + _RECORDS_AT_ONCE]
        texts = [text for record in block for text in record.texts]
        lengths += contract.count_reply_tokens(tokenizer, texts)
    return torch.tensor(lengths, dtype=torch.int64)


def _tokenize_all(
    records: list[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[tuple[Record, _Tokenized]]:
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        block = records[start : start + _RECORDS_AT_ONCE]
        yield from zip(block, _tokenize(block, contract, tokenizer), strict=True)


def _tokenize(
    block: list[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> list[_Tokenized]:
    try:
        ids = contract.tokenize(tokenizer, [text for record in block for text in record.texts])
    except DataError:
        # Once more, one by one, to see which records it is.
        return [_tokenize_alone(record, contract, tokenizer) for record in block]
    rest = iter(ids)
    return [[next(rest) for _ in record.texts] for record in block]


def _tokenize_alone(record: Record, contract: ScoringContract, tokenizer: Tokenizer) -> _Tokenized:
    try:
        return contract.tokenize(tokenizer, record.texts)
    except NoTemplateError as error:
        # It is no fault of this record.
        raise DataError(f"{record.origin}: {error}") from error
    except DataError as error:
        return MalformedRecord(record.origin, str(error))


def _fit(token_ids: list[int], contract: ScoringContract, origin: Origin) -> EncodedText | None:
    try:
        return contract.fit(token_ids)
    except OverlongError as error:
        if contract.overlong == Overlong.error.value:
            raise DataError(f"{origin}: {error} (model.data.overlong is 'error')") from error
        return None


def _why_drop(encoded: list[EncodedText | None]) -> str | None:
    if any(text is None for text in encoded):
        return "overlong"
    return "same_tokens" if are_same_tokens(encoded) else None


def are_same_tokens(encoded: Sequence[EncodedText | None]) -> bool:
    """Whether all of several completions are one, token for token."""
    first, *others = (None if text is None else text.token_ids for text in encoded)
    return bool(others) and all(other == first for other in others)


def _seen_before(
    record: Record, encoded: list[EncodedText | None], seen: set[tuple[object, ...]]
) -> bool:
    key = (
        hash((record.labels, record.ranks)),
        *(hash(tuple(text.token_ids)) for text in encoded if text is not None),
    )
    if key in seen:
        return True
    seen.add(key)
    return False


def _as_views(sequences: list[list[int]]) -> list[Tensor]:
    """The sequences as slices of one tensor: a list of ints costs ten times the memory."""
    lengths = [len(sequence) for sequence in sequences]
    flat = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
    return list(flat.split(lengths))
