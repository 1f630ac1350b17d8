"""Check of a table of invalid cases and their error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def assert_refused(
    call: Callable[[Any], object],
    cases: Iterable[tuple[Any, str]],
    error: type[Exception],
) -> None:
    """Assert that ``call`` raises ``error`` for each case, and the message matches its pattern."""
    wrong = []
    for number, (case, pattern) in enumerate(cases):
        said = "nothing, and took it"
        try:
            call(case)
        except error as caught:
            said = str(caught)
        if not re.search(pattern, said):
            wrong.append(f"case {number}, {case!r:.100}: wanted {pattern!r}, it said: {said}")
    assert not wrong, "\n".join(wrong)
