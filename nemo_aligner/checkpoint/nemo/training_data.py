"""The files that a reward model was trained on, as the settings of its archive list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# The key with the files that a reward model was trained on. Other programs ignore it.
_TRAINING_DATA = "training_data"


def training_data_of(config: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the files that a reward model was trained on; None if the archive does not say.

    A file has its ``name``, the ``sha256`` of its content, its number of ``records``, and, if the
    records have soft labels, the ``teachers`` that computed these.
    """
    files = config.get(_TRAINING_DATA)
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        return None
    return list(files)


def with_training_data(
    config: Mapping[str, Any], files: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a copy of ``config`` whose list of training files also has ``files``.

    Args:
        config: settings of the model that a run started from.
        files: the run's training files, in the form that ``training_data_of`` returns. Files that
            ``config`` lists already are not repeated.
    """
    earlier = training_data_of(config) or []
    new = [dict(file) for file in files if dict(file) not in earlier]
    return {**config, _TRAINING_DATA: [*earlier, *new]}


def merge_training_data(
    config: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a copy of ``config`` that lists the training files of all merged models.

    If one of the models does not list its files, the result has no list.

    Args:
        config: settings of the first model, which the merged model gets.
        configs: settings of the other models.
    """
    merged = {key: value for key, value in config.items() if key != _TRAINING_DATA}
    lists = [training_data_of(item) for item in (config, *configs)]
    if None in lists:
        return merged
    for files in lists:
        merged = with_training_data(merged, files or ())
    return merged
