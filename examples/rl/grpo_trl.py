"""GRPO with TRL's trainer, against a running reward server.

    nemo-aligner serve rm_model_file=results/quickstart/run/checkpoints/megatron_gpt.nemo &
    python examples/rl/grpo_trl.py

TRL's default has no KL penalty (beta=0), so ``--kl`` has no effect here. The KL divergence from the
policy before training is still printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from policy import Policy, compare_heldout, connect_reward, new_parser, read_prompts

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as missing:
    sys.exit(f"{missing}: pip install -e '.[hub]' trl==1.16.0")


def main(options: argparse.Namespace) -> None:
    """Train, and print the held-out evaluation before and after."""
    torch.manual_seed(options.seed)
    reward = connect_reward(options)
    policy = Policy(options.policy, options.frozen_layers, options.tokens)
    conversations = [
        [{"role": "user", "content": prompt}] for prompt in read_prompts(options.train)
    ]
    with compare_heldout(policy, reward, options), tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            processing_class=policy.tokenizer,
            train_dataset=Dataset.from_dict({"prompt": conversations}),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.prompts * options.replies,
                num_generations=options.replies,
                max_completion_length=options.tokens,
                learning_rate=options.lr,
                lr_scheduler_type="constant",
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                seed=options.seed,
                bf16=torch.cuda.is_available(),
            ),
        )
        trainer.train()


if __name__ == "__main__":
    main(new_parser(__doc__).parse_args())
