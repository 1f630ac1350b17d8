"""Prepare a training run up to the point where weights are needed; a dry run stops there.

``prepare_run`` reads the base checkpoint, resolves and checks the settings, and tokenizes the data.
``open_run_folder`` opens the run's folder, and checks that the newest checkpoint in it belongs to
this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nemo_aligner.checkpoint.nemo.archive import check_exists
from nemo_aligner.checkpoint.nemo.initial_head import check_initial_head
from nemo_aligner.checkpoint.nemo.reward_model import CheckpointDescription
from nemo_aligner.checkpoint.run import RunCheckpoints
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME
from nemo_aligner.checkpoint.run_lock import RunLock
from nemo_aligner.checkpoint.run_state import Saved
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import DataPrefixConfig
from nemo_aligner.config.training import (
    CheckpointCallbackConfig,
    ExpManagerConfig,
    MonitorMode,
    PretrainedCheckpointConfig,
    TrainConfig,
)
from nemo_aligner.contract.added_tokens import describe_removed_tokens
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import (
    build_contract,
    choose_limits,
    continue_contract,
    with_aggregate,
)
from nemo_aligner.contract.readout import LOG_ODDS, PROBABILITY
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.data.hub import local_files
from nemo_aligner.data.training_data import TrainingData, TrainLoader, build_training_data
from nemo_aligner.distributed.collectives import gpu_computes_bf16, on_main, once_per_node
from nemo_aligner.distributed.layout import LayoutSizes, ParallelLayout
from nemo_aligner.losses import build_objective, settings_of_run
from nemo_aligner.metrics.table import Better, better_values
from nemo_aligner.models.backbone import check_recompute
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import head_to_train
from nemo_aligner.models.shapes.lora import LoraShape, check_dropout, check_lora
from nemo_aligner.models.shapes.quantized import check_quantizable
from nemo_aligner.models.training_wrap import check_freezing
from nemo_aligner.training.early_stopping import EarlyStopping
from nemo_aligner.training.learner import validation_metric_names
from nemo_aligner.training.loggers import check_loggers
from nemo_aligner.training.resume import (
    RunFolder,
    check_may_resume,
    check_objective_exists,
    check_resumable,
    new_state,
)
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError, DataError
from nemo_aligner.utils.missing import describe_missing


@dataclass(frozen=True)
class PreparedRun:
    """A run whose settings and data are ready, but whose weights are not read yet.

    Training and the dry run both start from it.

    Attributes:
        config: the settings, in which each null that depends on the model or the machine is
            replaced by a value. The run writes these values to config.yaml, checkpoints and report.
        layout: a ``ParallelLayout`` in a training run; in a dry run only the sizes of the groups.
        base: the checkpoint that training starts from.
        shape: shape of the model to train, with the head and the LoRA adapters of the settings.
        data: the data, tokenized by the run's scoring contract.
        latest: the newest checkpoint in the run's folder. It may belong to another run, which
            ``open_run_folder`` checks.
    """

    config: TrainConfig
    layout: LayoutSizes
    base: CheckpointDescription
    shape: ModelShape
    data: TrainingData
    latest: Saved | None

    @cached_property
    def loader(self) -> TrainLoader:
        """Loader of this data parallel rank's batches; in a dry run, of the first rank's.

        Raises:
            ConfigError: a batch has fewer records than there are data parallel ranks.
        """
        options, layout = self.config.model, self.layout
        return TrainLoader(
            self.data.train,
            options.global_batch_size,
            options.micro_batch_tokens,
            options.seed,
            layout.dp_rank if isinstance(layout, ParallelLayout) else 0,
            layout.dp,
            self.shape.query_key_cost(),
            options.data.data_prefix.train_weights,
        )

    @cached_property
    def total_steps(self) -> int:
        """Number of steps of the whole run.

        Raises:
            ConfigError: the data is too small for one step, or the learning rate schedule has no
                step left to decay in.
        """
        loop = self.config.trainer.rm
        steps = self.loader.total_steps(loop.max_epochs, loop.max_steps)
        # If no step is left to train, the learning rate does not matter. This is so if a stopped
        # run is finished at its newest checkpoint, by setting max_steps to that step.
        if self.latest is None or self.latest.state.step < steps:
            self.config.model.optim.sched.check_decay(steps)
        return steps


def prepare_run(config: TrainConfig, layout: LayoutSizes) -> PreparedRun:
    """Read the base checkpoint, resolve and check the settings, and tokenize the data.

    Every rank calls it; a dry run calls it without a process group. All checks that do not need the
    data come before tokenization, which may take minutes.

    Raises:
        AlignerError: settings, data, base checkpoint or layout are invalid, or the run's folder
            holds a checkpoint that must not be resumed.
    """
    latest = RunCheckpoints(_checkpoints_folder(config.exp_manager), save_top_k=0).latest()
    check_may_resume(latest, config.exp_manager)
    if latest is not None:
        check_objective_exists(latest)
    files = _find_local_files(config.model.data.data_prefix)
    base = CheckpointDescription.read(str(config.pretrained_checkpoint.restore_from_path))
    resumed = None if latest is None else ScoringContract.from_dict(latest.state.contract)
    shape = _trained_shape(config, base)
    config = _with_limits(config, base.contract)
    config = _resolve_defaults(config, shape, resumed or base.contract)
    _check_model(config, layout, base, shape)
    base.tokenizer.check_fits(shape.vocab_size)
    if base.removed_tokens:
        say(describe_removed_tokens(base.removed_tokens, shape.vocab_size))
    # ``config`` keeps the names of the hub: they are what the run saves, to be repeated elsewhere.
    data = _build_data(_with_files(config, files), base, shape, resumed)
    return PreparedRun(config, layout, base, shape, data, latest)


def open_run_folder(run: PreparedRun, lock: RunLock | None = None) -> RunFolder:
    """Open the folder that a run writes to, and check that its checkpoint belongs to this run.

    Every rank calls it. ``lock`` is the lock of the folder; a dry run has none.

    Raises:
        ConfigError: no validation set has the metric that ranks checkpoints, or early stopping is
            on without validation data.
        CheckpointError: the newest checkpoint belongs to another run.
    """
    settings, latest = run.config.exp_manager, run.latest
    checkpoints = open_checkpoints(settings, run.data, lock)
    early_stopping = _build_early_stopping(settings, run.data)
    fresh = new_state(run.config, run.shape, run.data)
    latest = None if latest is None else check_resumable(latest, fresh, run.data)
    return RunFolder(checkpoints, early_stopping, fresh, latest)


# The code below checks and completes the settings.


def check_settings(config: TrainConfig) -> None:
    """Check what can be checked before any file is read and anything is built.

    Raises:
        ConfigError: no base checkpoint is set, or the package of a logger is not installed.
        CheckpointError: the base checkpoint does not exist.
    """
    base = config.pretrained_checkpoint.restore_from_path
    if base is None:
        raise ConfigError(
            "pretrained_checkpoint.restore_from_path: it is not set. Set it to a .nemo file, a "
            "Hugging Face folder, or the name of a model on the hub"
        )
    check_exists(base)
    check_loggers(config.exp_manager)


def _find_local_files(prefix: DataPrefixConfig) -> DataPrefixConfig:
    """Replace data sets of the hub with files, which the first rank of each node downloads."""
    parts = {"train": prefix.train, "validation": prefix.validation, "test": prefix.test}
    train, validation, test = once_per_node(lambda: [_find_files(*part) for part in parts.items()])
    return replace(prefix, train=train, validation=validation, test=test)


def _with_files(config: TrainConfig, files: DataPrefixConfig) -> TrainConfig:
    data = replace(config.model.data, data_prefix=files)
    return replace(config, model=replace(config.model, data=data))


def _find_files(part: str, paths: Sequence[str]) -> list[str]:
    """Return the files of one part of the data, ``train`` for example; see ``local_files``.

    Raises:
        DataError: one of them is missing, or is a folder; the message names the setting.
    """
    files = local_files(paths)
    for problem in filter(None, map(describe_missing, files)):
        raise DataError(f"model.data.data_prefix.{part}: {problem}")
    return files


def _trained_shape(config: TrainConfig, base: CheckpointDescription) -> ModelShape:
    """Return the shape of the model to train: that of its base, with the settings' head and LoRA.

    Raises:
        CheckpointError: the base has LoRA adapters, but the settings want different ones.
        ConfigError: ``model.lora.base_precision`` does not support this model.
    """
    lora = LoraShape.from_settings(config.model.lora)
    check_lora(base.shape.lora, lora, base.path)
    is_new = config.pretrained_checkpoint.new_head
    head = head_to_train(base.shape.head, config.model.head, is_new=is_new)
    shape = replace(base.shape, head=head, lora=lora)
    check_quantizable(shape, config.model.tensor_model_parallel_size)
    return shape


def _with_limits(config: TrainConfig, start: ScoringContract | None) -> TrainConfig:
    """Replace a null ``seq_length`` or ``overlong`` with the value in the contract ``start``.

    ``start`` is the contract of the reward model that training starts from. A run from a base model
    (``start`` is None) gets the defaults.
    """
    limits = choose_limits(config.model.data, start)._asdict()
    return replace(config, model=replace(config.model, data=replace(config.model.data, **limits)))


def _resolve_defaults(
    config: TrainConfig, shape: ModelShape, contract: ScoringContract | None
) -> TrainConfig:
    """Replace a null precision or learning rate with a value for this model and machine.

    A new run from a base model gets a precision that suits the machine. A resumed run, and a run
    that starts from a reward model, keep the precision of their ``contract``, because the precision
    is part of the scoring contract.

    Raises:
        ConfigError: ``model.optim.sched.min_lr`` is above the default learning rate.
    """
    if config.trainer.precision is None:
        if contract is not None:
            precision = Precision(contract.dtype)
        else:  # rank 0 decides, because the nodes of a cluster may have different GPUs
            precision = Precision.bf16 if on_main(gpu_computes_bf16) else Precision.fp32
        config = replace(config, trainer=replace(config.trainer, precision=precision))
    if config.model.optim.lr is None:
        model = config.model.with_learning_rate(shape.hidden_size)
        config = replace(config, model=model)
    return config


def _check_model(
    config: TrainConfig, layout: LayoutSizes, base: CheckpointDescription, shape: ModelShape
) -> None:
    """Check that the model, of ``shape``, supports the layout and the settings.

    Raises:
        ConfigError: it does not support one of them.
    """
    options, start_from = config.model, config.pretrained_checkpoint
    check_experts(shape, config.precision, options.train_router)
    # If LoRA is off, the base's adapters are still loaded, and then folded into its weights.
    loaded_shape = replace(shape, lora=shape.lora or base.shape.lora)
    loaded_shape.check_fits(layout.tp, layout.pp, layout.ep, layout.cp)
    check_recompute(
        shape,
        layout.pp,
        options.activations_checkpoint_granularity,
        options.activations_checkpoint_num_layers,
    )
    check_dropout(shape, options.lora.dropout)
    check_freezing(options.freeze_layers, shape.num_layers)
    check_new_head(start_from, is_new=base.contract is None or start_from.new_head)


def check_new_head(start_from: PretrainedCheckpointConfig, *, is_new: bool) -> None:
    """Check that the head ``is_new`` if another reward model is to initialize it.

    Raises:
        ConfigError: ``load_rm_head_weights`` is set, but the model already has a head.
    """
    source = start_from.load_rm_head_weights
    if source is not None and not is_new:
        raise ConfigError(
            f"pretrained_checkpoint.load_rm_head_weights: got {source}, but training starts from "
            "a reward model, which already has a head. To replace it with a new head, also set "
            "pretrained_checkpoint.new_head=true"
        )


def check_experts(shape: ModelShape, precision: Precision, train_router: bool = False) -> None:
    """Check the settings that depend on whether the model is a mixture-of-experts (MoE) model.

    Raises:
        ConfigError: the model has experts and the precision is fp16, which is untested; or
            ``model.train_router`` is set, but the model has no experts.
    """
    if shape.experts is None and train_router:
        raise ConfigError(
            "model.train_router: got true, but the model has no experts. Set it to false"
        )
    if shape.experts is not None and precision is Precision.fp16:
        raise ConfigError(
            "trainer.precision: got fp16, but training a mixture-of-experts model in fp16 is "
            "untested. Set it to bf16 or fp32"
        )


# The code below tokenizes the data by the run's scoring contract.


def _build_data(
    config: TrainConfig,
    base: CheckpointDescription,
    shape: ModelShape,
    resumed: ScoringContract | None,
) -> TrainingData:
    """Build the run's scoring contract, and tokenize the data by it; every rank calls it.

    ``resumed`` is the contract in the checkpoint from which the run resumes; None for a new run.

    Raises:
        ConfigError: the settings do not fit the model, its tokenizer or its scoring contract.
        DataError: the data cannot be read, or does not fit the settings.
    """
    start_from = config.pretrained_checkpoint
    prefix = config.model.data.data_prefix
    say(f"reading and tokenizing {', '.join(prefix.all_files)} ...")
    model, start = config.model, base.contract
    if resumed is not None:
        model = replace(model, objective_kwargs=settings_of_run(model, resumed))
    # The resumed contract is passed only for a built-in template, because only built-in templates
    # can have changed between two versions of this package.
    previous_contract = resumed if model.data.template in BUILT_IN_TEMPLATES else None
    contract = build_contract(model, base.tokenizer, config.precision, start, previous_contract)
    # Build the objective first: it may set the contract's ``aggregate``. Only then can the contract
    # be compared with that of the reward model that training starts from.
    objective = build_objective(
        model, contract.attributes, contract.attribute_weights, contract.has_steps
    )
    contract = with_aggregate(contract, objective.aggregate)
    if start is not None:
        contract = continue_contract(
            contract,
            start,
            allow_change=start_from.allow_contract_change,
            new_head=start_from.new_head,
            new_weights=bool(config.model.regression.attribute_weights),
        )
    means_are_new = start is None or start_from.new_head or start.attributes != contract.attributes
    shape.length_dependent_rope(contract.seq_length)  # raises if the length is not supported
    data = build_training_data(
        model,
        contract,
        base.tokenizer,
        measure_label_means=means_are_new,
        length_dependent_rope=shape.length_dependent_rope if shape.one_rotation_until else None,
    )
    if start_from.load_rm_head_weights is not None:
        source, names = start_from.load_rm_head_weights, start_from.rm_head_names
        check_initial_head(source, data.contract, names)
    scales = (start.reward_scale if start else None, data.contract.reward_scale)
    if scales == (LOG_ODDS, PROBABILITY) and not start_from.new_head:
        say(
            "note: training starts from a reward model that predicts log-odds, but the new model "
            "will predict probabilities. Set model.objective_kwargs.scale=log_odds to keep log-odds"
        )
    return data.with_validation_limited(config.trainer.rm.limit_val_records, config.model.seed)


# The code below opens the folder of the run.


def _checkpoints_folder(config: ExpManagerConfig) -> Path:
    """Return the folder of checkpoints inside the run's folder."""
    return Path(config.explicit_log_dir) / CHECKPOINTS_NAME


def open_checkpoints(
    config: ExpManagerConfig, data: TrainingData, lock: RunLock | None = None
) -> RunCheckpoints:
    """Open the run's checkpoints, which are ranked by the metric of the setting ``monitor``.

    If ``monitor`` is null, this is the main metric of the first validation set. If ``mode`` is
    null, the metric determines it: for losses, ties and calibration errors, smaller is better.

    Raises:
        ConfigError: no validation metric is called ``monitor``, or ``mode`` is the wrong direction
            for the metric.
    """
    monitor, mode = _find_monitor(config.checkpoint_callback_params, data)
    save_top_k = config.checkpoint_callback_params.save_top_k
    return RunCheckpoints(_checkpoints_folder(config), monitor, mode, save_top_k, lock)


def _build_early_stopping(config: ExpManagerConfig, data: TrainingData) -> EarlyStopping:
    """Build early stopping, which watches the same metric that ranks checkpoints.

    Raises:
        ConfigError: early stopping is on, but there is no validation data.
    """
    monitor, mode = _find_monitor(config.checkpoint_callback_params, data)
    settings = config.early_stopping_callback_params
    if settings.patience is not None and monitor is None:
        raise ConfigError(
            f"exp_manager.early_stopping_callback_params.patience: got {settings.patience}, but "
            "there is no validation data. Set model.data.data_prefix.validation, or patience=null"
        )
    return EarlyStopping(monitor, mode, settings.patience, settings.min_delta)


def _find_monitor(
    settings: CheckpointCallbackConfig, data: TrainingData
) -> tuple[str | None, MonitorMode]:
    """Return the metric that ranks checkpoints, and whether smaller or larger values are better.

    Without validation data the metric is None.
    """
    objective, datasets = data.objective, data.validation
    monitor = settings.monitor
    if monitor is None and datasets:
        monitor = f"{datasets[0].name}/{objective.main_metric}"
    elif monitor is not None:
        available = validation_metric_names(objective, datasets)
        full_name = monitor
        if monitor not in available and datasets:
            full_name = f"{datasets[0].name}/{monitor}"
        if full_name not in available:
            names = f"one of {', '.join(available)}" if available else "null"
            reason = "" if available else ", because there is no validation data"
            raise ConfigError(
                f"exp_manager.checkpoint_callback_params.monitor: got {monitor!r}, "
                f"wanted {names}{reason}"
            )
        monitor = full_name
    return monitor, _find_mode(settings.mode, monitor)


def _find_mode(mode: MonitorMode | None, monitor: str | None) -> MonitorMode:
    """Return whether smaller or larger values of the metric ``monitor`` are better.

    This is ``mode`` if it is set, otherwise the default for the metric.

    Raises:
        ConfigError: ``mode`` is the wrong direction for the metric.
    """
    better = Better.neither if monitor is None else better_values(monitor)
    natural = MonitorMode.min if better is Better.lower else MonitorMode.max
    if mode not in (None, natural) and better is not Better.neither:
        raise ConfigError(
            f"exp_manager.checkpoint_callback_params.mode: got {mode.value}, but {better.name} "
            f"values of {monitor} are better. Set it to {natural.value}, or to null"
        )
    return mode or natural
