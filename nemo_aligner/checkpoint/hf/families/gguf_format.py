"""GgufFormat: what llama.cpp's converter calls a family's fields and tensors, and what it changes.

The converter: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# GGUF's names of tensors, then Hugging Face's, as most families have them.
MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP_NAMES = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
GATED_MLP_NAMES = {**MLP_NAMES, "ffn_gate": "mlp.gate_proj"}
MLP_NORM_NAMES = {"ffn_norm": "post_attention_layernorm"}


def _nothing(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufFormat:
    """How a family is written.

    Names are GGUF's, then Hugging Face's.

    Attributes:
        architecture: ``general.architecture`` of its files.
        layer: a layer's tensors.
        model: the tensors outside the layers.
        epsilon: the field of its norms' epsilon.
        optional: fields that only this family has.
        derived: gives keys of ``config.json`` that no field has, of those that a field has.
        is_permuted: the rows of q and k are in rotary pairs, not halves.
        norm_offset: what was added to the weights of norms.
        is_partly_rotated: a part of a head's channels may not be rotated.
    """

    architecture: str
    layer: Mapping[str, str] = field(
        default_factory=lambda: {**ATTENTION_NAMES, **MLP_NORM_NAMES, **GATED_MLP_NAMES}
    )
    model: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    optional: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    is_permuted: bool = False
    norm_offset: int = 0
    is_partly_rotated: bool = False
