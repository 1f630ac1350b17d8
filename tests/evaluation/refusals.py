"""What something is refused with, for tables of what is to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NOT_REFUSED = "it was not refused"


def refusal(
    kind: type[Exception] | tuple[type[Exception], ...], function: Callable[..., Any], *given: Any
) -> str:
    """The error's text; an error of another kind is raised."""
    try:
        function(*given)
    except kind as error:
        return str(error)
    return NOT_REFUSED
