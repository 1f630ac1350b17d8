"""Which layouts of a model fit on so many GPUs, with as little recomputation as fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.errors import ConfigError
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.cost import Machine, Plan, StepTime, even_packs, step_time
from nemo_aligner.planning.memory import Memory, fullest_stage


@dataclass(frozen=True)
class Candidate:
    """A layout, what its fullest rank holds, and the time of a step."""

    plan: Plan
    memory: Memory
    time: StepTime


@dataclass(frozen=True)
class Planner:
    """A model, the batch of a step, and the GPUs, of which each rank may fill ``usable`` bytes.

    A step has ``batch`` pairs of two sequences of ``length`` tokens without a common prefix, in
    packs of at most ``budget`` tokens. ``recompute`` None is as few layers as fit.
    """

    shape: ModelShape
    machine: Machine
    usable: float
    batch: int
    length: int
    budget: int
    precision: Precision = Precision.bf16
    recompute: Recompute | None = None
    freeze_layers: int = 0
    cpu_offload: bool = False

    def candidates(self, gpus: int) -> list[Candidate]:
        """Every layout on so many GPUs; tensor parallel groups stay inside a node."""
        return [self._candidate(plan) for plan in self._plans(gpus)]

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that fit, the fastest first; of equals the one that holds less."""
        fitting = [each for each in candidates if each.memory.total <= self.usable]
        return sorted(fitting, key=lambda each: (each.time.total, each.memory.total))

    def least_gpus(self) -> Plan | None:
        """The layout on the fewest GPUs that fits, recomputing as much as is allowed."""
        found: Plan | None = None
        sizes = product(range(1, self.machine.ranks_per_node + 1), self._stages())
        for tp, pp in sizes:
            most = self.batch
            if found is not None:
                most = min(most, (found.num_ranks - 1) // (tp * pp))
            # More ranks split what one holds: where the most do not fit, fewer do not.
            if self._most_recomputed(tp, pp, most) is not None:
                plans = (self._most_recomputed(tp, pp, dp) for dp in range(1, most + 1))
                found = next(plan for plan in plans if plan is not None)
        return found

    def tokens_per_second(self, candidate: Candidate) -> float:
        return self.batch * 2 * self.length / candidate.time.total

    def _candidate(self, plan: Plan) -> Candidate:
        tried = self._recomputations(plan)
        # Each keeps less than the one before.
        index = bisect_left(tried, True, key=self._fits)
        chosen = tried[min(index, len(tried) - 1)]
        memory = fullest_stage(self.shape, chosen)
        return Candidate(chosen, memory, step_time(self.shape, chosen, self.machine))

    def _recomputations(self, plan: Plan) -> list[Plan]:
        """The plan with what may be recomputed: nothing, then layer by layer."""
        if self.recompute is not None:
            return [replace(plan, recompute=self.recompute)]
        full = replace(plan, recompute=Recompute.full)
        layers = self.shape.num_layers // plan.pp
        some = [replace(full, recompute_layers=count) for count in range(1, layers)]
        return [replace(plan, recompute=Recompute.none), *some, full]

    def _fits(self, plan: Plan) -> bool:
        return fullest_stage(self.shape, plan).total <= self.usable

    def _most_recomputed(self, tp: int, pp: int, dp: int) -> Plan | None:
        """A plan that fits with all recomputed that may be."""
        plans = (self._recomputations(plan)[-1] for plan in self._plans_of(tp, pp, dp))
        return next((plan for plan in plans if self._fits(plan)), None)

    def _stages(self) -> list[int]:
        layers = self.shape.num_layers
        return [pp for pp in range(1, layers + 1) if layers % pp == 0]

    def _plans(self, gpus: int) -> Iterator[Plan]:
        sizes = product(range(1, self.machine.ranks_per_node + 1), self._stages())
        for tp, pp in sizes:
            if gpus % (tp * pp) == 0:
                yield from self._plans_of(tp, pp, gpus // (tp * pp))

    def _plans_of(self, tp: int, pp: int, dp: int) -> Iterator[Plan]:
        """With and without sequence parallelism; none where the model or the batch do not split."""
        try:
            self.shape.check_fits(tp, pp)
        except ConfigError:
            return
        if not 1 <= dp <= self.batch:  # a data parallel rank without a pair is refused
            return
        packs = even_packs(-(-self.batch // dp), self.length, self.budget)
        for sequence_parallel in (False, True)[: min(tp, 2)]:
            yield Plan(
                packs,
                tp=tp,
                pp=pp,
                dp=dp,
                sequence_parallel=sequence_parallel,
                precision=self.precision,
                freeze_layers=self.freeze_layers,
                cpu_offload=self.cpu_offload,
                equal_heads=self._copies_keys(),
            )

    def _copies_keys(self) -> bool:
        """As ``copies_keys`` says of an Ampere GPU or a newer one; a soft cap has its own way."""
        is_grouped = self.shape.num_query_groups < self.shape.num_attention_heads
        has_cap = self.shape.attn_logit_softcapping is not None
        return self.precision is Precision.fp32 and is_grouped and not has_cap
