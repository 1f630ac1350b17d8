"""Names of tensors in a Hugging Face checkpoint that a wrapper of a training has changed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.utils.errors import CheckpointError, short

# torch.compile, FSDP and activation checkpointing wrap modules at any depth; DDP and DeepSpeed wrap
# the whole model.
_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_OUTERMOST = "module"
_PEFT_PREFIX = "base_model.model."
_OF_ADAPTER = re.compile(r"\.(lora_\w+|base_layer|modules_to_save|original_module)\.")
# A body that AutoModel saved has its own names, without the prefix inside a model with a head.
_BODY_PREFIX, _LAYERS = "model.", "layers."
_OF_BODY = (_LAYERS, "embed_tokens.", "norm.")


def without_wrappers(
    tensors: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Name tensors as in the plain model, whatever wrapper they were saved from.

    A full fine-tune that was saved from torch.compile, FSDP, DDP or peft has the wrapper's prefix
    in front of its names. A body that was saved alone lacks the prefix ``model.``.

    Returns:
        The tensors by their names in the model, and notes for people on what was renamed.

    Raises:
        CheckpointError: there are parts of an adapter of peft, which may be merged or not; or two
            tensors get the same name.
    """
    of_adapter = sorted(name for name in tensors if _OF_ADAPTER.search(name))
    if of_adapter:
        raise CheckpointError(
            f"got {len(of_adapter)} tensors of peft, the first is {short(of_adapter[0])}, so the "
            "adapter is not merged into the weights, or nothing says that it is. Save the model "
            "again after merge_and_unload()"
        )
    plain_names = {name: _plain_name(name) for name in tensors}
    is_body = any(name.startswith(_LAYERS) for name in plain_names.values())
    renamed: dict[str, LazyTensor] = {}
    wrapped: dict[str, str] = {}
    for name, plain in plain_names.items():
        whole = _BODY_PREFIX + plain if is_body and plain.startswith(_OF_BODY) else plain
        if whole in renamed:
            raise CheckpointError(
                f"tensor {short(name)}: got it next to another one of {short(whole)}. Save the "
                "model without its wrapper"
            )
        renamed[whole] = tensors[name]
        if name != plain:
            wrapped[name] = whole
    if not wrapped:
        return renamed, []
    name, whole = next(iter(wrapped.items()))
    example = f"{short(name)} as {short(whole)}"
    return renamed, [f"note: {len(wrapped)} tensors have a wrapper's prefix: read {example}"]


def _plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == _OUTERMOST:
        parts = parts[1:]
    return ".".join(parts).removeprefix(_PEFT_PREFIX)
