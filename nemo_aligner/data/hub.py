"""Download data sets of the Hugging Face hub as files of JSON lines.

``fetch`` writes one to a file (``data fetch``). ``local_file`` writes one to the cache, for
settings and options that take a data file or the name of a data set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_aligner.config.describe import install_command
from nemo_aligner.contract.messages import without_struct_nulls
from nemo_aligner.data.records import as_json, without_other_kinds
from nemo_aligner.utils.cache import cache_folder, cached_file
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError, DataError, short
from nemo_aligner.utils.writing import (
    check_outputs,
    check_replaces_nothing_in,
    temporary_beside,
)

_DEFAULT_SPLIT = "train"
# ORGANIZATION/NAME, ORGANIZATION/NAME:SPLIT or ORGANIZATION/NAME:SUBSET:SPLIT
_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))??(?::([\w.-]+))?")
# With one of these endings, a missing file is a misspelled path, for which the hub is not queried.
_OF_FILES = (
    ".json", ".jsonl", ".parquet", ".arrow", ".feather", ".csv", ".tsv", ".txt", ".yaml", ".gz",
    ".zst", ".xz", ".bz2", ".zip",
)  # fmt: skip


def local_files(paths: Sequence[str]) -> list[str]:
    """Return for each of ``paths`` the file to read; see ``local_file``."""
    return [local_file(path) for path in paths]


def local_file(path: str) -> str:
    """Return ``path``, or for a data set of the hub its file in the cache, after downloading it.

    A data set is downloaded once. A later revision is downloaded only after its file was removed.

    Args:
        path: a file, or ``ORGANIZATION/NAME`` with an optional ``:SPLIT``, by default ``train``, or
            ``:SUBSET:SPLIT``.

    Raises:
        ConfigError: ``datasets`` is not installed, or the cache cannot be written.
        DataError: there is no such data set or split, or the hub cannot be reached.
    """
    named = _NAME.fullmatch(path)
    if named is None or not is_data_set_name(path):
        return path
    name, subset, split = named[1], named[2], named[3] or _DEFAULT_SPLIT
    # The hub allows no double hyphen in a name, and MLflow few characters in that of a metric.
    parts = [*name.split("/"), *([] if subset is None else [subset]), split]
    file = cache_folder() / "data" / f"{'--'.join(parts)}.jsonl"
    described = _describe(name, subset, split)
    return str(cached_file(file, described, partial(_download, name, subset, split)))


def is_data_set_name(path: str) -> bool:
    """Tell if ``path`` means a data set of the hub.

    A path whose parent folder exists is a misspelled path, for which the hub is not queried.
    """
    named = _NAME.fullmatch(path)
    if named is None or path.endswith(_OF_FILES) or Path(path).exists():
        return False
    return not Path(named[1]).parent.is_dir()


def _describe(name: str, subset: str | None, split: str) -> str:
    return f"{name}, {'' if subset is None else f'subset {subset}, '}split {split}"


def _download(name: str, subset: str | None, split: str, output: Path) -> None:
    # Import the package before the message: a name that is a misspelled path is more likely.
    _import_datasets(f"there is no file {name}; as a name of the hub it needs")
    described = _describe(name, subset, split)
    say(f"downloading {described}, from the Hugging Face hub ...")
    try:
        count = fetch(name, output, split, subset)
    except DataError as error:
        raise DataError(
            f"{error}. There is no file of this name either. Correct the name; without a network, "
            "run `nemo-aligner data fetch` where there is one, and use its file"
        ) from error
    if count == 0:
        raise DataError(f"{described}: it has no rows. Choose another split")


def _import_datasets(need: str) -> Any:
    """Import Hugging Face datasets, an optional package.

    Args:
        need: what needs the package, the beginning of the error.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{need} Hugging Face datasets: {install_command('hub')} ({error})"
        ) from error
    return datasets


def fetch(
    name: str,
    output: Path,
    split: str = _DEFAULT_SPLIT,
    subset: str | None = None,
    revision: str | None = None,
) -> int:
    """Download all rows of one split to the file ``output``; return the number of rows.

    The rows are streamed, without another copy on the disk. ``output`` exists once it is complete.

    Args:
        name: name of the data set, or a local folder that Hugging Face ``datasets`` reads.
        subset: configuration of the data set, if it has several.
        revision: commit, tag or branch; None is the newest.

    Raises:
        ConfigError: ``datasets`` is not installed, or ``output`` cannot be written.
        DataError: there is no such data set, subset or split, or the hub cannot be reached.
    """
    check_outputs({"output": output}, {})
    check_replaces_nothing_in(Path(name), "output", output)
    datasets = _import_datasets("data sets of the hub need")
    datasets.disable_progress_bars()
    described = _describe(name, subset, split)
    count, dropped_columns = 0, set[str]()
    with temporary_beside(output) as part:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            lines = part.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output: {output} cannot be written: {error}") from error
        try:
            with lines:
                for row in datasets.load_dataset(
                    name, subset, split=split, revision=revision, streaming=True
                ):
                    row, dropped = without_other_kinds(without_struct_nulls(row))
                    dropped_columns.update(dropped)
                    lines.write(as_json(row) + "\n")
                    count += 1
            os.replace(part, output)
        # Catch all exceptions, because readers and the hub's client raise many types.
        except Exception as error:
            raise DataError(f"{described}: {type(error).__name__}: {short(error)}") from error
    if dropped_columns:
        say(f"dropped columns that JSON cannot hold: {', '.join(sorted(dropped_columns))}")
    return count
