"""What settings there are: their keys, types, defaults, and what each is for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from nemo_aligner.config.common import ABOUT

_WIDTH = 78
_WORDS = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}


@dataclass(frozen=True)
class Key:
    """One setting.

    Attributes:
        name: with its sections, as in ``model.optim.lr``.
        default: as it is written in YAML.
        kind: of its values, for people.
        choices: its values, where there are few.
        about: what it is for.
    """

    name: str
    default: str
    kind: str
    choices: tuple[str, ...]
    about: str


def list_keys(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every key of ``schema``, sections not among them."""
    hints, defaults = get_type_hints(schema), schema()
    for item in fields(schema):
        kind = hints[item.name]
        if is_dataclass(kind):
            yield from list_keys(kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            yield Key(
                name=prefix + item.name,
                default=_as_yaml(getattr(defaults, item.name)),
                kind=_describe(kind),
                choices=_choices(kind),
                about=item.metadata[ABOUT],
            )


def kinds_of(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of ``schema``, and the type of its values."""
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from kinds_of(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name, kind


def render_keys(schema: type) -> str:
    """Every key under its section, with type, default and what it is for."""
    lines: list[str] = []
    last = None
    for key in list_keys(schema):
        section, _, name = key.name.rpartition(".")
        if section != last:
            lines += ["", f"{section}:" if section else "settings without a section:"]
            last = section
        lines.append(f"  {name}={key.default}  ({key.kind})")
        lines += textwrap.wrap(key.about, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines[1:])


def _as_yaml(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(value)


def _without_null(kind: Any) -> tuple[list[Any], bool]:
    parts = get_args(kind)
    if type(None) not in parts:
        return [kind], False
    return [part for part in parts if part is not type(None)], True


def _describe(kind: Any) -> str:
    (inner, *_), may_be_null = _without_null(kind)
    if isinstance(inner, type) and issubclass(inner, Enum):
        words = " | ".join(each.value for each in inner)
    elif get_origin(inner) in (list, tuple):
        words = f"[{_WORDS[get_args(inner)[0]]}, ...]"
    elif get_origin(inner) is dict:
        words = "key=value"
    else:
        words = _WORDS[inner]
    return f"{words} | null" if may_be_null else words


def _choices(kind: Any) -> tuple[str, ...]:
    (inner, *_), may_be_null = _without_null(kind)
    values: list[str] = []
    if isinstance(inner, type) and issubclass(inner, Enum):
        values = [each.value for each in inner]
    elif inner is bool:
        values = ["true", "false"]
    return (*values, "null") if values and may_be_null else tuple(values)
