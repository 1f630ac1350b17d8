"""This package in a process of its own: its command, and the environment in which it is found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nemo_aligner


def verb_command(verb: str, *arguments: str) -> list[str]:
    """The command of a verb, by this Python."""
    return [sys.executable, "-m", "nemo_aligner", *verb.split(), *arguments]


def environment() -> dict[str, str]:
    """This process's, in which the package is found wherever it lies."""
    package = str(Path(nemo_aligner.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
