"""Process groups and layouts, and megatron-core on machines without CUDA.

Importing this package prepares the process for megatron-core. Every package whose modules import
megatron-core imports it first, so that the order of a program's own imports does not matter.
Packages that do not (the client, the contract, settings, data) leave the process as it is.
"""

from __future__ import annotations

import logging
import os
import warnings
from functools import partial

from nemo_aligner.cpu import backend

# Environment variables that CUDA and torch's allocator read once, when they start.

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _set_before_cuda_starts() -> None:
    """Set variables that are unset; without effect after torch's first call to the GPU.

    Sequence parallelism relies on kernels starting in launch order. Packs differ in size, which
    would fragment allocator segments that cannot grow.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


# Library warnings that tell users nothing. Only those listed here are hidden.

# (beginning of the message as a regular expression, category)
_KNOWN: tuple[tuple[str, type[Warning]], ...] = (
    # TransformerEngine and Apex are optional here.
    (r"Transformer Engine and Apex are not installed", UserWarning),
    (r"Apex is not installed", UserWarning),
    (r"transformer_engine not found", UserWarning),
    (r"If you are using transformer_engine as the transformer implementation", UserWarning),
    # megatron-core with newer torch, and within itself.
    (r"full scope is deprecated", UserWarning),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
    (r"`load_state_dict` is deprecated and will be removed", FutureWarning),
    (r"Warning: tp_group is None", DeprecationWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
    (r"TypedStorage is deprecated", UserWarning),
    (r"MimoModelConfig is experimental", UserWarning),
    # torch's checkpoint reader on gloo and on CPU.
    (r"torch\.distributed is (disabled|unavailable)", UserWarning),
)

# (logger, beginning of the message): deprecation notes of megatron-core 0.17 and later, and torch's
# note on a machine without a GPU that they trigger.
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
    for message, category in _KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)


def _is_other(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)


_set_before_cuda_starts()
_silence_known_warnings()
backend.install()
