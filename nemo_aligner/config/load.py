"""Dataclass defaults < ``--config`` YAML < ``key=value`` on the command line."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.errors import ConfigError

T = TypeVar("T")


def load_config(schema: type[T], argv: Sequence[str]) -> T:
    """The settings of one run, checked; ``--help`` prints every key with its default and exits.

    Raises:
        ConfigError: an unreadable file, an unknown key, or a value that does not fit.
    """
    if "--help" in argv or "-h" in argv:
        print(_usage(schema))
        sys.exit(0)
    path, overrides = _split(argv)
    merged = OmegaConf.structured(schema)
    if path is not None:
        merged = _merge(merged, _read(path), schema, str(path))
    for text in overrides:
        merged = _merge(merged, _parse(text), schema, text)
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def save_config(config: object, path: Path) -> None:
    """Write the resolved settings as YAML that ``load_config`` reads back."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def config_to_dict(config: object) -> dict[str, Any]:
    """The resolved settings as plain data, for logs and checkpoints."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return plain  # type: ignore[return-value]


def _split(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    path, overrides = None, []
    rest = iter(argv)
    for argument in rest:
        if argument == "--config":
            value = next(rest, None)
            if value is None:
                raise ConfigError("--config: got nothing, wanted a YAML file")
            path = Path(value)
        elif argument.startswith("--config="):
            path = Path(argument.removeprefix("--config="))
        elif "=" in argument and not argument.startswith("-"):
            # NeMo-Aligner's commands mark new keys with + or ++.
            overrides.append(argument.lstrip("+"))
        else:
            raise ConfigError(f"got {argument!r}, wanted --config FILE or section.key=value")
    return path, overrides


def _read(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:  # yaml and the file system have many
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: got a list, wanted sections with keys")
    return loaded


def _parse(text: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([text])
    except Exception as error:
        raise ConfigError(f"{text}: {error}") from error


def _merge(base: Any, update: DictConfig, schema: type, where: str) -> Any:
    known = set(_keys(schema))
    _check_sections(update, schema, where)
    for key in _leaves(update):
        if not _is_known(key, known):
            raise ConfigError(f"{where}: unknown key {key}{_suggestion(key, known)}")
    try:
        return OmegaConf.merge(base, update)
    except ConfigError:
        raise
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        raise ConfigError(f"{where}: {key}: {str(error).splitlines()[0]}") from error


def _check_sections(update: DictConfig, schema: type, where: str, prefix: str = "") -> None:
    """Drop empty sections of a YAML file; refuse a value where a section belongs."""
    hints = get_type_hints(schema)
    for name in list(update):
        kind, value = hints.get(str(name)), update._get_node(name)
        if not is_dataclass(kind):
            continue
        if isinstance(value, DictConfig) and not value._is_none():
            _check_sections(value, kind, where, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif OmegaConf.is_missing(update, name) or update[name] is None:
            update.pop(name)
        else:
            raise ConfigError(f"{where}: {prefix}{name}: got {update[name]}, wanted keys under it")


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for item in fields(schema):
        key, kind = prefix + item.name, hints[item.name]
        yield key
        if is_dataclass(kind):
            yield from _keys(kind, key + ".")  # type: ignore[arg-type]


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name, value in config.items_ex(resolve=False):
        key = prefix + str(name)
        if isinstance(value, DictConfig) and len(value) > 0:
            yield from _leaves(value, key + ".")
        else:
            yield key


def _is_known(key: str, known: set[str]) -> bool:
    if key in known:
        return True
    parent = key.rpartition(".")[0]
    return parent.endswith("_kwargs") and parent in known


def _suggestion(key: str, known: set[str]) -> str:
    name = key.rpartition(".")[2]
    same_name = sorted(item for item in known if item.rpartition(".")[2] == name)
    close = same_name or difflib.get_close_matches(key, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _usage(schema: type) -> str:
    lines = ["usage: [--config FILE] [section.key=value ...]", "", "keys and defaults:"]
    lines += [f"  {key}={_shown(value)}" for key, value in _defaults(schema())]
    return "\n".join(lines)


def _defaults(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from _defaults(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{value.name}   ({' | '.join(type(value).__members__)})"
    return "null" if value is None else str(value).replace("'", "")
