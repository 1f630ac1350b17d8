"""Tokenize the blocks of a data file in several processes, and return them in order.

The processes are started with ``subprocess``. A child of ``multiprocessing`` would run the caller's
main script again (spawn), or inherit the locks and devices that torch holds (fork).
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

from nemo_aligner.data.files import Block
from nemo_aligner.data.tokenize import TokenizedBlock, TokenRules, tokenize_block
from nemo_aligner.utils.errors import AlignerError, DataError
from nemo_aligner.utils.processes import environment

# Blocks queued for each process: enough that no process waits, few enough to bound the memory.
_BLOCKS_AHEAD = 2
# Seconds to wait for the exit code of a process whose pipe has closed.
_END_S = 10.0


def tokenize_blocks(
    blocks: Iterable[Block], rules: TokenRules, processes: int
) -> Iterator[TokenizedBlock]:
    """Tokenize blocks with ``tokenize_block`` in ``processes`` processes; yield results in order.

    With fewer than 2 processes, this process does the work itself.

    Raises:
        DataError: a block cannot be tokenized (``tokenize_block``), or a process was killed.
    """
    if processes < 2:
        yield from (tokenize_block(block, rules) for block in blocks)
        return
    workers = [_Worker(rules) for _ in range(processes)]
    try:
        yield from _distribute(blocks, workers)
    finally:
        for worker in workers:
            worker.end()


def _distribute(blocks: Iterable[Block], workers: list[_Worker]) -> Iterator[TokenizedBlock]:
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
    # The threads only wait for pipes; the processes do the work.
    executor = ThreadPoolExecutor(len(workers), thread_name_prefix="tokenize")
    try:
        for block in blocks:
            pending.append(executor.submit(tokenize, block))
            if len(pending) > _BLOCKS_AHEAD * len(workers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # Do not wait for running threads: if the caller stopped early, their processes are killed
        # next, which ends them.
        executor.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """A process that tokenizes blocks, and the pipes to its stdin and stdout."""

    def __init__(self, rules: TokenRules) -> None:
        self._process = subprocess.Popen(
            # Use -c, because with -m pickle would look for this module's classes in __main__.
            [sys.executable, "-c", f"from {__name__} import answer_blocks; answer_blocks()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Each process uses one thread, because there already is a process for each core.
            env={**environment(), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        # The rules are sent with the first block, because writing to a process that is still
        # starting would block.
        self._rules: TokenRules | None = rules
        self._path = rules.file.path

    def tokenize(self, block: Block) -> TokenizedBlock:
        """Have the process tokenize a block; raises DataError if the process was killed."""
        assert self._process.stdout is not None
        if self._rules is not None:
            self._send(self._rules)
            self._rules = None
        self._send(block)
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise self._describe_end() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._describe_end() from error

    def _describe_end(self) -> DataError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return DataError(
            f"{self._path}: a process that tokenizes this file ended with exit code "
            f"{self._process.returncode}. A negative code is the signal that killed it; it is -9 "
            "if the machine ran out of memory"
        )

    def end(self) -> None:
        """Kill the process, and close its pipes; called when no more blocks are needed."""
        self._process.kill()
        self._process.communicate()


def answer_blocks() -> None:
    """Run a worker: read rules and then blocks from stdin, write results to stdout, as pickles.

    A worker ends when its stdin is closed, which also happens if the process that started it ends.
    """
    # Ctrl-C in a terminal also reaches the workers. They ignore it: the process that started them
    # ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Send anything that is printed to stderr, so that it does not get between the answers.
    os.dup2(2, 1)
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
