"""Benchmarks, one file each; ``TASKS`` is the registry, by name."""

from __future__ import annotations

from nemo_aligner.config.suggest import suggestion
from nemo_aligner.errors import ConfigError
from nemo_aligner.evaluation.tasks.autoj import AUTOJ
from nemo_aligner.evaluation.tasks.base import Task
from nemo_aligner.evaluation.tasks.best_of_n import BEST_OF_N
from nemo_aligner.evaluation.tasks.hhh import HHH
from nemo_aligner.evaluation.tasks.humanevalpack import HUMANEVALPACK
from nemo_aligner.evaluation.tasks.judgebench import JUDGEBENCH
from nemo_aligner.evaluation.tasks.llmbar import LLMBAR
from nemo_aligner.evaluation.tasks.ppe_correctness import PPE_CORRECTNESS
from nemo_aligner.evaluation.tasks.rewardbench import REWARDBENCH
from nemo_aligner.evaluation.tasks.rewardbench2 import REWARDBENCH2
from nemo_aligner.evaluation.tasks.rm_bench import RM_BENCH

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
    )
}


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
