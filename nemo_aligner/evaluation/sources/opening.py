"""The source that settings name, for as long as it is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from urllib.parse import urlsplit

from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.config.evaluation import EvaluateConfig, SourceConfig
from nemo_aligner.console import Counter, say
from nemo_aligner.errors import ConfigError
from nemo_aligner.evaluation.sources.base import RewardSource, of_scorer
from nemo_aligner.evaluation.sources.servers import open_server
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, initialize_layout
from nemo_aligner.processes import find_process
from nemo_aligner.scoring.scorer import load_scorer
from nemo_aligner.text.contract_changes import check_expected

_OF_POSTS = ("attribute_weights", "token_variable", "timeout_s")
# Settings of ``source``, by the setting that names it, or the path of a server's URL.
_USED = {
    "hf_model": ("attribute_weights",),
    "": ("token_variable", "timeout_s"),
    "/classify": _OF_POSTS,
    "/get_reward": (*_OF_POSTS, "tokenizer"),
}


@contextmanager
def open_source(config: EvaluateConfig) -> Iterator[RewardSource]:
    """What ``rm_model_file``, ``hf_model`` or ``server`` names, until the end of the block.

    Raises:
        AlignerError: it cannot be had, or scores by another contract than ``expect_contract``.
    """
    key, name = config.source_key()
    _check_used(config.source, key, name)
    if key != "rm_model_file":
        _refuse_ranks(key)
    if key == "server":
        say(f"asking {name} ...")
        with open_server(name, config.source) as source:
            yield _expected(source, config.expect_contract)
        return
    with launch():
        yield load_source(config, initialize_layout(*layout_sizes(config)))


def layout_sizes(config: EvaluateConfig) -> tuple[int, int, bool]:
    """Tensor and pipeline parallel sizes, and sequence parallelism, of what is loaded here."""
    model = config.model
    if config.rm_model_file is None:
        return 1, 1, False
    return (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.sequence_parallel,
    )


def load_source(config: EvaluateConfig, layout: ParallelLayout) -> RewardSource:
    """What ``rm_model_file`` or ``hf_model`` names, on the ranks of ``layout``; all call it.

    Raises:
        AlignerError: as ``open_source``.
    """
    key, name = config.source_key()
    _check_used(config.source, key, name)
    if key == "hf_model":
        _refuse_ranks(key)
    say(f"loading {name} ...")
    load = _archive if key == "rm_model_file" else _hugging_face
    return _expected(load(config, name, layout), config.expect_contract)


def _check_used(config: SourceConfig, key: str, name: str) -> None:
    """Refuse a setting that would have no effect."""
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
    return of_scorer(scorer, name)


def _hugging_face(config: EvaluateConfig, name: str, layout: ParallelLayout) -> RewardSource:
    watch = Counter("scoring", "texts").show
    model = load_hf_reward_model(name, config.precision, config.model.micro_batch_tokens, watch)
    weights = config.source.attribute_weights or dict.fromkeys(model.attributes, 1.0)
    if set(weights) != set(model.attributes):
        raise ConfigError(
            f"source.attribute_weights: got {', '.join(weights)}, "
            f"wanted the model's: {', '.join(model.attributes)}"
        )
    return RewardSource(
        name=name,
        attributes=model.attributes,
        attribute_weights=tuple(weights[attribute] for attribute in model.attributes),
        score=model.score,
        encode=model.encode,
        measure=model.count_reply_tokens,
    )


def _expected(source: RewardSource, expected: str | None) -> RewardSource:
    if source.contract is not None:
        check_expected(source.contract, expected, "expect_contract")
    elif expected is not None:
        raise ConfigError(
            f"expect_contract: got {expected}, wanted null: {source.name} says no scoring contract"
        )
    return source
