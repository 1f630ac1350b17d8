"""Tokenize a data file block by block, in several processes, in order."""

from __future__ import annotations

import codecs
import os
import pickle
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from nemo_aligner.batch.packed import prefix_of_all
from nemo_aligner.config.common import Overlong, RecordKind
from nemo_aligner.contract.contract import (
    EncodedText,
    NoTemplateError,
    OverlongError,
    ScoringContract,
)
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.tokenizer import TextIds, Tokenizer
from nemo_aligner.data.files import (
    AnyLine,
    Line,
    are_json_lines,
    count_swallowed,
    decode_utf8,
    describe_binary,
    json_lines,
    read_lines,
    unpacked,
)
from nemo_aligner.data.formats import format_named, parse_lines
from nemo_aligner.data.formats.base import WantedLabels
from nemo_aligner.data.readers import Reading, usable_records
from nemo_aligner.data.records import Comparison, MalformedRecord, Origin, Record, text_names
from nemo_aligner.data.report import better_and_worse, prompt_hash, short_hash
from nemo_aligner.utils.errors import DataError
from nemo_aligner.utils.processes import environment

# A block of a data file to arrays of token ids.
#
# This runs in processes of its own, so nothing here imports torch.
#
# Reasons that need tokens are counted, besides those of ``readers.py``; a record whose text
# the contract refuses is malformed:
#
# ================  ===============================================================================
# ``overlong``      dropped: a sequence is longer than ``seq_length`` and the rule is ``drop`` (a
#                   comparison goes as a whole; with ``error`` it is a DataError with file:line)
# ``same_tokens``   dropped: chosen and rejected differ as texts and not as tokens
# ``truncated``     kept: ``truncate_left`` cut a sequence of it
# ``all_tied``      kept, as the objective learns from ties: no completion is better than another
# ``some_tied``     kept: some of three or more completions are tied
# ================  ===============================================================================

_RECORDS_AT_ONCE = 256
# The largest id that 16 bits hold.
_MOST_IN_16_BITS = 65535
# The token ids of a record's texts, unless the contract refuses one of them.
_Tokenized: TypeAlias = list[TextIds] | MalformedRecord


@dataclass(frozen=True)
class FileRules:
    """Rules by which blocks of one file, with records of ``kind``, become tokens."""

    path: str
    format: str
    kind: RecordKind
    reading: Reading
    contract: ScoringContract
    tokenizer: Tokenizer

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the label columns; a label that a record lacks is NaN."""
        return self.reading.set_columns_of(self.kind)

    @property
    def token_type(self) -> np.dtype:
        """Type of the ids: 16 bits where the vocabulary allows."""
        small = self.tokenizer.vocab_size - 1 <= _MOST_IN_16_BITS
        return np.dtype(np.uint16 if small else np.int32)


class Longer(NamedTuple):
    """Number of ``pairs`` whose better completion is the longer; a tie is one half."""

    wins: float = 0.0
    pairs: int = 0


@dataclass
class TokenizedBlock:
    """N records with S sequences, what became of the others, and what is to be told of them.

    Attributes:
        counts: as in ``readers.py`` and above, without ``kept``.
        parsed: records that were read and not dropped before they were tokenized.
        arrays: ``tokens [T]``, ``lengths [S]``, ``ranks [S]``, ``reply_lengths [S]``,
            ``sizes [N]`` (sequences of a record), ``prefixes [N]``, ``lines [N]``,
            ``labels [N, C]``, ``record_keys [N]``, ``prompt_keys [N]``.
        sources: source of every record.
    """

    counts: Counter[str] = field(default_factory=Counter)
    parsed: int = 0
    malformed: list[MalformedRecord] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    longer: Longer = field(default_factory=Longer)


class _Kept(NamedTuple):
    record: Record
    sequences: list[np.ndarray]
    reply_lengths: list[int]


def tokenize_block(block: Block, rules: FileRules) -> TokenizedBlock:
    """The arrays of a block.

    Raises:
        DataError: it is not UTF-8, a record is too long and the contract's rule is ``error``, or
            there is no chat template.
    """
    done = TokenizedBlock()
    how = rules.reading
    columns, lines = how.columns_of(rules.kind), block.lines(rules.path)
    done.counts["rows_in_cells"] = count_swallowed(lines)
    wanted = WantedLabels(columns, how.loss_mask_val)
    parsed = parse_lines(format_named(rules.format, how.pair_keys), lines, rules.path, wanted)
    records = list(usable_records(parsed, how, bool(columns), done.counts, done.malformed))
    done.parsed = len(records)
    kept = list(_kept(records, rules, done))
    done.sources = [each.record.source for each in kept]
    done.malformed.sort(key=lambda record: record.origin.line)
    pairs = better_and_worse(
        [each.record for each in kept], [n for each in kept for n in each.reply_lengths]
    )
    done.longer = Longer(sum((a > b) + 0.5 * (a == b) for a, b in pairs), len(pairs))
    done.arrays = _arrays(kept, rules)
    return done


def _kept(records: Sequence[Record], rules: FileRules, done: TokenizedBlock) -> Iterator[_Kept]:
    contract, counts = rules.contract, done.counts
    for record, texts in _tokenize_all(records, contract, rules.tokenizer):
        if isinstance(texts, MalformedRecord):
            done.malformed.append(texts)
            counts["malformed"] += 1
            continue
        encoded = [_fit(text.token_ids, contract, record.origin) for text in texts]
        whole = [text for text in encoded if text is not None]
        if len(whole) < len(encoded):
            counts["overlong"] += 1
            continue
        if are_same_tokens(whole):
            counts["same_tokens"] += 1
            continue
        counts["truncated"] += any(text.truncated for text in whole)
        if isinstance(record, Comparison) and record.has_ties:
            counts["all_tied" if record.is_tied else "some_tied"] += 1
        sequences = [np.array(text.token_ids, dtype=np.int32) for text in whole]
        yield _Kept(record, sequences, [text.reply_tokens for text in texts])


def _arrays(kept: Sequence[_Kept], rules: FileRules) -> dict[str, np.ndarray]:
    sequences = [sequence for each in kept for sequence in each.sequences]
    none = (None,) * len(rules.columns)
    labels = [
        [float("nan") if n is None else n for n in each.record.labels or none] for each in kept
    ]
    tokens = np.concatenate(sequences) if sequences else np.zeros(0)
    return {
        "tokens": tokens.astype(rules.token_type),
        "lengths": _integers([len(sequence) for sequence in sequences]),
        "ranks": _counts([rank for each in kept for rank in each.record.ranks]),
        "reply_lengths": _counts([n for each in kept for n in each.reply_lengths]),
        "sizes": _integers([len(each.sequences) for each in kept]),
        "prefixes": _counts([prefix_of_all(each.sequences) for each in kept]),
        "lines": _integers([each.record.origin.line for each in kept]),
        "labels": np.array(labels, dtype=np.float32).reshape(len(kept), len(rules.columns)),
        "record_keys": np.array([_record_key(each) for each in kept], dtype=np.uint64),
        "prompt_keys": np.array([prompt_hash(each.record) for each in kept], dtype=np.uint64),
    }


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _counts(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _record_key(kept: _Kept) -> int:
    """The same for records that are one, token for token and label for label."""
    said = repr((kept.record.labels, kept.record.ranks, [len(ids) for ids in kept.sequences]))
    return short_hash(said.encode(), *(ids.tobytes() for ids in kept.sequences))


def _tokenize_all(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[tuple[Record, _Tokenized]]:
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        some = records[start : start + _RECORDS_AT_ONCE]
        yield from zip(some, _tokenize(some, contract, tokenizer), strict=True)


def _tokenize(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Sequence[_Tokenized]:
    try:
        return contract.tokenize_records(tokenizer, [record.texts for record in records])
    except DataError:
        # Once more, one by one, to see which records it is.
        return [_tokenize_alone(record, contract, tokenizer) for record in records]


def _tokenize_alone(record: Record, contract: ScoringContract, tokenizer: Tokenizer) -> _Tokenized:
    try:
        return contract.tokenize_records(tokenizer, [record.texts])[0]
    except NoTemplateError as error:
        # It is no fault of this record.
        raise DataError(f"{record.origin}: {error}") from error
    except DataError as error:
        encode = lambda text: contract.tokenize_records(tokenizer, [[text]])  # noqa: E731
        return refused_record(record, encode, error)


def refused_record(
    record: Record, encode: Callable[[Text], object], error: DataError
) -> MalformedRecord:
    """A record with a text that ``encode`` refuses; the reason names that text and says why.

    ``error`` is the reason where ``encode`` refuses none of the texts by itself.
    """
    for name, text in zip(text_names(record), record.texts, strict=True):
        try:
            encode(text)
        except DataError as why:
            # Places in a conversation are counted from the first message of its prompt.
            where = name if isinstance(text, str) else f"prompt and {name}"
            return MalformedRecord(record.origin, f"{where}: {why}")
    return MalformedRecord(record.origin, str(error))


def _fit(token_ids: list[int], contract: ScoringContract, origin: Origin) -> EncodedText | None:
    try:
        return contract.fit(token_ids)
    except OverlongError as error:
        if contract.overlong == Overlong.error.value:
            raise DataError(f"{origin}: {error} (model.data.overlong is 'error')") from error
        return None


def are_same_tokens(encoded: Sequence[EncodedText | None]) -> bool:
    """True if all of several completions are the same, token for token."""
    first, *others = (None if text is None else text.token_ids for text in encoded)
    return bool(others) and all(other == first for other in others)


# Blocks tokenized by several processes at once, and handed out in their order.

# Blocks queued per process, so that none waits and memory stays bounded.
_BLOCKS_AHEAD = 2
_END_S = 10.0


def tokenize_blocks(
    blocks: Iterable[Block], rules: FileRules, processes: int
) -> Iterator[TokenizedBlock]:
    """``tokenize_block`` of each, in order; with fewer than two ``processes`` in this one.

    Raises:
        DataError: as ``tokenize_block``, or a process was ended.
    """
    if processes < 2:
        yield from (tokenize_block(block, rules) for block in blocks)
        return
    workers = [_Worker(rules) for _ in range(processes)]
    try:
        yield from _share_out(blocks, workers)
    finally:
        for worker in workers:
            worker.end()


def _share_out(blocks: Iterable[Block], workers: list[_Worker]) -> Iterator[TokenizedBlock]:
    free: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def tokenize(block: Block) -> TokenizedBlock:
        worker = free.get()
        try:
            return worker.tokenize(block)
        finally:
            free.put(worker)

    pending: deque[Future[TokenizedBlock]] = deque()
    executor = ThreadPoolExecutor(len(workers), thread_name_prefix="tokenize")
    try:
        for block in blocks:
            pending.append(executor.submit(tokenize, block))
            if len(pending) > _BLOCKS_AHEAD * len(workers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """One process, and its two pipes."""

    def __init__(self, rules: FileRules) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_aligner.data.tokenize_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The processes are many already: threads of each would only stand in their way.
            env={**environment(), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        # Sent with the first block: a process that is still starting would hold up the others.
        self._rules: FileRules | None = rules
        self._path = rules.path

    def tokenize(self, block: Block) -> TokenizedBlock:
        assert self._process.stdout is not None
        if self._rules is not None:
            self._send(self._rules)
            self._rules = None
        self._send(block)
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise self._lost() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._lost() from error

    def _lost(self) -> DataError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return DataError(
            f"{self._path}: a process that tokenizes it ended with exit code "
            f"{self._process.returncode}, wanted its answer (negative: the signal that ended it, "
            "9 if memory ran out)"
        )

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def usable_processes() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


# A data file in blocks of whole records, so that memory does not grow with it.
#
# JSON lines are streamed; a JSON list or a table is read whole, and its rows handed out in blocks.

BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 512
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Block:
    """Whole records of a file: bytes of JSON lines, the first of which is number ``first``.

    Or what was read of them before.
    """

    first: int
    content: bytes | list[AnyLine]

    def lines(self, path: str) -> list[AnyLine]:
        """Raises DataError, with the line, where they are not UTF-8."""
        if isinstance(self.content, list):
            return self.content
        return list(json_lines(decode_utf8(self.content, path, self.first), self.first))


class BlockFile:
    """A file whose lines can be gone through as often as it takes.

    Raises:
        DataError: as ``read_lines``; what is wrong with JSON lines only as it is come to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._rows = None if _has_json_lines(self._path) else read_lines(path)

    def lines(self) -> Iterator[AnyLine]:
        """One after the other."""
        if self._rows is not None:
            yield from self._rows
            return
        for block in _stream(self._path, 1, BLOCK_BYTES):
            yield from block.lines(self._path)

    def objects(self) -> Iterator[Line]:
        """Lines that are a JSON object."""
        return (line for line in self.lines() if isinstance(line, Line))

    def blocks(self, lines_per_record: int) -> Iterator[Block]:
        """The whole file in blocks; a record lies in one block."""
        if self._rows is None:
            return _stream(self._path, lines_per_record, BLOCK_BYTES)
        return _in_blocks(self._rows, lines_per_record * _BLOCK_ROWS)


def _in_blocks(rows: Iterable[AnyLine], size: int) -> Iterator[Block]:
    rest = iter(rows)
    while block := list(islice(rest, size)):
        yield Block(block[0].number, block)


def _has_json_lines(path: str) -> bool:
    """True if each line is a JSON object by itself: no JSON list, no table."""
    with unpacked(path) as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    if head.lstrip().startswith(b"[") or describe_binary(head, path) is not None:
        return False
    return are_json_lines(
        line for block in _stream(path, 1, BLOCK_BYTES) for line in block.lines(path)
    )


def _stream(path: str, lines_per_record: int, size: int) -> Iterator[Block]:
    first, number, in_block, whole = 1, 1, 0, 0
    block: list[bytes] = []
    for number, raw in enumerate(_raw_lines(path), start=1):
        block.append(raw)
        in_block += len(raw)
        # Empty lines are no part of a record.
        whole += lines_per_record > 1 and bool(raw.decode(errors="replace").strip())
        if in_block >= size and whole % lines_per_record == 0:
            yield Block(first, b"".join(block))
            first, in_block, block = number + 1, 0, []
    if block:
        yield Block(first, b"".join(block))


def _raw_lines(path: str) -> Iterator[bytes]:
    with unpacked(path) as stream:
        for number, raw in enumerate(stream):
            yield raw if number else raw.removeprefix(codecs.BOM_UTF8)
