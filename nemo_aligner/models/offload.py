"""Offload tensors to host memory while their model is idle.

Only the memory of their storages is freed and refilled. The tensor objects stay the same, so
modules, gradient buffers and optimizers that hold them, or views of them, keep working.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, UntypedStorage

from nemo_aligner.distributed.collectives import wait_for_device
from nemo_aligner.utils.host_transfer import host_zeros


class OffloadPolicy(Enum):
    """What happens to the contents of tensors while they are not on the device."""

    constant = "constant"  # contents never change: one copy to the host is enough
    state = "state"  # contents change: copied to the host again after ``note_change``
    scratch = "scratch"  # contents are not needed: never copied, and zeros after a reload


class OffloadGroup:
    """Tensors that are offloaded together and come back bit-identical.

    On a GPU the host copy is page-locked and stays allocated after its first use. Without a GPU the
    copy stays within host memory, which saves nothing and only serves tests.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        holds: OffloadPolicy,
        apart_from: Sequence[OffloadGroup] = (),
    ) -> None:
        """Manage the storages of ``tensors``.

        Args:
            apart_from: groups that already manage some of these storages, which this group skips.
        """
        excluded = {storage.data_ptr() for part in apart_from for storage in part._storages}  # noqa: SLF001
        # Collect storages rather than tensors, because tied weights, and views of one flat buffer,
        # share a storage. Weights in oneDNN's layout, which exists only on a CPU, have no storage.
        by_pointer = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.layout is torch.strided
        }
        # On a machine with a GPU, tensors that are in host memory are not offloaded.
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._storages: list[UntypedStorage] = [
            storage
            for pointer, storage in by_pointer.items()
            if pointer and pointer not in excluded and storage.device.type == kind
        ]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._holds = holds
        self._host: list[Tensor] = []
        self._is_stale = True
        self.is_on_device = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the group's storages when they are on the device."""
        return sum(self._sizes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host copy, which stays allocated while the tensors are on the device."""
        return sum(copy.nbytes for copy in self._host)

    def note_change(self) -> None:
        """Mark the host copy as stale, so that the next ``offload`` copies the tensors again."""
        self._is_stale = True

    def offload(self) -> None:
        """Copy the tensors to the host if the policy requires it, and free the device memory."""
        if not self.is_on_device:
            return
        if self._holds is not OffloadPolicy.scratch and self._is_stale:
            self._copy_to_host()
            self._is_stale = False
        # Resizing to 0 gives the memory back to the allocator. Tensors, views and the optimizer
        # keep the storage object.
        for storage in self._storages:
            storage.resize_(0)
        self.is_on_device = False

    def reload(self) -> None:
        """Allocate the device memory again, and fill it from the host copy, or with zeros."""
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
        wait_for_device()  # the copies must end before the memory is freed and reused

    def _bytes_of(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class OffloadManager:
    """Offload groups, listed by name; all groups of a name are offloaded and reloaded together."""

    def __init__(self, parts: Mapping[str, Sequence[OffloadGroup]]) -> None:
        self._parts = dict(parts)

    def is_on_device(self, name: str) -> bool:
        """True if every group of ``name`` is on the device."""
        return all(part.is_on_device for part in self._parts.get(name, ()))

    def move(self, here: Sequence[str], away: Sequence[str]) -> None:
        """Offload the groups named in ``away``, then reload those named in ``here``."""
        for name in away:
            for part in self._parts.get(name, ()):
                part.offload()
        for name in here:
            for part in self._parts.get(name, ()):
                part.reload()

    def note_change(self, *names: str) -> None:
        """Mark the host copies of the groups with these names as stale."""
        for name in names:
            for part in self._parts.get(name, ()):
                part.note_change()

    @property
    def device_bytes(self) -> int:
        """Bytes of all groups that are on the device now."""
        parts = (part for of_name in self._parts.values() for part in of_name)
        return sum(part.num_bytes for part in parts if part.is_on_device)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host copies of all groups, which stay allocated after their first use."""
        return sum(part.host_bytes for of_name in self._parts.values() for part in of_name)
