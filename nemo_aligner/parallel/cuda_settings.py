"""What CUDA and torch's allocator read from the environment, once, when they start."""

from __future__ import annotations

import os

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_before_cuda_starts() -> None:
    """Set what nobody has set; later than torch's first question for a GPU it may have no effect.

    Sequence parallelism relies on kernels starting in the order in which they were launched; and
    packs have ever other sizes, which would leave gaps in segments that cannot grow.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
