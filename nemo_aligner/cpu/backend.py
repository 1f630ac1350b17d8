"""Run megatron-core without CUDA: a CPU takes the place of the CUDA device, gloo that of NCCL."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

# Import of megatron-core for a CPU instead of a GPU.
#
# megatron-core names its device in string literals and calls a few ``torch.cuda`` functions.
# ``install`` adds an import hook for ``megatron.core``. Without a GPU the hook replaces these
# literals and functions when a module is loaded. This needs no copy of megatron-core's code, and
# leaves its files and line numbers unchanged.

_PACKAGE = "megatron.core"
_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def install() -> None:
    """Install the import hook, which does nothing if there is a GPU when megatron-core is imported.

    Raises:
        RuntimeError: megatron.core was imported before, on a machine without a GPU.
    """
    if _Finder in sys.meta_path:
        return
    if _PACKAGE in sys.modules:
        import torch

        if torch.cuda.is_available():
            return
        raise RuntimeError(
            "megatron.core was imported before nemo_aligner.distributed. "
            "Without a GPU, import nemo_aligner.distributed first."
        )
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


class _Finder:
    """Import hook that loads megatron.core's modules with ``_Loader`` if there is no GPU.

    ``_Loader`` replaces the names of CUDA devices, and patches some functions after the import.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            return None
        import torch

        if torch.cuda.is_available():
            return None
        if name == _PACKAGE:
            _stub_torch_cuda()
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return code if code is None else _retarget(code)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        adjust = _AFTER_IMPORT.get(module.__name__)
        if adjust is not None:
            adjust(module)


def _retarget(constant: Any) -> Any:
    """Replace the names of CUDA devices among a code object's constants, recursively."""
    if isinstance(constant, str):
        return _LITERALS.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_retarget(item) for item in constant)
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(_retarget(item) for item in constant.co_consts))
    return constant


def _stub_torch_cuda() -> None:
    import torch

    def of_cpu(name: str) -> Any:
        # Wrapped in a new function, because torch.compile rejects a torch.cuda.synchronize that is
        # torch.cpu's function.
        function = getattr(torch.cpu, name)
        return lambda *args, **kwargs: function(*args, **kwargs)

    for name in ("current_device", "synchronize", "current_stream"):
        setattr(torch.cuda, name, of_cpu(name))
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _use_cpu_generator(random: Any) -> None:
    import torch

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # megatron-core's RNG tracker warns if a ``fork`` block changes the state of the CPU generator.
    # Without a GPU that generator is the tracked one, so the change is intended.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _disable_jit(jit: Any) -> None:
    jit.disable_jit_fuser()  # torch.compile would need a C++ compiler, and seconds at each start


def _adjust_linear_layers(layers: Any) -> None:
    # Imported late, because it imports torch. By now megatron-core has imported torch anyway.
    from nemo_aligner.cpu.matmuls import (
        accumulate_weight_gradients,
        add_weight_gradient,
        multiply_by_onednn,
    )

    accumulate_weight_gradients(layers, add_weight_gradient)
    multiply_by_onednn(layers)


# In-place collectives on megatron-core's buffers, over gloo.


class _Works(list):
    """Handles of several asynchronous collectives, on which megatron-core calls ``wait`` once."""

    def wait(self) -> None:
        for work in self:
            work.wait()


class _InPlaceCollectives:
    """All-gather and reduce-scatter that work in place on megatron-core's buffers, over gloo.

    gloo's own versions copy the buffers. These replace them by broadcasts and by an all-reduce,
    which work on the buffer itself. The all-reduce gives every rank the sums of all shards rather
    than only its own, which is harmless. With one rank there is nothing to do.
    """

    def __init__(self) -> None:
        self._works = _Works()

    @contextmanager
    def together(self, group: Any, async_ops: bool = False) -> Iterator[_Works]:
        """Collect the handles of all collectives that are started within the context.

        At its end, wait for them, unless ``async_ops`` is True: then the caller waits.
        """
        self._works = works = _Works()
        yield works
        if not async_ops:
            works.wait()

    def all_gather(self, output: Any, source: Any, *, group: Any, async_op: bool) -> None:
        """Gather all ranks' shards into ``output``, a buffer of which ``source`` is a part.

        ``source`` is this rank's shard, so it is in its place already. Each rank broadcasts its
        shard.
        """
        import torch.distributed as dist

        if group.size() == 1:
            return
        for rank, shard in enumerate(output.chunk(group.size())):
            self._works.append(dist.broadcast(shard, group=group, group_src=rank, async_op=True))

    def reduce_scatter(
        self, output: Any, source: Any, *, op: Any, group: Any, async_op: bool
    ) -> None:
        """Sum the buffer ``source`` over all ranks, in place.

        ``output`` is the part of ``source`` that is this rank's shard, so it needs no copy.
        """
        import torch.distributed as dist

        if group.size() > 1:
            self._works.append(dist.all_reduce(source, op=op, group=group, async_op=True))


def work_in_place(buffers: Any) -> None:
    """Make megatron-core's gradient buffers use the in-place collectives.

    Args:
        buffers: megatron-core's module ``distributed.param_and_grad_buffer``.
    """
    collectives = _InPlaceCollectives()
    buffers._coalescing_manager = collectives.together
    buffers.dist_all_gather_func = collectives.all_gather
    buffers.dist_reduce_scatter_func = collectives.reduce_scatter


_AFTER_IMPORT = {
    "megatron.core.distributed.param_and_grad_buffer": work_in_place,
    "megatron.core.jit": _disable_jit,
    "megatron.core.tensor_parallel.layers": _adjust_linear_layers,
    "megatron.core.tensor_parallel.random": _use_cpu_generator,
}
