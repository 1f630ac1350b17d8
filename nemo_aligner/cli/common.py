"""What every verb does around its work: an error is one line, and an exit code."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nemo_aligner.errors import AlignerError, CheckpointError, ConfigError

Verb = Callable[[Sequence[str]], int]


def run_verb(verb: Verb, argv: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """The exit code of ``verb`` on ``argv`` (the command line's by default), 1 after an error.

    ``name`` begins the error's line; by default it is the error's kind.
    """
    try:
        return verb(sys.argv[1:] if argv is None else argv)
    except AlignerError as error:
        print(f"{name or type(error).__name__}: {error}", file=sys.stderr)
        return 1


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints its description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@contextmanager
def errors_name_flags(options: argparse.Namespace) -> Iterator[None]:
    """An error about the setting ``key`` is one about the flag ``--key`` where that is an option.

    Raises:
        ConfigError, CheckpointError: instead of the one that it is raised from.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        key = re.match(r"(\w+):", str(error))
        if key is None or not hasattr(options, key[1]):
            raise
        raise type(error)(f"--{key[1].replace('_', '-')}{str(error)[key.end(1) :]}") from error


def names(text: str) -> tuple[str, ...]:
    """``a, b`` as ``("a", "b")``, the type of ``--attributes``.

    Whether they fit is checked where it is known what they name.
    """
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()


def fraction(text: str) -> float:
    """A number between 0 and 1, neither of them."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number between 0 and 1")
    return value


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number above 0")
    return int(text)
