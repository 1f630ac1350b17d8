"""Warnings of libraries that tell our users nothing: each is named here, and no other is hidden."""

from __future__ import annotations

import warnings

# (beginning of the message, as a regular expression; category)
_KNOWN: tuple[tuple[str, type[Warning]], ...] = (
    # TransformerEngine and Apex are optional here.
    (r"Transformer Engine and Apex are not installed", UserWarning),
    (r"Apex is not installed", UserWarning),
    (r"transformer_engine not found", UserWarning),
    (r"If you are using transformer_engine as the transformer implementation", UserWarning),
    # megatron-core 0.16 against newer torch, and against itself.
    (r"full scope is deprecated", UserWarning),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
    (r"`load_state_dict` is deprecated and will be removed", FutureWarning),
    (r"Warning: tp_group is None", DeprecationWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
    (r"TypedStorage is deprecated", UserWarning),
    # torch's checkpoint reader on gloo and on CPU.
    (r"torch\.distributed is (disabled|unavailable)", UserWarning),
)


def silence_known_warnings() -> None:
    """Hide the warnings listed above."""
    for message, category in _KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)
