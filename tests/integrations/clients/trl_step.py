"""A step of TRL's GRPOTrainer with our reward function; run it in an environment with TRL.

``python trl_step.py POLICY URL FOLDER`` prints arguments and results of the reward function, what
the trainer logged, and how far the step moved the policy.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from nemo_aligner.integrations.trl import RewardFunction, reward_function


class Noted:
    """A reward function that also keeps the samples it scores."""

    def __init__(self, function: RewardFunction) -> None:
        self.__name__ = function.__name__
        self._function = function
        self.texts: list[Any] = []
        self.rewards: list[float] = []

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        given = self._function(prompts, completions, **columns)
        self.texts += [prompt + said for prompt, said in zip(prompts, completions, strict=True)]
        self.rewards += given
        return given


def main(policy: str, url: str, folder: str) -> None:
    torch.manual_seed(0)
    prompts = [[{"role": "user", "content": text}] for text in ("what is the river", "who sings")]
    reward = Noted(reward_function(url, attribute="helpfulness", name="helpful"))
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_steps=1,
            logging_steps=1,
            learning_rate=1e-3,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=8,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    after = list(trainer.model.parameters())
    moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
    said = {"texts": reward.texts, "rewards": reward.rewards, "log": trainer.state.log_history[0]}
    print(json.dumps({**said, "moved": moved}))


if __name__ == "__main__":
    main(*sys.argv[1:])
