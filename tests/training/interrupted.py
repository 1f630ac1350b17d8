"""The training example with an accident: it sends itself a signal at a given call.

``interrupted.py SIGNAL MODULE:ATTRIBUTE TEXT NTH RANK ARGUMENTS...``: on RANK, at the NTH call of
the function one of whose arguments contains TEXT (empty: any).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def arm(number: int, target: str, text: str, nth: int) -> None:
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
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(owner, name, interrupted)


def main() -> int:
    name, target, text, nth, rank, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        arm(signal.Signals[name], target, text, int(nth))
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["train_reward_model.py", *arguments]
    return importlib.import_module("train_reward_model").main()


if __name__ == "__main__":
    sys.exit(main())
