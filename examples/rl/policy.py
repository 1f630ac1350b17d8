"""The policy of the examples in this folder: a small language model, and its evaluation.

transformers loads it from a folder or a GGUF file. The reference model for the KL divergence is the
policy before training.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from nemo_aligner.integrations.trl import RewardFunction, reward_function
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ServingError

_ROWS_AT_ONCE = 16  # replies whose logits over the whole vocabulary are computed at once
# The template of the quickstart's reward model. SmolLM2's own template adds a system prompt.
_CHATML = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Replies:
    """N replies of at most T tokens, each to its prompt of at most P tokens.

    Attributes:
        tokens: ``[N, P + T]`` int64, prompts padded on the left, replies padded on the right.
        attention: ``[N, P + T]`` int64, 0 at padding.
        mask: ``[N, T]`` float32, 1 for the tokens of the reply, including its end token.
        prompts, texts: N prompts and replies as text.
    """

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    prompts: list[str]
    texts: list[str]

    def rows(self, rows: Tensor) -> Replies:
        """Select the replies with the indices ``rows [M]``."""
        return Replies(
            self.tokens[rows],
            self.attention[rows],
            self.mask[rows],
            [self.prompts[row] for row in rows],
            [self.texts[row] for row in rows],
        )


class Policy:
    """The policy: a causal language model of which only the upper layers are trained.

    It also holds the reference model, which is the policy before training.
    """

    def __init__(self, path: Path, frozen_layers: int, most_tokens: int) -> None:
        """Load ``path``, a folder that transformers saved or a GGUF file.

        ``most_tokens`` limits the length of a reply.
        """
        disable_progress_bar()
        folder, file = (path.parent, path.name) if path.is_file() else (path, None)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, gguf_file=file, padding_side="left"
        )
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.tokenizer.chat_template = _CHATML
        self.reference = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32
        ).requires_grad_(False)
        # A copy, because a model from a GGUF file counts as quantized and cannot be trained.
        self.reference.config.quantization_config = None
        self.model = AutoModelForCausalLM.from_config(self.reference.config, dtype=torch.float32)
        self.model.load_state_dict(self.reference.state_dict())
        self.model.eval()
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[:frozen_layers].requires_grad_(False)
        self._most_tokens = most_tokens

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def reply(self, prompts: Sequence[str]) -> Replies:
        """Sample one reply at temperature 1 for each prompt."""
        encoded = self.tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        tokens = self.model.generate(
            **encoded,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._most_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        reply_tokens = tokens[:, encoded["input_ids"].shape[1] :]
        is_end = reply_tokens == self.tokenizer.eos_token_id
        mask = (is_end.cumsum(1) - is_end.long() == 0).long()
        return Replies(
            tokens,
            torch.cat([encoded["attention_mask"], mask], dim=1),
            mask.float(),
            list(prompts),
            self.tokenizer.batch_decode(reply_tokens, skip_special_tokens=True),
        )

    def log_probs(self, replies: Replies, model: torch.nn.Module | None = None) -> Tensor:
        """Compute the log-probabilities ``[N, T]`` of the tokens of N replies.

        They are those of the policy or, if it is given, of ``model``.
        """
        logits = _logits(model or self.model, replies)
        chosen = replies.tokens[:, -logits.shape[1] :]
        return torch.log_softmax(logits, -1).gather(-1, chosen[..., None])[..., 0]

    @torch.no_grad()
    def kl(self, replies: Replies) -> Tensor:
        """KL divergence ``[N]`` from policy to reference in nats, summed over each reply.

        At every token it is the exact divergence of the two distributions over the vocabulary.
        """
        parts = []
        for rows in torch.arange(len(replies.texts)).split(_ROWS_AT_ONCE):
            part = Replies(
                replies.tokens[rows], replies.attention[rows], replies.mask[rows], [], []
            )
            log_probs = torch.log_softmax(_logits(self.model, part), -1)
            reference = torch.log_softmax(_logits(self.reference, part), -1)
            parts.append(((log_probs.exp() * (log_probs - reference)).sum(-1) * part.mask).sum(1))
        return torch.cat(parts)


def _logits(model: torch.nn.Module, replies: Replies) -> Tensor:
    """Logits ``[N, T, vocabulary]`` in float32 that predict the tokens of the replies."""
    positions = (replies.attention.cumsum(1) - 1).clamp(min=0)
    count = replies.mask.shape[1]
    outputs = model(
        input_ids=replies.tokens,
        attention_mask=replies.attention,
        position_ids=positions,
        logits_to_keep=count + 1,
    )
    return outputs.logits[:, :-1].float()


@dataclass(frozen=True)
class HeldOut:
    """Evaluation of the policy on held-out prompts.

    Attributes:
        reward: mean over the prompts.
        error: standard error of that mean.
        kl: mean divergence of a reply from the reference, in nats.
        tokens: mean length of a reply.
        example: a prompt and its reply.
    """

    reward: float
    error: float
    kl: float
    tokens: float
    example: str


def judge(reward: RewardFunction, replies: Replies) -> Tensor:
    """Get the rewards ``[N]`` float32 of N replies; NaN for a reply that the server rejects."""
    prompts = [[{"role": "user", "content": prompt}] for prompt in replies.prompts]
    turns = [[{"role": "assistant", "content": text}] for text in replies.texts]
    return torch.tensor(reward(prompts, turns))


def measure(policy: Policy, reward: RewardFunction, prompts: Sequence[str], seed: int) -> HeldOut:
    """Reply to every prompt once and evaluate the replies; a fixed seed makes calls comparable."""
    print(f"replying to {len(prompts)} held-out prompts ...", flush=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        replies = policy.reply(prompts)
    rewards = judge(reward, replies)
    scored = rewards[~rewards.isnan()]
    print(f"held-out reward {scored.mean():.2f}", flush=True)
    return HeldOut(
        float(scored.mean()),
        float(scored.std() / len(scored) ** 0.5),
        float(policy.kl(replies).mean()),
        float(replies.mask.sum(1).mean()),
        f"{replies.prompts[0]} -> {replies.texts[0]}",
    )


@contextmanager
def compare_heldout(
    policy: Policy, reward: RewardFunction, options: argparse.Namespace
) -> Iterator[None]:
    """Evaluate on held-out prompts before and after the block, which trains; print a table."""
    heldout = read_prompts(options.heldout, options.heldout_prompts)
    at_start, begun = measure(policy, reward, heldout, options.seed), time.monotonic()
    yield
    seconds = time.monotonic() - begun
    # TRL's trainer leaves the model on a GPU; the reference and the prompts are still on the CPU.
    policy.model.to(policy.reference.device).eval()
    print_table(at_start, measure(policy, reward, heldout, options.seed), seconds)


def print_table(at_start: HeldOut, at_end: HeldOut, seconds: float) -> None:
    """Print reward, length and divergence before and after training."""
    print(f"\n{'held-out prompts':<18}{'reward':>16}{'tokens':>9}{'KL, nats':>10}")
    for name, heldout in (("before", at_start), ("after", at_end)):
        reward = f"{heldout.reward:.2f} ± {heldout.error:.2f}"
        print(f"{name:<18}{reward:>16}{heldout.tokens:>9.1f}{heldout.kl:>10.2f}")
    for name, heldout in (("before", at_start), ("after", at_end)):
        print(f"{name}: {' '.join(heldout.example.split())}")
    print(f"trained in {seconds / 60:.1f} minutes")


def read_prompts(file: Path, limit: int | None = None) -> list[str]:
    """Read the distinct prompts of a file of pairs, in order; at most ``limit`` of them."""
    # Read line by line: str.splitlines would break at more than "\n".
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return list(dict.fromkeys(row["prompt"] for row in rows))[:limit]


def connect_reward(options: argparse.Namespace) -> RewardFunction:
    """Connect to the reward server that the options name.

    Returns:
        A function that gets the rewards of replies from it.

    Raises:
        SystemExit: a file is missing, or the server does not answer.
    """
    for file in (options.policy, options.train, options.heldout):
        if not file.exists():
            sys.exit(f"there is no {file}; bash scripts/quickstart.sh makes it")
    try:
        with RewardClient(options.url, wait_s=60) as client:
            client.contract()
    except ServingError as error:
        sys.exit(str(error))
    return reward_function(options.url, attribute=options.attribute)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of a description and shows defaults."""


def new_parser(about: str | None, url: str = "http://127.0.0.1:5555") -> argparse.ArgumentParser:
    """A parser with the options that all examples share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=_HelpFormatter)
    quickstart = Path("results/quickstart")
    parser.add_argument("--url", default=url, help="the server's")
    parser.add_argument("--attribute", help="of several that the reward model has")
    parser.add_argument(
        "--policy",
        type=Path,
        default=quickstart / "SmolLM2-135M-Instruct.gguf",
        help="a GGUF file, or a folder as transformers saves it",
    )
    parser.add_argument(
        "--train", type=Path, default=quickstart / "data/train.jsonl", help="prompts"
    )
    parser.add_argument(
        "--heldout",
        type=Path,
        default=quickstart / "data/heldout.jsonl",
        help="prompts that show what was gained",
    )
    parser.add_argument("--heldout-prompts", type=int, default=100, help="of them, at most")
    parser.add_argument("--steps", type=int, default=16, help="of training")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--replies", type=int, default=4, help="to each of them")
    parser.add_argument("--tokens", type=int, default=32, help="of a reply, at most")
    parser.add_argument(
        "--frozen-layers",
        type=int,
        default=24,
        help="lowest layers of the policy that are not trained",
    )
    parser.add_argument("--lr", type=float, default=1e-4, help="the learning rate")
    parser.add_argument(
        "--kl", type=float, default=0.05, help="what a nat of drift costs, in rewards"
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompts and replies")
    return parser
