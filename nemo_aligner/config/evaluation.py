"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_aligner.config.common import (
    ANY,
    Aggregate,
    Checks,
    Contradicting,
    IdleRule,
    Malformed,
    Precision,
    setting,
)
from nemo_aligner.config.model import ANY_ROWS, WHOLE_TEXTS, DataConfig, ScorerModelConfig
from nemo_aligner.utils.errors import SettingsError


@dataclass
class EvaluateDataConfig:
    """Records to score; the rest comes from the model's scoring contract."""

    path: str | None = setting(None, "file of pairs or ratings")
    format: str = setting("auto", "auto, or a format's name (docs/data.md)")
    prompt_key: str | None = setting(None, "as training's model.data.prompt_key")
    chosen_key: str | None = setting(None, "as training's model.data.chosen_key")
    rejected_key: str | None = setting(None, "as training's model.data.rejected_key")
    system_prompt_file: str | None = setting(None, "as training's model.data.system_prompt_file")
    prompt_file: str | None = setting(None, "as training's model.data.prompt_file")
    input_template: str | None = setting(None, "as training's model.data.input_template")
    loss_mask_val: float = setting(-100.0, "number that means a missing label, like null")
    neutral_label: float | None = setting(
        DataConfig.neutral_label, "as training's model.data.neutral_label"
    )
    malformed: Malformed = setting(DataConfig.malformed, "as training's model.data.malformed")
    max_malformed: float = setting(
        DataConfig.max_malformed, "as training's model.data.max_malformed"
    )
    contradicting: Contradicting = setting(
        DataConfig.contradicting, "as training's model.data.contradicting"
    )

    def __post_init__(self) -> None:
        with Checks("data", self) as checks:
            checks.require_fraction("max_malformed")


@dataclass
class SourceConfig:
    """Facts that ``hf_model`` and ``server`` do not report themselves."""

    attribute_weights: dict[str, float] = setting(
        {}, "weights of a text's numbers by name; {}: there is one"
    )
    head: str | None = setting(
        None, "hf_model: its reward head, as for convert --head; null: the only one"
    )
    tokenizer: str | None = setting(None, "/get_reward: folder with the chat template of texts")
    token_variable: str | None = setting(None, "environment variable with a bearer token")
    timeout_s: float = setting(600.0, "seconds until a request counts as lost")

    def __post_init__(self) -> None:
        with Checks("source", self) as checks:
            checks.require_positive("timeout_s")


@dataclass
class EvaluateConfig:
    """The whole of ``nemo-aligner evaluate``."""

    rm_model_file: str | None = setting(None, "a reward model: .nemo, or the folder it unpacks to")
    hf_model: str | None = setting(None, "a Hugging Face reward model instead: folder or name")
    server: str | None = setting(None, "a running server instead: its URL")
    source: SourceConfig = field(default_factory=SourceConfig)
    expect_contract: str | None = setting(None, "refuse a model whose contract has another hash")
    expect_fingerprint: str | None = setting(None, "refuse a model with other weights")
    precision: Precision | None = setting(None, "null: that of the scoring contract")
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    task: str | None = setting(None, "a benchmark; data.path is its file (docs/evaluation.md)")
    threshold: float | None = setting(
        None, "benchmarks of steps: reward of a right one; null: 0.5, or log-odds of 0"
    )
    threshold_from: str | None = setting(
        None, "processbench: a held-out file of it, whose best threshold is taken"
    )
    aggregate: Aggregate | None = setting(
        None, "makes one reward of those of turns or steps; null: as the contract says"
    )
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    swapped: bool = setting(False, "exchange chosen and rejected: accuracy has to become 1 less it")
    robustness_pairs: int | None = setting(
        None, "number of pairs to score again with changed style"
    )
    output: str | None = setting(None, "JSON file to write: metrics and counts")
    output_rewards: str | None = setting(None, "JSONL file to write: a line for each record")
    report: str | None = setting(None, "HTML file to write: figures, tables, mistakes in full text")

    def __post_init__(self) -> None:
        with Checks("", self) as checks:
            checks.require_positive("robustness_pairs")
            checks.require(
                self.threshold_from is None
                or (self.threshold is None and self.threshold_from != self.data.path),
                "threshold_from",
                "null, as threshold is set, or another file than data.path",
            )
            checks.require(
                self.precision is None or self.server is None,
                "precision",
                "null: a server has its own",
            )

    def source_key(self) -> tuple[str, str]:
        """The setting that says where rewards come from, and its value.

        Raises:
            SettingsError: none does, or several do.
        """
        given = {
            "rm_model_file": self.rm_model_file,
            "hf_model": self.hf_model,
            "server": self.server,
        }
        found = [(key, value) for key, value in given.items() if value]
        if len(found) != 1:
            got = " and ".join(key for key, _ in found) or "none"
            raise SettingsError([f"{', '.join(given)}: got {got}, wanted exactly one of them"])
        return found[0]


_LAYOUT = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.cp_comm_type",
    "model.expert_model_parallel_size",
    "model.sequence_parallel",
    "model.batch_invariant",
    "model.batch_invariant_rows",
    "model.cuda_graphs",
    "model.pointwise_kernels",
)
IDLE_IN_EVALUATION: tuple[IdleRule, ...] = (
    ({"server": ANY}, (*_LAYOUT, "model.micro_batch_tokens")),
    ({"hf_model": ANY}, _LAYOUT),
    ANY_ROWS,
    WHOLE_TEXTS,
    ({"data.malformed": Malformed.error}, ("data.max_malformed",)),
    ({"robustness_pairs": ANY}, ("data.loss_mask_val",)),
    ({"swapped": True}, ("data.loss_mask_val",)),
)


# Reward environments of NeMo RL and similar trainers.


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
            checks.require_not_negative("wait_s", "retry_s")
            checks.require_prefix_cache("prefix_cache_tokens")
            checks.require(
                not (self.cpu_offload and self.prefix_cache_tokens),
                "cpu_offload",
                "prefix_cache_tokens=0 with it: a cache would stay on the device",
            )
