"""Tiny random models of every supported family, whose norms and biases are not the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nemo_aligner.batch.packed import Group
from tests.harness import tiny
from tests.harness.family_cases import CASES, WINDOW

# A case for each model_type.
BODIES = {config["model_type"]: case for case, config in reversed(CASES.items())}

# A shape that reveals rounding errors and swapped axes: the hidden size is neither a square nor a
# power of two, the root of a head's size is not exact in 16 bits, and there are three query groups
# of three heads and an odd vocabulary size.
ODD_SHAPE = {
    "vocab_size": 337,
    "hidden_size": 216,
    "intermediate_size": 152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "initializer_range": 0.06,
}


def odd_settings(case: str) -> dict[str, Any]:
    """Settings that give a case ``ODD_SHAPE``, and adapt the settings that depend on it."""
    config, settings = CASES[case], dict(ODD_SHAPE)
    if "query_pre_attn_scalar" in config:
        settings["query_pre_attn_scalar"] = 29
    if "num_experts" in config or "num_local_experts" in config:
        counts = "num_experts" if "num_experts" in config else "num_local_experts"
        settings |= {counts: 7, "moe_intermediate_size": 44}
    if "moe_num_experts" in config:
        settings |= {"moe_num_experts": 7, "moe_intermediate_size": 44}
    if "n_routed_experts" in config:
        settings |= {"n_routed_experts": 12, "moe_intermediate_size": 44}
    if "kv_lora_rank" in config:
        del settings["head_dim"]
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        settings["kv_lora_rank"] = 28
    if config["model_type"] == "gemma4_text":
        settings |= {"head_dim": 8, "global_head_dim": 24, "num_global_key_value_heads": 9}
        settings |= {"vocab_size_per_layer_input": settings["vocab_size"]}
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        # RoPE needs a factor for each pair of rotated channels.
        factors = [1.1 + 0.3 * pair for pair in range(6)]
        longer = {"short_factor": factors, "long_factor": [1.7 * factor for factor in factors]}
        settings["rope_parameters"] = {**rope, **longer}
    return settings


def hf_config(case: str, **settings: Any) -> Any:
    """The transformers configuration of a case, updated by ``settings``."""
    from transformers import AutoConfig

    shape = {**tiny.SHAPE, "initializer_range": 0.1, **CASES[case], **settings}
    return AutoConfig.for_model(**shape)


def classifier(config: Any) -> Any:
    """transformers' sequence classification class for ``config``; made here where it has none."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    base = MODEL_MAPPING[type(config)].__base__
    names = {"config_class": type(config)}
    return type("Classifier", (GenericForSequenceClassification, base), names)


def write_hf_checkpoint(folder: Path, case: str, **settings: Any) -> None:
    """A random causal language model in safetensors, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(case, **settings))
    _shift_norms(model)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)


def _shift_norms(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("proj_bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            if name.endswith("A_log"):
                # Drawn as they are, states would be forgotten within a few tokens.
                parameter.sub_(6)
        for name, constant in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith("e_score_correction_bias"):
                constant.add_(torch.randn_like(constant), alpha=0.1)
            if name.endswith("layer_scalar"):
                constant.add_(torch.randn_like(constant), alpha=0.2)


def assert_close(
    found: torch.Tensor, wanted: torch.Tensor, relative: float, what: str = ""
) -> None:
    """Within ``relative`` of how large ``wanted`` is."""
    scale = float(wanted.abs().max())
    assert scale > 0, what
    far = float((found - wanted).abs().max()) / scale
    assert far <= relative, f"{what}: {far} of {scale}"


@contextmanager
def in_fp64() -> Iterator[None]:
    """Let all code that casts to fp32, ours and transformers', cast to fp64 instead."""
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        # oneDNN has no matmuls in fp64.
        patch("nemo_aligner.cpu.matmuls._matmul", torch.nn.functional.linear),
    ):
        yield


def widen(model: Any) -> Any:
    """Convert a model of ours to fp64, whose gradients then need no buffer of Megatron's."""
    for module in model.modules():
        if hasattr(module, "_dtype"):
            module._dtype = torch.float64
        if hasattr(module, "config"):
            module.config.params_dtype = torch.float64
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False
    return model.double().train()


def internlm2_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Llama's tensors, renamed and fused as in InternLM2's modeling_internlm2.py.

    The rows of ``wqkv`` are groups of several query heads, a key head and a value head.
    """
    outside = {
        "model.embed_tokens.weight": "model.tok_embeddings.weight",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "output.weight",
    }
    inside = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    hidden, groups = tiny.SHAPE["hidden_size"], tiny.SHAPE["num_key_value_heads"]
    width = hidden // tiny.SHAPE["num_attention_heads"]
    renamed = {name: tensors[theirs] for theirs, name in outside.items()}
    for layer in range(tiny.SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for theirs, name in inside.items():
            renamed[f"{prefix}{name}.weight"] = tensors[f"{prefix}{theirs}.weight"]
        parts = [
            tensors[f"{prefix}self_attn.{part}_proj.weight"].view(groups, -1, width, hidden)
            for part in "qkv"
        ]
        renamed[f"{prefix}attention.wqkv.weight"] = torch.cat(parts, dim=1).reshape(-1, hidden)
    return renamed


def write_reward_model(folder: Path, case: str, dtype: torch.dtype, **settings: Any) -> None:
    """A random reward model of two labels."""
    config = hf_config(case, **settings)
    config.num_labels, config.pad_token_id = 2, 0
    config.problem_type = "regression"
    torch.manual_seed(0)
    model = classifier(config)(config)
    _shift_norms(model)
    model.to(dtype).save_pretrained(folder)
    tiny.write_tokenizer(folder)


def single_experts(
    family: Any, config: Any, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors with the names of files: transformers fuses all experts of a layer in memory."""
    from nemo_aligner.checkpoint.hf.source import split_fused_experts
    from nemo_aligner.checkpoint.weights.save import LazyTensor

    lazy_tensors = {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone, tensor.__getitem__)
        for name, tensor in tensors.items()
    }
    # In memory transformers gives the output layer of a GPT-NeoX another name, and ERNIE's bias for
    # the choice of experts.
    (output,) = family.untied.hf
    lazy_tensors = {
        output
        if name == "lm_head.weight"
        else name.replace(".gate.moe_statics", ".moe_statics"): lazy
        for name, lazy in lazy_tensors.items()
    }
    renamed = split_fused_experts(family, family.rules(config), lazy_tensors)
    return {name: tensor.read() for name, tensor in renamed.items()}


def write_base_nemo(path: Path, case: str) -> Path:
    """Write a base ``.nemo`` by the converter, from the folder ``path`` with the suffix ``.hf``."""
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    source = path.with_suffix(".hf")
    write_hf_checkpoint(source, case)
    convert_hf_to_nemo(source, path)
    return path


def _sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=generator).tolist()

    first, second = draw(30), draw(12)
    return [
        [*first, *draw(5)],
        [*first, *draw(25)],
        draw(1),
        draw(WINDOW + 1),
        [*second, *draw(40)],
        [*second, *draw(3)],
    ]


# Some are shorter and some longer than the window, which ends inside or before shared prefixes.
SEQUENCES = _sequences()
GROUPS = [Group(2, 30), Group(1, 0), Group(1, 0), Group(2, 12)]
