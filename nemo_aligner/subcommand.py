"""Commands of this package: as a person types them, and in a process of their own."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import nemo_aligner

_WIDTH = 78


def show_command(verb: str, arguments: Sequence[str], first: str = "") -> str:
    """What a person types, behind ``first``: on one line or, if that is long, one an argument."""
    fields: list[str] = []
    for argument in map(shlex.quote, arguments):
        # An option and its value stay together.
        if fields and fields[-1].startswith("--") and " " not in fields[-1]:
            fields[-1] += f" {argument}"
        else:
            fields.append(argument)
    whole = " ".join([f"{first}nemo-aligner {verb}", *fields])
    if len(whole) <= _WIDTH:
        return whole
    return f" \\\n{' ' * (len(first) + 4)}".join([f"{first}nemo-aligner {verb}", *fields])


def verb_command(verb: str, *arguments: str) -> list[str]:
    """The command of a verb, by this Python."""
    return [sys.executable, "-m", "nemo_aligner", *verb.split(), *arguments]


def environment() -> dict[str, str]:
    """This process's, in which the package is found wherever it lies."""
    package = str(Path(nemo_aligner.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
