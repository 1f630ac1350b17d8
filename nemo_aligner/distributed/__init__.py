"""Process groups, parallel layouts, and preparing a process for megatron-core.

``launch.py``        joins the process group that torchrun, Slurm or plain Python describes, reports
                     the first failure of several ranks, and launches ranks on this machine
``one_rank.py``      the backend of groups with one rank, which needs no communicator
``layout.py``        sizes of the tensor, context, pipeline, data and expert parallel groups
``collectives.py``   collectives on Python objects and flags, the device, and pipeline messages
``gpu_products.py``  batch-invariant linear layers and weight gradients on a GPU

Importing this package prepares the process: it sets CUDA's environment variables, hides known
warnings of libraries, and installs ``cpu/backend.py``, which runs megatron-core without CUDA. Every
package whose modules import megatron-core imports this one first, so that the order of imports in a
program does not matter. The client, the contract, settings and data do not import it.
"""

from __future__ import annotations

import logging
import os
import warnings
from functools import partial

from nemo_aligner.cpu import backend

# Environment variables that CUDA and torch's allocator read only once, when they start.

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _set_before_cuda_starts() -> None:
    """Set these variables unless the user has; it must happen before torch's first GPU call.

    Sequence parallelism relies on kernels starting in launch order, hence one connection. Packs
    differ in size, which would fragment memory segments that cannot expand.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


# Library warnings that users cannot act on. Only the ones listed here are hidden.

# (beginning of the message as a regular expression, category)
_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # TransformerEngine and Apex are optional here.
    (r"Transformer Engine and Apex are not installed", UserWarning),
    (r"Apex is not installed", UserWarning),
    (r"transformer_engine not found", UserWarning),
    (r"If you are using transformer_engine as the transformer implementation", UserWarning),
    # From megatron-core with newer versions of torch, and from its own deprecated calls.
    (r"full scope is deprecated", UserWarning),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
    (r"`load_state_dict` is deprecated and will be removed", FutureWarning),
    (r"Warning: tp_group is None", DeprecationWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
    (r"TypedStorage is deprecated", UserWarning),
    (r"MimoModelConfig is experimental", UserWarning),
    # From torch's checkpoint reader with gloo and on a CPU.
    (r"torch\.distributed is (disabled|unavailable)", UserWarning),
)

# (logger, beginning of the message): deprecation notes of megatron-core 0.17 and later, and a note
# of torch that importing them triggers on a machine without a GPU.
_LOGGED = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    (
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel: full_param_layout not provided",
    ),
)


def _silence_known_warnings() -> None:
    """Hide the warnings listed above."""
    for logger, beginning in _LOGGED:
        logging.getLogger(logger).addFilter(partial(_is_other, beginning))
    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


def _is_other(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)


_set_before_cuda_starts()
_silence_known_warnings()
backend.install()
