"""A data set of the Hugging Face hub as a file of JSON lines, which everything here reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nemo_aligner.config.packaged import install_command
from nemo_aligner.errors import ConfigError, DataError, short


def fetch(
    name: str,
    output: Path,
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
) -> int:
    """Write every row of one split; how many there were.

    The rows pass through and are not kept beside ``output``, which is there once it is whole.

    Args:
        name: of the data set, or a local folder that Hugging Face ``datasets`` reads.
        subset: its configuration, where it has several.
        revision: a commit, tag or branch; None is the newest.

    Raises:
        ConfigError: ``datasets`` is not installed, or ``output`` cannot be written.
        DataError: there is no such data set, subset or split, or it cannot be reached.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data fetch needs Hugging Face datasets: {install_command('hub')} ({error})"
        ) from error
    datasets.disable_progress_bars()
    asked = f"{name}, {'' if subset is None else f'subset {subset}, '}split {split}"
    part = output.with_name(f"{output.name}.part")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lines = part.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: {output} cannot be written: {error}") from error
    count = 0
    try:
        with lines:
            for row in datasets.load_dataset(
                name, subset, split=split, revision=revision, streaming=True
            ):
                # What JSON has no kind for, as dates, becomes its text.
                lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                count += 1
        os.replace(part, output)
    except Exception as error:  # of the many kinds that readers and the hub's client have
        raise DataError(f"{asked}: {type(error).__name__}: {short(error)}") from error
    finally:
        part.unlink(missing_ok=True)
    return count
