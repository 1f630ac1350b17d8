"""Returns the text of an error, for tests with tables of rejected inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NOT_REFUSED = "it was not refused"


def refusal(
    kind: type[Exception] | tuple[type[Exception], ...],
    function: Callable[..., Any],
    *arguments: Any,
) -> str:
    """Call a function; return the text of its error of this kind, or ``NOT_REFUSED``."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    return NOT_REFUSED
