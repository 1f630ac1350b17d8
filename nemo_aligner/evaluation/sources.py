"""Sources of rewards to evaluate: a reward model archive, a server, or a transformers model.

``RewardSource`` pairs a scorer with the weights that combine several attributes into one reward.
``open_source`` opens the source that the settings of ``nemo-aligner evaluate`` name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from nemo_aligner.checkpoint.hf.classifier import HfRewardModel, load_hf_reward_model
from nemo_aligner.checkpoint.nemo.fingerprint import check_expected_fingerprint, read_fingerprint
from nemo_aligner.checkpoint.nemo.reward_model import check_expected_contract, read_tokenizer
from nemo_aligner.config.common import Aggregate, Overlong, RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig, SourceConfig
from nemo_aligner.config.model import TRL_FORMAT, ScorerModelConfig, layout_sizes
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_expected
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.readout import SCORE, one_reward
from nemo_aligner.contract.scorer import SampleEncoder, ScoredRows, Scorer
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.serving.client.pool import NoKServeError, NoServerError, RequestTimeoutError
from nemo_aligner.serving.client.posting import PostingAddress
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.client.scorers import (
    QueryScorer,
    ServedScorer,
    ServerSettings,
    VllmScorer,
)
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.serving.protocols.kserve import split_model_path
from nemo_aligner.serving.tokens import find_token, hide_password
from nemo_aligner.utils.console import Counter, say
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError
from nemo_aligner.utils.processes import find_process


@dataclass(frozen=True)
class RewardSource:
    """A scorer to evaluate, and the rules that combine a sample's rewards into one number.

    Attributes:
        name: the file, folder or URL, for people.
        scorer: a model in this process, for which every rank scores the same samples, or the client
            of a server.
        weights: weight of each of the A attributes in the weighted sum.
        aggregate: rule that combines the rewards of a sample's turns or steps; None for the rule of
            the scoring contract.
    """

    name: str
    scorer: Scorer
    weights: tuple[float, ...]
    aggregate: Aggregate | None = None

    @classmethod
    def of(cls, scorer: Scorer, name: str = "a scorer") -> RewardSource:
        """Build a source with the weights of the scoring contract; without one they are all 1."""
        contract = scorer.contract
        equal = (1.0,) * len(scorer.attributes)
        return cls(name, scorer, equal if contract is None else tuple(contract.attribute_weights))

    @property
    def contract(self) -> ScoringContract | None:
        """The scoring contract; None if it is unknown."""
        return self.scorer.contract

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the A attributes, the columns of the rewards."""
        return self.scorer.attributes

    @property
    def encoder(self) -> SampleEncoder | None:
        """Tokenizes samples as the scorer does; None for servers, which tokenize on their side."""
        return self.scorer if isinstance(self.scorer, SampleEncoder) else None

    @property
    def has_steps(self) -> bool:
        """True if the model has a reward for each turn or step of a sample."""
        return self.contract is not None and self.contract.has_steps

    @property
    def takes_ratings(self) -> bool:
        """True if the source can be evaluated on ratings; a ranking model predicts no labels."""
        return self.contract is None or self.contract.record_kind is RecordKind.rating

    @property
    def stops_at_overlong(self) -> bool:
        """True if an overlong sample is an error by the contract, rather than dropped."""
        return self.contract is not None and self.contract.overlong == Overlong.error.value

    @property
    def shown_contract(self) -> str:
        """Hash of the scoring contract as text for tables; "not known" without a contract."""
        return "not known" if self.contract is None else self.contract.hash

    def with_aggregate(self, rule: Aggregate | None) -> RewardSource:
        """Return the source with another rule for turns or steps; None for the contract's rule.

        Raises:
            ConfigError: the model has only one reward for each sample, so there is none to combine.
        """
        default = Aggregate.last if self.contract is None else self.contract.aggregation
        if rule is None or rule is default:
            return self
        if not self.has_steps:
            raise ConfigError(
                f"aggregate: got {rule.value}, but {self.name} has one reward for each sample. "
                "Leave it out, or evaluate a model that scores turns or steps (rm_model_file)."
            )
        return replace(self, aggregate=rule)

    def for_format(self, name: str) -> RewardSource:
        """Return the source that scores raw texts of a file in the format ``name``.

        A model of transformers without a contract appends EOS to those of TRL's format only.
        """
        if not isinstance(self.scorer, HfRewardModel):
            return self
        return replace(self, scorer=replace(self.scorer, adds_eos=name == TRL_FORMAT))

    def rewards_of(self, scored: ScoredRows) -> np.ndarray:
        """Return one reward of each attribute per sample, ``[N, A]``.

        If ``aggregate`` is set, it combines the rewards of each sample's turns or steps. Otherwise
        the scorer has already combined them by the rule of the contract.
        """
        if self.aggregate is None:
            return scored.rewards
        scale = SCORE if self.contract is None else self.contract.reward_scale
        return scored.aggregated(self.aggregate, scale)

    def score_as_one(self, samples: Sequence[Text], origins: Sequence[object]) -> np.ndarray:
        """Score N samples, and combine the attributes of each by their weights.

        Args:
            origins: N records, by file and line, for errors.

        Returns:
            Weighted rewards ``[N]``, NaN for a rejected sample.

        Raises:
            DataError: the model's reward of a sample is NaN or infinite.
        """
        scored = self.scorer.score_rows(samples)
        rewards = self.rewards_of(scored)
        check_finite(rewards, origins, scored.errors)
        return one_reward(rewards, self.weights)

    def fits(self, sample: Text) -> bool:
        """True if the model scores the sample whole, without truncating or rejecting it.

        It is always True for a server, which tokenizes on its side.
        """
        try:
            return self.encoder is None or not self.encoder.encode(sample).truncated
        except DataError:
            return False


def check_finite(
    rewards: np.ndarray, origins: Sequence[object], rejected: Collection[int] = ()
) -> None:
    """Check that the rewards ``[N, A]`` of a model are finite, such as none that overflowed fp16.

    Args:
        origins: N records, by file and line.
        rejected: rows of samples that were not scored. They are not checked.

    Raises:
        DataError: a reward is NaN or infinite; the message names the first record with one.
    """
    is_bad = ~np.isfinite(rewards).all(axis=1)
    is_bad[[*rejected]] = False
    if is_bad.any():
        raise DataError(
            f"{origins[int(is_bad.argmax())]}: the model's reward is not finite "
            f"({is_bad.sum()} of {len(rewards)} rewards are not)"
        )


# Opening the source that the settings name.

_SETTINGS_OF_EVALUATE = ServerSettings()
_KEYS_OF_OTHER_SERVERS = ("attribute_weights", "token_variable", "timeout_s")
# The keys of ``source`` that each kind of source uses, by the setting that selects it (for servers
# by the path of the URL). Any other key is rejected, because it would silently have no effect.
_USED_KEYS = {
    "hf_model": ("attribute_weights", "head"),
    "": ("token_variable", "timeout_s"),
    "/classify": _KEYS_OF_OTHER_SERVERS,
    "/get_reward": (*_KEYS_OF_OTHER_SERVERS, "tokenizer"),
}


@contextmanager
def open_source(config: EvaluateConfig) -> Iterator[RewardSource]:
    """Open the source that ``rm_model_file``, ``hf_model`` or ``server`` names, as a context.

    Raises:
        AlignerError: the source cannot be opened, or its contract is not ``expect_contract``.
    """
    key, name = config.source_key()
    _check_keys_used(config.source, key, name)
    if key != "rm_model_file":
        _reject_several_ranks(key)
    if key == "server":
        say(f"connecting to {name} ...")
        with open_server(name, config.source, config.expect_fingerprint) as source:
            yield _check_contract(source, config.expect_contract)
        return
    with launch():
        yield load_source(config, initialize_layout(**sizes_of_model(config)))


def sizes_of_model(config: EvaluateConfig) -> dict[str, Any]:
    """Collect the parallel sizes of the model from the settings.

    They are the arguments of ``initialize_layout`` for a model that runs in this process. A model
    of transformers has the default sizes, so that it can be loaded next to one of this package.
    """
    is_archive = config.rm_model_file is not None
    return layout_sizes(config.model if is_archive else ScorerModelConfig())


def load_source(config: EvaluateConfig, layout: ParallelLayout) -> RewardSource:
    """Load the model of ``rm_model_file`` or ``hf_model``; every rank of ``layout`` calls this.

    Raises:
        AlignerError: the model cannot be loaded, or its contract is not ``expect_contract``.
    """
    key, name = config.source_key()
    _check_keys_used(config.source, key, name)
    if key == "hf_model":
        _reject_several_ranks(key)
    # Check fingerprint and contract before the weights are loaded, which can take minutes.
    if key == "rm_model_file" and config.expect_fingerprint is not None:
        fingerprint = read_fingerprint(name)
        check_expected_fingerprint(
            fingerprint, config.expect_fingerprint, "expect_fingerprint", name
        )
    elif config.expect_fingerprint is not None:
        raise _fingerprint_error(name, config.expect_fingerprint)
    if key == "rm_model_file":
        expected = config.expect_contract
        check_expected_contract(name, config.precision, expected, "expect_contract")
    say(f"loading {name} ...")
    load = _load_archive if key == "rm_model_file" else _load_hugging_face
    return _check_contract(load(config, name, layout), config.expect_contract)


def _fingerprint_error(name: str, expected: str) -> ConfigError:
    return ConfigError(
        f"expect_fingerprint: got {expected}, but {name} has no model fingerprint to compare. "
        "Leave it out."
    )


def list_used_keys(
    key: str, name: str, settings: ServerSettings = _SETTINGS_OF_EVALUATE
) -> tuple[str, ...]:
    """List the keys of ``source`` that a source uses.

    Args:
        key: the setting that selects it, such as ``server``.
        name: value of this setting.
        settings: names for errors.

    Raises:
        ConfigError: a server's URL is not one of a known protocol.
    """
    return _USED_KEYS.get(_protocol_path(name, settings) if key == "server" else key, ())


def _check_keys_used(config: SourceConfig, key: str, name: str) -> None:
    """Reject a key of ``source`` that has no effect for this kind of source."""
    used_keys = list_used_keys(key, name)
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(SourceConfig(), field.name) and field.name not in used_keys:
            raise ConfigError(
                f"source.{field.name}: got {value!r}, which has no effect with {key}={name}. Leave "
                "it out."
            )


def _reject_several_ranks(key: str) -> None:
    ranks = find_process(os.environ).world_size
    if ranks > 1:
        raise ConfigError(
            f"{key}: started on {ranks} ranks, but only rm_model_file can use several. Start one "
            "process."
        )


def _load_archive(config: EvaluateConfig, name: str, layout: ParallelLayout) -> RewardSource:
    scorer = load_scorer(
        name,
        layout,
        precision=config.precision,
        micro_batch_tokens=config.model.micro_batch_tokens,
        invariant_rows=config.model.invariant_rows,
        cuda_graphs=config.model.cuda_graphs,
        kernels=config.model.kernels,
        watch=Counter("scoring", "samples").show,
    )
    return RewardSource.of(scorer, name)


def _load_hugging_face(config: EvaluateConfig, name: str, layout: ParallelLayout) -> RewardSource:
    watch = Counter("scoring", "samples").show
    batch_tokens, head = config.model.micro_batch_tokens, config.source.head
    model = load_hf_reward_model(name, config.precision, batch_tokens, watch, head)
    weights = config.source.attribute_weights
    if model.contract is not None:
        pairs = zip(model.contract.attributes, model.contract.attribute_weights, strict=True)
        weights = weights or dict(pairs)
    if not weights:
        model.check_are_rewards("set the weight of each in source.attribute_weights")
        weights = dict.fromkeys(model.attributes, 1.0)
    if set(weights) != set(model.attributes):
        raise ConfigError(
            f"source.attribute_weights: got weights of {', '.join(weights)}; wanted one weight for "
            f"each attribute of the model: {', '.join(model.attributes)}"
        )

    return RewardSource(name, model, tuple(weights[attribute] for attribute in model.attributes))


def _check_contract(source: RewardSource, expected: str | None) -> RewardSource:
    if source.contract is not None:
        check_expected(source.contract, expected, "expect_contract")
    elif expected is not None:
        raise ConfigError(
            f"expect_contract: got {expected}, but {source.name} has no scoring contract to "
            "compare. Leave it out."
        )
    return source


_ONE_REWARD = {"reward": 1.0}


def _protocol_path(url: str, settings: ServerSettings) -> str:
    """Return a server URL's path without ``/models/NAME``, which names one of several models.

    Raises:
        ConfigError: the path is not one of a known protocol, or it is not a URL, e.g. because a
            bracket is missing.
    """
    wrong_address = ConfigError(
        f"{settings.server}: got {hide_password(url)}; wanted http://HOST:PORT of a nemo-aligner "
        "server, also with /models/NAME, or a URL with the path /classify (vLLM) or /get_reward "
        "(OpenRLHF)"
    )
    try:
        full_path = urlsplit(url).path
    except ValueError as error:
        raise wrong_address from error
    _, path = split_model_path(full_path.rstrip("/") + "/")
    if path.rstrip("/") not in ("", "/classify", "/get_reward"):
        raise wrong_address
    return path.rstrip("/")


@contextmanager
def open_server(
    url: str,
    config: SourceConfig,
    expect_fingerprint: str | None = None,
    settings: ServerSettings = _SETTINGS_OF_EVALUATE,
) -> Iterator[RewardSource]:
    """Connect to a running server, as a context; the path of the URL selects the protocol.

    No path means a server or a gateway of nemo-aligner, ``/classify`` vLLM's protocol, and
    ``/get_reward`` that of OpenRLHF's remote reward models. ``/models/NAME`` before it names one of
    several models. Errors name the ``settings``.

    Raises:
        ConfigError: the URL has another path, or a setting does not apply to its protocol.
        ServingError: a nemo-aligner server does not answer, or answers a later request too late, or
            publishes no scoring contract.
    """
    path, name = _protocol_path(url, settings), hide_password(url)
    token = find_token(None, config.token_variable, settings.token)
    if path == "":
        with RewardClient(
            url,
            expect_fingerprint=expect_fingerprint,
            timeout_s=None,  # a file of any size is one call
            request_timeout_s=config.timeout_s,
            token=token,
        ) as client:
            try:
                yield RewardSource.of(_build_served_scorer(name, client, settings.server), name)
            except RequestTimeoutError as error:
                text = str(error).replace("(request_timeout_s)", f"({settings.timeout_s})")
                raise ServingError(f"{settings.server}: {text}") from error
        return
    if expect_fingerprint is not None:
        raise _fingerprint_error(name, expect_fingerprint)
    address = PostingAddress(url, token, config.timeout_s)
    weights = config.attribute_weights or _ONE_REWARD
    attributes = tuple(weights)
    if path == "/classify":
        scorer: Scorer = VllmScorer(address, attributes, settings)
    else:
        tokenizer = None if config.tokenizer is None else read_tokenizer(Path(config.tokenizer))
        scorer = QueryScorer(address, attributes, tokenizer, settings)
    yield RewardSource(name, scorer, tuple(weights.values()))


def _build_served_scorer(name: str, client: RewardClient, setting: str) -> ServedScorer:
    try:
        return ServedScorer(client)
    except NoKServeError as error:
        raise ServingError(
            f"{setting}: {error}. If it is a vLLM server, set {setting}={name}/classify. If it is "
            f"a remote reward model of OpenRLHF, set {setting}={name}/get_reward."
        ) from error
    except NoServerError as error:
        raise ServingError(
            f"{setting}: {error.trouble}. Start the server, or correct the address in "
            f"{setting}={name}."
        ) from error
