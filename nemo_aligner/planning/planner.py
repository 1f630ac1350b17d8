"""Search for the fastest parallel layouts that fit into memory, for ``nemo-aligner plan``.

``PlanRequest`` holds the options of the command, and ``Planner`` searches. The ``render_*``
functions render the tables that the command prints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import (
    DEFAULT_SEQ_LENGTH,
    BasePrecision,
    LoraConfig,
    ModelConfig,
    Recompute,
)
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import LoraShape
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
            self.shape.check_fits(tp, pp, cp=cp)
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
        return self.precision is not Precision.fp32 and self.shape.attn_logit_softcapping is None

    def _copies_keys(self) -> bool:
        """Predict whether attention copies keys and values for every head on Ampere or newer GPUs.

        In training, ``copies_keys`` in ``models/attention`` decides this. FlashAttention supports
        grouped heads, but not fp32. Attention with a soft cap is computed without FlashAttention,
        and needs no copies.
        """
        is_grouped = self.shape.num_query_groups < self.shape.num_attention_heads
        has_cap = self.shape.attn_logit_softcapping is not None
        return self.precision is Precision.fp32 and is_grouped and not has_cap


# Options of ``nemo-aligner plan``: the batch, the GPUs, and their assumed speeds.


@dataclass(frozen=True)
class PlanRequest:
    """Options of ``nemo-aligner plan``; None means the default of training.

    Attributes:
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
    precision: str = "bf16"
    freeze_layers: int = 0
    lora_rank: int = 0
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

    def planner(self, shape: ModelShape) -> Planner:
        """Build the planner for a model.

        Raises:
            ConfigError: an option is out of range.
        """
        length = self.seq_length or DEFAULT_SEQ_LENGTH
        batch = self.global_batch_size or ModelConfig().global_batch_size
        if self.global_batch_tokens is not None:
            batch = max(1, self.global_batch_tokens // (2 * length))
        self._check(shape, 2 * length)
        precision = None if self.base_precision is None else BasePrecision(self.base_precision)
        if precision is not None and not self.lora_rank:
            raise ConfigError(f"base_precision: got {precision.value} without LoRA; set lora_rank")
        lora = LoraShape.from_settings(LoraConfig(self.lora_rank, base_precision=precision))
        shape = replace(shape, lora=lora or shape.lora)
        check_quantizable(shape, 1)
        if shape.experts is not None and self.precision == Precision.fp16.value:
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
            precision=Precision(self.precision),
            recompute=None if self.recompute == "auto" else Recompute(self.recompute),
            freeze_layers=self.freeze_layers,
            cpu_offload=self.cpu_offload,
            activations_offload=self.activations_offload,
        )

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
    def peak_flops(self) -> float:
        """Peak FLOP/s of a GPU: ``tflops`` or, if that is None, an H100's in ``precision``."""
        if self.tflops is not None:
            return self.tflops * 1e12
        default = peak_flops("H100", Precision(self.precision))
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
            ("lora_rank", self.lora_rank >= 0, "0 (no LoRA) or more"),
            ("freeze_layers", not (self.freeze_layers and self.lora_rank), "0 if lora_rank is set"),
            ("freeze_layers", 0 <= self.freeze_layers <= last, f"0 to {last}"),
        ]
        for name, is_valid, allowed in checks:
            if not is_valid:
                raise ConfigError(f"{name}: got {getattr(self, name):g}, wanted {allowed}")


# The output of ``nemo-aligner plan``: assumptions, and the layouts that fit or why none fits.


def render_heading(name: str, planner: Planner, request: PlanRequest) -> str:
    """Render a description of the model, the step and the assumed machine."""
    shape = planner.shape
    frozen = f", {planner.freeze_layers} layers frozen" if planner.freeze_layers else ""
    experts = "" if shape.experts is None else f"{shape.experts}, "
    frozen += "" if shape.lora is None else f", LoRA of {shape.lora}"
    reached = "" if request.mfu is None else f" at {request.mfu:.0%}"
    return (
        f"{name}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_parameters() / 1e9:.2f} billion parameters, {experts}"
        f"{planner.precision.value}{frozen}\n"
        f"A step: {planner.batch} pairs of 2 x {planner.length} tokens, in packs of at most "
        f"{planner.budget} tokens\n"
        f"A GPU: {request.gpu_memory:g} GiB, of which {request.reserve:g} are left free; "
        f"assumed: {request.peak_flops / 1e12:g} TFLOP/s{reached}, "
        f"{request.memory_bandwidth:g} GB/s of memory, "
        f"{request.intra_node:g} GB/s in a node of {request.gpus_per_node}, "
        f"{request.inter_node:g} GB/s beyond\n"
        f"{_describe_prefix_cache(shape, planner.precision)}"
    )


def _describe_prefix_cache(shape: ModelShape, precision: Precision) -> str:
    """Describe the memory of a server's cached tokens, and of cached states if there are any."""
    size = shape.cached_token_bytes(ELEMENT_BYTES[precision])
    ranks = "tensor and pipeline" if shape.latent_attention is None else "pipeline"
    snapshot = shape.snapshot_bytes(ELEMENT_BYTES[precision])
    states = (
        f", and {snapshot / 1e6:,.1f} MB for each of server.prefix_cache_states" if snapshot else ""
    )
    return (
        f"A server's prefix cache: {size / 1e3:,.1f} kB for each of "
        f"server.prefix_cache_tokens{states}, split over the {ranks} parallel ranks\n"
    )


def render_layouts(planner: Planner, gpus: int, top: int) -> str:
    """Render the ``top`` fastest layouts on ``gpus`` GPUs, and the settings of the fastest one.

    Raises:
        ConfigError: no layout fits; the message names the smallest number of GPUs that is enough.
    """
    candidates = planner.candidates(gpus)
    planner, fitting = _with_offload_if_needed(planner, gpus, planner.ranked(candidates))
    if not fitting:
        raise ConfigError(_describe_smallest_fit(planner, gpus, candidates))
    limit = f", the fastest {top} of them above" if len(fitting) > top else ""
    offload = " with offloaded activations" * planner.activations_offload
    return "\n".join(
        [
            _render(_layout_rows([(planner, candidate) for candidate in fitting[:top]])),
            f"\n{len(fitting)} of {len(candidates)} layouts on {gpus} GPUs fit{offload}{limit}. "
            "The first one:",
            *(f"  {line}" for line in settings_of(fitting[0].plan)),
            *_budget_line(planner.budget),
        ]
    )


def _budget_line(budget: int) -> list[str]:
    """Return a line with the setting of ``budget``, the most tokens of a pack; none by default."""
    is_default = budget == ModelConfig().micro_batch_tokens
    return [] if is_default else [f"  model.micro_batch_tokens={budget}"]


def render_best(planner: Planner, numbers: Sequence[int]) -> str:
    """Render a table with the fastest layout for each of ``numbers`` of GPUs."""
    fastest: dict[int, tuple[Planner, Candidate]] = {}
    for gpus in numbers:
        fitting = planner.ranked(planner.candidates(gpus))
        used, fitting = _with_offload_if_needed(planner, gpus, fitting)
        if fitting:
            fastest[gpus] = used, fitting[0]
    layout_rows = dict(zip(fastest, _layout_rows(list(fastest.values())), strict=True))
    rows = [
        {"GPUs": str(gpus), **layout_rows.get(gpus, {"layout": "none fits"})} for gpus in numbers
    ]
    columns = max(rows, key=len)
    return _render([{name: row.get(name, "") for name in columns} for row in rows])


def _with_offload_if_needed(
    planner: Planner, gpus: int, fitting: list[Candidate]
) -> tuple[Planner, list[Candidate]]:
    """If no layout fits without offloaded activations, search for layouts with them.

    Args:
        fitting: the layouts that fit without offloaded activations.

    Returns:
        The planner that found the layouts, and the layouts that fit.
    """
    if fitting:
        return planner, fitting
    offloading = replace(planner, activations_offload=True)
    fitting = offloading.ranked(offloading.candidates(gpus))
    return (offloading, fitting) if fitting else (planner, [])


def settings_of(plan: Plan) -> list[str]:
    """List the settings of a training run with this layout, as ``key=value``."""
    settings = [
        f"model.tensor_model_parallel_size={plan.tp}",
        f"model.pipeline_model_parallel_size={plan.pp}",
        *([f"model.context_parallel_size={plan.cp}"] if plan.cp > 1 else []),
        *(["model.cp_comm_type=p2p", "model.batch_invariant=false"] if plan.ring else []),
        *([f"model.expert_model_parallel_size={plan.ep}"] if plan.ep > 1 else []),
        f"model.sequence_parallel={str(plan.sequence_parallel).lower()}",
        f"model.activations_checkpoint_granularity={plan.recompute.value}",
    ]
    if plan.cpu_offload:
        settings.append("model.optim.cpu_offload=true")
    if plan.activations_offload:
        settings.append("model.activations_offload=true")
    if plan.recompute_layers is not None:
        settings.append(f"model.activations_checkpoint_num_layers={plan.recompute_layers}")
    return settings


def _layout_rows(layouts: Sequence[tuple[Planner, Candidate]]) -> list[dict[str, str]]:
    """Return a row of the printed table for each layout, with the planner that evaluated it.

    The rows have the same columns; host memory is among them if at least one layout uses it.
    """
    has_host = any(candidate.memory.host for _, candidate in layouts)
    return [_layout_row(planner, candidate, has_host) for planner, candidate in layouts]


def _layout_row(planner: Planner, candidate: Candidate, has_host: bool) -> dict[str, str]:
    """Return the cells of a layout's row in the printed table, by column name."""
    plan, memory, time = candidate.plan, candidate.memory, candidate.time
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    return {
        "layout": str(plan),
        "recompute": _describe_recompute(plan),
        "packs": str(plan.packs.count),
        **{part: f"{getattr(memory, part) / GIB:.1f}" for part in parts},
        "GiB": f"{memory.total / GIB:.1f}",
        **({"host GiB": f"{memory.host / GIB:.1f}"} if has_host else {}),
        "s/step": f"{time.total:.3g}",
        "idle": f"{time.bubble / time.total:.0%}",
        "sending": f"{time.sending / time.total:.0%}",
        "tokens/s": f"{planner.tokens_per_second(candidate):,.0f}",
    }


def _describe_recompute(plan: Plan) -> str:
    """Describe the recomputation of a plan, and whether it offloads activations.

    Recomputation is described by its kind, or by the number of recomputed layers per stage.
    """
    offloaded = ", offloaded" * plan.activations_offload
    if plan.recompute_layers is None:
        return plan.recompute.value + offloaded
    return f"{plan.recompute_layers} layers{offloaded}"


def _describe_smallest_fit(planner: Planner, gpus: int, candidates: Sequence[Candidate]) -> str:
    """Explain that no layout fits, and name the smallest number of GPUs that is enough.

    ``_with_offload_if_needed`` has tried offloaded activations already. Adam's moments in host
    memory (``cpu_offload``) are tried only if the user asks for that, so the message suggests
    ``cpu_offload`` if fewer GPUs are then enough.
    """
    if not candidates:
        return (
            f"gpus: got {gpus}, wanted a number that a layout can use. Tensor and pipeline "
            "parallel sizes must divide the model's heads, query groups and layers, and a step of "
            f"{planner.batch} pairs has work for at most {planner.batch} data parallel ranks"
        )
    offloading = replace(planner, activations_offload=True)
    evaluated = [*candidates, *offloading.candidates(gpus)]
    least = min(evaluated, key=lambda candidate: candidate.memory.total)
    settings = [f"recompute {least.plan.recompute.value}", *_offload_settings(least.plan)]
    message = (
        f"no layout fits on {gpus} GPUs. The one that needs the least memory is {least.plan} with "
        f"{' and '.join(settings)}: it needs {least.memory.total / GIB:.1f} GiB per GPU, but "
        f"{planner.usable / GIB:.1f} GiB are free; "
    )
    fitting = _least_fitting(planner)
    if fitting is None:
        message += "no number of such GPUs is enough"
    else:
        message += f"the fewest GPUs that fit: {_describe_gpus(fitting)}"
    if planner.cpu_offload:
        return message
    offloaded = _least_fitting(replace(planner, cpu_offload=True))
    if offloaded is None or (fitting is not None and fitting.num_ranks <= offloaded.num_ranks):
        return message
    return f"{message}; or {_describe_gpus(offloaded)}"


def _least_fitting(planner: Planner) -> Plan | None:
    """Find the layout that fits on the fewest GPUs; None if none fits on any number of GPUs.

    The layout offloads activations only if fewer GPUs are then enough.
    """
    plans = (planner.least_gpus(), replace(planner, activations_offload=True).least_gpus())
    fitting = [plan for plan in plans if plan is not None]
    return min(fitting, key=lambda plan: plan.num_ranks, default=None)


def _describe_gpus(plan: Plan) -> str:
    """Describe a plan in a phrase for an error: number of GPUs, layout, settings for offloading."""
    settings = _offload_settings(plan)
    gpus = f"{plan.num_ranks} GPU{'s' * (plan.num_ranks > 1)}, as {plan}"
    return f"{gpus} with {' and '.join(settings)}" if settings else gpus


def _offload_settings(plan: Plan) -> list[str]:
    """List the settings of a plan that move activations or Adam's moments to host memory."""
    return [setting for setting in settings_of(plan) if "offload" in setting]


def _render(rows: Sequence[Mapping[str, str]]) -> str:
    """Render rows as a table with a header; numbers are right-aligned."""
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(names))]
    left = {"layout", "recompute"}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
