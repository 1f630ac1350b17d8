"""Activation offload: tensors saved for the backward pass stay in host memory until it runs.

While a layer computes, a side stream copies the activations of the layer below it to page-locked
host memory. In the backward pass the copies come back one layer ahead of their use. So the GPU
holds the activations of only two layers at a time, however many layers the model has.

torch ships ``torch.autograd.graph.save_on_cpu``, which copies on the compute stream and copies
weights, too. torchtune's ``OffloadActivations`` copies on a side stream. This module also copies on
a side stream, and differs from torchtune's in three points:

- It copies whole storages rather than tensors, so several views of a storage, or a tensor that is
  saved twice, cost one copy.
- GPU memory is allocated and freed on the compute stream, which waits for the side stream before it
  frees memory. So no tensor needs ``record_stream``, and the allocator can reuse memory at once.
- The last layers stay on the GPU: their backward pass comes first, so nothing could hide their
  copies.
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

# Smaller storages, such as a norm's statistics, stay on the GPU: just starting a copy takes 5 us.
_SMALLEST_BYTES = 2**16
# At most this many sizes of host buffers lie between two powers of two. With few sizes, a buffer
# that one pack returns is likely to fit the next pack.
_SIZE_STEPS = 8


@dataclass(eq=False)
class _Storage:
    """A storage that a backward pass needs; its contents are on the GPU, in host memory or in both.

    Attributes:
        flat: all elements of the storage as one tensor on the GPU; None while they are not there.
        host: the copy in page-locked host memory; None if there is no copy.
    """

    flat: Tensor | None
    host: Tensor | None = None


class _View(NamedTuple):
    """Stand-in that autograd saves for an offloaded tensor.

    The backward pass builds the tensor again from ``storage``, which it shares with other views,
    and from the tensor's own dtype, size, strides and offset.
    """

    layer: _LayerActivations
    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _LayerActivations:
    """The activations of one layer for one pack, and the state of their copies.

    Attributes:
        below: the activations of the layer below; None for the first layer.
        storages: the layer's storages, keyed by the address of the C++ storage object, which stays
            the same when its data moves. Emptied once the backward pass has all of them on the
            device: from then on only autograd's saved tensors hold a storage, so it is freed with
            the last of them.
        buffer: page-locked memory borrowed from ``_HostBuffers``.
        copied: the event after which ``buffer`` is complete; None on a CPU.
        arrived: the event after which the GPU has all storages back; None while no copy to the GPU
            is under way.
        is_on_device: the device has all storages, or they are on their way back.
        stays: this layer is never offloaded.
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
        # After a failed backward pass, a copy back to the GPU may still be running. Wait for it,
        # because the GPU memory that it writes is about to be freed.
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
        self.return_buffer()

    def return_buffer(self) -> None:
        """Return this layer's host buffer for reuse.

        A copy between this buffer and the GPU may still be queued. The copy of the buffer's next
        user comes after it, because the side stream runs copies in order.
        """
        if self.buffer is not None:
            self._buffers.give_back(self.buffer)
            self.buffer = None


class _HostBuffers:
    """A pool of page-locked host buffers, which layers borrow and give back.

    Buffers are reused, because locking memory takes longer than copying into it.

    Args:
        wait: function that blocks the host until all copies that have begun are done.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def borrow(self, num_bytes: int) -> Tensor:
        """Lend a uint8 buffer of at least ``num_bytes`` elements until the caller gives it back.

        Raises:
            RuntimeError: the system cannot lock that much memory.
        """
        fitting = [free for free in self._free if free.numel() >= num_bytes]
        if fitting:
            smallest = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not smallest]
            return smallest
        if self._free:
            # No free buffer is large enough, because packs have grown. Drop the free ones, which
            # are too small for all later packs.
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
    """Offloads what the layers of a decoder save for their backward pass.

    Several packs may wait for their backward pass at the same time, as pipeline parallelism needs.
    Losses and gradients are bit-identical to those without offload. Without a GPU the copies stay
    within host memory, which saves nothing and only serves tests.
    """

    def __init__(self, decoder: torch.nn.Module, has_last_layer: bool) -> None:
        """Hook into ``decoder.layers``, whose saved tensors ``forward_pass`` then offloads.

        Args:
            has_last_layer: this pipeline stage ends with the model's last layers, which stay on the
                GPU.
        """
        self._layers: Sequence[torch.nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
        self._decoder = decoder
        self._offloaded = len(self._layers) - (LAYERS_NOT_OFFLOADED if has_last_layer else 0)
        is_gpu = torch.cuda.is_available()
        self._kind = "cuda" if is_gpu else "cpu"
        # in tests on a CPU, offload even small tensors
        self._smallest = _SMALLEST_BYTES if is_gpu else 0
        self._side = torch.cuda.Stream() if is_gpu else None
        self._buffers = _HostBuffers(self._side.synchronize if self._side else lambda: None)
        # State of the current forward pass. ``_layer`` is None outside of a forward pass, for
        # example in an evaluation.
        self._layer: _LayerActivations | None = None
        self._number = 0
        self._shared: Any = None
        self._resident: set[int] = set()
        # The layer that is being copied, whose GPU memory is not freed yet.
        self._leaving: _LayerActivations | None = None
        for layer in self._layers:
            # Register hooks before each layer rather than after it, because with recomputation
            # autograd saves a layer's input only after the layer's forward.
            layer.register_forward_pre_hook(self._begin_layer)

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory of all host buffers, whether layers borrow them or not."""
        return self._buffers.num_bytes

    @contextmanager
    def forward_pass(self, shared: Any) -> Iterator[None]:
        """Offload what the decoder's layers save within the context.

        Args:
            shared: objects whose tensors are not offloaded, because other code keeps them on the
                GPU until the backward pass anyway, such as the pack's context.
        """
        self._number, self._shared = -1, shared
        self._resident = {_storage_address(parameter) for parameter in self._decoder.parameters()}
        # Tensors that are saved before the first layer count as the first layer's.
        self._layer = self._new_layer(None)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._end_layer(self._layer)
        finally:
            self._layer = self._shared = None

    # Forward pass: methods that autograd and the layers call as hooks.

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
        """Return what to save for ``tensor``: a ``_View``, or ``tensor`` if it stays on the GPU."""
        layer = self._layer
        if layer is None or tensor.layout is not torch.strided:
            return tensor
        storage_bytes = tensor.untyped_storage().nbytes()
        if tensor.device.type != self._kind or storage_bytes < self._smallest:
            return tensor
        address = _storage_address(tensor)
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
        """Start to copy the activations of ``layer``, which has just run, to the host.

        First free the GPU memory of the layer below, whose copy was started one layer earlier.
        """
        self._release_leaving()
        if layer.stays:
            return
        for address in map(_storage_address, _find_tensors(self._shared)):
            layer.storages.pop(address, None)
        if layer.storages:
            self._copy_to_host(layer)
            self._leaving = layer

    def _copy_to_host(self, layer: _LayerActivations) -> None:
        storages = list(layer.storages.values())
        flats = [storage.flat for storage in storages if storage.flat is not None]
        layer.buffer = self._buffers.borrow(sum(map(_padded_bytes, flats)))
        start = 0
        with self._on_side_stream():
            for storage, flat in zip(storages, flats, strict=True):
                place = layer.buffer[start : start + flat.nbytes]
                storage.host = place.view(flat.dtype)
                storage.host.copy_(flat, non_blocking=True)
                start += _padded_bytes(flat)
            layer.copied = _record_event(self._side)

    def _release_leaving(self) -> None:
        """Free the GPU memory of ``_leaving``, the layer whose copy to the host was started last.

        The compute stream waits for that copy; the host does not.
        """
        layer, self._leaving = self._leaving, None
        if layer is None:
            return
        if layer.copied is not None:
            # The compute stream may write to the freed memory at once, so it waits for the copy.
            torch.cuda.current_stream().wait_event(layer.copied)
        for storage in layer.storages.values():
            storage.flat = None
        layer.is_on_device = False

    # Backward pass: the hook that autograd calls for each saved tensor, and its helpers.

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.layer.storages:
            self._begin_backward(saved.layer)
        flat = saved.storage.flat
        assert flat is not None
        return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _begin_backward(self, layer: _LayerActivations) -> None:
        """Bring the activations of ``layer`` to the GPU, as its backward pass begins now.

        The copies of the layer below are started, too, so that they arrive during this backward
        pass.
        """
        if self._leaving is layer:
            # The GPU memory is not freed yet, so nothing has to be copied back. But the copy to the
            # host has to finish first.
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
        """Start to copy a layer's activations to the GPU, unless they are there or on their way."""
        if layer.is_on_device or self._leaving is layer:
            return
        storages = list(layer.storages.values())
        for storage in storages:
            assert storage.host is not None
            host = storage.host
            storage.flat = torch.empty(host.shape, dtype=host.dtype, device=self._kind)
        with self._on_side_stream():
            for storage in storages:
                assert storage.flat is not None
                assert storage.host is not None
                storage.flat.copy_(storage.host, non_blocking=True)
                storage.host = None
            layer.arrived = _record_event(self._side)
        layer.is_on_device = True
        layer.return_buffer()

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Queue the context's copies on the side stream.

        They run after all work that is queued on the compute stream so far.
        """
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield


def offload_activations(model: Any) -> ActivationOffload:
    """Keep a model's activations in host memory between its forward and backward passes.

    Args:
        model: a ``GPTRewardModel`` before it is wrapped by Megatron's data parallelism.

    Raises:
        ConfigError: the layers are TransformerEngine's. They read Megatron's attributes from the
            weights that autograd saved, and hooks on saved tensors return weights without these
            attributes.
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

    def forward_with_offload(*arguments: Any, **options: Any) -> Any:
        learns = decoder.training and torch.is_grad_enabled()
        # Do not offload tensors that stay on the GPU anyway: those of the pack's context, and the
        # stage's input, which the pipeline schedule holds until the backward pass.
        shared = [options.get("packed_seq_params"), decoder.input_tensor]
        with offload.forward_pass(shared) if learns else nullcontext():
            return forward(*arguments, **options)

    decoder.forward = forward_with_offload
    decoder.activation_offload = offload
    return offload


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's C++ storage object, the same even after its data moves."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001


def _padded_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in a host buffer, padded so that every dtype is aligned."""
    return -(-tensor.nbytes // 64) * 64


def _record_event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside lists, tuples, dicts and dataclasses."""
    waiting, visited_ids = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in visited_ids:
            continue
        visited_ids.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
        elif is_dataclass(item) and not isinstance(item, type):
            # instance attributes, which include values of cached properties
            waiting += vars(item).values()
