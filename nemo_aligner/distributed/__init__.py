"""Process groups, parallel layouts, and the preparation of a process for megatron-core.

``launch.py``        joins the process group of torchrun, Slurm or a single process, reports only
                     the first failure of several ranks, and starts ranks on this machine
``one_rank.py``      a backend for process groups of one rank, which need no communicator
``layout.py``        sizes of the tensor, context, pipeline, data and expert parallel groups
``collectives.py``   collectives on Python objects and flags, the device, and pipeline messages
``gpu_matmuls.py``  batch-invariant linear layers and weight gradients on a GPU

Importing this package prepares the process: it sets CUDA's environment variables, hides known
warnings of libraries, and installs ``cpu/backend.py``, which runs megatron-core without CUDA. This
must happen before megatron-core is imported. So every subpackage whose modules import megatron-core
imports this one first, and a program may import them in any order. The client, the contract, the
settings and the data do not need megatron-core and do not import this package.
"""

from __future__ import annotations

import logging
import os
import warnings
from functools import partial

from nemo_aligner.cpu import backend

# Environment variables that CUDA and torch's allocator read once, at the first GPU call.

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _set_before_cuda_starts() -> None:
    """Set environment variables that the user has not set, before torch's first GPU call.

    ``CUDA_DEVICE_MAX_CONNECTIONS=1`` makes kernels start in the order of their launches, on which
    sequence parallelism relies. With ``expandable_segments``, packs of different sizes do not
    fragment the GPU's memory.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


# Library warnings that users cannot act on. Only the ones listed here are hidden.

# Warnings to hide, as (beginning of the message as a regular expression, category).
_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # megatron-core warns without TransformerEngine and Apex, which are optional here.
    (r"Transformer Engine and Apex are not installed", UserWarning),
    (r"Apex is not installed", UserWarning),
    (r"transformer_engine not found", UserWarning),
    (r"If you are using transformer_engine as the transformer implementation", UserWarning),
    # megatron-core calls functions that newer versions of torch or of megatron-core deprecate.
    (r"full scope is deprecated", UserWarning),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
    (r"`load_state_dict` is deprecated and will be removed", FutureWarning),
    (r"Warning: tp_group is None", DeprecationWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
    (r"TypedStorage is deprecated", UserWarning),
    (r"MimoModelConfig is experimental", UserWarning),
    # torch's checkpoint reader warns with the backend gloo or on a CPU.
    (r"torch\.distributed is (disabled|unavailable)", UserWarning),
)

# (logger, beginning of the message) of log lines to hide: deprecation notes of megatron-core 0.17
# and later, and a note of torch when megatron-core is imported on a machine without a GPU.
_LOGGED = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    (
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel: full_param_layout not provided",
    ),
)


def _silence_known_warnings() -> None:
    """Hide the log lines in ``_LOGGED`` and the warnings in ``_WARNINGS``."""
    for logger, beginning in _LOGGED:
        logging.getLogger(logger).addFilter(partial(_is_other, beginning))
    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


def _is_other(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)


_set_before_cuda_starts()
_silence_known_warnings()
backend.install()
