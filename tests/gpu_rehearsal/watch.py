"""What is done with each operation on a fake GPU, and what of it is written down."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
_OURS, _OTHERS = "/nemo_aligner/", ("/megatron/", "/transformer_engine/")
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default)
_SAME_NUMBERS = (
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten._to_copy.default,
)
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
# Where query, key, value and the bounds of their sequences stand among the arguments.
_FLASH = {
    "torch_attn._varlen_attn.default": range(7),
    "torch_attn._varlen_attn_backward.default": [1, 2, 3, 6, 7, 8, 9],
    "aten._flash_attention_forward.default": range(7),
    "aten._flash_attention_backward.default": [1, 2, 3, 6, 7, 8, 9],
}


@dataclass
class Seen:
    """Of the last call of a phase: what the host waited for, operations, copies."""

    waits: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    bytes_to_gpu: int = 0


class Watch(TorchDispatchMode):
    """Keeps tensors on the CPU real, those on the GPU fake, and notes what waits for the GPU.

    What is copied to the GPU is remembered: as far as it comes back unchanged it has its numbers,
    all else comes back as ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.capability = (9, 0)
        self.visible_devices = 8
        self.settings: dict[str, Any] = {}
        self.collectives: dict[str, list[Any]] = defaultdict(list)
        self.phases: dict[str, Seen] = {}
        self.groups: dict[str, tuple[str, list[int], str]] = {}
        self.unfinished = 0  # operations that no wait came after
        self._seen: Seen | None = None
        self._storages: dict[int, StorageWeakRef] = {}
        self._locked: dict[int, tuple[int, Any]] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        outer, self._seen = self._seen, Seen()
        self.phases[phase] = self._seen
        try:
            yield
        finally:
            self._seen = outer

    def note(self, what: str) -> None:
        """The host waits for the GPU, here."""
        self.unfinished = 0
        if self._seen is not None:
            self._seen.waits[f"{what} at {_place()}"] += 1

    # Page-locked memory, and the part of the CUDA runtime that locks it.

    def lock(self, tensor: Tensor) -> Tensor:
        self._locked[tensor.data_ptr()] = (tensor.nbytes, tensor)  # kept: nothing else lies there
        return tensor

    def is_locked(self, tensor: Tensor) -> bool:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(at <= start and end <= at + size for at, (size, _) in self._locked.items())

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self._locked[pointer] = (size, None)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self._locked[pointer]
        return 0

    def allocated(self) -> int:
        """Bytes of all tensors that are on the GPU now."""
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(key).nbytes() for key in self._storages)

    def _count_memory(self, out: Any) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                reference = StorageWeakRef(tensor.untyped_storage())
                self._storages.setdefault(reference.cdata, reference)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # by far the most frequent
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        has_fakes = any(isinstance(x, FakeTensor) for x in tensors)
        device = torch.device(kwargs.get("device") or "meta").type
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, tensors)
        if device == "cpu" or (not has_fakes and device != "cuda"):
            return self._on_host(func, args, kwargs, has_fakes)
        if device == "cuda":
            kwargs["device"] = CUDA
        _check(func, args, tensors)
        if self._seen is not None:
            self._seen.operations[str(func)] += 1
        self.unfinished += 1
        out = self._on_gpu(func, args, kwargs)
        self._count_memory(out)
        return out

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], has_fakes: bool) -> Any:
        is_locked = kwargs.pop("pin_memory", False)
        if has_fakes and func is aten._to_copy.default:
            if not kwargs.get("non_blocking"):
                self.note("copy to host")
            numbers = _as_dtype(_numbers(args[0]), kwargs.get("dtype") or args[0].dtype)
            return self.lock(numbers) if kwargs.get("non_blocking") else numbers
        with unset_fake_temporarily():
            args, kwargs = tree_map(_as_real, (args, kwargs)) if has_fakes else (args, kwargs)
            out = func(*args, **kwargs)
        return self.lock(out) if is_locked else out

    def _on_gpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten._local_scalar_dense.default:
            self.note("item")
            with unset_fake_temporarily():
                return _numbers(args[0]).item()
        if func is aten._foreach_copy_.default:
            for pair in zip(*args[:2], strict=True):
                self._on_gpu(aten.copy_.default, (*pair, *args[2:]), kwargs)
            return args[0]
        if func is aten.copy_.default and len({isinstance(x, FakeTensor) for x in args[:2]}) > 1:
            return self._copy_across(*args, **kwargs)
        if func in _INDEXING and not _fills(*args) and any(map(_waits_for, args[1])):
            self.note("index")
        out = func(*args, **kwargs)
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            self._note_upload(args[0], kwargs.get("non_blocking", False))
            out._numbers = _as_dtype(args[0], out.dtype)
        elif func in _SAME_NUMBERS and hasattr(args[0], "_numbers"):
            out._numbers = _as_dtype(args[0]._numbers, out.dtype)
        return out

    def _copy_across(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(to, FakeTensor):
            self._note_upload(source, non_blocking)
            if to.shape == source.shape:
                to._numbers = _as_dtype(source, to.dtype)
            return to
        if not non_blocking or not self.is_locked(to):
            self.note("copy to host")
        with unset_fake_temporarily():
            return to.copy_(_numbers(source))

    def _note_upload(self, source: Tensor, non_blocking: bool) -> None:
        if self._seen is not None:
            self._seen.bytes_to_gpu += source.nbytes
        if not non_blocking or not self.is_locked(source):
            self.note("copy to GPU" if not non_blocking else "copy from pageable memory")

    def _collective(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        names = [each.name for each in func._schema.arguments]
        group = dist.ProcessGroup.unbox(args[names.index("process_group")])
        label, ranks, backend = self.groups[group.group_name]
        for tensor in tensors:
            # Barriers have a tensor of one number, which NCCL's moves itself.
            if tensor.numel() > 1 and tensor.is_cpu == (backend == "nccl"):
                raise TypeError(f"{func}: a tensor on {tensor.device} for {backend}")
        operation = func._schema.name.removeprefix("c10d::")
        sent = {"gather_": args[1:2], "scatter_": args[:1]}.get(operation, (args, kwargs))
        sizes = [str((*x.shape, x.dtype)) for x in tree_leaves(sent) if isinstance(x, Tensor)]
        peer = [ranks[args[names.index(end)]] for end in ("dst", "srcRank", "src") if end in names]
        if operation in ("send", "recv_"):
            ends = [dist.get_rank(), *peer] if operation == "send" else [*peer, dist.get_rank()]
            self.collectives[f"{label}, {ends[0]} to {ends[1]}"].append(sizes)
        else:
            self.collectives[label].append([operation, *sizes])
        with unset_fake_temporarily():
            real = tree_map(_as_real, (args, kwargs))
            out = func(*real[0], **real[1])
        return (args[0], *out[1:]) if isinstance(out, tuple) else out


def _as_real(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, FakeTensor) else x


def _numbers(fake: FakeTensor) -> Tensor:
    """A copy of what came from the host, or ones."""
    known = getattr(fake, "_numbers", None)
    with unset_fake_temporarily():
        return torch.ones(fake.shape, dtype=fake.dtype) if known is None else known.clone()


def _as_dtype(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    with unset_fake_temporarily():
        return numbers.detach().clone().to(dtype)


def _fills(tensor: Tensor, indices: Any, value: Any = None, *unused: Any) -> bool:
    """torch has a fill where a number of the host's is put where a mask is set."""
    is_mask = all(index is not None and index.dtype is torch.bool for index in indices)
    return is_mask and isinstance(value, Tensor) and value.is_cpu and value.numel() == 1


def _waits_for(index: Tensor | None) -> bool:
    """A mask has to be counted, an index on the host to be copied."""
    is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
    return is_mask or (index is not None and not isinstance(index, FakeTensor))


def _check(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """What kernels refuse, and torch's fake ones do not."""
    if func in _PRODUCTS and len({tensor.dtype for tensor in tensors}) > 1:
        raise TypeError(f"{func}: got {[str(tensor.dtype) for tensor in tensors]}, wanted one")
    if str(func) in _FLASH:
        wrong = wrong_for_flash(*(args[index] for index in _FLASH[str(func)]))
        if wrong:
            raise TypeError(f"{func}: {wrong}")


def wrong_for_flash(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: Any, max_k: Any
) -> str:
    """What torch's mha_varlen_fwd (flash_api.cpp) would refuse, or read past the alignment of."""
    heads = (q, k, v)
    checks = {
        "wanted Ampere or newer": torch.cuda.get_device_capability() >= (8, 0),
        "wanted one 16 bit dtype": {x.dtype for x in heads} in ({torch.bfloat16}, {torch.float16}),
        "wanted all on the GPU": all(x.device == CUDA for x in (*heads, bounds_q, bounds_k)),
        "wanted channels side by side": all(x.stride(-1) == 1 for x in heads),
        "wanted heads of 8 n channels, at most 256": q.size(-1) % 8 == 0 and q.size(-1) <= 256,
        "wanted rows at multiples of 16 bytes": all(
            n * x.element_size() % 16 == 0
            for x in heads
            for n in (x.stride(0), x.stride(1), x.storage_offset())
        ),
        "wanted keys and values of one shape": k.shape == v.shape,
        "wanted heads in whole groups": q.size(1) % k.size(1) == 0,
        "wanted int32 bounds without gaps": all(
            x.dtype is torch.int32 and x.is_contiguous() for x in (bounds_q, bounds_k)
        ),
        "wanted as many bounds of keys": bounds_q.shape == bounds_k.shape,
        "wanted lengths as numbers": isinstance(max_q, int) and isinstance(max_k, int),
    }
    return "; ".join(want for want, is_so in checks.items() if not is_so)


def _place() -> str:
    """The innermost function of the package, its line, and the line of a library below it."""
    frame, below = sys._getframe(2), ""
    while frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if _OURS in path:
            return f"{path.split(_OURS)[-1]} {frame.f_code.co_name}, line {line}{below}"
        for folder in _OTHERS:
            if folder in path and not below:
                below = f" <- {path.split(folder)[-1]}:{line}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"nowhere{below}"
