"""Start or resume a run from its newest checkpoint.

``check_resumable`` checks that model, data and objective are still those of the checkpoint.
``resume`` loads the checkpoint, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.run import RunCheckpoints, check_same_run
from nemo_aligner.checkpoint.run_state import (
    RunState,
    Saved,
    same_validation,
    with_current_names,
)
from nemo_aligner.checkpoint.weights.save import frozen_digest
from nemo_aligner.config.common import Aggregate
from nemo_aligner.config.load import config_to_dict, flatten, save_config
from nemo_aligner.config.training import RunFolderConfig, TrainConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import show_differences, with_aggregate
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.losses import (
    default_objective_name,
    describe_removed,
    objective_name,
    objective_settings,
    settings_with_defaults,
)
from nemo_aligner.metrics.table import split_name
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.training.early_stopping import EarlyStopping
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.optimizer import Optimizer
from nemo_aligner.utils.console import say, waiting_for
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from nemo_aligner.utils.finite import finite_or_none

# Keys of a run's fingerprint, the values that must not change when the run resumes. Only the keys
# that are compared in a special way have a name here.

_CONTRACT = "scoring contract"
# Digest of a LoRA run's frozen weights, because the run's checkpoints do not contain these weights.
_FROZEN = "frozen weights"
_MODEL_TYPE = "model.reward_model_type"
_OBJECTIVE = "model.objective"
_OBJECTIVE_SETTINGS = "model.objective_kwargs"
_WEIGHTS = "model.data.data_prefix.train_weights"
_TRAIN_ROUTER = "model.train_router"
# Settings of learning rate multipliers. They must not change, because the optimizer's state groups
# parameters by them.
_MULTIPLES = ("head_lr_mult", "layer_lr_decay")
_DATA = "training data"
# Settings that choose the metric by which checkpoints are compared.
_MONITOR_KEYS = (
    "exp_manager.checkpoint_callback_params.monitor",
    "exp_manager.checkpoint_callback_params.mode",
)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the checkpoint from which the run continues.

    Attributes:
        checkpoints: the folder's checkpoints.
        early_stopping: counts validations without an improvement.
        fresh: the state of a new run with these settings and data, before its first step.
        latest: the newest checkpoint, which was checked to belong to this run; None for a new run.
    """

    checkpoints: RunCheckpoints
    early_stopping: EarlyStopping
    fresh: RunState
    latest: Saved | None

    @property
    def unchanged_sets(self) -> set[str]:
        """Names of the validation sets that have the same records as when ``latest`` was saved."""
        return set() if self.latest is None else _unchanged_sets(self.fresh, self.latest.state)


def resume(folder: RunFolder, config: TrainConfig, learner: RewardLearner) -> RunState:
    """Load the newest checkpoint into the learner, or start a new run if there is none.

    Returns:
        The state from which the run continues.

    Raises:
        CheckpointError: the checkpoint is damaged, or was trained on other frozen weights.
    """
    checkpoints, fresh, latest = folder.checkpoints, folder.fresh, folder.latest
    if config.model.lora.rank > 0:
        frozen = {_FROZEN: frozen_digest(learner.model)}
        fresh = replace(fresh, fingerprint={**fresh.fingerprint, **frozen})
        if latest is not None:  # not loaded yet when check_resumable ran
            check_same_run(latest, {**latest.state.fingerprint, **frozen})
    checkpoints.clean()
    checkpoints.compare_with(fresh)
    if latest is not None:
        load_checkpoint(checkpoints, latest, fresh, learner.model, learner.optimizer)
    write_run_config(config, config.exp_manager)
    checkpoints.reserve(learner.model, learner.optimizer)
    if latest is None:
        return fresh
    return resumed_state(fresh, latest.state, folder.early_stopping.monitor)


def load_checkpoint(
    checkpoints: RunCheckpoints,
    latest: Saved,
    fresh: RunState,
    model: Any,
    optimizer: Optimizer,
    samples: str = "records",
) -> None:
    """Load weights and moments of ``latest``, and log where the run continues and what changed.

    ``samples`` is the word in the log for the items that the run counts ("records", "sequences").
    """
    say(f"loading {latest.path} ...")
    with waiting_for(f"loading {latest.path}"):
        checkpoints.load(latest, model, optimizer)
    say(f"resumed from {latest.path}, after {latest.state.consumed_samples} {samples}")
    for line in changes_since(latest, fresh, checkpoints.monitor):
        say(line)


def resumed_state(fresh: RunState, previous: RunState, monitor: str | None) -> RunState:
    """Combine this run's settings (``fresh``) and a checkpoint's progress (``previous``).

    Early stopping counts from 0 again if the metric ``monitor`` or the records of its set have
    changed, because old and new values cannot be compared. If these records have changed, the
    metrics of the checkpoint are also dropped, so that its step is validated again, unless it has
    ``earlier_metrics`` on the new ones. If only the records of other sets have changed, the metrics
    on those are dropped.
    """
    state = replace(
        fresh,
        step=previous.step,
        consumed_samples=previous.consumed_samples,
        ranked_by=previous.ranked_by,
    )
    renamed = with_current_names(previous, fresh)
    if not same_validation(renamed, fresh, monitor):
        return state
    state = replace(state, metrics=_kept_metrics(fresh, renamed))
    sets = previous.validated_on or fresh.validated_on or {}
    if _monitored(previous, sets) != _monitored(fresh, fresh.validated_on or {}):
        # The kept metrics are not counted again, so they are the first of the new count.
        value = math.nan if monitor is None else state.metrics.get(monitor, math.nan)
        return replace(state, best_value=finite_or_none(value))
    return replace(
        state,
        best_value=previous.best_value,
        validations_since_best=previous.validations_since_best,
    )


def _kept_metrics(fresh: RunState, previous: RunState) -> dict[str, float]:
    """Return the metrics of ``previous`` on the validation sets whose records are unchanged."""
    if previous.validated_on is None or fresh.validated_on is None:
        return previous.metrics
    unchanged = _unchanged_sets(fresh, previous)
    return {
        name: value
        for name, value in previous.metrics.items()
        if split_name(name).set_name in unchanged
    }


def _unchanged_sets(fresh: RunState, previous: RunState) -> set[str]:
    """Return the names of the validation sets that have the same name and records in both."""
    old, new = previous.validated_on or {}, fresh.validated_on or {}
    return {name for name in new if old.get(name) == new[name]}


def _monitored(state: RunState, sets: Mapping[str, str]) -> list[Any]:
    """Return what determines the metric that early stopping watches: name, mode and records.

    A setting that does not name one of the validation ``sets``, which map their names to digests,
    means the first one.
    """
    settings = flatten(state.config)
    monitor, mode = (settings.get(key) for key in _MONITOR_KEYS)
    set_name, metric = split_name(str(monitor))
    if set_name in sets:
        return [metric, mode, sets[set_name]]
    return [monitor, mode, next(iter(sets.values()), None)]


def new_state(config: TrainConfig, shape: ModelShape, data: TrainingData) -> RunState:
    """Build the state of a new run before its first step; ``shape`` is that of the model to train.

    A new run starts with this state. When a run resumes, the checkpoint's state is compared with
    it.
    """
    return RunState(
        step=0,
        consumed_samples=0,
        fingerprint=fingerprint(config, shape, data),
        config=config_to_dict(config),
        contract=data.contract.to_dict(),
        validated_on={dataset.name: dataset.digest for dataset in data.validation},
    )


def check_resumable(latest: Saved, fresh: RunState, data: TrainingData) -> Saved:
    """Check that a checkpoint belongs to this run: same model, data, objective and contract.

    The frozen weights of a LoRA run are not read yet, so ``resume`` compares them later.

    Args:
        fresh: the state of a new run with the settings and the data of this run.

    Returns:
        The checkpoint; if an older version wrote it, with the missing keys added to its
        fingerprint.

    Raises:
        CheckpointError: the checkpoint belongs to another run.
    """
    stored, current = (ScoringContract.from_dict(s.contract) for s in (latest.state, fresh))
    latest = replace(latest, state=_complete_fingerprint(latest.state))
    saved = latest.state.fingerprint
    # In older versions, the rule that aggregates the rewards of steps was a setting of the
    # objective and not part of the contract. Move it there before comparing.
    aggregate = saved[_OBJECTIVE_SETTINGS].get("aggregate", Aggregate.last.value)
    differences = show_differences(with_aggregate(stored, aggregate).differences(current))
    fingerprint = {**fresh.fingerprint, _FROZEN: saved.get(_FROZEN), _CONTRACT: stored.hash}
    if differences:
        # Different contracts usually tokenize the same files differently, so that the digests of
        # the data differ as a consequence. Report only the difference between the contracts.
        fingerprint.update({key: saved.get(key) for key in (_CONTRACT, _DATA)})
    elif saved.get(_DATA) != fingerprint[_DATA]:
        # Older versions saved one digest of all tokens, newer ones a digest for each file. Compare
        # with the digest that the older version would have computed.
        fingerprint[_DATA] = data.train.measure_digest()
    # Report a setting that is also in the fingerprint only once.
    contract_changes = {
        key: old_and_new for key, old_and_new in differences.items() if key not in fingerprint
    }
    check_same_run(latest, fingerprint, contract_changes)
    return latest


def check_objective_exists(latest: Saved) -> None:
    """Check that this version still has the objective of the checkpoint's run.

    Raises:
        CheckpointError: this version has removed the objective.
    """
    removed = describe_removed(latest.state.fingerprint.get(_OBJECTIVE, ""))
    if removed is not None:
        raise CheckpointError(
            f"{latest.path}: its run cannot be resumed: {removed}. Set "
            "exp_manager.explicit_log_dir to a new folder to start a new run"
        )


def check_may_resume(latest: Saved | None, run: RunFolderConfig) -> None:
    """If the settings forbid resuming, check that the run's folder has no checkpoint.

    Raises:
        ConfigError: ``exp_manager.resume_if_exists`` is false, and the folder has a checkpoint.
    """
    if latest is not None and not run.resume_if_exists:
        raise ConfigError(
            f"exp_manager.resume_if_exists: got false, but {latest.path.parent} holds the "
            "checkpoints of a run. Set exp_manager.explicit_log_dir to another folder"
        )


def changes_since(latest: Saved, fresh: RunState, monitor: str | None) -> list[str]:
    """List what has changed since a checkpoint, one line for each setting or validation set.

    A line tells if ``monitor``, the metric that ranks checkpoints, was last measured on other
    records.
    """
    changes = changed_settings(latest.state.config, fresh.config)
    lines = [f"  changed since: {change}" for change in changes]
    # Earlier metrics are left out: they rank checkpoints, but early stopping starts over.
    renamed = with_current_names(replace(latest.state, earlier_metrics={}), fresh)
    old, new = renamed.validated_on or {}, fresh.validated_on or {}
    changed_sets = [name for name in new if old.get(name, new[name]) != new[name]]
    lines += [f"  changed since: the records of {name}" for name in changed_sets]
    if renamed.validated_on != {} and not same_validation(renamed, fresh, monitor):
        lines.append(
            "  the last validations used other records, so they do not count for the best "
            "checkpoint or early stopping"
        )
    return lines


def _complete_fingerprint(state: RunState) -> RunState:
    """Add the keys that older versions did not write to the fingerprint of a checkpoint.

    Older versions had one objective for each type of model, and fewer settings. The keys get the
    values that describe how these versions trained.
    """
    fingerprint = dict(state.fingerprint)
    name = fingerprint.setdefault(_OBJECTIVE, default_objective_name(fingerprint[_MODEL_TYPE]))
    settings = fingerprint.get(_OBJECTIVE_SETTINGS, {})
    fingerprint[_OBJECTIVE_SETTINGS] = settings_with_defaults(name, settings)
    fingerprint.setdefault(_WEIGHTS, [])
    for name in _MULTIPLES:
        fingerprint.setdefault(f"model.optim.{name}", 1.0)
    # Some versions had this setting, but not in the fingerprint. Their checkpoints have it in the
    # config.
    trains_router = flatten(state.config).get(_TRAIN_ROUTER, False)
    fingerprint.setdefault(_TRAIN_ROUTER, trains_router)
    return replace(state, fingerprint=fingerprint)


def write_run_config(config: object, run: RunFolderConfig) -> None:
    """Write all settings to ``config.yaml`` in the run's folder; every rank calls it."""
    folder = Path(run.explicit_log_dir)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.yaml")

    on_main(write)


def fingerprint(config: TrainConfig, shape: ModelShape, data: TrainingData) -> dict[str, Any]:
    """Collect the values that must not change when a run resumes, as plain JSON values.

    They describe the model, the data and its order, and the objective. The parallel layout, the
    learning rate and the length of the run are not included, because they may change.
    """
    model = config.model
    return {
        **{f"model.{name}": value for name, value in shape.as_fingerprint().items()},
        _MODEL_TYPE: model.reward_model_type.value,
        _OBJECTIVE: objective_name(model),
        _OBJECTIVE_SETTINGS: objective_settings(data.objective),
        "model.regression.attributes": list(model.regression.attributes),
        "model.freeze_layers": model.freeze_layers,
        _TRAIN_ROUTER: model.train_router,
        "model.global_batch_size": model.global_batch_size,
        "model.seed": model.seed,
        _WEIGHTS: list(model.data.data_prefix.train_weights),
        **{f"model.optim.{name}": getattr(model.optim, name) for name in _MULTIPLES},
        "trainer.precision": config.precision.value,
        "training records": len(data.train),
        _DATA: data.train.digest,
        _CONTRACT: data.contract.hash,
    }


def changed_settings(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List ``key: old -> new`` for every setting that differs between two nested mappings."""
    old, new = flatten(previous), flatten(current)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
