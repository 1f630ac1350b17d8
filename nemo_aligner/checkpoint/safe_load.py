"""Text, YAML and JSON from untrusted files, as plain data of bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from nemo_aligner.utils.errors import CheckpointError, first_line

MAX_TEXT_BYTES = 2**20
_MAX_NODES = 100_000
_MAX_DEPTH = 50
_MAX_DIGITS = 400


def read_yaml(path: Path, where: str) -> dict[str, Any]:
    """Read a YAML file that holds one mapping, with few aliases.

    Args:
        where: name of the file in errors.

    Raises:
        CheckpointError: it is missing, too large, no mapping, or has tags that name code.
    """
    text = read_text(path, where)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_size(node, where)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{where}: {_first_line(error)}") from error
    return _mapping(content, where)


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Read a JSON file that holds one object; raises as ``read_yaml`` does."""
    try:
        content = json.loads(read_text(path, where))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {_first_line(error)}") from error
    _check_depth(content, where)
    return _mapping(content, where)


def read_text(path: Path, where: str) -> str:
    """Read a small UTF-8 file; raises as ``read_yaml`` does."""
    if not path.is_file():
        raise CheckpointError(f"{where}: no such file")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise CheckpointError(
            f"{where}: got {path.stat().st_size} bytes, wanted at most {MAX_TEXT_BYTES}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _mapping(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: got {type(content).__name__}, wanted a mapping")
    return content


def _check_depth(content: Any, where: str, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH}")
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            _check_depth(part, where, depth + 1)


def _check_size(root: yaml.Node, where: str) -> None:
    """Refuse aliases that expand to more nodes than a config needs, or form a cycle."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH}, or within itself")
        if id(node) not in sizes:
            is_leaf = isinstance(node, yaml.ScalarNode)
            if is_leaf and node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
                raise CheckpointError(f"{where}: a number of {len(node.value)} digits")
            parts = [] if is_leaf else node.value
            pairs = (part if isinstance(part, tuple) else (part,) for part in parts)
            # Long texts count by their length: an alias may repeat them, too.
            own = 1 + (len(node.value) // 10 if is_leaf else 0)
            sizes[id(node)] = own + sum(size(child, depth + 1) for pair in pairs for child in pair)
        return sizes[id(node)]

    if size(root, 0) > _MAX_NODES:
        raise CheckpointError(f"{where}: it unfolds to more than {_MAX_NODES} values")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
