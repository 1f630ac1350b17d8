"""NeMo RL's reward model environment: conversations in, rewards out; in process or by servers.

It has the interface of ``nemo_rl.environments.interfaces.EnvironmentInterface``, and needs neither
NeMo RL nor ray. ``register`` makes it known to NeMo RL, which runs it as a ray actor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from nemo_aligner.config.evaluation import RewardEnvironmentConfig
from nemo_aligner.config.load import load_values
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_expected
from nemo_aligner.contract.messages import (
    REASONING,
    Conversation,
    Text,
    prompt_of,
    with_messages,
    with_tools,
)
from nemo_aligner.contract.readout import one_reward, reward_weights
from nemo_aligner.contract.scorer import Scorer
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.client.scorers import ServedScorer
from nemo_aligner.serving.tokens import find_token
from nemo_aligner.utils.errors import ConfigError, DataError, short

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ENVIRONMENT_NAME = "nemo_aligner_reward_model"
PROCESSOR_NAME = "nemo_aligner_messages"
# Key of a sample's extra_env_info: its conversation before the reply, without any template.
MESSAGES_KEY = "messages"
# Key beside it: the tools of the conversation.
TOOLS_KEY = "tools"
# Keys of a turn that are scored; the others are NeMo RL's.
_TURN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING)

_ACTOR = f"{__name__}.RewardModelActor"
_METRICS = "reward_model_env"
_FEWEST_TOKENS = 4
_OTHER_REPLY = {"role": "assistant", "content": "."}  # that nobody refuses


class EnvironmentReturn(NamedTuple):
    """Result of a step for N samples: the fields of NeMo RL's, in its order.

    Attributes:
        observations: messages with role ``environment``.
        metadata: None for each: nothing is kept for a next turn.
        next_stop_strings: None for each.
        rewards: ``[N]`` float32, on the CPU.
        terminateds: ``[N]`` bool, all true: a reward ends the episode.
        answers: what was scored.
    """

    observations: list[dict[str, str]]
    metadata: list[None]
    next_stop_strings: list[None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str | None]


class Rewarder(Scorer, Protocol):
    """A scorer that is closed with the environment."""

    @property
    def contract(self) -> ScoringContract: ...

    def close(self) -> None: ...


class RewardModelEnvironment:
    """Scores the last reply of every conversation.

    A conversation is the message log as it stands. NeMo RL's own processors write the policy's chat
    template into the log's prompt; where ``extra_env_info`` has ``messages``, the bare conversation
    before the reply, that is taken for the prompt instead (see ``messages_processor``). Its
    ``tools`` are those of the conversation.

    ``config`` has the keys of ``RewardEnvironmentConfig``.
    """

    def __init__(self, config: Mapping[str, Any], rewarder: Rewarder | None = None) -> None:
        """Another ``rewarder`` scores instead of what ``config`` names.

        Raises:
            AlignerError: settings, servers or the model are unfit.
        """
        settings = {key: value for key, value in config.items() if key != "enabled"}
        self._config = load_values(RewardEnvironmentConfig, settings, "env")
        self._rewarder: Rewarder | None = rewarder or _new_rewarder(self._config)
        contract = self._rewarder.contract
        check_expected(contract, self._config.expect_contract, "expect_contract")
        self._weights = reward_weights(contract, self._config.attribute)
        self._refused = 0
        self._refused_prompts = 0

    def step(
        self, message_logs: Sequence[Sequence[Mapping[str, Any]]], env_infos: Sequence[Any]
    ) -> EnvironmentReturn:
        """Rewards of N samples.

        Args:
            message_logs: of each sample its messages, the reply last; what a message has beside
                the keys of chat messages is left alone.
            env_infos: of each sample None, or its ``extra_env_info``, see above.

        A reply that the model refuses gets ``refused_reward``. A prompt that it refuses with any
        reply is not the policy's doing: its samples get 0, all of a group the same.

        Raises:
            DataError: a sample cannot be scored, and there is no ``refused_reward``.
            ServingError: no server answers, or it failed.
        """
        import torch

        if self._rewarder is None:
            raise ConfigError("the environment was shut down")
        texts = [_conversation(*each) for each in zip(message_logs, env_infos, strict=True)]
        scored = self._rewarder.score_rows(texts)
        rewards = one_reward(scored.rewards, self._weights)
        of_prompts = self._refused_with_any_reply(self._rewarder, texts, scored.errors)
        of_replies = {row: why for row, why in scored.errors.items() if row not in of_prompts}
        self._settle(of_replies, rewards, "replies", self._config.refused_reward)
        self._settle(of_prompts, rewards, "prompts", 0.0)
        self._refused += len(of_replies)
        self._refused_prompts += len(of_prompts)
        count = len(texts)
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: {reward:.6g}"}
                for reward in rewards
            ],
            metadata=[None] * count,
            next_stop_strings=[None] * count,
            rewards=torch.from_numpy(rewards),
            terminateds=torch.ones(count, dtype=torch.bool),
            answers=[log[-1].get("content") for log in message_logs],
        )

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """The batch as it is, and metrics of its ``rewards`` or ``total_reward``.

        ``std_reward`` divides by N - 1, as NeMo RL's, and is 0 for one sample. ``num_refused``
        replies, and the samples of ``num_refused_prompts``, are of all steps so far.
        """
        metrics: dict[str, float] = {
            f"{_METRICS}/num_samples": len(batch.get("message_log", [])),
            f"{_METRICS}/num_refused": self._refused,
            f"{_METRICS}/num_refused_prompts": self._refused_prompts,
        }
        rewards = batch.get("rewards", batch.get("total_reward"))
        if rewards is not None and len(rewards):
            values = rewards.double()
            metrics |= {
                f"{_METRICS}/mean_reward": float(values.mean()),
                f"{_METRICS}/std_reward": float(values.std()) if len(values) > 1 else 0.0,
                f"{_METRICS}/min_reward": float(values.min()),
                f"{_METRICS}/max_reward": float(values.max()),
            }
        return batch, metrics

    def shutdown(self) -> None:
        """Let go of the model or of the connections; a second time does nothing."""
        rewarder, self._rewarder = self._rewarder, None
        if rewarder is not None:
            rewarder.close()

    @staticmethod
    def _refused_with_any_reply(
        rewarder: Rewarder, texts: Sequence[Text], errors: Mapping[int, str]
    ) -> dict[int, str]:
        """Refused rows whose prompt is refused with any reply, and why."""
        if not errors:
            return {}
        others = [_with_other_reply(texts[row]) for row in errors]
        found = rewarder.score_rows(others).errors
        rows = list(errors)
        return {rows[place]: why for place, why in found.items()}

    def _settle(
        self, errors: Mapping[int, str], rewards: np.ndarray, whose: str, reward: float | None
    ) -> None:
        """Put ``reward`` into the rows of ``errors``; without ``refused_reward`` it is an error."""
        if not errors:
            return
        row, reason = next(iter(errors.items()))
        said = f"{len(errors)} of {len(rewards)} {whose} cannot be scored; sample {row}: {reason}"
        if self._config.refused_reward is None or reward is None:
            raise DataError(f"{said}; refused_reward=0 gives them that reward")
        logger.warning("%s; they get %g", said, reward)
        rewards[list(errors)] = reward


def messages_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: Any,
    tokenizer: Any,
    max_seq_length: int,
    idx: int,
) -> dict[str, Any]:
    """NeMo RL's data processor that keeps the bare conversation for the reward model.

    ``messages`` of the datum are the conversation; a reply at its end is left out. ``tools`` of it
    are a list, or its JSON text. The policy gets it by its own chat template, the environment as it
    is, in ``extra_env_info``. A prompt of more than ``max_seq_length`` tokens is cut to a few, and
    has no part in the loss.
    """
    messages = [_turn(turn) for turn in datum_dict["messages"]]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"datum {idx}: messages: got no prompt, wanted one before the reply")
    if task_data_spec.system_prompt:
        messages.insert(0, {"role": "system", "content": task_data_spec.system_prompt})
    if task_data_spec.prompt:
        messages[-1]["content"] = task_data_spec.prompt.format(messages[-1]["content"])
    whole = with_tools(messages, datum_dict.get(TOOLS_KEY))
    beside = {TOOLS_KEY: whole.tools} if isinstance(whole, Conversation) else {}
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **beside
    )
    token_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    length, is_long = len(token_ids), len(token_ids) > max_seq_length
    kept = token_ids[: min(_FEWEST_TOKENS, max_seq_length)] if is_long else token_ids
    datum = {
        "message_log": [{"role": "user", "content": text, "token_ids": kept}],
        "length": length,
        "extra_env_info": {MESSAGES_KEY: messages, **beside},
        "loss_multiplier": 0.0 if is_long else 1.0,
        "idx": idx,
    }
    named = {"task_name": datum_dict["task_name"]} if "task_name" in datum_dict else {}
    return {**datum, **named}


def register(name: str = ENVIRONMENT_NAME, python: str = sys.executable) -> None:
    """Make environment and processor known to NeMo RL, before its ``setup`` reads the settings.

    Then ``env.NAME`` has the settings, and ``data`` names the environment and the processor.

    Args:
        name: of the environment.
        python: runs the actor; this package is installed in it.

    Raises:
        ImportError: NeMo RL or ray is not installed.
        ValueError: NeMo RL knows the name already.
    """
    from nemo_rl.data.processors import register_processor
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.environments.utils import register_env

    register_env(name, _ACTOR)
    ACTOR_ENVIRONMENT_REGISTRY[_ACTOR] = python
    register_processor(PROCESSOR_NAME, messages_processor)


def __getattr__(name: str) -> Any:
    """``RewardModelActor``, where ray is installed: NeMo RL finds an actor's class by its name."""
    if name != "RewardModelActor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import ray

    return ray.remote(RewardModelEnvironment)


def _new_rewarder(config: RewardEnvironmentConfig) -> Rewarder:
    if bool(config.url) == (config.rm_model_file is not None):
        got = "both" if config.url else "neither"
        raise ConfigError(f"env: got {got} of url and rm_model_file, wanted one of them")
    if config.url:
        token = find_token(None, config.token_variable, "env.token")
        client = RewardClient(config.url, wait_s=config.wait_s, retry_s=config.retry_s, token=token)
        return ServedScorer(client)
    from nemo_aligner.integrations.in_process import InProcessScorer

    return InProcessScorer.load(config)


def _conversation(log: Sequence[Mapping[str, Any]], info: Any) -> Text:
    """The bare prompt, if there is one, and the reply; else the log."""
    turns = [_turn(turn) for turn in log]
    if not turns:
        raise DataError("message_logs: got a log without messages, wanted a prompt and its reply")
    known: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
    bare = known.get(MESSAGES_KEY)
    if bare is not None and not isinstance(bare, list):
        raise DataError(f"extra_env_info.{MESSAGES_KEY}: got {short(bare)}, wanted messages")
    messages = turns if bare is None else [*bare, turns[-1]]
    tools = known.get(TOOLS_KEY)
    return Conversation(messages, tools) if tools else messages


def _with_other_reply(text: Text) -> Text:
    assert not isinstance(text, str)  # a log of messages
    return with_messages(text, [*prompt_of(text), _OTHER_REPLY])


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {key: turn[key] for key in _TURN_KEYS if key in turn}
