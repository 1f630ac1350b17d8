"""What NeMo Gym asks a resources server beside rewards, as its ``SimpleResourcesServer`` has it.

``POST /seed_session`` and ``POST /close_session`` come before and after each rollout: nothing is
kept for one, so they hand back the identifier that they were given. ``POST /aggregate_metrics``
comes at a run's end, with all rollouts without their texts: mean, largest, smallest, median and
standard deviation of each number that stands in them, of all and of each task, by Gym's names.
Masked rollouts have no part in them, and are counted. ``GET /reverify_mode``: a rollout may be
scored again at any time. Where Gym observes its rollouts, all paths begin with
``/ng-rollout/ROLLOUT``, which its own servers take off, too.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.wire.route import Body, HttpAnswer, PlainRoute, problems_of

_TASK = "_ng_task_index"
_ROLLOUT = "_ng_rollout_index"
_OWN = "_ng_"  # what begins so is Gym's own, and no measurement
_SESSION = "resources_session_id"
# ROLLOUT_ID_PATTERN of nemo_gym/rollout_correlation.py.
_OF_ROLLOUT = re.compile(r"^/ng-rollout/[A-Za-z0-9][A-Za-z0-9._-]*(?=/)")


class SessionRequest(Body):
    """An identifier, where an environment server gives one."""

    resources_session_id: str | None = None


class AggregateRequest(Body):
    """All rollouts of a run, without what was asked and said."""

    verify_responses: list[dict[str, Any]]


def without_rollout(path: str) -> str:
    """The path of a request without the rollout that Gym puts before it."""
    return _OF_ROLLOUT.sub("", path)


def answer_session(content: bytes) -> HttpAnswer:
    """The identifier, if there is one."""
    body = _parsed(SessionRequest, content)
    known = body.resources_session_id
    return HttpAnswer(200, {} if known is None else {_SESSION: known})


def answer_aggregate(content: bytes) -> HttpAnswer:
    """Metrics by Gym's names."""
    rollouts = _parsed(AggregateRequest, content).verify_responses
    measured = [each for each in rollouts if not each.get("mask_sample")]
    by_task: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for each in measured:
        by_task[each.get(_TASK, 0)].append(each)
    coverage = _coverage(rollouts, measured, len(by_task))
    groups = [
        {_TASK: task, **_statistics(own), "num_rollouts": len(own)} for task, own in by_task.items()
    ]
    statistics = _statistics(measured)
    repeats = {"num_repeats": len({each.get(_ROLLOUT, 0) for each in rollouts})} if measured else {}
    means = {name: value for name, value in statistics.items() if name.startswith("mean/")}
    return HttpAnswer(
        200,
        {
            "group_level_metrics": groups,
            "agent_metrics": {**statistics, **coverage, **repeats},
            "key_metrics": {**means, **coverage},
        },
    )


def answer_reverify_mode(content: bytes) -> HttpAnswer:
    """Nothing is kept from one rollout to the next."""
    return HttpAnswer(200, "stateless")


def _parsed(model: Any, content: bytes) -> Any:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise ServingError(problems_of(error, model)) from error


def _statistics(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each number that stands in rollouts, by its name."""
    columns: dict[str, list[float]] = defaultdict(list)
    for each in rollouts:
        for name, value in each.items():
            if isinstance(value, int | float) and math.isfinite(value) and name[:4] != _OWN:
                columns[name].append(float(value))
    columns.pop("mask_sample", None)
    found: dict[str, float] = {}
    for name, values in columns.items():
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        found |= {
            f"mean/{name}": float(np.mean(values)),
            f"max/{name}": max(values),
            f"min/{name}": min(values),
            f"median/{name}": float(np.median(values)),
            f"std/{name}": spread,
        }
    return found


def _coverage(
    rollouts: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], tasks: int
) -> dict[str, int]:
    """How much was masked; empty where nothing was."""
    if len(measured) == len(rollouts):
        return {}
    every_task = {each.get(_TASK, 0) for each in rollouts}
    return {
        "coverage/measured_rollouts": len(measured),
        "coverage/masked_rollouts": len(rollouts) - len(measured),
        "coverage/measured_tasks": tasks,
        "coverage/fully_masked_tasks": len(every_task) - tasks,
    }


PLAIN_ROUTES = [
    PlainRoute("/seed_session", "NeMo Gym: a rollout begins", answer_session),
    PlainRoute("/close_session", "NeMo Gym: a rollout has ended", answer_session),
    PlainRoute("/aggregate_metrics", "NeMo Gym: the metrics of a run", answer_aggregate),
    PlainRoute(
        "/reverify_mode", "NeMo Gym: rollouts may be scored again", answer_reverify_mode, "GET"
    ),
]
