"""Running servers as sources of rewards; the path of a URL says which protocol it is.

================  ==================================================================================
no path           this package's own server, by KServe
``/classify``     vLLM's, as its server 0.32 has it; also the gateway's
``/get_reward``   OpenRLHF's remote reward model, as of its 0.11; also the gateway's
================  ==================================================================================

What the last two are sent and answer is in ``serving/wire/vllm.py`` and ``openrlhf.py``, which
serve the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from nemo_aligner.config.evaluation import SourceConfig
from nemo_aligner.console import Counter
from nemo_aligner.errors import ConfigError, ServingError, short
from nemo_aligner.evaluation.sources.base import RewardSource, Score
from nemo_aligner.serving.client.posting import JsonAnswer, PostingAddress, post_all
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.client.server import NoKServeError
from nemo_aligner.serving.tokens import find_token
from nemo_aligner.text.messages import Text, as_json
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.text.turn_marks import TurnMarkError, write_conversation

_log = logging.getLogger(__name__)
_REFUSED = (400, 413, 422)
_QUERIES = 16
_ONE_REWARD = {"reward": 1.0}


@contextmanager
def open_server(url: str, config: SourceConfig) -> Iterator[RewardSource]:
    """A server as a source, until the end of the block.

    Raises:
        ConfigError: the URL has another path, or a setting is not for this protocol.
        ServingError: a server of ours does not answer, or publishes no contract.
    """
    path = urlsplit(url).path.rstrip("/")
    if path == "":
        token = _bearer_token(config)
        with RewardClient(url, timeout_s=config.timeout_s, token=token) as client:
            yield _ours(url, client)
        return
    if path not in ("/classify", "/get_reward"):
        raise ConfigError(
            f"server: got {url}, wanted http://HOST:PORT of a server of ours, or one that ends in "
            "/classify (vLLM) or /get_reward (OpenRLHF)"
        )
    address = PostingAddress(url, _bearer_token(config), config.timeout_s)
    weights = config.attribute_weights or _ONE_REWARD
    if path == "/classify":
        score: Score = partial(_ask_vllm, address, tuple(weights))
    else:
        tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
        score = partial(_ask_openrlhf, address, tokenizer, tuple(weights))
    yield RewardSource(url, tuple(weights), tuple(weights.values()), score)


def _bearer_token(config: SourceConfig) -> str | None:
    return find_token(None, config.token_variable, "source.token")


def _ours(url: str, client: RewardClient) -> RewardSource:
    try:
        contract = client.contract()
    except NoKServeError as error:
        raise ServingError(
            f"server: {error}; wanted {url}/classify for vLLM or the gateway, {url}/get_reward for "
            "OpenRLHF's remote reward model"
        ) from error
    return RewardSource(
        name=url,
        attributes=tuple(contract.attributes),
        attribute_weights=tuple(contract.attribute_weights),
        score=partial(_ask_ours, client, contract.attributes),
        contract=contract,
    )


def _ask_ours(client: RewardClient, attributes: Sequence[str], texts: Sequence[Text]) -> np.ndarray:
    """What is wrong with texts that it refuses, the client logs."""
    rewards = client.score(texts, on_error="nan")
    if np.isnan(rewards).all():  # a client that has seen no reward does not know how many there are
        return np.full((len(texts), len(attributes)), np.nan, dtype=np.float32)
    return rewards


def _ask_vllm(
    address: PostingAddress, attributes: Sequence[str], texts: Sequence[Text]
) -> np.ndarray:
    """A request for each text, as vLLM refuses a whole request for one text of it."""
    answers = post_all(
        address, [_vllm_body(text) for text in texts], Counter("scoring", "texts").show
    )
    rewards = np.full((len(texts), len(attributes)), np.nan, dtype=np.float32)
    refused = []
    for row, answer in enumerate(answers):
        if answer.status in _REFUSED:
            refused.append(row)
        else:
            rewards[row] = _vllm_rewards(address, attributes, answer)
    if refused:
        first = _error(address, answers[refused[0]])
        _log.warning("%d of %d texts have no reward; %s", len(refused), len(texts), first)
    return rewards


def _vllm_body(text: Text) -> dict[str, Any]:
    if isinstance(text, str):
        asked: dict[str, Any] = {"input": text}
    else:
        conversation = as_json(text)
        asked = {"messages": conversation} if isinstance(conversation, list) else conversation
    return {**asked, "use_activation": False}


def _vllm_rewards(
    address: PostingAddress, attributes: Sequence[str], answer: JsonAnswer
) -> list[float]:
    try:
        rewards = [float(number) for number in _good(address, answer)["data"][0]["probs"]]
    except (LookupError, TypeError, ValueError) as error:
        raise _error(address, answer) from error
    if len(rewards) != len(attributes):
        raise ServingError(
            f"{address.url}: got {len(rewards)} numbers for a text, wanted {len(attributes)} "
            f"({', '.join(attributes)}); source.attribute_weights says their names and weights"
        )
    return rewards


def _ask_openrlhf(
    address: PostingAddress,
    tokenizer: Tokenizer | None,
    attributes: Sequence[str],
    texts: Sequence[Text],
) -> np.ndarray:
    if len(attributes) != 1:
        raise ConfigError(
            f"source.attribute_weights: got {len(attributes)} names, wanted one or none: "
            "/get_reward answers one number for a text"
        )
    queries: dict[int, str] = {}
    for row, text in enumerate(texts):
        try:
            queries[row] = _written(text, tokenizer)
        except TurnMarkError as error:
            _log.warning("text %d has no reward; %s", row, error)
    rewards = np.full((len(texts), 1), np.nan, dtype=np.float32)
    rewards[[*queries], 0] = _ask_queries(address, [*queries.values()], _QUERIES)
    return rewards


def _ask_queries(address: PostingAddress, queries: Sequence[str], size: int) -> np.ndarray:
    """``[N]`` rewards, so many of a request; those of one that is refused are asked one by one."""
    rewards = np.full(len(queries), np.nan, dtype=np.float32)
    chunks = [slice(start, start + size) for start in range(0, len(queries), size)]
    answers = post_all(
        address,
        [{"query": queries[chunk]} for chunk in chunks],
        Counter("scoring", "requests").show,
    )
    for chunk, answer in zip(chunks, answers, strict=True):
        asked = queries[chunk]
        if answer.status not in _REFUSED:
            rewards[chunk] = _openrlhf_rewards(address, answer, len(asked))
        elif len(asked) > 1:
            rewards[chunk] = _ask_queries(address, asked, 1)
        else:
            _log.warning("a text has no reward; %s", _error(address, answer))
    return rewards


def _written(text: Text, tokenizer: Tokenizer | None) -> str:
    """As the policy's tokenizer writes it, which is what OpenRLHF's trainer sends."""
    if isinstance(text, str):
        return text
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            "source.tokenizer: got none with a chat template, wanted the folder of the policy's "
            "tokenizer: /get_reward takes texts, and these are conversations"
        )
    return write_conversation(tokenizer.chat_template, text, tokenizer)


def _openrlhf_rewards(address: PostingAddress, answer: JsonAnswer, count: int) -> list[float]:
    try:
        rewards = [float(reward) for reward in _good(address, answer)["rewards"]]
    except (LookupError, TypeError, ValueError) as error:
        raise _error(address, answer) from error
    if len(rewards) != count:
        raise ServingError(f"{address.url}: got {len(rewards)} rewards for {count} texts")
    return rewards


def _good(address: PostingAddress, answer: JsonAnswer) -> Mapping[str, Any]:
    if answer.status != 200 or not isinstance(answer.body, Mapping):
        raise _error(address, answer)
    return answer.body


def _error(address: PostingAddress, answer: JsonAnswer) -> ServingError:
    return ServingError(f"{address.url}: status {answer.status}, got {short(answer.body)}")
