"""Build the data, the model and the learner of a run from its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.nemo.archive import read_model_config
from nemo_aligner.checkpoint.nemo.reward_model import (
    PretrainedModel,
    check_initial_head,
    init_head_from,
    load_pretrained,
    read_text_rules,
)
from nemo_aligner.checkpoint.run import RunCheckpoints
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.config.serving import CriticModelConfig, ServeCriticConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import (
    build_contract,
    continue_contract,
    with_aggregate,
)
from nemo_aligner.contract.readout import LOG_ODDS, PROBABILITY
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.data.training_data import TrainingData, TrainLoader, build_training_data
from nemo_aligner.distributed.collectives import current_device, gpu_computes_bf16, on_main
from nemo_aligner.distributed.layout import LayoutSizes, ParallelLayout
from nemo_aligner.losses import build_objective, settings_of_run
from nemo_aligner.models.activation_offload import offload_activations
from nemo_aligner.models.lora import LoraDropout, train_adapters_alone
from nemo_aligner.models.reward_model import (
    GPTRewardModel,
    check_freezing,
    freeze_lower_layers,
    make_batch_invariant,
    set_routers,
    wrap_for_training,
)
from nemo_aligner.models.shape import (
    LoraShape,
    ModelShape,
    check_lora,
    head_to_train,
    read_head_shape,
    read_lora,
    with_head_shape,
    with_lora,
)
from nemo_aligner.training.cost import Packs, Plan, step_flops
from nemo_aligner.training.learner import KeepHeldout, RewardLearner
from nemo_aligner.training.loggers import known_peak
from nemo_aligner.training.optimizer import Optimizer, build_optimizer
from nemo_aligner.utils.console import say, show_bytes
from nemo_aligner.utils.errors import ConfigError


def with_defaults(config: TrainConfig) -> TrainConfig:
    """Resolve the settings whose null depends on the model or on the machine.

    Everything that a run writes down (config.yaml, checkpoints, its report) then has the values
    that it ran with. Every rank calls it.

    Raises:
        CheckpointError: the base checkpoint has no config that can be read.
        ConfigError: see ``ModelConfig.with_learning_rate``.
    """
    if config.trainer.precision is None:
        precision = _default_precision(config)
        config = replace(config, trainer=replace(config.trainer, precision=precision))
    if config.model.optim.lr is None:
        stored = read_model_config(Path(str(config.pretrained_checkpoint.restore_from_path)))
        width = ModelShape.from_config(stored).hidden_size
        config = replace(config, model=config.model.with_learning_rate(width))
    return config


def _default_precision(config: TrainConfig) -> Precision:
    """The precision of a run whose settings name none.

    The device decides only where training starts from a base model: a run that is resumed on
    another machine, and a reward model that is trained further, would otherwise get another scoring
    contract.
    """
    contract = _resumed_contract(config)
    if contract is None:
        _, contract = read_text_rules(str(config.pretrained_checkpoint.restore_from_path))
    if contract is not None:
        return Precision(contract.dtype)
    # Rank 0 decides, as the nodes of a cluster may have different GPUs.
    return Precision.bf16 if on_main(gpu_computes_bf16) else Precision.fp32


def build_data(config: TrainConfig) -> TrainingData:
    """The run's data, tokenized by the contract that settings and base checkpoint make; every rank.

    Raises:
        ConfigError, DataError: see ``build_contract``, ``continue_contract``,
            ``ModelShape.rotation_by_length`` and ``build_training_data``.
    """
    start_from = config.pretrained_checkpoint
    prefix = config.model.data.data_prefix
    say(f"reading and tokenizing {', '.join(prefix.all_files)} ...")
    tokenizer, start = read_text_rules(str(start_from.restore_from_path))
    before, model = _resumed_contract(config), config.model
    if before is not None:
        model = replace(model, objective_kwargs=settings_of_run(model, before))
    # Only a built-in template may have had an earlier text.
    earlier_contract = before if model.data.template in BUILT_IN_TEMPLATES else None
    contract = build_contract(model, tokenizer, config.precision, start, earlier_contract)
    # Before the contract is compared with that of the model to start from.
    objective = build_objective(model, contract.attributes, contract.attribute_weights)
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
    shape = ModelShape.from_config(read_model_config(Path(str(start_from.restore_from_path))))
    shape.rotation_by_length(contract.seq_length)  # raises if it has none
    data = build_training_data(
        model,
        contract,
        tokenizer,
        measure_label_means=means_are_new,
        rotation_by_length=shape.rotation_by_length if shape.one_rotation_until else None,
    )
    if start_from.load_rm_head_weights is not None:
        source, names = start_from.load_rm_head_weights, start_from.rm_head_names
        check_initial_head(source, data.contract, names)
    if start is not None and not start_from.new_head:
        _say_new_scale(start, data.contract)
    return data.with_validation_limited(config.trainer.rm.limit_val_records, config.model.seed)


def _say_new_scale(start: ScoringContract, contract: ScoringContract) -> None:
    """Tell of rewards on another scale than those of the model to start from."""
    if (start.reward_scale, contract.reward_scale) == (LOG_ODDS, PROBABILITY):
        say(
            "note: the reward model to start from answers log-odds, and this one will answer "
            "probabilities; model.objective_kwargs.scale=log_odds keeps log-odds"
        )


def _resumed_contract(config: TrainConfig) -> ScoringContract | None:
    """The scoring contract of the newest checkpoint in the run's folder; None for a new run."""
    folder = Path(config.exp_manager.explicit_log_dir) / CHECKPOINTS_NAME
    latest = RunCheckpoints(folder, save_top_k=0).latest()
    return None if latest is None else ScoringContract.from_dict(latest.state.contract)


def build_learner(
    config: TrainConfig,
    data: TrainingData,
    layout: ParallelLayout,
    keep_heldout: KeepHeldout | None = None,
) -> tuple[RewardLearner, PretrainedModel, int]:
    """Model and optimizer, ready to train on ``data``; and how many steps the data is good for."""
    options, loop = config.model, config.trainer.rm
    shape = ModelShape.from_config(trained_model_config(config))
    query_key_cost = shape.query_key_cost()
    # Before the weights, which take minutes to load: batches and schedule may not fit the data.
    loader = build_loader(config, data, layout.dp, layout.dp_rank, query_key_cost)
    total_steps = loader.total_steps(loop.max_epochs, loop.max_steps)
    options.optim.sched.last_decay_step(total_steps)  # raises where no step is left to decay in
    pretrained = _load(config, data, layout)
    if options.lora.rank > 0:
        train_adapters_alone(pretrained.model)
    trained, coeff = options.train_router, options.moe_aux_loss_coeff
    set_routers(pretrained.model, trained=trained, aux_loss_coeff=coeff)
    model, optimizer = build_optimized(
        pretrained.model, shape, options, loop.gradient_clip_val, total_steps
    )
    learner = RewardLearner(
        model,
        optimizer,
        data,
        loader,
        layout,
        options.micro_batch_tokens,
        query_key_cost,
        _flops_counter(config, shape),
        keep_heldout,
        num_layers=shape.num_layers if shape.experts else None,
    )
    return learner, pretrained, total_steps


def build_optimized(
    model: GPTRewardModel,
    shape: ModelShape,
    options: ModelConfig | CriticModelConfig,
    clip_grad: float,
    total_steps: int,
) -> tuple[Any, Optimizer]:
    """Wrap a model in Megatron's data parallelism, without its frozen layers; and its optimizer.

    Raises:
        ConfigError: no layer is left to train, or see ``build_optimizer``.
    """
    make_batch_invariant(model, options.invariant_rows)
    if isinstance(options, ModelConfig) and options.activations_offload:
        offload_activations(model)
    if options.cuda_graphs:
        model.use_cuda_graphs()
    # What is frozen has to be so before it is wrapped: Megatron gives every parameter that requires
    # a gradient a place in its buffers, and the optimizer takes its parameters from there.
    freeze_lower_layers(model, options.freeze_layers, shape.num_layers)
    wrapped = wrap_for_training(model)
    return wrapped, build_optimizer(wrapped, options.optim, clip_grad, total_steps)


def check_model(config: TrainConfig, shape: ModelShape, layout: LayoutSizes) -> None:
    """Reject settings that a model of this shape cannot be trained with; needs no weights.

    Raises:
        ConfigError: the layout does not split the model evenly, no layer is left to train, or see
            ``check_experts``.
    """
    check_experts(config, shape)
    shape.check_fits(layout.tp, layout.pp, layout.ep)
    check_freezing(config.model.freeze_layers, shape.num_layers)


def check_experts(config: TrainConfig | ServeCriticConfig, shape: ModelShape) -> None:
    """Refuse settings that do not go with a mixture of experts, or without one.

    Raises:
        ConfigError: fp16 for experts, which is untested; or settings of experts for a model that
            has none.
    """
    if shape.experts is None and getattr(config.model, "train_router", False):
        raise ConfigError("model.train_router: got true, wanted false: the model has no experts")
    if shape.experts is not None and config.trainer.precision is Precision.fp16:
        raise ConfigError(
            "trainer.precision: got fp16, wanted bf16 or fp32: training a mixture-of-experts model "
            "in fp16 is untested"
        )


def _load(config: TrainConfig, data: TrainingData, layout: ParallelLayout) -> PretrainedModel:
    """The model to train, its head as the objective and the settings want it at first."""
    options = config.model
    path = Path(str(config.pretrained_checkpoint.restore_from_path))
    size = f" ({show_bytes(path.stat().st_size)})" if path.is_file() else ""
    say(f"loading {path}{size} ...")
    pretrained = load_pretrained(
        path,
        layout,
        num_attributes=len(data.contract.attributes),
        outputs_per_attribute=data.contract.outputs_per_attribute,
        precision=config.precision,
        recompute=options.activations_checkpoint_granularity,
        recompute_layers=options.activations_checkpoint_num_layers,
        seed=options.seed,
        new_head=config.pretrained_checkpoint.new_head,
        lora=LoraShape.from_settings(options.lora),
        head=options.head,
        reply_marker=data.contract.reply_marker,
        lora_dropout=LoraDropout.from_settings(options.lora, options.seed),
        pointwise_kernels=options.pointwise_kernels,
    )
    _begin_head(config, data, pretrained)
    if pretrained.model.post_process:
        # Only after loading: archives have the head's weights, but no scalars of an objective.
        pretrained.model.rm_head.add_learned_scalars(data.objective.start_of_learned)
    return pretrained


def trained_model_config(config: TrainConfig) -> dict[str, Any]:
    """The model config of what is trained, of which no weight is read.

    Raises:
        ConfigError: the archive's LoRA is another one than the settings'.
        CheckpointError: the archive has no config that can be read.
    """
    path = Path(str(config.pretrained_checkpoint.restore_from_path))
    stored, wanted = read_model_config(path), LoraShape.from_settings(config.model.lora)
    check_lora(read_lora(stored), wanted, path)
    is_new = config.pretrained_checkpoint.new_head
    head = head_to_train(read_head_shape(stored), config.model.head, is_new=is_new)
    return with_lora(with_head_shape(stored, head), wanted)


def _flops_counter(config: TrainConfig, shape: ModelShape) -> Callable[[Packs], float] | None:
    """Counter of FLOPs, over all ranks; None where the device's peak is not known."""
    if known_peak(current_device(), config.precision) is None:
        return None
    frozen = config.model.freeze_layers
    return lambda packs: step_flops(shape, Plan(packs=packs, freeze_layers=frozen))


def _begin_head(config: TrainConfig, data: TrainingData, pretrained: PretrainedModel) -> None:
    """Give a new head the outputs of another reward model, where the settings ask for it."""
    start_from = config.pretrained_checkpoint
    source = start_from.load_rm_head_weights
    if source is None:
        return
    if not pretrained.head_is_new:
        raise ConfigError(
            f"pretrained_checkpoint.load_rm_head_weights: got {source}, and a reward model to "
            "start from, which has its own head; wanted pretrained_checkpoint.new_head=true, too"
        )
    shape = ModelShape.from_config(pretrained.config)
    names = start_from.rm_head_names
    init_head_from(pretrained.model, source, data.contract, shape, names)


def build_loader(
    config: TrainConfig, data: TrainingData, dp: int, dp_rank: int, query_key_cost: float
) -> TrainLoader:
    """The steps of one of ``dp`` data parallel ranks.

    Raises:
        ConfigError: a batch has no record for each of them.
    """
    options = config.model
    return TrainLoader(
        data.train,
        options.global_batch_size,
        options.micro_batch_tokens,
        options.seed,
        dp_rank,
        dp,
        query_key_cost,
        options.data.data_prefix.train_weights,
    )
