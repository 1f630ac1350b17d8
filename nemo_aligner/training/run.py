"""What surrounds the loop: a new run or one that goes on, and the model that comes out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nemo_aligner.checkpoint.reward_model import PretrainedModel, save_reward_model
from nemo_aligner.checkpoint.run_state import RunCheckpoints, RunState, Saved, check_same_run
from nemo_aligner.config.load import config_to_dict, save_config
from nemo_aligner.config.schema import ExpManagerConfig, MonitorMode, Precision, TrainConfig
from nemo_aligner.data.contract import ScoringContract, describe_differences
from nemo_aligner.data.datasets import TokenizedDataset
from nemo_aligner.errors import CheckpointError, ConfigError
from nemo_aligner.metrics import lower_is_better
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.collectives import is_main, on_main, say
from nemo_aligner.parallel.cpu import lacks_bf16
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.training.learner import RewardLearner, validation_metric_names
from nemo_aligner.training.loggers import check_loggers
from nemo_aligner.training.trainer import Outcome

EXPORT_NAME = "megatron_gpt.nemo"
_STEPS_FOR_BALANCE = 20
_CONTRACT = "scoring contract"


def check_settings(config: TrainConfig) -> None:
    """Refuse what cannot work before anything is built.

    Raises:
        ConfigError: no base checkpoint, or a logger that is not installed.
    """
    if config.pretrained_checkpoint.restore_from_path is None:
        raise ConfigError(
            "pretrained_checkpoint.restore_from_path: it is not set, wanted a .nemo file"
        )
    check_loggers(config.exp_manager)


def open_checkpoints(config: ExpManagerConfig, learner: RewardLearner) -> RunCheckpoints:
    """The run's checkpoints, ranked by ``monitor``: null is the first validation set's main metric.

    ``mode`` null is the metric's own: losses, ties and calibration errors are better small.

    Raises:
        ConfigError: validation gives no metric of that name.
    """
    settings = config.checkpoint_callback_params
    objective, datasets = learner.objective, learner.data.validation
    available = validation_metric_names(objective, datasets)
    monitor = settings.monitor
    if monitor is None and datasets:
        monitor = f"{datasets[0].name}/{objective.main_metric}"
    elif monitor is not None and monitor not in available:
        raise ConfigError(
            f"exp_manager.checkpoint_callback_params.monitor: got {monitor!r}, wanted one of "
            f"{', '.join(available) or 'none, as there is no validation data'}"
        )
    folder = Path(config.explicit_log_dir) / "checkpoints"
    mode = settings.mode or (
        MonitorMode.min if monitor is not None and lower_is_better(monitor) else MonitorMode.max
    )
    return RunCheckpoints(folder, monitor, mode, settings.save_top_k)


def describe(
    config: TrainConfig,
    pretrained: PretrainedModel,
    layout: ParallelLayout,
    total_steps: int,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
) -> None:
    """Say on rank 0 what is about to be trained, and how."""
    options, shape = config.model, ModelShape.from_config(pretrained.config)
    head = "a new head" if pretrained.head_is_new else "its own head"
    say(
        f"model: {shape.num_parameters() / 1e6:.1f}M parameters, {shape.num_layers} layers, "
        f"{head}, {config.trainer.precision.value}, {layout}"
    )
    if config.trainer.precision is not Precision.fp32 and lacks_bf16():
        say("note: this CPU has no matrix products in 16 bits: fp32 is many times faster")
    if options.freeze_layers:
        say(f"frozen: the embeddings and {options.freeze_layers} of {shape.num_layers} layers")
    say(f"run: {total_steps} steps of {options.global_batch_size} records")
    if is_main():
        steps = min(total_steps, _STEPS_FOR_BALANCE)
        say(f"balance: {learner.imbalance(range(steps))} (first {steps} steps)")
    if options.optim.sched.warmup_steps >= total_steps:
        say(f"note: the run ends within its warm-up ({options.optim.sched.warmup_steps} steps)")
    say(f"best checkpoint by: {checkpoints.monitor or 'nothing, the newest counts'}")


def resume(
    checkpoints: RunCheckpoints,
    config: TrainConfig,
    model_config: Mapping[str, Any],
    learner: RewardLearner,
) -> RunState:
    """Put the learner where the newest checkpoint left it; where there is none, a new run begins.

    Raises:
        ConfigError: there is one, and ``exp_manager.resume_if_exists`` is false.
        CheckpointError: it is of another run.
    """
    data = learner.data
    fresh = RunState(
        step=0,
        consumed_samples=0,
        fingerprint=fingerprint(config, model_config, data.train, data.contract),
        config=config_to_dict(config),
        contract=data.contract.to_dict(),
    )
    checkpoints.clean()
    latest = checkpoints.latest()
    if latest is not None:
        if not config.exp_manager.resume_if_exists:
            raise ConfigError(
                f"exp_manager.resume_if_exists: got false, but {checkpoints.folder} holds the "
                "checkpoints of a run; wanted another exp_manager.explicit_log_dir"
            )
        _restore(checkpoints, latest, fresh, learner)
    folder = Path(config.exp_manager.explicit_log_dir)
    on_main(lambda: _write_config(config, folder))
    checkpoints.reserve(learner.model, learner.optimizer)
    if latest is None:
        return fresh
    return replace(fresh, step=latest.state.step, consumed_samples=latest.state.consumed_samples)


def _restore(
    checkpoints: RunCheckpoints, latest: Saved, fresh: RunState, learner: RewardLearner
) -> None:
    before, now = (ScoringContract.from_dict(s.contract) for s in (latest.state, fresh))
    differences = describe_differences(before.differences(now))
    check_same_run(latest, {**fresh.fingerprint, _CONTRACT: differences or before.hash})
    checkpoints.load(latest, learner.model, learner.optimizer)
    say(f"resumed from {latest.path}, after {latest.state.consumed_samples} records")
    for change in changed_settings(latest.state.config, fresh.config):
        say(f"  changed since: {change}")


def _write_config(config: TrainConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder / "config.yaml")


def finish(
    outcome: Outcome,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
) -> None:
    """Export the model of a run that came to its end; tell how to go on with one that did not."""
    if outcome.stopped_by is None:
        export(checkpoints.folder / EXPORT_NAME, checkpoints, learner, pretrained)
        return
    say(
        f"stopped by {outcome.stopped_by} after step {outcome.step}, which is saved: the same "
        f"command goes on from there; trainer.rm.max_steps={outcome.step} makes it write "
        f"{EXPORT_NAME} at once"
    )


def export(
    path: Path,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
) -> None:
    """Write the reward model's ``.nemo``: the best checkpoint's weights, else the newest's.

    Raises:
        CheckpointError: nothing was saved.
    """
    best = checkpoints.best()
    chosen = best or checkpoints.latest()
    if chosen is None:
        raise CheckpointError(f"{checkpoints.folder}: there is no checkpoint to export")
    checkpoints.load_model(chosen, learner.model)
    contract = _with_statistics(learner.data.contract, chosen)
    config = {
        **pretrained.config,
        "reward_model_type": contract.reward_model_type,
        "regression": {"num_attributes": len(contract.attributes)},
    }
    save_reward_model(path, learner.model, config, pretrained.tokenizer, contract)
    why = "the newest"
    if best is not None:
        why = f"the best {checkpoints.monitor}, {best.state.metrics[str(checkpoints.monitor)]:.4g}"
    say(f"wrote {path} with the weights of step {chosen.state.step} ({why})")
    say(f"scoring contract: {contract.hash}")


def _with_statistics(contract: ScoringContract, chosen: Saved) -> ScoringContract:
    """The contract with the rewards' mean and deviation on the first validation set."""
    metrics = chosen.state.metrics
    first = next((name for name in metrics if "/reward_mean/" in name), None)
    if first is None:
        return contract
    prefix = first.partition("/")[0]
    columns = [
        [metrics[f"{prefix}/reward_{which}/{name}"] for name in contract.attributes]
        for which in ("mean", "std")
    ]
    return contract.with_statistics(columns[0], columns[1], measured_on=prefix)


def fingerprint(
    config: TrainConfig,
    model_config: Mapping[str, Any],
    train: TokenizedDataset,
    contract: ScoringContract,
) -> dict[str, Any]:
    """What must not change when a run goes on, as plain JSON values.

    It is the model, the data and its order. Layout, learning rate and length may change.
    """
    model = config.model
    shape = asdict(ModelShape.from_config(model_config))
    return {
        **{f"model.{name}": value for name, value in shape.items()},
        "model.reward_model_type": model.reward_model_type.value,
        "model.regression.attributes": list(model.regression.attributes),
        "model.freeze_layers": model.freeze_layers,
        "model.global_batch_size": model.global_batch_size,
        "model.seed": model.seed,
        "trainer.precision": config.trainer.precision.value,
        "training records": len(train),
        "training data": _digest(train),
        _CONTRACT: contract.hash,
    }


def _digest(dataset: TokenizedDataset) -> str:
    """sha256 of all token ids and labels, in order."""
    digest = hashlib.sha256()
    for sequence in dataset.sequences:
        ids = torch.as_tensor(sequence, dtype=torch.int32)
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.numpy().tobytes())
    if dataset.labels is not None:
        digest.update(dataset.labels.numpy().tobytes())
    return digest.hexdigest()


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every setting that differs between two nested mappings."""
    old, new = _flatten(before), _flatten(now)
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
