"""Search for the fastest parallel layouts that fit into memory, for ``nemo-aligner plan``.

``PlanRequest`` holds the options of the command, and ``Planner`` searches. ``render.py`` renders
the tables that the command prints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import (
    DEFAULT_SEQ_LENGTH,
    BasePrecision,
    LoraConfig,
    ModelConfig,
    Recompute,
)
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.layer import (
    copies_keys_without_flash,
    why_no_flash_attention,
    widest_head,
)
from nemo_aligner.models.shapes.lora import LoraShape, check_lora
from nemo_aligner.models.shapes.quantized import check_quantizable
from nemo_aligner.planning.cost import Plan, even_packs
from nemo_aligner.planning.memory import GIB, Memory, fullest_stage
from nemo_aligner.planning.step_time import Machine, StepTime, peak_flops, step_time
from nemo_aligner.utils.errors import ConfigError

# Context parallelism gives each rank two chunks of a sequence. Layouts whose chunks have fewer
# tokens than this are not tried, because the work on a chunk must outweigh sending its keys.
_LEAST_CHUNK = 1024


@dataclass(frozen=True)
class Candidate:
    """A parallel layout that the planner has evaluated.

    Attributes:
        plan: the layout, and the activations that it recomputes.
        memory: memory of the rank that needs the most.
        time: estimated time of a step.
    """

    plan: Plan
    memory: Memory
    time: StepTime


@dataclass(frozen=True)
class Planner:
    """Search for the best parallel layouts for one model, batch size and kind of GPU.

    Attributes:
        usable: bytes of a GPU's memory that a step may use.
        batch: number of pairs in a step. Each pair has two sequences of ``length`` tokens that
            share no prefix.
        budget: most tokens of a pack (``model.micro_batch_tokens``).
        recompute: the activations that every layout recomputes; None: each layout recomputes as
            few layers as are necessary to fit into memory.
        stored_lora: the checkpoint's adapters. They must fit a layout even if ``shape`` has none,
            because training loads them before it folds them into the weights.
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
    activations_offload: bool = False
    stored_lora: LoraShape | None = None

    def candidates(self, gpus: int) -> list[Candidate]:
        """Evaluate every layout of ``gpus`` GPUs whose tensor parallel groups fit into a node."""
        return [self._candidate(plan) for plan in self._plans(gpus)]

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the layouts that fit into memory, the fastest first.

        Of equally fast layouts, the one that needs less memory comes first.
        """
        fitting = [layout for layout in candidates if layout.memory.total <= self.usable]
        return sorted(fitting, key=lambda layout: (layout.time.total, layout.memory.total))

    def least_gpus(self) -> Plan | None:
        """Find the layout that fits on the fewest GPUs, with the most recomputation allowed.

        ``recompute`` says what is allowed: if it is None, all layers are recomputed. The result is
        None if no layout fits on any number of GPUs.
        """
        smallest: Plan | None = None
        for tp, cp, pp in self._sizes():
            largest_dp = self.batch
            if smallest is not None:
                largest_dp = min(largest_dp, (smallest.num_ranks - 1) // (tp * cp * pp))
            # More data parallel ranks (dp) hold smaller shards of the optimizer's state. So if the
            # layout does not fit with the largest dp of any expert parallel size, it never fits.
            largest = self._largest_replicas(cp, largest_dp)
            if any(self._most_recomputed(tp, cp, pp, dp) is not None for dp in largest):
                plans = (self._most_recomputed(tp, cp, pp, dp) for dp in range(1, largest_dp + 1))
                smallest = next(plan for plan in plans if plan is not None)
        return smallest

    def tokens_per_second(self, candidate: Candidate) -> float:
        """Return the throughput of training with this layout, in tokens/s over all ranks."""
        return self.batch * 2 * self.length / candidate.time.total

    def _candidate(self, plan: Plan) -> Candidate:
        """Choose how many layers a layout recomputes, and estimate its memory and time.

        It recomputes as few layers as fit into memory. With offloaded activations, it recomputes
        all layers or none, whichever fits and is faster.
        """
        plans = self._recomputations(plan)
        if plan.activations_offload:
            # Recomputing activations can be faster than copying them to the host and back.
            fitting = [plan for plan in plans if self._fits(plan)] or plans[-1:]
            chosen = min(fitting, key=lambda plan: self._time(plan).total)
        else:
            # Bisection works because each plan keeps less in memory than the previous one.
            index = bisect_left(plans, True, key=self._fits)
            chosen = plans[min(index, len(plans) - 1)]
        return Candidate(chosen, fullest_stage(self.shape, chosen), self._time(chosen))

    def _time(self, plan: Plan) -> StepTime:
        return step_time(self.shape, plan, self.machine)

    def _recomputations(self, plan: Plan) -> list[Plan]:
        """List variants of a plan with more and more recomputed layers, from none to all.

        If ``recompute`` is set, there is only one variant. With offloaded activations, there are
        only two: none and all.
        """
        if self.recompute is not None:
            return [replace(plan, recompute=self.recompute)]
        if not self.shape.can_recompute_fully:
            kinds = [Recompute.none, Recompute.selective]
            return [replace(plan, recompute=kind) for kind in kinds]
        full = replace(plan, recompute=Recompute.full)
        if plan.activations_offload:
            return [replace(plan, recompute=Recompute.none), full]
        layers = self.shape.num_layers // plan.pp
        partial = [replace(full, recompute_layers=count) for count in range(1, layers)]
        return [replace(plan, recompute=Recompute.none), *partial, full]

    def _fits(self, plan: Plan) -> bool:
        return fullest_stage(self.shape, plan).total <= self.usable

    def _most_recomputed(self, tp: int, cp: int, pp: int, dp: int) -> Plan | None:
        """Find a plan with these sizes that fits with the most recomputation allowed, or None."""
        plans = (self._recomputations(plan)[-1] for plan in self._plans_of(tp, cp, pp, dp))
        return next((plan for plan in plans if self._fits(plan)), None)

    def _sizes(self) -> Iterator[tuple[int, int, int]]:
        """Yield the sizes of tensor, context and pipeline parallelism to try, as ``(t, c, p)``."""
        layers = self.shape.num_layers
        contexts = [1]
        while self.length >= 2 * _LEAST_CHUNK * 2 * contexts[-1]:
            contexts.append(2 * contexts[-1])
        stages = [pp for pp in range(1, layers + 1) if layers % pp == 0]
        return product(range(1, self.machine.ranks_per_node + 1), contexts, stages)

    def _plans(self, gpus: int) -> Iterator[Plan]:
        for tp, cp, pp in self._sizes():
            if gpus % (tp * cp * pp) == 0:
                yield from self._plans_of(tp, cp, pp, gpus // (tp * cp * pp))

    def _plans_of(self, tp: int, cp: int, pp: int, dp: int) -> Iterator[Plan]:
        """Yield all plans with these sizes.

        The plans differ in the size of expert parallelism, in sequence parallelism (on or off), and
        in how context parallel ranks exchange keys (all-gather or ring). If the sizes cannot split
        the model or the batch, nothing is yielded.
        """
        try:
            loaded_shape = replace(self.shape, lora=self.shape.lora or self.stored_lora)
            loaded_shape.check_fits(tp, pp, cp=cp)
            check_quantizable(self.shape, tp)
        except ConfigError:
            return
        if not 1 <= dp <= self.batch:  # training rejects a data parallel rank without a pair
            return
        packs = even_packs(-(-self.batch // dp), self.length, self.budget)
        rings = (False, True) if cp > 1 and self._can_ring() else (False,)
        kinds = product(self._expert_sizes(dp * cp), (False, True)[: min(tp, 2)], rings)
        for ep, sequence_parallel, ring in kinds:
            yield Plan(
                packs,
                tp=tp,
                cp=cp,
                pp=pp,
                dp=dp,
                ep=ep,
                sequence_parallel=sequence_parallel,
                ring=ring,
                precision=self.precision,
                freeze_layers=self.freeze_layers,
                cpu_offload=self.cpu_offload,
                activations_offload=self.activations_offload,
                equal_heads=self._copies_keys(),
                fused_kernels=True,
                fused_dequantization=True,
            )

    def _expert_sizes(self, replicas: int) -> list[int]:
        """List the sizes of expert parallelism: all divisors of ``replicas`` and of the experts."""
        experts = self.shape.experts
        largest = 1 if experts is None else gcd(replicas, experts.count)
        return [ep for ep in range(1, largest + 1) if largest % ep == 0]

    def _largest_replicas(self, cp: int, limit: int) -> set[int]:
        """Return the largest dp up to ``limit`` that each size of expert parallelism allows."""
        experts = self.shape.experts
        sizes = [1] if experts is None else self._expert_sizes(experts.count)
        steps = (ep // gcd(ep, cp) for ep in sizes)
        return {limit - limit % step for step in steps}

    def _can_ring(self) -> bool:
        """Predict whether context parallel ranks can exchange keys in a ring, on Ampere or newer.

        In training, ``why_gathered`` in ``models/attention`` decides this on the real GPU.
        """
        if self.precision is Precision.fp32 or self.shape.attn_logit_softcapping is not None:
            return False
        return why_no_flash_attention(widest_head(self.shape)) is None

    def _copies_keys(self) -> bool:
        """Predict whether attention copies keys and values for every head on Ampere or newer GPUs.

        In training, ``copies_keys`` in ``models/attention`` decides this. FlashAttention supports
        grouped heads, but not fp32.
        """
        return self.precision is Precision.fp32 and copies_keys_without_flash(self.shape)


# Options of ``nemo-aligner plan``: the batch, the GPUs, and their assumed speeds.


@dataclass(frozen=True)
class PlanRequest:
    """Options of ``nemo-aligner plan``; None means the default of training.

    Attributes:
        lora_rank: None plans with the adapters of the checkpoint, if it has any and no layers are
            frozen; 0 folds them into the weights.
        gpu_memory: memory of a GPU, in GiB.
        reserve: GiB of ``gpu_memory`` that stay free for CUDA, NCCL and fragmentation.
        global_batch_tokens: size of a batch in tokens; overrides ``global_batch_size``.
        tflops: peak TFLOP/s of a GPU; None means that of an H100 in ``precision``.
        memory_bandwidth, intra_node, inter_node, host: GB/s per GPU of its own memory, to other
            GPUs in the node, to other nodes, and to host memory.
        mfu: fraction of ``tflops`` that a step's computation reaches; None uses measured fractions
            for matmuls, attention and other kernels (``planning/step_time.py``).
    """

    gpu_memory: float = 80
    reserve: float = 4
    seq_length: int | None = None
    global_batch_size: int | None = None
    global_batch_tokens: int | None = None
    micro_batch_tokens: int | None = None
    precision: str | None = None
    freeze_layers: int = 0
    lora_rank: int | None = None
    base_precision: str | None = None
    cpu_offload: bool = False
    activations_offload: bool = False
    recompute: str = "auto"
    tflops: float | None = None
    memory_bandwidth: float = 3350
    mfu: float | None = None
    intra_node: float = 450
    inter_node: float = 50
    host: float = 50
    gpus_per_node: int = 8

    def continuing(self, seq_length: int, dtype: str | None) -> PlanRequest:
        """Return the request for training that starts from a reward model.

        As in training, a length or precision that is None is that of the model's contract, which
        the arguments are.
        """
        return replace(
            self,
            seq_length=self.seq_length or seq_length,
            precision=self.precision or dtype,
        )

    def planner(self, shape: ModelShape) -> Planner:
        """Build the planner for a model.

        Raises:
            ConfigError: an option is out of range.
            CheckpointError: the model has other adapters than the options.
        """
        length = self.seq_length or DEFAULT_SEQ_LENGTH
        batch = self.global_batch_size or ModelConfig().global_batch_size
        if self.global_batch_tokens is not None:
            batch = max(1, self.global_batch_tokens // (2 * length))
        self._check(shape, 2 * length)
        stored_lora = shape.lora
        shape = replace(shape, lora=self._choose_lora(stored_lora))
        check_quantizable(shape, 1)
        if shape.experts is not None and self._precision is Precision.fp16:
            raise ConfigError(
                "precision: got fp16, but training a mixture-of-experts model in fp16 is untested, "
                "and training rejects it. Set it to bf16 or fp32"
            )
        if self.recompute == Recompute.full.value and not shape.can_recompute_fully:
            raise ConfigError(
                "recompute: got full, but this would lose gradients of this model, and training "
                "rejects it. Set it to auto, selective or none"
            )
        return Planner(
            shape,
            self.machine(),
            usable=(self.gpu_memory - self.reserve) * GIB,
            batch=batch,
            length=length,
            budget=self.micro_batch_tokens or max(ModelConfig().micro_batch_tokens, 2 * length),
            precision=self._precision,
            recompute=None if self.recompute == "auto" else Recompute(self.recompute),
            freeze_layers=self.freeze_layers,
            cpu_offload=self.cpu_offload,
            activations_offload=self.activations_offload,
            stored_lora=stored_lora,
        )

    def _choose_lora(self, stored: LoraShape | None) -> LoraShape | None:
        """Return the adapters to train: those of the options, or ``stored`` in the checkpoint.

        None trains all weights, except those of frozen layers.
        """
        rank = self.lora_rank
        if rank is None:
            rank = 0 if stored is None or self.freeze_layers else stored.rank
        base = None if self.base_precision is None else BasePrecision(self.base_precision)
        if base is not None and not rank:
            raise ConfigError(f"base_precision: got {base.value} without LoRA; set lora_rank")
        requested = LoraShape.from_settings(LoraConfig(rank, base_precision=base))
        if stored is None or requested is None:
            return requested
        # There are no options for the scale and the layers of adapters.
        base = base or stored.base_precision
        check_lora(stored, replace(stored, rank=rank, base_precision=base), "config")
        return stored

    def machine(self) -> Machine:
        """Build the machine from the speeds of this request, in FLOP/s and bytes/s."""
        return Machine(
            flops=self.peak_flops,
            efficiency=self.mfu,
            intra_node=self.intra_node * 1e9,
            inter_node=self.inter_node * 1e9,
            ranks_per_node=self.gpus_per_node,
            host=self.host * 1e9,
            memory=self.memory_bandwidth * 1e9,
        )

    @property
    def _precision(self) -> Precision:
        return Precision.bf16 if self.precision is None else Precision(self.precision)

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of a GPU: ``tflops`` or, if that is None, an H100's in ``precision``."""
        if self.tflops is not None:
            return self.tflops * 1e12
        default = peak_flops("H100", self._precision)
        assert default is not None  # the table has an H100 in every precision
        return default

    def _check(self, shape: ModelShape, pair: int) -> None:
        last, reserve = shape.num_layers - 1, self.reserve
        budget = self.micro_batch_tokens or pair
        above_zero = "a number above 0"
        checks = [
            ("tflops", self.tflops is None or self.tflops > 0, above_zero),
            ("memory_bandwidth", self.memory_bandwidth > 0, above_zero),
            ("mfu", self.mfu is None or 0 < self.mfu <= 1, "more than 0, at most 1"),
            ("intra_node", self.intra_node > 0, above_zero),
            ("inter_node", self.inter_node > 0, above_zero),
            ("host", self.host > 0, above_zero),
            ("reserve", reserve >= 0, "0 or more"),
            ("gpu_memory", self.gpu_memory > reserve, f"more than reserve, which is {reserve:g}"),
            ("micro_batch_tokens", budget >= pair, f"{pair} or more, so that a pair fits"),
            ("lora_rank", (self.lora_rank or 0) >= 0, "0 (no LoRA) or more"),
            ("freeze_layers", not (self.freeze_layers and self.lora_rank), "0 if lora_rank is set"),
            ("freeze_layers", 0 <= self.freeze_layers <= last, f"0 to {last}"),
        ]
        for name, is_valid, allowed in checks:
            if not is_valid:
                raise ConfigError(f"{name}: got {getattr(self, name):g}, wanted {allowed}")
