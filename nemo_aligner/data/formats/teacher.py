"""Fields of a comparison with the opinion of a teacher, for all formats: soft labels.

``teacher_rewards`` has a reward for each reply, in the order in which the record has the replies
(chosen before rejected). ``chosen_probability`` is the probability that the chosen reply of a pair
is the better one. ``nemo-aligner data label`` writes ``teacher_rewards``, and next to them
``teacher_spread`` and ``teacher``, which training does not learn from.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from nemo_aligner.data.formats.base import Fields, WantedLabels, read_label
from nemo_aligner.data.records import Comparison, Record
from nemo_aligner.utils.errors import DataError, shown

TEACHER_REWARDS, CHOSEN_PROBABILITY = "teacher_rewards", "chosen_probability"
TEACHER_SPREAD, TEACHER = "teacher_spread", "teacher"
TEACHER_FIELDS = (TEACHER_REWARDS, CHOSEN_PROBABILITY, TEACHER_SPREAD, TEACHER)
# Difference of the rewards that stands for the probability 1. Its sigmoid is 1 in float64 even
# after division by any temperature below 200, and it is finite, so that no loss becomes NaN.
_CERTAIN = 1e4


def with_teacher(record: Record, fields: Fields, has_parts: bool) -> Record:
    """Add the teacher's rewards in ``fields`` to a comparison; a rating is returned unchanged.

    A probability p becomes the rewards ``log(p / (1 - p))`` and 0, whose difference has the
    sigmoid p.

    Args:
        has_parts: True if the line has several records, so that the field fits none of them.

    Raises:
        DataError: a field has a wrong value, or does not fit the record.
    """
    if not isinstance(record, Comparison):
        return record
    present = [
        name for name in (TEACHER_REWARDS, CHOSEN_PROBABILITY) if fields.get(name) is not None
    ]
    if not present:
        return record
    if len(present) > 1:
        raise DataError(
            f"got both {TEACHER_REWARDS!r} and {CHOSEN_PROBABILITY!r}. Remove one of them"
        )
    if has_parts:
        raise DataError(
            f"{present[0]}: not supported by this format, which makes several comparisons from one "
            "line. Write each comparison to its own line"
        )
    # ``data label`` writes this for people: mark it as read, so that reports do not list it.
    fields.names_read.add(TEACHER_SPREAD)
    teacher = fields.get(TEACHER)
    # A table may hold a date there, for example, which JSON writes as text.
    about = "" if teacher is None else json.dumps(teacher, sort_keys=True, default=str)
    if present == [TEACHER_REWARDS]:
        rewards = _read_rewards(fields[TEACHER_REWARDS], len(record.texts))
        rewards = tuple(rewards[position] for position in record.positions_in_record)
    else:
        rewards = _rewards_of_probability(fields[CHOSEN_PROBABILITY], record)
    return replace(record, teacher_rewards=rewards, teacher=about)


def _read_rewards(value: object, count: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count:
        raise DataError(
            f"{TEACHER_REWARDS}: got {shown(value)}, wanted a list of {count} numbers, one for "
            "each reply in the record's order (for a pair: chosen, rejected)"
        )
    rewards = [
        read_label(number, f"{TEACHER_REWARDS}[{index}]", WantedLabels())
        for index, number in enumerate(value)
    ]
    present = tuple(reward for reward in rewards if reward is not None)
    if len(present) < count:
        raise DataError(
            f"{TEACHER_REWARDS}[{rewards.index(None)}]: got null, wanted a number. If a reward is "
            "unknown, remove the whole list"
        )
    return present


def _rewards_of_probability(value: object, record: Comparison) -> tuple[float, ...]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:  # type: ignore[operator]
        raise DataError(
            f"{CHOSEN_PROBABILITY}: got {shown(value)}, wanted a number from 0 to 1, the "
            "probability that the chosen reply is better"
        )
    if len(record.texts) != 2 or record.is_tied:
        content = "a tie" if record.is_tied else f"{len(record.texts)} replies"
        raise DataError(
            f"{CHOSEN_PROBABILITY}: got a record of {content}, wanted a pair of which one reply is "
            f"chosen. Write {TEACHER_REWARDS}, a list of one number for each reply"
        )
    probability = float(value)  # type: ignore[arg-type]
    if probability in (0.0, 1.0):
        return (_CERTAIN if probability else -_CERTAIN, 0.0)
    return (math.log(probability) - math.log1p(-probability), 0.0)


# A teacher's opinion on all records of a file.


def teacher_rewards(records: Sequence[Record]) -> np.ndarray:
    """Collect the reward that a teacher gives each sample: ``[Q]`` float32, NaN where none does."""
    missing = float("nan")
    rewards = [
        reward
        for record in records
        for reward in record.teacher_rewards or (missing,) * len(record.texts)
    ]
    return np.array(rewards, dtype=np.float32)


def count_teachers(records: Iterable[Record]) -> Counter[str]:
    """Count the records by the JSON of their field ``teacher``; those without it do not count."""
    return Counter(record.teacher for record in records if record.teacher)
