"""PPO with the critic on a server, as NeMo-Aligner runs it: the trainer holds the policy alone.

    RM=results/quickstart/run/checkpoints/megatron_gpt.nemo
    nemo-aligner serve-critic pretrained_checkpoint.restore_from_path=$RM \\
        trainer.ppo.combine_rm_and_critic_server=true model.freeze_layers=24 model.optim.lr=1e-4 &
    python examples/rl/ppo.py

Schulman et al. 2017, arXiv 1707.06347: generalised advantages, a clipped ratio, two epochs on every
batch. The critic starts from the reward model and learns on the server, by the clipped value loss.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import numpy as np
import torch
from policy import Policy, Replies, judge, measured, new_parser, read_prompts, reward_of
from torch import Tensor

from nemo_aligner.integrations.trl import RewardFunction
from nemo_aligner.serving.client.critic import RewardCriticClient

_LAMBDA = 0.95
_CLIP = 0.2
_EPOCHS = 2


@dataclass(frozen=True)
class Batch:
    """What the policy said, and what came of it; ``[N, T]``, 0 where a reply has no token.

    ``log_probs`` have the policy's graph, for the first epoch.
    """

    replies: Replies
    log_probs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor


def advantages_of(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Generalised advantages ``[N, T]`` without discount (Schulman et al. 2016, 1506.02438)."""
    after = torch.zeros_like(values)
    after[:, :-1] = values[:, 1:] * mask[:, 1:]
    errors = (rewards + after - values) * mask
    found, rest = torch.zeros_like(values), torch.zeros(len(values))
    for token in reversed(range(values.shape[1])):
        rest = errors[:, token] + _LAMBDA * rest
        found[:, token] = rest
    return found


def collect(
    policy: Policy,
    critic: RewardCriticClient,
    reward: RewardFunction,
    prompts: list[str],
    kl: float,
) -> tuple[Batch, float]:
    """Reply to ``prompts``, and have the replies judged; the batch and its mean reward."""
    replies = policy.reply(prompts)
    scored = judge(reward, replies)
    mask = replies.mask
    log_probs = policy.log_probs(replies)
    with torch.no_grad():
        drift = log_probs - policy.log_probs(replies, policy.reference)
    rewards = -kl * drift * mask
    last = mask.sum(1).long() - 1
    # A refused reply has no reward of its own; it is left where it was expected to be.
    rewards[torch.arange(len(mask)), last] += scored.nan_to_num(float(scored.nanmean()))
    values = values_of(critic, replies)
    advantages = advantages_of(rewards, values, mask)
    returns = (advantages + values) * mask
    known = mask.bool()
    spread = (advantages - advantages[known].mean()) / (advantages[known].std() + 1e-6)
    return Batch(replies, log_probs, spread * mask, values, returns), float(scored.nanmean())


def values_of(critic: RewardCriticClient, replies: Replies) -> Tensor:
    """``[N, T]``: what the critic expects before each token of the replies."""
    tokens = token_lists(replies)
    found = critic.infer(tokens)
    values = torch.zeros_like(replies.mask)
    for row, (ids, count) in enumerate(zip(tokens, replies.mask.sum(1).long(), strict=True)):
        first = len(ids) - int(count)
        values[row, :count] = torch.tensor(found.values[row][first - 1 : len(ids) - 1])
    return values


def token_lists(replies: Replies) -> list[list[int]]:
    """Prompts and replies as token ids, without what they were filled up with."""
    return [
        row[attention.bool()].tolist()
        for row, attention in zip(replies.tokens, replies.attention, strict=True)
    ]


def train_critic(critic: RewardCriticClient, batch: Batch) -> float:
    """Have the critic on the server learn from the batch; its loss."""
    lists = token_lists(batch.replies)
    shape = (len(lists), max(map(len, lists)))
    tokens = np.zeros(shape, dtype=np.int64)
    returns, values, mask = (np.zeros((shape[0], shape[1] - 1), np.float32) for _ in range(3))
    for row, (ids, count) in enumerate(zip(lists, batch.replies.mask.sum(1).long(), strict=True)):
        tokens[row, : len(ids)] = ids
        # The value before a token is the one that the critic gives at the token before it.
        place = slice(len(ids) - int(count) - 1, len(ids) - 1)
        returns[row, place] = batch.returns[row, :count]
        values[row, place] = batch.values[row, :count]
        mask[row, place] = 1
    return critic.train(tokens, returns, values, mask)


def train_policy(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """The clipped objective, the whole batch at once."""
    mask, before = batch.replies.mask, batch.log_probs.detach()
    for epoch in range(_EPOCHS):
        log_probs = policy.log_probs(batch.replies) if epoch else batch.log_probs
        ratio = (log_probs - before).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        optimizer.zero_grad()
        (-(gain * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.trained, 1.0)
        optimizer.step()


def main(options: argparse.Namespace) -> None:
    """Train, and print what it has gained."""
    torch.manual_seed(options.seed)
    reward = reward_of(options)
    critic = RewardCriticClient(options.url)
    policy = Policy(options.policy, options.frozen_layers, options.tokens)
    optimizer = torch.optim.AdamW(policy.trained, lr=options.lr, weight_decay=0.0)
    prompts, rng = read_prompts(options.train), random.Random(options.seed)
    with measured(policy, reward, options):
        for number in range(1, options.steps + 1):
            asked = rng.sample(prompts, options.prompts * options.replies)
            batch, mean = collect(policy, critic, reward, asked, options.kl)
            loss = train_critic(critic, batch)
            train_policy(policy, optimizer, batch)
            print(f"step {number}: reward {mean:.2f}, critic's loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main(new_parser(__doc__, "http://127.0.0.1:5556").parse_args())
