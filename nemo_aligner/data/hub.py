"""Download a data set from the Hugging Face hub as a file of JSON lines (``data fetch``)."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_aligner.config.describe import install_command
from nemo_aligner.contract.messages import without_struct_nulls
from nemo_aligner.data.records import as_json, without_other_kinds
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError, DataError, short


def fetch(
    name: str,
    output: Path,
    split: str = "train",
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
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data fetch needs Hugging Face datasets: {install_command('hub')} ({error})"
        ) from error
    datasets.disable_progress_bars()
    described = f"{name}, {'' if subset is None else f'subset {subset}, '}split {split}"
    part = output.with_name(f"{output.name}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lines = part.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: {output} cannot be written: {error}") from error
    count, dropped_columns = 0, set[str]()
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
    finally:
        part.unlink(missing_ok=True)
    if dropped_columns:
        say(f"dropped columns that JSON cannot hold: {', '.join(sorted(dropped_columns))}")
    return count
