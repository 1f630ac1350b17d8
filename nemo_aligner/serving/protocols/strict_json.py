"""JSON of requests as no sender can mean it two ways: keys once, and lists nested to a limit.

Of a key that comes twice the last one would win without a word, so that a proxy and this server may
read different requests. Nothing here needs pydantic, as the client imports ``kserve.py``.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from nemo_aligner.utils.errors import ServingError, short

# Levels of lists and objects in each other. pydantic's reader has this limit and takes one more;
# so have all, as functions that call themselves for each level read the values later.
MOST_LEVELS = 200
# In one object. Without a limit, checking a body of a million unknown keys takes seconds.
MOST_KEYS = 10_000
_SHOWN_NEIGHBOURS = 3


def read_json(text: str) -> Any:
    """Parse a text of JSON.

    Raises:
        ServingError: it is no JSON, nested too deeply, or an object has a key twice, or too many.
    """
    try:
        value = json.loads(text, object_pairs_hook=_checked_object)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # an integer of more than 4300 digits is one, too
        raise ServingError(f"not JSON ({error})") from None
    _check_levels(value)
    return value


def check_keys(body: bytes) -> None:
    """Check the keys of a body that another reader parses, which also says if it is no JSON.

    Raises:
        ServingError: an object has a key twice, or too many.
    """
    # With one colon there is one key at most, as in a large list of token ids.
    if body.count(b":") > 1:
        with suppress(ValueError, RecursionError):
            json.loads(body.decode(), object_pairs_hook=_check_pairs)


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1:
        _checked_object(pairs)


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ServingError(_duplicate(pairs))
    if len(values) > MOST_KEYS:
        raise ServingError(f"got an object of {len(values)} keys, wanted at most {MOST_KEYS}")
    return values


def _duplicate(pairs: list[tuple[str, Any]]) -> str:
    """Name the first key that comes twice, and neighbours by which its object is found."""
    seen: dict[str, None] = {}
    duplicate = ""
    for key, _ in pairs:
        if key in seen:
            duplicate = key
            break
        seen[key] = None
    neighbours = [_quoted(key) for key in dict(pairs) if key != duplicate][:_SHOWN_NEIGHBOURS]
    place = f" next to {', '.join(neighbours)}" if neighbours else ""
    return f"got the key {_quoted(duplicate)} twice in one object{place}; send it once"


def _quoted(key: str) -> str:
    return short(json.dumps(key, ensure_ascii=False))


def _check_levels(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        children = (node.values() if isinstance(node, dict) else node for node in level)
        level = [each for group in children for each in group if isinstance(each, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ServingError:
    return ServingError(f"JSON that is nested too deeply, wanted at most {MOST_LEVELS} levels")
