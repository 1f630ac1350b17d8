"""FileIndex: the records of a data file as arrays of token ids, bounds, labels and hashes.

``make_index`` builds the index of a file block by block, either in memory or in a folder
(``token_cache.py``). ``dataset.py`` joins the indexes of several files to a data set. The arrays of
a folder are memory-mapped, so that the ranks of a node share them instead of holding a copy each.
"""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeAlias, TypeVar, overload

import numpy as np
import torch

from nemo_aligner.batch.packed import LabelColumns, count_label_rows
from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.label_summary import LabelSummary, SoftLabelSummary
from nemo_aligner.data.readers import ReaderConfig, open_file
from nemo_aligner.data.records import Origin
from nemo_aligner.data.report import (
    MOST_KEPT,
    FileSummary,
    LengthSummary,
    PrefixSummary,
    Prompts,
    count_principles,
    far_labels,
    find_contradicted,
    find_first_lines,
)
from nemo_aligner.data.token_workers import tokenize_blocks
from nemo_aligner.data.tokenize import TokenizedBlock, TokenRules
from nemo_aligner.metrics.table import MAX_SOURCES

_INT = np.dtype(np.int64)
_COUNT = np.dtype(np.int32)  # takes half the memory of int64, in arrays that every rank may hold
_KEY = np.dtype(np.uint64)
_LABEL = np.dtype(np.float32)
ShowProgress = Callable[[int], None]
"""Called with the number of records tokenized so far."""


@dataclass(frozen=True)
class IndexRules:
    """The rules that turn a file into an index.

    Attributes:
        reading: rules by which the records of the file are read.
        contract: scoring contract, which determines how a sample becomes token ids.
        tokenizer: the tokenizer.
    """

    reading: ReaderConfig
    contract: ScoringContract
    tokenizer: Tokenizer


@dataclass(frozen=True)
class IndexFacts:
    """The small values of an index, which the token cache stores as JSON next to the arrays.

    Attributes:
        summary: counts, lengths and labels of the file, for reports.
        columns: names of the label columns.
        parsed: number of records that were tokenized, including those that were then dropped
            because of their tokens; if it is 0, the file has no usable record.
        token_type: name of the numpy type of the stored token ids, uint16 or int32.
        digest: sha256 (hex) of token ids, labels and ranks (see ``end_digest``).
        principles: the different principles of the records, without ""; None if there are more
            than ``MAX_SOURCES``, which no metrics are computed for.
    """

    summary: FileSummary
    columns: tuple[str, ...]
    parsed: int
    token_type: str
    digest: str
    principles: tuple[str, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {**vars(self), "summary": self.summary.to_dict(), "columns": list(self.columns)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: str) -> IndexFacts:
        """Restore the facts from the result of ``to_dict``; ``path`` is where the file is now."""
        summary = FileSummary.from_dict(values["summary"], path)
        lists = {name: values[name] and tuple(values[name]) for name in ("columns", "principles")}
        return cls(**{**values, **lists, "summary": summary})


class FileIndex:
    """The tokenized records of one file: N records with Q samples, T tokens and S rewards in all.

    Attributes:
        facts: the small values of the index, such as the file's summary and the label columns.
        tokens: ``[T]`` uint16 or int32 token ids, sample after sample.
        offsets: ``[Q + 1]`` int64, from 0 to T: sample q has the tokens from ``offsets[q]`` up to
            ``offsets[q + 1]``.
        sample_bounds: ``[N + 1]`` int64, from 0 to Q: record n has the samples from
            ``sample_bounds[n]`` up to ``sample_bounds[n + 1]``.
        reward_bounds: ``[Q + 1]`` int64, from 0 to S: sample q has the rewards from
            ``reward_bounds[q]`` up to ``reward_bounds[q + 1]``.
        labels: ``[L, C]`` float32 labels in C columns, NaN where one is missing. The L rows are one
            for each comparison and one for each reward of a rating, record by record.
        ranks: ``[Q]`` int32 rank of each sample in its record: a lower rank is better, and samples
            with equal ranks are tied.
        reply_lengths: ``[S]`` int32 number of tokens of the reply, turn or step that each reward
            scores, before truncation.
        places: ``[S]`` int32, for each reward the position in its sample of the token that the
            head reads.
        prefixes: ``[N]`` int32 number of tokens that all samples of a record share at the
            beginning; 0 for a single sample, or if the prefix is too short to be worth sharing.
        lines: ``[N]`` int64 line on which each record begins.
        sources: ``[N]`` int32 index of each record's source in ``facts.summary.sources``.
        record_keys: ``[D]`` uint64 hashes of the file's D different records, in ascending order,
            to find records that occur twice.
        verdict_keys: ``[V]`` uint64 hashes of the verdicts of all records, record by record, to
            find opposite verdicts (``verdict_keys`` in data/records.py).
        verdict_counts: ``[N]`` int32 number of verdicts of each record; they add up to V.
        principle_keys: ``[N]`` uint64 hash of each record's principle (``hash_principle``).
        prompts: the file's different prompts, by hash, each with the line of its first record.
        teacher_rewards: ``[Q]`` float32 reward that a teacher gives each sample, NaN if none does;
            empty if no record of the file has any.
        content_digest: sha256 (hex) of the file's bytes; None if they were not hashed.
    """

    def __init__(
        self, facts: IndexFacts, arrays: Arrays, content_digest: str | None = None
    ) -> None:
        self.facts = facts
        self.content_digest = content_digest
        self.tokens = arrays.read("tokens", np.dtype(facts.token_type))
        self.offsets = arrays.read("offsets", _INT)
        self.sample_bounds = arrays.read("sample_bounds", _INT)
        self.reward_bounds = arrays.read("reward_bounds", _INT)
        self.ranks = arrays.read("ranks", _COUNT)
        self.reply_lengths = arrays.read("reply_lengths", _COUNT)
        self.prefixes = arrays.read("prefixes", _COUNT)
        self.lines = arrays.read("lines", _INT)
        self.sources = arrays.read("sources", np.dtype(np.int32))
        self.labels = _read_labels(arrays, len(self.lines), facts.columns)
        self.places = arrays.read("places", _COUNT)
        self.record_keys = arrays.read("record_keys", _KEY)
        self.verdict_keys = arrays.read("verdict_keys", _KEY)
        self.verdict_counts = arrays.read("verdict_counts", _COUNT)
        self.teacher_rewards = arrays.read("teacher_rewards", _LABEL)
        self.principle_keys = arrays.read("principle_keys", _KEY)
        prompts = arrays.read("prompt_keys", _KEY), arrays.read("prompt_lines", _INT)
        self.prompts = Prompts(facts.summary.path, *prompts)

    def __len__(self) -> int:
        return len(self.lines)


def _read_labels(arrays: Arrays, records: int, columns: Sequence[str]) -> np.ndarray:
    if not columns:
        return np.zeros((records, 0), _LABEL)
    return arrays.read("labels", _LABEL, len(columns))


def make_index(
    path: str,
    rules: IndexRules,
    arrays: Arrays,
    processes: int = 1,
    show: ShowProgress | None = None,
) -> FileIndex:
    """Tokenize the file at ``path`` and store its index in ``arrays``, which must be empty.

    Raises:
        ConfigError: ``rules.reading`` names a format that does not exist.
        DataError: the file cannot be read, or one of its records cannot be tokenized.
        OSError: the arrays cannot be written.
    """
    file_rules, blocks = open_file(path, rules.reading)
    token_rules = TokenRules(file_rules, rules.contract, rules.tokenizer)
    writer = _Writer(arrays)
    for block in tokenize_blocks(blocks, token_rules, processes):
        writer.add(block)
        if show is not None:
            show(writer.records)
    return FileIndex(writer.finish(token_rules), arrays)


class _Writer:
    """Appends tokenized blocks to the arrays of an index.

    The writer itself keeps only sums, so that its memory does not grow with the number of blocks.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.records = 0
        self._arrays = arrays
        # A block used only to add up the counts of all blocks; its ``arrays`` stay empty.
        self._total = TokenizedBlock()
        self._names: dict[str, int] = {}
        self._sources: list[int] = []
        self._principles: set[str] = set()
        self._ends = {"offsets": 0, "sample_bounds": 0, "reward_bounds": 0}
        self._digest = hashlib.sha256()
        for name in self._ends:
            arrays.append(name, np.zeros(1, _INT))

    def add(self, block: TokenizedBlock) -> None:
        """Append the arrays of a block to those of the index, and add its counts to the file's."""
        total, parts = self._total, dict(block.arrays)
        total.counts.update(block.counts)
        total.unread.update(block.unread)
        total.teachers.update(block.teachers)
        total.parsed += block.parsed
        total.malformed += block.malformed[: MOST_KEPT - len(total.malformed)]
        total.pairs += block.pairs
        total.longer += block.longer
        if len(self._principles) <= MAX_SOURCES:
            self._principles |= block.principles
        self._add_to_digest(parts["tokens"], parts["lengths"])
        self._add_ends("offsets", parts.pop("lengths"))
        self._add_ends("sample_bounds", parts.pop("sample_counts"))
        self._add_ends("reward_bounds", parts.pop("reward_counts"))
        parts["sources"] = self._number_sources(block.sources)
        for name, part in parts.items():
            self._arrays.append(name, part)
        self.records += len(block.sources)

    def _add_ends(self, name: str, lengths: np.ndarray) -> None:
        ends = self._ends[name] + lengths.cumsum()
        self._arrays.append(name, ends)
        self._ends[name] += int(lengths.sum())

    def _number_sources(self, sources: Sequence[str]) -> np.ndarray:
        names, counts = self._names, self._sources
        codes = [names.setdefault(source, len(names)) for source in sources]
        counts += [0] * (len(names) - len(counts))
        for code in codes:
            counts[code] += 1
        return np.array(codes, dtype=np.int32)

    def _add_to_digest(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        start = 0
        for length in lengths.tolist():
            add_sequence(self._digest, tokens[start : start + length])
            start += length

    def finish(self, token_rules: TokenRules) -> IndexFacts:
        """Complete the arrays after the last block, and return the facts of the index.

        Some arrays and counts need the whole file: different records, different prompts with
        their first lines, contradicting verdicts, and the digest.
        """
        arrays, total, rules = self._arrays, self._total, token_rules.file
        lines = arrays.read("lines", _INT)
        different = np.unique(arrays.read("record_keys", _KEY))
        keys, first_lines = find_first_lines(arrays.read("prompt_keys", _KEY), lines)
        arrays.replace("record_keys", different)
        arrays.replace("prompt_keys", keys)
        arrays.append("prompt_lines", first_lines)
        verdicts = arrays.read("verdict_keys", _KEY)
        verdict_counts = arrays.read("verdict_counts", _COUNT)
        opposed = find_contradicted(verdicts, verdict_counts, [np.unique(verdicts)])
        counts = {
            **total.counts,
            "duplicates": self.records - len(different),
            "contradicted": int(opposed.sum()),
            "kept": self.records,
        }
        sample_bounds = arrays.read("sample_bounds", _INT)
        reward_bounds = arrays.read("reward_bounds", _INT)
        label_rows = count_label_rows(*map(torch.from_numpy, (sample_bounds, reward_bounds)))
        labels = _read_labels(arrays, int(label_rows.sum()), rules.columns)
        prefixes, ranks = arrays.read("prefixes", _COUNT), arrays.read("ranks", _COUNT)
        saved = prefixes * (np.diff(sample_bounds) - 1)
        reply_lengths = arrays.read("reply_lengths", _COUNT)
        if rules.kind is RecordKind.comparison:
            # The summary has one length for each reply of a comparison. It is that of the sample's
            # last reward, which ``lengths_of_rewards`` sets to the length of the whole reply.
            reply_lengths = reply_lengths[reward_bounds[1:] - 1]
        columns = LabelColumns.of(rules.columns, torch.from_numpy(labels))
        teacher = _read_teacher_rewards(arrays)
        summary = FileSummary(
            path=rules.path,
            kind=rules.kind,
            format=rules.format,
            counts={reason: count for reason, count in counts.items() if count or reason == "kept"},
            lengths=LengthSummary.of(np.diff(arrays.read("offsets", _INT))),
            reply_lengths=LengthSummary.of(reply_lengths),
            sources=dict(zip(self._names, self._sources, strict=True)),
            labels=LabelSummary.of(columns),
            longer_chosen=total.longer / total.pairs if total.pairs else None,
            prefixes=PrefixSummary(int(saved.sum()), int((prefixes == 0).sum())),
            malformed=total.malformed,
            far_labels=far_labels(
                columns, Origins([(rules.path, np.repeat(lines, label_rows.numpy()))])
            ),
            unread=dict(total.unread),
            principles=count_principles(arrays.read("principle_keys", _KEY)),
            soft_labels=SoftLabelSummary.of(sample_bounds, ranks, teacher),
            teachers=dict(total.teachers),
        )
        places = arrays.read("places", _COUNT) if token_rules.contract.has_steps else None
        end_digest(self._digest, labels, ranks, sample_bounds, reward_bounds, places, teacher)
        counted = summary, rules.columns, total.parsed, token_rules.token_type.name
        return IndexFacts(*counted, self._digest.hexdigest(), self._list_principles())

    def _list_principles(self) -> tuple[str, ...] | None:
        are_few = len(self._principles) <= MAX_SOURCES
        return tuple(sorted(self._principles)) if are_few else None


def _read_teacher_rewards(arrays: Arrays) -> np.ndarray:
    """Read the teacher's rewards; remove the array if all are NaN, as in most files."""
    rewards = arrays.read("teacher_rewards", _LABEL)
    if np.isnan(rewards).all():
        rewards = rewards[:0]
        arrays.replace("teacher_rewards", rewards)
    return rewards


def add_sequence(digest: Any, tokens: np.ndarray) -> None:
    """Add the token ids of one sequence, and its length, to the hash ``digest``.

    uint16 and int32 ids give the same digest.
    """
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.astype(np.int32).tobytes())


def end_digest(
    digest: Any,
    labels: np.ndarray,
    ranks: np.ndarray,
    sample_bounds: np.ndarray,
    reward_bounds: np.ndarray,
    places: np.ndarray | None = None,
    teacher_rewards: np.ndarray | None = None,
) -> None:
    """Add labels, ranks and ``places`` to the hash ``digest``, after the last ``add_sequence``.

    A resumed run compares the digest of its data with the digest that it saved. To agree with runs
    of earlier versions, ranks are added only if they differ from the order of the samples, and the
    rank of a sample is repeated for each of its rewards. ``places`` are None unless the contract
    scores turns or steps. ``teacher_rewards`` are added only if there are any. ``FileIndex``
    describes the arrays.
    """
    digest.update(np.ascontiguousarray(labels).tobytes())
    ranks = np.repeat(ranks, np.diff(reward_bounds))
    bounds = reward_bounds[sample_bounds]
    if not np.array_equal(ranks, np.arange(len(ranks)) - np.repeat(bounds[:-1], np.diff(bounds))):
        digest.update(ranks.astype(_INT).tobytes())
    if places is not None:
        add_sequence(digest, places)
    if teacher_rewards is not None and len(teacher_rewards):
        digest.update(np.ascontiguousarray(teacher_rewards).tobytes())


# Stores of named arrays that are written part by part, in memory or in the files of a folder.
#
# megatron-core's IndexedDataset is not used, because it stores only sequences and documents. Ranks,
# labels, reply lengths and line numbers would need separate files anyway.


class ArraysInMemory:
    """Arrays in the memory of this process, with the methods of ``ArraysInFolder``."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytearray] = {}

    def append(self, name: str, part: np.ndarray) -> None:
        """Append ``part`` to the array ``name``, which is empty at first."""
        self._bytes.setdefault(name, bytearray()).extend(part.tobytes())

    def replace(self, name: str, array: np.ndarray) -> None:
        """Replace the whole array ``name`` by ``array``."""
        self._bytes[name] = bytearray(array.tobytes())

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray:
        """Copy the whole array ``name``: ``[n]``, or ``[n, width]`` if ``width`` is given."""
        return _reshape(np.frombuffer(bytearray(self._bytes.get(name, b"")), dtype), width)

    def sizes(self) -> dict[str, int]:
        """Return the size of each array in bytes, by its name."""
        return {name: len(content) for name, content in self._bytes.items()}


class ArraysInFolder:
    """Arrays in the files of ``folder``, one file per array, which ``read`` memory-maps.

    A file has only the bytes of the array, without a header. All methods raise OSError if a file
    cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def append(self, name: str, part: np.ndarray) -> None:
        """Append ``part`` to the array ``name``, which is empty at first."""
        if name not in self._open:
            self._open[name] = self._name_file(name).open("ab")
        self._open[name].write(part.tobytes())

    def replace(self, name: str, array: np.ndarray) -> None:
        """Replace the whole array ``name`` by ``array``."""
        file = self._open.pop(name, None)
        if file is not None:
            file.close()
        # The old file is unlinked, not overwritten, because it may still be mapped.
        self._name_file(name).unlink(missing_ok=True)
        self.append(name, array)

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray:
        """Memory-map the array ``name``: ``[n]``, or ``[n, width]`` if ``width`` is given.

        Changes to the returned array stay in this process and do not reach the file.
        """
        if name in self._open:
            self._open[name].flush()
        path = self._name_file(name)
        if not path.exists() or path.stat().st_size == 0:
            return _reshape(np.zeros(0, dtype), width)
        return _reshape(np.memmap(path, dtype, mode="c"), width)

    def sizes(self) -> dict[str, int]:
        """Return the size of each array in bytes, by its name."""
        return {path.stem: path.stat().st_size for path in self._folder.glob("*.bin")}

    def close(self) -> None:
        """Write all arrays to the disk, and close their files."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._open.clear()

    def _name_file(self, name: str) -> Path:
        return self._folder / f"{name}.bin"


Arrays: TypeAlias = ArraysInMemory | ArraysInFolder
"""Arrays that are written part by part, and read once they are complete."""


def _reshape(array: np.ndarray, width: int | None) -> np.ndarray:
    # View a memmap as a plain array, because slicing a memmap is much slower.
    plain = array.view(np.ndarray)
    if width is None:
        return plain
    return plain.reshape(-1, width) if width else np.zeros((0, 0), array.dtype)


# Sequences over the records of several files, without an object in memory for each record.
#
# The arrays of the files are not concatenated: that would read memory-mapped ones into memory.

Item = TypeVar("Item")


class FileParts(Sequence[Item], Generic[Item]):
    """A read-only sequence of the items of several files, one file after the other.

    ``sizes`` has the number of items of each file. Subclasses define ``_read_part``, which returns
    one item.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._read_item(number) for number in range(*index.indices(len(self)))]
        return self._read_item(range(len(self))[index])

    def _read_item(self, index: int) -> Item:
        part = bisect_right(self._starts, index) - 1
        return self._read_part(part, index - self._starts[part])

    @abstractmethod
    def _read_part(self, part: int, index: int) -> Item:
        """Return item ``index`` of file number ``part``; both count from 0."""


class Origins(FileParts[Origin]):
    """File and line of each record.

    ``parts`` has an entry for each file: its path, and the line of each of its n records, ``[n]``.
    """

    def __init__(self, parts: Sequence[tuple[str, np.ndarray]]) -> None:
        super().__init__([len(lines) for _, lines in parts])
        self._parts = parts

    def _read_part(self, part: int, index: int) -> Origin:
        path, lines = self._parts[part]
        return Origin(path, int(lines[index]))


class Sources(FileParts[str]):
    """Name of the source of each record, such as the data set that it was taken from.

    ``parts`` has an entry for each file: the names of its sources, and for each of its n records
    the index of its source in these names, ``[n]``.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[str], np.ndarray]]) -> None:
        super().__init__([len(codes) for _, codes in parts])
        self._parts = parts

    def _read_part(self, part: int, index: int) -> str:
        names, codes = self._parts[part]
        return names[codes[index]]


class TokenSequences(FileParts[np.ndarray]):
    """Token ids of Q samples, ``[L]`` int32 each.

    ``parts`` has an entry for each file: the token ids ``[T]`` of its q samples, one after the
    other, and the bounds ``[q + 1]`` of the samples in these tokens.
    """

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__([len(offsets) - 1 for _, offsets in parts])
        self._parts = parts

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int] | np.ndarray]) -> TokenSequences:
        """Build the sequences from a copy of Python lists or arrays of token ids."""
        flat = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
        offsets = np.array([0, *accumulate(map(len, flat))], dtype=np.int64)
        return cls([(np.concatenate([np.zeros(0, np.int32), *flat]), offsets)])

    def _read_part(self, part: int, index: int) -> np.ndarray:
        tokens, offsets = self._parts[part]
        return tokens[offsets[index] : offsets[index + 1]].astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(int(offsets[-1]) for _, offsets in self._parts)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """Count the tokens of samples ``start`` to ``stop - 1``: ``[stop - start]`` int64."""
        lengths = [np.zeros(0, np.int64)]
        for (_, offsets), first in zip(self._parts, self._starts, strict=False):
            low = min(max(start - first, 0), len(offsets) - 1)
            high = min(max(stop - first, 0), len(offsets) - 1)
            lengths.append(np.diff(offsets[low : high + 1]))
        return np.concatenate(lengths)
