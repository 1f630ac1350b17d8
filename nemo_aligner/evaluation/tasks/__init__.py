"""Benchmarks of reward models; ``TASKS`` is the registry by name.

``run_task`` (in ``nemo_aligner/evaluation``) reads a benchmark's file, scores its items, and
computes verdicts and figures with the functions of the benchmark's ``Task``.

- ``base``: the class ``Task``, which every benchmark is an instance of, and shared functions.
- ``pair_sets``: pairs of a right and a wrong reply: PPE's preferences, fc-reward-bench, JudgeBench,
  LLMBar, Auto-J, HumanEvalPack, HHH and RM-Bench.
- ``rewardbench``: RewardBench and RewardBench 2, including its score for ties.
- ``best_of_n``: several replies to a prompt: best of n, PPE's correctness sets, RMB and
  IF-RewardBench.
- ``step_sets``: verdicts on the steps of solutions: ProcessBench and PRMBench.

To add a benchmark, define a ``Task`` in a file here, add it to ``TASKS``, and add its row to
docs/evaluation.md.
"""

from __future__ import annotations

from nemo_aligner.config.describe import suggestion
from nemo_aligner.evaluation.tasks.base import Task
from nemo_aligner.evaluation.tasks.best_of_n import (
    BEST_OF_N,
    IF_REWARDBENCH,
    PPE_CORRECTNESS,
    RMB,
)
from nemo_aligner.evaluation.tasks.pair_sets import (
    AUTOJ,
    FC_REWARDBENCH,
    HHH,
    HUMANEVALPACK,
    JUDGEBENCH,
    LLMBAR,
    PPE_PREFERENCE,
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
        PPE_PREFERENCE,
        RMB,
        FC_REWARDBENCH,
        IF_REWARDBENCH,
    )
}


def find_task(name: str) -> Task:
    """Find a benchmark by name.

    Raises:
        ConfigError: no benchmark has this name.
    """
    if name not in TASKS:
        nearest = suggestion(name, TASKS)
        hint = "" if nearest is None else f" (did you mean {nearest}?)"
        raise ConfigError(f"task: got {name!r}{hint}, wanted one of {', '.join(TASKS)}")
    return TASKS[name]
