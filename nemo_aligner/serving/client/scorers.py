"""Scorers on running servers, one class for each protocol that an evaluation can query.

``serving/protocols/`` has the server side of ``/classify`` and ``/get_reward``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.messages import Text, as_json
from nemo_aligner.contract.principles import refuse_principle
from nemo_aligner.contract.scorer import OnError, ScoredRows
from nemo_aligner.contract.template_check import freeze_date
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import write_conversation
from nemo_aligner.serving.client.posting import JsonAnswer, PostingAddress, post_all
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.failures import FailureKind
from nemo_aligner.utils.console import Counter
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError, short

_log = logging.getLogger(__name__)
_QUERIES = 16  # maximum number of samples per request to ``/get_reward``


@dataclass(frozen=True)
class ServerSettings:
    """Names of the settings that describe a server, for errors; those of ``evaluate`` by default.

    Attributes:
        server: the setting with the URL.
        token: common prefix of the settings of the token, as ``find_token`` takes it.
    """

    server: str = "server"
    attribute_weights: str = "source.attribute_weights"
    tokenizer: str = "source.tokenizer"
    token: str = "source.token"
    timeout_s: str = "source.timeout_s"


class ServedScorer:
    """Scores on reward model servers of this package, over KServe."""

    def __init__(self, client: RewardClient) -> None:
        """Fetch the scoring contract, whose attributes name the columns of the rewards.

        Raises:
            ServingError: no server answers, or the server publishes no contract.
        """
        self._client = client
        self.contract = client.contract()

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the columns of the rewards."""
        return tuple(self.contract.attributes)

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the server's model in its latest answer; None if it sends none."""
        return self._client.fingerprint

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score N samples: rewards ``[N, A]``, NaN where none; the client logs the reasons."""
        scored = self._client.score_rows(samples, on_error=on_error)
        if len(scored.errors) < len(samples):
            return scored
        # If no sample has a reward, the server's answer does not show the number of attributes.
        shape = (len(samples), len(self.attributes))
        return replace(scored, rewards=np.full(shape, np.nan, dtype=np.float32))

    def find_rejected(self, samples: Sequence[Text]) -> dict[int, str]:
        """Return why samples are rejected, by their number; the servers do not count them."""
        return self._client.score_rows(samples, is_probe=True).rejected

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


@dataclass(frozen=True)
class VllmScorer:
    """Scores with ``/classify`` of vLLM (tested with 0.32), or of a server of this package.

    ``attributes`` names the numbers in an answer, in their order. Each sample is sent in a separate
    request, because vLLM rejects a whole request for one bad sample.
    """

    address: PostingAddress
    attributes: tuple[str, ...]
    settings: ServerSettings = ServerSettings()
    contract: None = None

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score N samples, one request each: rewards ``[N, A]``, with NaN for rejected samples.

        Raises:
            ServingError: the server does not answer, or an answer does not have one number per
                attribute.
        """
        bodies: dict[int, dict[str, Any]] = {}
        errors: dict[int, str] = {}
        for row, sample in enumerate(samples):
            try:
                bodies[row] = _vllm_body(sample)
            except DataError as error:
                errors[row] = str(error)
        answers = post_all(self.address, [*bodies.values()], Counter("scoring", "samples").show)
        rewards = np.full((len(samples), len(self.attributes)), np.nan, dtype=np.float32)
        for row, answer in zip(bodies, answers, strict=True):
            if _rejects_sample(answer):
                errors[row] = str(_build_error(self.address, answer))
            else:
                rewards[row] = self._read_rewards(answer)
        return _build_scored(rewards, errors, on_error)

    def _read_rewards(self, answer: JsonAnswer) -> list[float]:
        numbers = _read_numbers(self.address, answer, lambda body: body["data"][0]["probs"])
        if len(numbers) != len(self.attributes):
            raise ServingError(
                f"{self.address.name}: got {len(numbers)} numbers for a sample, wanted "
                f"{len(self.attributes)} ({', '.join(self.attributes)}); set the names and weights "
                f"of the numbers in {self.settings.attribute_weights}"
            )
        return numbers


def _vllm_body(sample: Text) -> dict[str, Any]:
    if isinstance(sample, str):
        body: dict[str, Any] = {"input": sample}
    else:
        refuse_principle(sample, "vLLM's /classify")
        conversation = as_json(sample)
        if isinstance(conversation, list):
            body = {"messages": conversation}
        else:
            messages = conversation.pop("messages")
            # vLLM silently ignores tools and documents beside the messages.
            body = {"messages": messages, "chat_template_kwargs": conversation}
    # Raw logits: by default vLLM applies a sigmoid or softmax, which changes the reward.
    return {**body, "use_activation": False}


@dataclass(frozen=True)
class QueryScorer:
    """Scores with ``/get_reward`` of OpenRLHF (tested with 0.11), or of a server of this package.

    ``/get_reward`` takes raw texts, so conversations are rendered with the chat template of the
    policy's ``tokenizer``.
    """

    address: PostingAddress
    attributes: tuple[str, ...]
    tokenizer: Tokenizer | None = None
    settings: ServerSettings = ServerSettings()
    contract: None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if there are several attributes: ``/get_reward`` answers one number."""
        if len(self.attributes) != 1:
            raise ConfigError(
                f"{self.settings.attribute_weights}: got {len(self.attributes)} names, wanted one "
                "or none: /get_reward answers one number per sample"
            )

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score N samples: rewards ``[N, 1]``, with NaN for rejected samples.

        Raises:
            ConfigError: a sample is a conversation, and there is no chat template to render it.
            ServingError: the server does not answer, or not every query has one number in the
                answer.
        """
        queries: dict[int, str] = {}
        errors: dict[int, str] = {}
        for row, sample in enumerate(samples):
            try:
                queries[row] = self._write(sample)
            except DataError as error:
                errors[row] = str(error)
        rewards = np.full((len(samples), 1), np.nan, dtype=np.float32)
        self._send_queries(queries, rewards, errors, _QUERIES)
        return _build_scored(rewards, errors, on_error)

    def _send_queries(
        self, queries: Mapping[int, str], rewards: np.ndarray, errors: dict[int, str], size: int
    ) -> None:
        """Send queries, and write each one's reward to ``rewards``, or its error to ``errors``.

        The queries of a rejected request are sent again one by one.

        Args:
            queries: row number -> raw text.
            rewards: ``[N, 1]`` array to be filled in.
            errors: dict to be filled in: row number -> reason of the rejection.
            size: queries per request.
        """
        chunks = [[*queries][start : start + size] for start in range(0, len(queries), size)]
        bodies = [{"query": [queries[row] for row in rows]} for rows in chunks]
        answers = post_all(self.address, bodies, Counter("scoring", "requests").show)
        rejected: dict[int, str] = {}
        for rows, answer in zip(chunks, answers, strict=True):
            if not _rejects_sample(answer):
                rewards[rows, 0] = self._read_rewards(answer, len(rows))
            elif len(rows) > 1:
                rejected.update((row, queries[row]) for row in rows)
            else:
                errors[rows[0]] = str(_build_error(self.address, answer))
        if rejected:
            self._send_queries(rejected, rewards, errors, 1)

    def _write(self, sample: Text) -> str:
        """Render a sample with the policy's chat template, as OpenRLHF's trainer does."""
        tokenizer = self.tokenizer
        if isinstance(sample, str):
            return sample
        if tokenizer is None or not tokenizer.chat_template:
            raise ConfigError(
                f"{self.settings.tokenizer}: got none with a chat template, wanted the folder of "
                "the policy's tokenizer: /get_reward takes raw texts, and the samples are "
                "conversations"
            )
        template = freeze_date(ChatTemplate.of(tokenizer.chat_template, tokenizer))
        return write_conversation(template, sample, tokenizer)

    def _read_rewards(self, answer: JsonAnswer, count: int) -> list[float]:
        rewards = _read_numbers(self.address, answer, lambda body: body["rewards"])
        if len(rewards) != count:
            raise ServingError(
                f"{self.address.name}: got {len(rewards)} rewards for {count} samples, wanted one "
                "for each sample"
            )
        return rewards


def _rejects_sample(answer: JsonAnswer) -> bool:
    """Return whether an unsuccessful answer blames the sample, which then gets no reward.

    Any other failure ends the whole call.
    """
    return FailureKind.of_status(answer.status).reaction == "skip"


def _build_scored(rewards: np.ndarray, errors: dict[int, str], on_error: OnError) -> ScoredRows:
    for row in sorted(errors)[:1]:
        if on_error == "raise":
            raise ServingError(f"row {row}: {errors[row]}")
        reason = f"row {row}: {errors[row]}"
        _log.warning("%d of %d samples have no reward; %s", len(errors), len(rewards), reason)
    return ScoredRows(rewards, dict(sorted(errors.items())), np.zeros(len(rewards), dtype=bool))


def _read_numbers(address: PostingAddress, answer: JsonAnswer, read: Any) -> list[float]:
    """Extract the numbers from a successful answer's body with ``read``.

    Raise ServingError if it fails.
    """
    if answer.status != 200 or not isinstance(answer.body, Mapping):
        raise _build_error(address, answer)
    try:
        return [float(number) for number in read(answer.body)]
    except (LookupError, TypeError, ValueError) as error:
        raise _build_error(address, answer) from error


def _build_error(address: PostingAddress, answer: JsonAnswer) -> ServingError:
    return ServingError(f"{address.name}: status {answer.status}, got {short(answer.body)}")
