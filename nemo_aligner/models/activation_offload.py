"""Activation offload: what layers keep for their backward pass waits for it in host memory.

While a layer computes, a side stream copies what the layer below it has kept to page-locked host
memory. In the backward pass the copies come back one layer ahead of their use. So two layers'
activations are on the GPU at a time, however many layers there are. torch ships
``torch.autograd.graph.save_on_cpu``, which copies in line with the kernels and copies weights, too;
the copies on a side stream are those of torchtune's ``OffloadActivations``, with these differences:

- The unit is a layer's storage rather than a tensor, so views and tensors that are saved twice are
  copied once.
- GPU memory is allocated and freed on the compute stream, which waits for the side stream before it
  lets memory go. So no tensor needs ``record_stream``, and the allocator can reuse memory at once.
- The layers whose backward pass comes first stay on the GPU: their copies could not be hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemo_aligner.config.model import LAYERS_NOT_OFFLOADED
from nemo_aligner.models.internals import engine_layers, keep_weights_out_of_saved_tensors
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.host_transfer import host_zeros
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)

# Statistics of a norm and bounds of segments are not worth a copy's start, about 5 us.
_SMALLEST_BYTES = 2**16
# Host buffers have sizes of this many steps for each power of two, so that packs share them.
_SIZE_STEPS = 8


@dataclass(eq=False)
class _Storage:
    """A storage that the backward pass needs, as a flat tensor on the GPU, on the host, or both."""

    flat: Tensor | None
    host: Tensor | None = None


class _View(NamedTuple):
    """A saved tensor: where it lies in a layer's storage."""

    layer: _LayerActivations
    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _LayerActivations:
    """What one layer keeps of one pack, and how far its copies are.

    Attributes:
        below: the same of the layer below, None for the first.
        storages: by the storage's address in C++, which survives a change of its data. Empty once
            the backward pass has them: then only saved tensors hold what is left, and each goes
            when autograd lets it go.
        buffer: page-locked memory that ``_HostBuffers`` has lent.
        copied: the event after which ``buffer`` has everything; None on a CPU.
        arrived: the event after which the GPU has everything back.
    """

    def __init__(self, below: _LayerActivations | None, stays: bool, buffers: _HostBuffers) -> None:
        self.below = below
        self.storages: dict[int, _Storage] = {}
        self.buffer: Tensor | None = None
        self.copied: torch.cuda.Event | None = None
        self.arrived: torch.cuda.Event | None = None
        self.is_on_device = True
        self.stays = stays
        self._buffers = buffers

    def __del__(self) -> None:
        # A forward pass without a backward pass, or one that failed.
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
        self.return_buffer()

    def return_buffer(self) -> None:
        """Lend the host memory to the next layer, whose copy the side stream begins after ours."""
        if self.buffer is not None:
            self._buffers.give_back(self.buffer)
            self.buffer = None


class _HostBuffers:
    """Page-locked buffers that layers borrow, as locking memory takes longer than copying it.

    ``wait`` has the host wait for all copies that have begun.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def borrow(self, num_bytes: int) -> Tensor:
        """Return ``[at least num_bytes]`` uint8.

        Raises:
            RuntimeError: the system does not lock so much memory.
        """
        fitting = [each for each in self._free if each.numel() >= num_bytes]
        if fitting:
            smallest = min(fitting, key=Tensor.numel)
            self._free = [each for each in self._free if each is not smallest]
            return smallest
        if self._free:
            # Packs grow, and smaller buffers would never be used again.
            self._wait()
            self.num_bytes -= sum(map(Tensor.numel, self._free))
            self._free = []
        step = max(_SMALLEST_BYTES, 2 ** num_bytes.bit_length() // 2 // _SIZE_STEPS)
        size = -(-num_bytes // step) * step
        (buffer,) = host_zeros([torch.empty(size, dtype=torch.uint8, device="meta")])
        self.num_bytes += size
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)


class ActivationOffload:
    """Offloads what the layers of a decoder keep for their backward pass.

    Any number of packs may wait for their backward pass, as in a pipeline. Losses and gradients are
    bit-identical to those without it. On a CPU the copies stay in host memory: a rehearsal, which
    saves nothing.
    """

    def __init__(self, decoder: torch.nn.Module, has_last_layer: bool) -> None:
        """Offload what ``decoder.layers`` keep in every forward pass from here on that learns."""
        self._layers: Sequence[torch.nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
        self._decoder = decoder
        self._offloaded = len(self._layers) - (LAYERS_NOT_OFFLOADED if has_last_layer else 0)
        is_gpu = torch.cuda.is_available()
        self._kind = "cuda" if is_gpu else "cpu"
        self._smallest = _SMALLEST_BYTES if is_gpu else 0  # a rehearsal leaves nothing out
        self._side = torch.cuda.Stream() if is_gpu else None
        self._buffers = _HostBuffers(self._side.synchronize if self._side else lambda: None)
        # Of the forward pass that runs now; None outside, as while a layer is recomputed.
        self._layer: _LayerActivations | None = None
        self._number = 0
        self._shared: Any = None
        self._resident: set[int] = set()
        # A layer that is being copied, whose GPU memory has not been let go yet.
        self._leaving: _LayerActivations | None = None
        for layer in self._layers:
            # Before a layer rather than behind it: recomputation saves a layer's input behind it.
            layer.register_forward_pre_hook(self._begin_layer)

    @property
    def host_bytes(self) -> int:
        """Bytes of all host buffers."""
        return self._buffers.num_bytes

    @contextmanager
    def forward_pass(self, shared: Any) -> Iterator[None]:
        """Offload what the decoder's layers keep inside the block.

        ``shared`` holds tensors that all layers read: they stay on the GPU anyway.
        """
        self._number, self._shared = -1, shared
        self._resident = {_address(each) for each in self._decoder.parameters()}
        # What is saved before the first layer belongs to it.
        self._layer = self._new_layer(None)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._end_layer(self._layer)
        finally:
            self._layer = self._shared = None

    # Forward: hooks of autograd and of the layers.

    def _new_layer(self, below: _LayerActivations | None) -> _LayerActivations:
        return _LayerActivations(below, max(self._number, 0) >= self._offloaded, self._buffers)

    def _begin_layer(self, *unused: Any) -> None:
        if self._layer is None:
            return
        self._number += 1
        if self._number > 0:
            self._end_layer(self._layer)
            below = self._layer if self._layer.storages else self._layer.below
            self._layer = self._new_layer(below)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        """Take what autograd saves; what stays on the GPU comes back as it is."""
        layer = self._layer
        if layer is None or tensor.layout is not torch.strided:
            return tensor
        storage_bytes = tensor.untyped_storage().nbytes()
        if tensor.device.type != self._kind or storage_bytes < self._smallest:
            return tensor
        address = _address(tensor)
        if address in self._resident:
            return tensor
        storage = layer.storages.get(address)
        if storage is None:
            count = storage_bytes // tensor.element_size()
            flat = tensor.detach().as_strided((count,), (1,), 0)
            storage = layer.storages[address] = _Storage(flat)
        offset = int(tensor.storage_offset())
        return _View(layer, storage, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _end_layer(self, layer: _LayerActivations) -> None:
        """Let the layer below go, once it is copied, and begin to copy this one."""
        self._release_leaving()
        if layer.stays:
            return
        for address in map(_address, _tensors(self._shared)):
            layer.storages.pop(address, None)
        if layer.storages:
            self._copy_to_host(layer)
            self._leaving = layer

    def _copy_to_host(self, layer: _LayerActivations) -> None:
        storages = list(layer.storages.values())
        flats = [storage.flat for storage in storages if storage.flat is not None]
        layer.buffer = self._buffers.borrow(sum(map(_padded_bytes, flats)))
        start = 0
        with self._beside():
            for storage, flat in zip(storages, flats, strict=True):
                place = layer.buffer[start : start + flat.nbytes]
                storage.host = place.view(flat.dtype)
                storage.host.copy_(flat, non_blocking=True)
                start += _padded_bytes(flat)
            layer.copied = _event(self._side)

    def _release_leaving(self) -> None:
        """Free the GPU memory of the layer that is being copied."""
        layer, self._leaving = self._leaving, None
        if layer is None:
            return
        if layer.copied is not None:
            # Memory that is let go belongs to the compute stream, which may write to it at once.
            torch.cuda.current_stream().wait_event(layer.copied)
        for storage in layer.storages.values():
            storage.flat = None
        layer.is_on_device = False

    # Backward.

    def _unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.layer.storages:
            self._begin_backward(kept.layer)
        flat = kept.storage.flat
        assert flat is not None
        return flat.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)

    def _begin_backward(self, layer: _LayerActivations) -> None:
        """Have all of a layer on the GPU, and begin to bring back the one below."""
        if self._leaving is layer:
            # It has not left: its copy was for nothing, but has to end before its memory goes.
            self._leaving = None
            if layer.copied is not None:
                torch.cuda.current_stream().wait_event(layer.copied)
            layer.return_buffer()
        else:
            self._release_leaving()
        self._bring_back(layer)
        if layer.arrived is not None:
            torch.cuda.current_stream().wait_event(layer.arrived)
            layer.arrived = None
        layer.storages = {}
        if layer.below is not None:
            self._bring_back(layer.below)

    def _bring_back(self, layer: _LayerActivations) -> None:
        """Begin to copy a layer to the GPU, unless it is there or on its way."""
        if layer.is_on_device or self._leaving is layer:
            return
        storages = list(layer.storages.values())
        for storage in storages:
            assert storage.host is not None
            host = storage.host
            storage.flat = torch.empty(host.shape, dtype=host.dtype, device=self._kind)
        with self._beside():
            for storage in storages:
                assert storage.flat is not None
                assert storage.host is not None
                storage.flat.copy_(storage.host, non_blocking=True)
                storage.host = None
            layer.arrived = _event(self._side)
        layer.is_on_device = True
        layer.return_buffer()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run copies on the side stream, behind all that the compute stream has been given."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield


def offload_activations(model: Any) -> ActivationOffload:
    """Have a model keep its layers' activations in host memory between forward and backward pass.

    Args:
        model: a ``GPTRewardModel``, before Megatron's wrapper is around it.

    Raises:
        ConfigError: its layers are TransformerEngine's, which read weights that autograd saved by
            what Megatron noted on them, and hooks lose that.
    """
    if engine_layers(model):
        raise ConfigError(
            "model.activations_offload: got true, but the layers are TransformerEngine's, which "
            "are not supported. Set it to false, or run where TransformerEngine is not installed."
        )
    keep_weights_out_of_saved_tensors()
    decoder = model.decoder
    offload = ActivationOffload(decoder, model.post_process)
    if not torch.cuda.is_available() and is_main():
        logger.warning(
            "model.activations_offload: there is no GPU, so activations are only copied within "
            "host memory. This saves nothing."
        )
    forward = decoder.forward

    def learning(*arguments: Any, **options: Any) -> Any:
        learns = decoder.training and torch.is_grad_enabled()
        # The pipeline's schedule holds what a stage received until it has sent the gradient back.
        shared = [options.get("packed_seq_params"), decoder.input_tensor]
        with offload.forward_pass(shared) if learns else nullcontext():
            return forward(*arguments, **options)

    decoder.forward = learning
    decoder.activation_offload = offload
    return offload


def _address(tensor: Tensor) -> int:
    """The storage's address in C++, which stays the same when its data moves."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001


def _padded_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in a host buffer, where dtypes of 8 bytes are aligned."""
    return -(-tensor.nbytes // 64) * 64


def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside lists, tuples, dicts and dataclasses."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
        elif is_dataclass(one) and not isinstance(one, type):
            waiting += vars(one).values()  # cached properties, too
