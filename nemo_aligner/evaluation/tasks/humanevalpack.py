"""HumanEvalPack (Muennighoff et al. 2023, arXiv 2308.07124): a solution against one with a bug.

Both begin with the problem's own lines of code, as RewardBench's ``hep-*`` subsets have them.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.data.formats.fields import read_string
from nemo_aligner.evaluation.tasks.base import Task, TaskItem, asked, first_is_above, pair_rows

_SIDES = ("canonical_solution", "buggy_solution")


def _read_humanevalpack(value: dict[str, Any]) -> TaskItem:
    texts = tuple(
        asked(value["instruction"], read_string(value, "prompt") + read_string(value, side), side)
        for side in _SIDES
    )
    name = str(value["task_id"])
    return TaskItem(name, name.partition("/")[0], texts, is_code=True)


HUMANEVALPACK = Task(
    name="humanevalpack",
    file="bigcode/humanevalpack, a file of data/",
    read=_read_humanevalpack,
    judge=first_is_above,
    summarise=pair_rows,
    sample={
        "task_id": "Python/0",
        "instruction": "Write `double(x)`.",
        "prompt": "def double(x):\n",
        "canonical_solution": "    return 2 * x\n",
        "buggy_solution": "    return x * x\n",
    },
)
