"""Train a reward model: from a base ``.nemo`` and preference data to ``megatron_gpt.nemo``.

    python examples/train_reward_model.py pretrained_checkpoint.restore_from_path=base.nemo \\
        'model.data.data_prefix.train=[pairs.jsonl]' exp_manager.explicit_log_dir=results/first

On several ranks: ``torchrun --nproc-per-node 2 examples/train_reward_model.py
model.tensor_model_parallel_size=2 ...``. The same command again goes on where a run stopped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_aligner.checkpoint.reward_model import PretrainedModel
    from nemo_aligner.config.schema import TrainConfig
    from nemo_aligner.parallel.layout import ParallelLayout
    from nemo_aligner.training.learner import RewardLearner


def main() -> int:
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.schema import TrainConfig
    from nemo_aligner.errors import AlignerError

    try:
        train(load_config(TrainConfig, sys.argv[1:]))
    except AlignerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def train(config: TrainConfig) -> None:
    """Build the parts in the order in which data flows through them, and let the trainer run."""
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.training import run
    from nemo_aligner.training.clock import StopRequest
    from nemo_aligner.training.loggers import build_loggers
    from nemo_aligner.training.trainer import SupervisedTrainer

    stop = StopRequest(config.trainer.max_time)
    run.check_settings(config)
    with launch() as world:
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
            config.model.seed,
        )
        learner, pretrained, total_steps = build_learner(config, layout)
        checkpoints = run.open_checkpoints(config.exp_manager, learner)
        run.describe(config, pretrained, layout, total_steps, checkpoints)
        start = run.resume(checkpoints, config, pretrained.config, learner)
        loggers = build_loggers(config.exp_manager, start.config, start.step)
        trainer = SupervisedTrainer(
            learner, config, total_steps, start, checkpoints, loggers, stop, world.device
        )
        outcome = trainer.fit()
        loggers.close()
        run.finish(outcome, checkpoints, learner, pretrained)


def build_learner(
    config: TrainConfig, layout: ParallelLayout
) -> tuple[RewardLearner, PretrainedModel, int]:
    """Data, model and optimizer; and how many steps the data is good for."""
    from nemo_aligner.checkpoint.reward_model import load_pretrained, read_text_rules
    from nemo_aligner.data.contract import build_contract, continue_contract
    from nemo_aligner.data.loader import TrainLoader
    from nemo_aligner.data.training_data import build_training_data
    from nemo_aligner.models.reward_model import freeze_lower_layers, wrap_for_training
    from nemo_aligner.parallel.collectives import say
    from nemo_aligner.training.learner import RewardLearner
    from nemo_aligner.training.objective import build_objective
    from nemo_aligner.training.optimizer import build_optimizer

    base = str(config.pretrained_checkpoint.restore_from_path)
    options, loop = config.model, config.trainer.rm
    tokenizer, start = read_text_rules(base)
    contract = build_contract(options, tokenizer, config.trainer.precision, start)
    if start is not None:
        allow_change = config.pretrained_checkpoint.allow_contract_change
        contract = continue_contract(contract, start, allow_change)
    has_means = start is not None and start.attributes == contract.attributes
    data = build_training_data(options, contract, tokenizer, measure_label_means=not has_means)
    say(data.table())
    loader = TrainLoader(
        data.train,
        options.global_batch_size,
        options.micro_batch_tokens,
        options.seed,
        layout.dp_rank,
        layout.dp,
    )
    total_steps = loader.total_steps(loop.max_epochs, loop.max_steps)
    pretrained = load_pretrained(
        base,
        layout,
        num_attributes=options.num_attributes,
        precision=config.trainer.precision,
        recompute=options.activations_checkpoint_granularity,
        seed=options.seed,
    )
    freeze_lower_layers(pretrained.model, options.freeze_layers, pretrained.config["num_layers"])
    model = wrap_for_training(pretrained.model)
    optimizer = build_optimizer(model, options.optim, loop.gradient_clip_val, total_steps)
    learner = RewardLearner(
        model,
        optimizer,
        build_objective(data.contract),
        data,
        loader,
        layout,
        options.micro_batch_tokens,
    )
    return learner, pretrained, total_steps


if __name__ == "__main__":
    sys.exit(main())
