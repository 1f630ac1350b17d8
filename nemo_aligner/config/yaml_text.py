"""YAML readers that never read settings of type str as numbers or bools.

YAML 1.1 reads 007, 12:30 and 1e3 as numbers and yes as true, and ends a value at `` #``. Names of
files and fields may look like these values, so the text of settings of type str is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from nemo_aligner.utils.errors import ConfigError

# A function from a full key to the type of its values; None for sections and unknown keys.
TypeOfKey = Callable[[str], Any]
_STRING_TAG = "tag:yaml.org,2002:str"
_NULL_TAG = "tag:yaml.org,2002:null"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_NULLS = ("", "~", "null", "Null", "NULL")
# A YAML anchor may contain itself, so recursion needs a limit.
_MAX_DEPTH = 20

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def read_setting(key: str, text: str, type_of: TypeOfKey) -> DictConfig:
    """Read the text after ``key=`` into nested sections.

    Raises:
        ConfigError: the text has a ``#`` outside quotes, and YAML would drop the rest as a comment;
            or an item of a list has a ``${`` outside quotes.
        yaml.YAMLError: the setting is not of type str, and the text is invalid YAML.
    """
    update = OmegaConf.create({})
    OmegaConf.update(update, key, _parse_value(key, text, type_of))
    return update


def read_file(path: Path, type_of: TypeOfKey) -> DictConfig | ListConfig:
    """Read a YAML file like ``OmegaConf.load``, but keep the text of settings of type str.

    Raises:
        OSError, yaml.YAMLError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as stream:
        loader = _make_loader(stream)
        node = loader.get_single_node()
        value = None if node is None else _construct(loader, _retag(node, "", type_of))
    return OmegaConf.create({} if value is None else value)


def _make_loader(source: Any) -> Any:
    """Make OmegaConf's YAML loader, which reads 1e-3 as a number; PyYAML's reads it as a text."""
    return get_yaml_loader()(source)


def _construct(loader: Any, node: yaml.Node) -> Any:
    return loader.construct_document(node)


def _parse_value(key: str, text: str, type_of: TypeOfKey) -> Any:
    kind, stripped = type_of(key), text.strip()
    if text.isspace() and _is_string(kind):
        return text  # whitespace is a valid text, such as a step separator of two newlines
    if stripped in _NULLS:
        return None
    is_list_item = _is_string_list(kind) and not stripped.startswith(("[", "{", "- "))
    if _is_string(kind) or is_list_item:
        unquoted = _unquote(stripped)
        return text if unquoted is None else unquoted
    loader = _make_loader(text)
    try:
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        if "${" not in _QUOTED.sub("", text):
            raise
        raise ConfigError(
            "got an item with ${...} without quotes, in which YAML reads { as the start of a "
            "mapping; wanted quotes around the item, such as ['${oc.env:HOME}/a.jsonl', b.jsonl]"
        ) from error
    if node is None or "#" in _blank_scalars(node, text):
        raise ConfigError(
            "got '#', which begins a comment in YAML, so the rest would be dropped; wanted quotes "
            "around the value"
        )
    return _construct(loader, _retag(node, key, type_of))


def _unquote(text: str) -> str | None:
    """Return the text between the quotes if all of ``text`` is in quotes, else None."""
    if text[0] not in "'\"":
        return None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    is_fully_quoted = isinstance(node, yaml.ScalarNode) and node.end_mark.index == len(text)
    return str(node.value) if is_fully_quoted else None


def _blank_scalars(node: yaml.Node, text: str) -> str:
    """Blank out all YAML keys and values in ``text``: a ``#`` that remains begins a comment."""
    for scalar in _walk_scalars(node):
        start, end = scalar.start_mark.index, scalar.end_mark.index
        text = text[:start] + " " * (end - start) + text[end:]
    return text


def _walk_scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _walk_scalars(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk_scalars(key)
            yield from _walk_scalars(value)


def _retag(node: yaml.Node, key: str, type_of: TypeOfKey, depth: int = 0) -> yaml.Node:
    """Tag the values of settings of type str below ``key`` as YAML strings, even ``007``."""
    kind = type_of(key) if key else None
    if _is_string(kind):
        return _tag_as_string(node)
    if _is_string_list(kind) and isinstance(node, yaml.SequenceNode):
        items = [_tag_as_string(item) for item in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    if _is_string_list(kind):
        return _tag_as_string(node)
    if not isinstance(node, yaml.MappingNode) or depth > _MAX_DEPTH:
        return node
    is_mapping = get_origin(kind) is dict
    pairs = []
    for name, value in node.value:
        if name.tag == _MERGE_TAG:
            pairs.append((name, _retag_merge(value, key, type_of, depth)))
            continue
        subkey = f"{key}.{name.value}" if key else str(name.value)
        pairs.append(
            (
                _tag_as_string(name) if is_mapping else name,
                _retag(value, subkey, type_of, depth + 1),
            )
        )
    return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)


def _retag_merge(node: yaml.Node, key: str, type_of: TypeOfKey, depth: int) -> yaml.Node:
    """Apply ``_retag`` to the mappings that YAML's merge key ``<<`` inserts."""
    if isinstance(node, yaml.SequenceNode):
        items = [_retag(item, key, type_of, depth + 1) for item in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    return _retag(node, key, type_of, depth + 1)


def _tag_as_string(node: yaml.Node) -> yaml.Node:
    if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL_TAG:
        return node
    return yaml.ScalarNode(_STRING_TAG, node.value, node.start_mark, node.end_mark, node.style)


def _is_string(kind: Any) -> bool:
    return kind is str or set(get_args(kind)) == {str, type(None)}


def _is_string_list(kind: Any) -> bool:
    return get_origin(kind) is list and get_args(kind) == (str,)
