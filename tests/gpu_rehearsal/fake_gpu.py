"""A GPU without data: tensors on "cuda" are torch's fake ones, and NCCL sends nothing.

It plays CUDA for a CPU build of torch, in a process that ``conftest.py`` starts. Shapes, dtypes and
devices are checked as on a GPU; numbers, races and kernels themselves are not seen. ``watch.py``
has what is done with each operation.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from tests.gpu_rehearsal.watch import CUDA, Watch

_CUDA, _META = 1, 14  # c10::DeviceType
_PRIVATE_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


class _Stream:
    """A stream or an event: what it is asked to wait for is done; the host's waiting is noted."""

    device, stream_id, device_index, device_type, cuda_stream = CUDA, 0, 0, _CUDA, 0
    watch: Watch

    def __init__(self, *unused: Any, **more: Any) -> None: ...

    def nothing(self, *unused: Any, **more: Any) -> None: ...

    wait_stream = wait_event = wait = record = __exit__ = nothing

    def synchronize(self) -> None:
        self.watch.note("synchronize")

    def record_event(self, *unused: Any) -> _Stream:
        return self

    __enter__ = record_event

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Stream) -> float:
        self.watch.note("elapsed_time")
        return 1.0


class _NoDevice(FakeTensorMode):
    avoid_device_init = True  # whatever torch.cuda.is_available says


def _random_state(*unused: Any, **more: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _at_once(executor: ThreadPoolExecutor, function: Any, *args: Any, **named: Any) -> Future:
    """torch's modes belong to a thread: what has one of its own runs in this one."""
    done: Future = Future()
    try:
        done.set_result(function(*args, **named))
    except Exception as error:
        done.set_exception(error)
    return done


def _play_cuda(watch: Watch) -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _PRIVATE_GUARDS)
    guards[_CUDA] = guards[_META]  # the one that does nothing
    FakeTensor._normalize_fake_device = staticmethod(
        lambda device: CUDA if device.type == "cuda" else device
    )
    cuda, nothing, state = torch.cuda, lambda *unused, **more: None, _random_state
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: watch.visible_devices
    cuda.current_device = lambda: CUDA  # an index would be taken for another accelerator's
    cuda.set_device = nothing
    cuda.synchronize = lambda *unused: watch.note("synchronize")
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _Stream
    cuda.get_device_capability = lambda *unused: watch.capability
    cuda.get_device_properties = lambda *unused: SimpleNamespace(
        major=watch.capability[0], minor=watch.capability[1], multi_processor_count=100
    )
    cuda.memory_allocated = lambda *unused: watch.allocated()
    cuda.cudart = lambda: watch
    cuda.manual_seed = cuda.set_rng_state = cuda.empty_cache = cuda._lazy_init = nothing
    cuda.random.set_rng_state = nothing
    cuda.get_rng_state = cuda.random.get_rng_state = state
    names = ("clone_state", "graphsafe_get_state", "get_state", "graphsafe_set_state", "set_state")
    cuda.default_generators = defaultdict(lambda: SimpleNamespace(**dict.fromkeys(names, state)))
    _Stream.watch = watch


def _play_tensors(watch: Watch) -> None:
    tolist, load, tensor = torch.Tensor.tolist, torch.load, torch.tensor

    def from_numbers(data: Any, **options: Any) -> Any:
        return tensor(tree_map_only(FakeTensor, torch.Tensor.item, data), **options)

    def load_for_real(*args: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return load(*args, **named)

    def to_list(self: Any) -> Any:
        return tolist(self.cpu() if isinstance(self, FakeTensor) else self)

    torch.tensor, torch.load = from_numbers, load_for_real
    torch.Tensor.tolist = FakeTensor.tolist = to_list
    torch.Tensor.cuda = lambda self, *unused, **more: self.to(CUDA)
    torch.Tensor.pin_memory = lambda self, *unused: watch.lock(self.clone())
    torch.Tensor.is_pinned = lambda self, *unused: watch.is_locked(self)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.to = lambda self, device: self  # real parameters cannot become fake ones
    ThreadPoolExecutor.submit = _at_once
    _play_storages()


def _play_storages() -> None:
    """A fake tensor's storage is on torch's meta device, and says so."""
    storage = torch.UntypedStorage
    device, data_ptr = storage.device.__get__, storage.data_ptr  # type: ignore[attr-defined]

    def is_fake(self: torch.UntypedStorage) -> bool:
        return device(self).type == "meta"

    storage.device = property(lambda self: CUDA if is_fake(self) else device(self))
    storage.data_ptr = lambda self: self._cdata if is_fake(self) else data_ptr(self)


class _FakeNccl:
    """torch's fake process group, for who asks for NCCL or gloo; objects are this rank's own."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._start, self._add = dist.init_process_group, dist.new_group
        for module in (dist, c10d):
            for name in vars(_FakeNccl):
                if not name.startswith("_"):
                    setattr(module, name, getattr(self, name))
        dist.rendezvous = lambda *unused, **more: iter([(dist.HashStore(), 0, 1)])

    def init_process_group(
        self, backend: str, *, rank: int, world_size: int, device_id: Any = None, **more: Any
    ) -> None:
        self._watch.settings |= {"backend": backend, "device_id": str(device_id)}
        self._start("fake", store=FakeStore(), rank=rank, world_size=world_size)
        world = ("world", [*range(world_size)], backend)
        self._watch.groups = {dist.group.WORLD.group_name: world}
        self._watch.collectives.clear()

    def new_group(self, ranks: Any = None, *unused: Any, backend: str = "nccl", **more: Any) -> Any:
        members = sorted(ranks or range(dist.get_world_size()))
        self._watch.collectives["world"].append(["new_group", str(members), str(backend)])
        group = self._add(ranks, backend="fake")
        if dist.get_rank() in members:
            label = f"group {len(self._watch.collectives['world'])} of {members}"
            self._watch.groups[group.group_name] = (label, members, backend or "nccl")
        return group

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self._meet("all_gather_object", group)
        object_list[:] = [obj] * len(object_list)

    def broadcast_object_list(
        self, object_list: list[Any], src: Any = None, group: Any = None, **more: Any
    ) -> None:
        self._meet("broadcast_object_list", group)

    def gather_object(
        self, obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None
    ) -> None:
        self._meet("gather_object", group)
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Any = None,
        src: Any = None,
        group: Any = None,
    ) -> None:
        self._meet("scatter_object_list", group)
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank()]

    def _meet(self, name: str, group: Any) -> None:
        label, _, _ = self._watch.groups[(group or dist.group.WORLD).group_name]
        self._watch.collectives[label].append([name])
        self._watch.note(name)


@contextlib.contextmanager
def fake_gpu() -> Iterator[Watch]:
    """What it plays stays played in this process: it has to be one of its own."""
    # Before anything is played: it looks at all functions of torch.
    watch, mode = Watch(), _NoDevice(allow_non_fake_inputs=True)
    _play_cuda(watch)
    _play_tensors(watch)
    _FakeNccl(watch)
    with mode, watch, torch.autograd.set_multithreading_enabled(False):
        yield watch
