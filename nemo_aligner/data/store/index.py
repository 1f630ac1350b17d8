"""The index of a data file: its records as token ids, and all that a run asks of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemo_aligner.batch import LabelColumns
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.blocks import BlockFile
from nemo_aligner.data.formats import check_lines_are_whole, choose_format
from nemo_aligner.data.labels import far_labels
from nemo_aligner.data.overlap import Prompts, first_of_each
from nemo_aligner.data.reading import Reading
from nemo_aligner.data.store.arrays import Arrays
from nemo_aligner.data.store.pool import tokenize_blocks
from nemo_aligner.data.store.tokenize import FileRules, Longer, TokenizedBlock
from nemo_aligner.data.summary import (
    MOST_KEPT,
    FileSummary,
    LabelSummary,
    LengthSummary,
    PrefixSummary,
)
from nemo_aligner.data.views import Origins
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.tokenizer import Tokenizer

_INT = np.dtype(np.int64)
_COUNT = np.dtype(np.int32)  # of what every rank has in memory for each pair
_KEY = np.dtype(np.uint64)
_LABEL = np.dtype(np.float32)
# Called with how many records are tokenized.
Told = Callable[[int], None]


@dataclass(frozen=True)
class IndexRules:
    """All that decides what an index holds, beside the file."""

    reading: Reading
    contract: ScoringContract
    tokenizer: Tokenizer


@dataclass(frozen=True)
class IndexFacts:
    """What an index holds, beside its arrays.

    Attributes:
        summary: of the file.
        columns: what the labels are called.
        parsed: records that were read and not dropped before they were tokenized.
        token_type: of the ids.
        digest: sha256 (hex) of token ids, labels and ranks (see ``digest_of``).
    """

    summary: FileSummary
    columns: tuple[str, ...]
    parsed: int
    token_type: str
    digest: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "summary": self.summary.to_dict(), "columns": list(self.columns)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: str) -> IndexFacts:
        """The inverse of ``to_dict``, of the file at ``path``."""
        summary = FileSummary.from_dict(values["summary"], path)
        return cls(**{**values, "summary": summary, "columns": tuple(values["columns"])})


class FileIndex:
    """N records with S sequences of T tokens.

    Attributes:
        tokens: ``[T]`` uint16 or int32, sequence after sequence.
        offsets: ``[S + 1]`` int64, from 0 to T.
        bounds: ``[N + 1]`` int64 sequences of the records, from 0 to S.
        ranks, reply_lengths: ``[S]`` int32, as in ``TokenizedDataset``.
        prefixes: ``[N]`` int32, as there.
        lines: ``[N]`` int64.
        sources: ``[N]`` int32, which of the names in ``facts.summary.sources``.
        labels: ``[N, C]`` float32.
        record_keys: uint64 in ascending order, of records that differ.
        prompts: of all records.
    """

    def __init__(self, facts: IndexFacts, arrays: Arrays) -> None:
        self.facts = facts
        self.tokens = arrays.read("tokens", np.dtype(facts.token_type))
        self.offsets = arrays.read("offsets", _INT)
        self.bounds = arrays.read("bounds", _INT)
        self.ranks = arrays.read("ranks", _COUNT)
        self.reply_lengths = arrays.read("reply_lengths", _COUNT)
        self.prefixes = arrays.read("prefixes", _COUNT)
        self.lines = arrays.read("lines", _INT)
        self.sources = arrays.read("sources", np.dtype(np.int32))
        self.labels = _labels(arrays, len(self.lines), facts.columns)
        self.record_keys = arrays.read("record_keys", _KEY)
        prompts = arrays.read("prompt_keys", _KEY), arrays.read("prompt_lines", _INT)
        self.prompts = Prompts(facts.summary.path, *prompts)

    def __len__(self) -> int:
        return len(self.lines)


def _labels(arrays: Arrays, records: int, columns: Sequence[str]) -> np.ndarray:
    if not columns:
        return np.zeros((records, 0), _LABEL)
    return arrays.read("labels", _LABEL, len(columns))


def make_index(
    path: str,
    rules: IndexRules,
    arrays: Arrays,
    processes: int = 1,
    told: Told | None = None,
) -> FileIndex:
    """Tokenize a file into ``arrays``, which are empty.

    Raises:
        ConfigError: there is no format of the name.
        DataError: the file as a whole cannot be read, or see ``tokenize_blocks``.
        OSError: the arrays cannot be written.
    """
    file, how = BlockFile(path), rules.reading
    chosen = choose_format(how.format, how.kind, file.objects(), path, how.pair_keys)
    check_lines_are_whole(chosen, file.lines(), path)
    of_file = FileRules(path, chosen.name, chosen.kind, how, rules.contract, rules.tokenizer)
    writer = _Writer(arrays)
    blocks = file.blocks(chosen.lines_per_record)
    for block in tokenize_blocks(blocks, of_file, processes):
        writer.add(block)
        if told is not None:
            told(writer.records)
    return FileIndex(writer.finish(of_file, chosen.kind), arrays)


class _Writer:
    """Block after block to arrays; what is left in memory does not grow with them."""

    def __init__(self, arrays: Arrays) -> None:
        self.records = 0
        self._arrays = arrays
        self._all = TokenizedBlock()
        self._names: dict[str, int] = {}
        self._sources: list[int] = []
        self._ends = {"offsets": 0, "bounds": 0}
        self._digest = hashlib.sha256()
        for name in self._ends:
            arrays.append(name, np.zeros(1, _INT))

    def add(self, block: TokenizedBlock) -> None:
        """Put a block behind those before it."""
        every, parts = self._all, dict(block.arrays)
        every.counts.update(block.counts)
        every.parsed += block.parsed
        every.malformed += block.malformed[: MOST_KEPT - len(every.malformed)]
        wins, pairs = block.longer
        every.longer = Longer(every.longer.wins + wins, every.longer.pairs + pairs)
        self._add_to_digest(parts["tokens"], parts["lengths"])
        self._add_ends("offsets", parts.pop("lengths"))
        self._add_ends("bounds", parts.pop("sizes"))
        parts["sources"] = self._codes(block.sources)
        for name, part in parts.items():
            self._arrays.append(name, part)
        self.records += len(block.sources)

    def _add_ends(self, name: str, lengths: np.ndarray) -> None:
        ends = self._ends[name] + lengths.cumsum()
        self._arrays.append(name, ends)
        self._ends[name] += int(lengths.sum())

    def _codes(self, sources: Sequence[str]) -> np.ndarray:
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

    def finish(self, rules: FileRules, kind: RecordKind) -> IndexFacts:
        """What is told of all, once there are no more."""
        arrays, every = self._arrays, self._all
        lines = arrays.read("lines", _INT)
        different = np.unique(arrays.read("record_keys", _KEY))
        keys, first_lines = first_of_each(arrays.read("prompt_keys", _KEY), lines)
        arrays.replace("record_keys", different)
        arrays.replace("prompt_keys", keys)
        arrays.append("prompt_lines", first_lines)
        counts = {
            **every.counts,
            "duplicates": self.records - len(different),
            "kept": self.records,
        }
        labels = _labels(arrays, self.records, rules.columns)
        summary = FileSummary(
            path=rules.path,
            kind=kind,
            format=rules.format,
            counts={reason: count for reason, count in counts.items() if count or reason == "kept"},
            lengths=LengthSummary.of(np.diff(arrays.read("offsets", _INT))),
            reply_lengths=LengthSummary.of(arrays.read("reply_lengths", _COUNT)),
            sources=dict(zip(self._names, self._sources, strict=True)),
            labels=LabelSummary(),
            longer_chosen=every.longer.wins / every.longer.pairs if every.longer.pairs else None,
            prefixes=_summarize_prefixes(
                arrays.read("prefixes", _COUNT), np.diff(arrays.read("bounds", _INT))
            ),
            malformed=every.malformed,
        )
        summary = _with_labels(summary, rules.columns, labels, lines)
        ranks, bounds = arrays.read("ranks", _COUNT), arrays.read("bounds", _INT)
        end_digest(self._digest, labels, ranks, bounds)
        digest, token_type = self._digest.hexdigest(), rules.token_type.name
        return IndexFacts(summary, rules.columns, every.parsed, token_type, digest)


def _summarize_prefixes(prefixes: np.ndarray, sizes: np.ndarray) -> PrefixSummary:
    return PrefixSummary(int((prefixes * (sizes - 1)).sum()), int((prefixes == 0).sum()))


def _with_labels(
    summary: FileSummary, names: Sequence[str], labels: np.ndarray, lines: np.ndarray
) -> FileSummary:
    columns = LabelColumns.of(names, torch.from_numpy(labels))
    far = far_labels(columns, Origins([(summary.path, lines)]))
    return replace(summary, labels=LabelSummary.of(columns), far_labels=far)


def add_sequence(digest: Any, tokens: np.ndarray) -> None:
    """Put the ids of one sequence into a digest, whatever their type is."""
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.astype(np.int32).tobytes())


def end_digest(digest: Any, labels: np.ndarray, ranks: np.ndarray, bounds: np.ndarray) -> None:
    """Put labels into a digest, and ranks that the order of completions does not say."""
    digest.update(np.ascontiguousarray(labels).tobytes())
    places = np.arange(len(ranks)) - np.repeat(bounds[:-1], np.diff(bounds))
    if not np.array_equal(ranks, places):
        digest.update(ranks.astype(_INT).tobytes())
