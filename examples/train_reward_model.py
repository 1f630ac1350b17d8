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
    from nemo_aligner.config.schema import TrainConfig


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
    from nemo_aligner.parallel.collectives import say
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.training import run
    from nemo_aligner.training.build import build_data, build_learner
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
        data = build_data(config)
        say(data.table())
        learner, pretrained, total_steps = build_learner(config, data, layout)
        checkpoints = run.open_checkpoints(config.exp_manager, learner)
        run.describe(config, pretrained, layout, total_steps, checkpoints, learner)
        start = run.resume(checkpoints, config, pretrained.config, learner)
        loggers = build_loggers(config.exp_manager, start.config, start.step)
        trainer = SupervisedTrainer(
            learner, config, total_steps, start, checkpoints, loggers, stop, world.device
        )
        outcome = trainer.fit()
        loggers.close()
        run.finish(outcome, checkpoints, learner, pretrained)


if __name__ == "__main__":
    sys.exit(main())
