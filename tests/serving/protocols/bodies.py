"""Parse bodies of the gateway's protocols, and collect what a route rejects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.utils.errors import ServingError


def parsed(route: Any, body: Any) -> Any:
    return route.parse(json.dumps(body).encode())


def scored(*rewards: list[float], errors: dict[int, str] | None = None) -> ScoredRows:
    """Rows of rewards, none of which was truncated."""
    values = np.array(rewards, dtype=np.float32)
    return ScoredRows(values, errors or {}, np.zeros(len(rewards), bool), "cafe", "f00d")


def not_refused(read: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """List the cases that ``read`` accepts, or rejects with another message than their pattern."""
    wrong: list[Any] = []
    for *given, pattern in cases:
        try:
            wrong.append((given, "is taken", read(*given)))
        except ServingError as error:
            if not re.search(pattern, str(error)) or "\n" in str(error):
                wrong.append((given, pattern, str(error)))
    return wrong
