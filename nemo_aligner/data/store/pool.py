"""Blocks tokenized by several processes at once, and handed out in their order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

from nemo_aligner.data.blocks import Block
from nemo_aligner.data.store.tokenize import FileRules, TokenizedBlock, tokenize_block
from nemo_aligner.errors import DataError
from nemo_aligner.subcommand import environment

# For each process, so that none waits for a block, and memory stays what it is.
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
            [sys.executable, "-m", "nemo_aligner.data.store.worker"],
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
