"""Tensors that move between the device and host memory, as they are or are not needed there.

A tensor's memory is let go and taken again; the tensor itself stays, with all its views, so that
whoever holds one of them (a module, a buffer of gradients, an optimizer) does not notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, UntypedStorage

from nemo_aligner.distributed.collectives import wait_for_device
from nemo_aligner.utils.host_transfer import host_zeros


class OffloadPolicy(Enum):
    """What becomes of the content of tensors that leave the device."""

    constant = "constant"  # never changes: it is copied to the host once
    state = "state"  # is copied where it has changed
    scratch = "scratch"  # is forgotten: zeros come back


class OffloadGroup:
    """Tensors that leave the device together, and come back with the same bits.

    On a GPU the copy in host memory is page-locked, and is kept from the first time on. On a CPU
    the two memories are one: then it is a rehearsal that costs a copy and saves nothing.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        holds: OffloadPolicy,
        apart_from: Sequence[OffloadGroup] = (),
    ) -> None:
        """The storages of ``tensors``; those of ``apart_from`` are left to these parts."""
        others = {storage.data_ptr() for part in apart_from for storage in part._storages}  # noqa: SLF001
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors
        }
        # Host memory is nobody's device where there is a GPU.
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._storages: list[UntypedStorage] = [
            storage
            for pointer, storage in found.items()
            if pointer and pointer not in others and storage.device.type == kind
        ]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._holds = holds
        self._host: list[Tensor] = []
        self._is_stale = True
        self.is_on_device = True

    @property
    def num_bytes(self) -> int:
        """What they take on the device."""
        return sum(self._sizes)

    @property
    def host_bytes(self) -> int:
        """What their copy takes in host memory, whether they are here or not."""
        return sum(copy.nbytes for copy in self._host)

    def note_change(self) -> None:
        """The content is no longer that of the copy."""
        self._is_stale = True

    def offload(self) -> None:
        """Let the device's memory go."""
        if not self.is_on_device:
            return
        if self._holds is not OffloadPolicy.scratch and self._is_stale:
            self._copy_to_host()
            self._is_stale = False
        for storage in self._storages:
            storage.resize_(0)
        self.is_on_device = False

    def reload(self) -> None:
        """Take the device's memory again, with what was in it."""
        if self.is_on_device:
            return
        for index, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
            storage.resize_(size)
            if self._holds is OffloadPolicy.scratch:
                self._bytes_of(storage).zero_()
            else:
                self._bytes_of(storage).copy_(self._host[index], non_blocking=True)
        wait_for_device()
        self.is_on_device = True

    def _copy_to_host(self) -> None:
        if not self._host:
            self._host = host_zeros([self._bytes_of(storage) for storage in self._storages])
        for storage, copy in zip(self._storages, self._host, strict=True):
            copy.copy_(self._bytes_of(storage), non_blocking=True)
        wait_for_device()  # memory that is let go may be taken by another stream

    def _bytes_of(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class OffloadManager:
    """Parts by name, and which of them are on the device; those of a name move together."""

    def __init__(self, parts: Mapping[str, Sequence[OffloadGroup]]) -> None:
        self._parts = dict(parts)

    def is_on_device(self, name: str) -> bool:
        """Whether all of it is on the device."""
        return all(part.is_on_device for part in self._parts.get(name, ()))

    def move(self, here: Sequence[str], away: Sequence[str]) -> None:
        """Have what is named first on the device, after the rest has left it."""
        for name in away:
            for part in self._parts.get(name, ()):
                part.offload()
        for name in here:
            for part in self._parts.get(name, ()):
                part.reload()

    def note_change(self, *names: str) -> None:
        """The content of these has changed."""
        for name in names:
            for part in self._parts.get(name, ()):
                part.note_change()

    def bytes_of(self, name: str) -> int:
        """What a part takes where it is on the device."""
        return sum(part.num_bytes for part in self._parts.get(name, ()))

    @property
    def device_bytes(self) -> int:
        """What all parts take on the device now."""
        parts = (part for of_name in self._parts.values() for part in of_name)
        return sum(part.num_bytes for part in parts if part.is_on_device)

    @property
    def host_bytes(self) -> int:
        """What the copies take in host memory."""
        return sum(part.host_bytes for of_name in self._parts.values() for part in of_name)
