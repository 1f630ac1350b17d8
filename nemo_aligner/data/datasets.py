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

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from nemo_aligner.config.schema import ModelConfig, Overlong
from nemo_aligner.data.contract import Encoded, OverlongError, ScoringContract
from nemo_aligner.data.records import (
    Comparison,
    Origin,
    Rating,
    Record,
    RecordFile,
    read_records,
)
from nemo_aligner.data.tokenizer import Tokenizer
from nemo_aligner.errors import ConfigError, DataError

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
        counts: ``read``, ``kept``, and every reason that occurred.
        label_means: A numbers that ``pack_records`` subtracts from the labels; empty for none.
    """

    kind: str
    name: str
    sequences: Sequence[Sequence[int] | Tensor]
    labels: Tensor | None
    origins: Sequence[Origin]
    counts: dict[str, int] = field(default_factory=dict)
    label_means: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.origins)

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
        """What was read, dropped and altered, and how long the sequences are."""
        lengths = torch.tensor([len(sequence) for sequence in self.sequences])
        rows = [(name, str(count)) for name, count in self.counts.items()]
        rows.append(("tokens", str(int(lengths.sum()))))
        rows.append(
            (
                "sequence length",
                f"mean {lengths.float().mean():.0f}, max {lengths.max()}",
            )
        )
        if self.labels is not None:
            missing = torch.isnan(self.labels).sum(0).tolist()
            rows.append(("missing labels", " ".join(map(str, missing))))
        if self.label_means:
            rows.append(("label means", " ".join(f"{mean:.4g}" for mean in self.label_means)))
        return "\n".join([f"{self.name} ({self.kind})", *(f"  {a:<20}{b:>16}" for a, b in rows)])


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
    counts: Counter[str] = Counter()
    for file in files:
        counts.update(file.counts)
    records = [record for file in files for record in file.records]
    kept: list[tuple[Record, list[Encoded]]] = []
    seen: set[tuple[object, ...]] = set()
    for record, encoded in _encode(records, contract, tokenizer):
        reason = _why_drop(encoded)
        if reason is not None:
            counts[reason] += 1
            continue
        counts["truncated"] += any(text is not None and text.truncated for text in encoded)
        counts["duplicates"] += _seen_before(record, encoded, seen)
        kept.append((record, [text for text in encoded if text is not None]))
    counts["kept"] = len(kept)
    shown = {reason: count for reason, count in counts.items() if count or reason == "kept"}
    if not kept:
        raise DataError(f"{name}: no usable record in {[file.path for file in files]}: {shown}")
    return TokenizedDataset(
        kind=files[0].kind,
        name=name,
        sequences=_as_views([text.token_ids for _, encoded in kept for text in encoded]),
        labels=_labels([record for record, _ in kept]),
        origins=[record.origin for record, _ in kept],
        counts=shown,
    )


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
    if isinstance(records[0], Comparison):
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


@dataclass(frozen=True)
class TrainingData:
    """All data of a run, and the contract that its labels complete."""

    train: TokenizedDataset
    validation: list[TokenizedDataset]
    contract: ScoringContract

    def table(self) -> str:
        """The start-up table of every dataset."""
        return "\n".join(dataset.table() for dataset in (self.train, *self.validation))


def build_training_data(
    config: ModelConfig, contract: ScoringContract, tokenizer: Tokenizer
) -> TrainingData:
    """Tokenize ``model.data.data_prefix``, and centre labels on the training set's means.

    Raises:
        ConfigError: no training file, or a record too large for ``model.micro_batch_tokens``.
        DataError: see ``build_dataset``.
    """
    prefix = config.data.data_prefix
    if not prefix.train:
        raise ConfigError("model.data.data_prefix.train: got no file, wanted at least one")
    train = build_dataset(prefix.train, contract, tokenizer, config)
    validation = [
        build_dataset([path], contract, tokenizer, config, name)
        for path, name in zip(prefix.validation, _names(prefix.validation), strict=True)
    ]
    for dataset in (train, *validation):
        _check_fits(dataset, config.micro_batch_tokens)
    if train.labels is None:
        return TrainingData(train, validation, contract)
    means = train.mean_labels()
    for name, mean in zip(contract.attributes, means, strict=True):
        if math.isnan(mean):
            raise DataError(f"{prefix.train}: no record has a label of {name}")
    contract = contract.with_label_means(means)
    return TrainingData(
        replace(train, label_means=means),
        [replace(dataset, label_means=means) for dataset in validation],
        contract,
    )


def _names(paths: Sequence[str]) -> list[str]:
    """``validation`` for one set; for several the files' names, numbered where two are alike."""
    if len(paths) == 1:
        return ["validation"]
    stems = [Path(path).name.split(".")[0] for path in paths]
    return [
        stem if stems.count(stem) == 1 else f"{stem}_{number}"
        for number, stem in enumerate(stems, start=1)
    ]


def _check_fits(dataset: TokenizedDataset, micro_batch_tokens: int) -> None:
    longest = max(range(len(dataset)), key=dataset.num_tokens)
    if dataset.num_tokens(longest) > micro_batch_tokens:
        raise ConfigError(
            f"model.micro_batch_tokens: got {micro_batch_tokens}, wanted at least "
            f"{dataset.num_tokens(longest)}, the tokens of {dataset.origins[longest]} "
            f"({dataset.sequences_per_record} sequences)"
        )
