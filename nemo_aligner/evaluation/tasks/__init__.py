"""Benchmarks, one file each; ``TASKS`` is the registry, by name."""

from __future__ import annotations

from nemo_aligner.config.suggest import suggestion
from nemo_aligner.errors import ConfigError
from nemo_aligner.evaluation.tasks import (
    autoj,
    best_of_n,
    hhh,
    humanevalpack,
    judgebench,
    llmbar,
    ppe_correctness,
    rewardbench,
    rewardbench2,
    rm_bench,
)
from nemo_aligner.evaluation.tasks.base import Task

_MODULES = (
    rewardbench,
    rewardbench2,
    rm_bench,
    judgebench,
    llmbar,
    autoj,
    humanevalpack,
    hhh,
    ppe_correctness,
    best_of_n,
)
TASKS = {module.TASK.name: module.TASK for module in _MODULES}


def find_task(name: str) -> Task:
    """The benchmark of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        near = suggestion(name, TASKS)
        meant = "" if near is None else f" (did you mean {near}?)"
        raise ConfigError(f"task: got {name!r}{meant}, wanted one of {', '.join(TASKS)}")
    return TASKS[name]
