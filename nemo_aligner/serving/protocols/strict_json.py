"""Parse JSON of requests, and reject what two parsers may read differently.

If a key comes twice in an object, most parsers silently keep the last value, others the first. A
proxy in front of this server might then check a request that is not the one that is scored. So
duplicate keys are an error here, and so is very deep nesting. The client imports ``kserve.py``,
which imports this module, so this module must not import pydantic.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from nemo_aligner.utils.errors import ServingError, short

# Deepest nesting of lists and objects, for all parsers, because recursive functions read the values
# later. It is pydantic's own limit minus one level.
MOST_LEVELS = 200
# Maximum number of keys of one object. Without the limit, checking a body of a million unknown keys
# takes seconds.
MOST_KEYS = 10_000
_SHOWN_NEIGHBOURS = 3


def read_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ServingError: ``text`` is not JSON or is nested too deeply, or an object in it has a
            duplicate key or more than ``MOST_KEYS`` keys.
    """
    try:
        value = json.loads(text, object_pairs_hook=_build_object)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # ValueError: not JSON, or an integer of more than 4300 digits
        raise ServingError(f"not JSON ({error})") from None
    _check_levels(value)
    return value


def check_keys(body: bytes) -> None:
    """Check the keys of a JSON body before pydantic parses it.

    Invalid JSON passes, because pydantic reports that error.

    Raises:
        ServingError: an object has a duplicate key or more than ``MOST_KEYS`` keys.
    """
    # A body with one colon has at most one key, so a large list of token ids is not parsed twice.
    if body.count(b":") > 1:
        with suppress(ValueError, RecursionError):
            json.loads(body.decode(), object_pairs_hook=_check_pairs)


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1:
        _build_object(pairs)


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ServingError(_describe_duplicate(pairs))
    if len(values) > MOST_KEYS:
        raise ServingError(f"got an object of {len(values)} keys, wanted at most {MOST_KEYS}")
    return values


def _describe_duplicate(pairs: list[tuple[str, Any]]) -> str:
    """Describe the first duplicate key with some of the keys around it, to help find the object."""
    seen: dict[str, None] = {}
    duplicate = ""
    for key, _ in pairs:
        if key in seen:
            duplicate = key
            break
        seen[key] = None
    neighbours = [_quote_key(key) for key in dict(pairs) if key != duplicate][:_SHOWN_NEIGHBOURS]
    place = f" next to {', '.join(neighbours)}" if neighbours else ""
    return f"got the key {_quote_key(duplicate)} twice in one object{place}; send it once"


def _quote_key(key: str) -> str:
    return short(json.dumps(key, ensure_ascii=False))


def _check_levels(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        children = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for group in children for child in group if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ServingError:
    return ServingError(f"the JSON is nested too deeply; wanted at most {MOST_LEVELS} levels")
