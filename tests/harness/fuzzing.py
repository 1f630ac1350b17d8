"""Damaged JSON for fuzz tests: valid values with parts replaced, removed, renamed or repeated."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st


def deep_list(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


# Values that parsers, checks and templates have failed on, in this project or in others.
HOSTILE: tuple[Any, ...] = (
    *(10**400, -(10**400), 2**63, 2**64, -1, 0, 1, 2, 1e308, 1e-320, -0.0),
    *(float("inf"), float("-inf"), float("nan"), True, False, None),
    *(
        "",
        " ",
        "\n",
        "\x00",
        "\u200b\ufeff",
        "\ud800",
        "\u2028",
        "\U0001f600",
        "a" * 2000,
        "0",
        "1",
    ),
    *("<|im_end|>", "<|im_start|>user\n", "\n\nHuman: a\n\nAssistant: b", "\u043a\u0438", "+", "-"),
    *("null", "[]", "{}", "[[", '{"a": NaN}', '{"a": %s}' % ("9" * 400), '"\\ud800"', "[" * 3000),
    *("user", "assistant", "tool", "system", "text", "message", "function", "function_call"),
    *([], {}, [[]], [{}], [None], [""], {"": None}, {"a": {"b": [1]}}, [1, "a", None], [[1], [2]]),
    *({"type": "text", "text": "a"}, {"type": [], "text": {}}, {"role": [], "content": 1}),
    *({"role": "assistant", "content": None}, {"role": "user", "content": [{"type": "image"}]}),
    *(deep_list(70), deep_list(150), deep_list(500), {"a": deep_list(400)}),
)
_HOSTILE_TEXTS = [json.dumps(value) for value in HOSTILE]
Container: TypeAlias = dict[str, Any] | list[Any]


def _places(value: Any) -> list[tuple[Container, Any]]:
    """Container and key of every value that is nested in ``value``."""
    places: list[tuple[Container, Any]] = []
    containers = [value]
    for container in containers:  # grows while iterating, because recursion fails on deep values
        keys = container if isinstance(container, dict) else range(len(container))
        places += [(container, key) for key in keys]
        containers += [container[key] for key in keys if isinstance(container[key], dict | list)]
    return places


def _replace(inside: Container, key: Any, value: Any) -> None:
    inside[key] = value


def _remove(inside: Container, key: Any, value: Any) -> None:
    del inside[key]


def _rename(inside: Container, key: Any, value: Any) -> None:
    moved = inside.pop(key)
    if isinstance(inside, dict):
        inside[value if isinstance(value, str) else str(key).upper()] = moved
    else:
        inside.insert(0, moved)


def _repeat(inside: Container, key: Any, value: Any) -> None:
    inside[key] = [inside[key], copy.deepcopy(inside[key])]


def _put_inside(inside: Container, key: Any, value: Any) -> None:
    """Add ``value`` to the list or object at ``key``; where there is neither, to ``inside``."""
    target = inside[key] if isinstance(inside[key], dict | list) else inside
    if isinstance(target, dict):
        target["extra"] = value
    else:
        target.append(value)


def _as_text(inside: Container, key: Any, value: Any) -> None:
    inside[key] = (
        json.dumps(inside[key]) if isinstance(inside[key], dict | list) else str(value)[:50]
    )


Change: TypeAlias = Callable[[Container, Any, Any], None]
_CHANGES: tuple[Change, ...] = (
    *(_replace,) * 4, _remove, _rename, _repeat, _put_inside, _as_text,
)  # fmt: skip


def damaged(
    samples: Mapping[str, Sequence[Any]], count: int
) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """A strategy of ``count`` named samples, each with one to three random changes inside.

    Hypothesis chooses only a seed: it would repeat choices from a list and try few of them.
    """
    texts = [(name, json.dumps(value)) for name, values in samples.items() for value in values]
    return st.integers(0, 2**64 - 1).map(
        lambda seed: [*islice(_damage_each(texts, Random(seed)), count)]
    )


def _damage_each(texts: Sequence[tuple[str, str]], random: Random) -> Iterator[tuple[str, Any]]:
    while True:
        name, text = random.choice(texts)
        value = json.loads(text)
        for _ in range(random.randint(1, 3)):
            if places := _places(value):
                hostile = json.loads(random.choice(_HOSTILE_TEXTS))
                random.choice(_CHANGES)(*random.choice(places), hostile)
        yield name, value


def fuzz_settings(examples: int) -> settings:
    """Settings for reproducible examples without a deadline; ``Faults`` collects failures."""
    return settings(
        max_examples=examples,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )


class Faults:
    """Errors that no input may raise: for each place in the code, the first input that did."""

    def __init__(self, *allowed: type[Exception]) -> None:
        self._allowed = allowed
        self._inputs: dict[str, str] = {}
        self.tries = 0

    @contextmanager
    def noting(self, tried: object) -> Iterator[None]:
        """Record an error other than the allowed ones and suppress it."""
        self.tries += 1
        try:
            yield
        except self._allowed:
            pass
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}: {type(error).__name__}: {error}"
            self._inputs.setdefault(place[:200], repr(tried)[:1000])

    def check(self) -> None:
        """Fail with all recorded errors."""
        assert not self._inputs, "\n".join(
            f"{place}\n    {value}" for place, value in self._inputs.items()
        )
