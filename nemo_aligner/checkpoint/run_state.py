"""The state of a training run at a checkpoint: everything in it but the tensors.

``with_current_names`` and ``same_validation`` tell which metrics of two states may be compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.run_folder import RUN_STATE_NAME
from nemo_aligner.config.load import flatten
from nemo_aligner.config.training import MonitorMode
from nemo_aligner.metrics.table import split_name
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.finite import finite_or_none

_VERSION = 1
# Settings that choose the validation records; metrics on different records are not comparable.
# States of earlier versions have no digests of the records, so these settings are compared instead.
_VALIDATED_ON = ("model.data.data_prefix.validation", "trainer.rm.limit_val_records")


@dataclass(frozen=True)
class RunState:
    """The state of a run without its tensors; in ``run_state.json``, NaN and infinity become null.

    Attributes:
        step: number of finished optimizer steps.
        consumed_samples: number of records trained on.
        metrics: results of the validation after this step; empty if there was none.
        fingerprint: settings that must not change when the run is resumed.
        config: resolved settings. A resumed run prints which of them have changed. Early stopping
            starts again if the monitored metric is among them; ``same_validation`` compares some of
            them.
        contract: scoring contract, which a resumed run continues with.
        best_value: best value so far of the metric for early stopping.
        validations_since_best: number of validations since that best value.
        validated_on: digest of the records of each validation set, by the set's name; None in
            states of earlier versions.
        ranked_by: everything that has ranked the run's checkpoints so far: a metric, with the
            digest of its records as the set, and the mode, such as ``<digest>/accuracy:max``.
        earlier_metrics: results of earlier validations of this step, before the validation files
            changed, by names such as ``<digest>/accuracy``.
    """

    step: int
    consumed_samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    contract: dict[str, Any] = field(default_factory=dict)
    best_value: float | None = None
    validations_since_best: int = 0
    validated_on: dict[str, str] | None = None
    ranked_by: list[str] = field(default_factory=list)
    earlier_metrics: dict[str, float] = field(default_factory=dict)


# Fields that may be missing, because earlier versions did not write them.
_ADDED = ("best_value", "validations_since_best", "validated_on", "ranked_by", "earlier_metrics")


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a run on disk: its folder, and the content of its ``run_state.json``."""

    path: Path
    state: RunState


def read_saved(path: Path) -> Saved:
    """Read the state of the checkpoint in the folder ``path``.

    Raises:
        CheckpointError: there is no state, or it is damaged or of another version.
    """
    file = path / RUN_STATE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != _VERSION:
            raise CheckpointError(
                f"{file}: version: got {version}, wanted {_VERSION}; another version of "
                "nemo-aligner has written it"
            )
        stored_names = {item.name for item in fields(RunState)} - (set(_ADDED) - set(content))
        state = RunState(**{key: content[key] for key in stored_names})
        metrics, earlier_metrics = (
            {name: math.nan if value is None else value for name, value in stored.items()}
            for stored in (state.metrics, state.earlier_metrics)
        )
        return Saved(path, replace(state, metrics=metrics, earlier_metrics=earlier_metrics))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file}: there is no such file, so the checkpoint is not complete"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: it is not a valid state of a run: {error!r}") from error


def format_state(state: RunState) -> str:
    """Format a state as the content of ``run_state.json``, which ``read_saved`` reads."""
    content = finite_or_none({"version": _VERSION, **asdict(state)})
    return json.dumps(content, indent=2, allow_nan=False)


def same_validation(first_state: RunState, second_state: RunState, monitor: str | None) -> bool:
    """Tell if the metric ``monitor`` of two states was measured on the same records.

    This is so for any two states if ``monitor`` is None.
    """
    if monitor is None:
        return True
    first_sets, second_sets = first_state.validated_on, second_state.validated_on
    if first_sets is not None and second_sets is not None:
        set_name = split_name(monitor).set_name
        return first_sets.get(set_name) == second_sets.get(set_name)
    first_settings, second_settings = flatten(first_state.config), flatten(second_state.config)
    return all(first_settings.get(key) == second_settings.get(key) for key in _VALIDATED_ON)


def with_current_names(state: RunState, current: RunState) -> RunState:
    """Name each validation set of ``state`` as ``current`` names the set of the same records.

    The name of a set follows from the list of all validation files, so another file may change it.
    Sets of ``earlier_metrics`` count, too, if their records are in ``current``. Another set whose
    records are not in ``current`` keeps its name, unless another set of ``state`` now has it.
    """
    old, new = state.validated_on, current.validated_on
    if old is None or new is None:
        return state
    earlier = {split_name(name).set_name for name in state.earlier_metrics} - {*old.values()}
    sets = {**old, **{digest: digest for digest in earlier}}
    new_names: dict[str, list[str]] = {}
    for name, digest in sets.items():
        # Checkpoints that were validated on other records are ranked by the old names, behind the
        # others. But two sets must not get one name, or the metrics of one would hide the other's.
        keeps_name = name in old and new.get(name) not in sets.values()
        unmatched = [name] if keeps_name else []
        matched = [current_name for current_name in new if new[current_name] == digest]
        new_names[name] = matched or unmatched
    metrics = {}
    for full_name, value in {**state.metrics, **state.earlier_metrics}.items():
        set_name, metric = split_name(full_name)
        for new_name in new_names.get(set_name, []):
            metrics[f"{new_name}/{metric}"] = value
    validated_on = {new_name: sets[name] for name, names in new_names.items() for new_name in names}
    return replace(state, metrics=metrics, validated_on=validated_on)


def name_by_records(name: str, state: RunState) -> str | None:
    """Name a metric of ``state`` with the digest of the set's records in place of the set's name.

    None without such a set.
    """
    set_name, metric = split_name(name)
    digest = (state.validated_on or {}).get(set_name)
    return None if digest is None else f"{digest}/{metric}"


def metrics_by_records(state: RunState) -> dict[str, float]:
    """Return the metrics of ``state``, also the earlier ones, as ``name_by_records`` names them."""
    named = ((name_by_records(name, state), value) for name, value in state.metrics.items())
    latest_metrics = {name: value for name, value in named if name is not None}
    return {**state.earlier_metrics, **latest_metrics}


def name_of_loss(monitor: str) -> str:
    """Return the name of the loss on the set of the metric ``monitor``, which breaks its ties."""
    return f"{split_name(monitor).set_name}/loss"


def rank_key(
    metrics: Mapping[str, float], monitor: str | None, mode: MonitorMode
) -> tuple[float, float] | None:
    """Return a key to sort checkpoints, the best first: value of ``monitor``, then the loss.

    The value is negated if larger ones are better. Return None if ``metrics`` has no value of
    ``monitor``.
    """
    value = math.nan if monitor is None else metrics.get(monitor, math.nan)
    if monitor is None or math.isnan(value):
        return None
    loss = metrics.get(name_of_loss(monitor), math.nan)
    signed = -value if mode is MonitorMode.max else value
    return signed, math.inf if math.isnan(loss) else loss
