"""Tokenize a data file block by block, in several processes, in order."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from nemo_aligner.config.common import Overlong
from nemo_aligner.contract.bulk_encoding import TextIds
from nemo_aligner.contract.contract import EncodedText, OverlongError, ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.clean import EncodedRecord, encode_record, usable_encoded
from nemo_aligner.data.files import Block
from nemo_aligner.data.readers import FileRules
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Rating,
    Record,
    better_and_worse,
    lengths_of_rewards,
    prompt_hash,
    short_hash,
    verdict_keys,
)
from nemo_aligner.utils.errors import AlignerError, DataError
from nemo_aligner.utils.processes import environment

# A block of a data file to arrays of token ids.
#
# This runs in processes of its own, which have no need of torch: it takes seconds to import, and
# memory in each of them.
#
# What is dropped and counted is decided in ``clean.py``. Ties are counted here:
#
# ================  ===============================================================================
# ``all_tied``      kept, as the objective learns from ties: no completion is better than another
# ``some_tied``     kept: some of three or more completions are tied
# ================  ===============================================================================

_RECORDS_AT_ONCE = 256
# The largest id that 16 bits hold.
_MOST_IN_16_BITS = 65535


@dataclass(frozen=True)
class TokenRules:
    """Rules by which blocks of one file become tokens."""

    file: FileRules
    contract: ScoringContract
    tokenizer: Tokenizer

    @property
    def token_type(self) -> np.dtype:
        """Type of the ids: 16 bits where the vocabulary allows."""
        small = self.tokenizer.vocab_size - 1 <= _MOST_IN_16_BITS
        return np.dtype(np.uint16 if small else np.int32)


@dataclass
class TokenizedBlock:
    """N records with S sequences, what became of the others, and what is to be told of them.

    Attributes:
        counts: as in ``clean.py`` and above, without ``kept``.
        parsed: records that were read and not dropped before they were tokenized.
        arrays: ``tokens [T]``, ``lengths [S]``, ``ranks [S]``, ``reply_lengths [S]`` (of what each
            reward is of), ``sizes [N]`` (sequences of a record), ``prefixes [N]``, ``lines [N]``,
            ``labels [N, C]``, ``record_keys [N]``, ``prompt_keys [N]``, ``verdict_keys [V]``,
            ``verdict_counts [N]`` (verdicts of a record). Where the contract has
            steps, there are Q sequences and S rewards: ``lengths [Q]``, ``reads [S]`` (places in
            their sequences), ``read_counts [Q]``, and of ratings ``labels [S, C]``.
        sources: source of every record.
        unread: columns that were not read, and how many lines have them.
        pairs, longer: pairs of completions of which one is better, and how many of these are the
            longer ones; equal lengths are one half.
    """

    counts: Counter[str] = field(default_factory=Counter)
    parsed: int = 0
    malformed: list[MalformedRecord] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    longer: float = 0.0


class _Kept(NamedTuple):
    record: Record
    sequences: list[np.ndarray]
    # Tokens of the reply of each sequence, and of what each reward is of.
    reply_tokens: Sequence[int]
    reply_lengths: Sequence[int]
    # Of each sequence, where the contract has steps, and how many were cut off before them.
    reads: Sequence[Sequence[int]] | None = None
    lost: int = 0

    def label_rows(self, columns: int) -> list[Sequence[float | None]]:
        """Labels of the record, or of every step of a rated one that is still there."""
        record, none = self.record, (None,) * columns
        if self.reads is None or not isinstance(record, Rating):
            return [record.labels or none]
        if record.steps is not None:
            return [own or none for own in record.steps[self.lost :]]
        # A label of the whole text is that of its last step.
        return [none] * (len(self.reads[0]) - 1) + [record.labels or none]


def tokenize_block(block: Block, rules: TokenRules) -> TokenizedBlock:
    """The arrays of a block.

    Raises:
        DataError: it is not UTF-8, a record is too long and the contract's rule is ``error``, or
            there is no chat template.
    """
    counts: Counter[str] = Counter()
    malformed: list[MalformedRecord] = []
    unread: Counter[str] = Counter()
    lines = block.lines(rules.file.path)
    records = list(rules.file.records(lines, counts, malformed, unread))
    kept = list(_kept(records, rules, counts, malformed))
    malformed.sort(key=lambda record: record.origin.line)
    pairs = better_and_worse(
        [each.record for each in kept], [count for each in kept for count in each.reply_tokens]
    )
    return TokenizedBlock(
        counts=counts,
        parsed=len(records),
        malformed=malformed,
        arrays=_arrays(kept, rules),
        sources=[each.record.source for each in kept],
        unread=unread,
        pairs=len(pairs),
        longer=sum((a > b) + 0.5 * (a == b) for a, b in pairs),
    )


def _kept(
    records: Sequence[Record],
    rules: TokenRules,
    counts: Counter[str],
    malformed: list[MalformedRecord],
) -> Iterator[_Kept]:
    stops = rules.contract.overlong == Overlong.error.value
    error = " (model.data.overlong is 'error')" if stops else None
    encoded = _encode_all(records, rules.contract, rules.tokenizer)
    for each, texts in usable_encoded(encoded, counts, malformed, error):
        record = each.record
        if isinstance(record, Comparison) and record.has_ties:
            counts["all_tied" if record.is_tied else "some_tied"] += 1
        sequences = [np.array(text.token_ids, dtype=np.int32) for text in texts]
        reads = [text.reads for text in texts if text.reads is not None]
        if not reads:
            yield _Kept(record, sequences, each.reply_tokens, each.reply_tokens)
            continue
        counts["steps"] += sum(map(len, reads))
        lengths = [
            length
            for text, reply_tokens, step_tokens in zip(
                texts, each.reply_tokens, each.step_tokens, strict=True
            )
            for length in lengths_of_rewards(record, reply_tokens, step_tokens[text.lost :])
        ]
        yield _Kept(record, sequences, each.reply_tokens, lengths, reads, texts[0].lost)


def _arrays(kept: Sequence[_Kept], rules: TokenRules) -> dict[str, np.ndarray]:
    sequences = [sequence for each in kept for sequence in each.sequences]
    columns = rules.file.columns
    labels = [
        [float("nan") if n is None else n for n in own]
        for each in kept
        for own in each.label_rows(len(columns))
    ]
    tokens = np.concatenate(sequences) if sequences else np.zeros(0)
    ranks = [rank for each in kept for rank in each.record.ranks]
    verdicts = [verdict_keys(each.record) for each in kept]
    steps = {}
    if rules.contract.has_steps:
        reads = [own for each in kept for own in each.reads or ()]
        counts = [len(own) for own in reads]
        ranks = np.repeat(_counts(ranks), counts).tolist()
        steps = {"reads": _counts([place for own in reads for place in own])}
        steps["read_counts"] = _integers(counts)
    return {
        **steps,
        "tokens": tokens.astype(rules.token_type),
        "lengths": _integers([len(sequence) for sequence in sequences]),
        "ranks": _counts(ranks),
        "reply_lengths": _counts([n for each in kept for n in each.reply_lengths]),
        "sizes": _integers([len(each.sequences) for each in kept]),
        "prefixes": _counts([prefix_of_all(each.sequences) for each in kept]),
        "lines": _integers([each.record.origin.line for each in kept]),
        "labels": np.array(labels, dtype=np.float32).reshape(len(labels), len(columns)),
        "record_keys": np.array([_record_key(each) for each in kept], dtype=np.uint64),
        "prompt_keys": np.array([prompt_hash(each.record) for each in kept], dtype=np.uint64),
        "verdict_keys": np.array([key for own in verdicts for key in own], dtype=np.uint64),
        "verdict_counts": _counts([*map(len, verdicts)]),
    }


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _counts(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _record_key(kept: _Kept) -> int:
    """The same for records that are one, token for token and label for label."""
    record = kept.record
    said = repr((record.labels, record.ranks, [len(ids) for ids in kept.sequences]))
    if isinstance(record, Rating) and record.steps is not None:
        said += repr(record.steps)
    return short_hash(said.encode(), *(ids.tobytes() for ids in kept.sequences))


def _encode_all(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[EncodedRecord | MalformedRecord]:
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        some = records[start : start + _RECORDS_AT_ONCE]
        for record, texts in zip(some, _tokenize(some, contract, tokenizer), strict=True):
            if isinstance(texts, MalformedRecord):
                yield texts
                continue
            fitted = [_fit(text, contract) for text in texts]
            replies = [text.reply_tokens for text in texts]
            yield EncodedRecord(record, fitted, replies, [text.step_tokens for text in texts])


def _tokenize(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Sequence[list[TextIds] | MalformedRecord]:
    try:
        return contract.tokenize_records(tokenizer, [record.texts for record in records])
    except DataError:
        # Once more, one by one, to see which records it is.
        return [
            encode_record(record, lambda texts: contract.tokenize_records(tokenizer, [texts])[0])
            for record in records
        ]


def _fit(text: TextIds, contract: ScoringContract) -> EncodedText | OverlongError:
    try:
        return contract.fit(text.token_ids, text.reads)
    except OverlongError as error:
        return error


# Common prefixes of token sequences.

# A shorter prefix is not worth a segment of its own.
_MIN_PREFIX = 8


def common_prefix(first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray) -> int:
    """Length of two sequences' common prefix if it is worth a segment, else 0.

    It is less than the shorter one's length, as every sequence needs a last token of its own. Lists
    are made arrays each time.
    """
    most = min(len(first), len(second)) - 1
    if most < _MIN_PREFIX:
        return 0
    differs = np.asarray(first[:most]) != np.asarray(second[:most])
    at = int(differs.argmax())
    prefix = at if differs[at] else most
    return prefix if prefix >= _MIN_PREFIX else 0


def prefix_of_all(sequences: Sequence[Sequence[int] | np.ndarray]) -> int:
    """Length of the common prefix of all, by the same rule; 0 for a single one."""
    first, *others = sequences
    return min((common_prefix(first, other) for other in others), default=0)


# Blocks tokenized by several processes at once, and handed out in their order.

# Blocks queued per process, so that none waits and memory stays bounded.
_BLOCKS_AHEAD = 2
_END_S = 10.0


def tokenize_blocks(
    blocks: Iterable[Block], rules: TokenRules, processes: int
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
    # Threads only wait for the pipes; the work is in the processes.
    executor = ThreadPoolExecutor(len(workers), thread_name_prefix="tokenize")
    try:
        for block in blocks:
            pending.append(executor.submit(tokenize, block))
            if len(pending) > _BLOCKS_AHEAD * len(workers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # Not waited for: where the reader stopped, the workers are ended next.
        executor.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """One process, and its two pipes.

    A child of multiprocessing would run the caller's main script again, or share what torch has
    open.
    """

    def __init__(self, rules: TokenRules) -> None:
        self._process = subprocess.Popen(
            # Not -m: what it sends back would be of classes of __main__.
            [sys.executable, "-c", f"from {__name__} import answer_blocks; answer_blocks()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The processes are many already: threads of each would only stand in their way.
            env={**environment(), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        # Sent with the first block: a process that is still starting would hold up the others.
        self._rules: TokenRules | None = rules
        self._path = rules.file.path

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


def answer_blocks() -> None:
    """Answer as a worker: rules on stdin, then block after block; results on stdout, as pickles.

    It ends with its input, and so with the process that started it.
    """
    # Who asks the processes of a terminal to stop asks the one that started this, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed is no answer
    rules: TokenRules = pickle.load(requests)
    while True:
        answer: TokenizedBlock | Exception
        try:
            block = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = tokenize_block(block, rules)
        except Exception as error:
            if not isinstance(error, AlignerError):
                traceback.print_exc()
            answer = error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def usable_processes() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
