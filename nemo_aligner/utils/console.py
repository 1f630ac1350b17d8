"""Print to the terminal or a log file: wrapped lines, formatted numbers, progress bars, time left.

Only rank 0 prints. A log file gets the same output as a terminal, but without line wrapping and
progress bars.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from tqdm import tqdm

from nemo_aligner.utils.processes import is_main

Watch: TypeAlias = Callable[[int, int], None]
"""A callback for progress, called on every rank with (items done, all items).

If it raises, the work ends with its exception."""

LINE_SECONDS = 10.0
_FALLBACK = (80, 24)
_MIN_WIDTH = 40
_SEPARATOR = "  "
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"


def unwatched(done: int, total: int) -> None:
    """Do nothing: a ``Watch`` (progress callback) for work whose progress nobody needs."""


def width() -> int:
    """Return the number of columns of the terminal, at least 40; 80 without a terminal."""
    return max(_MIN_WIDTH, shutil.get_terminal_size(_FALLBACK).columns)


def say(text: str) -> None:
    """Print ``text`` on rank 0; on a terminal, long lines are wrapped between words."""
    if is_main():
        print(fit(text) if sys.stdout.isatty() else text, flush=True)


def fit(text: str) -> str:
    """Wrap each line of ``text`` between words to the width of the terminal."""
    return "\n".join(_wrap_line(line, "") for line in text.split("\n"))


def fit_row(name: str, text: object, column: int) -> str:
    """Format a row of a table for the terminal: ``name``, then ``text`` from ``column`` on.

    ``text`` is wrapped to the width of the terminal; all its lines begin at ``column``.
    """
    # Wrap the row with NULs in place of the name, because textwrap might break the line between the
    # words of the name.
    start = name.ljust(column)
    row = _wrap_line("\0" * len(start) + str(text), " " * column)
    return start + row[len(start) :]


def _wrap_line(line: str, hang: str) -> str:
    """Wrap a line to ``width``.

    The second and later lines start with ``hang``. If ``hang`` is empty, they start with the indent
    of ``line`` and two more spaces.
    """
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line,
        width(),
        subsequent_indent=hang or indent + _SEPARATOR,
        break_long_words=False,
        break_on_hyphens=False,
    )


def join_fields(fields: Iterable[str], first: str = "", indent: str = "  ") -> str:
    """Join fields by two spaces, with a new line where the next field would exceed ``width``.

    Args:
        first: text before the first line.
        indent: text before each further line.
    """
    lines: list[str] = []
    for field in fields:
        if lines and len(lines[-1]) + len(_SEPARATOR) + len(field) <= width():
            lines[-1] += _SEPARATOR + field
        else:
            lines.append((indent if lines else first) + field)
    return "\n".join(lines)


def unfold(text: str) -> list[str]:
    """Split a text into lines, and append each indented line to the line before it.

    This undoes the line breaks of ``join_fields``, for the run's report.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if lines and line.startswith(" "):
            lines[-1] += _SEPARATOR + line.strip()
        else:
            lines.append(line)
    return lines


def show_number(value: float) -> str:
    """Format a number with four significant digits; digits before the point are never dropped."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def show_duration(seconds: float) -> str:
    """Format a duration, such as ``40 s``, ``5 min``, ``1 h 5 min`` or ``2 d 3 h``."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def show_bytes(count: float) -> str:
    """Format a number of bytes in GB or, below 1 GB, in MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def waiting_for(
    activity: str, report_line: Callable[[str], None] = say, first: float = LINE_SECONDS
) -> Iterator[None]:
    """Print from time to time how long the ``with`` block has taken, for work of unknown progress.

    Args:
        activity: the text of the line, such as "loading weights".
        report_line: function that prints a line.
        first: seconds until the first line. The next lines come after twice, four times, ... as
            many seconds.
    """
    finished, started_at = threading.Event(), time.monotonic()

    def watch() -> None:
        pause = first
        while not finished.wait(pause):
            pause = time.monotonic() - started_at
            report_line(f"{activity} ({show_duration(pause)})")

    # A daemon thread, because it must not keep a process alive that ends with an error.
    watcher = threading.Thread(target=watch, name="waiting", daemon=True)
    if is_main():
        watcher.start()
    try:
        yield
    finally:
        finished.set()
        if watcher.is_alive():
            watcher.join()


class Progress:
    """Progress of work on ``total`` items: a bar on a terminal, and an estimate of the time left.

    Args:
        name: text before the bar.
        total: number of items.
        start: number of items that were done before, for example by an earlier run. They do not
            count for the estimate of the time left.
        clock: returns the current time in seconds.
    """

    def __init__(
        self,
        name: str,
        total: int,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._total, self._start, self._clock = name, total, start, clock
        self._bar: Any = None
        self._activity: str | None = None
        self._is_main = is_main()
        self.begin()
        self._last_line = self._since

    def begin(self) -> None:
        """Restart the clock for the estimate of the time left.

        Call it if earlier work, such as loading, must not count.
        """
        self._since = self._clock()

    def move(self, done: int) -> None:
        """Set the number of items that are done, and update the bar."""
        if self._is_main and self._bar is None and sys.stderr.isatty():
            self._bar = self._open_bar()
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            self._show_postfix(done)

    def mention(self, work: str | None) -> None:
        """Show other ``work`` in the bar, such as a save in progress; None removes the text."""
        self._activity = work
        if self._bar is not None:
            self._show_postfix(self._bar.n)

    def _show_postfix(self, done: int) -> None:
        parts = [text for text in (self.time_left(done), self._activity) if text]
        self._bar.set_postfix_str(", ".join(parts))  # set_postfix_str also redraws the bar

    def _open_bar(self) -> Any:
        return tqdm(
            total=self._total,
            initial=self._start,
            desc=self._name,
            bar_format=_BAR,
            dynamic_ncols=True,
            leave=False,
        )

    def time_left(self, done: int) -> str | None:
        """Format the time left as ``2 min left``; None before the first item and after the last."""
        if not self._start < done < self._total:
            return None
        return f"{show_duration(self.seconds_left(done))} left"

    def seconds_left(self, done: int) -> float:
        """Estimate the seconds left from the mean time per item so far."""
        per_item = (self._clock() - self._since) / (done - self._start)
        return per_item * (self._total - done)

    def line_is_due(self) -> bool:
        """True if the last log line is at least ten seconds old.

        If it is true, the caller prints a line, so the next ten seconds start now.
        """
        now = self._clock()
        if now - self._last_line < LINE_SECONDS:
            return False
        self._last_line = now
        return True

    def say(self, text: str) -> None:
        """Print ``text`` above the progress bar, or with ``say`` if there is no bar."""
        if self._bar is None:
            say(text)
        else:
            self._bar.write(fit(text))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Counter:
    """Shows the progress of work that prints no lines itself.

    A terminal shows a bar; a log file gets a line every ten seconds.
    """

    def __init__(self, name: str, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._unit, self._clock = name, unit, clock
        self._progress = Progress(name, 0, clock=clock)

    def show(self, done: int, total: int) -> None:
        """Set the number of items that are done.

        ``done`` of 0 starts a new bar, and ``done`` equal to ``total`` removes it.
        """
        if done == 0:
            self._progress = Progress(self._name, total, clock=self._clock)
            if total:
                self._progress.move(0)
        elif done >= total:
            self.close()
        elif sys.stderr.isatty():
            self._progress.move(done)
        elif self._progress.line_is_due():
            time_left = self._progress.time_left(done)
            say(f"{self._name}: {done} of {total} {self._unit}, {time_left}")

    def close(self) -> None:
        """Remove the bar; call it if the work ends before all items are done."""
        self._progress.close()
