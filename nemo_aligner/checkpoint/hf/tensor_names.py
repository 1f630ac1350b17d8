"""Remove the prefixes that training wrappers add to tensor names in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.utils.errors import CheckpointError, short

# torch.compile, FSDP and activation checkpointing wrap modules at any depth; DDP and DeepSpeed wrap
# only the outermost one.
_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_OUTERMOST = "module"
_PEFT_PREFIX = "base_model.model."
_ADAPTER_PART = re.compile(r"\.(lora_\w+|base_layer|modules_to_save|original_module)\.")
# AutoModel saves a decoder without the prefix ``model.``, which its tensors have in a model with a
# head.
_DECODER_PREFIX, _LAYERS = "model.", "layers."
_DECODER_PARTS = (_LAYERS, "embed_tokens.", "norm.")


def without_wrappers(
    tensors: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Remove wrappers' prefixes from the names of tensors, and add a missing prefix ``model.``.

    A model that was saved from torch.compile, FSDP, DDP or peft has the wrapper's prefix in its
    tensors' names. In a decoder that was saved without a head, the names lack the prefix
    ``model.``.

    Returns:
        The tensors by their names in the model, and a line for the user if any had a prefix.

    Raises:
        CheckpointError: there are tensors of a peft adapter, which may not have been merged into
            the weights; or two tensors get the same name.
    """
    adapter_names = sorted(name for name in tensors if _ADAPTER_PART.search(name))
    if adapter_names:
        raise CheckpointError(
            f"got {len(adapter_names)} tensors of peft, the first is {short(adapter_names[0])}, so "
            "its adapter may not have been merged into the weights. Save the model again after "
            "merge_and_unload()"
        )
    plain_names = {name: _remove_prefixes(name) for name in tensors}
    is_decoder = any(name.startswith(_LAYERS) for name in plain_names.values())
    renamed: dict[str, LazyTensor] = {}
    wrapped: dict[str, str] = {}
    for name, plain in plain_names.items():
        lacks_prefix = is_decoder and plain.startswith(_DECODER_PARTS)
        full_name = _DECODER_PREFIX + plain if lacks_prefix else plain
        if full_name in renamed:
            raise CheckpointError(
                f"tensor {short(name)}: there is another tensor with the name {short(full_name)}. "
                "Save the model without its wrapper"
            )
        renamed[full_name] = tensors[name]
        if name != plain:
            wrapped[name] = full_name
    if not wrapped:
        return renamed, []
    name, full_name = next(iter(wrapped.items()))
    example = f"{short(name)} is read as {short(full_name)}"
    return renamed, [f"note: {len(wrapped)} tensors have a wrapper's prefix: {example}"]


def _remove_prefixes(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == _OUTERMOST:
        parts = parts[1:]
    return ".".join(parts).removeprefix(_PEFT_PREFIX)
