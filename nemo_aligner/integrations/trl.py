"""A reward function for TRL's GRPOTrainer: ``reward_funcs=reward_function(url)``.

Importing this module does not import TRL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_aligner.config.common import Aggregate
from nemo_aligner.contract.messages import (
    REASONING,
    Conversation,
    Text,
    messages_of,
    without_struct_nulls,
)
from nemo_aligner.contract.readout import SCORE, one_reward, reward_weights
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_START_S = 60.0  # default of ``wait_s``: time for a server that was started with the training
_PATIENCE_S = 300.0  # default of ``retry_s``: time for a restarted server to load a large model
# Default deadlines: a step of any size is one call, so only its requests have one.
_DEADLINES = {"timeout_s": None, "request_timeout_s": 600.0}


class RewardFunction:
    """Scores TRL's completions on reward model servers; created by ``reward_function``.

    TRL logs the rewards under ``__name__``. This class adds ``rewards/NAME/refused`` to TRL's logs:
    the fraction of completions that the server rejects.
    """

    def __init__(
        self,
        client: RewardClient,
        attribute: str | None,
        name: str,
        tools: list[dict[str, Any]] | None = None,
        aggregate: Aggregate | None = None,
        drops_reasoning: bool = False,
        refused_reward: float | None = None,
    ) -> None:
        """Store the options, which ``reward_function`` has checked; its docstring explains them."""
        self._drops_reasoning = drops_reasoning
        self._refused_reward = refused_reward
        self._has_warned_of_reasoning = False
        self._aggregate = aggregate
        self._tools = tools
        self.__name__ = name
        self._client = client
        self._attribute = attribute
        self._weights: tuple[float, ...] | None = None
        self._scale = SCORE

    def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        """Score each completion; ``refused_reward`` for one that the server rejects.

        Without ``refused_reward`` it gets NaN; so does one that a judge or function of a gateway
        fails on. TRL leaves a completion out of the step only if all of the trainer's reward
        functions return NaN; otherwise it adds up the others' rewards, which counts this one as 0.

        Args:
            prompts: raw texts, scored unchanged, or lists of messages, which are written in the
                chat template of the reward model.
            completions: the policy's completions, of the same kind.
            columns: further arguments from TRL. Two of them are used: ``tools``, with a list or a
                JSON string per row, and the function ``log_metric``.

        Raises:
            ServingError: no server answers, or it has another scoring contract.
            ConfigError: the model has no such attribute, or it has no rewards of turns or steps,
                but ``aggregate`` is set.
        """
        if self._weights is None:
            contract = self._client.contract()
            if self._aggregate is Aggregate.last is contract.aggregation:
                self._aggregate = None  # the server combines steps by this rule already
            self._weights = reward_weights(contract, self._attribute)
            self._scale = contract.reward_scale
            if isinstance(next(iter(prompts), None), str):
                _warn_of_raw_texts(self._client.sample_frame(), prompts, completions)
        # Arrow fills missing keys of prompts and tools with nulls, which are removed here.
        rows = columns.get("tools") or [None] * len(prompts)
        tools = without_struct_nulls(rows, is_inside=True)
        if self._drops_reasoning:
            completions = [*map(_without_reasoning, completions)]
        samples = [
            _join(without_struct_nulls(prompt), completion, row_tools or self._tools)
            for prompt, completion, row_tools in zip(prompts, completions, tools, strict=True)
        ]
        scored = self._client.score_rows(samples)
        self._warn_of_reasoning(completions, scored.rejected)
        if samples and "log_metric" in columns:
            refused = len(scored.rejected) / len(samples)
            columns["log_metric"](f"rewards/{self.__name__}/refused", refused)
        rewards = scored.rewards
        if self._aggregate is not None:  # steps in the prompts are not combined
            sizes = [
                len(prompt if isinstance(prompt, str) else messages_of(prompt))
                for prompt in prompts
            ]
            rewards = scored.aggregated(self._aggregate, self._scale, sizes)
        values = one_reward(rewards, self._weights)
        if self._refused_reward is not None:
            values[list(scored.rejected)] = self._refused_reward
        return values.tolist()

    def _warn_of_reasoning(self, completions: Sequence[Text], errors: Mapping[int, str]) -> None:
        """Log the first rejected completion with reasoning, and the option that may help."""
        row = next((row for row in errors if _has_reasoning(completions[row])), None)
        if row is None or self._has_warned_of_reasoning:
            return
        self._has_warned_of_reasoning = True
        logger.warning(
            "completion %d, which has reasoning, gets no reward: %s. If the reward model's chat "
            "template has no reasoning, pass reasoning='drop' to reward_function",
            row,
            errors[row],
        )


def reward_function(
    url: str | Sequence[str],
    *,
    attribute: str | None = None,
    name: str | None = None,
    retry_s: float = _PATIENCE_S,
    tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
    aggregate: str | None = None,
    reasoning: str = "keep",
    refused_reward: float | None = None,
    wait_s: float = _START_S,
    **options: Any,
) -> RewardFunction:
    """Create a reward function for TRL that queries the servers at ``url``.

    Args:
        url: ``http://host:port``, or a list of such URLs of servers of the same model.
        attribute: which of several attributes is the reward; None merges them by the weights of
            the scoring contract.
        name: name in TRL's logs; None stands for ``attribute`` or, without it, ``reward_model``.
            Several functions of one trainer need different names.
        tools: tools of conversations that have none in their row: those that GRPOTrainer gets, as
            functions (converted by transformers) or as JSON.
        aggregate: how a model's rewards of turns or steps become one reward of a completion:
            ``last``, ``min``, ``mean`` or ``product`` (``sum log sigmoid(r)``). Steps in the prompt
            are ignored. None keeps the rule of the scoring contract, which includes these steps.
        reasoning: ``drop`` scores completions without the reasoning that TRL has parsed out of
            them; ``keep`` leaves it in the messages, and the server rejects them if the reward
            model's chat template has no reasoning.
        refused_reward: the reward of a completion that the server rejects. With None it is left out
            of the step, but counts as 0 if the trainer has another reward function: set it then.
        retry_s: how long training waits for a server that is gone, in seconds.
        wait_s: how long the first step waits for a server that is not up yet, in seconds.
        options: more options of ``RewardClient``, e.g. ``expect``. By default there is no
            ``timeout_s``, and ``request_timeout_s`` is 600.

    Raises:
        ConfigError: an option is invalid.
    """
    rules = [rule.value for rule in Aggregate]
    if aggregate is not None and aggregate not in rules:
        raise ConfigError(f"aggregate: got {aggregate!r}, wanted one of {', '.join(rules)}")
    if reasoning not in ("keep", "drop"):
        raise ConfigError(f"reasoning: got {reasoning!r}, wanted keep or drop")
    schemas = [_schema_of(tool) for tool in tools or ()]
    client = RewardClient(url, retry_s=retry_s, wait_s=wait_s, **(_DEADLINES | options))
    rule = None if aggregate is None else Aggregate(aggregate)
    return RewardFunction(
        client,
        attribute,
        name or attribute or "reward_model",
        schemas or None,
        rule,
        drops_reasoning=reasoning == "drop",
        refused_reward=refused_reward,
    )


def _warn_of_raw_texts(
    frame: SampleFrame | None, prompts: Sequence[Text], completions: Sequence[Text]
) -> None:
    """Log how the first of TRL's strings differs from what the model's chat template writes.

    Args:
        frame: what the template writes around a sample; None if the server does not publish it.
        prompts: strings.
        completions: strings, which TRL has decoded without special tokens.
    """
    text = f"{prompts[0]}{completions[0]}"
    fault = frame and frame.find_fault(text)
    end = frame.end.strip() if frame else ""
    if end and not fault and not text.rstrip().endswith(end):
        fault = f"it ends without {end!r}, because TRL removes special tokens from completions"
    if fault:
        logger.warning(
            "prompts and completions are strings, which the server scores without the model's chat "
            "template. The first one is not a sample of that template: %s. Give the data set "
            "prompts that are lists of messages. Ignore this if the model was trained on raw texts",
            fault,
        )


def _has_reasoning(completion: Text) -> bool:
    return any(turn.get(key) for turn in messages_of(completion) for key in REASONING)


def _without_reasoning(completion: Text) -> Text:
    if isinstance(completion, str):
        return completion
    return [
        {key: value for key, value in turn.items() if key not in REASONING}
        for turn in messages_of(completion)
    ]


def _schema_of(tool: dict[str, Any] | Callable[..., Any]) -> dict[str, Any]:
    if isinstance(tool, dict):
        return tool
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(tool)
    return schema


def _join(prompt: Text, completion: Text, tools: Any) -> Text:
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = prompt + completion
        # Messages are not checked here: the server checks them, and its error names the row.
        return Conversation(messages, tools) if tools else messages
    kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise TypeError(f"prompts and completions: got {kinds}, wanted strings, or lists of messages")
