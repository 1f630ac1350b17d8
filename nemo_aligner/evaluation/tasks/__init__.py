"""Benchmarks: ``TASKS`` is the registry, by name."""

from __future__ import annotations

from nemo_aligner.config.describe import suggestion
from nemo_aligner.evaluation.tasks.base import Task
from nemo_aligner.evaluation.tasks.best_of_n import BEST_OF_N, PPE_CORRECTNESS
from nemo_aligner.evaluation.tasks.pair_sets import (
    AUTOJ,
    HHH,
    HUMANEVALPACK,
    JUDGEBENCH,
    LLMBAR,
    RM_BENCH,
)
from nemo_aligner.evaluation.tasks.rewardbench import REWARDBENCH, REWARDBENCH2
from nemo_aligner.evaluation.tasks.step_sets import PRMBENCH, PROCESSBENCH
from nemo_aligner.utils.errors import ConfigError

TASKS = {
    task.name: task
    for task in (
        REWARDBENCH,
        REWARDBENCH2,
        RM_BENCH,
        JUDGEBENCH,
        LLMBAR,
        AUTOJ,
        HUMANEVALPACK,
        HHH,
        PPE_CORRECTNESS,
        BEST_OF_N,
        PROCESSBENCH,
        PRMBENCH,
    )
}


def find_task(name: str) -> Task:
    """Find a benchmark by name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        near = suggestion(name, TASKS)
        meant = "" if near is None else f" (did you mean {near}?)"
        raise ConfigError(f"task: got {name!r}{meant}, wanted one of {', '.join(TASKS)}")
    return TASKS[name]
