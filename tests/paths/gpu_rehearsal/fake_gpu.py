"""A GPU without data: tensors on "cuda" are torch's fake tensors, and NCCL sends nothing.

It imitates CUDA for a CPU build of torch, in a process that ``conftest.py`` starts. Shapes, dtypes
and devices are checked as on a GPU; values, races and kernels are not. ``watch.py`` records the
operations.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.nn.attention import bias
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from nemo_aligner.distributed.one_rank import ONE_RANK, OneRankGroup
from tests.paths.gpu_rehearsal.watch import CUDA, Watch

_CUDA, _META = 1, 14  # c10::DeviceType
_PRIVATE_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


class _NoDevice(FakeTensorMode):
    avoid_device_init = True  # whatever torch.cuda.is_available says


class _Stream:
    """A stream or an event. Waiting for it returns at once; waits of the host are recorded."""

    device, stream_id, device_index, device_type, cuda_stream = CUDA, 0, 0, _CUDA, 0
    synchronize: Any

    def __init__(self, *unused: Any, **more: Any) -> None: ...

    def itself(self, *unused: Any, **more: Any) -> _Stream:
        return self

    wait_stream = wait_event = wait = record = record_event = query = itself
    __enter__ = __exit__ = itself


def _play_cuda(watch: Watch) -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _PRIVATE_GUARDS)
    guards[_CUDA] = guards[_META]  # this generator does nothing
    FakeTensor._normalize_fake_device = staticmethod(
        lambda device: CUDA if device.type == "cuda" else device
    )
    torch._C._cuda_getDevice = lambda: (
        CUDA
    )  # with an index it would count as another accelerator's device
    cuda = torch.cuda
    cuda.is_available, cuda._initialized = lambda: True, True
    cuda.device_count = lambda: watch.visible_devices
    cuda.set_device = cuda.empty_cache = lambda *unused: None
    cuda.synchronize = _Stream.synchronize = lambda *unused: watch.note("synchronize")
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = contextlib.nullcontext
    cuda.get_device_properties = lambda *unused: watch
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *unused: watch.allocated()
    cuda.memory_reserved = cuda.memory_allocated
    cuda.get_device_name = lambda *unused: "NVIDIA H200"
    cuda.mem_get_info = lambda *unused: (0, watch.allocated())
    cuda.power_draw = lambda *unused: 500_000
    cuda.default_generators = defaultdict(torch.Generator)
    cuda.cudart = lambda: watch
    # A CPU build lacks this kernel. On a GPU it runs wherever a matmul calls torch for it.
    bias.can_use_efficient_attention = lambda params: True
    bias.causal_lower_right = _without_modes(bias.causal_lower_right)  # of a class of its own


def _play_tensors(watch: Watch) -> None:
    tolist, storage = torch.Tensor.tolist, torch.UntypedStorage
    device, data_ptr = storage.device.__get__, storage.data_ptr  # type: ignore[attr-defined]

    def at_once(executor: Any, function: Any, *args: Any, **named: Any) -> Future:
        """Run threads' functions in the current thread: torch's modes do not reach new threads."""
        done: Future = Future()
        done.set_result(function(*args, **named))
        return done

    ThreadPoolExecutor.submit = at_once
    torch.load = _without_modes(torch.load)
    torch.Tensor.tolist = FakeTensor.tolist = lambda self: tolist(self.cpu())
    torch.Tensor.cuda = lambda self, *unused, **more: self.to(CUDA)
    torch.Tensor.pin_memory = lambda self, *unused: watch.lock(self.clone())
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.to = lambda self, device: self  # real parameters cannot become fake tensors
    # The storage of a fake tensor reports torch's meta device; report the GPU.
    storage.device = property(lambda self: CUDA if device(self).type == "meta" else device(self))
    storage.data_ptr = lambda self: self._cdata if self.device == CUDA else data_ptr(self)


def _play_nccl(watch: Watch) -> None:
    """Use torch's fake process group for NCCL and gloo; a group of one rank is a real one.

    A fake group assumes that other ranks have the same tensors as this one. It cannot receive.
    """
    start, add = dist.init_process_group, dist.new_group

    def init_process_group(
        backend: str, *, rank: int, world_size: int, device_id: Any = None, **unused: Any
    ) -> None:
        watch.settings |= {"backend": backend, "device_id": str(device_id)}
        watch.collectives.clear()
        if backend == ONE_RANK:
            start(ONE_RANK, store=dist.HashStore(), rank=rank, world_size=world_size)
            return
        start("fake", store=FakeStore(), rank=rank, world_size=world_size)
        dist.group.WORLD._set_group_desc(f"world, {backend}")

    def new_group(ranks: Any = None, *unused: Any, backend: str | None = None, **more: Any) -> Any:
        if backend is None and isinstance(dist.group.WORLD, OneRankGroup):
            return add(ranks)
        members = f"{ranks}, {backend or 'nccl'}"
        number = watch.meet("new_group", None, members)
        return add(ranks, backend="fake", group_desc=f"group {number} of {members}")

    def of_objects(function: Any) -> Any:
        @wraps(function)
        def noted(*args: Any, group: Any = None, **named: Any) -> None:
            watch.meet(function.__name__, group)
            watch.note(function.__name__)
            _without_modes(function)(*args, group=group, **named)

        return noted

    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    objects = [of_objects(getattr(dist, name)) for name in names]
    for function in (init_process_group, new_group, *objects):
        for module in (dist, c10d):
            setattr(module, function.__name__, function)
    dist.rendezvous = lambda *unused, **more: iter([(dist.HashStore(), 0, 1)])


def _without_modes(function: Any) -> Any:
    @wraps(function)
    def for_real(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **named)

    return for_real


@contextlib.contextmanager
def fake_gpu() -> Iterator[Watch]:
    """Imitate a GPU until the process ends; it must be used in a process of its own."""
    # First of all, because it inspects all functions of torch.
    watch, mode = Watch(), _NoDevice(allow_non_fake_inputs=True)
    _play_cuda(watch)
    _play_tensors(watch)
    _play_nccl(watch)
    with mode, watch, torch.autograd.set_multithreading_enabled(False):
        yield watch
