"""NeMo RL's reward model environment: it scores conversations, in process or on servers.

It has the interface of ``nemo_rl.environments.interfaces.EnvironmentInterface``, but needs neither
NeMo RL nor ray. ``register`` makes it known to NeMo RL, which runs it as a ray actor.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from threading import Lock
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
    with_principle,
    with_tools,
    without_struct_nulls,
)
from nemo_aligner.contract.readout import one_reward, reward_weights, weighted_components
from nemo_aligner.contract.scorer import ScoredRows, Scorer
from nemo_aligner.data.prompt_template import check_template, fill_template
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.client.scorers import ServedScorer
from nemo_aligner.serving.tokens import find_token
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError, short

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ENVIRONMENT_NAME = "nemo_aligner_reward_model"
PROCESSOR_NAME = "nemo_aligner_messages"
# Key in a sample's extra_env_info. Its value is the messages before the reply, not rendered.
MESSAGES_KEY = "messages"
# Key in extra_env_info whose value is the tools of the conversation.
TOOLS_KEY = "tools"
PRINCIPLE_KEY = "principle"
# Keys of a message that are scored; NeMo RL adds others.
_TURN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING)

_ACTOR = f"{__name__}.RewardModelActor"
# Asynchronous rollouts send each sample in a call of its own. Servers score such calls together.
_MOST_CONCURRENT = 64
_METRICS = "reward_model_env"
_FEWEST_TOKENS = 4
_OTHER_REPLY = {"role": "assistant", "content": "."}  # no scoring contract rejects this reply


class EnvironmentReturn(NamedTuple):
    """The result of ``step`` for N samples: a copy of NeMo RL's class, with the same field order.

    Attributes:
        observations: N messages with role ``environment``.
        metadata: N times None, because no state is kept for a next turn.
        next_stop_strings: N times None.
        rewards: ``[N]`` float32, on the CPU; with ``reward_components`` a dict with such a tensor
            for each attribute, ``reward/NAME``, which add up to the reward.
        terminateds: ``[N]`` bool, all true, because a reward ends the episode.
        answers: the N replies that were scored.
    """

    observations: list[dict[str, str]]
    metadata: list[None]
    next_stop_strings: list[None]
    rewards: Tensor | dict[str, Tensor]
    terminateds: Tensor
    answers: list[str | None]


class Rewarder(Scorer, Protocol):
    """Protocol of the environment's scorer: it knows its scoring contract, and can be closed."""

    @property
    def contract(self) -> ScoringContract: ...

    def find_rejected(self, samples: Sequence[Text]) -> dict[int, str]:
        """Return why samples are rejected, by their number, without counting them."""

    def close(self) -> None: ...


class RewardModelEnvironment:
    """Scores the last reply of every conversation; safe to use from several threads.

    By default the message log of a sample is scored as its conversation. But NeMo RL's own data
    processors render the prompt in the log with the policy's chat template, which the reward model
    was not trained on. Use ``messages_processor`` instead: it stores the original messages and
    tools in ``extra_env_info``, and they then replace the prompt of the log.

    ``config`` has the keys of ``RewardEnvironmentConfig``.
    """

    def __init__(self, config: Mapping[str, Any], rewarder: Rewarder | None = None) -> None:
        """Load the model or connect to the servers that ``config`` names, or use ``rewarder``.

        Raises:
            AlignerError: the settings, the servers or the model cannot be used.
        """
        settings = {key: value for key, value in config.items() if key != "enabled"}
        self._config = load_values(RewardEnvironmentConfig, settings, "env")
        self._rewarder: Rewarder | None = rewarder or _create_rewarder(self._config)
        contract = self._rewarder.contract
        check_expected(contract, self._config.expect_contract, "expect_contract")
        self._weights = reward_weights(contract, self._config.attribute)
        self._attributes = contract.attributes
        self._counts_lock = Lock()
        self._num_refused_replies = 0
        self._num_refused_prompts = 0

    def step(
        self, message_logs: Sequence[Sequence[Mapping[str, Any]]], env_infos: Sequence[Any]
    ) -> EnvironmentReturn:
        """Score N samples.

        If the model rejects a reply, the reward is ``refused_reward``. If it would reject the
        prompt with any reply, the policy is not at fault: then the reward is 0 for all samples of a
        group, so that none has an advantage.

        Args:
            message_logs: the messages of each sample, the reply last; keys that chat messages do
                not have are ignored.
            env_infos: for each sample None or its ``extra_env_info``, whose messages replace the
                prompt of the log.

        Raises:
            DataError: a sample is rejected, and ``refused_reward`` is not set.
            ServingError: no server answers, or it failed, or the judge or a function of a gateway
                failed on a sample.
        """
        import torch

        rewarder = self._rewarder
        if rewarder is None:
            raise ConfigError("the environment was shut down and cannot score; create another one")
        samples = [
            _build_conversation(log, info)
            for log, info in zip(message_logs, env_infos, strict=True)
        ]
        scored = rewarder.score_rows(samples)
        _check_all_judged(scored)
        rewards = one_reward(scored.rewards, self._weights)
        bad_prompts = self._find_bad_prompts(rewarder, samples, scored.errors)
        bad_replies = {
            row: reason for row, reason in scored.errors.items() if row not in bad_prompts
        }
        self._fill_in(bad_replies, rewards, "replies", self._config.refused_reward)
        self._fill_in(bad_prompts, rewards, "prompts", 0.0)
        with self._counts_lock:
            self._num_refused_replies += len(bad_replies)
            self._num_refused_prompts += len(bad_prompts)
        count = len(samples)
        returned: Tensor | dict[str, Tensor] = torch.from_numpy(rewards)
        if self._config.reward_components:
            columns = self._split_by_attribute(scored.rewards, rewards, list(scored.errors))
            returned = {name: torch.from_numpy(column) for name, column in columns.items()}
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: {reward:.6g}"}
                for reward in rewards
            ],
            metadata=[None] * count,
            next_stop_strings=[None] * count,
            rewards=returned,
            terminateds=torch.ones(count, dtype=torch.bool),
            answers=[log[-1].get("content") for log in message_logs],
        )

    def _split_by_attribute(
        self, scored: np.ndarray, rewards: np.ndarray, rejected: list[int]
    ) -> dict[str, np.ndarray]:
        """Split ``rewards [N]`` by attribute: ``reward/NAME`` -> ``[N]`` float32.

        Args:
            scored: ``[N, A]`` the attributes.
            rejected: the samples whose reward is not the model's; all attributes share it equally.
        """
        attributes = self._attributes
        components = np.zeros((len(rewards), len(attributes)))
        is_scored = np.ones(len(rewards), dtype=bool)
        is_scored[rejected] = False
        if is_scored.any():
            components[is_scored] = weighted_components(scored[is_scored], self._weights)
        components[rejected] = rewards[rejected, None] / len(attributes)
        columns = components.astype(np.float32).T
        return {f"reward/{name}": column for name, column in zip(attributes, columns, strict=True)}

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, and metrics of its ``rewards`` or ``total_reward``.

        ``std_reward`` divides by N - 1, like NeMo RL's, and is 0 for one sample. ``num_refused``
        counts the samples with a rejected reply in all steps so far, ``num_refused_prompts`` those
        with a rejected prompt.
        """
        metrics: dict[str, float] = {
            f"{_METRICS}/num_samples": len(batch.get("message_log", [])),
            f"{_METRICS}/num_refused": self._num_refused_replies,
            f"{_METRICS}/num_refused_prompts": self._num_refused_prompts,
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
        """Release the model or close the connections; further calls have no effect."""
        rewarder, self._rewarder = self._rewarder, None
        if rewarder is not None:
            rewarder.close()

    @staticmethod
    def _find_bad_prompts(
        rewarder: Rewarder, samples: Sequence[Text], errors: Mapping[int, str]
    ) -> dict[int, str]:
        """Return the rejected samples whose prompt is at fault: row -> reason.

        Each rejected sample is tried again with a reply that no model rejects. If it is rejected
        again, the prompt is at fault.
        """
        if not errors:
            return {}
        probes = [_replace_reply(samples[row]) for row in errors]
        prompt_errors = rewarder.find_rejected(probes)
        rows = list(errors)
        return {rows[place]: reason for place, reason in prompt_errors.items()}

    def _fill_in(
        self, errors: Mapping[int, str], rewards: np.ndarray, kind: str, reward: float | None
    ) -> None:
        """Set the rewards of rejected samples to ``reward``, and log how many there are.

        Args:
            errors: reason of each rejected sample, by its index in ``rewards``.
            kind: what was rejected, "replies" or "prompts", for messages.

        Raises:
            DataError: the setting ``refused_reward`` is null.
        """
        if not errors:
            return
        row, reason = next(iter(errors.items()))
        message = f"{len(errors)} of {len(rewards)} {kind} are rejected; sample {row}: {reason}"
        if self._config.refused_reward is None or reward is None:
            raise DataError(f"{message}. Set refused_reward=0 to give such {kind} the reward 0")
        logger.warning("%s; their reward is %g", message, reward)
        rewards[list(errors)] = reward


def messages_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: Any,
    tokenizer: Any,
    max_seq_length: int,
    idx: int,
) -> dict[str, Any]:
    """Prepare a datum for NeMo RL, and keep its conversation for the reward model.

    The datum has the conversation as ``messages``; a reply at the end is dropped. It may have
    ``tools``, a list, or a list as a JSON string; and ``principle``, by which the reply is
    rewarded. The policy gets the prompt in the policy's chat template, without the principle; the
    environment gets messages and principle in ``extra_env_info``. A prompt of ``max_seq_length``
    tokens or more, which leaves none for the reply, is cut to a few tokens, and excluded from the
    loss.

    Raises:
        ConfigError: the ``prompt_file`` of NeMo RL's data settings does not have one ``{}``.
        DataError: the datum has no messages before the reply, or its tools cannot be read.
    """
    # Arrow fills missing keys of tools and calls with nulls.
    messages = [_select_keys(without_struct_nulls(turn)) for turn in datum_dict["messages"]]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"datum {idx}: messages: got no prompt, wanted messages before the reply")
    if task_data_spec.system_prompt:
        messages.insert(0, {"role": "system", "content": task_data_spec.system_prompt})
    if task_data_spec.prompt:
        check_template(task_data_spec.prompt, "prompt_file")
        messages[-1]["content"] = fill_template(task_data_spec.prompt, messages[-1]["content"])
    row_tools = without_struct_nulls(datum_dict.get(TOOLS_KEY), is_inside=True)
    conversation = with_tools(messages, row_tools)
    tools = {TOOLS_KEY: conversation.tools} if isinstance(conversation, Conversation) else {}
    principle = {key: datum_dict[key] for key in (PRINCIPLE_KEY,) if datum_dict.get(key)}
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **tools
    )
    token_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    length, is_long = len(token_ids), len(token_ids) >= max_seq_length
    policy_ids = token_ids[: min(_FEWEST_TOKENS, max_seq_length)] if is_long else token_ids
    datum = {
        "message_log": [{"role": "user", "content": text, "token_ids": policy_ids}],
        "length": length,
        "extra_env_info": {MESSAGES_KEY: messages, **tools, **principle},
        "loss_multiplier": 0.0 if is_long else 1.0,
        "idx": idx,
    }
    task = {"task_name": datum_dict["task_name"]} if "task_name" in datum_dict else {}
    return {**datum, **task}


def register(name: str = ENVIRONMENT_NAME, python: str = sys.executable) -> None:
    """Register the environment and the processor with NeMo RL.

    Call it before NeMo RL's ``setup`` reads the settings. The environment's settings are under
    ``env.NAME``; the section ``data`` must name the environment and the processor. It sets
    ``RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0``, unless it is set: otherwise ray up to 2.55 hides all
    GPUs from the environment's actor, and a model of ``rm_model_file`` would run on the CPU.

    Args:
        name: name of the environment.
        python: the interpreter that runs the actor; this package must be installed there.

    Raises:
        ImportError: NeMo RL or ray is not installed.
        ValueError: the name is registered already.
    """
    from nemo_rl.data.processors import register_processor
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.environments.utils import register_env

    # NeMo RL passes the environment variables of this process to the actor.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    register_env(name, _ACTOR)
    ACTOR_ENVIRONMENT_REGISTRY[_ACTOR] = python
    register_processor(PROCESSOR_NAME, messages_processor)


def __getattr__(name: str) -> Any:
    """Create ``RewardModelActor`` when NeMo RL looks it up, because creating it needs ray."""
    if name != "RewardModelActor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import ray

    return ray.remote(max_concurrency=_MOST_CONCURRENT)(RewardModelEnvironment)


def _create_rewarder(config: RewardEnvironmentConfig) -> Rewarder:
    if bool(config.url) == (config.rm_model_file is not None):
        state = "both" if config.url else "neither"
        raise ConfigError(f"env: got {state} of url and rm_model_file, wanted one of them")
    if config.url:
        token = find_token(None, config.token_variable, "env.token")
        client = RewardClient(
            config.url,
            timeout_s=None,  # a step of any size is one call
            request_timeout_s=config.request_timeout_s,
            wait_s=config.wait_s,
            retry_s=config.retry_s,
            max_connections=_MOST_CONCURRENT,
            token=token,
        )
        return ServedScorer(client)
    from nemo_aligner.integrations.in_process import InProcessScorer

    return InProcessScorer.load(config)


def _check_all_judged(scored: ScoredRows) -> None:
    """Raise ServingError if a judge or function failed on a sample, or tokenizing it was too slow.

    It is not the policy's fault, and NeMo RL cannot leave the sample out.
    """
    if scored.unscored:
        row = min(scored.unscored)
        raise ServingError(
            f"{len(scored.unscored)} of {len(scored.rewards)} samples have no reward, and are not "
            f"at fault; sample {row}: {scored.errors[row]}. Fix the cause, and resume the run; "
            "refused_reward is only for rejected replies"
        )


def _build_conversation(log: Sequence[Mapping[str, Any]], info: Any) -> Text:
    """Build the conversation to score from a sample's message log and ``extra_env_info``.

    If ``info`` has the original messages, they are the prompt, and only the reply comes from the
    log. Else the whole log is the conversation. A ``principle`` of ``info`` is that of the sample.
    """
    turns = [_select_keys(turn) for turn in log]
    if not turns:
        raise DataError("message_logs: got a log without messages, wanted a prompt and its reply")
    extra: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
    prompt = extra.get(MESSAGES_KEY)
    if prompt is not None and not isinstance(prompt, list):
        raise DataError(
            f"extra_env_info.{MESSAGES_KEY}: got {short(prompt)}, wanted a list of the messages "
            f"before the reply. Use the data processor {PROCESSOR_NAME}, which writes it, or leave "
            "the key out."
        )
    messages = turns if prompt is None else [*prompt, turns[-1]]
    tools = extra.get(TOOLS_KEY)
    conversation = Conversation(messages, tools) if tools else messages
    return with_principle(conversation, extra.get(PRINCIPLE_KEY))


def _replace_reply(sample: Text) -> Text:
    assert not isinstance(sample, str)  # ``_build_conversation`` never returns a raw text
    return with_messages(sample, [*prompt_of(sample), _OTHER_REPLY])


def _select_keys(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {key: turn[key] for key in _TURN_KEYS if key in turn}
