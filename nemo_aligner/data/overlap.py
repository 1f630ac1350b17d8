"""Prompts that stand in training and validation files both, and records that stand in several.

Both are known by a hash of 64 bits. Of 10 million the chance that any two that differ have the same
is 3 in a million (the birthday bound, n^2 / 2^65).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nemo_aligner.data.records import Origin, Record, prompt_key
from nemo_aligner.errors import DataError

if TYPE_CHECKING:
    from nemo_aligner.data.report import FileReport

# Keys that are looked up at once: what that takes does not grow with the data.
_AT_ONCE = 1 << 18


def short_hash(*parts: bytes) -> int:
    """64 bits that are the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def prompt_hash(record: Record) -> int:
    """What records of the same prompt have in common, as ``records.prompt_key`` has it."""
    return short_hash(prompt_key(record).encode(errors="surrogatepass"))


@dataclass(frozen=True)
class Prompts:
    """The P different prompts of a file, each with the first record that has it.

    Attributes:
        path: of the file.
        keys: ``[P]`` uint64 in ascending order, as ``prompt_hash`` gives them.
        lines: ``[P]`` int64 lines of the file.
    """

    path: str
    keys: np.ndarray
    lines: np.ndarray

    @classmethod
    def of(cls, path: str, records: Iterable[Record]) -> Prompts:
        found = [(prompt_hash(record), record.origin.line) for record in records]
        keys = np.array([key for key, _ in found], dtype=np.uint64)
        lines = np.array([line for _, line in found], dtype=np.int64)
        return cls(path, *first_of_each(keys, lines))

    def __len__(self) -> int:
        return len(self.keys)


def first_of_each(keys: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ``keys [N]`` in ascending order, and of each the first of its ``lines``."""
    different, first = np.unique(keys, return_index=True)
    return different, lines[first]


def find_in(keys: np.ndarray, known: Sequence[np.ndarray]) -> np.ndarray:
    """``[P]`` bool, which of ``keys`` stand in any of ``known``, which are in ascending order."""
    found = np.zeros(len(keys), dtype=bool)
    for start in range(0, len(keys), _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        for others in known:
            if len(others):
                at = np.searchsorted(others, some).clip(max=len(others) - 1)
                found[start : start + _AT_ONCE] |= others[at] == some
    return found


def check_overlap(validation: FileReport, training: Sequence[FileReport], allowed: bool) -> int:
    """How many prompts of a validation file stand in the training files, too.

    Raises:
        DataError: there are any, and they are not allowed.
    """
    prompts = validation.prompts
    common = find_in(prompts.keys, [report.prompts.keys for report in training])
    count = int(common.sum())
    if count and not allowed:
        at = np.flatnonzero(common)
        first = at[prompts.lines[at].argmin()]
        theirs = _find_origin(prompts.keys[first], [report.prompts for report in training])
        raise DataError(
            f"{validation.path}: {count} of its {len(prompts)} prompts stand in "
            f"the training files, too, the first at {Origin(prompts.path, prompts.lines[first])} "
            f"and {theirs}: metrics on them say little about new prompts. Split by prompt "
            "(`nemo-aligner data split`), or set model.data.allow_prompt_overlap=true"
        )
    return count


def _find_origin(key: np.ndarray, training: Sequence[Prompts]) -> Origin:
    """The first record with this prompt in the last of the files that have it."""
    having = [prompts for prompts in training if find_in(key.reshape(1), [prompts.keys])[0]]
    last = having[-1]
    return Origin(last.path, int(last.lines[np.searchsorted(last.keys, key)]))
