"""What every verb does around its work: an error is one line, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from nemo_aligner.errors import AlignerError

Verb = Callable[[Sequence[str]], int]


def run_verb(verb: Verb, argv: Sequence[str] | None = None) -> int:
    """The exit code of ``verb`` on ``argv`` (the command line's by default), 1 after an error."""
    try:
        return verb(sys.argv[1:] if argv is None else argv)
    except AlignerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
