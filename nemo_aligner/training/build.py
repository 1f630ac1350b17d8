"""Build the model, the optimizer and the learner of a prepared run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_aligner.checkpoint.nemo.initial_head import init_head_from
from nemo_aligner.checkpoint.nemo.reward_model import PretrainedModel, load_pretrained
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.config.serving import CriticModelConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.activation_offload import offload_activations
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.models.delta_choice import use_delta_kernel
from nemo_aligner.models.lora import LoraDropout, train_adapters_alone
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import LoraShape
from nemo_aligner.models.training_wrap import freeze_lower_layers, set_routers, wrap_for_training
from nemo_aligner.planning.cost import Packs, Plan, step_flops
from nemo_aligner.training.gauges import known_peak
from nemo_aligner.training.learner import KeepHeldout, RewardLearner
from nemo_aligner.training.optimizer import Optimizer, build_optimizer
from nemo_aligner.training.prepare import PreparedRun, check_new_head
from nemo_aligner.utils.console import say, show_bytes


def build_learner(
    run: PreparedRun, keep_heldout: KeepHeldout | None = None
) -> tuple[RewardLearner, PretrainedModel]:
    """Load the model and build its optimizer and learner; every rank calls it.

    Args:
        run: the prepared run. Its ``layout`` must be a ``ParallelLayout``, with process groups.
        keep_heldout: function that this rank calls with each validation set and its rewards, to
            write them; None on ranks that write none.

    Returns:
        The learner, and the loaded model with its tokenizer and its config.

    Raises:
        ConfigError: the batch size or the learning rate schedule does not fit the data.
        CheckpointError: the base checkpoint cannot be loaded.
    """
    config, shape, options, layout = run.config, run.shape, run.config.model, run.layout
    assert isinstance(layout, ParallelLayout), "a dry run has no process groups"
    # total_steps raises if the batch size or the schedule does not fit the data. Check this now,
    # because loading the weights takes minutes.
    total_steps = run.total_steps
    pretrained = _load_model(run, layout)
    if options.lora.rank > 0:
        train_adapters_alone(pretrained.model)
    trained, coefficient = options.train_router, options.moe_aux_loss_coeff
    set_routers(pretrained.model, trained=trained, aux_loss_coeff=coefficient)
    clip_grad = config.trainer.rm.gradient_clip_val
    model, optimizer = build_optimized(pretrained.model, shape, options, clip_grad, total_steps)
    learner = RewardLearner(
        model,
        optimizer,
        run.data,
        run.loader,
        layout,
        options.micro_batch_tokens,
        shape.query_key_cost(),
        _flops_counter(config, shape),
        keep_heldout,
        load_size=(shape.num_layers, shape.experts.count) if shape.experts else None,
    )
    return learner, pretrained


def build_optimized(
    model: GPTRewardModel,
    shape: ModelShape,
    options: ModelConfig | CriticModelConfig,
    clip_grad: float,
    total_steps: int,
) -> tuple[Any, Optimizer]:
    """Freeze layers, wrap the model in Megatron's data parallelism, and build its optimizer.

    Returns:
        The model in Megatron's data parallel wrapper, and the optimizer of its trained parameters.

    Raises:
        ConfigError: all layers are frozen, warm-up and constant steps leave no step for the decay,
            or the kernels of linear attention cannot be used.
    """
    make_batch_invariant(model, options.invariant_rows)
    if isinstance(options, ModelConfig) and options.activations_offload:
        offload_activations(model)
    use_delta_kernel(model, options.linear_attention_kernels, shape)
    if options.cuda_graphs:
        model.use_cuda_graphs()
    # Freeze before wrapping: Megatron's wrapper puts every parameter that requires a gradient at
    # that time into its buffers, and the optimizer updates all parameters in the buffers.
    freeze_lower_layers(model, options.freeze_layers, shape.num_layers)
    wrapped = wrap_for_training(model)
    return wrapped, build_optimizer(wrapped, options.optim, clip_grad, total_steps)


def _load_model(run: PreparedRun, layout: ParallelLayout) -> PretrainedModel:
    """Load the model of the base checkpoint, with a head that fits the objective and the settings.

    A new head starts from random weights, or from another reward model's head.
    """
    config, data, path = run.config, run.data, run.base.path
    options = config.model
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
        kernels=options.kernels,
    )
    _initialize_head(run, pretrained)
    if pretrained.model.post_process:
        # Add them after loading, because a .nemo file has the head's weights but not the scalars
        # that an objective learns.
        pretrained.model.rm_head.add_learned_scalars(data.objective.initial_scalars)
    return pretrained


def _flops_counter(config: TrainConfig, shape: ModelShape) -> Callable[[Packs], float] | None:
    """Build the function that counts a step's FLOPs over all ranks, from which MFU is computed.

    Returns:
        The function; None if the device's peak FLOP/s is unknown, because MFU is relative to it.
    """
    if known_peak(current_device(), config.precision) is None:
        return None
    frozen = config.model.freeze_layers
    return lambda packs: step_flops(shape, Plan(packs=packs, freeze_layers=frozen))


def _initialize_head(run: PreparedRun, pretrained: PretrainedModel) -> None:
    """Copy outputs of another reward model's head into the new head of this one.

    It does nothing unless ``pretrained_checkpoint.load_rm_head_weights`` names the other model.

    Raises:
        ConfigError: the model already has a head, so there is none to initialize.
    """
    start_from = run.config.pretrained_checkpoint
    # The base may have a head without a scoring contract, which ``prepare_run`` cannot see.
    check_new_head(start_from, is_new=pretrained.head_is_new)
    source, names = start_from.load_rm_head_weights, start_from.rm_head_names
    if source is not None:
        init_head_from(pretrained.model, source, run.data.contract, run.shape, names)
