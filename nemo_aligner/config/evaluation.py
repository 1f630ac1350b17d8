"""Settings of ``evaluate``, and of the reward environments of NeMo RL and similar trainers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from nemo_aligner.config.common import (
    ANY,
    Aggregate,
    Checks,
    Contradicting,
    IneffectiveRule,
    Malformed,
    Precision,
    setting,
)
from nemo_aligner.config.model import (
    ANY_ROWS,
    LAYOUT_KEYS,
    WHOLE_TEXTS,
    DataConfig,
    ScorerModelConfig,
)
from nemo_aligner.utils.errors import SettingsError


@dataclass
class EvaluateDataConfig:
    """The data file of ``evaluate``, and how its records are read.

    There is no setting for template or length: the model's scoring contract decides how a record
    becomes token ids.
    """

    path: str | None = setting(None, "file of pairs or ratings, or hub name[:split]")
    format: str = setting("auto", "format of the files: auto, a name, or package.module:NAME")
    prompt_key: str | None = setting(None, "name of the field with the prompt; null: prompt")
    chosen_key: str | None = setting(None, "name of the field with the chosen reply; null: chosen")
    rejected_key: str | None = setting(
        None, "name of the field with the rejected reply; null: rejected"
    )
    system_prompt_file: str | None = setting(
        None, "file with a system prompt for conversations that have none"
    )
    prompt_file: str | None = setting(
        None, "file with text around the last user turn, {}; braces are {{ and }}"
    )
    input_template: str | None = setting(
        None, "score raw text: this string, with the prompt as {}, and the reply"
    )
    loss_mask_val: float = setting(-100.0, "number that marks a missing label, like null")
    neutral_label: float | None = setting(
        DataConfig.neutral_label,
        "label of PRM800K's neutral steps, 0 (wrong) to 1 (right); null: drop",
    )
    malformed: Malformed = setting(
        DataConfig.malformed, "records that cannot be read: stop with an error, or drop them"
    )
    max_malformed: float = setting(
        DataConfig.max_malformed, "largest fraction of the file that may be dropped, 0 to 1"
    )
    contradicting: Contradicting = setting(
        DataConfig.contradicting,
        "pairs in a file that prefer opposite replies: keep them, or drop them",
    )

    def __post_init__(self) -> None:
        with Checks("data", self) as checks:
            checks.require_fraction("max_malformed")


@dataclass
class SourceConfig:
    """Facts that a Hugging Face model or a server does not report, and access to the server.

    They belong to the settings ``hf_model`` and ``server`` of ``evaluate``.
    """

    attribute_weights: dict[str, float] = setting(
        {}, "weights of the rewards by name; {}: the source gives one reward"
    )
    head: str | None = setting(
        None, "hf_model: name of its reward head (convert --head); null: the only one"
    )
    tokenizer: str | None = setting(
        None, "servers with /get_reward: tokenizer folder with the chat template"
    )
    token_variable: str | None = setting(
        None, "environment variable with the server's bearer token"
    )
    timeout_s: float = setting(600.0, "seconds until a request times out")

    def __post_init__(self) -> None:
        with Checks("source", self) as checks:
            checks.require_positive("timeout_s")


@dataclass
class EvaluateConfig:
    """All settings of ``nemo-aligner evaluate``."""

    rm_model_file: str | None = setting(
        None, "reward model: a .nemo file, or a Hugging Face folder or name"
    )
    hf_model: str | None = setting(
        None, "instead: a Hugging Face reward model, as a folder or hub name"
    )
    server: str | None = setting(None, "instead: the URL of a running reward server")
    source: SourceConfig = field(default_factory=SourceConfig)
    expect_contract: str | None = setting(
        None, "reject a model whose scoring contract has another hash"
    )
    expect_fingerprint: str | None = setting(
        None, "reject a model whose weights have another fingerprint"
    )
    precision: Precision | None = setting(
        None, "precision of the model; null: that of the scoring contract"
    )
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    task: str | None = setting(None, "a benchmark (docs/evaluation.md); data.path is its file")
    threshold: float | None = setting(
        None, "step benchmarks: minimum reward of a right step; null: 50% probability"
    )
    threshold_from: str | None = setting(
        None, "processbench: held-out file whose best threshold is used"
    )
    aggregate: Aggregate | None = setting(
        None, "how to combine the rewards of turns or steps; null: by the contract"
    )
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    swapped: bool = setting(False, "swap chosen and rejected: accuracy must become 1 - accuracy")
    robustness_pairs: int | None = setting(
        None, "number of pairs to score again with changed style"
    )
    output: str | None = setting(None, "JSON file to write: metrics and counts")
    output_rewards: str | None = setting(None, "JSONL file to write: rewards, one line per record")
    report: str | None = setting(None, "HTML file to write: figures, tables, mistakes in full text")

    def __post_init__(self) -> None:
        with Checks("", self) as checks:
            checks.require_positive("robustness_pairs")
            checks.require(
                self.threshold_from is None
                or (self.threshold is None and not _are_same(self.threshold_from, self.data.path)),
                "threshold_from",
                "null if threshold is set, or another file than data.path",
            )
            checks.require(
                self.precision is None or self.server is None,
                "precision",
                "null: the server decides the precision",
            )

    def source_key(self) -> tuple[str, str]:
        """Return key and value of the one setting that says which model gives the rewards.

        Raises:
            SettingsError: none or several of ``rm_model_file``, ``hf_model``, ``server`` are set.
        """
        sources = {
            "rm_model_file": self.rm_model_file,
            "hf_model": self.hf_model,
            "server": self.server,
        }
        configured = [(key, value) for key, value in sources.items() if value]
        if len(configured) != 1:
            keys = " and ".join(key for key, _ in configured) or "none"
            raise SettingsError([f"{', '.join(sources)}: got {keys}, wanted exactly one of them"])
        key, value = configured[0]
        if key != "server" and is_url(value):
            raise SettingsError([f"{key}: got {value}, wanted a model. Set server={value}"])
        return key, value


def is_url(name: str) -> bool:
    """Tell if ``name`` is the address of a server, rather than a path or a name on the hub."""
    return name.startswith(("http://", "https://"))


def _are_same(first: str, second: str | None) -> bool:
    """True if two paths lead to the same file, or are the same name of the hub."""
    return second is not None and os.path.realpath(first) == os.path.realpath(second)


INEFFECTIVE_IN_EVALUATION: tuple[IneffectiveRule, ...] = (
    ({"server": ANY}, (*LAYOUT_KEYS, "model.micro_batch_tokens")),
    ({"hf_model": ANY}, LAYOUT_KEYS),
    ANY_ROWS,
    WHOLE_TEXTS,
    ({"data.malformed": Malformed.error}, ("data.max_malformed",)),
    ({"robustness_pairs": ANY}, ("data.loss_mask_val",)),
    ({"swapped": True}, ("data.loss_mask_val",)),
)


# Reward environments of NeMo RL and similar trainers.


@dataclass
class RewardEnvironmentConfig:
    """All settings of a reward environment, which scores with servers or with its own model.

    ``url`` names the servers, ``rm_model_file`` the model. ``precision``, ``model``,
    ``prefix_cache_tokens`` and ``cpu_offload`` apply only to the environment's own model.
    """

    url: list[str] = setting(
        [], "URLs of running servers of one model; []: load rm_model_file here"
    )
    token_variable: str | None = setting(
        None, "with url: environment variable with the servers' bearer token"
    )
    rm_model_file: str | None = setting(
        None, "reward model: a .nemo file, or a Hugging Face folder or name"
    )
    precision: Precision | None = setting(
        None, "precision of the model; null: that of the scoring contract"
    )
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    prefix_cache_tokens: int = setting(
        0, "with rm_model_file: size of the prefix cache in tokens; 0: none"
    )
    cpu_offload: bool = setting(
        False, "with rm_model_file: keep it in host memory while it does not score"
    )
    expect_contract: str | None = setting(
        None, "reject a model whose scoring contract has another hash"
    )
    attribute: str | None = setting(
        None, "the attribute to return; null: combine all by the contract's weights"
    )
    reward_components: bool = setting(
        False, "return a reward for each attribute, as NeMo RL's GDPO needs"
    )
    refused_reward: float | None = setting(None, "reward of a rejected reply; null: raise an error")
    wait_s: float = setting(60.0, "with url: seconds to wait for servers that are not up yet")
    retry_s: float = setting(300.0, "with url: seconds to retry when a server is gone")
    request_timeout_s: float = setting(600.0, "with url: seconds until a request times out")

    def __post_init__(self) -> None:
        with Checks("", self) as checks:
            checks.require_not_negative("wait_s", "retry_s")
            checks.require_positive("request_timeout_s")
            checks.require_prefix_cache("prefix_cache_tokens")
            checks.require(
                not (self.cpu_offload and self.prefix_cache_tokens),
                "cpu_offload",
                "false, or prefix_cache_tokens=0: a prefix cache would stay on the device",
            )
            checks.require(
                not (self.reward_components and self.attribute is not None),
                "reward_components",
                "false, or no attribute: one attribute has no components",
            )
