"""The service of a gateway that combines the rewards of several parts into one reward.

The parts are a reward model (``model``), a judge (``judge``) and Python functions (``parts.py``).
``Combination`` does the arithmetic; ``ComposedService`` sends samples to the parts, and answers
with the combined reward and the value of each part.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_aligner.config.gateway import (
    JUDGE_PART,
    MODEL_PART,
    CombineConfig,
    CombineKind,
    GatewayConfig,
    GatewayRunConfig,
)
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import adjust_components, one_reward
from nemo_aligner.serving.client.calls import run_all
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.parts import Part, Prompts, prompt_keys
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.scoring import ScoringService, TemplateParts

_REWARD = "reward"
# Seconds after which a request whose judge or function has failed may be sent again.
_RETRY_AFTER_S = 1
_PART_FAILURES = (FailureKind.unscored, FailureKind.slow, FailureKind.unreachable)


@dataclass(frozen=True)
class Combination:
    """The arithmetic that combines P parts into one reward.

    Attributes:
        names: names of the parts.
        kind: weighted sum, minimum, or gate.
        weights: P weights.
        offsets: P numbers that are added to the parts before they are weighted.
        gate: with the kind ``gate``, the name of the part that scores every sample.
        margin: with the kind ``gate``, the margin below which all parts score a sample.
        boundary: with the kind ``gate``, the value of the part ``gate`` that separates good
            responses from bad ones. If a prompt has only one response, the margin of that response
            is its distance to the boundary.
    """

    names: tuple[str, ...]
    kind: CombineKind
    weights: tuple[float, ...]
    offsets: tuple[float, ...]
    gate: str
    margin: float
    boundary: float = 0.0

    @classmethod
    def of(cls, names: Sequence[str], config: CombineConfig, boundary: float) -> Combination:
        """Select from ``config`` the weight (default 1) and offset (default 0) of each part.

        Args:
            names: names of the parts, in the order of the columns that ``combine`` gets.
            boundary: see the attribute ``boundary``.
        """
        weights = tuple(config.weights.get(name, 1.0) for name in names)
        offsets = tuple(config.offsets.get(name, 0.0) for name in names)
        gate, margin = config.gate_part, config.gate_margin
        return cls(tuple(names), config.kind, weights, offsets, gate, margin, boundary)

    @property
    def first_names(self) -> tuple[str, ...]:
        """Names of the parts that score every sample."""
        return (self.gate,) if self.kind is CombineKind.gate else self.names

    def find_close(self, values: np.ndarray, keys: Sequence[str | None]) -> np.ndarray:
        """Find the samples whose margin in the part ``gate`` is too small to decide.

        The margin is the distance to the nearest other response to the same prompt in the request;
        for the only response to a prompt it is the distance to ``boundary``.

        Args:
            values: ``[N]`` values of the part; NaN for samples without one.
            keys: for each sample, the key of its prompt (``prompt_keys``); None for a raw text.

        Returns:
            ``[N]`` bool; false where the value is NaN.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for number, key in enumerate(keys):
            if np.isfinite(values[number]):
                groups[f"raw text {number}" if key is None else key].append(number)
        margins = np.full(len(values), np.inf)
        for group in groups.values():
            numbers = np.array(group)[np.argsort(values[group], kind="stable")]
            gaps = np.diff(values[numbers])
            if len(numbers) == 1:
                gaps = np.abs(values[numbers] - self.boundary)
            # Each value but the first has a lower neighbor, and each but the last a higher one.
            margins[numbers[-len(gaps) :]] = gaps
            margins[numbers[: len(gaps)]] = np.minimum(margins[numbers[: len(gaps)]], gaps)
        return margins < self.margin

    def combine(self, parts: np.ndarray, is_decided: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Combine parts ``[N, P]`` into one reward for each sample.

        Args:
            parts: float64; NaN for a part that is missing.
            is_decided: ``[N]`` bool, samples whose reward is the part ``gate`` by itself.

        Returns:
            Rewards ``[N]`` float32, NaN where a needed part is missing, and infinite where
            float32 overflows; and what each part adds to the weighted sum, ``[N, P]`` float64.
        """
        # numpy would warn of an infinite reward, which the caller reports with its row.
        with np.errstate(over="ignore", invalid="ignore"):
            terms = (parts + np.asarray(self.offsets)) * np.asarray(self.weights)
            is_optional = np.array([name != self.gate for name in self.names])
            terms[np.outer(is_decided, is_optional)] = 0.0
            if self.kind is CombineKind.minimum:
                return terms.min(axis=1).astype(np.float32), terms
            rewards = terms.sum(axis=1).astype(np.float32)
            return rewards, adjust_components(terms, rewards)


class ComposedService(ScoringService):
    """Scores samples with a reward model and other parts, and combines them into one reward.

    A sample that lacks a part that it needs has no reward. If a part has failed, the request may be
    sent again, so protocols that cannot report errors of single rows answer 503.
    """

    def __init__(
        self, model: ScoringService | None, parts: Sequence[Part], config: GatewayRunConfig
    ) -> None:
        """Combine the rewards of ``model`` (None: there is no reward model) and ``parts``."""
        settings: GatewayConfig = config.gateway
        super().__init__(settings)
        self._model = model
        self._parts = {part.name: part for part in parts}
        self._fails_requests = config.combine.fail_requests
        boundary = settings.reward_threshold or 0.0
        self._combination = Combination.of(config.parts, config.combine, boundary)
        self._model_contract: ScoringContract | None = None

    async def start(self) -> None:
        if self._model is not None:
            await self._model.start()

    async def close(self) -> None:
        await super().close()
        for part in self._parts.values():
            await part.close()
        if self._model is not None:
            await self._model.close()

    async def template_parts(self) -> TemplateParts:
        return TemplateParts() if self._model is None else await self._model.template_parts()

    async def read_contract(self) -> ScoringContract:
        if self._model is None:
            text = "no reward model is configured (backends), so there is no scoring contract"
            raise RequestError(text, FailureKind.bad_request)
        return self._note_model(await self._model.read_contract())

    async def find_contract(self) -> ScoringContract | None:
        contract = None if self._model is None else await self._model.find_contract()
        return None if contract is None else self._note_model(contract)

    async def probe(self) -> dict[str, str | None]:
        """Map each server to the reason why it computes no rewards; None if it does.

        If a part that scores every sample is missing, all servers have a reason.
        """
        states: dict[str, str | None] = {}
        missing: list[str] = []
        services = self._services()
        # Probe all at the same time, because each probe may take as long as its limit allows.
        answers = await asyncio.gather(*(service.probe() for service in services.values()))
        for name, states_of_part in zip(services, answers, strict=True):
            states |= states_of_part
            if None not in states_of_part.values() and name in self._combination.first_names:
                missing.append(name)
        if not missing:
            return states
        reason = f"it answers, but there are no rewards without {' and '.join(missing)}"
        return {server: state or reason for server, state in states.items()}

    async def statistics(self) -> Mapping[str, Mapping[str, float] | None]:
        counts: dict[str, Mapping[str, float] | None] = {}
        if self._model is not None:
            counts |= await self._model.statistics()
        for part in self._parts.values():
            counts |= part.statistics()
        return counts

    def _services(self) -> dict[str, ScoringService | Part]:
        model = {} if self._model is None else {MODEL_PART: self._model}
        return {**model, **self._parts}

    async def _score(
        self, request: ScoreRequest, aside: Collection[FailureKind], is_probe: bool
    ) -> ScoredRows:
        if request.texts is None and self._parts:
            text = "tokens: a judge and functions read texts; send texts or conversations"
            raise RequestError(text, FailureKind.bad_request)
        keys = await self._find_prompts(request) if self._parts and not is_probe else []
        model_rows = await self._score_by_model(request, aside, is_probe)
        is_sum = self._combination.kind is not CombineKind.minimum
        if is_probe:  # only to find out whether the model accepts the sample; judges cost too much
            names = self._combination.names
            missing = np.full((len(model_rows.rewards), len(names)), np.nan)
            return replace(
                model_rows,
                rewards=np.zeros((len(missing), 1), np.float32),
                part_names=names,
                parts=missing,
                components=missing if is_sum else None,
            )
        parts = self._begin_table(model_rows)
        failures = {
            row: RequestError(reason, _kind_of(row, model_rows))
            for row, reason in model_rows.errors.items()
        }
        is_decided, comparisons = await self._fill_table(request, keys, parts, failures)
        rewards, terms = self._combination.combine(parts, is_decided)
        for row in np.flatnonzero(~np.isfinite(rewards)).tolist():
            failures.setdefault(row, _overflow_failure(rewards[row]))
        self._check_failures(request, failures, aside)
        rewards[[*failures]] = np.nan
        parts[np.isinf(parts)] = np.nan
        return ScoredRows(
            rewards[:, None],
            {row: failures[row].message for row in sorted(failures)},
            model_rows.exceeded,
            self._hash_of(model_rows),
            model_rows.model_fingerprint,
            part_names=self._combination.names,
            parts=parts,
            components=terms if is_sum else None,
            comparisons=comparisons,
            unscored=frozenset(row for row in failures if failures[row].kind in _PART_FAILURES),
            temporary=frozenset(row for row in failures if failures[row].kind.reaction == "retry"),
        )

    async def _find_prompts(self, request: ScoreRequest) -> Sequence[str | None]:
        """Return the keys of the prompts, after a check that parts can score so many samples.

        They are None if neither a judge nor a gate compares the replies to a prompt.
        """
        samples = request.texts or ()
        if JUDGE_PART not in self._parts and self._combination.kind is not CombineKind.gate:
            return [None] * len(samples)
        keys = await prompt_keys(samples, request.num_prompt_turns)
        for name in self._combination.first_names:
            if name in self._parts:
                self._parts[name].check_size(keys)
        return keys

    async def _score_by_model(
        self, request: ScoreRequest, aside: Collection[FailureKind], is_probe: bool
    ) -> ScoredRows:
        """Return the reward model's rows; without a model, rows of zeros that have no errors."""
        samples = request.texts or []
        if self._model is None:
            rewards = np.zeros((len(samples), 1), dtype=np.float32)
            return ScoredRows(rewards, {}, np.zeros(len(samples), dtype=bool))
        # Rows that were rejected before are inserted only once, by ``answer`` of this service.
        try:
            scored = await self._model.answer(replace(request, refused={}), aside, is_probe)
        except RequestError as error:
            renumbered = error.renumber(request.row_numbers)
            if renumbered is error:
                raise
            raise renumbered from error
        is_missing = ~np.isfinite(scored.rewards).all(axis=1)
        is_missing[[*scored.errors]] = False
        if is_missing.any():
            row = request.row_numbers[int(np.argmax(is_missing))]
            text = f"row {row}: the reward model gave a reward that is not finite, and no error"
            raise RequestError(text, FailureKind.internal)
        if self._model.contract is not None:
            self._note_model(self._model.contract)
        return scored

    def _begin_table(self, model_rows: ScoredRows) -> np.ndarray:
        """Return the parts ``[N, P]`` with only the model's rewards; all others are NaN."""
        names = self._combination.names
        parts = np.full((len(model_rows.rewards), len(names)), np.nan)
        if self._model is not None:
            contract = self._model.contract
            weights = (1.0,) if contract is None else contract.attribute_weights
            if contract is None and model_rows.rewards.shape[1] > 1:
                raise RequestError(
                    f"the model has {model_rows.rewards.shape[1]} attributes, and its server "
                    "publishes no scoring contract with their weights; wanted one reward",
                    FailureKind.internal,
                )
            parts[:, names.index(MODEL_PART)] = one_reward(model_rows.rewards, weights)
        return parts

    async def _fill_table(
        self,
        request: ScoreRequest,
        keys: Sequence[str | None],
        parts: np.ndarray,
        failures: dict[int, RequestError],
    ) -> tuple[np.ndarray, list[dict[str, float]]]:
        """Score samples with all parts that they need, and record failures.

        Args:
            request: N samples.
            keys: what ``_find_prompts`` returns; none if there are no parts but the model.
            parts: ``[N, P]``, filled in place.
            failures: why a sample has no reward, by its number; rows in it are not scored.

        Returns:
            ``[N]`` bool, the samples whose reward is the gate's part by itself; and the judge's
            comparisons.
        """
        is_decided = np.zeros(len(parts), dtype=bool)
        first_names = [name for name in self._combination.first_names if name in self._parts]
        comparisons = await self._score_by_parts(
            first_names, request, keys, parts, failures, is_decided
        )
        if self._combination.kind is CombineKind.gate:
            values = parts[:, self._combination.names.index(self._combination.gate)]
            is_close = self._combination.find_close(values, keys)
            is_decided = np.isfinite(values) & ~is_close
        names = [name for name in self._parts if name not in first_names]
        comparisons += await self._score_by_parts(names, request, keys, parts, failures, is_decided)
        return is_decided, comparisons

    async def _score_by_parts(
        self,
        names: Sequence[str],
        request: ScoreRequest,
        keys: Sequence[str | None],
        parts: np.ndarray,
        failures: dict[int, RequestError],
        is_decided: np.ndarray,
    ) -> list[dict[str, float]]:
        """Score the rows that still need them with several parts at the same time.

        The arguments are those of ``_fill_table``.
        """
        samples = request.texts or ()
        rows = [row for row in range(len(keys)) if row not in failures and not is_decided[row]]
        if not rows or not names:
            return []
        selected = [samples[row] for row in rows]
        unopposed = _find_unopposed(request, keys, failures)
        prompts = Prompts([keys[row] for row in rows], request.num_prompt_turns, unopposed)
        results = await run_all(self._parts[name].score(selected, prompts) for name in names)
        comparisons = []
        for name, scores in zip(names, results, strict=True):
            parts[rows, self._combination.names.index(name)] = scores.values
            for number, failure in scores.failures.items():
                error = RequestError(f"{name}: {failure.message}", failure.kind)
                failures.setdefault(rows[number], error)
            for comparison in scores.comparisons:
                pair = {key: rows[int(comparison[key])] for key in ("response_i", "response_j")}
                comparisons.append({**comparison, **pair})
        return comparisons

    def _check_failures(
        self,
        request: ScoreRequest,
        failures: Mapping[int, RequestError],
        aside: Collection[FailureKind],
    ) -> None:
        """Raise RequestError if the whole request fails because rows have no reward."""
        fatal = {
            row: failure
            for row, failure in failures.items()
            if failure.kind not in aside
            or (self._fails_requests and failure.kind in _PART_FAILURES)
        }
        if not fatal:
            return
        row = min(fatal)
        failure, number = fatal[row], request.row_numbers[row]
        retry_s = _RETRY_AFTER_S if failure.kind.reaction == "retry" else None
        raise RequestError(f"row {number}: {failure.message}", failure.kind, retry_s)

    def _hash_of(self, model_rows: ScoredRows) -> str | None:
        """Return the contract hash of the combined rewards; None if that of the model differs."""
        model_contract = None if self._model is None else self._model.contract
        if model_contract is None or model_rows.contract_hash != model_contract.hash:
            return None
        return self._note_model(model_contract).hash

    def _note_model(self, contract: ScoringContract) -> ScoringContract:
        """Return the contract of the combined rewards; ``contract`` is that of the model."""
        assert self._model is not None
        self.fingerprint = self._model.fingerprint
        if contract is not self._model_contract or self.contract is None:
            self._model_contract = contract
            self.contract = self._build_contract(contract)
        return self.contract

    def _build_contract(self, contract: ScoringContract) -> ScoringContract:
        combination = self._combination
        rules = {
            "combine": {
                "kind": combination.kind.value,
                "weights": dict(zip(combination.names, combination.weights, strict=True)),
                "offsets": dict(zip(combination.names, combination.offsets, strict=True)),
            },
            MODEL_PART: {"contract": contract.hash},
            **{name: part.rules for name, part in self._parts.items()},
        }
        if combination.kind is CombineKind.gate:
            gate = {"part": combination.gate, "margin": combination.margin}
            rules["combine"] |= {"gate": {**gate, "boundary": combination.boundary}}
        return replace(
            contract,
            attributes=(_REWARD,),
            attribute_weights=(1.0,),
            label_means=(0.0,),
            # These fields describe the model's rewards, so they are wrong for combined ones.
            readout=None,
            reward_mean=None,
            reward_std=None,
            measured_on=None,
            shaping=json.dumps(rules, sort_keys=True),
        )


def _kind_of(row: int, model_rows: ScoredRows) -> FailureKind:
    if row not in model_rows.unscored:
        return FailureKind.bad_request
    # Tokenizing was too slow, or the parts of a backend that is itself a gateway failed.
    return FailureKind.slow if row in model_rows.temporary else FailureKind.unscored


def _find_unopposed(
    request: ScoreRequest,
    keys: Sequence[str | None],
    failures: Mapping[int, RequestError],
) -> set[str | None]:
    """Return the keys of prompts to which one reply is left, because all others were rejected."""
    rejected = (row for row, failure in failures.items() if failure.kind not in _PART_FAILURES)
    num_sent, num_left = Counter(keys), Counter(keys)
    num_left.subtract(keys[row] for row in rejected)
    # Replies that could not even be read have a known prompt only if all replies share it.
    num_unread = 0 if request.num_prompt_turns is None else len(request.refused)
    return {key for key, left in num_left.items() if left == 1 < num_sent[key] + num_unread}


def _overflow_failure(reward: float) -> RequestError:
    text = (
        f"the combined reward is {reward}, wanted a finite number in float32. Check the values of "
        "the parts, combine.weights and combine.offsets"
    )
    return RequestError(text, FailureKind.unscored)
