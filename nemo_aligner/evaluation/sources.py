"""Sources of rewards: a model file of ours, a running server, or a transformers model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.checkpoint.nemo.fingerprint import check_expected_fingerprint, read_fingerprint
from nemo_aligner.checkpoint.nemo.reward_model import check_expected_contract, read_tokenizer
from nemo_aligner.config.common import Aggregate, Overlong, RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig, SourceConfig
from nemo_aligner.config.model import TRL_FORMAT, layout_sizes
from nemo_aligner.contract.contract import OverlongError, ScoringContract
from nemo_aligner.contract.from_settings import check_expected
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.readout import SCORE, one_reward
from nemo_aligner.contract.scorer import SampleEncoder, ScoredRows, Scorer
from nemo_aligner.contract.turns import TurnMarkError
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.serving.client.pool import NoKServeError
from nemo_aligner.serving.client.posting import PostingAddress
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.client.scorers import QueryScorer, ServedScorer, VllmScorer
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.serving.tokens import find_token, hide_password
from nemo_aligner.utils.console import Counter, say
from nemo_aligner.utils.errors import ConfigError, ServingError
from nemo_aligner.utils.processes import find_process


@dataclass(frozen=True)
class RewardSource:
    """A scorer to evaluate, and how its rewards become one.

    Attributes:
        name: the file, folder or URL.
        scorer: a model in this process, whose every rank scores the same samples, or a server.
        weights: A weights that make one reward of a sample's A.
        aggregate: rule that makes one reward of a sample's turns or steps; None is its contract's.
    """

    name: str
    scorer: Scorer
    weights: tuple[float, ...]
    aggregate: Aggregate | None = None

    @classmethod
    def of(cls, scorer: Scorer, name: str = "a scorer") -> RewardSource:
        """A source with the weights of the scorer's contract, or without one all equal."""
        contract = scorer.contract
        equal = (1.0,) * len(scorer.attributes)
        return cls(name, scorer, equal if contract is None else tuple(contract.attribute_weights))

    @property
    def contract(self) -> ScoringContract | None:
        """The scoring contract; None where it is unknown."""
        return self.scorer.contract

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the A columns of the rewards."""
        return self.scorer.attributes

    @property
    def encoder(self) -> SampleEncoder | None:
        """What tokenizes its samples; None for servers, which tokenize them themselves."""
        return self.scorer if isinstance(self.scorer, SampleEncoder) else None

    @property
    def has_steps(self) -> bool:
        """True if a sample has a reward for each of its turns or steps."""
        return self.contract is not None and self.contract.has_steps

    @property
    def takes_ratings(self) -> bool:
        """True if it can be evaluated on ratings; a ranking model predicts no labels."""
        return self.contract is None or self.contract.record_kind is RecordKind.rating

    @property
    def stops_at_overlong(self) -> bool:
        """True if an overlong sample is an error rather than dropped."""
        return self.contract is not None and self.contract.overlong == Overlong.error.value

    @property
    def about_contract(self) -> str:
        """Hash of its contract, for people."""
        return "not known" if self.contract is None else self.contract.hash

    def by(self, rule: Aggregate | None) -> RewardSource:
        """The same source with another rule for turns or steps; None is its contract's.

        Raises:
            ConfigError: it gives one reward for each sample alone.
        """
        default = Aggregate.last if self.contract is None else self.contract.aggregation
        if rule is None or rule is default:
            return self
        if not self.has_steps:
            raise ConfigError(
                f"aggregate: got {rule.value}, but {self.name} gives one reward for each text. "
                "Leave it out, or evaluate the file of a model that reads turns or steps "
                "(rm_model_file)"
            )
        return replace(self, aggregate=rule)

    def rewards_of(self, scored: ScoredRows) -> np.ndarray:
        """``[N, A]`` rewards of scored rows, by the rule for turns or steps."""
        if self.aggregate is None:
            return scored.rewards
        scale = SCORE if self.contract is None else self.contract.reward_scale
        return scored.aggregated(self.aggregate, scale)

    def score_as_one(self, samples: Sequence[Text]) -> np.ndarray:
        """``[N]`` weighted rewards of N samples; NaN for a rejected one."""
        return one_reward(self.rewards_of(self.scorer.score_rows(samples)), self.weights)

    def fits(self, sample: Text) -> bool:
        """Return False if the model would truncate or reject a sample; True if nobody can tell."""
        try:
            return self.encoder is None or not self.encoder.encode(sample).truncated
        except (OverlongError, TurnMarkError):
            return False


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
    if key == "rm_model_file":
        expected = config.expect_contract
        check_expected_contract(name, config.precision, expected, "expect_contract")
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
        cuda_graphs=config.model.cuda_graphs,
        pointwise_kernels=config.model.pointwise_kernels,
        watch=Counter("scoring", "texts").show,
    )
    return RewardSource.of(scorer, name)


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

    return RewardSource(name, model, tuple(weights[attribute] for attribute in model.attributes))


def _expected(source: RewardSource, expected: str | None) -> RewardSource:
    if source.contract is not None:
        check_expected(source.contract, expected, "expect_contract")
    elif expected is not None:
        raise ConfigError(
            f"expect_contract: got {expected}, wanted null: {source.name} says no scoring contract"
        )
    return source


_ONE_REWARD = {"reward": 1.0}


@contextmanager
def open_server(
    url: str, config: SourceConfig, expect_fingerprint: str | None = None
) -> Iterator[RewardSource]:
    """Connect to a running server, as a context; the path of the URL selects the protocol.

    Raises:
        ConfigError: the URL has an unknown path, or a setting does not apply to its protocol.
        ServingError: our own server does not answer, or publishes no contract.
    """
    path, name = urlsplit(url).path.rstrip("/"), hide_password(url)
    if path not in ("", "/classify", "/get_reward"):
        raise ConfigError(
            f"server: got {name}, wanted http://HOST:PORT of a server of ours, or one that ends in "
            "/classify (vLLM) or /get_reward (OpenRLHF)"
        )
    token = find_token(None, config.token_variable, "source.token")
    if path == "":
        with RewardClient(
            url, expect_fingerprint=expect_fingerprint, timeout_s=config.timeout_s, token=token
        ) as client:
            yield RewardSource.of(_ours(name, client), name)
        return
    if expect_fingerprint is not None:
        raise _no_fingerprint(name, expect_fingerprint)
    address = PostingAddress(url, token, config.timeout_s)
    weights = config.attribute_weights or _ONE_REWARD
    attributes = tuple(weights)
    if path == "/classify":
        scorer: Scorer = VllmScorer(address, attributes)
    else:
        tokenizer = None if config.tokenizer is None else read_tokenizer(Path(config.tokenizer))
        scorer = QueryScorer(address, attributes, tokenizer)
    yield RewardSource(name, scorer, tuple(weights.values()))


def _ours(name: str, client: RewardClient) -> ServedScorer:
    try:
        return ServedScorer(client)
    except NoKServeError as error:
        raise ServingError(
            f"server: {error}; wanted {name}/classify for vLLM or the gateway, {name}/get_reward "
            "for OpenRLHF's remote reward model"
        ) from error
