"""The scenes of a rehearsal: commands, scoring, a critic, and a step of every rank of a layout."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_aligner.batch.cache_use import CachedPrefix, Stored
from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.checkpoint.decoder_tensors import HEAD, model_tensors, numbered_tensors
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.run import RunCheckpoints
from nemo_aligner.config.common import Precision
from nemo_aligner.config.kernels import AttentionChoice, DeltaChoice, KernelChoices, PointwiseChoice
from nemo_aligner.config.load import load_config
from nemo_aligner.config.model import OptimConfig, Recompute
from nemo_aligner.config.serving import ServeCriticConfig
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import (
    LayoutSizes,
    ParallelLayout,
    destroy_layout,
    initialize_layout,
)
from nemo_aligner.distributed.one_rank import ONE_RANK
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.models.activation_offload import offload_activations
from nemo_aligner.models.attention.backends import BACKENDS
from nemo_aligner.models.backbone import use_transformer_engine
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.models.cuda_graphs import why_not_graphed
from nemo_aligner.models.delta_choice import use_delta_kernel
from nemo_aligner.models.lora import train_adapters_alone
from nemo_aligner.models.offload import OffloadManager
from nemo_aligner.models.pointwise.choice import load_kernels
from nemo_aligner.models.pointwise.eager import Shared, _RMSNorm
from nemo_aligner.models.pointwise.operations import use_pointwise_kernels
from nemo_aligner.models.quantized_layers import quantized_layers
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import forward_backward, gather_rewards, infer
from nemo_aligner.models.training_wrap import freeze_lower_layers, set_routers, wrap_for_training
from nemo_aligner.planning.cost import Plan, even_packs
from nemo_aligner.planning.memory import memory
from nemo_aligner.serving.critic import TRAIN, VALUES, CriticBackend
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.training.critic import CriticLearner, open_critic
from nemo_aligner.training.gauges import Timers
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.optimizer import Optimizer, build_optimizer
from nemo_aligner.utils import host_transfer
from nemo_aligner.utils.host_transfer import host_zeros
from tests.harness.families import CASES, hf_config
from tests.models.attention.backend_packs import (
    RandomPack,
    cases_of,
    draw_tables,
    run_backend,
)
from tests.models.graphed import RecordedCapture
from tests.paths.gpu_rehearsal.streams import Stream, Streams, play_streams
from tests.paths.gpu_rehearsal.watch import CUDA, Watch
from tests.training.critic_steps import make_rollout

# The proportions of Llama 3 8B.
SHAPE = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 896,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
}
TOKENS = [3, 4, 5, 6] * 32
PHASES = {
    "step": (RewardLearner, "train_step"),
    "validation": (RewardLearner, "validate"),
    "save": (RunCheckpoints, "save"),
    "load": (RunCheckpoints, "load"),
    "score": (RewardScorer, "score_token_lists"),
    "begin": (RewardScorer, "begin"),
    "values": (CriticLearner, "values"),
    "critic step": (CriticLearner, "_train_step"),
    "move": (OffloadManager, "move"),
}
Found = dict[str, Any]


def mark_phases(watch: Watch) -> None:
    """Record what these methods do, by phase, and work that a timed block leaves unfinished."""
    # CUDA's kernel saves for the backward pass as this function does; a CPU build decomposes it.
    F.rms_norm = lambda x, shape, weight, eps: _RMSNorm.apply(
        x, weight, eps, x.dtype, Shared(x.size(-1), lambda partial: partial)
    )

    # The number of overflows is read as one, because every value from a fake GPU is 1.
    measure_gradients = Optimizer._measure_gradients
    Optimizer._measure_gradients = lambda self: (False, measure_gradients(self)[1])

    def mark(owner: type, method: str, phase: str) -> None:
        function = getattr(owner, method)

        @wraps(function)
        def marked(*args: Any, **named: Any) -> Any:
            with watch.during(phase):
                return function(*args, **named)

        setattr(owner, method, marked)

    play_streams()
    for phase, (owner, method) in PHASES.items():
        mark(owner, method, phase)
    measure = Timers.measure

    @contextmanager
    def measured(timers: Timers, name: str) -> Iterator[None]:
        with measure(timers, name):
            yield
            watch.settings[f"unfinished {name}"] = watch.unfinished

    Timers.measure = measured


def command(watch: Watch, function: str, config: str, settings: list[str]) -> Found:
    with Streams() as streams:
        resolve_name(function)(load_config(resolve_name(config), settings))
    return {"races": streams.races, "copies": streams.copies}


def save(watch: Watch, unheeded: list[str]) -> Found:
    """Write to weights, copy them, and write again, without the wait named ``unheeded``."""
    weights = torch.zeros(8, device=CUDA)
    host = host_zeros([weights])
    with Streams() as streams, ExitStack() as without:
        for name in unheeded:
            without.enter_context(mock.patch(name))
        weights.add_(1)
        arrived = host_transfer.start_host_copies(zip(host, [weights], strict=True))
        host_transfer.wait_for_host_copies()
        weights.add_(1)
        arrived()
    return {"races": streams.races, "copies": streams.copies}


def start(watch: Watch) -> Found:
    with launch() as world:
        return {"device": str(world.device)}


def score(watch: Watch, archive: str, precision: str, cached_tokens: int) -> Found:
    """Samples that share prefixes, twice."""
    texts = [TOKENS[:64], TOKENS[:80], [*TOKENS[:70], 7, 8], [9] * 20]
    kinds = {"precision": Precision(precision), "prefix_cache_tokens": cached_tokens}
    with launch():
        scorer = load_scorer(archive, initialize_layout(), micro_batch_tokens=256, **kinds)
        for _ in range(2):
            scorer.score_token_lists(texts)
    return asdict(scorer.counts)


def critic(watch: Watch, settings: list[str]) -> Found:
    """Values, steps and values of a critic; its optimizer is on the host before and after."""
    config = load_config(ServeCriticConfig, settings)
    probes = [Row(np.arange(3, 3 + length)) for length in (1, 17, 9)]
    rollout = make_rollout(0)
    arrays = (rollout.tokens, rollout.returns, rollout.prev_values, rollout.mask)
    allocated = []
    with launch(), Streams() as streams:
        run = open_critic(config, initialize_layout())
        operations = CriticBackend(run, config).operations
        for name, arguments in ((VALUES, [probes]), (TRAIN, arrays), (VALUES, [probes])):
            operations[name](*arguments)
            allocated.append(watch.allocated())
        state = sum(tensor.nbytes for tensor in run.learner.optimizer.state_tensors())
        run.save()
    return {"allocated": allocated, "optimizer": state, "races": streams.races}


def steps(watch: Watch, sizes: Found, shape: Found, **options: Any) -> Found:
    """For each rank: one or two steps, a forward pass, inference if it scores, a state to save."""
    expected = LayoutSizes(**sizes)
    result: Found = {"collectives": [], "ranks": []}
    for rank in range(expected.num_ranks):
        backend = ONE_RANK if expected.num_ranks == 1 else "nccl"
        dist.init_process_group(backend, rank=rank, world_size=expected.num_ranks)
        layout = initialize_layout(**expected.arguments)
        result["ranks"].append(one_rank(watch, layout, {**SHAPE, **shape}, **options))
        result["collectives"].append(dict(watch.collectives))
        destroy_layout()
        dist.destroy_process_group()
    return result


def one_rank(
    watch: Watch,
    layout: ParallelLayout,
    config: Found,
    precision: str = "bf16",
    recompute: str = "none",
    freeze_layers: int = 0,
    prefix: int = 0,
    scored: bool = True,
    kernels: str | None = None,
    offload: bool = False,
    unheeded: Sequence[str] = (),
    delta: str = "torch",
    attention: str = "torch",
) -> Found:
    gc.collect()
    bytes_of_others = watch.allocated()
    shape = ModelShape.from_config(config)
    kinds = {"precision": Precision(precision), "recompute": Recompute(recompute)}
    choices = KernelChoices(attention=AttentionChoice(attention))
    model = build_reward_model(shape, layout, num_attributes=1, kernels=choices, **kinds)
    if kernels is not None:
        use_pointwise_kernels(model, load_kernels(PointwiseChoice(kernels)))
    use_delta_kernel(model, DeltaChoice(delta), shape)
    for linear in quantized_layers(model).values():
        kind = {"dtype": model.config.params_dtype, "device": CUDA}
        linear.store_weight(torch.empty(linear.weight_shape, **kind))
    if shape.lora is not None:
        train_adapters_alone(model)
    freeze_lower_layers(model, freeze_layers, shape.num_layers)
    set_routers(model, trained=False, aux_loss_coeff=0.01)
    if offload:
        offload_activations(model)
    wrapped = wrap_for_training(model)
    optimizer = build_optimizer(wrapped, OptimConfig(lr=1e-5), 1.0, 10)
    batches = packs_of(layout, prefix)
    # The last step is recorded. It is the second one with offload, which reuses host buffers; with
    # other ranks, whose collectives follow those of an update; and with LoRA, where the first step
    # copies NF4's values to the GPU.
    is_second = offload or shape.lora is not None or layout.num_ranks > 1
    for packs in (batches[:1], batches) if is_second else (batches,):
        with watch.during("step"), watching_streams(offload, unheeded) as races:
            wrapped.train()
            wrapped.zero_grad_buffer()
            rewards = forward_backward(wrapped, packs, layout, BradleyTerry().loss)
            gather_rewards(rewards, packs, (8 * layout.dp, 1), layout)
            assert optimizer.step().applied
    modules = [str(type(module).__mro__) for module in model.modules()]
    result = {
        **vars(watch.phases["step"]),
        "races": races,
        "engine_modules": sum("transformer_engine.pytorch" in module for module in modules),
    }
    if layout.pp == 1:
        sizes = {name: getattr(layout, name) for name in ("tp", "cp", "sequence_parallel", "ring")}
        batch, tokens = batches[0], batches[0].num_tokens
        if layout.cp > 1:
            batch = batch.shared(layout.cp_rank, layout.cp, 1)
        pack = even_packs(2, (tokens // 2 + prefix) // 2, tokens, prefix)
        kinds["activations_offload"] = offload
        plan = Plan(
            pack,
            freeze_layers=freeze_layers,
            fused_kernels=kernels is None,
            fused_dequantization=True,
            **sizes,
            **kinds,
        )
        planned = memory(shape, plan, 0)
        result["planned"] = planned.activations
        result["kept"] = kept_bytes(watch, wrapped, batch.to(CUDA))
        if offload or shape.lora is not None:
            wrapped.zero_grad_buffer()
            gc.collect()
            bytes_at_rest = watch.allocated()
            with PeakBytes(watch) as live:
                forward_backward(wrapped, batches[:1], layout, BradleyTerry().loss)
            result["peak"] = live.peak - bytes_at_rest
            result["planned peak"] = planned.activations + planned.transient
            result["at rest"] = bytes_at_rest - bytes_of_others
            result["planned at rest"] = planned.weights + planned.gradients + planned.optimizer
    optimizer.finish_update()
    if scored:
        infer(wrapped, batches if layout.pp > 1 else batches[:1], layout)
    RunCheckpoints("unused").reserve(model, optimizer)
    return result


class PeakBytes(TorchDispatchMode):
    """Records the peak bytes on the GPU, which are more only after an operation with new memory."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch, self.peak = watch, watch.allocated()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._watch.allocations
        out = func(*args, **(kwargs or {}))
        if self._watch.allocations > before:
            self.peak = max(self.peak, self._watch.allocated())
        return out


@contextmanager
def watching_streams(is_wanted: bool, unheeded: Sequence[str]) -> Iterator[Counter[str]]:
    """Record races while the methods of streams named ``unheeded`` do nothing."""
    if not is_wanted:
        yield Counter()
        return
    with Streams() as streams, ExitStack() as without:
        for name in unheeded:
            without.enter_context(mock.patch.object(Stream, name))
        yield streams.races


def attention(watch: Watch, every: int) -> Found:
    """Forward and backward of every GPU backend on random packs, for one in ``every`` of its cases.

    Ring attention needs threads, and torch's modes apply to one thread; layouts' steps test it.
    """
    cases_by_backend = {}
    for backend in BACKENDS:
        cases = [
            case
            for dtype in (torch.bfloat16, torch.float32)
            for case in cases_of(backend, "cuda", (dtype,), channels=64)
            if not case.uses_ring
        ]
        for seed, case in enumerate(cases[::every]):
            pack = RandomPack.draw(seed, with_cache=not case.learns)
            batch = pack.batch()
            tables = draw_tables(case.key_heads, case.channels, case.dtype)
            output, *gradients = run_backend(backend, case, pack, batch, tables)
            assert output.shape == (batch.num_tokens, case.query_heads, case.channels)
            assert output.dtype is case.dtype
            assert len(gradients) == (3 + case.scores.has_sinks) * case.learns
        cases_by_backend[backend.name] = len(cases)
    return {"cases": cases_by_backend}


def graphs(watch: Watch, shape: Found, prefix: int) -> Found:
    """Steps and scores, with and without cached prefixes, whose packs are captured as graphs."""
    captured: Found = {"waits": [], "bytes_to_gpu": 0, "parts": 0}

    @contextmanager
    def capturing() -> Iterator[None]:
        with watch.during("captured"):
            yield
        seen = watch.phases["captured"]
        captured["waits"] += list(seen.waits)
        captured["bytes_to_gpu"] += seen.bytes_to_gpu
        captured["parts"] += 1

    dist.init_process_group(ONE_RANK, rank=0, world_size=1)
    layout = initialize_layout()
    kinds = {"precision": Precision.bf16, "num_attributes": 1}
    model = build_reward_model(ModelShape.from_config({**SHAPE, **shape}), layout, **kinds)
    make_batch_invariant(model, 256)
    reason = why_not_graphed(model)
    model.use_cuda_graphs(RecordedCapture(capturing))
    assert model.graphs is not None
    wrapped = wrap_for_training(model)
    wrapped.train()
    for _ in range(3):
        forward_backward(wrapped, packs_of(layout, prefix)[:1], layout, BradleyTerry().loss)
    pool, slots = model.new_key_value_pool(256), torch.arange(64)
    cached = CachedPrefix(slots)
    for _ in range(3):
        stores = PackedBatch.pack([TOKENS[:80]], stored=[Stored(0, slots)])
        takes = PackedBatch.pack([TOKENS[:80], TOKENS[:70]], groups=[Group(2, 66, cached)])
        for batch in (*packs_of(layout, prefix)[:1], stores, takes):
            infer(wrapped, [batch], layout, pool)
    counts = {"replayed": model.graphs.replayed, "eager": model.graphs.eager}
    return {"why": reason, "captured": captured, **counts}


def places(watch: Watch) -> Found:
    """Names by which weights and the decoder's table differ, for each model of TransformerEngine.

    The models are those of the families' cases.
    """
    dist.init_process_group(ONE_RANK, rank=0, world_size=1)
    layout, differing = initialize_layout(), {}
    for case, settings in CASES.items():
        to_nemo = find_family(settings["model_type"]).to_nemo
        shape = ModelShape.from_config(to_nemo(hf_config(case).to_dict()))
        if not use_transformer_engine(shape, torch.bfloat16):
            continue
        model = build_reward_model(shape, layout, num_attributes=1, precision=Precision.bf16)
        entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values()
        weights = {entry.key for entry in entries if "_extra_state" not in entry.key} - {HEAD}
        table = model_tensors(shape) | numbered_tensors(shape)
        differing[case] = sorted(weights ^ table.keys())
    return {"differing": differing}


def packs_of(layout: ParallelLayout, prefix: int) -> list[PackedBatch]:
    """Two packs for each data parallel rank, of different sizes on each."""
    length = len(TOKENS) - 2 * layout.dp_rank
    return [
        PackedBatch.pack(
            [TOKENS[:length]] * 4,
            Records.of(range(2), [2] * 2),
            rows=range(4 * number, 4 * number + 4),
            groups=[Group(2, prefix)] * 2,
        )
        for number in range(layout.dp_rank, 2 * layout.dp, layout.dp)
    ]


def kept_bytes(watch: Watch, wrapped: Any, batch: PackedBatch) -> int:
    """Bytes that a forward pass leaves on the GPU."""
    wrapped.train()
    gc.collect()
    bytes_before = watch.allocated()
    rewards = wrapped(batch)
    return watch.allocated() - bytes_before - rewards.nbytes
