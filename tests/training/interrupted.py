"""The training example with an accident: it sends itself a signal at a given call, or fails there.

``interrupted.py ACCIDENT MODULE:ATTRIBUTE TEXT NTH RANK WRITES ARGUMENTS...``: on RANK, at the NTH
call of the function one of whose arguments contains TEXT (empty: any). ACCIDENT is the name of a
signal or of an error of the system, as ENOSPC.

When a write in the background ends is a matter of luck, so it is decided here: where WRITES is
``prompt``, a look at whether it has ended waits until it has; where it is ``held``, it never ends.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
from operator import attrgetter
from typing import Any

from nemo_aligner.cli import main as cli


def arm(accident: str, target: str, text: str, nth: int) -> None:
    module, _, path = target.partition(":")
    owner_path, _, name = path.rpartition(".")
    owner = importlib.import_module(module)
    if owner_path:
        owner = attrgetter(owner_path)(owner)
    function, calls = getattr(owner, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += text in f"{args}{kwargs}"
        if calls == nth and text in f"{args}{kwargs}":
            if not accident.startswith("SIG"):
                code = getattr(errno, accident)
                raise OSError(code, os.strerror(code))
            os.kill(os.getpid(), signal.Signals[accident])
        return function(*args, **kwargs)

    setattr(owner, name, interrupted)


def decide_when_written(writes: str) -> None:
    from nemo_aligner.checkpoint.weights.save import PendingSave

    def wait(save: PendingSave) -> bool:
        # An error is told by ``finish``.
        save._written.exception()
        return True

    def write_for_ever(save: PendingSave, plan: Any) -> None:
        write(save, plan)
        threading.Event().wait()

    if writes == "prompt":
        PendingSave.is_written = property(wait)  # type: ignore[assignment,method-assign]
    else:
        write = PendingSave._write
        PendingSave._write = write_for_ever  # type: ignore[assignment,method-assign]


def main() -> int:
    accident, target, text, nth, rank, writes, *arguments = sys.argv[1:]
    decide_when_written(writes)
    if os.environ.get("RANK", "0") == rank:
        arm(accident, target, text, int(nth))
    return cli.main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main())
