"""Load settings: dataclass defaults, then a YAML file, then ``key=value``; all problems in one
error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.common import ANY, RANKS, IdleRule, as_yaml
from nemo_aligner.config.compat import RULES, Translation
from nemo_aligner.config.describe import (
    describe_unknown,
    find_settings,
    list_keys,
    settings_names,
    suggest_setting,
    suggestion,
)
from nemo_aligner.config.evaluation import IDLE_IN_EVALUATION, EvaluateConfig
from nemo_aligner.config.serving import (
    IDLE_IN_CRITICS,
    IDLE_IN_SERVING,
    ServeConfig,
    ServeCriticConfig,
)
from nemo_aligner.config.training import IDLE_IN_TRAINING, TrainConfig
from nemo_aligner.utils.errors import ConfigError, SettingsError, first_line, shown

T = TypeVar("T")


def load_config(schema: type[T], settings: Sequence[str] = (), file: str | Path | None = None) -> T:
    """The settings of one run, checked: ``settings`` (``key=value``) over those of ``file``.

    Raises:
        ConfigError: the file cannot be read.
        SettingsError: an unknown key, or a value that does not fit; it has all of them.
    """
    config, _ = load_with_notes(schema, settings, file)
    return config


def load_with_notes(
    schema: type[T], settings: Sequence[str] = (), file: str | Path | None = None
) -> tuple[T, list[str]]:
    """Load settings as ``load_config`` does, with a note for each key of NeMo-Aligner.

    Raises:
        ConfigError, SettingsError: see ``load_config``; a value of NeMo-Aligner that would train
            or score otherwise here.
    """
    merging = _Merging(schema, file)
    for text in settings:
        merging.add_setting(text)
    return merging.finish(), merging.notes()


def load_given(
    schema: type[T], given: Mapping[str, Any], file: str | PathLike[str] | None = None
) -> T:
    """``load_config`` for a program: Python values by their whole keys, or nested, over a file's.

    Paths, members of enums and numbers of numpy are taken as what they stand for.

    Raises:
        ConfigError, SettingsError: see ``load_config``.
    """
    merging = _Merging(schema, file)
    for key, value in given.items():
        merging.add_value(key, value)
    return merging.finish()


def check_needed(config: object, schema: type, needed: Sequence[str]) -> None:
    """Refuse settings that leave out what a run cannot do without.

    Raises:
        SettingsError: one of the keys ``needed`` is not set.
    """
    missing = [key for key in needed if not attrgetter(key)(config)]
    if missing:
        about = {key.name: key.about for key in list_keys(schema)}
        raise SettingsError([f"{key}: it is not set, wanted {about[key]}" for key in missing])


def load_values(schema: type[T], values: Mapping[str, Any], where: str) -> T:
    """Settings that another program holds, checked; ``where`` names them in errors.

    Raises:
        SettingsError: an unknown key, or a value that does not fit; it has all of them.
    """
    merging = _Merging(schema)
    merging.add(OmegaConf.create(dict(values)), where)
    return merging.finish()


def save_config(config: object, path: Path) -> None:
    """Write the resolved settings as YAML that ``load_config`` reads back."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def config_to_dict(config: object) -> dict[str, Any]:
    """The resolved settings as plain data, for logs and checkpoints."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return plain  # type: ignore[return-value]


def _read(path: Path, kind_of: KindOf) -> DictConfig:
    try:
        loaded = read_file(path, kind_of)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file{_or_packaged(path)}") from error
    except Exception as error:  # yaml and the file system have many
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: got a list, wanted sections with keys")
    return loaded


def _or_packaged(path: Path) -> str:
    names = settings_names()
    near = suggestion(path.stem, names)
    if near is not None:
        return f"; did you mean {near}, which the package has?"
    return f", and the package has {', '.join(names)}"


class _Merging:
    """Settings on their way into ``schema``, those of ``file`` first; what was wrong with them."""

    def __init__(self, schema: type, file: str | PathLike[str] | None = None) -> None:
        self._schema = schema
        # Of each its file, and where it stands in none its key.
        self._updates: list[tuple[DictConfig, str, str]] = []
        self._translation = Translation(RULES.get(schema, ()))
        self._merged = OmegaConf.structured(schema)
        keys = list(list_keys(schema))
        self._known = {key.name: key.kind for key in keys}
        self._types = {key.name: key.type for key in keys}
        self._mappings = [key for key, kind in self._types.items() if get_origin(kind) is dict]
        # Of each file, and under "" of what stands in none.
        self._problems: dict[str, list[str]] = {}
        self._unknown: dict[tuple[str, str], list[str]] = {}
        if file is not None:
            self.add(_read(find_settings(file), self.kind_of), str(file))

    def kind_of(self, key: str) -> Any:
        """The type of a key's values, also of another program's key; None for a section."""
        key = self._translation.target(key)
        for name in self._mappings:
            if key.startswith(f"{name}."):
                return get_args(self._types[name])[1]
        return self._types.get(key)

    def add_setting(self, text: str) -> None:
        """One ``key=value``; NeMo-Aligner's commands mark new keys with + or ++."""
        key, is_setting, value = text.partition("=")
        key = key.lstrip("+")
        if not is_setting or not key:
            self._complain("", f"got {text!r}, wanted section.key=value")
            return
        try:
            update = read_setting(key, value, self.kind_of)
        except Exception as error:  # as of a YAML file
            self._complain("", f"{text}: {first_line(error)}")
            return
        self.add(update, "", key)

    def add_value(self, key: str, value: Any) -> None:
        """One setting as Python has it."""
        update = OmegaConf.create({})
        try:
            OmegaConf.update(update, key, _plain(value))
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            self._complain("", f"{key}: got {shown(value)}: {first_line(error)}")
            return
        self.add(update, "", key)

    def add(self, update: DictConfig, where: str, key: str = "") -> None:
        """A file's sections, or the setting ``key``; ``where`` names the file in errors."""
        self._translation.note(update)
        self._updates.append((update, where, key))

    def notes(self) -> list[str]:
        """List what became of another program's keys."""
        return self._translation.notes()

    def _clear_mappings(self, update: DictConfig, key: str) -> None:
        """A mapping that is given as a whole replaces what was there; ``key.name=value`` adds."""
        tree: Any = OmegaConf.to_container(update, resolve=False)
        for name in self._mappings:
            if not key.startswith(f"{name}.") and _has(tree, name):
                OmegaConf.update(self._merged, name, {}, merge=False)

    def _add_section(self, update: DictConfig, schema: Any, where: str, prefix: str) -> None:
        hints = get_type_hints(schema)
        # Without following references: they may lead to settings that come later.
        for name, value in update.items_ex(resolve=False):
            key, kind = f"{prefix}{name!s}", hints.get(str(name))
            is_empty = value is None or (OmegaConf.is_config(value) and value._is_none())
            if kind is None:
                self._add_unknown(key, value, where)
            elif not is_dataclass(kind):
                self._add_value(key, kind, value, where)
            elif isinstance(value, DictConfig) and not is_empty:
                self._add_section(value, kind, where, f"{key}.")
            elif not is_empty:
                self._complain(where, f"{key}: got {shown(value)}, wanted keys under it")

    def _add_value(self, key: str, kind: Any, value: Any, where: str) -> None:
        # One value where a list is wanted is a list of one; ${model.seed} is a reference.
        if (
            get_origin(kind) is list
            and isinstance(value, str | float | int)
            and "${" not in str(value)
        ):
            value = [value]
        if get_origin(kind) is dict and value is None:
            return  # it was cleared
        if get_origin(kind) in (list, tuple) and _has_collections(value):
            self._complain(where, f"{key}: got {shown(value)}, wanted {self._known[key]}")
            return
        try:
            OmegaConf.update(self._merged, key, value, merge=get_origin(kind) is dict)
        except OmegaConfBaseException:
            self._complain(where, f"{key}: got {value!r}, wanted {self._known[key]}")

    def _add_unknown(self, key: str, value: Any, where: str) -> None:
        """An unknown key, or an unknown section, whose keys may be known elsewhere."""
        inside: Any = OmegaConf.to_container(value) if isinstance(value, DictConfig) else {}
        keys = [f"{key}.{name}" for name in flatten(inside)] if inside else [key]
        hints = {each: describe_unknown(each, suggest_setting(each, self._known)) for each in keys}
        if not any(hints.values()):
            hints = {key: ""}
        for each, hint in hints.items():
            if hint:
                self._complain(where, f"unknown key {each}{hint}")
                continue
            section, _, name = each.rpartition(".")
            self._unknown.setdefault((where, section), []).append(name)

    def _complain(self, where: str, problem: str) -> None:
        self._problems.setdefault(where, []).append(problem)

    def finish(self) -> Any:
        """The settings as ``schema``.

        Raises:
            SettingsError: something was wrong with any of them.
        """
        for update, where, key in self._updates:
            self._clear_mappings(update, key)
            ours = self._translation.translate(update, where)
            self._add_section(ours, self._schema, where, "")
        for where, problem in self._translation.problems:
            self._complain(where, problem)
        config = self._build(self._schema, self._merged, "")
        problems = self._render_problems() or self._compare(config)
        if problems:
            raise SettingsError(problems)
        return config

    def _compare(self, config: object) -> list[str]:
        """The keys of another program that do not say the same as ours."""
        found = (pending.problem(config) for pending in self._translation.pending)
        return [problem for problem in found if problem is not None]

    def _build(self, schema: Any, node: DictConfig, prefix: str) -> Any:
        """A section that cannot be built stands at its defaults."""
        hints = get_type_hints(schema)
        values: dict[str, Any] = {}
        for item in fields(schema):
            kind = hints[item.name]
            try:
                # A reference such as ${model.seed} is followed here, when all settings are known.
                value = node[item.name]
            except OmegaConfBaseException as error:
                self._complain("", f"{prefix}{item.name}: {first_line(error)}")
                continue
            if is_dataclass(kind):
                value = self._build(kind, value, f"{prefix}{item.name}.")
            elif OmegaConf.is_config(value):
                value = OmegaConf.to_object(value)
            values[item.name] = tuple(value) if get_origin(kind) is tuple else value
        try:
            # Not OmegaConf.to_object, which stops at the first section that is refused.
            return schema(**values)
        except SettingsError as error:
            for problem in error.problems:
                self._complain("", problem)
            return schema()

    def _render_problems(self) -> list[str]:
        """Render all problems; unknown keys of one section share a line."""
        for (where, section), names in self._unknown.items():
            keys = ", ".join(names)
            if len(names) == 1:
                self._complain(where, f"unknown key {section}{'.' * bool(section)}{keys}")
            else:
                self._complain(where, f"unknown keys{f' of {section}' * bool(section)}: {keys}")
        self._unknown.clear()
        # What no file is to blame for comes last, as it may follow from the rest.
        ordered = sorted(self._problems.items(), key=lambda item: not item[0])
        return [
            f"{where}: {problem}" if where else problem
            for where, problems in ordered
            for problem in problems
        ]


def _plain(value: Any) -> Any:
    """Convert a Python value to the plain value that YAML would give."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _has_collections(value: Any) -> bool:
    """Return True for a list with lists or mappings in it; OmegaConf accepts them as anything."""
    return isinstance(value, ListConfig) and any(
        OmegaConf.is_config(item) and not item._is_none() for item in value._iter_ex(resolve=False)
    )


def _has(tree: Any, key: str) -> bool:
    """Return True if nested settings have ``key``."""
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their whole keys, as ``a.b``."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


# Settings that do nothing where they stand: which, and because of which others.

_IDLE: Mapping[type, tuple[IdleRule, ...]] = {
    TrainConfig: IDLE_IN_TRAINING,
    ServeConfig: IDLE_IN_SERVING,
    ServeCriticConfig: IDLE_IN_CRITICS,
    EvaluateConfig: IDLE_IN_EVALUATION,
}


def idle_settings(config: object, ranks: int | None = None) -> dict[str, str]:
    """Settings other than their defaults that do nothing here, with those that have it so.

    Of ``model.lora.alpha`` at rank 0 that is ``model.lora.rank=0``. ``ranks`` says on how many the
    verb runs, None where no setting depends on it.
    """
    usual, found = type(config)(), dict[str, str]()
    for causes, keys in _IDLE.get(type(config), ()):
        held = {key: ranks if key == RANKS else attrgetter(key)(config) for key in causes}
        if all(_fits(held[key], value) for key, value in causes.items()):
            why = " and ".join(f"{key}={as_yaml(value)}" for key, value in held.items())
            for key in keys:
                if _differs(key, config, usual):
                    found.setdefault(key, why)
    return found


def idle_notes(
    config: object, ranks: int | None = None, said: Collection[str] = ()
) -> Iterator[str]:
    """Yield a note for each of ``idle_settings`` not yet ``said``, as a verb prints it."""
    for idle, cause in idle_settings(config, ranks).items():
        if idle not in said:
            yield f"note: {idle} does nothing\n  with {cause}"


def _fits(held: object, value: object) -> bool:
    return held is not None if value is ANY else held == value


def _differs(key: str, config: object, usual: object) -> bool:
    value_of = attrgetter(key)
    return bool(value_of(config) != value_of(usual))


# Reading of values: a text setting is always read as text.
#
# YAML 1.1 reads 007, 12:30 and 1e3 as numbers and yes as true, and ends a value at `` #``, but
# names of files and fields may look like any of these.

# From a full key to the type of its values; None for sections and unknown keys.
KindOf = Callable[[str], Any]
_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_NULLS = ("", "~", "null", "Null", "NULL")
# An anchor of YAML may stand within itself.
_MOST_DEPTH = 20


def read_setting(key: str, text: str, kind_of: KindOf) -> DictConfig:
    """Read the text behind ``key=`` into nested sections.

    Raises:
        ConfigError: YAML would leave a part of it out.
        yaml.YAMLError: it is not YAML, where text alone is not wanted.
    """
    update = OmegaConf.create({})
    OmegaConf.update(update, key, _value(key, text, kind_of))
    return update


def read_file(path: Path, kind_of: KindOf) -> DictConfig | ListConfig:
    """A YAML file, as ``OmegaConf.load`` reads it but for text.

    Raises:
        OSError, yaml.YAMLError: it cannot be read.
    """
    with path.open(encoding="utf-8") as stream:
        loader = _loader(stream)
        node = loader.get_single_node()
        value = None if node is None else _construct(loader, _typed(node, "", kind_of))
    return OmegaConf.create({} if value is None else value)


def _loader(source: Any) -> Any:
    """OmegaConf's own loader, which has no public name: its numbers are those of all settings."""
    return get_yaml_loader()(source)


def _construct(loader: Any, node: yaml.Node) -> Any:
    return loader.construct_document(node)


def _value(key: str, text: str, kind_of: KindOf) -> Any:
    kind, stripped = kind_of(key), text.strip()
    if text.isspace() and _is_text(kind):
        return text  # a separator, for example
    if stripped in _NULLS:
        return None
    is_one_of_texts = _is_texts(kind) and not stripped.startswith(("[", "{", "- "))
    if _is_text(kind) or is_one_of_texts:
        quoted = _unquoted(stripped)
        return text if quoted is None else quoted
    loader = _loader(text)
    node = loader.get_single_node()
    if node is None or "#" in _beside_scalars(node, text):
        raise ConfigError("got '#', behind which YAML reads nothing, wanted quotes around it")
    return _construct(loader, _typed(node, key, kind_of))


def _unquoted(text: str) -> str | None:
    """Return the content of a text that is quoted as a whole, else None."""
    if text[0] not in "'\"":
        return None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    is_whole = isinstance(node, yaml.ScalarNode) and node.end_mark.index == len(text)
    return str(node.value) if is_whole else None


def _beside_scalars(node: yaml.Node, text: str) -> str:
    """Blank out the values; only YAML syntax and comments remain."""
    for scalar in _scalars(node):
        start, end = scalar.start_mark.index, scalar.end_mark.index
        text = text[:start] + " " * (end - start) + text[end:]
    return text


def _scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _scalars(each)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(key)
            yield from _scalars(value)


def _typed(node: yaml.Node, key: str, kind_of: KindOf, depth: int = 0) -> yaml.Node:
    """Retag scalars of text settings as text, whatever they look like."""
    kind = kind_of(key) if key else None
    if _is_text(kind):
        return _as_text(node)
    if _is_texts(kind) and isinstance(node, yaml.SequenceNode):
        items = [_as_text(each) for each in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    if _is_texts(kind):
        return _as_text(node)
    if not isinstance(node, yaml.MappingNode) or depth > _MOST_DEPTH:
        return node
    is_mapping = get_origin(kind) is dict
    pairs = []
    for name, value in node.value:
        if name.tag == _MERGE:
            pairs.append((name, _merged(value, key, kind_of, depth)))
            continue
        below = f"{key}.{name.value}" if key else str(name.value)
        pairs.append(
            (_as_text(name) if is_mapping else name, _typed(value, below, kind_of, depth + 1))
        )
    return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)


def _merged(node: yaml.Node, key: str, kind_of: KindOf, depth: int) -> yaml.Node:
    """Retag what ``<<`` merges from one mapping or several."""
    if isinstance(node, yaml.SequenceNode):
        items = [_typed(each, key, kind_of, depth + 1) for each in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    return _typed(node, key, kind_of, depth + 1)


def _as_text(node: yaml.Node) -> yaml.Node:
    if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL:
        return node
    return yaml.ScalarNode(_TEXT, node.value, node.start_mark, node.end_mark, node.style)


def _is_text(kind: Any) -> bool:
    return kind is str or set(get_args(kind)) == {str, type(None)}


def _is_texts(kind: Any) -> bool:
    return get_origin(kind) is list and get_args(kind) == (str,)
