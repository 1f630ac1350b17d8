"""Values as they are written in YAML or behind ``key=``: where text is wanted nothing else is read.

YAML 1.1 takes 007, 12:30, 1e3 and yes for numbers and truths, and ends a value at `` #``. Names of
files and fields are none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from nemo_aligner.errors import ConfigError

# What kind of value a whole key has; None for sections, and for keys that nobody knows.
KindOf = Callable[[str], Any]
_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_NULLS = ("", "~", "null", "Null", "NULL")
_MOST_DEPTH = 20


def read_setting(key: str, text: str, kind_of: KindOf) -> DictConfig:
    """What stands behind ``key=``, in the sections of the key.

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
    if stripped in _NULLS:
        return None
    if _is_text(kind):
        quoted = _unquoted(stripped)
        return text if quoted is None else quoted
    if _is_texts(kind) and not stripped.startswith(("[", "{", "- ")):
        quoted = _unquoted(stripped)
        return text if quoted is None else quoted
    loader = _loader(text)
    node = loader.get_single_node()
    if node is None or "#" in _beside_scalars(node, text):
        raise ConfigError("got '#', behind which YAML reads nothing, wanted quotes around it")
    return _construct(loader, _typed(node, key, kind_of))


def _unquoted(text: str) -> str | None:
    """Of a text that is in quotes as a whole, what is in them."""
    if text[0] not in "'\"":
        return None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    is_whole = isinstance(node, yaml.ScalarNode) and node.end_mark.index == len(text)
    return str(node.value) if is_whole else None


def _beside_scalars(node: yaml.Node, text: str) -> str:
    """What stands between the values, where only signs of YAML and comments do."""
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
    """The same values; those of keys that are text are text, however they look."""
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
    """What ``<<`` takes from another mapping, or from several."""
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
