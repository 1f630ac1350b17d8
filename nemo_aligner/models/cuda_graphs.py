"""CUDA graphs of a decoder: one launch instead of some hundreds for each layer.

A graph replays the kernels that were captured, with the addresses and shapes they had. So inputs
are copied into buffers that the graph reads, packs are padded to a few sizes (``fixed_sizes``), and
each combination of sizes that comes a second time gets a graph of its own. In training a second
graph has the backward pass, which adds the gradients to Megatron's ``main_grad`` itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nemo_aligner.batch.packed import CacheUse
from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.experts import routers
from nemo_aligner.models.internals import engine_layers, has_apex_weight_gradients
from nemo_aligner.models.pack_context import PackContext
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)

MOST_GRAPHS = 32
"""Graphs of a model for scoring and for training, each; packs of further sizes run without."""

Replay = Callable[[], None]


@dataclass(frozen=True)
class DecoderInputs:
    """What a decoder computes from: ``tokens``, ``positions [T]`` int64, and their context.

    The context has no tables yet, which follow from the positions.
    """

    tokens: Tensor
    positions: Tensor
    context: PackContext

    def tensors(self) -> list[Tensor]:
        """All tensors that a decoder reads of a pack, in a fixed order."""
        segments, use = self.context.segments, self.context.segments.cached
        bounds = [segments.cu_seqlens, segments.kv_cu_seqlens]
        tensors = [self.tokens, self.positions, *bounds, self.context.read_rows]
        if segments.kv_index is not None:
            tensors.append(segments.kv_index)
        return tensors if use is None else [*tensors, *use.tensors()]

    def key(self) -> Hashable:
        """All else: packs with equal keys run the same kernels."""
        segments = self.context.segments
        shapes = tuple(tensor.shape for tensor in self.tensors())
        return shapes, segments.sizes, segments.kv_index is None, id(segments.pool)

    def as_buffers(self) -> DecoderInputs:
        """Copy all tensors. ``lengths`` and ``prefixes``, which only this pack has, are dropped."""
        segments, use = self.context.segments, self.context.segments.cached
        fixed = replace(
            segments,
            lengths=(),
            prefixes=(),
            cu_seqlens=segments.cu_seqlens.clone(),
            kv_cu_seqlens=segments.kv_cu_seqlens.clone(),
            kv_index=None if segments.kv_index is None else segments.kv_index.clone(),
            cached=use and CacheUse(use.lengths, *(index.clone() for index in use.tensors())),
        )
        context = PackContext(fixed, self.context.read_rows.clone())
        return DecoderInputs(self.tokens.clone(), self.positions.clone(), context)

    def fill(self, given: DecoderInputs) -> None:
        """Copy the tensors of ``given``, which has the same key, into these."""
        for buffer, tensor in zip(self.tensors(), given.tensors(), strict=True):
            buffer.copy_(tensor)


Decode = Callable[[DecoderInputs], Tensor]
"""Inputs -> hidden states ``[R, 1, hidden]`` of the rows that the head reads."""


class Capture(Protocol):
    """Records work on the device; tests have one that calls it again instead."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run ``work`` where it will be captured: libraries allocate and compile at first use."""

    def forward(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Record ``work``. Returns its result's memory, and what computes it there again."""

    def backward(self, work: Callable[[], None]) -> Replay:
        """Record ``work``, without running it."""

    def reset(self) -> None:
        """Free what the graphs share, after they were dropped."""

    def used_bytes(self) -> int:
        """Count the device memory that is in use, by tensors and by the graphs themselves."""


class CudaCapture:
    """Captures CUDA graphs that share one memory pool, because only one of them runs at a time."""

    def __init__(self) -> None:
        # One stream for all: pools and cuBLAS's workspaces belong to a stream.
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def forward(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            result = work()
        return result, graph.replay

    def backward(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            work()
        return graph.replay

    def reset(self) -> None:
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()

    def used_bytes(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        current = torch.cuda.current_stream()
        # Other threads of a server, and NCCL's, may call CUDA meanwhile.
        mode = "thread_local"
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                yield
        finally:
            # Where a capture fails, torch leaves its stream the current one.
            torch.cuda.set_stream(current)


@dataclass
class _Sums:
    are_taken: bool = False


class _Leaves:
    """Stand-ins for a model's trained parameters, with the same memory, while it is captured.

    Autograd runs the node that accumulates a parameter's gradient on the stream where it was made,
    and Megatron's wrapper makes the parameters' own on the default stream, which cannot be captured
    from another one. Nor may Megatron's hooks run: these add to ``main_grad`` themselves, one
    gradient after the other, as Megatron's would. Weights whose products add their gradients to
    ``main_grad`` get one that means nothing, as there.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        stand_ins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._places: list[tuple[torch.nn.Module, str, Any, Any]] = []
        self._sums = _Sums()
        for module in {each: None for root in modules for each in root.modules()}:
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    continue
                if parameter not in stand_ins:
                    stand_ins[parameter] = self._stand_in(parameter)
                self._places.append((module, name, parameter, stand_ins[parameter]))

    def _stand_in(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        leaf = torch.nn.Parameter(parameter.detach())
        vars(leaf).update(vars(parameter))
        # Not ``self``, which has the leaf: Python could not collect a cycle through its C++ hooks.
        sums = self._sums

        def add(ready: Tensor) -> None:
            assert ready.grad is not None
            is_added = getattr(ready, "grad_added_to_main_grad", False)
            if sums.are_taken and not is_added:
                parameter.main_grad.add_(ready.grad)  # type: ignore[attr-defined]
            if is_added:
                ready.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            ready.grad = None

        leaf.register_post_accumulate_grad_hook(add)
        return leaf

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the modules compute with the stand-ins."""
        try:
            for module, name, _, stand_in in self._places:
                setattr(module, name, stand_in)
            yield
        finally:
            for module, name, parameter, _ in self._places:
                setattr(module, name, parameter)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Add gradients to ``main_grad``; else they are dropped, but for those of products."""
        self._sums.are_taken = True
        try:
            yield
        finally:
            self._sums.are_taken = False


class _Graph:
    """A decoder's forward pass for packs of one key, and its backward pass if it learns."""

    def __init__(
        self, capture: Capture, decode: Decode, inputs: DecoderInputs, leaves: _Leaves | None
    ) -> None:
        self._decode, self._leaves = decode, leaves
        self._inputs = inputs.as_buffers()
        self._hidden: Tensor | None = None  # with autograd's graph, until its backward
        if leaves is None:
            capture.warm_up(self._infer)
            self.output, self._forward = capture.forward(self._infer)
            return
        self.grad = torch.zeros(0)
        capture.warm_up(self._learn_nothing)
        output, self._forward = capture.forward(self._learn)
        self.output = output.detach()
        self.replay_backward = capture.backward(self._learn_back)
        device = inputs.tokens.device
        # An input of the autograd function, so that its result requires a gradient.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def run(self, inputs: DecoderInputs, replays: Counter[str]) -> Tensor:
        """Compute the hidden states, in memory that the next replay of any graph may overwrite.

        ``replays`` counts those of all graphs that share memory.
        """
        self._inputs.fill(inputs)
        replays["forward"] += 1
        if self._leaves is None:
            self._forward()
            return self.output
        hidden: Tensor = _Replayed.apply(self.anchor, self, replays)
        return hidden

    def replay_forward(self) -> Tensor:
        self._forward()
        return self.output.detach()

    def _decoded(self) -> Tensor:
        # A copy, as the cached properties of these segments are of an earlier pack.
        context = replace(self._inputs.context, segments=replace(self._inputs.context.segments))
        return self._decode(replace(self._inputs, context=context))

    def _infer(self) -> Tensor:
        return self._decoded()

    def _learn(self) -> Tensor:
        assert self._leaves is not None
        with self._leaves.in_place(), torch.enable_grad():
            self._hidden = self._decoded()
        return self._hidden

    def _learn_back(self) -> None:
        assert self._leaves is not None
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        with self._leaves.adding():
            torch.autograd.backward(hidden, self.grad)

    def _learn_nothing(self) -> None:
        hidden, self._hidden = self._learn(), None
        # Zeros, because products add to ``main_grad`` at once.
        self.grad = torch.zeros_like(hidden)
        torch.autograd.backward(hidden, self.grad)


class _Replayed(Function):
    """``graph``'s hidden states; its backward pass leaves the gradients in ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph: _Graph, replays: Counter[str]) -> Tensor:
        ctx.graph, ctx.replays, ctx.number = graph, replays, replays["forward"]
        return graph.replay_forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        graph: _Graph = ctx.graph
        if ctx.replays["forward"] != ctx.number:
            raise RuntimeError(
                "a CUDA graph ran between the forward and the backward pass of a pack, and may "
                "have overwritten its activations. Set model.cuda_graphs=false."
            )
        graph.grad.copy_(grads[0])
        graph.replay_backward()
        return None, None, None


class _Key(NamedTuple):
    sizes: Hashable
    is_training: bool
    learns: bool


class DecoderGraphs:
    """The graphs of one model, made as packs of new sizes come.

    Args:
        modules: that ``decode`` runs.
        why_not: says why packs cannot be graphed in training, if so.

    Attributes:
        eager: packs that ran without a graph.
    """

    def __init__(
        self,
        decode: Decode,
        modules: list[torch.nn.Module],
        capture: Capture,
        why_not: Callable[[], str | None],
        most: int = MOST_GRAPHS,
    ) -> None:
        self._decode, self._modules, self._capture = decode, modules, capture
        self._why_not, self._most = why_not, most
        self._graphs: dict[_Key, _Graph] = {}
        self._seen: Counter[_Key] = Counter()
        self._leaves: _Leaves | None = None
        # Parameters once and for all, as it takes longer to find them than to launch a graph.
        self._parameters: list[torch.nn.Parameter] = []
        self._addresses: dict[bool, list[int]] = {}
        self._said: set[str] = set()
        self._failed = False
        self._replays: Counter[str] = Counter()
        self.eager = 0

    @property
    def replayed(self) -> int:
        """Count the packs that ran by a graph."""
        return self._replays["forward"]

    def are_used(self, is_training: bool) -> bool:
        """Tell if packs run by graphs now; says once why not."""
        if self._failed:
            return False
        why = self._why_not() if is_training else None
        if why is not None:
            self._say(f"model.cuda_graphs: not in training, because {why}")
        return why is None

    def run(self, inputs: DecoderInputs, is_training: bool) -> Tensor:
        """Decode a pack of fixed sizes, by a graph where there is one or its key came before."""
        graph = None if self._failed else self._graph(inputs, is_training)
        if graph is None:
            self.eager += 1
            return self._decode(inputs)
        return graph.run(inputs, self._replays)

    def _graph(self, inputs: DecoderInputs, is_training: bool) -> _Graph | None:
        learns = torch.is_grad_enabled()
        if learns and not is_training:
            return None
        self._drop_if_moved(learns)
        key = _Key(inputs.key(), is_training, learns)
        if key in self._graphs:
            return self._graphs[key]
        self._seen[key] += 1
        count = sum(other.is_training == is_training for other in self._graphs)
        if self._seen[key] < 2 or count >= self._most:
            return None
        self._add(key, inputs)
        return self._graphs.get(key)

    def _add(self, key: _Key, inputs: DecoderInputs) -> None:
        learns = key.learns
        if learns and self._leaves is None:
            self._leaves = _Leaves(self._modules)
        before = self._capture.used_bytes()
        try:
            graph = _Graph(self._capture, self._decode, inputs, self._leaves if learns else None)
        except RuntimeError as error:
            # Nothing was computed by it: the pack can run without.
            self._failed = True
            self._graphs.clear()
            logger.warning("model.cuda_graphs: a capture failed, packs run without", exc_info=error)
            return
        self._graphs[key] = graph
        more = self._capture.used_bytes() - before
        if is_main():
            logger.info(
                f"CUDA graph {len(self._graphs)}: {len(inputs.tokens)} tokens, "
                f"{'training' if learns else 'scoring'}, {more / 2**20:.0f} MiB more"
            )

    def _drop_if_moved(self, learns: bool) -> None:
        """Drop all graphs if a weight or a gradient has another address than they know."""
        if not self._parameters:
            self._parameters = [each for module in self._modules for each in module.parameters()]
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if learns:
            grads = (getattr(each, "main_grad", None) for each in self._parameters)
            addresses += [grad.data_ptr() for grad in grads if grad is not None]
        if addresses == self._addresses.get(learns, addresses):
            self._addresses[learns] = addresses
            return
        self._addresses, self._leaves = {learns: addresses}, None
        self._graphs.clear()
        self._capture.reset()

    def _say(self, text: str) -> None:
        if text not in self._said and is_main():
            logger.warning(text)
        self._said.add(text)


def why_not_graphed(model: Any) -> str | None:
    """Say why the packs of ``model`` cannot run by CUDA graphs; None if they can."""
    config = model.config
    sizes = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    if not torch.cuda.is_available():
        return "there is no GPU"
    if sizes != (1, 1, 1):
        return "the model is split over several ranks"
    if routers(model):
        return "the host waits for the number of tokens of each expert"
    if engine_layers(model):
        return "its layers are TransformerEngine's"
    for layer in model.modules():
        if isinstance(layer, PackedAttention) and not layer.has_kernel:
            return "attention runs one segment at a time"
    return None


def why_not_graphed_in_training(model: Any) -> str | None:
    """Say why its packs cannot in training; None if they can."""
    config = model.config
    if config.recompute_granularity is not None:
        return "activations are recomputed"
    if getattr(model.decoder, "activation_offload", None) is not None:
        return "activations are offloaded"
    if model.lora_dropout is not None:
        return "LoRA has dropout"
    if config.gradient_accumulation_fusion and has_apex_weight_gradients():
        return "weight gradients are Apex's"
    if config.no_sync_func is not None:
        return "gradients are reduced, and weights gathered, during a pass"
    trained = [each for each in model.decoder.parameters() if each.requires_grad]
    if not trained or any(not hasattr(each, "main_grad") for each in trained):
        return "gradients have no place to be added up in"
    return None
