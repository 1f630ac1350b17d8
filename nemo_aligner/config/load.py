"""Loading of settings: dataclass defaults, then a YAML file, then ``key=value`` overrides.

All problems are raised in one error: ``_Merging`` collects and checks the settings. The functions
of ``yaml_text.py`` keep YAML from reading the text ``007`` as a number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.compat import RULES, Translation
from nemo_aligner.config.describe import (
    describe_unknown,
    find_settings,
    list_keys,
    suggest_setting,
    types_of_fields,
    without_null,
)
from nemo_aligner.config.mistakes import (
    describe_file_error,
    describe_word,
    describe_wrong,
    find_spaced,
)
from nemo_aligner.config.yaml_text import TypeOfKey, read_file, read_setting
from nemo_aligner.utils.errors import ConfigError, SettingsError, first_line, shown

T = TypeVar("T")
# Python types of the settings with several values.
_COLLECTIONS: Mapping[Any, type] = {list: list, tuple: list, dict: dict}


def load_config(schema: type[T], settings: Sequence[str] = (), file: str | Path | None = None) -> T:
    """Load and check the settings of one run.

    Args:
        schema: dataclass of the settings, such as ``TrainConfig``.
        settings: overrides of the form ``key=value``.
        file: a YAML file, or the name of a packaged one.

    Raises:
        ConfigError: the file cannot be read.
        SettingsError: unknown keys or invalid values; the message lists all of them.
    """
    config, _ = load_with_notes(schema, settings, file)
    return config


def load_with_notes(
    schema: type[T], settings: Sequence[str] = (), file: str | Path | None = None
) -> tuple[T, list[str]]:
    """Load settings as ``load_config`` does; also return notes on translated or ignored keys.

    Raises:
        ConfigError, SettingsError: see ``load_config``. A setting of NeMo-Aligner that cannot be
            translated without a change of results is an error, too.
    """
    merging = _Merging(schema, file)
    merging.add_assignments(settings)
    return merging.finish(), merging.notes()


def load_settings(
    schema: type[T], settings: Mapping[str, Any], file: str | PathLike[str] | None = None
) -> T:
    """Load and check settings that the Python API gets as Python values.

    Args:
        settings: Python values by full keys, or in nested mappings; they override the values of
            ``file``. Paths, enum members and numpy numbers are converted.

    Raises:
        ConfigError, SettingsError: see ``load_config``.
    """
    merging = _Merging(schema, file)
    for key, value in settings.items():
        merging.add_value(key, value)
    return merging.finish()


def check_needed(config: object, schema: type, needed: Sequence[str]) -> None:
    """Check that the settings with the full keys ``needed`` are set.

    Raises:
        SettingsError: one of them is null or empty.
    """
    missing = [key for key in needed if not attrgetter(key)(config)]
    if missing:
        help_texts = {key.name: key.help_text for key in list_keys(schema)}
        raise SettingsError(
            [f"{key}: it is not set. Set it to the {help_texts[key]}" for key in missing]
        )


def load_values(schema: type[T], values: Mapping[str, Any], location: str) -> T:
    """Load settings from a nested mapping that another program passes.

    Args:
        location: name of the mapping in error messages.

    Raises:
        SettingsError: unknown keys or invalid values; the message lists all of them.
    """
    merging = _Merging(schema)
    merging.add(OmegaConf.create(dict(values)), location)
    return merging.finish()


def save_config(config: object, path: Path) -> None:
    """Write the resolved settings as YAML that ``load_config`` reads back."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config))), encoding="utf-8")


def config_to_dict(config: object) -> dict[str, Any]:
    """Return the resolved settings as nested dicts, for logs and checkpoints."""
    values: dict[str, Any] = {}
    for item in fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        values[item.name] = config_to_dict(value) if is_dataclass(value) else _to_yaml_value(value)
    return values


@cache
def _read_defaults(schema: type) -> DictConfig:
    """Return the defaults of ``schema``, to be copied: OmegaConf copies them six times as fast."""
    return OmegaConf.structured(schema)  # type: ignore[no-any-return]


def _read_sections(path: Path, type_of: TypeOfKey) -> DictConfig:
    """Read the sections of a YAML file; ConfigError if it cannot be read."""
    try:
        loaded = read_file(path, type_of)
    except Exception as error:  # yaml and the file system raise many error types
        raise ConfigError(f"{path}: {describe_file_error(path, error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: got a list at the top level, wanted sections with keys")
    return loaded


class _Merging:
    """Collector of updates to the settings of ``schema``, and of the problems with them.

    An update is a settings file or one ``key=value``. First add all updates; the constructor adds
    ``file``, so that the others override it. Then ``finish`` merges them.
    """

    def __init__(self, schema: type, file: str | PathLike[str] | None = None) -> None:
        self._schema = schema
        # Items are ``(update, file, key)``: ``key`` is "" for a file, ``file`` is "" for key=value.
        self._updates: list[tuple[DictConfig, str, str]] = []
        self._translation = Translation(RULES.get(schema, ()))
        self._merged = deepcopy(_read_defaults(schema))
        keys = list_keys(schema)
        # For each setting its type in words, and its Python type apart from None.
        self._kinds = {key.name: key.kind for key in keys}
        self._types = {key.name: without_null(key.type) for key in keys}
        self._mappings = [key for key, kind in self._types.items() if get_origin(kind) is dict]
        # The problems of each file; the key "" is for settings that are not from a file.
        self._problems: dict[str, list[str]] = {}
        # The names of unknown keys for each (file, section).
        self._unknown: dict[tuple[str, str], list[str]] = {}
        if file is not None:
            self.add(_read_sections(find_settings(file), self.type_of), str(file))

    def type_of(self, key: str) -> Any:
        """Return the type of the setting ``key`` (ours or NeMo-Aligner's); None for a section."""
        key = self._translation.target(key)
        for name in self._mappings:
            if key.startswith(f"{name}."):
                return get_args(self._types[name])[1]
        return self._types.get(key)

    def add_assignments(self, words: Sequence[str]) -> None:
        """Add the ``key=value`` arguments of a command line."""
        assignments, problem = find_spaced(words)
        if problem is not None:
            self._add_problem("", problem)
        for assignment in assignments:
            self._add_assignment(assignment)

    def _add_assignment(self, assignment: str) -> None:
        """Add a ``key=value`` argument; Hydra's prefixes + and ++ are ignored."""
        key, equals_sign, value = assignment.partition("=")
        key = key.lstrip("+")
        if not equals_sign or not key:
            self._add_problem("", describe_word(assignment, self._kinds))
            return
        try:
            update = read_setting(key, value, self.type_of)
        except Exception as error:  # yaml raises many error types
            self._add_problem("", f"{assignment}: {first_line(error)}")
            return
        self.add(update, "", key)

    def add_value(self, key: str, value: Any) -> None:
        """Add one setting with a Python value, for the Python API."""
        update = OmegaConf.create({})
        try:
            OmegaConf.update(update, key, _to_yaml_value(value))
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            self._add_problem("", f"{key}: got {shown(value)}: {first_line(error)}")
            return
        self.add(update, "", key)

    def add(self, update: DictConfig, location: str, key: str = "") -> None:
        """Add the sections of a file, or the single setting ``key``.

        Args:
            location: the file, for error messages; empty for a single setting.
        """
        self._translation.register(update)
        self._updates.append((update, location, key))

    def notes(self) -> list[str]:
        """List each translated and each ignored key of NeMo-Aligner."""
        return self._translation.notes()

    def _clear_mappings(self, update: DictConfig, key: str) -> None:
        """Empty the dict settings that an update sets as a whole, before it is merged.

        So ``key={a: 1}`` replaces all earlier entries of the dict; ``key.a=1`` adds an entry.
        """
        tree: Any = OmegaConf.to_container(update, resolve=False)
        for name in self._mappings:
            if not key.startswith(f"{name}.") and _has_key(tree, name):
                OmegaConf.update(self._merged, name, {}, merge=False)

    def _add_section(self, update: DictConfig, schema: Any, location: str, prefix: str) -> None:
        hints = types_of_fields(schema)
        # A reference such as ${model.seed} may point to a later update, so it is not resolved yet.
        for name, value in update.items_ex(resolve=False):
            key, kind = f"{prefix}{name!s}", hints.get(str(name))
            is_empty = value is None or (OmegaConf.is_config(value) and value._is_none())
            if kind is None:
                self._add_unknown(key, value, location)
            elif not is_dataclass(kind):
                self._add_value(key, kind, value, location)
            elif isinstance(value, DictConfig) and not is_empty:
                self._add_section(value, kind, location, f"{key}.")
            elif not is_empty:
                self._add_problem(
                    location, f"{key}: got {shown(value)}, wanted a section with keys"
                )

    def _add_value(self, key: str, kind: Any, value: Any, location: str) -> None:
        origin = get_origin(self._types[key])
        # A single value becomes a list of one if a list is expected, unless it is a reference such
        # as ${model.seed}.
        if origin is list and isinstance(value, str | float | int) and "${" not in str(value):
            value = [value]
        if get_origin(kind) is dict and value is None:
            return  # null is an empty dict, from which ``finish`` starts every mapping that is set
        if origin in (list, tuple) and _has_collections(value):
            self._add_problem(location, f"{key}: got {shown(value)}, wanted {self._kinds[key]}")
            return
        # OmegaConf cannot merge into null.
        merges = origin is dict and self._present(key) is not None
        try:
            OmegaConf.update(self._merged, key, value, merge=merges)
        except OmegaConfBaseException:
            self._add_problem(location, describe_wrong(key, self._kinds[key], value))

    def _append_to_list(self, key: str, values: list[Any], location: str) -> None:
        present = self._present(key)
        # Anything else is a reference without such a value, which ``_build_section`` reports.
        if isinstance(present, ListConfig):
            # Not ``[*present]``, which would resolve references.
            joined = OmegaConf.create([*present._iter_ex(resolve=False), *values])
            self._add_value(key, self._types[key], joined, location)

    def _present(self, key: str) -> Any:
        """Return the value of a setting so far; None if it refers to one that has no value."""
        return OmegaConf.select(self._merged, key, throw_on_resolution_failure=False)

    def _add_unknown(self, key: str, value: Any, location: str) -> None:
        """Record an unknown key, or each key of an unknown section if one has a suggestion."""
        content: Any = OmegaConf.to_container(value) if isinstance(value, DictConfig) else {}
        keys = [f"{key}.{name}" for name in flatten(content)] if content else [key]
        hints = {
            unknown: describe_unknown(unknown, suggest_setting(unknown, self._kinds))
            for unknown in keys
        }
        if not any(hints.values()):
            hints = {key: ""}
        for unknown, hint in hints.items():
            if hint:
                self._add_problem(location, f"unknown key {unknown}{hint}")
                continue
            section, _, name = unknown.rpartition(".")
            self._unknown.setdefault((location, section), []).append(name)

    def _add_problem(self, location: str, problem: str) -> None:
        self._problems.setdefault(location, []).append(problem)

    def finish(self) -> Any:
        """Merge all updates, and return an instance of ``schema``.

        Raises:
            SettingsError: there are problems; the message lists all of them.
        """
        for update, location, key in self._updates:
            self._clear_mappings(update, key)
            translated = self._translation.translate(update, location)
            self._add_section(translated, self._schema, location, "")
        for key, values, location in self._translation.added:
            self._append_to_list(key, values, location)
        for location, problem in self._translation.problems:
            self._add_problem(location, problem)
        config = self._build_section(self._schema, self._merged, "")
        problems = self._render_problems() or self._compare_pending(config)
        if problems:
            raise SettingsError(problems)
        return config

    def _compare_pending(self, config: object) -> list[str]:
        """List the NeMo-Aligner settings that differ from ours, but must not (``SameValue``)."""
        problems = (pending.find_problem(config) for pending in self._translation.pending)
        return [problem for problem in problems if problem is not None]

    def _build_section(self, schema: Any, node: DictConfig, prefix: str) -> Any:
        """Build the dataclass of a section; if it is invalid, record why and use its defaults."""
        hints = types_of_fields(schema)
        values: dict[str, Any] = {}
        for item in fields(schema):
            kind, key = hints[item.name], prefix + item.name
            origin = get_origin(self._types.get(key))
            try:
                # Reading a value resolves its references; now all updates are merged.
                value = node[item.name]
                if OmegaConf.is_config(value) and not is_dataclass(kind):
                    value = OmegaConf.to_object(value)
            except OmegaConfBaseException as error:
                self._add_problem("", f"{key}: {first_line(error)}")
                continue
            if is_dataclass(kind):
                value = self._build_section(kind, value, f"{key}.")
            elif value is not None and not isinstance(value, _COLLECTIONS.get(origin, object)):
                # OmegaConf checks what a reference gives only for settings of a single value.
                self._add_problem("", describe_wrong(key, self._kinds[key], value))
                continue
            values[item.name] = tuple(value) if get_origin(kind) is tuple else value
        try:
            # Not OmegaConf.to_object: it stops at the first invalid section.
            return schema(**values)
        except SettingsError as error:
            for problem in error.problems:
                self._add_problem("", problem)
            return schema()

    def _render_problems(self) -> list[str]:
        """Render all problems; unknown keys of one section share a line."""
        for (location, section), names in self._unknown.items():
            keys = ", ".join(names)
            if len(names) == 1:
                problem = f"unknown key {section}{'.' * bool(section)}{keys}"
            else:
                problem = f"unknown keys{f' of {section}' * bool(section)}: {keys}"
            self._add_problem(location, problem)
        self._unknown.clear()
        # Problems in files come first, because they may have caused the other problems.
        ordered = sorted(self._problems.items(), key=lambda item: not item[0])
        return [
            f"{location}: {problem}" if location else problem
            for location, problems in ordered
            for problem in problems
        ]


def _to_yaml_value(value: Any) -> Any:
    """Convert a Python value to the plain value that YAML would give for the same setting."""
    if isinstance(value, Mapping):
        return {str(key): _to_yaml_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_yaml_value(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _has_collections(value: Any) -> bool:
    """Tell if a list contains lists or mappings; OmegaConf would not check the types of these."""
    return isinstance(value, ListConfig) and any(
        OmegaConf.is_config(item) and not item._is_none() for item in value._iter_ex(resolve=False)
    )


def _has_key(tree: Any, key: str) -> bool:
    """Tell if nested settings have the full key."""
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested settings into a flat dict with full keys such as ``a.b``."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
