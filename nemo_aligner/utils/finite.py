"""Replace NaN and infinity with null in values for JSON files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite_or_none(value: Any) -> Any:
    """Return a value with None (null) for NaN and infinity, which JSON does not have.

    Lists and mappings are copied, with all values in them; tuples become lists.
    """
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
