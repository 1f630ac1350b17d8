"""Process-wide settings: what CUDA reads from the environment, and library warnings that are
silenced.
"""

from __future__ import annotations

import logging
import os
import warnings
from functools import partial

# What CUDA and torch's allocator read from the environment, once, when they start.

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_before_cuda_starts() -> None:
    """Set what nobody has set; later than torch's first question for a GPU it may have no effect.

    Sequence parallelism relies on kernels starting in the order in which they were launched; and
    packs have ever other sizes, which would leave gaps in segments that cannot grow.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


# Warnings of libraries that tell our users nothing: each is named here, and no other is hidden.

# (beginning of the message, as a regular expression; category)
_KNOWN: tuple[tuple[str, type[Warning]], ...] = (
    # TransformerEngine and Apex are optional here.
    (r"Transformer Engine and Apex are not installed", UserWarning),
    (r"Apex is not installed", UserWarning),
    (r"transformer_engine not found", UserWarning),
    (r"If you are using transformer_engine as the transformer implementation", UserWarning),
    # megatron-core against newer torch, and against itself.
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

# (logger, beginning of the message): advice of megatron-core 0.17 and later to those who call it,
# and what torch says of a machine without a GPU when they import a part of it.
_LOGGED = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    (
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel: full_param_layout not provided",
    ),
)


def silence_known_warnings() -> None:
    """Hide the warnings listed above."""
    for logger, beginning in _LOGGED:
        logging.getLogger(logger).addFilter(partial(_is_other, beginning))
    for message, category in _KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)


def _is_other(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)
