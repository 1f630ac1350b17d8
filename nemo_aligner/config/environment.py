"""Settings of the environment that trainers of NeMo RL's kind ask for rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_aligner.config.common import Checks, Precision, setting
from nemo_aligner.config.scoring import ScorerModelConfig


@dataclass
class RewardEnvironmentConfig:
    """Either ``url``, or ``rm_model_file`` with what it needs."""

    url: list[str] = setting([], "running servers of one model; none: rm_model_file, in process")
    token_variable: str | None = setting(
        None, "with url: environment variable with the servers' bearer token"
    )
    rm_model_file: str | None = setting(None, "a reward model: .nemo, or the folder it unpacks to")
    precision: Precision | None = setting(None, "null: that of the scoring contract")
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    prefix_cache_tokens: int = setting(0, "in process: tokens of text beginnings to keep")
    cpu_offload: bool = setting(False, "in process: on the device only while it scores")
    expect_contract: str | None = setting(None, "refuse a model whose contract has another hash")
    attribute: str | None = setting(None, "one of several; null: weighed as the contract does")
    refused_reward: float | None = setting(
        None, "of a reply that cannot be scored; null: it is an error"
    )
    wait_s: float = setting(60.0, "with url: for servers that are not up yet")
    retry_s: float = setting(300.0, "with url: for servers that are gone")

    def __post_init__(self) -> None:
        with Checks("", self) as checks:
            checks.not_negative("prefix_cache_tokens", "wait_s", "retry_s")
            checks.require(
                not (self.cpu_offload and self.prefix_cache_tokens),
                "cpu_offload",
                "prefix_cache_tokens=0 with it: a cache would stay on the device",
            )
