"""Tokenized records, ready to be packed; whatever is dropped or altered on the way is counted.

To the reasons of ``records.py`` tokens add three:

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch import shared_tokens
from nemo_aligner.config.common import Overlong
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.data.overlap import first_prompts
from nemo_aligner.data.records import (
    Comparison,
    Origin,
    Rating,
    Record,
    RecordFile,
    read_records,
)
from nemo_aligner.data.report import FileReport
from nemo_aligner.errors import DataError
from nemo_aligner.text.contract import Encoded, OverlongError, ScoringContract
from nemo_aligner.text.tokenizer import Tokenizer

_KINDS = {"binary_ranking": "comparison", "regression": "rating"}
_SEQUENCES_PER_RECORD = {"comparison": 2, "rating": 1}
_RECORDS_AT_ONCE = 1024


@dataclass(frozen=True)
class TokenizedDataset:
    """N records of one kind, as token ids.

    Attributes:
        kind: ``comparison`` or ``rating``.
        name: what logs call it.
        sequences: flat, in record order: record i owns ``sequences_per_record`` of them from
            ``i * sequences_per_record`` on (chosen, rejected). Lists, or ``[L]`` int32 tensors.
        labels: ``[N, A]`` float32 as in the data, NaN where missing; None for comparisons.
        origins: file and line of every record.
        reply_lengths: ``[N, sequences_per_record]`` int64 tokens of every reply, before any cut.
        sources: where every record says it is from; "" where it says nothing.
        reports: what became of every file.
        shared: ``[N]`` int64 tokens that the two sides of a record begin with; 0 for ratings.
        label_means: A numbers that ``pack_records`` subtracts from the labels; empty for none.
    """

    kind: str
    name: str
    sequences: Sequence[Sequence[int] | Tensor]
    labels: Tensor | None
    origins: Sequence[Origin]
    reply_lengths: Tensor
    sources: Sequence[str]
    reports: Sequence[FileReport]
    shared: Tensor
    label_means: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def counts(self) -> dict[str, int]:
        """``read``, ``kept``, and every reason that occurred, over all files."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(report.counts)
        return dict(total)

    @property
    def sequences_per_record(self) -> int:
        return _SEQUENCES_PER_RECORD[self.kind]

    def record(self, index: int) -> Sequence[Sequence[int] | Tensor]:
        """The sequences of one record."""
        start = index * self.sequences_per_record
        return self.sequences[start : start + self.sequences_per_record]

    def num_tokens(self, index: int) -> int:
        """Tokens of one record, all its sequences together."""
        return sum(len(sequence) for sequence in self.record(index))

    def centred_labels(self, record_ids: Sequence[int]) -> Tensor | None:
        """``[R, A]`` float32 labels minus ``label_means``, NaN where missing."""
        if self.labels is None:
            return None
        labels = self.labels[torch.as_tensor(record_ids, dtype=torch.int64)]
        if not self.label_means:
            return labels
        return (labels.double() - torch.tensor(self.label_means, dtype=torch.float64)).float()

    def mean_labels(self) -> tuple[float, ...]:
        """The mean of every attribute over the labels that are there; NaN where none is."""
        if self.labels is None:
            raise DataError(f"{self.name}: comparisons have no labels")
        return tuple(torch.nanmean(self.labels.double(), dim=0).tolist())

    def table(self) -> str:
        """What became of every file."""
        return "\n".join(report.table() for report in self.reports)


def build_dataset(
    paths: Sequence[str],
    contract: ScoringContract,
    tokenizer: Tokenizer,
    config: ModelConfig,
    name: str = "train",
) -> TokenizedDataset:
    """Read and tokenize the records of ``paths`` by the contract, in order.

    Raises:
        DataError: a record is malformed, or none is left; see ``records.py`` and above.
    """
    kind = _KINDS[contract.reward_model_type]
    attributes = contract.attributes if kind == "rating" else ()
    files = [
        read_records(path, kind, config.data.format, attributes, config.regression.loss_mask_val)
        for path in paths
    ]
    return tokenize_files(files, contract, tokenizer, name)


def tokenize_files(
    files: Sequence[RecordFile],
    contract: ScoringContract,
    tokenizer: Tokenizer,
    name: str,
) -> TokenizedDataset:
    """The dataset of files of one kind that were read before.

    Raises:
        DataError: a record is too long and the rule is ``error``, or none is left.
    """
    seen: set[tuple[object, ...]] = set()
    parts = [_tokenize_file(file, contract, tokenizer, name, seen) for file in files]
    kept = [item for part in parts for item in part.kept]
    if not kept:
        counts = [dict(part.report.counts) for part in parts]
        raise DataError(f"{name}: no usable record in {[file.path for file in files]}: {counts}")
    return TokenizedDataset(
        kind=files[0].kind,
        name=name,
        sequences=_as_views([text.token_ids for _, encoded in kept for text in encoded]),
        labels=_labels([record for record, _ in kept]),
        origins=[record.origin for record, _ in kept],
        reply_lengths=torch.cat([part.report.reply_lengths for part in parts]),
        sources=[record.source for record, _ in kept],
        reports=[part.report for part in parts],
        shared=torch.cat([part.shared for part in parts]),
    )


def shared_by_record(records: Sequence[Sequence[Sequence[int] | Tensor]]) -> Tensor:
    """``[N]`` int64 tokens that the two sequences of every record begin with; 0 for a lone one."""
    shared = [shared_tokens(*record) if len(record) == 2 else 0 for record in records]
    return torch.tensor(shared, dtype=torch.int64)


@dataclass(frozen=True)
class _FilePart:
    kept: list[tuple[Record, list[Encoded]]]
    report: FileReport
    shared: Tensor


def _tokenize_file(
    file: RecordFile,
    contract: ScoringContract,
    tokenizer: Tokenizer,
    name: str,
    seen: set[tuple[object, ...]],
) -> _FilePart:
    counts: Counter[str] = Counter(file.counts)
    kept: list[tuple[Record, list[Encoded]]] = []
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
    shared = shared_by_record([[text.token_ids for text in encoded] for _, encoded in kept])
    report = FileReport(
        name=name,
        path=file.path,
        kind=file.kind,
        format=file.format,
        counts={reason: count for reason, count in counts.items() if count or reason == "kept"},
        lengths=torch.tensor(lengths, dtype=torch.int64),
        reply_lengths=_reply_lengths(records, file.kind, contract, tokenizer),
        sources=Counter(record.source for record in records),
        labels=_labels(records),
        shared=shared if file.kind == "comparison" else None,
        prompts=first_prompts(records),
    )
    return _FilePart(kept, report, shared)


def _reply_lengths(
    records: list[Record], kind: str, contract: ScoringContract, tokenizer: Tokenizer
) -> Tensor:
    lengths: list[int] = []
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        block = records[start : start + _RECORDS_AT_ONCE]
        texts = [text for record in block for text in record.texts]
        lengths += contract.count_reply_tokens(tokenizer, texts)
    return torch.tensor(lengths, dtype=torch.int64).view(-1, _SEQUENCES_PER_RECORD[kind])


def _encode(
    records: list[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[tuple[Record, list[Encoded | None]]]:
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


def _fit(token_ids: list[int], contract: ScoringContract, origin: Origin) -> Encoded | None:
    try:
        return contract.fit(token_ids)
    except OverlongError as error:
        if contract.overlong == Overlong.error.value:
            raise DataError(f"{origin}: {error} (model.data.overlong is 'error')") from error
        return None


def _why_drop(encoded: list[Encoded | None]) -> str | None:
    if any(text is None for text in encoded):
        return "overlong"
    ids = [text.token_ids for text in encoded if text is not None]
    return "same_tokens" if len(ids) == 2 and ids[0] == ids[1] else None


def _seen_before(
    record: Record, encoded: list[Encoded | None], seen: set[tuple[object, ...]]
) -> bool:
    labels = record.labels if isinstance(record, Rating) else ()
    key = (
        hash(labels),
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


def _labels(records: list[Record]) -> Tensor | None:
    if not records or isinstance(records[0], Comparison):
        return None
    missing = float("nan")
    return torch.tensor(
        [
            [missing if label is None else label for label in record.labels]
            for record in records
            if isinstance(record, Rating)
        ],
        dtype=torch.float32,
    )
