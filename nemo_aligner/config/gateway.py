"""Settings of ``gateway``: its servers, a judge, Python functions, and how they are combined."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any, ClassVar

from nemo_aligner.config.common import Checks, IneffectiveRule, setting
from nemo_aligner.config.serving import FrontConfig, without_log


@dataclass
class GatewayConfig(FrontConfig):
    """Address, access and limits of the gateway."""

    section: ClassVar[str] = "gateway"

    port: int = setting(8000, "TCP port; 0: any free port")
    max_connections: int = setting(256, "maximum concurrent requests per backend")
    timeout_s: float = setting(600.0, "seconds until a request is answered with a 503")
    retry_s: float = setting(1.0, "seconds to wait for a backend before a 503")

    def check(self, checks: Checks) -> None:
        super().check(checks)
        checks.require_positive("max_connections", "timeout_s")
        checks.require_not_negative("retry_s")


class JudgeTask(Enum):
    """The task of a judge: to compare two responses to a prompt, or to rate one from 1 to 5."""

    pairwise = "pairwise"
    rating = "rating"


class JudgePrompt(Enum):
    """Form of the judge's messages.

    ``genrm``: the roles ``principle``, ``response_1`` and ``response_2`` of NVIDIA's GenRM;
    ``plain``: one user message with instructions, which any chat model can read.
    """

    genrm = "genrm"
    plain = "plain"


class JudgePairs(Enum):
    """Which responses to a prompt a pairwise judge compares.

    ``circular``: each with the next, and the last with the first; ``all_pairs``: all with all.
    """

    circular = "circular"
    all_pairs = "all_pairs"


MODEL_PART, JUDGE_PART = "model", "judge"
"""Names of the parts of a reward that come from ``backends`` and from ``judge.url``."""


@dataclass
class JudgeConfig:
    """A judge: a language model behind an OpenAI-compatible server that grades responses."""

    url: str | None = setting(
        None, "base URL of the judge, e.g. http://127.0.0.1:8001/v1; null: no judge"
    )
    model: str | None = setting(None, "name of the judge's model on its server")
    token_file: str | None = setting(None, "file with the bearer token of the judge's server")
    token_variable: str | None = setting(
        None, "environment variable with the bearer token of the judge's server"
    )
    task: JudgeTask = setting(
        JudgeTask.pairwise, "compare the responses to a prompt in pairs, or rate each from 1 to 5"
    )
    prompt: JudgePrompt = setting(
        JudgePrompt.genrm, "message roles of NVIDIA's GenRM, or instructions for any chat model"
    )
    pairs: JudgePairs = setting(
        JudgePairs.circular, "compare each response with the next, or all with all"
    )
    repeats: int = setting(1, "judgments of each pair or response; their scores are averaged")
    principle: str | None = setting(None, "principle by which the judge grades")
    temperature: float | None = setting(
        0.6, "sampling temperature of the judge; null: the field is not sent"
    )
    max_tokens: int | None = setting(
        16384, "maximum tokens of a judgment, with its reasoning; null: the field is not sent"
    )
    max_connections: int = setting(64, "maximum concurrent requests to the judge")
    timeout_s: float = setting(120.0, "seconds until a request to the judge counts as failed")
    retries: int = setting(3, "further attempts after a failed request or unusable answer")
    fields: dict[str, Any] = setting(
        {}, "more fields of each request, such as seed or chat_template_kwargs"
    )

    def __post_init__(self) -> None:
        with Checks("judge", self) as checks:
            is_url = self.url is None or bool(re.match(r"https?://[^/@\s]+(/|$)", self.url))
            checks.require(is_url, "url", "an http:// or https:// URL without a password")
            has_both = (self.url is None) == (self.model is None)
            checks.require(has_both, "model", "a name with judge.url, or neither of them")
            checks.require_one_token("token")
            checks.require_positive("repeats", "max_tokens", "max_connections", "timeout_s")
            checks.require_not_negative("temperature", "retries")
            set_here = {"model", "messages", "stream", "n", "temperature", "max_tokens"}
            expected = f"other fields than {', '.join(sorted(set_here))}"
            checks.require(not set_here & set(self.fields), "fields", expected)
            has_one_limit = self.max_tokens is None or "max_completion_tokens" not in self.fields
            expected = "null with max_completion_tokens in judge.fields"
            checks.require(has_one_limit, "max_tokens", expected)


class CombineKind(Enum):
    """The rule by which the parts of a reward become one number.

    ``weighted``: their weighted sum; ``minimum``: the smallest weighted part; ``gate``: the
    weighted sum, where ``gate_part`` alone decides if its margin is large enough.
    """

    weighted = "weighted"
    minimum = "minimum"
    gate = "gate"


@dataclass
class CombineConfig:
    """How the gateway combines a model, a judge and Python functions into one reward."""

    kind: CombineKind = setting(
        CombineKind.weighted, "weighted sum, smallest part, or other parts only at small margins"
    )
    weights: dict[str, float] = setting(
        {}, "weight of every part: model, judge, each function; default: 1 each"
    )
    offsets: dict[str, float] = setting(
        {}, "number to add to a part before it is weighted, such as judge=-3"
    )
    gate_part: str = setting(MODEL_PART, "with gate: part that every sample gets")
    gate_margin: float = setting(1.0, "with gate: margin of gate_part below which all parts count")
    fail_requests: bool = setting(
        False, "reject a whole request if a part fails for one of its rows"
    )

    def check(self, checks: Checks, parts: Collection[str]) -> None:
        """Check that the settings fit the names of the configured ``parts``."""
        names = ", ".join(parts)
        weights, offsets = self.weights, self.offsets
        has_all = not weights or weights.keys() == set(parts)
        checks.require(has_all, "combine.weights", f"a weight for each of the parts: {names}")
        are_finite = all(map(isfinite, [*weights.values(), *offsets.values()]))
        checks.require(are_finite, "combine.weights", "finite weights and offsets")
        checks.require(offsets.keys() <= set(parts), "combine.offsets", f"names of parts: {names}")
        if self.kind is CombineKind.gate:
            expected = f"the name of a part: {names}"
            checks.require(self.gate_part in parts, "combine.gate_part", expected)
            checks.require(len(parts) > 1, "combine.kind", "gate with two or more parts")
            checks.require(self.gate_margin > 0, "combine.gate_margin", "a number above 0")


@dataclass
class GatewayRunConfig:
    """All settings of ``nemo-aligner gateway``."""

    backends: list[str] = setting(
        ["http://127.0.0.1:5555"], "URLs of servers of one model; []: no reward model"
    )
    expect_contract: str | None = setting(
        None, "reject backends whose scoring contract has another hash"
    )
    expect_fingerprint: str | None = setting(
        None, "reject backends whose weights have another fingerprint"
    )
    backend_token_file: str | None = setting(None, "file with the bearer token of the backends")
    backend_token_variable: str | None = setting(
        None, "environment variable with the bearer token of the backends"
    )
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    functions: dict[str, str] = setting(
        {}, "Python functions that score samples: name=package.module:function"
    )
    function_timeout_s: float = setting(10.0, "seconds until a call of a function has failed")
    function_threads: int = setting(32, "maximum concurrent calls of each function; more wait")
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    combine: CombineConfig = field(default_factory=CombineConfig)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a reward, in the order in which answers list them."""
        configured = {MODEL_PART: bool(self.backends), JUDGE_PART: self.judge.url is not None}
        return (*(name for name, is_set in configured.items() if is_set), *self.functions)

    def __post_init__(self) -> None:
        with Checks("", self) as checks:
            expected = "the URL of a server, or several, or a judge.url, or functions"
            checks.require(bool(self.parts), "backends", expected)
            checks.require_one_token("backend_token")
            checks.require_positive("function_timeout_s", "function_threads")
            reserved = {MODEL_PART, JUDGE_PART}
            are_names = all(
                name.isidentifier() and name not in reserved and re.match(r"[\w.]+:\w+$", function)
                for name, function in self.functions.items()
            )
            expected = "name=package.module:function, where the name is not model or judge"
            checks.require(are_names, "functions", expected)
            self.combine.check(checks, self.parts)


_WITH_JUDGE = tuple(
    f"judge.{item.name}" for item in fields(JudgeConfig) if item.name not in ("url", "model")
)
_GATED = ("combine.gate_part", "combine.gate_margin")
INEFFECTIVE_IN_GATEWAYS: tuple[IneffectiveRule, ...] = (
    ({"judge.url": None}, _WITH_JUDGE),
    ({"judge.task": JudgeTask.rating}, ("judge.pairs",)),
    ({"functions": {}}, ("function_timeout_s", "function_threads")),
    ({"functions": {}, "judge.url": None}, ("combine.fail_requests",)),
    ({"combine.kind": CombineKind.weighted}, _GATED),
    ({"combine.kind": CombineKind.minimum}, _GATED),
    without_log("gateway"),
)
