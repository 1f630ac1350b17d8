"""Hints about common mistakes in settings: a file without its key, spaces around ``=``.

``load.py`` appends them to its errors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

from nemo_aligner.config.describe import settings_names, suggestion

_YAML_ENDINGS = (".yaml", ".yml")
_MODEL_ENDINGS = (".nemo", ".gguf")
# Settings that name the model and the data of a run; a verb has at most one of each.
_MODEL_SETTINGS = ("pretrained_checkpoint.restore_from_path", "rm_model_file")
_DATA_SETTINGS = ("data.path", "model.data.data_prefix.train")


def find_spaced(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Find settings with spaces around ``=``, which a shell splits: ``key = value``.

    Args:
        words: the settings of a command line.

    Returns:
        The other settings, and an error about those with spaces; None if there are none.
    """
    assignments: list[str] = []
    spaced: list[list[str]] = []
    position = 0
    while position < len(words):
        count = _count_spaced(words[position : position + 3])
        if count == 1:
            assignments.append(words[position])
        else:
            spaced.append([*words[position : position + count]])
        position += count
    if not spaced:
        return assignments, None
    written = ", ".join(" ".join(parts) for parts in spaced)
    joined = " ".join("".join(parts) for parts in spaced)
    return assignments, f"got {written}, wanted no spaces around =: {joined}"


def _count_spaced(words: Sequence[str]) -> int:
    """Return how many of the next words (at most 3) are one setting with spaces around ``=``."""
    first, second, third = [*words, "", ""][:3]
    if first.count("=") == 1 and first.endswith("=") and len(first) > 1:
        is_value = second != "" and "=" not in second  # ``key= value``
        return 2 if is_value else 1
    if "=" in first or not second.startswith("="):
        return 1
    return 3 if second == "=" and third else 2


def describe_word(word: str, keys: Collection[str]) -> str:
    """Write the error about a word that is not a setting; for a path it suggests the setting.

    Args:
        keys: the full keys of all settings.
    """
    return f"got {word!r}, wanted section.key=value{_suggest_path_setting(word, keys)}"


def _suggest_path_setting(word: str, keys: Collection[str]) -> str:
    """Return "; did you mean ...?" if the word is an existing path, else an empty text."""
    path = Path(word)
    if not word or not path.exists():
        return ""
    ending = path.suffix.lower()
    if ending in _YAML_ENDINGS:
        return f"; did you mean --config {word}?"
    is_model = path.is_dir() or ending in _MODEL_ENDINGS
    for key in _MODEL_SETTINGS if is_model else _DATA_SETTINGS:
        if key in keys:
            return f"; did you mean {key}={word}?"
    return ""


def describe_wrong(key: str, kind: str, value: object) -> str:
    """Write the error about a setting whose value has the wrong type.

    Args:
        kind: the type of the setting in words.
    """
    if value is None and kind.startswith("["):
        content = "a file or a list of files" if ".data_prefix." in key else kind
        return f"{key}: got null, wanted {content}; [] for none"
    return f"{key}: got {value!r}, wanted {kind}"


def describe_file_error(path: Path, error: Exception) -> str:
    """Describe why a settings file could not be read.

    Args:
        error: what reading it raised.
    """
    if isinstance(error, FileNotFoundError):
        return f"there is no such file{_suggest_packaged(path)}"
    if isinstance(error, IsADirectoryError):
        return "is a folder, wanted a YAML file of settings"
    is_content = isinstance(error, yaml.YAMLError | UnicodeDecodeError)
    if is_content and path.suffix.lower() not in _YAML_ENDINGS:
        return "not a YAML file of settings"
    return str(error)


def _suggest_packaged(path: Path) -> str:
    """Return what an error about a missing file appends: a similar packaged name, or all names."""
    names = settings_names()
    near = suggestion(path.stem, names)
    if near is not None:
        return f"; did you mean {near}, which the package has?"
    return f", and the package has {', '.join(names)}"
