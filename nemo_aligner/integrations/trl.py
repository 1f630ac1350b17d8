"""The reward function of TRL's GRPOTrainer: ``reward_funcs=reward_function(url)``.

TRL itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nemo_aligner.config.common import Aggregate
from nemo_aligner.contract.messages import Conversation, Text, messages_of, without_struct_nulls
from nemo_aligner.contract.readout import SCORE, one_reward, reward_weights
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ConfigError

_PATIENCE_S = 300.0  # a server that is started anew takes this long to load a large model


class RewardFunction:
    """Rewards of TRL's completions by running reward model servers; made by ``reward_function``.

    TRL logs it by its ``__name__``, and ``rewards/NAME/refused``, the part of the completions that
    the server refuses.
    """

    def __init__(
        self,
        client: RewardClient,
        attribute: str | None,
        name: str,
        tools: list[dict[str, Any]] | None = None,
        aggregate: Aggregate | None = None,
    ) -> None:
        """Score by ``attribute`` of the client's model; None as in ``reward_weights``."""
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
        """A reward for each completion, NaN for one that the server refuses.

        For TRL, NaN is no reward: such a completion has no part in the step.

        Args:
            prompts: texts, scored as they stand, or lists of messages, which get the template of
                the reward model.
            completions: what the policy said, of the same kind.
            columns: what else TRL gives; ``tools`` of each row, a list or its JSON text, and its
                ``log_metric`` are used.

        Raises:
            ServingError: no server answers, or it scores by another contract.
            ConfigError: the model has no such attribute, or no rewards of turns or steps that
                ``aggregate`` asks for.
        """
        if self._weights is None:
            contract = self._client.contract()
            if self._aggregate is Aggregate.last is contract.aggregation:
                self._aggregate = None  # which is every text's reward, with steps and without
            self._weights = reward_weights(contract, self._attribute)
            self._scale = contract.reward_scale
        # Prompts and tools are of a data set's rows, which Arrow keeps.
        rows = columns.get("tools") or [None] * len(prompts)
        tools = without_struct_nulls(rows, is_inside=True)
        texts = [
            _joined(without_struct_nulls(prompt), completion, own or self._tools)
            for prompt, completion, own in zip(prompts, completions, tools, strict=True)
        ]
        scored = self._client.score_rows(texts)
        if texts and "log_metric" in columns:
            refused = len(scored.errors) / len(texts)
            columns["log_metric"](f"rewards/{self.__name__}/refused", refused)
        rewards = scored.rewards
        if self._aggregate is not None:  # over what the policy said, not over the prompts
            sizes = [len(text if isinstance(text, str) else messages_of(text)) for text in prompts]
            rewards = scored.aggregated(self._aggregate, self._scale, sizes)
        return one_reward(rewards, self._weights).tolist()


def reward_function(
    url: str | Sequence[str],
    *,
    attribute: str | None = None,
    name: str = "reward_model",
    retry_s: float = _PATIENCE_S,
    tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
    aggregate: str | None = None,
    **options: Any,
) -> RewardFunction:
    """A reward function for TRL that asks the servers at ``url``.

    Args:
        url: ``http://host:port``, or those of several servers of the same model.
        attribute: which of several attributes; None weighs them as the contract does.
        name: what TRL's logs call it.
        tools: what conversations without tools of their own have: those that GRPOTrainer is given,
            as functions (their JSON is what transformers makes of them) or as JSON.
        aggregate: of a model with a reward for each turn or step, what makes one of a completion's:
            ``last``, ``min``, ``mean`` or ``product`` (``sum log sigmoid(r)``). None is the rule of
            its scoring contract, which is about the whole text.
        retry_s: for how long training waits for a server that is gone.
        options: others of ``RewardClient``, as ``expect`` and ``wait_s``.

    Raises:
        ConfigError: an option is unfit.
    """
    known = [each.value for each in Aggregate]
    if aggregate is not None and aggregate not in known:
        raise ConfigError(f"aggregate: got {aggregate!r}, wanted one of {', '.join(known)}")
    described = [_described(tool) for tool in tools or ()]
    client = RewardClient(url, retry_s=retry_s, **options)
    how = None if aggregate is None else Aggregate(aggregate)
    return RewardFunction(client, attribute, name, described or None, how)


def _described(tool: dict[str, Any] | Callable[..., Any]) -> dict[str, Any]:
    if isinstance(tool, dict):
        return tool
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(tool)
    return schema


def _joined(prompt: Text, completion: Text, tools: Any) -> Text:
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = prompt + completion
        # What is wrong with them, the server says of the row.
        return Conversation(messages, tools) if tools else messages
    kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise TypeError(f"prompts and completions: got {kinds}, wanted texts, or lists of messages")
