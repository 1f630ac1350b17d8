"""GGUF files as llama.cpp's ``convert_hf_to_gguf.py`` writes them.

Names are by the gguf package's own table, changed tensors and fields as read in its source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.harness import tiny

gguf = pytest.importorskip("gguf")


FIELD_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
    list: gguf.GGUFValueType.ARRAY,
}


TEXTS = [
    "the cat sleeps",
    "1,234 birds?!  Two\n\tlines",
    "<|im_start|>user\nwhy is the river cold<|im_end|>\n",
]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


# Architectures with another name than model_type; and those with permuted rows of q and k.
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
PERMUTED = ("llama", "smollm3", "granite", "arcee", "mistral3", "internlm2")
# Settings that the converter does not write, although they change the model.
UNSAID = {
    "mistral_untied_window": {"sliding_window": None},
    "qwen2_untied_window": {"use_sliding_window": False, "layer_types": None},
    "gemma_untied": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 32},
    # Windows in all layers but every sixth, and the attention scale by head size.
    "gemma3": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "layer_types": None},
    "smollm3": {"no_rope_layer_interval": 4, "no_rope_layers": None},
    "mixtral": {"sliding_window": None},
    "gemma2_untied": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
}


def pairs_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows of q or k like llama.cpp's converter does for a Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def rope_freqs(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """Compute the converter's divisors of Llama 3.1's RoPE frequencies."""
    old_length = config.get("original_max_position_embeddings", 8192)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for channel in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (channel / config["head_dim"])
        smooth = (old_length / wavelength - low) / (high - low)
        if wavelength < old_length / high:
            divisors.append(1.0)
        elif wavelength > old_length / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def write_fields(writer: Any, arch: str, config: dict[str, Any]) -> None:
    """Write the fields like ``set_gguf_parameters`` of each architecture."""
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    # The base class writes Nemotron's epsilon as an RMS norm's, and Nemotron's class writes it
    # again.
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch.startswith("gemma") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch in ("gemma", "gemma2"):
        return
    if "sliding_attention" in rope:
        writer.add_float32(f"{arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    write_rotation(writer, rope)
    write_windows(writer, arch, config, rope)
    write_factors(writer, config)
    if arch == "glm4":
        writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    if arch in PERMUTED:
        writer.add_vocab_size(config["vocab_size"])
        per_head = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(config.get("head_dim") or per_head)
    if arch == "nemotron":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_layer_norm_eps(config["norm_eps"])
        width = int(rope["partial_rotary_factor"] * config["hidden_size"])
        writer.add_rope_dimension_count(width // config["num_attention_heads"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def write_windows(writer: Any, arch: str, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """Write the window fields of OLMo 3, EXAONE 4 and Phi-3, and other fields by layer."""
    if arch in ("olmo2", "exaone4") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", windows)
    if arch == "mistral3":
        scale = rope["llama_4_scaling_beta"]
        writer.add_float32(f"{arch}.attention.temperature_scale", scale)
        writer.add_float32(f"{arch}.rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"])
    if arch == "phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        width = config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(share * width))
        length = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(length)
        writer.add_sliding_window(config["sliding_window"] or 0)
        for kind in ("long", "short"):
            if f"{kind}_factor" in rope:
                factors = np.array(rope[f"{kind}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def write_factors(writer: Any, config: dict[str, Any]) -> None:
    """Write Granite's factors and the sizes of experts."""
    for key, add in (
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("num_experts_per_tok", writer.add_expert_used_count),
    ):
        if config.get(key) is not None:
            add(config[key])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts is not None:
        writer.add_expert_count(experts)


def write_rotation(writer: Any, rope: dict[str, Any]) -> None:
    """Write the RoPE fields like the base class of all architectures."""
    writer.add_rope_freq_base(rope["rope_theta"])
    kinds = {"linear": "LINEAR", "yarn": "YARN", "longrope": "LONGROPE"}
    if rope["rope_type"] in kinds:
        writer.add_rope_scaling_type(gguf.RopeScalingType[kinds[rope["rope_type"]]])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
        ):
            if rope.get(key) is not None:
                add(rope[key])


def with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fuse the matrices of a layer's experts in one tensor."""
    stacked: dict[str, list[torch.Tensor]] = {}
    by_number = sorted(tensors.items(), key=lambda item: [len(item[0]), item[0]])
    for name, tensor in by_number:
        stacked.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
    return {
        name: torch.stack(parts) if ".experts." in name else parts[0]
        for name, parts in stacked.items()
    }


def write_byte_level(writer: Any, source: Path, vocab_size: int) -> None:
    """Write the folder's tokenizer of byte-level BPE."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = tokenizer.convert_ids_to_tokens(range(vocab_size))
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token or f"[unused{index}]" for index, token in enumerate(tokens)])
    writer.add_token_types([3 if index in special else 1 for index in range(vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def write_tensors(writer: Any, arch: str, source: Path, config: dict[str, Any], kind: Any) -> None:
    """Write the tensors like ``modify_tensors``; ``kind`` is the type of matrices, None is fp32."""
    (number,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in with_stacked_experts(load_file(source / "model.safetensors")).items():
        if name == "lm_head.weight" and arch in ("gemma", "gemma2"):
            continue
        module = name.split(".")[-2]
        if arch in PERMUTED and module in heads:
            tensor = pairs_order(tensor, heads[module])
        if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            tensor = tensor + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        data, raw = tensor.numpy(), None
        if kind is not None and tensor.ndim >= 2:
            data, raw = gguf.quantize(data, kind), kind
        writer.add_tensor(stored, data, raw_dtype=raw)


def write_gguf(
    path: Path,
    source: Path,
    kind: Any = None,
    write_tokenizer: Callable[[Any, Path, int], None] = write_byte_level,
    arch: str | None = None,
    **changes: Any,
) -> Path:
    """The checkpoint in ``source`` as llama.cpp would write it; ``changes``: fields, None: without.

    An ``ARCH.`` in front of a field stands for the architecture, ``arch``: None is that of the
    checkpoint's ``model_type``.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source).to_dict()
    arch = arch or ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    write_fields(writer, arch, config)
    if config["rope_parameters"].get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_freqs(config, config["rope_parameters"]))
    write_tokenizer(writer, source, config["vocab_size"])
    write_tensors(writer, arch, source, config, kind)
    for key, value in changes.items():
        key = key.replace("ARCH", arch)
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, FIELD_TYPES[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece(special: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Build vocabulary and merges of a BPE tokenizer with byte fallback, like sentencepiece's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=tiny.SHAPE["vocab_size"],
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([tiny.TEXT] * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def write_sentencepiece(special: list[str]) -> tuple[Any, Callable[[Any, Path, int], None]]:
    """Write such a tokenizer to a file; ``special`` ends with EOS, BOS, UNK."""
    vocabulary, merges = sentencepiece(special)
    kinds = {**dict.fromkeys(special, 3), "<unk>": 2}

    def write(writer: Any, source: Path, vocab_size: int) -> None:
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        assert len(tokens) <= vocab_size
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_token_types([kinds.get(token, 6 if "<0x" in token else 1) for token in tokens])
        eos, bos, unk = special[-3:]
        writer.add_bos_token_id(vocabulary[bos])
        writer.add_eos_token_id(vocabulary[eos])
        writer.add_unk_token_id(vocabulary[unk])

    return (vocabulary, merges), write
