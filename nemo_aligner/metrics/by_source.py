"""Metrics of every source of the records apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_SOURCES = 50
BY_SOURCE = "by_source/"


def by_source(
    sources: Sequence[str], metrics: Callable[[Sequence[int]], dict[str, float]]
) -> dict[str, float]:
    """``by_source/<source>/<metric>`` for each of at least 2 and at most 50 sources.

    ``metrics`` gives those of the records with the given numbers; a record without a source has "".
    """
    groups: dict[str, list[int]] = {}
    for record, source in enumerate(sources):
        groups.setdefault(source, []).append(record)
    if not 2 <= len(groups) <= MAX_SOURCES:
        return {}
    unnamed = "(none)" if "none" in groups else "none"
    return {
        f"{BY_SOURCE}{source or unnamed}/{name}": value
        for source, records in sorted(groups.items())
        for name, value in metrics(records).items()
    }
