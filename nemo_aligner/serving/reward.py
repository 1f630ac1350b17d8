"""Serve a reward model: ``RewardBackend`` computes on every rank, ``LocalService`` is on rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import LOG_ODDS, PROBABILITY
from nemo_aligner.contract.steps import aggregate_texts
from nemo_aligner.serving.endpoints import Endpoint, reward_endpoints
from nemo_aligner.serving.engine.batcher import Batcher
from nemo_aligner.serving.engine.executor import Launch, ModelRanks, Operation
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.shaping import RewardShaper
from nemo_aligner.serving.engine.token_scorer import TokenScorer
from nemo_aligner.serving.failures import FailureKind
from nemo_aligner.serving.intake import EncodedRequest, Intake, answer_of
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, StepRewards
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.serving.scoring import (
    ScoringService,
    TemplateParts,
    check_num_rows,
    insert_refused,
)
from nemo_aligner.utils.host_transfer import Arriving

_COMPUTE = "compute rewards"
# The name of this server's main model in the results of ``probe`` and ``statistics``.
_LOCAL = "local"


@dataclass(frozen=True)
class RewardBackend:
    """The scorer of a rank, for serving.

    ``prepare`` is called before each forward pass, e.g. to move the weights to the GPU. ``name`` is
    the name of the model.
    """

    scorer: TokenScorer
    config: ServerConfig
    shaper: RewardShaper | None = None
    prepare: Callable[[], None] = lambda: None
    template_parts: TemplateParts = field(default_factory=TemplateParts)
    name: str = MODEL_NAME

    @property
    def operation(self) -> str:
        """The name of the model's forward pass among the operations of all ranks."""
        return _COMPUTE if self.name == MODEL_NAME else f"{_COMPUTE} of {self.name}"

    @property
    def operations(self) -> Mapping[str, Operation]:
        # A Launch returns before the device has finished, so that the host can plan the next call;
        # without a GPU, this gains nothing.
        compute = Launch(self._begin) if torch.cuda.is_available() else self._compute
        return {self.operation: compute}

    def reset_cache(self) -> None:
        self.scorer.reset_cache()

    def start(self, ranks: ModelRanks) -> LocalService:
        if self.shaper is not None:
            self.shaper.check_file()
        # Run a first forward pass before the server reports that it is ready: it is slow, and shows
        # whether the model works.
        ranks.execute(self.operation, [Row.of([0])])
        return LocalService(self, ranks)

    def _compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return self._begin(rows).wait()

    def _begin(self, rows: Sequence[Row]) -> Arriving[list[np.ndarray]]:
        self.prepare()
        return self.scorer.begin(rows)


class LocalService(ScoringService):
    """Scores requests with the model of this server; it is the ``Service`` on rank 0."""

    def __init__(self, backend: RewardBackend, ranks: ModelRanks) -> None:
        super().__init__(backend.config, backend.name)
        scorer, shaper = backend.scorer, backend.shaper
        self._scorer, self._shaper, self._config = scorer, shaper, backend.config
        self._ranks = ranks
        self._parts = backend.template_parts
        self._contract = scorer.contract if shaper is None else shaper.contract
        self.contract = self._contract
        self._contract_hash = self._contract.hash
        self.fingerprint = scorer.fingerprint
        keeps_steps = shaper is None or shaper.keeps_steps
        # Whether answers have the rewards of turns or steps.
        self._returns_steps = scorer.contract.has_steps and keeps_steps
        # How the rewards of a sample's turns or steps are merged into one reward. If None, the last
        # reward is that of the sample.
        self._aggregate = None if scorer.contract.aggregate is None else scorer.contract.aggregation
        self._intake = Intake(
            scorer,
            backend.config,
            has_steps=self._returns_steps or self._aggregate is not None,
            needs_lengths=shaper is not None and shaper.needs_lengths,
        )
        self._batcher = Batcher(
            partial(ranks.submit, backend.operation),
            scorer.tokens_per_call,
            self._intake.meter,
            backend.config.max_call_secs,
            ranks.clock,
        )
        self._reported_cached = 0
        is_main = self.model_name == MODEL_NAME
        self._server_name = _LOCAL if is_main else self.model_name
        self._line_prefix = "" if is_main else f"{self.model_name}: "

    # The methods of the ScoringService interface follow.

    def counting_failures(self) -> AbstractContextManager[None]:
        return self._intake.counting_failures()

    async def answer(
        self, request: ScoreRequest, aside: Collection[FailureKind], is_probe: bool = False
    ) -> ScoredRows:
        with nullcontext() if is_probe else self.counting_failures():
            check_num_rows(request.num_rows, self._config)
            return await super().answer(request, aside, is_probe)

    async def template_parts(self) -> TemplateParts:
        return self._parts

    async def read_contract(self) -> ScoringContract:
        return self._contract

    async def find_contract(self) -> ScoringContract:
        return self._contract

    async def probe(self) -> dict[str, str | None]:
        return {self._server_name: self._ranks.running.find_delay() or self._intake.problem}

    async def statistics(self) -> dict[str, dict[str, float]]:
        """Return this server's counts since its start, e.g. of requests, and its queue length."""
        counts = self._scorer.counts
        return {
            self._server_name: {
                **self._intake.meter.statistics(),
                "computed_tokens": counts.computed,
                "cached_tokens": counts.cached,
                "tokens_per_call": self._scorer.tokens_per_call,
                "waiting_rows": self._batcher.waiting_rows,
            }
        }

    async def _score(
        self, request: ScoreRequest, aside: Collection[FailureKind], is_probe: bool
    ) -> ScoredRows:
        begun = time.monotonic()
        encoded = await self._intake.encode(request, aside)
        if encoded.rows:
            outputs = await answer_of(self._batcher.submit(encoded.rows))
            scored = self._read_outputs(encoded, outputs, is_probe)
        else:
            scored = self._empty_rows()
        if not is_probe:
            seconds, count = time.monotonic() - begun, len(encoded.rows)
            self._intake.meter.count_answer(seconds, count, encoded.num_tokens)
        slow = encoded.unscored
        return replace(insert_refused(scored, encoded.errors), unscored=slow, temporary=slow)

    def _empty_rows(self) -> ScoredRows:
        """Return a result without rows, for a request whose samples were all rejected."""
        rewards = np.zeros((0, len(self._contract.attributes)), dtype=np.float32)
        steps = np.zeros(0, dtype=np.object_) if self._returns_steps else None
        hashes = self._contract_hash, self.fingerprint
        return ScoredRows(rewards, {}, np.zeros(0, bool), *hashes, steps=steps)

    def _read_outputs(
        self, encoded: EncodedRequest, arrays: Sequence[np.ndarray], is_probe: bool
    ) -> ScoredRows:
        """Convert the outputs ``[s, M * A * K]`` of each row to rewards, and shape them."""
        outputs = np.concatenate(arrays)
        ends = np.cumsum([*map(len, arrays)])
        rewards, spread = self._scorer.read_outputs(outputs)
        encoded.check_finite(rewards, ends)
        sample_rows = ends - 1  # index of each whole sample's reward
        if self._aggregate is not None:
            # Merge raw rewards of steps before shaping, because the shaping rules are for one
            # reward per sample.
            merged = aggregate_texts(rewards, [0, *ends.tolist()], self._aggregate)
            num_steps = len(rewards) if self._returns_steps else 0
            rewards = np.concatenate([rewards[:num_steps], merged])
            # Outputs and spreads of steps cannot be merged, so a sample gets those of its last
            # step.
            rows = np.append(np.arange(num_steps), sample_rows)
            outputs, spread = outputs[rows], None if spread is None else spread[rows]
            sample_rows = num_steps + np.arange(len(merged))
        scored = ScoredRows(
            rewards,
            {},
            np.array(encoded.truncated, dtype=bool),
            self._contract_hash,
            self.fingerprint,
            spread=spread,
            outputs=None if self._scorer.contract.readout is None else outputs,
        )
        if self._shaper is not None:
            scored = self._shaper.shape(scored, encoded.reply_tokens, counts=not is_probe)
        if not self._returns_steps:
            return scored
        return _split_by_sample(scored, encoded, ends, sample_rows)

    # The methods of the Service interface follow.

    @property
    def scoring(self) -> ScoringService:
        return self

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return reward_endpoints(self, self._config.max_batch_size, self._optional_outputs)

    @property
    def _optional_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that shaping, or a head with several outputs per attribute, adds."""
        shaped = () if self._shaper is None else ("raw_rewards", *self._shaper.outputs)
        head = () if self._scorer.contract.readout is None else ("spread", "outputs")
        return (*shaped, *head, *(("steps",) if self._returns_steps else ()))

    @property
    def startup_log(self) -> Sequence[str]:
        contract = self._contract
        lines = [
            f"Scoring contract {contract.hash}",
            f"Model fingerprint {self.fingerprint or '(none)'}",
            *_SCALES.get(contract.reward_scale, ()),
        ]
        if contract.shaping is not None:
            rules = json.loads(contract.shaping).items()
            lines += [
                "Shaped rewards:",
                *(f"  {name}: {_format_rule(rule)}" for name, rule in rules),
            ]
        if self._scorer.prefix_cache_bytes:
            tokens, size = self._config.prefix_cache_tokens, self._scorer.prefix_cache_bytes / 2**20
            states = self._scorer.num_cached_states
            of_states = f" and {states:,} states of linear attention" if states else ""
            lines.append(
                f"Prefix cache: {tokens:,} tokens{of_states}, {size:,.0f} MiB on each rank"
            )
        return [self._line_prefix + line for line in lines]

    def report(self) -> str | None:
        cached = self._scorer.counts.cached
        line = self._intake.meter.take_line(
            self._batcher.waiting_rows, cached - self._reported_cached
        )
        self._reported_cached = cached
        return None if line is None else self._line_prefix + line

    def stop(self) -> None:
        if self.rows_in_flight:
            print(
                f"{self.rows_in_flight} rows were not answered within server.exit_timeout_secs",
                flush=True,
            )
        self._intake.close()
        if self._shaper is not None:
            self._shaper.save()
        self._batcher.close()


def _split_by_sample(
    scored: ScoredRows, encoded: EncodedRequest, ends: np.ndarray, sample_rows: np.ndarray
) -> ScoredRows:
    """Convert rows of turns or steps to the rows of N samples, each with its ``steps``.

    Args:
        scored: one row per turn or step, sample after sample, then the rows of whole samples, if
            there are any.
        encoded: the samples.
        ends: ``[N]`` end of each sample's turns or steps in the rows.
        sample_rows: ``[N]`` index of the row with each whole sample's reward.
    """
    steps = np.full(len(ends), None, dtype=np.object_)
    for number, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        steps[number] = StepRewards(scored.rewards[start:end], encoded.spans[number])
    arrays: dict[str, Any] = {
        name: values[sample_rows]
        for name, values in vars(scored).items()
        if isinstance(values, np.ndarray) and name != "exceeded"  # exceeded is by sample already
    }
    return replace(scored, **arrays, steps=steps)


# Log lines at the start of a server that explain rewards on these scales; other scales need none.
_SCALES = {
    PROBABILITY: ["Rewards are probabilities, from 0 to 1"],
    LOG_ODDS: ["Rewards are log-odds of a correct step; their sigmoid is its probability"],
}


def _format_rule(rule: Any) -> str:
    """Format a shaping rule's value for the log: short hashes, no brackets around one number."""
    if isinstance(rule, dict):
        return ", ".join(f"{name} {_format_rule(value)}" for name, value in rule.items())
    if isinstance(rule, list):
        return ", ".join(map(_format_rule, rule))
    return f"{rule:.4g}" if isinstance(rule, float) else str(rule)[:12]
