"""A process that tokenizes blocks: rules on stdin, then block after block; results on stdout.

    python -m nemo_aligner.data.tokenize_worker

Each is a pickle. It ends with its input, and so with the process that started it. A child of
multiprocessing would run the caller's main script again, or share what torch has open.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from typing import BinaryIO

from nemo_aligner.data.tokenize import Block, FileRules, TokenizedBlock, tokenize_block
from nemo_aligner.utils.errors import AlignerError


def main() -> None:
    # Who asks the processes of a terminal to stop asks the one that started this, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed is no answer
    rules: FileRules = pickle.load(requests)
    while True:
        try:
            block = pickle.load(requests)
        except EOFError:
            return
        _answer(answers, block, rules)


def _answer(answers: BinaryIO, block: Block, rules: FileRules) -> None:
    answer: TokenizedBlock | Exception
    try:
        answer = tokenize_block(block, rules)
    except Exception as error:
        if not isinstance(error, AlignerError):
            traceback.print_exc()
        answer = error
    pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()


if __name__ == "__main__":
    main()
