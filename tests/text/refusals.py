"""A table of what is refused, tried in one go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def not_refused(
    call: Callable[[Any], object],
    cases: Iterable[tuple[Any, str]],
    error: type[Exception],
) -> dict[str, str]:
    """Each ``(case, pattern)`` that ``call`` takes, or refuses without saying the pattern."""
    wrong = {}
    for number, (case, pattern) in enumerate(cases):
        said = "nothing, and took it"
        try:
            call(case)
        except error as caught:
            said = str(caught)
        if not re.search(pattern, said):
            wrong[f"{number}: {case!r:.100}"] = f"said {said}; wanted {pattern}"
    return wrong
