"""The errors a user can meet; each message says where, what was got and what was wanted."""

from collections.abc import Sequence

_MOST_SHOWN = 300
_MOST_IN_LINE = 500


class AlignerError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(AlignerError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class SettingsError(ConfigError):
    """All invalid settings of a run; ``problems`` has a line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        several = len(self.problems) > 1
        heading = ["these settings cannot be used:"] * several
        super().__init__("\n  ".join([*heading, *self.problems]))


class DataError(AlignerError, ValueError):
    """A record or text that cannot be read or scored; the message names file and line."""


class CheckpointError(AlignerError, RuntimeError):
    """A checkpoint that is missing, incomplete, unsafe or made for another model."""


class ServingError(AlignerError, RuntimeError):
    """A request that cannot be answered, or a server that cannot go on."""


class TrainingError(AlignerError, RuntimeError):
    """A step whose numbers are no longer finite; the message names step, rank and records."""


class StoppedError(AlignerError, RuntimeError):
    """A run that was asked to stop, and has saved: the same call goes on from there."""


class PeerError(AlignerError, RuntimeError):
    """Another process failed, and says why: this one ends without a word."""


class LostRankError(AlignerError, RuntimeError):
    """Another rank is gone, and nobody has said why."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def one_line(text: object) -> str:
    """Flatten another program's message to one line, short enough for an answer."""
    return writable(" ".join(str(text).split())[:_MOST_IN_LINE])


def shown(value: object) -> str:
    """``repr`` for an error message, short: whoever wrote the value may have written a lot."""
    try:
        return short(repr(value))
    except (ValueError, RecursionError):  # a number of 5000 digits, or lists in lists
        return type(value).__name__


def short(text: object) -> str:
    """The beginning of a text, or of what another program says, for an error message."""
    text = str(text)
    return writable(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def writable(text: str) -> str:
    """A text that any file or answer takes: half of a surrogate pair becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()
