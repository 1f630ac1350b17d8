"""REINFORCE with a leave-one-out baseline (RLOO), against a running reward server.

    nemo-aligner serve rm_model_file=results/quickstart/run/checkpoints/megatron_gpt.nemo &
    python examples/rl/rloo.py

The advantage of a reply is its reward minus the mean reward of the other replies to its prompt
(Ahmadian et al. 2024, arXiv 2402.14740). A penalty for divergence from the reference is subtracted
from each reward.
"""

from __future__ import annotations

import argparse
import random

import torch
from policy import Policy, Replies, compare_heldout, connect_reward, judge, new_parser, read_prompts
from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """Advantages ``[prompts, K]``: each reward minus the mean of the prompt's other rewards.

    A NaN reward has advantage 0 and is left out of the mean. If a prompt has only one reward, its
    advantage is 0, too.
    """
    is_valid = ~rewards.isnan()
    total, count = rewards.nansum(1, keepdim=True), is_valid.sum(1, keepdim=True)
    baseline = (total - rewards) / (count - 1)
    return torch.where(is_valid & (count > 1), rewards - baseline, 0.0)


def step(
    policy: Policy, optimizer: torch.optim.Optimizer, replies: Replies, rewards: Tensor, kl: float
) -> None:
    """Update the policy once, on K replies to each prompt.

    Args:
        replies: ``prompts * K`` replies; the K replies to a prompt follow each other.
        rewards: their rewards, ``[prompts, K]``.
        kl: factor of the penalty for divergence from the reference.
    """
    log_probs = policy.log_probs(replies)
    with torch.no_grad():
        reference = policy.log_probs(replies, policy.reference)
        drift = ((log_probs - reference) * replies.mask).sum(1).reshape(rewards.shape)
    advantage = advantages(rewards - kl * drift).reshape(-1)
    loss = -(advantage[:, None] * log_probs * replies.mask).sum() / len(advantage)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.trained, 1.0)
    optimizer.step()


def main(options: argparse.Namespace) -> None:
    """Train, and print the held-out evaluation before and after."""
    torch.manual_seed(options.seed)
    reward = connect_reward(options)
    policy = Policy(options.policy, options.frozen_layers, options.tokens)
    optimizer = torch.optim.AdamW(policy.trained, lr=options.lr, weight_decay=0.0)
    prompts, rng = read_prompts(options.train), random.Random(options.seed)
    with compare_heldout(policy, reward, options):
        for number in range(1, options.steps + 1):
            sampled = rng.sample(prompts, options.prompts)
            replies = policy.reply([prompt for prompt in sampled for _ in range(options.replies)])
            rewards = judge(reward, replies).reshape(options.prompts, options.replies)
            step(policy, optimizer, replies, rewards, options.kl)
            tokens = replies.mask.sum(1).mean().item()
            print(f"step {number}: reward {rewards.nanmean():.2f}, {tokens:.1f} tokens", flush=True)


if __name__ == "__main__":
    main(new_parser(__doc__).parse_args())
