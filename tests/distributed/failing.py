"""Ranks that fail, to test which of them reports an error: ``python failing.py WHO WHAT``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial

from nemo_aligner.cli.main import run_verb
from nemo_aligner.cli.parser import Parser
from nemo_aligner.distributed.collectives import (
    barrier,
    gather_objects,
    raise_everywhere,
    run_on_some,
)
from nemo_aligner.distributed.launch import launch
from nemo_aligner.utils.errors import ConfigError, DataError


def run(options: argparse.Namespace) -> int:
    who, what = options.who, options.what
    rank = os.environ["RANK"]
    if what == "early" and rank in who:
        raise ConfigError("model.x: got 3")
    with launch():
        barrier()
        if what == "exit in thread":
            run_on_some(partial(sys.exit, 3) if rank in who else None)
        if what == "bug for all":
            raise_everywhere(partial(fail, "bug" if rank in who else "nothing", rank))
        if rank in who:
            fail(what, rank)
        gather_objects("this waits for those who failed")
    return 0


def fail(what: str, rank: str) -> None:
    if what == "data":
        raise DataError("a.jsonl:3: got 3")
    if what == "different":
        raise DataError(f"{rank}.jsonl:3: got 3")
    if what == "bug":
        raise ZeroDivisionError("a bug")
    if what == "exit":
        sys.exit(3)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = Parser("failing", __doc__)
    parser.add_argument("who")
    parser.add_argument("what")
    sys.exit(run_verb(run, parser.parse(sys.argv[1:])))
