"""Sources of rewards: a model file of ours, a running server, or a transformers model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.checkpoint.nemo.fingerprint import check_expected_fingerprint, read_fingerprint
from nemo_aligner.config.common import Aggregate, Overlong, RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig, SourceConfig
from nemo_aligner.config.model import TRL_FORMAT, layout_sizes
from nemo_aligner.contract.contract import EncodedText, OverlongError, ScoringContract
from nemo_aligner.contract.from_settings import check_expected
from nemo_aligner.contract.messages import Text, as_json
from nemo_aligner.contract.readout import SCORE, one_reward
from nemo_aligner.contract.steps import aggregate_steps
from nemo_aligner.contract.template_check import freeze_date
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.contract.turns import TurnMarkError, write_conversation
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.serving.client import ScoredRows
from nemo_aligner.serving.client.pool import NoKServeError
from nemo_aligner.serving.client.posting import JsonAnswer, PostingAddress, post_all
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.engine.scorer import (
    RewardScorer,
    RowValues,
    load_scorer,
    score_encodable,
)
from nemo_aligner.serving.failures import FailureKind
from nemo_aligner.serving.protocols import StepRewards
from nemo_aligner.serving.tokens import find_token, hide_password
from nemo_aligner.utils.console import Counter, say
from nemo_aligner.utils.errors import ConfigError, ServingError, short
from nemo_aligner.utils.processes import find_process

# Sources of rewards.

# N texts -> [N, A] float32.
Score: TypeAlias = Callable[[Sequence[Text]], np.ndarray]
# N texts -> the lengths of their N replies.
Measure: TypeAlias = Callable[[Sequence[Text]], Sequence[int]]
# N texts -> rewards [N, A] float32 and their uncertainties [N, A], or None.
ScoreAndSpread: TypeAlias = Callable[[Sequence[Text]], tuple[np.ndarray, np.ndarray | None]]


# N texts -> the rewards of all turns or steps of each.
ScoreSteps: TypeAlias = Callable[[Sequence[Text]], list[StepRewards]]


@dataclass(frozen=True)
class RewardSource:
    """Source of rewards for texts.

    Attributes:
        name: the file, folder or URL.
        attributes: names of the A reward columns.
        attribute_weights: A weights that make one reward of a text's A.
        score: rewards of texts; if ``encode`` is None, a text that the source refuses gets NaN.
        contract: its scoring contract; None if it has none to show.
        encode: tokenizes a text; None for servers, which tokenize themselves.
        measure: counts the tokens of replies; None to count characters instead.
        score_and_spread: ``score`` together with the uncertainty of the rewards, in one pass; None
            for a model that reports none.
        score_rows: rewards, and why refused texts have none; None for a running server.
        score_steps: rewards of all turns or steps of texts; None for a source that has none.
        aggregate: rule by which ``score`` makes one reward of these, if it is not its contract's.
    """

    name: str
    attributes: tuple[str, ...]
    attribute_weights: tuple[float, ...]
    score: Score
    contract: ScoringContract | None = None
    encode: Callable[[Text], EncodedText] | None = None
    measure: Measure | None = None
    score_and_spread: ScoreAndSpread | None = None
    score_rows: Callable[[Sequence[Text]], ScoredRows] | None = None
    score_steps: ScoreSteps | None = None
    aggregate: Aggregate | None = None

    @property
    def takes_ratings(self) -> bool:
        """True if it can be evaluated on ratings; a ranking model predicts no labels."""
        return self.contract is None or self.contract.record_kind is RecordKind.rating

    @property
    def stops_at_overlong(self) -> bool:
        """True if an overlong text is an error rather than dropped."""
        return self.contract is not None and self.contract.overlong == Overlong.error.value

    @property
    def about_contract(self) -> str:
        """Hash of its contract, for people."""
        return "not known" if self.contract is None else self.contract.hash

    def score_as_one(self, texts: Sequence[Text]) -> np.ndarray:
        """``[N]`` weighted rewards of N texts; NaN for a refused one."""
        return one_reward(np.asarray(self.score(texts)), self.attribute_weights)

    def by(self, how: Aggregate | None) -> RewardSource:
        """The same, whose ``score`` makes a text's rewards of those of its turns or steps.

        None is the rule of its contract, or the last one.

        Raises:
            ConfigError: it gives one reward for each text alone.
        """
        rule = Aggregate.last if self.contract is None else self.contract.aggregation
        scale = SCORE if self.contract is None else self.contract.reward_scale
        if how is None or how is rule:
            return self
        score_steps = self.score_steps
        if score_steps is None:
            raise ConfigError(
                f"aggregate: got {how.value}, but {self.name} gives one reward for each text. "
                "Leave it out, or evaluate the file of a model that reads turns or steps "
                "(rm_model_file)"
            )

        def score(texts: Sequence[Text]) -> np.ndarray:
            return np.array(
                [aggregate_steps(each.rewards, how, scale) for each in score_steps(texts)]
            )

        return replace(self, score=score, aggregate=how)

    def fits(self, text: Text) -> bool:
        """Return False if the model would truncate or refuse a text; True if nobody can tell."""
        try:
            return self.encode is None or not self.encode(text).truncated
        except (OverlongError, TurnMarkError):
            return False


def of_scorer(scorer: RewardScorer, name: str = "a scorer") -> RewardSource:
    """Source of rewards from a model in this process."""
    contract = scorer.contract
    return RewardSource(
        name=name,
        attributes=tuple(contract.attributes),
        attribute_weights=tuple(contract.attribute_weights),
        score=scorer.score,
        contract=contract,
        encode=scorer.encode,
        measure=scorer.count_reply_tokens,
        score_and_spread=None if contract.readout is None else scorer.score_and_spread,
    )


# Opening the source that settings name.

_OF_POSTS = ("attribute_weights", "token_variable", "timeout_s")
# The keys of ``source`` that each kind of source reads, by the setting that selects it (for servers
# by the path of the URL). Any other key that is set is refused, as it would silently do nothing.
_USED = {
    "hf_model": ("attribute_weights", "head"),
    "": ("token_variable", "timeout_s"),
    "/classify": _OF_POSTS,
    "/get_reward": (*_OF_POSTS, "tokenizer"),
}


@contextmanager
def open_source(config: EvaluateConfig) -> Iterator[RewardSource]:
    """Open the source that ``rm_model_file``, ``hf_model`` or ``server`` names, as a context.

    Raises:
        AlignerError: it cannot be opened, or its contract is not ``expect_contract``.
    """
    key, name = config.source_key()
    _check_used(config.source, key, name)
    if key != "rm_model_file":
        _refuse_ranks(key)
    if key == "server":
        say(f"asking {name} ...")
        with open_server(name, config.source, config.expect_fingerprint) as source:
            yield _expected(source, config.expect_contract)
        return
    with launch():
        yield load_source(config, initialize_layout(**sizes_of_model(config)))


def sizes_of_model(config: EvaluateConfig) -> dict[str, Any]:
    """Arguments of ``initialize_layout`` for a model in this process."""
    return {} if config.rm_model_file is None else layout_sizes(config.model)


def load_source(config: EvaluateConfig, layout: ParallelLayout) -> RewardSource:
    """Load the model of ``rm_model_file`` or ``hf_model``. Every rank of ``layout`` calls it.

    Raises:
        AlignerError: as ``open_source``.
    """
    key, name = config.source_key()
    _check_used(config.source, key, name)
    if key == "hf_model":
        _refuse_ranks(key)
    if key == "rm_model_file" and config.expect_fingerprint is not None:
        fingerprint = read_fingerprint(name)  # before its weights
        check_expected_fingerprint(
            fingerprint, config.expect_fingerprint, "expect_fingerprint", name
        )
    elif config.expect_fingerprint is not None:
        raise _no_fingerprint(name, config.expect_fingerprint)
    say(f"loading {name} ...")
    load = _archive if key == "rm_model_file" else _hugging_face
    return _expected(load(config, name, layout), config.expect_contract)


def _no_fingerprint(name: str, expected: str) -> ConfigError:
    return ConfigError(
        f"expect_fingerprint: got {expected}, wanted null: {name} tells no model fingerprint"
    )


def _check_used(config: SourceConfig, key: str, name: str) -> None:
    """Refuse a setting of ``source`` that would have no effect."""
    kind = urlsplit(name).path.rstrip("/") if key == "server" else key
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(SourceConfig(), field.name) and field.name not in _USED.get(kind, ()):
            raise ConfigError(
                f"source.{field.name}: got {value!r}, wanted it not to be set: "
                f"{key}={name} has no use for it"
            )


def _refuse_ranks(key: str) -> None:
    ranks = find_process(os.environ).world_size
    if ranks > 1:
        raise ConfigError(f"{key}: got {ranks} ranks, wanted one: only rm_model_file takes several")


def _archive(config: EvaluateConfig, name: str, layout: ParallelLayout) -> RewardSource:
    scorer = load_scorer(
        name,
        layout,
        precision=config.precision,
        micro_batch_tokens=config.model.micro_batch_tokens,
        invariant_rows=config.model.invariant_rows,
        watch=Counter("scoring", "texts").show,
    )
    score_steps = scorer.score_steps if scorer.contract.has_steps else None
    return replace(of_scorer(scorer, name), score_rows=scorer.score_rows, score_steps=score_steps)


def _hugging_face(config: EvaluateConfig, name: str, layout: ParallelLayout) -> RewardSource:
    watch = Counter("scoring", "texts").show
    batch_tokens, head = config.model.micro_batch_tokens, config.source.head
    model = load_hf_reward_model(name, config.precision, batch_tokens, watch, head)
    model = replace(model, adds_eos=config.data.format == TRL_FORMAT)
    weights = config.source.attribute_weights
    if model.contract is not None:
        pairs = zip(model.contract.attributes, model.contract.attribute_weights, strict=True)
        weights = weights or dict(pairs)
    if not weights:
        model.check_are_rewards("say what each counts in source.attribute_weights")
        weights = dict.fromkeys(model.attributes, 1.0)
    if set(weights) != set(model.attributes):
        raise ConfigError(
            f"source.attribute_weights: got {', '.join(weights)}, "
            f"wanted the model's: {', '.join(model.attributes)}"
        )

    def measure(encoded: Sequence[EncodedText]) -> RowValues:
        return model.score_token_lists([text.token_ids for text in encoded]), None, None

    return RewardSource(
        name=name,
        attributes=model.attributes,
        attribute_weights=tuple(weights[attribute] for attribute in model.attributes),
        score=model.score,
        contract=model.contract,
        encode=model.encode,
        measure=model.count_reply_tokens,
        score_rows=lambda texts: score_encodable(texts, model.encode, measure),
    )


def _expected(source: RewardSource, expected: str | None) -> RewardSource:
    if source.contract is not None:
        check_expected(source.contract, expected, "expect_contract")
    elif expected is not None:
        raise ConfigError(
            f"expect_contract: got {expected}, wanted null: {source.name} says no scoring contract"
        )
    return source


# Running servers as sources of rewards. The path of the URL selects the protocol:
#
# ================  ================================================================================
# no path           this package's own server, over KServe
# ``/classify``     vLLM (checked with 0.32), or our gateway
# ``/get_reward``   OpenRLHF's remote reward model (checked with 0.11), or our gateway
# ================  ================================================================================
#
# ``serving/protocols/`` implements the server side of the last two.

_log = logging.getLogger(__name__)
_QUERIES = 16  # texts per request to ``/get_reward``
_ONE_REWARD = {"reward": 1.0}


@contextmanager
def open_server(
    url: str, config: SourceConfig, expect_fingerprint: str | None = None
) -> Iterator[RewardSource]:
    """Connect to a running server, as a context.

    Raises:
        ConfigError: the URL has an unknown path, or a setting does not apply to its protocol.
        ServingError: our own server does not answer, or publishes no contract.
    """
    path, name = urlsplit(url).path.rstrip("/"), hide_password(url)
    if path == "":
        token = _bearer_token(config)
        with RewardClient(
            url, expect_fingerprint=expect_fingerprint, timeout_s=config.timeout_s, token=token
        ) as client:
            yield _ours(name, client)
        return
    if expect_fingerprint is not None:
        raise _no_fingerprint(name, expect_fingerprint)
    if path not in ("/classify", "/get_reward"):
        raise ConfigError(
            f"server: got {name}, wanted http://HOST:PORT of a server of ours, or one that ends in "
            "/classify (vLLM) or /get_reward (OpenRLHF)"
        )
    address = PostingAddress(url, _bearer_token(config), config.timeout_s)
    weights = config.attribute_weights or _ONE_REWARD
    if path == "/classify":
        score: Score = partial(_ask_vllm, address, tuple(weights))
    else:
        tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
        score = partial(_ask_openrlhf, address, tokenizer, tuple(weights))
    yield RewardSource(name, tuple(weights), tuple(weights.values()), score)


def _bearer_token(config: SourceConfig) -> str | None:
    return find_token(None, config.token_variable, "source.token")


def _ours(name: str, client: RewardClient) -> RewardSource:
    try:
        contract = client.contract()
    except NoKServeError as error:
        raise ServingError(
            f"server: {error}; wanted {name}/classify for vLLM or the gateway, {name}/get_reward "
            "for OpenRLHF's remote reward model"
        ) from error
    return RewardSource(
        name=name,
        attributes=tuple(contract.attributes),
        attribute_weights=tuple(contract.attribute_weights),
        score=partial(_ask_ours, client, contract.attributes),
        contract=contract,
    )


def _ask_ours(client: RewardClient, attributes: Sequence[str], texts: Sequence[Text]) -> np.ndarray:
    """Score on our own server; the client logs why texts were refused."""
    rewards = client.score(texts, on_error="nan")
    # A client that was refused every text never learned the number of attributes.
    if np.isnan(rewards).all():
        return np.full((len(texts), len(attributes)), np.nan, dtype=np.float32)
    return rewards


def _ask_vllm(
    address: PostingAddress, attributes: Sequence[str], texts: Sequence[Text]
) -> np.ndarray:
    """Send one request per text: for one bad text vLLM refuses the whole request."""
    answers = post_all(
        address, [_vllm_body(text) for text in texts], Counter("scoring", "texts").show
    )
    rewards = np.full((len(texts), len(attributes)), np.nan, dtype=np.float32)
    refused = []
    for row, answer in enumerate(answers):
        if _refuses_text(answer):
            refused.append(row)
        else:
            rewards[row] = _vllm_rewards(address, attributes, answer)
    if refused:
        first = _error(address, answers[refused[0]])
        _log.warning("%d of %d texts have no reward; %s", len(refused), len(texts), first)
    return rewards


def _refuses_text(answer: JsonAnswer) -> bool:
    """Tell whether a text is at fault, and gets no reward; another failure ends the evaluation."""
    return FailureKind.of_status(answer.status).reaction == "skip"


def _vllm_body(text: Text) -> dict[str, Any]:
    if isinstance(text, str):
        asked: dict[str, Any] = {"input": text}
    else:
        conversation = as_json(text)
        asked = {"messages": conversation} if isinstance(conversation, list) else conversation
    # Raw logits: by default vLLM applies a sigmoid or softmax, which is no reward.
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
            f"{address.name}: got {len(rewards)} numbers for a text, wanted {len(attributes)} "
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
    """``[N]`` rewards, ``size`` texts per request; a refused request is retried text by text."""
    rewards = np.full(len(queries), np.nan, dtype=np.float32)
    chunks = [slice(start, start + size) for start in range(0, len(queries), size)]
    answers = post_all(
        address,
        [{"query": queries[chunk]} for chunk in chunks],
        Counter("scoring", "requests").show,
    )
    for chunk, answer in zip(chunks, answers, strict=True):
        asked = queries[chunk]
        if not _refuses_text(answer):
            rewards[chunk] = _openrlhf_rewards(address, answer, len(asked))
        elif len(asked) > 1:
            rewards[chunk] = _ask_queries(address, asked, 1)
        else:
            _log.warning("a text has no reward; %s", _error(address, answer))
    return rewards


def _written(text: Text, tokenizer: Tokenizer | None) -> str:
    """Render a text with the policy's chat template, as OpenRLHF's trainer sends it."""
    if isinstance(text, str):
        return text
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            "source.tokenizer: got none with a chat template, wanted the folder of the policy's "
            "tokenizer: /get_reward takes texts, and these are conversations"
        )
    template = freeze_date(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    return write_conversation(template, text, tokenizer)


def _openrlhf_rewards(address: PostingAddress, answer: JsonAnswer, count: int) -> list[float]:
    try:
        rewards = [float(reward) for reward in _good(address, answer)["rewards"]]
    except (LookupError, TypeError, ValueError) as error:
        raise _error(address, answer) from error
    if len(rewards) != count:
        raise ServingError(f"{address.name}: got {len(rewards)} rewards for {count} texts")
    return rewards


def _good(address: PostingAddress, answer: JsonAnswer) -> Mapping[str, Any]:
    if answer.status != 200 or not isinstance(answer.body, Mapping):
        raise _error(address, answer)
    return answer.body


def _error(address: PostingAddress, answer: JsonAnswer) -> ServingError:
    return ServingError(f"{address.name}: status {answer.status}, got {short(answer.body)}")
