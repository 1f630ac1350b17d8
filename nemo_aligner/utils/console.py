"""Terminal output of long work: lines that fit, time left, and a progress bar.

The same lines appear on a terminal and in a log file. Everything is told by rank 0 alone.
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
"""Called on every rank now and then, with how many items are done, and of how many; may raise."""

LINE_SECONDS = 10.0
_FALLBACK = (80, 24)
_LEAST_WIDTH = 40
_SEPARATOR = "  "
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"


def unwatched(done: int, total: int) -> None:
    """A ``Watch`` for where nobody looks."""


def width() -> int:
    """Columns of the terminal; 80 in a log file."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size(_FALLBACK).columns)


def say(text: str) -> None:
    """Print on rank 0; on a terminal long lines break between words."""
    if is_main():
        print(fit(text) if sys.stdout.isatty() else text, flush=True)


def fit(text: str) -> str:
    """The lines of a text, broken between words where they are longer than ``width``."""
    return "\n".join(_break(line, "") for line in text.split("\n"))


def fit_row(name: str, text: object, column: int) -> str:
    """A row of a table of two columns, whose text begins, in all of its lines, at ``column``."""
    # A break of the line between a name's words would move its text.
    start = name.ljust(column)
    row = _break("\0" * len(start) + str(text), " " * column)
    return start + row[len(start) :]


def _break(line: str, hang: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line,
        width(),
        subsequent_indent=hang or indent + _SEPARATOR,
        break_long_words=False,
        break_on_hyphens=False,
    )


def join_fields(fields: Iterable[str], first: str = "", rest: str = "  ") -> str:
    """The fields side by side, in as many lines of ``width`` as it takes; none is broken.

    The first line begins with ``first``, the others with ``rest``.
    """
    lines: list[str] = []
    for field in fields:
        if lines and len(lines[-1]) + len(_SEPARATOR) + len(field) <= width():
            lines[-1] += _SEPARATOR + field
        else:
            lines.append((rest if lines else first) + field)
    return "\n".join(lines)


def unfold(text: str) -> list[str]:
    """The lines of a text, each with those behind it that are indented, as ``join_fields``'s."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and line.startswith(" "):
            lines[-1] += _SEPARATOR + line.strip()
        else:
            lines.append(line)
    return lines


def show_number(value: float) -> str:
    """Four digits, and all of those before the point."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def show_duration(seconds: float) -> str:
    """Format a duration in its largest unit and, for hours and days, the next: ``1 h 5 min``."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def show_bytes(count: float) -> str:
    """Format bytes in GB, or in MB below one."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def waiting_for(
    what: str, tell: Callable[[str], None] = say, first: float = LINE_SECONDS
) -> Iterator[None]:
    """Say how long the block takes, for work that does not know how far it is.

    A line after ``first`` seconds, one after twice as many, and so on; ``tell`` says it.
    """
    over, begun = threading.Event(), time.monotonic()

    def watch() -> None:
        pause = first
        while not over.wait(pause):
            pause = time.monotonic() - begun
            tell(f"{what} ({show_duration(pause)})")

    # A daemon, so that a process which ends by an error does not wait for it.
    watcher = threading.Thread(target=watch, name="waiting", daemon=True)
    if is_main():
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if watcher.is_alive():
            watcher.join()


class Progress:
    """Progress of ``total`` items: a bar on a terminal, and the time left for log lines.

    Time counts from ``begin``, or from the making of this; ``start`` items were done before.
    """

    def __init__(
        self,
        name: str,
        total: int,
        start: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._total, self._start, self._now = name, total, start, now
        self._bar: Any = None
        self._beside: str | None = None
        self._is_main = is_main()
        self.begin()
        self._last_line = self._since

    def begin(self) -> None:
        """Count time from now on."""
        self._since = self._now()

    def move(self, done: int) -> None:
        """Say that ``done`` items are done."""
        if self._is_main and self._bar is None and sys.stderr.isatty():
            self._bar = self._open_bar()
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            self._show_postfix(done)

    def mention(self, work: str | None) -> None:
        """Have the bar say what is at work beside the items; None: nothing is any more."""
        self._beside = work
        if self._bar is not None:
            self._show_postfix(self._bar.n)

    def _show_postfix(self, done: int) -> None:
        said = [text for text in (self.time_left(done), self._beside) if text]
        self._bar.set_postfix_str(", ".join(said))  # which draws it anew

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
        """At the pace of the items so far."""
        per_item = (self._now() - self._since) / (done - self._start)
        return per_item * (self._total - done)

    def line_is_due(self) -> bool:
        """Return True if it is time for another log line."""
        now = self._now()
        if now - self._last_line < LINE_SECONDS:
            return False
        self._last_line = now
        return True

    def say(self, text: str) -> None:
        """Lines above the bar."""
        if self._bar is None:
            say(text)
        else:
            self._bar.write(fit(text))

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Counter:
    """Progress of work without results on its way: a bar, or in a log file a line now and then."""

    def __init__(self, name: str, unit: str, now: Callable[[], float] = time.monotonic) -> None:
        self._name, self._unit, self._now = name, unit, now
        self._progress = Progress(name, 0, now=now)

    def show(self, done: int, total: int) -> None:
        """Say how many items are done: 0 begins anew, and after the last nothing is left to see."""
        if done == 0:
            self._progress = Progress(self._name, total, now=self._now)
            if total:
                self._progress.move(0)
        elif done >= total:
            self.close()
        elif sys.stderr.isatty():
            self._progress.move(done)
        elif self._progress.line_is_due():
            left = self._progress.time_left(done)
            say(f"{self._name}: {done} of {total} {self._unit}, {left}")

    def close(self) -> None:
        """Take the bar away, also where the work was left."""
        self._progress.close()
