"""Translate settings of other programs (NeMo-Aligner's YAML) by rules; nothing is dropped
silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.common import as_yaml
from nemo_aligner.utils.errors import shown

_MISSING = object()


@dataclass(frozen=True)
class KeyRule:
    """Translation of one key of another program.

    Attributes:
        key: with its sections, and with ``*`` where it stands for several. All that lies below it
            is meant, too.
        why: what a person should know: why it is ignored, what to set instead of a refused value.
        to: the key here; empty for one that has no meaning here.
        values: values there, as YAML writes them, and what they are here; others stay the same.
        only: the only values that are taken, as YAML writes them; none: all are.
        same_as: the key, or property, that must have the same value in the end.
        adds: its list is added to that of ``to``.
    """

    key: str
    why: str = ""
    to: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    same_as: str = ""
    adds: bool = False


@dataclass(frozen=True)
class SameValue:
    """A value that must be that of another key once all settings are known."""

    rule: KeyRule
    value: Any
    where: str

    def problem(self, config: object) -> str | None:
        """Return the problem, or None if the values agree."""
        rule, wanted = self.rule, attrgetter(self.rule.same_as)(config)
        got = rule.values.get(as_yaml(self.value), self.value)
        if as_yaml(got) == as_yaml(wanted):
            return None
        before = f"{self.where}: " * bool(self.where)
        return (
            f"{before}{rule.key}: got {as_yaml(self.value)}, wanted the same as "
            f"{rule.same_as} ({as_yaml(wanted)}): {rule.why}"
        )


class Translation:
    """Settings on their way from another program's keys, and what became of each.

    Attributes:
        problems: the file and a line, for each value that is refused.
        pending: values that are compared once all settings are known.
    """

    def __init__(self, rules: Sequence[KeyRule]) -> None:
        self._rules = rules
        self._given = OmegaConf.create({})
        self._last: dict[str, DictConfig] = {}
        self._taken: dict[str, str] = {}
        self._ignored: dict[str, list[str]] = {}
        self._added: dict[str, list[Any]] = {}
        self.problems: list[tuple[str, str]] = []
        self.pending: list[SameValue] = []

    def note(self, update: DictConfig) -> None:
        """Know of these settings: others may refer to them, and the last of a key counts."""
        tree: Any = OmegaConf.to_container(update, resolve=False)
        self._last |= dict.fromkeys((key for key, _ in _leaves(tree)), update)
        try:
            self._given = OmegaConf.merge(self._given, update)  # type: ignore[assignment]
        except OmegaConfBaseException:
            return  # whoever takes this setting says what is wrong with it

    def translate(self, update: DictConfig, where: str) -> DictConfig:
        """Translate settings into our keys; ``where`` names their file in errors."""
        tree: Any = OmegaConf.to_container(update, resolve=False)
        leaves = dict(_leaves(tree))
        for key, value in leaves.items():
            resolved = self._resolve(key, value)
            rule = self._rule_of(key)
            if rule is None:
                if resolved is not value:
                    _put(tree, key, resolved)
            elif self._last[key] is not update:
                _remove(tree, key)
            else:
                if rule.to != key:
                    _remove(tree, key)
                self._apply(rule, key, resolved, tree, where)
        return OmegaConf.create(tree)

    def notes(self) -> list[str]:
        """List each key that was translated, and each that was ignored with the reason."""
        taken = [f"{key} is taken as {to}" for key, to in self._taken.items()]
        ignored = [f"{', '.join(keys)}: ignored: {why}" for why, keys in self._ignored.items()]
        return taken + ignored

    def target(self, key: str) -> str:
        """The key here that takes the value of ``key``, which may be here already."""
        rule = self._rule_of(key)
        if rule is None or not rule.to:
            return key
        return rule.to + key[len(rule.key) :] if key.startswith(f"{rule.key}.") else rule.to

    def _rule_of(self, key: str) -> KeyRule | None:
        fits = (
            rule
            for rule in self._rules
            if fnmatchcase(key, rule.key) or key.startswith(f"{rule.key}.")
        )
        return next(fits, None)

    def _resolve(self, key: str, value: Any) -> Any:
        """A value without its references, where they can be followed among the settings given."""
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            found = OmegaConf.select(self._given, key, default=_MISSING)
        except OmegaConfBaseException:
            return value
        if OmegaConf.is_config(found):
            return OmegaConf.to_container(found)
        return value if found is _MISSING else found

    def _apply(self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any], where: str) -> None:
        if rule.only and as_yaml(value) not in rule.only:
            wanted = " | ".join(rule.only)
            self.problems.append((where, f"{key}: got {shown(value)}, wanted {wanted}: {rule.why}"))
        elif rule.same_as:
            self.pending.append(SameValue(rule, value, where))
        elif rule.adds:
            self._add(rule, key, value, tree)
        elif rule.to:
            self._take(rule, key, value, tree)
        elif not rule.only:  # which says what is always so here
            keys = self._ignored.setdefault(rule.why, [])
            keys += [rule.key] * (rule.key not in keys)

    def _take(self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any]) -> None:
        to = self.target(key)
        text = as_yaml(value)
        if value is None and to != key and "null" not in rule.values:
            return  # not set there, and so not here
        ours = rule.values.get(text, value)
        _put(tree, to, ours)
        if to != key or as_yaml(ours) != text:
            self._taken[f"{key}={text}"] = f"{to}={as_yaml(ours)}"

    def _add(self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any]) -> None:
        added = self._added.setdefault(rule.to, [])
        added += _as_list(value)
        own = OmegaConf.select(self._given, rule.to, default=[])
        _put(tree, rule.to, [*_as_list(own), *added])
        self._taken[f"{key}={as_yaml(value)}"] = f"another of {rule.to}"


def _as_list(value: Any) -> list[Any]:
    if not value:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every full key that has no keys under it, with its value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        below = tree.get(section)
        if not isinstance(below, dict):
            below = tree[section] = {}
        tree = below
    tree[name] = value


def _remove(tree: dict[str, Any], key: str) -> None:
    """Take a key out, and the sections that are empty without it."""
    name, _, rest = key.partition(".")
    if not rest:
        tree.pop(name, None)
    elif isinstance(tree.get(name), dict):
        _remove(tree[name], rest)
        if not tree[name]:
            del tree[name]
