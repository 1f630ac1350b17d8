"""Prompts that stand in training and validation files both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nemo_aligner.data.records import Origin, Record, prompt_key
from nemo_aligner.data.report import FileReport
from nemo_aligner.errors import DataError


def first_prompts(records: Iterable[Record]) -> dict[int, Origin]:
    """The hash of every prompt -> the first record that has it."""
    prompts: dict[int, Origin] = {}
    for record in records:
        prompts.setdefault(hash(prompt_key(record)), record.origin)
    return prompts


def check_overlap(validation: FileReport, training: Sequence[FileReport], allowed: bool) -> int:
    """How many prompts of a validation file stand in the training files, too.

    Raises:
        DataError: there are any, and they are not allowed.
    """
    known: dict[int, Origin] = {}
    for report in training:
        known |= report.prompts
    common = [key for key in validation.prompts if key in known]
    if common and not allowed:
        raise DataError(
            f"{validation.path}: {len(common)} of its {len(validation.prompts)} prompts stand in "
            f"the training files, too, the first at {validation.prompts[common[0]]} and "
            f"{known[common[0]]}: metrics on them say little about new prompts. Split by prompt "
            "(`nemo-aligner data split`), or set model.data.allow_prompt_overlap=true"
        )
    return len(common)
