"""Did you mean? What somebody may have wanted to write, where something is near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Of difflib's ratio: a letter or two of a word, and no other word.
_NEAR = 0.75
# Of whole keys that have the last name in common.
_MOVED = 0.65


def suggestion(key: str, known: Iterable[str]) -> str | None:
    """The key of ``known`` that ``key`` (``section.name``, or a plain word) was to be.

    A key with the same name in another section that is near, else one with nearly the same name in
    the same part of the settings (what stands before the first dot).
    """
    section, _, name = key.rpartition(".")
    part = key.partition(".")[0] if section else ""
    same_name = [each for each in known if each.rpartition(".")[2] == name]
    in_part = [each for each in known if not section or each.startswith(f"{part}.")]
    moved = [each for each in same_name if each in in_part]
    moved += difflib.get_close_matches(key, same_name, cutoff=_MOVED)
    if moved:
        return moved[0]
    by_name: dict[str, list[str]] = {}
    for each in in_part:
        by_name.setdefault(each.rpartition(".")[2], []).append(each)
    near = difflib.get_close_matches(name, by_name, cutoff=_NEAR)
    candidates = [each for found in near for each in by_name[found]]
    own = [each for each in candidates if each.rpartition(".")[0] == section]
    return next(iter(own or candidates), None)
