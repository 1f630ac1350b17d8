"""Progress of a run for the person at the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from nemo_aligner.parallel.collectives import is_main

_PLAIN_LINE_SECONDS = 10.0


_BAR_FORMAT = "{l_bar}{bar:20}{r_bar}"


class Progress:
    """Progress on rank 0: a bar on a terminal, a plain line every few seconds in a log file."""

    def __init__(self, total: int, start: int) -> None:
        self._total = total
        self._last_line = float("-inf")
        self._bar: Any = None
        self._is_main = is_main()
        if self._is_main and sys.stderr.isatty():
            self._bar = tqdm(
                total=total, initial=start, unit="step", bar_format=_BAR_FORMAT, desc="train"
            )

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move to ``step``, counted from 1."""
        shown = {name.partition("/")[2]: f"{value:.4g}" for name, value in metrics.items()}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._is_main and self._line_is_due(step):
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            print(f"step {step}/{self._total}  {text}", flush=True)

    def _line_is_due(self, step: int) -> bool:
        now = time.monotonic()
        if step < self._total and now - self._last_line < _PLAIN_LINE_SECONDS:
            return False
        self._last_line = now
        return True

    def say(self, text: str) -> None:
        """A line of its own, on rank 0."""
        if self._bar is not None:
            self._bar.write(text)
        elif self._is_main:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
