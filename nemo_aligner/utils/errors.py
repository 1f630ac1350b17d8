"""Errors that users see, and functions that format values in their messages.

A message says where the problem is (file and line, or setting), which value is wrong, and what to
do.
"""

from collections.abc import Sequence

_MAX_VALUE_LENGTH = 300
_MAX_LINE_LENGTH = 500


class AlignerError(Exception):
    """Base class of all errors that this package raises on purpose."""


class ConfigError(AlignerError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class SettingsError(ConfigError):
    """One or more settings are invalid; ``problems`` has a line for each invalid setting."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        several = len(self.problems) > 1
        heading = ["these settings cannot be used:"] * several
        super().__init__("\n  ".join([*heading, *self.problems]))


class DataError(AlignerError, ValueError):
    """A record or sample cannot be read or scored; the message names its file and line."""


class CheckpointError(AlignerError, RuntimeError):
    """A checkpoint is missing, incomplete, unsafe, of another model, or cannot be written."""


class ServingError(AlignerError, RuntimeError):
    """A request cannot be answered, or a server cannot continue."""


class TrainingError(AlignerError, RuntimeError):
    """A reward, loss or gradient is not finite; the message names step, rank and records."""


class StoppedError(AlignerError, RuntimeError):
    """A training run was stopped early and is saved; the same call resumes it."""


class PeerError(AlignerError, RuntimeError):
    """Another rank failed first. It reports the reason, so this rank exits without a message."""


class LostRankError(AlignerError, RuntimeError):
    """Another rank has ended without reporting an error, for example because it was killed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def one_line(text: object) -> str:
    """Join the lines of a text or error, and cut it to the length that a message may quote.

    It is for quoting messages of other programs, which may have many lines.
    """
    return writable(" ".join(_as_text(text).split())[:_MAX_LINE_LENGTH])


def shown(value: object) -> str:
    """Return the ``repr`` of a value for an error message, cut to a limited length."""
    try:
        return short(repr(value))
    # ``repr`` raises for an int of 5,000 digits, and for a value that is nested too deeply.
    except (ValueError, RecursionError):
        return type(value).__name__


def short(text: object) -> str:
    """Cut a text or error for an error message to the length that a message may quote."""
    text = _as_text(text)
    return writable(text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}...")


def _as_text(value: object) -> str:
    # The text of a KeyError is only its key.
    return f"the key {value} is missing" if isinstance(value, KeyError) else str(value)


def writable(text: str) -> str:
    """Escape lone surrogates (invalid Unicode) in a text, because UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode()
