"""CUDA graphs of a decoder: one launch for the whole pass instead of hundreds for each layer.

A graph replays the kernels that were captured, with their addresses and shapes. So inputs are
copied into buffers that the graph reads, and packs are padded to a few sizes (``fixed_sizes.py``).
A combination of sizes gets its own graph when it occurs for the second time. In training a second
graph holds the backward pass, which also adds the gradients to Megatron's ``main_grad``.
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

from nemo_aligner.batch.cache_use import CacheUse
from nemo_aligner.models.attention.key_copies import Copies
from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.experts import routers
from nemo_aligner.models.internals import engine_layers, has_apex_weight_gradients
from nemo_aligner.models.pack_context import PackContext
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)

MOST_GRAPHS = 32
"""Most graphs per model, for scoring and for training each; other packs run without a graph."""

Replay = Callable[[], None]


@dataclass(frozen=True)
class DecoderInputs:
    """The inputs of a decoder for one pack: its ``tokens``, ``positions`` and ``PackContext``.

    Tokens and positions are ``[T]`` int64. The context has no RoPE tables yet: the decoder computes
    them from the positions.
    """

    tokens: Tensor
    positions: Tensor
    context: PackContext

    def tensors(self) -> list[Tensor]:
        """Return all tensors of a pack that a decoder reads.

        The order is the same for all packs, so that ``fill`` can copy one pack's tensors to
        another's.
        """
        segments, use = self.context.segments, self.context.segments.cached
        bounds = [segments.cu_seqlens, segments.kv_cu_seqlens]
        tensors = [self.tokens, self.positions, *bounds, self.context.read_rows]
        if segments.kv_index is not None:
            tensors += [segments.kv_index, *(segments.copies or ())]
        return tensors if use is None else [*tensors, *use.tensors()]

    def key(self) -> Hashable:
        """Return a key for this pack's graph: packs with equal keys can run with the same graph.

        It contains everything that determines the kernels, except for the tensors' values: shapes,
        fixed sizes, and which pool of cached keys is read.
        """
        segments = self.context.segments
        shapes = tuple(tensor.shape for tensor in self.tensors())
        return shapes, segments.sizes, segments.kv_index is None, id(segments.pool)

    def as_buffers(self) -> DecoderInputs:
        """Return inputs with copies of all tensors, which a graph will read in every replay.

        ``lengths`` and ``prefixes`` are dropped, because they hold only for this pack.
        """
        segments, use = self.context.segments, self.context.segments.cached
        fixed = replace(
            segments,
            lengths=(),
            prefixes=(),
            cu_seqlens=segments.cu_seqlens.clone(),
            kv_cu_seqlens=segments.kv_cu_seqlens.clone(),
            kv_index=None if segments.kv_index is None else segments.kv_index.clone(),
            copies=segments.copies and Copies(*(tensor.clone() for tensor in segments.copies)),
            cached=use and CacheUse(use.lengths, *(index.clone() for index in use.tensors())),
        )
        context = PackContext(fixed, self.context.read_rows.clone())
        return DecoderInputs(self.tokens.clone(), self.positions.clone(), context)

    def fill(self, inputs: DecoderInputs) -> None:
        """Copy another pack's values into this object's tensors, before a graph is replayed.

        The graph reads the memory of this object's tensors, and never that of ``inputs``.

        Args:
            inputs: the other pack, with the same ``key`` as this object, so that all shapes are
                equal.
        """
        for buffer, tensor in zip(self.tensors(), inputs.tensors(), strict=True):
            buffer.copy_(tensor)


Decode = Callable[[DecoderInputs], Tensor]
"""Computes the hidden states ``[R, 1, hidden]`` of the rows that the head reads."""


class Capture(Protocol):
    """Interface to record work on the device, such as kernels, and to replay it.

    ``CudaCapture`` records CUDA graphs. Tests use an implementation that runs the work again.
    """

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run ``work`` once before its capture: libraries allocate and compile at first use."""

    def forward(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Record ``work``; return its result, and a function that computes it anew in place."""

    def backward(self, work: Callable[[], None]) -> Replay:
        """Record ``work`` without running it; return a function that runs it."""

    def reset(self) -> None:
        """Free the memory that graphs share; call it after all graphs have been dropped."""

    def used_bytes(self) -> int:
        """Return how many bytes of device memory tensors and CUDA graphs use now."""


class CudaCapture:
    """Captures CUDA graphs that share a memory pool, safe as only one graph runs at a time."""

    def __init__(self) -> None:
        # All graphs use one stream, because memory pools and cuBLAS's workspaces belong to a
        # stream.
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def forward(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        graph = torch.cuda.CUDAGraph()
        with self._capture_on_stream(graph):
            result = work()
        return result, graph.replay

    def backward(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with self._capture_on_stream(graph):
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
    def _capture_on_stream(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        current = torch.cuda.current_stream()
        # Other threads, of a server or of NCCL, may call CUDA during a capture. This mode allows
        # that.
        mode = "thread_local"
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                yield
        finally:
            # If a capture fails, torch leaves the capture's stream current.
            torch.cuda.set_stream(current)


@dataclass
class _Sums:
    are_taken: bool = False


class _Leaves:
    """Stand-ins that replace a model's trained parameters during a capture, and share their memory.

    Autograd runs the node that accumulates a parameter's gradient on the stream on which the node
    was made. Megatron's wrapper makes the nodes of the real parameters on the default stream, which
    a capture on another stream must not touch. Megatron's hooks must not run in a capture either.
    The stand-ins have hooks of their own, which add to ``main_grad`` as Megatron's would. Weights
    whose matmuls already add their gradients to ``main_grad`` get a dummy gradient, as they do from
    Megatron.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        stand_ins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._places: list[tuple[torch.nn.Module, str, Any, Any]] = []
        self._sums = _Sums()
        for module in {module: None for root in modules for module in root.modules()}:
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    continue
                if parameter not in stand_ins:
                    stand_ins[parameter] = self._stand_in(parameter)
                self._places.append((module, name, parameter, stand_ins[parameter]))

    def _stand_in(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        leaf = torch.nn.Parameter(parameter.detach())
        vars(leaf).update(vars(parameter))
        # Capture ``sums`` rather than ``self``, which holds the leaf: Python cannot collect a cycle
        # that goes through the leaf's C++ hooks.
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
        """Replace the modules' trained parameters by the stand-ins within the context."""
        try:
            for module, name, _, stand_in in self._places:
                setattr(module, name, stand_in)
            yield
        finally:
            for module, name, parameter, _ in self._places:
                setattr(module, name, parameter)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Let the stand-ins' hooks add gradients to ``main_grad`` within the context.

        Outside of it the hooks drop the gradients: those of the warm-up run before a capture.
        """
        self._sums.are_taken = True
        try:
            yield
        finally:
            self._sums.are_taken = False


class _Graph:
    """The captured forward pass (and backward pass in training) of packs with the same ``key``."""

    def __init__(
        self, capture: Capture, decode: Decode, inputs: DecoderInputs, leaves: _Leaves | None
    ) -> None:
        self._decode, self._leaves = decode, leaves
        self._inputs = inputs.as_buffers()
        self._hidden: Tensor | None = None  # holds autograd's graph for _learn_back
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
        # ``_Replayed`` gets this input, which requires a gradient, so that autograd also calls its
        # backward.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def run(self, inputs: DecoderInputs, replays: Counter[str]) -> Tensor:
        """Return the hidden states, in memory that the next replay of any graph may overwrite.

        Args:
            replays: counters of the replays of all graphs that share memory. The backward pass uses
                them to detect that its activations were overwritten.
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

    def _decode_buffers(self) -> Tensor:
        # ``replace`` makes new segments without the old ones' cached properties, which may hold
        # values of an earlier pack.
        context = replace(self._inputs.context, segments=replace(self._inputs.context.segments))
        return self._decode(replace(self._inputs, context=context))

    def _infer(self) -> Tensor:
        return self._decode_buffers()

    def _learn(self) -> Tensor:
        assert self._leaves is not None
        with self._leaves.in_place(), torch.enable_grad():
            self._hidden = self._decode_buffers()
        return self._hidden

    def _learn_back(self) -> None:
        assert self._leaves is not None
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        with self._leaves.adding():
            torch.autograd.backward(hidden, self.grad)

    def _learn_nothing(self) -> None:
        hidden, self._hidden = self._learn(), None
        # Use a gradient of zeros: some matmuls add weight gradients to ``main_grad`` even in this
        # warm-up run.
        self.grad = torch.zeros_like(hidden)
        torch.autograd.backward(hidden, self.grad)


class _Replayed(Function):
    """Autograd function that replays a graph; its backward replays the graph of the backward pass.

    The gradients go to ``main_grad``, so autograd gets none.
    """

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
                "Another CUDA graph ran between the forward and the backward pass of a pack, and "
                "may have overwritten its activations. Set model.cuda_graphs=false."
            )
        graph.grad.copy_(grads[0])
        graph.replay_backward()
        return None, None, None


class _Key(NamedTuple):
    sizes: Hashable
    is_training: bool
    learns: bool


class DecoderGraphs:
    """The CUDA graphs of one model, captured when packs of new sizes occur.

    Args:
        modules: the modules that ``decode`` runs.
        why_not: returns why packs cannot run with graphs in training; None if they can.
        max_graphs: the most graphs for scoring, and also the most for training.

    Attributes:
        eager: number of packs that ran without a graph.
    """

    def __init__(
        self,
        decode: Decode,
        modules: list[torch.nn.Module],
        capture: Capture,
        why_not: Callable[[], str | None],
        max_graphs: int = MOST_GRAPHS,
    ) -> None:
        self._decode, self._modules, self._capture = decode, modules, capture
        self._why_not, self._max_graphs = why_not, max_graphs
        self._graphs: dict[_Key, _Graph] = {}
        self._seen: Counter[_Key] = Counter()
        self._leaves: _Leaves | None = None
        # The parameters are listed once, because listing them takes longer than launching a graph.
        self._parameters: list[torch.nn.Parameter] = []
        self._addresses: dict[bool, list[int]] = {}
        self._warned: set[str] = set()
        self._failed = False
        self._replays: Counter[str] = Counter()
        self.eager = 0

    @property
    def replayed(self) -> int:
        """Number of packs that ran with a CUDA graph."""
        return self._replays["forward"]

    def are_used(self, is_training: bool) -> bool:
        """Tell if packs can run with CUDA graphs now; if not, log the reason once."""
        if self._failed:
            return False
        reason = self._why_not() if is_training else None
        if reason is not None:
            self._warn_once(f"model.cuda_graphs: training runs without them, because {reason}")
        return reason is None

    def run(self, inputs: DecoderInputs, is_training: bool) -> Tensor:
        """Compute the hidden states of a pack that is padded to fixed sizes.

        A key's graph is captured when the key occurs for the second time, unless there are
        ``max_graphs`` graphs already. Packs whose key has no graph run without one.
        """
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
        count = sum(captured.is_training == is_training for captured in self._graphs)
        if self._seen[key] < 2 or count >= self._max_graphs:
            return None
        self._add(key, inputs)
        return self._graphs.get(key)

    def _add(self, key: _Key, inputs: DecoderInputs) -> None:
        learns = key.learns
        if learns and self._leaves is None:
            self._leaves = _Leaves(self._modules)
        used_before = self._capture.used_bytes()
        try:
            graph = _Graph(self._capture, self._decode, inputs, self._leaves if learns else None)
        except RuntimeError as error:
            # Nothing was computed during the failed capture, so the pack can still run without a
            # graph.
            self._failed = True
            self._graphs.clear()
            logger.warning(
                "model.cuda_graphs: a capture failed, so batches run without graphs from now on",
                exc_info=error,
            )
            return
        self._graphs[key] = graph
        added_bytes = self._capture.used_bytes() - used_before
        if is_main():
            logger.info(
                f"captured CUDA graph {len(self._graphs)}: {len(inputs.tokens)} tokens, "
                f"{'training' if learns else 'scoring'}, "
                f"{added_bytes / 2**20:.0f} MiB more GPU memory"
            )

    def _drop_if_moved(self, learns: bool) -> None:
        """Drop all graphs if the address of a weight or of a gradient buffer has changed.

        The graphs' kernels would still use the old addresses, for example after an offload and
        reload.
        """
        if not self._parameters:
            for module in self._modules:
                self._parameters += module.parameters()
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if learns:
            grads = (getattr(parameter, "main_grad", None) for parameter in self._parameters)
            addresses += [grad.data_ptr() for grad in grads if grad is not None]
        if addresses == self._addresses.get(learns, addresses):
            self._addresses[learns] = addresses
            return
        self._addresses, self._leaves = {learns: addresses}, None
        self._graphs.clear()
        self._capture.reset()

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and is_main():
            logger.warning(text)
        self._warned.add(text)


def why_not_graphed(model: Any) -> str | None:
    """Return why packs of ``model`` cannot run with CUDA graphs; None if they can."""
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
        return "the host has to wait for the number of tokens of each of the model's experts"
    if engine_layers(model):
        return "the model's layers are TransformerEngine's"
    for layer in model.modules():
        if hasattr(layer, "why_not_graphed"):
            return layer.why_not_graphed
        if isinstance(layer, PackedAttention) and not layer.has_kernel:
            return "attention runs one sequence at a time on this GPU"
    return None


def why_not_graphed_in_training(model: Any) -> str | None:
    """Return why packs of ``model`` cannot run with CUDA graphs in training; None if they can."""
    config = model.config
    recomputes_layers = any(layer.is_recomputed for layer in model.decoder.layers)
    if recomputes_layers or config.recompute_granularity is not None:
        return "activations are recomputed"
    if getattr(model.decoder, "activation_offload", None) is not None:
        return "activations are offloaded"
    if model.lora_dropout is not None:
        return "LoRA has dropout"
    if config.gradient_accumulation_fusion and has_apex_weight_gradients():
        return "Apex computes the weight gradients"
    if config.no_sync_func is not None:
        return "data parallel ranks exchange gradients and weights during a pass"
    trained = [parameter for parameter in model.decoder.parameters() if parameter.requires_grad]
    if not trained or any(not hasattr(parameter, "main_grad") for parameter in trained):
        return "the model's trained weights have no Megatron gradient buffers"
    return None
