"""Tokenized records, ready to be packed; whatever is dropped or altered on the way is counted.

To the reasons of ``reading.py`` tokens add three:

================  ===============================================================================
``overlong``      dropped: a sequence is longer than ``seq_length`` and the rule is ``drop`` (a
                  comparison goes as a whole; with ``error`` it is a DataError with file:line)
``same_tokens``   dropped: chosen and rejected differ as texts and not as tokens
``truncated``     kept: ``truncate_left`` cut a sequence of it
``duplicates``    kept: the same record, token for token and label for label, came before
================  ===============================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_aligner.batch import LabelColumns, Records, common_prefix
from nemo_aligner.config.common import Overlong, RecordKind
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.data.overlap import first_prompts
from nemo_aligner.data.reading import RecordFile, read_records
from nemo_aligner.data.records import Origin, Record
from nemo_aligner.data.report import FileReport
from nemo_aligner.errors import DataError
from nemo_aligner.objectives.base import Objective
from nemo_aligner.text.contract import EncodedText, OverlongError, ScoringContract
from nemo_aligner.text.tokenizer import Tokenizer

_RECORDS_AT_ONCE = 1024


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
        chosen = self.records.select(range(min(count, len(self))))
        return replace(
            self,
            sequences=self.sequences[: chosen.num_rewards],
            records=chosen,
            origins=self.origins[:count],
            reply_lengths=self.reply_lengths[: chosen.num_rewards],
            sources=self.sources[:count],
            reports=[],
            prefixes=self.prefixes[:count],
        )

    def centred_on(self, means: Mapping[str, float]) -> TokenizedDataset:
        """The same data, whose label columns of these names are learned minus their means."""
        labels = self.records.labels.centred_on(means)
        return replace(self, records=replace(self.records, labels=labels))

    def table(self) -> str:
        """What became of every file."""
        return "\n".join(report.table() for report in self.reports)


def build_dataset(
    paths: Sequence[str],
    contract: ScoringContract,
    tokenizer: Tokenizer,
    config: ModelConfig,
    objective: Objective,
    name: str = "train",
) -> TokenizedDataset:
    """Read and tokenize, by the contract, what ``objective`` learns from in ``paths``, in order.

    Raises:
        DataError: a record is malformed, or none is left; see ``reading.py`` and above.
    """
    is_rating = objective.record_kind is RecordKind.rating
    files = [
        read_records(
            path,
            objective.record_kind,
            config.data.format,
            objective.columns if is_rating else (),
            config.regression.loss_mask_val,
            () if is_rating else objective.columns,
        )
        for path in paths
    ]
    return tokenize_files(files, contract, tokenizer, name)


def tokenize_files(
    files: Sequence[RecordFile],
    contract: ScoringContract,
    tokenizer: Tokenizer,
    name: str,
) -> TokenizedDataset:
    """The dataset of files of one kind, and with the same label columns, that were read before.

    Raises:
        DataError: a record is too long and the rule is ``error``, or none is left.
    """
    seen: set[tuple[object, ...]] = set()
    parts = [_tokenize_file(file, contract, tokenizer, name, seen) for file in files]
    kept = [item for part in parts for item in part.kept]
    if not kept:
        counts = [dict(part.report.counts) for part in parts]
        raise DataError(f"{name}: no usable record in {[file.path for file in files]}: {counts}")
    sizes = [len(encoded) for _, encoded in kept]
    return TokenizedDataset(
        kind=files[0].kind,
        name=name,
        sequences=_as_views([text.token_ids for _, encoded in kept for text in encoded]),
        records=Records.of(
            range(len(kept)),
            sizes,
            label_columns([record for record, _ in kept], files[0].columns),
        ),
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


def label_columns(records: Sequence[Record], columns: Sequence[str]) -> LabelColumns:
    """The labels of ``records`` as ``columns``, not centred, NaN where one is missing."""
    missing = float("nan")
    rows = [[missing if label is None else label for label in record.labels] for record in records]
    values = torch.tensor(rows, dtype=torch.float32).view(len(records), len(columns))
    return LabelColumns.of(columns, values)


@dataclass(frozen=True)
class _FilePart:
    kept: list[tuple[Record, list[EncodedText]]]
    report: FileReport
    prefixes: Tensor


def _tokenize_file(
    file: RecordFile,
    contract: ScoringContract,
    tokenizer: Tokenizer,
    name: str,
    seen: set[tuple[object, ...]],
) -> _FilePart:
    counts: Counter[str] = Counter(file.counts)
    kept: list[tuple[Record, list[EncodedText]]] = []
    for record, encoded in _encode(file.records, contract, tokenizer):
        reason = _why_drop(encoded)
        if reason is not None:
            counts[reason] += 1
            continue
        counts["truncated"] += any(text is not None and text.truncated for text in encoded)
        counts["duplicates"] += _seen_before(record, encoded, seen)
        kept.append((record, [text for text in encoded if text is not None]))
    counts["kept"] = len(kept)
    records = [record for record, _ in kept]
    lengths = [len(text.token_ids) for _, encoded in kept for text in encoded]
    prefixes = prefixes_of([[text.token_ids for text in encoded] for _, encoded in kept])
    report = FileReport(
        name=name,
        path=file.path,
        kind=file.kind,
        format=file.format,
        counts={reason: count for reason, count in counts.items() if count or reason == "kept"},
        lengths=torch.tensor(lengths, dtype=torch.int64),
        reply_lengths=_reply_lengths(records, contract, tokenizer),
        sources=Counter(record.source for record in records),
        labels=label_columns(records, file.columns),
        prefixes=prefixes,
        prompts=first_prompts(records),
    )
    return _FilePart(kept, report, prefixes)


def _reply_lengths(
    records: list[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Tensor:
    lengths: list[int] = []
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        block = records[start : start + _RECORDS_AT_ONCE]
        texts = [text for record in block for text in record.texts]
        lengths += contract.count_reply_tokens(tokenizer, texts)
    return torch.tensor(lengths, dtype=torch.int64)


def _encode(
    records: list[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[tuple[Record, list[EncodedText | None]]]:
    """Every record with its texts encoded; None for a text that the rule ``drop`` refuses."""
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        block = records[start : start + _RECORDS_AT_ONCE]
        for record, ids in zip(block, _tokenize(block, contract, tokenizer), strict=True):
            yield record, [_fit(sequence, contract, record.origin) for sequence in ids]


def _tokenize(
    block: list[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[list[list[int]]]:
    try:
        ids = contract.tokenize(tokenizer, [text for record in block for text in record.texts])
    except DataError:
        # Once more, one by one, to say which record it is.
        for record in block:
            try:
                contract.tokenize(tokenizer, record.texts)
            except DataError as error:
                raise DataError(f"{record.origin}: {error}") from error
        raise
    rest = iter(ids)
    for record in block:
        yield [next(rest) for _ in record.texts]


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
    ids = [text.token_ids for text in encoded if text is not None]
    return "same_tokens" if len(ids) == 2 and ids[0] == ids[1] else None


def _seen_before(
    record: Record, encoded: list[EncodedText | None], seen: set[tuple[object, ...]]
) -> bool:
    key = (
        hash(record.labels),
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
