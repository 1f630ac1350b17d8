"""From settings to what is trained on, and what is trained."""

from __future__ import annotations

from nemo_aligner.checkpoint.nemo.reward_model import (
    PretrainedModel,
    load_pretrained,
    read_text_rules,
)
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.loader import TrainLoader
from nemo_aligner.data.training_data import TrainingData, build_training_data
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.models.trainable import freeze_lower_layers, wrap_for_training
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.text.contract import build_contract, continue_contract
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.optimizer.build import build_optimizer


def build_data(config: TrainConfig) -> TrainingData:
    """The run's data, tokenized by the contract that settings and base checkpoint make; every rank.

    Raises:
        ConfigError, DataError: see ``build_contract``, ``continue_contract``, ``build_dataset``.
    """
    start_from = config.pretrained_checkpoint
    tokenizer, start = read_text_rules(str(start_from.restore_from_path))
    contract = build_contract(config.model, tokenizer, config.trainer.precision, start)
    if start is not None:
        contract = continue_contract(contract, start, start_from.allow_contract_change)
    has_means = start is not None and start.attributes == contract.attributes
    return build_training_data(config.model, contract, tokenizer, measure_label_means=not has_means)


def build_learner(
    config: TrainConfig, data: TrainingData, layout: ParallelLayout
) -> tuple[RewardLearner, PretrainedModel, int]:
    """Model and optimizer, ready to train on ``data``; and how many steps the data is good for."""
    options, loop = config.model, config.trainer.rm
    pretrained = load_pretrained(
        str(config.pretrained_checkpoint.restore_from_path),
        layout,
        num_attributes=options.num_attributes,
        precision=config.trainer.precision,
        recompute=options.activations_checkpoint_granularity,
        recompute_layers=options.activations_checkpoint_num_layers,
        seed=options.seed,
    )
    query_key_cost = ModelShape.from_config(pretrained.config).query_key_cost()
    loader = TrainLoader(
        data.train,
        options.global_batch_size,
        options.micro_batch_tokens,
        options.seed,
        layout.dp_rank,
        layout.dp,
        query_key_cost,
    )
    total_steps = loader.total_steps(loop.max_epochs, loop.max_steps)
    freeze_lower_layers(pretrained.model, options.freeze_layers, pretrained.config["num_layers"])
    model = wrap_for_training(pretrained.model)
    optimizer = build_optimizer(model, options.optim, loop.gradient_clip_val, total_steps)
    learner = RewardLearner(
        model,
        optimizer,
        data,
        loader,
        layout,
        options.micro_batch_tokens,
        query_key_cost,
    )
    return learner, pretrained, total_steps
