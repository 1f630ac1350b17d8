"""The reward model and its scoring contract, as a server offers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.scoring.shaping import RewardShaper
from nemo_aligner.serving.batcher import Batcher
from nemo_aligner.serving.meter import Meter
from nemo_aligner.serving.ranks import ModelRanks, Operation
from nemo_aligner.serving.service import Endpoint, Tensors
from nemo_aligner.serving.services.reward import RewardService, ServableScorer
from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import Failure, ScoreReply
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.turn_end import TurnEnd

_SCORE = "score"


class RewardModelServable:
    """A scorer on every rank; ``prepare`` is called on each before it scores."""

    def __init__(
        self,
        scorer: ServableScorer,
        config: ServerConfig,
        shaper: RewardShaper | None = None,
        prepare: Callable[[], None] = lambda: None,
        turn_end: TurnEnd | None = None,
    ) -> None:
        self._scorer = scorer
        self._config = config
        self._shaper = shaper
        self._prepare = prepare
        self._turn_end = turn_end

    @property
    def operations(self) -> Mapping[str, Operation]:
        return {_SCORE: self._score}

    def forget(self) -> None:
        self._scorer.forget()

    def start(self, ranks: ModelRanks) -> RewardModel:
        if self._shaper is not None:
            self._shaper.check_file()
        # The first forward pass is slow, and may show that the model cannot run.
        ranks.execute(_SCORE, [[0]])
        return RewardModel(self._scorer, self._config, self._shaper, ranks, self._turn_end)

    def _score(self, sequences: Sequence[Sequence[int]]) -> object:
        self._prepare()
        # Where a head has several outputs for an attribute, the answer has them, too.
        if self._scorer.contract.readout is not None:
            return self._scorer.score_outputs(sequences)
        return self._scorer.score_token_lists(sequences)


class RewardModel:
    """The endpoints ``reward_model`` and ``contract``."""

    def __init__(
        self,
        scorer: ServableScorer,
        config: ServerConfig,
        shaper: RewardShaper | None,
        ranks: ModelRanks,
        turn_end: TurnEnd | None = None,
    ) -> None:
        self._scorer = scorer
        self._config = config
        self._meter = Meter()
        self._batcher = Batcher(partial(ranks.submit, _SCORE), scorer.tokens_per_call, self._meter)
        read_outputs = None if scorer.contract.readout is None else scorer.read_outputs
        self._service = RewardService(
            scorer, self._batcher, config, self._meter, shaper, read_outputs
        )
        self._cached = 0
        self._turn_end = turn_end

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        optional = self._service.optional_outputs
        rewards = Endpoint(
            name=kserve.MODEL_NAME,
            inputs=kserve.INPUTS,
            outputs=[
                *kserve.OUTPUTS,
                *(spec for spec in kserve.OPTIONAL_OUTPUTS if spec.name in optional),
            ],
            answer=self._answer,
            max_rows=self._config.max_batch_size,
        )
        contract = self._service.contract
        return [rewards, contract_endpoint(contract, self.statistics, self._turn_end)]

    @property
    def greeting(self) -> Sequence[str]:
        contract = self._service.contract
        lines = [f"Scoring contract {contract.hash}"]
        if contract.shaping is not None:
            rules = json.loads(contract.shaping).items()
            lines += ["Shaped rewards:", *(f"  {name}: {_shown(rule)}" for name, rule in rules)]
        if self._scorer.prefix_cache_bytes:
            kept, size = self._config.prefix_cache_tokens, self._scorer.prefix_cache_bytes / 2**20
            lines.append(f"Prefix cache: {kept:,} tokens, {size:,.0f} MiB on each rank")
        return lines

    async def _answer(self, inputs: Tensors) -> Tensors | Failure:
        reply = await answer_request(self._service, inputs)
        return reply if isinstance(reply, Failure) else kserve.encode_reply(reply)

    def statistics(self) -> dict[str, float]:
        """What was counted since the start, and the queue now; see ``Meter.statistics``."""
        counts = self._scorer.counts
        return {
            **self._meter.statistics(),
            "computed_tokens": counts.computed,
            "cached_tokens": counts.cached,
            "tokens_per_call": self._scorer.tokens_per_call,
            "waiting_rows": self._batcher.waiting_rows,
        }

    def report(self) -> str | None:
        cached = self._scorer.counts.cached
        line = self._meter.take_line(self._batcher.waiting_rows, cached - self._cached)
        self._cached = cached
        return line

    def close(self) -> None:
        left = self._service.rows_inside
        if left:
            print(f"{left} rows were not answered within server.exit_timeout_secs", flush=True)
        self._service.close()
        self._batcher.close()


def _shown(rule: Any) -> str:
    """Of models no more than the beginning of a hash, of one number no brackets."""
    if isinstance(rule, dict):
        return ", ".join(f"{name} {_shown(value)}" for name, value in rule.items())
    if isinstance(rule, list):
        return ", ".join(map(_shown, rule))
    return f"{rule:.4g}" if isinstance(rule, float) else str(rule)[:12]


async def answer_request(service: RewardService, inputs: Tensors) -> ScoreReply | Failure:
    """What one request's tensors are answered with."""
    return await service.answer(
        *kserve.size_of_request(inputs), lambda: kserve.decode_request(inputs)
    )


def contract_endpoint(
    contract: ScoringContract,
    statistics: Callable[[], Mapping[str, float]],
    turn_end: TurnEnd | None = None,
) -> Endpoint:
    """``contract``: how the texts of this server become scores, and what it has counted.

    Counters have no endpoint of their own: each is a process more, and 1.7 s more at the start.
    """
    published = {**kserve.encode_contract(contract), **kserve.encode_turn_end(turn_end)}

    async def publish(inputs: Tensors) -> Tensors:
        return {**published, **kserve.encode_statistics(statistics())}

    return Endpoint(
        kserve.CONTRACT_MODEL_NAME,
        kserve.CONTRACT_INPUTS,
        kserve.CONTRACT_OUTPUTS,
        publish,
        comes_first=True,  # Triton loads a model in seconds, and answers others meanwhile
    )
