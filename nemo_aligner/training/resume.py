"""Start a run or resume it: what must not have changed, and the run's metadata."""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import nemo_aligner
from nemo_aligner.checkpoint.run import (
    RunCheckpoints,
    RunState,
    Saved,
    check_same_run,
    same_validation,
)
from nemo_aligner.checkpoint.run_folder import FACTS_NAME
from nemo_aligner.checkpoint.weights.save import frozen_digest
from nemo_aligner.config.common import Aggregate
from nemo_aligner.config.load import config_to_dict, flatten, save_config
from nemo_aligner.config.training import RunFolderConfig, TrainConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import describe_differences, with_aggregate
from nemo_aligner.data.records import write_lines
from nemo_aligner.data.report import FileReport
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.losses import (
    default_objective_name,
    describe_removed,
    objective_name,
    objective_settings,
    settings_with_defaults,
)
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.optimizer import Optimizer
from nemo_aligner.training.trainer import EarlyStopping
from nemo_aligner.utils.console import say, waiting_for
from nemo_aligner.utils.errors import CheckpointError, ConfigError

# A new run, or a resumed one: what must not change, and what has changed.

_CONTRACT = "scoring contract"
# With LoRA the base weights are not in the checkpoint.
_FROZEN = "frozen weights"
_MODEL_TYPE = "model.reward_model_type"
_OBJECTIVE = "model.objective"
_OBJECTIVE_SETTINGS = "model.objective_kwargs"
_WEIGHTS = "model.data.data_prefix.train_weights"
# Multiples of the learning rate: they say which groups of parameters the optimizer's state has.
_MULTIPLES = ("head_lr_mult", "layer_lr_decay")
_DATA = "training data"
# The metric that the best value belongs to.
_JUDGED_BY = (
    "exp_manager.checkpoint_callback_params.monitor",
    "exp_manager.checkpoint_callback_params.mode",
)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run: its checkpoints, and the one that the run goes on from.

    Attributes:
        fresh: the state of this run before its first step, if it were a new one.
        latest: the newest checkpoint, which is of this run; None for a new run.
    """

    checkpoints: RunCheckpoints
    early_stopping: EarlyStopping
    fresh: RunState
    latest: Saved | None


def resume(folder: RunFolder, config: TrainConfig, learner: RewardLearner) -> RunState:
    """Resume the learner from the newest checkpoint; without one a new run begins.

    Raises:
        CheckpointError: the checkpoint was trained beside other frozen weights, or is damaged.
    """
    checkpoints, fresh, latest = folder.checkpoints, folder.fresh, folder.latest
    if config.model.lora.rank > 0:
        frozen = {_FROZEN: frozen_digest(learner.model)}
        fresh = replace(fresh, fingerprint={**fresh.fingerprint, **frozen})
        if latest is not None:  # the rest was compared before the model was read
            check_same_run(latest, {**latest.state.fingerprint, **frozen})
    checkpoints.clean()
    checkpoints.compare_with(fresh)
    if latest is not None:
        load_checkpoint(checkpoints, latest, fresh, learner.model, learner.optimizer)
    write_run_config(config, config.exp_manager)
    checkpoints.reserve(learner.model, learner.optimizer)
    if latest is None:
        return fresh
    return go_on(fresh, latest.state)


def load_checkpoint(
    checkpoints: RunCheckpoints,
    latest: Saved,
    fresh: RunState,
    model: Any,
    optimizer: Optimizer,
    samples: str = "records",
) -> None:
    """Load weights and moments, and say where the run goes on and what has changed since."""
    say(f"loading {latest.path} ...")
    with waiting_for(f"loading {latest.path}"):
        checkpoints.load(latest, model, optimizer)
    say(f"resumed from {latest.path}, after {latest.state.consumed_samples} {samples}")
    for line in changes_since(latest, fresh):
        say(line)


def go_on(fresh: RunState, before: RunState) -> RunState:
    """A run's own state, where another left it.

    What it waits for begins anew where validations are judged by another metric or on other
    records; on other records its last step was not validated.
    """
    here = replace(fresh, step=before.step, consumed_samples=before.consumed_samples)
    if not same_validation(before, fresh):
        return here
    here = replace(here, metrics=before.metrics)
    old, now = flatten(before.config), flatten(fresh.config)
    if any(old.get(key) != now.get(key) for key in _JUDGED_BY):
        return here
    return replace(
        here,
        best_value=before.best_value,
        validations_since_best=before.validations_since_best,
    )


def new_state(config: TrainConfig, shape: ModelShape, data: TrainingData) -> RunState:
    """The state of a run before its first step; ``shape`` is that of the model to train."""
    return RunState(
        step=0,
        consumed_samples=0,
        fingerprint=fingerprint(config, shape, data),
        config=config_to_dict(config),
        contract=data.contract.to_dict(),
        validated_on={dataset.name: dataset.digest for dataset in data.validation},
    )


def check_goes_on(latest: Saved, fresh: RunState, data: TrainingData) -> Saved:
    """Refuse to go on from a checkpoint of another run than the one with the state ``fresh``.

    The frozen weights of LoRA are not compared, as the model is not read yet: see ``resume``.

    Returns:
        The checkpoint; its fingerprint has the names and settings that earlier versions left out.

    Raises:
        CheckpointError: it is of another run.
    """
    stored, now = (ScoringContract.from_dict(s.contract) for s in (latest.state, fresh))
    _check_objective_exists(latest)
    latest = replace(latest, state=_with_objective(latest.state))
    before = latest.state.fingerprint
    # Runs of versions whose contract did not say how steps become one reward had the rule, too.
    aggregate = before[_OBJECTIVE_SETTINGS].get("aggregate", Aggregate.last.value)
    differences = describe_differences(with_aggregate(stored, aggregate).differences(now))
    fingerprint = {
        **fresh.fingerprint,
        _FROZEN: before.get(_FROZEN),
        _CONTRACT: differences or stored.hash,
    }
    if differences:
        # The same files have other tokens by other rules, so that their digest says nothing.
        fingerprint[_DATA] = before.get(_DATA)
    elif before.get(_DATA) != fingerprint[_DATA]:
        # Runs of versions that knew no digest of each file have that of all tokens.
        fingerprint[_DATA] = data.train.measure_digest()
    check_same_run(latest, fingerprint)
    return latest


def _check_objective_exists(latest: Saved) -> None:
    """Reject a run that trained with an objective that this version no longer has."""
    removed = describe_removed(latest.state.fingerprint.get(_OBJECTIVE, ""))
    if removed is not None:
        raise CheckpointError(
            f"{latest.path}: its run cannot be resumed: {removed}. Set "
            "exp_manager.explicit_log_dir to a new folder to start a new run"
        )


def check_may_resume(latest: Saved | None, run: RunFolderConfig) -> None:
    """Refuse to go on from the newest checkpoint of a folder where the settings forbid it.

    Raises:
        ConfigError: there is one, and ``exp_manager.resume_if_exists`` is false.
    """
    if latest is not None and not run.resume_if_exists:
        raise ConfigError(
            f"exp_manager.resume_if_exists: got false, but {latest.path.parent} holds the "
            "checkpoints of a run; wanted another exp_manager.explicit_log_dir"
        )


def changes_since(latest: Saved, fresh: RunState) -> list[str]:
    """A line for every setting and validation set that has changed since a checkpoint."""
    changes = changed_settings(latest.state.config, fresh.config)
    lines = [f"  changed since: {change}" for change in changes]
    before, now = latest.state.validated_on or {}, fresh.validated_on or {}
    changed_sets = [name for name in now if before.get(name, now[name]) != now[name]]
    lines += [f"  changed since: the records of {name}" for name in changed_sets]
    if not same_validation(latest.state, fresh):
        lines.append(
            "  earlier validations used other records: the search for the best starts anew"
        )
    return lines


def _with_objective(state: RunState) -> RunState:
    """Runs of versions that had one objective for each type of model do not name it.

    Those of versions that had fewer settings lack some, as the weights of files.
    """
    fingerprint = dict(state.fingerprint)
    name = fingerprint.setdefault(_OBJECTIVE, default_objective_name(fingerprint[_MODEL_TYPE]))
    settings = fingerprint.get(_OBJECTIVE_SETTINGS, {})
    fingerprint[_OBJECTIVE_SETTINGS] = settings_with_defaults(name, settings)
    fingerprint.setdefault(_WEIGHTS, [])
    for name in _MULTIPLES:
        fingerprint.setdefault(f"model.optim.{name}", 1.0)
    return replace(state, fingerprint=fingerprint)


def write_run_config(config: object, run: RunFolderConfig) -> None:
    """Write all settings to the folder of their run; every rank calls it."""
    folder = Path(run.explicit_log_dir)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.yaml")

    on_main(write)


def fingerprint(config: TrainConfig, shape: ModelShape, data: TrainingData) -> dict[str, Any]:
    """Settings and data that must not change when a run resumes, as plain JSON values.

    It is the model, the data and its order, and the objective. Layout, learning rate and length may
    change.
    """
    model = config.model
    return {
        **{f"model.{name}": value for name, value in shape.as_fingerprint().items()},
        _MODEL_TYPE: model.reward_model_type.value,
        _OBJECTIVE: objective_name(model),
        _OBJECTIVE_SETTINGS: objective_settings(data.objective),
        "model.regression.attributes": list(model.regression.attributes),
        "model.freeze_layers": model.freeze_layers,
        "model.global_batch_size": model.global_batch_size,
        "model.seed": model.seed,
        _WEIGHTS: list(model.data.data_prefix.train_weights),
        **{f"model.optim.{name}": getattr(model.optim, name) for name in _MULTIPLES},
        "trainer.precision": config.precision.value,
        "training records": len(data.train),
        _DATA: data.train.digest,
        _CONTRACT: data.contract.hash,
    }


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every setting that differs between two nested mappings."""
    old, new = flatten(before), flatten(now)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


# Facts of a run for its report: versions, data, contract, memory.

_PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "numpy")


class RunFacts:
    """Facts of a run, in ``run_facts.json``: written at its start and after every validation."""

    def __init__(self, run: Path, data: TrainingData, ranks: int) -> None:
        self._path = run / FACTS_NAME
        self._facts: dict[str, Any] = {
            "ranks": ranks,
            "described": [],
            "data": [
                describe_file(report) for dataset in data.datasets for report in dataset.reports
            ],
            "validation_records": {each.name: len(each) for each in data.validation},
            **describe_contract(data.contract),
            "versions": find_versions(),
        }

    def begin(self, described: Sequence[str]) -> None:
        """Write the file for the first time, with the lines that the start of the run says."""
        self._facts["described"] = list(described)
        self.write()

    def write(self) -> None:
        """Write the file, with the memory that has been needed so far."""
        content = json.dumps({**self._facts, "peak_memory": peak_memory()}, indent=2)
        write_lines(self._path, [content])


def describe_file(report: FileReport) -> dict[str, Any]:
    """The start-up table of a file, as plain JSON values."""
    return {
        "name": report.name,
        "path": report.path,
        "format": report.summary.format,
        "rows": [[name, str(value)] for name, value in report.rows()],
        "malformed": [str(each) for each in report.malformed],
    }


def describe_contract(contract: ScoringContract) -> dict[str, Any]:
    """Hash and fields of the scoring contract."""
    return {"contract_hash": contract.hash, "contract": contract.to_dict()}


def find_versions() -> dict[str, str]:
    """Versions of this package, its main dependencies, Python and the machine."""
    found = {"nemo_aligner": nemo_aligner.__version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["system"] = f"{platform.system()} {platform.machine()}"
    if torch.cuda.is_available():
        found["GPU"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return found


def peak_memory() -> dict[str, int]:
    """Bytes that this process has needed at most: resident on the host, allocated on its GPU."""
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.max_memory_allocated()
    return found
