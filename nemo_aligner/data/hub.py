"""A data set of the Hugging Face hub as a file of JSON lines, which everything here reads."""

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
    except ImportError as error:
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
    count, left_out = 0, set[str]()
    try:
        with lines:
            for row in datasets.load_dataset(
                name, subset, split=split, revision=revision, streaming=True
            ):
                row, others = without_other_kinds(without_struct_nulls(row))
                left_out.update(others)
                lines.write(as_json(row) + "\n")
                count += 1
        os.replace(part, output)
    except Exception as error:  # of the many kinds that readers and the hub's client have
        raise DataError(f"{asked}: {type(error).__name__}: {short(error)}") from error
    finally:
        part.unlink(missing_ok=True)
    if left_out:
        say(f"left out, as JSON cannot hold them: columns {', '.join(sorted(left_out))}")
    return count
