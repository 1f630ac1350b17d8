"""The rewards that TRL's GRPOTrainer gets from an export; run in an environment with TRL.

``trl_rewards.py EXPORT POLICY CONVERSATIONS`` prints the rewards of the conversations, each a list
of messages whose last one is the reply.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def main(export: str, policy: str, conversations: str) -> None:
    chats = json.loads(Path(conversations).read_text())
    prompts, replies = [chat[:-1] for chat in chats], [chat[-1:] for chat in chats]
    with tempfile.TemporaryDirectory() as work:
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=export,
            # In bf16, the default, rewards would be rounded.
            args=GRPOConfig(output_dir=work, use_cpu=True, bf16=False, report_to=[]),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )
        inputs = [{"prompt": prompt} for prompt in prompts]
        rewards = trainer._calculate_rewards(inputs, prompts, replies, [[0]] * len(replies))
    print(json.dumps(rewards[:, 0].tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
