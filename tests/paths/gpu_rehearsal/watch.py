"""Handles every operation on a fake GPU, and records those of interest."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
_PRODUCTS = (
    aten.mm.default,
    aten.mm.out,
    aten.bmm.default,
    aten.addmm.default,
    aten.addmm.out,
)
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
# Positions of query, key, value and the bounds of their sequences among the arguments.
_FLASH = {
    "torch_attn._varlen_attn.default": range(7),
    "torch_attn._varlen_attn_backward.default": [1, 2, 3, 6, 7, 8, 9],
    "aten._flash_attention_forward.default": range(7),
    "aten._flash_attention_backward.default": [1, 2, 3, 6, 7, 8, 9],
}


@dataclass
class Seen:
    """Records of the last call of a phase: waits of the host, operations, copies."""

    waits: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    bytes_to_gpu: int = 0


class Watch(TorchDispatchMode):
    """Keeps CPU tensors real and GPU tensors fake, and records waits for the GPU.

    Every value that is read from the GPU is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.major, self.minor, self.visible_devices = 9, 0, 8
        self.settings: dict[str, Any] = {}
        self.collectives: dict[str, list[Any]] = defaultdict(list)
        self.phases: dict[str, Seen] = {}
        self.unfinished = 0  # operations since the last wait
        self.allocations = 0  # storages on the GPU until now
        self._seen = Seen()  # outside any phase
        self._storages = WeakIdKeyDictionary()
        self._locked: dict[int, Any] = {}  # by the start address of page-locked memory

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        outer, self._seen = self._seen, Seen()
        self.phases[phase] = self._seen
        yield
        self._seen = outer

    def note(self, what: str) -> None:
        """Record that the host waits for the GPU here."""
        self.unfinished = 0
        self._seen.waits[f"{what} at {_place()}"] += 1

    def launched(self, kernel: str) -> None:
        """Record the launch of a Triton kernel."""
        self.unfinished += 1
        self._seen.operations[f"triton {kernel}"] += 1

    def meet(self, operation: str, group: Any, *sizes: str) -> int:
        """Record a collective of ``group``."""
        calls = self.collectives[(group or dist.group.WORLD).group_desc]
        calls.append([operation, *sizes])
        return len(calls)

    def allocated(self) -> int:
        """Bytes of all tensors that are on the GPU now."""
        return sum(storage.nbytes() for storage in self._storages)

    def lock(self, tensor: Tensor) -> Tensor:
        self._locked[tensor.data_ptr()] = (
            tensor  # a strong reference, so that no other storage gets its address
        )
        return tensor

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self._locked[address]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # by far the most frequent case
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        if func.namespace == "c10d":
            return self._collective(func, args)
        kwargs = dict(kwargs or {})
        has_fakes = any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs)))
        device = torch.device(kwargs.get("device") or "meta").type
        if device == "cpu" or (not has_fakes and device != "cuda"):
            return self._on_host(func, args, kwargs, has_fakes)
        if device == "cuda":
            kwargs["device"] = CUDA
        _check(func, args)
        self._seen.operations[str(func)] += 1
        self.unfinished += 1
        out = self._on_gpu(func, args, kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                self._remember(tensor.untyped_storage())
        return out

    def _remember(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._storages:
            self._storages[storage] = None
            self.allocations += 1

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], has_fakes: bool) -> Any:
        is_locked = kwargs.pop("pin_memory", False)
        if has_fakes and func is aten._to_copy.default:
            is_locked = kwargs.get("non_blocking", False)
            if not is_locked:
                self.note("copy to host")
        out = _for_real(func, *args, **kwargs)
        return self.lock(out) if is_locked else out

    def _on_gpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten._local_scalar_dense.default:
            self.note("item")
            return _for_real(func, *args)
        if func is aten._foreach_copy_.default:
            for pair in zip(*args[:2], strict=True):
                self._on_gpu(aten.copy_.default, (*pair, *args[2:]), kwargs)
            return None
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self._note_copy("to host", args[0], *args[2:], **kwargs)
            return _for_real(func, *args, **kwargs)
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            self._note_copy("to GPU", args[0], kwargs.get("non_blocking", False))
        elif func is aten.copy_.default and not isinstance(args[1], FakeTensor):
            self._note_copy("to GPU", *args[1:], **kwargs)
        elif func in _INDEXING and _waits_for(*args):
            self.note("index")
        elif func is aten.segment_reduce.default and not kwargs.get("unsafe", False):
            self.note("check of segments")  # its kernel reads their lengths on the host
        return func(*args, **kwargs)

    def _note_copy(self, way: str, host: Tensor, non_blocking: bool = False) -> None:
        """Copy from page-locked memory without a wait of the host; from other memory it waits."""
        if way == "to GPU":
            self._seen.bytes_to_gpu += host.nbytes
        if not non_blocking or host.untyped_storage().data_ptr() not in self._locked:
            self.note(f"copy {way}")

    def _collective(self, func: Any, args: Any) -> Any:
        index = next(
            n for n, argument in enumerate(args) if isinstance(argument, torch.ScriptObject)
        )
        group = dist.ProcessGroup.unbox(args[index])
        operation = func._schema.name.removeprefix("c10d::")
        # Only one rank has a tensor for what is gathered.
        sent = args[1:] if operation == "gather_" else args
        tensors = [x for x in tree_leaves(sent) if isinstance(x, Tensor)]
        # A barrier has a tensor with one element, which NCCL moves itself.
        if any(x.numel() > 1 and x.is_cpu == ("nccl" in group.group_desc) for x in tensors):
            devices = [str(x.device) for x in tensors]
            raise TypeError(f"{func}: tensors on {devices} for {group.group_desc}")
        sizes = [str((*x.shape, x.dtype)) for x in tensors]
        if operation in ("send", "recv_"):
            ends = [group.rank(), args[index + 1]]
            sender, receiver = ends if operation == "send" else ends[::-1]
            self.collectives[f"{group.group_desc}: {sender} to {receiver}"].append(sizes)
        else:
            self.meet(operation, group, *sizes)
        out = _for_real(func, *args)
        return (args[0], *out[1:]) if isinstance(out, tuple) else out


def _for_real(func: Any, *args: Any, **kwargs: Any) -> Any:
    with unset_fake_temporarily():
        args, kwargs = tree_map_only(FakeTensor, _as_real, (args, kwargs))
        return func(*args, **kwargs)


def _as_real(fake: FakeTensor) -> Tensor:
    return torch.ones(fake.shape, dtype=fake.dtype)


def _waits_for(tensor: Tensor, indices: Any, value: Any = None, *unused: Any) -> bool:
    """A mask must be counted, and an index on the host must be copied."""
    present = [index for index in indices if index is not None]
    are_masks = [index.dtype in (torch.bool, torch.uint8) for index in present]
    if all(are_masks) and isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
        return False  # for a host number assigned by a mask torch uses a fill
    return any(are_masks) or not all(isinstance(index, FakeTensor) for index in present)


def _check(func: Any, args: Any) -> None:
    """Reject what real kernels reject and torch's fake ones accept."""
    dtypes = {x.dtype for x in args if isinstance(x, Tensor)}
    if func in _PRODUCTS and len(dtypes) > 1:
        raise TypeError(f"{func}: got {dtypes}, wanted one dtype")
    if str(func) in _FLASH:
        wrong = _wrong_for_flash(*(args[index] for index in _FLASH[str(func)]))
        if wrong:
            raise TypeError(f"{func}: {wrong}")


def _wrong_for_flash(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: Any, max_k: Any
) -> str:
    """Reject what torch's mha_varlen_fwd (flash_api.cpp) rejects or reads misaligned."""
    heads, bounds = (q, k, v), (bounds_q, bounds_k)
    steps = [n for x in heads for n in (x.stride(0), x.stride(1), x.storage_offset())]
    checks = {
        "Ampere or newer": torch.cuda.get_device_capability() >= (8, 0),
        "one 16 bit dtype": {x.dtype for x in heads} in ({torch.bfloat16}, {torch.float16}),
        "all on the GPU": all(x.device == CUDA for x in (*heads, *bounds)),
        "channels side by side": all(x.stride(-1) == 1 for x in heads),
        "heads of 8 n channels, at most 256": q.size(-1) % 8 == 0 and q.size(-1) <= 256,
        "rows at multiples of 16 bytes": all(n * q.element_size() % 16 == 0 for n in steps),
        "keys and values of one shape": k.shape == v.shape,
        "heads in whole groups": q.size(1) % k.size(1) == 0,
        "int32 bounds": all(x.dtype is torch.int32 for x in bounds),
        "bounds without gaps": all(x.is_contiguous() for x in bounds),
        "as many bounds of keys": bounds_q.shape == bounds_k.shape,
        "lengths as numbers": isinstance(max_q, int) and isinstance(max_k, int),
        "no split of the keys, as for one query": max_q > 1,
    }
    return ", ".join(f"wanted {what}" for what, is_so in checks.items() if not is_so)


def _place() -> str:
    """The innermost function of the package with its line, and the line in megatron-core below."""
    below = ""
    for frame, line in traceback.walk_stack(None):
        _, is_ours, path = frame.f_code.co_filename.rpartition("/nemo_aligner/")
        if is_ours:
            return f"{path} {frame.f_code.co_name}, line {line}{below}"
        if "/megatron/" in path and not below:
            below = f" <- {path.rpartition('/megatron/')[-1]}:{line}"
    return f"nowhere{below}"
