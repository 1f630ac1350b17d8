"""A verifier for NeMo Gym that takes the rewards of a reward model.

The responses are scored by a server or gateway of nemo_aligner that runs already (``server_url``),
or by a server that this environment starts (``model_path``). A sample that gets no reward
is masked: without a reward it says nothing about the policy.
"""

from __future__ import annotations

import json
import os
import sys
from ctypes import c_float
from pathlib import Path
from typing import Any, ClassVar, Literal

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    ReverifyMode,
    SimpleResourcesServer,
)
from nemo_gym.openai_utils import TOKEN_METADATA_FIELDS
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

# In a checkout, Gym puts the folder of all resources_servers on the path; where Gym is installed
# from PyPI, it puts only this folder there.
sys.path.append(str(Path(__file__).resolve().parents[2]))
from resources_servers.reward_model.servers import (
    NoRewardError,
    RewardServers,
    StartedServer,
)

# The server's failure kind for a rejected reply. The prefix marks kinds that Gym does not define.
REFUSED = "reward_model:refused_text"
# Prefix of the fields of an answer with the raw attributes.
_ATTRIBUTE = "attribute/"
# Prefixes of the kinds of failures that Gym should try again. A rollout without
# ``_ng_failure_class`` is final for Gym (``nemo_gym/rollout_collection.py``).
_RETRIED = ("transport_", "provider_unavailable", "judge_failed")
# Fields that are not sent to the servers: each item has the token ids of the whole dialogue before
# it, so they would exceed the limit of a request long before the text does.
_EACH_ITEM = {"__all__": set(TOKEN_METADATA_FIELDS)}
_NOT_SENT = {"responses_create_params": {"input": _EACH_ITEM}, "response": {"output": _EACH_ITEM}}
# Options that need ``model_path``. A server that runs already (``server_url``) has its own settings
# for the same things.
_WITH_MODEL_PATH = (
    "device",
    "batch_size",
    "max_length",
    "normalize_rewards",
    "reward_mean",
    "reward_std",
    "clip",
    "length_penalty",
    "length_penalty_from",
    "ensemble",
    "server_settings",
)


class RewardModelResourcesServerConfig(BaseResourcesServerConfig):
    """Options of the environment.

    Set ``server_url``, or set ``model_path`` and, if needed, the options declared after it.
    """

    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.STATELESS

    server_url: str | list[str] | None = Field(None, description="servers of one model")
    server_token_variable: str | None = Field(
        None, description="environment variable with the bearer token of server_url"
    )
    model_path: str | None = Field(None, description="a reward model of nemo_aligner, to serve")
    attribute: str | None = Field(None, description="the only one to use; null: their weighted sum")
    refused_reward: float | None = Field(
        None, description="reward of a reply that the model rejects; null: the sample is masked"
    )
    timeout_s: float = Field(600.0, gt=0, description="deadline of a request, in seconds")
    retry_s: float = Field(300.0, ge=0, description="how long to retry if no server answers")

    command: list[str] = Field(["nemo-aligner"], description="command that runs nemo-aligner")
    start_s: float = Field(600.0, gt=0, description="time to load the model, in seconds")
    device: Literal["cuda", "cpu"] | None = Field(None, description="null: a GPU if there is one")
    batch_size: int | None = Field(None, gt=0, description="replies of max_length in one pass")
    max_length: int | None = Field(None, gt=0, description="in tokens, see batch_size")
    normalize_rewards: bool = Field(False, description="subtract a mean, divide by a std")
    reward_mean: float | None = Field(None, description="null: as measured in training")
    reward_std: float | None = Field(None, gt=0, description="null: as measured in training")
    clip: list[float] | None = Field(None, description="[low, high] of the rewards")
    length_penalty: float = Field(0.0, ge=0, description="penalty per token of the reply")
    length_penalty_from: int = Field(0, ge=0, description="tokens without a penalty")
    ensemble: list[str] = Field([], description="reward models besides model_path")
    ensemble_combine: Literal["mean", "min", "lower_bound"] = "mean"
    ensemble_k: float = Field(1.0, ge=0, description="lower_bound: mean - k * deviation")
    server_settings: list[str] = Field([], description="more settings of nemo-aligner serve")

    @model_validator(mode="after")
    def _check_options(self) -> RewardModelResourcesServerConfig:
        if (self.server_url is None) == (self.model_path is None):
            raise ValueError("server_url, model_path: set exactly one of them")
        if self.server_token_variable is not None and self.server_url is None:
            raise ValueError("server_token_variable: set it only together with server_url")
        model_options = [
            name for name in _WITH_MODEL_PATH if getattr(self, name) not in (None, False, 0, [])
        ]
        if self.server_url is not None and model_options:
            raise ValueError(
                f"{', '.join(model_options)}: set them only together with model_path; a running "
                "server has its own settings: shaping.*, ensemble.*, model.*"
            )
        if self.model_path is not None and (self.num_workers or 1) > 1:
            raise ValueError(
                "num_workers: each worker would load the model; set it to 1, or use server_url"
            )
        if (self.reward_mean is None) != (self.reward_std is None):
            raise ValueError("reward_mean, reward_std: only one is set; set both or none")
        if self.reward_mean is not None and not self.normalize_rewards:
            raise ValueError("reward_mean, reward_std: they need normalize_rewards: true")
        if self.batch_size is not None and self.max_length is None:
            raise ValueError(
                "batch_size: also set max_length; a pass takes batch_size * max_length tokens"
            )
        return self

    def settings(self) -> list[str]:
        """List the settings of ``nemo-aligner serve`` for the model at ``model_path``."""
        pairs: dict[str, Any] = {"rm_model_file": self.model_path}
        if self.batch_size is not None and self.max_length is not None:
            pairs["model.micro_batch_tokens"] = self.batch_size * self.max_length
        if self.normalize_rewards:
            pairs["shaping.standardize"] = "contract" if self.reward_mean is None else "given"
        if self.reward_mean is not None:
            pairs |= {"shaping.mean": [self.reward_mean], "shaping.std": [self.reward_std]}
        if self.clip is not None:
            pairs["shaping.clip"] = self.clip
        if self.length_penalty:
            pairs["shaping.length_penalty"] = self.length_penalty
            pairs["shaping.length_penalty_from"] = self.length_penalty_from
        if self.ensemble:
            pairs["ensemble.files"] = json.dumps(self.ensemble)
            pairs["ensemble.combine"] = self.ensemble_combine
            pairs["ensemble.k"] = self.ensemble_k
        return [*(f"{key}={value}" for key, value in pairs.items()), *self.server_settings]


class RewardModelRunRequest(BaseRunRequest):
    """A row of data with the prompt.

    If it has ``reward_threshold``, the reward is 1 from this threshold on, else 0. ``principle`` is
    the one by which the response is rewarded, for a model that was trained with principles.
    ``instance_config`` is passed on.
    """

    reward_threshold: float | None = None
    principle: str | None = None
    instance_config: Any = None


class RewardModelVerifyRequest(RewardModelRunRequest, BaseVerifyRequest):
    """A row of data with the policy's response, which is to be scored."""


class RewardModelVerifyResponse(BaseVerifyResponse):
    """The reward of a response, and how it came about.

    Attributes:
        reward_threshold: the threshold of the row of data, if it has one.
        raw_reward: the reward before the threshold; None if there is no reward.
        reward_components: what each attribute adds to ``reward``. NeMo RL's GDPO normalizes these
            values one by one. All share a ``refused_reward`` equally. Empty if the reward is not a
            sum of attributes.
        truncated: True if the sample was truncated to the model's maximum length.
        reply_cut: True if the policy stopped at its maximum number of tokens; None if no server
            has answered.
        contract_hash: hash of the model's scoring contract.
        model_fingerprint: fingerprint of the model's weights.

    The raw attributes are further fields, ``attribute/NAME``, of which Gym computes statistics.
    ``instance_config`` repeats ``mask_sample``, because NeMo RL reads it there. A failure that may
    be temporary has ``_ng_failure_class``: Gym runs such a rollout again on resume.
    """

    model_config = ConfigDict(extra="allow")

    reward_threshold: float | None = None
    raw_reward: float | None = None
    reward_components: dict[str, float] = Field(default_factory=dict)
    truncated: bool = False
    reply_cut: bool | None = None
    contract_hash: str | None = None
    model_fingerprint: str | None = None


class RewardModelResourcesServer(SimpleResourcesServer):
    """Server that answers ``/verify``. It offers the policy no tools, and keeps no state."""

    ray_enabled = False
    config: RewardModelResourcesServerConfig
    _started: StartedServer | None = PrivateAttr(None)
    _servers: RewardServers | None = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        """Start a server for ``model_path``, if it is set, so that the model is loaded early."""
        super().model_post_init(context)
        config = self.config
        if config.model_path is not None:
            self._started = StartedServer(config.command, config.settings(), config.device)

    async def verify(self, body: RewardModelVerifyRequest) -> RewardModelVerifyResponse:
        """Score a response; if it gets no reward, the answer has the reason.

        Raises:
            FailedServerError: the model failed; Gym gets status 500, and the run stops.
            ValueError: ``server_url`` is invalid.
        """
        rollout = body.model_dump(
            include={"responses_create_params", "response", "principle"},
            exclude=_NOT_SENT,
            exclude_none=True,
        )
        reply_cut = None
        names: list[str] = []
        try:
            answer = await (await self._find_servers()).verify(rollout)
            kind, reason = answer["failure_kind"], answer["failure_reason"]
            reply_cut, names = answer.get("reply_cut"), [*answer.get("reward_components", ())]
            if kind is None:
                return self._build_response(body, answer)
        except NoRewardError as error:
            kind, reason = error.kind, str(error)
        reward = None
        if kind == REFUSED:  # the model rejects the reply, which counts as below any threshold
            reward = self.config.refused_reward if body.reward_threshold is None else 0.0
        components: dict[str, float] = {}
        if reward is not None and self._is_sum(body):
            # NeMo RL's GDPO takes 0 for a missing component, which may be the best of its group.
            components = {name: reward / len(names) for name in names}
        failure_class = {"_ng_failure_class": kind} if kind.startswith(_RETRIED) else {}
        return RewardModelVerifyResponse(
            **_echo_fields(body, is_masked=reward is None),
            **failure_class,
            reward=reward or 0.0,
            reward_components=components,
            reply_cut=reply_cut,
            failure_kind=kind,
            failure_reason=reason,
        )

    async def close(self) -> None:
        """Close the connections, and stop the server if ``model_post_init`` has started one."""
        if self._servers is not None:
            await self._servers.close()
        if self._started is not None:
            self._started.stop()

    async def _find_servers(self) -> RewardServers:
        """Return the client of the servers, made at the first call.

        If ``model_post_init`` has started a server, wait until it is ready.
        """
        if self._servers is None:
            config = self.config
            urls = config.server_url or []
            if self._started is not None:
                urls = [await self._started.url(config.start_s)]
            urls = [urls] if isinstance(urls, str) else urls
            token = _read_token(config.server_token_variable)
            servers = RewardServers(urls, config.timeout_s, config.retry_s, token)
            # Several requests may have waited above; all use the client that the first one made.
            self._servers = self._servers or servers
        return self._servers

    def _is_sum(self, body: RewardModelVerifyRequest) -> bool:
        """Return whether the reward is the sum of the attributes by their weights."""
        return self.config.attribute is None and body.reward_threshold is None

    def _build_response(
        self, body: RewardModelVerifyRequest, answer: dict[str, Any]
    ) -> RewardModelVerifyResponse:
        attribute, threshold = self.config.attribute, body.reward_threshold
        fields = {name: value for name, value in answer.items() if name.startswith(_ATTRIBUTE)}
        attributes = {name.removeprefix(_ATTRIBUTE): value for name, value in fields.items()}
        if attribute not in (None, *attributes):
            reason = f"attribute: got {attribute!r}, wanted one of {', '.join(attributes)}"
            raise NoRewardError("verifier_error", reason)
        # The answer's ``reward`` is not used: a server with a threshold has replaced it by 1 or 0.
        reward = answer["raw_reward"] if attribute is None else attributes[attribute]
        return RewardModelVerifyResponse(
            **_echo_fields(body, is_masked=False),
            **fields,
            reward=reward if threshold is None else float(_reaches(reward, threshold)),
            raw_reward=reward,
            reward_components=answer["reward_components"] if self._is_sum(body) else {},
            truncated=answer["truncated"],
            reply_cut=answer.get("reply_cut"),
            contract_hash=answer["contract_hash"],
            model_fingerprint=answer.get("model_fingerprint"),
        )


def _reaches(reward: float, threshold: float) -> bool:
    """Compare as float32, which rewards are: one of 0.9 is below the float64 number 0.9."""
    return c_float(reward).value >= c_float(threshold).value


def _echo_fields(body: RewardModelVerifyRequest, is_masked: bool) -> dict[str, Any]:
    """Return the fields of a request, and the two flags that exclude a masked sample."""
    config = body.instance_config if isinstance(body.instance_config, dict) else {}
    return body.model_dump() | {
        "mask_sample": is_masked,
        "instance_config": {**config, "mask_sample": is_masked},
    }


def _read_token(variable: str | None) -> str | None:
    """Read the bearer token; NoRewardError if the environment variable is not set."""
    if variable is not None and variable not in os.environ:
        reason = f"server_token_variable: environment variable {variable} is not set: export it"
        raise NoRewardError("verifier_error", reason)
    return None if variable is None else os.environ[variable].strip()


if __name__ == "__main__":
    RewardModelResourcesServer.run_webserver()
