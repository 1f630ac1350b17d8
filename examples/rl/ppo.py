"""PPO with the critic on a server, as in NeMo-Aligner: this program holds only the policy.

    RM=results/quickstart/run/checkpoints/megatron_gpt.nemo
    nemo-aligner serve-critic pretrained_checkpoint.restore_from_path=$RM \\
        trainer.ppo.combine_rm_and_critic_server=true model.freeze_layers=24 model.optim.lr=1e-4 &
    python examples/rl/ppo.py

Schulman et al. 2017, arXiv 1707.06347: generalised advantages, a clipped ratio, two epochs on every
batch. The critic starts from the reward model and learns on the server, with the clipped value
loss.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import numpy as np
import torch
from policy import Policy, Replies, compare_heldout, connect_reward, judge, new_parser, read_prompts
from torch import Tensor

from nemo_aligner.integrations.trl import RewardFunction
from nemo_aligner.serving.client.critic import RewardCriticClient

_LAMBDA = 0.95
_CLIP = 0.2
_EPOCHS = 2


@dataclass(frozen=True)
class Batch:
    """Replies of the policy with their advantages, values and returns.

    All tensors are ``[N, T]``, for N replies of at most T tokens, and 0 after the end of a reply.
    ``log_probs`` has an autograd graph, which the first epoch uses.
    """

    replies: Replies
    log_probs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor


def compute_advantages(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute generalised advantages ``[N, T]`` (Schulman et al. 2016, arXiv 1506.02438).

    There is no discount. ``rewards`` and ``values`` of each token and ``mask`` are ``[N, T]``, too.
    """
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:] * mask[:, 1:]
    errors = (rewards + next_values - values) * mask
    advantages, following = torch.zeros_like(values), torch.zeros(len(values))
    for token in reversed(range(values.shape[1])):
        following = errors[:, token] + _LAMBDA * following
        advantages[:, token] = following
    return advantages


def collect(
    policy: Policy,
    critic: RewardCriticClient,
    reward: RewardFunction,
    prompts: list[str],
    kl: float,
) -> tuple[Batch, float]:
    """Reply to ``prompts`` and score the replies; return the batch and its mean reward."""
    replies = policy.reply(prompts)
    scored = judge(reward, replies)
    mask = replies.mask
    log_probs = policy.log_probs(replies)
    with torch.no_grad():
        drift = log_probs - policy.log_probs(replies, policy.reference)
    rewards = -kl * drift * mask
    last = mask.sum(1).long() - 1
    # A reply that the server rejects has no reward; it gets the mean of the others.
    rewards[torch.arange(len(mask)), last] += scored.nan_to_num(float(scored.nanmean()))
    values = read_values(critic, replies)
    advantages = compute_advantages(rewards, values, mask)
    returns = (advantages + values) * mask
    is_reply = mask.bool()
    spread = (advantages - advantages[is_reply].mean()) / (advantages[is_reply].std() + 1e-6)
    return Batch(replies, log_probs, spread * mask, values, returns), float(scored.nanmean())


def read_values(critic: RewardCriticClient, replies: Replies) -> Tensor:
    """Values ``[N, T]`` by the critic's server: the value before each token of the replies."""
    tokens = make_token_lists(replies)
    output = critic.infer(tokens)
    values = torch.zeros_like(replies.mask)
    for row, (ids, count) in enumerate(zip(tokens, replies.mask.sum(1).long(), strict=True)):
        first = len(ids) - int(count)
        values[row, :count] = torch.tensor(output.values[row][first - 1 : len(ids) - 1])
    return values


def make_token_lists(replies: Replies) -> list[list[int]]:
    """Return the token ids of each prompt with its reply, without padding."""
    return [
        row[attention.bool()].tolist()
        for row, attention in zip(replies.tokens, replies.attention, strict=True)
    ]


def train_critic(critic: RewardCriticClient, batch: Batch) -> float:
    """Let the critic server train on the returns of the batch, and return the critic's loss."""
    lists = make_token_lists(batch.replies)
    shape = (len(lists), max(map(len, lists)))
    tokens = np.zeros(shape, dtype=np.int64)
    returns, values, mask = (np.zeros((shape[0], shape[1] - 1), np.float32) for _ in range(3))
    for row, (ids, count) in enumerate(zip(lists, batch.replies.mask.sum(1).long(), strict=True)):
        tokens[row, : len(ids)] = ids
        # The value before a token is the critic's output at the previous token.
        place = slice(len(ids) - int(count) - 1, len(ids) - 1)
        returns[row, place] = batch.returns[row, :count]
        values[row, place] = batch.values[row, :count]
        mask[row, place] = 1
    return critic.train(tokens, returns, values, mask)


def train_policy(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Update the policy with PPO's clipped objective.

    Each of the two epochs takes one step on the whole batch.
    """
    mask, old_log_probs = batch.replies.mask, batch.log_probs.detach()
    for epoch in range(_EPOCHS):
        log_probs = policy.log_probs(batch.replies) if epoch else batch.log_probs
        ratio = (log_probs - old_log_probs).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        optimizer.zero_grad()
        (-(gain * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.trained, 1.0)
        optimizer.step()


def main(options: argparse.Namespace) -> None:
    """Train, and print the held-out evaluation before and after."""
    torch.manual_seed(options.seed)
    reward = connect_reward(options)
    critic = RewardCriticClient(options.url)
    policy = Policy(options.policy, options.frozen_layers, options.tokens)
    optimizer = torch.optim.AdamW(policy.trained, lr=options.lr, weight_decay=0.0)
    prompts, rng = read_prompts(options.train), random.Random(options.seed)
    with compare_heldout(policy, reward, options):
        for number in range(1, options.steps + 1):
            sampled = rng.sample(prompts, options.prompts * options.replies)
            batch, mean = collect(policy, critic, reward, sampled, options.kl)
            loss = train_critic(critic, batch)
            train_policy(policy, optimizer, batch)
            print(f"step {number}: reward {mean:.2f}, critic's loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main(new_parser(__doc__, "http://127.0.0.1:5556").parse_args())
