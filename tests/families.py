"""Tiny models of every family for tests: random, with norms and biases away from their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_aligner.batch.packed import Group
from tests import tiny

WINDOW = 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
GEMMA2 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 2.0,
}
# Every one with 4 layers of width 64; what else it has, as its config.json says it.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_untied": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2_untied_window": {
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_untied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral_untied_window": {
        "model_type": "mistral",
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    "gemma": {"model_type": "gemma", "head_dim": 32},
    "gemma_untied": {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", **GEMMA2},
    "gemma2_untied": {"model_type": "gemma2", **GEMMA2, "tie_word_embeddings": False},
    "nemotron": {
        "model_type": "nemotron",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "norm_eps": 1e-5,
    },
    "nemotron_untied": {
        "model_type": "nemotron",
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
}


def hf_config(case: str, **changes: Any) -> Any:
    """The case as a configuration of transformers, with some keys changed."""
    from transformers import AutoConfig

    shape = {**tiny.SHAPE, "initializer_range": 0.1, **CASES[case], **changes}
    return AutoConfig.for_model(**shape)


def write_hf_checkpoint(folder: Path, case: str, **changes: Any) -> None:
    """A random causal language model in safetensors, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(case, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)


def write_base_nemo(path: Path, case: str) -> Path:
    """A base ``.nemo`` made by the converter; ``path`` with ``.hf`` is what it was made of."""
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


# Shorter and longer than the window, which also ends inside prefixes, and before them.
SEQUENCES = _sequences()
GROUPS = [Group(2, 30), Group(1, 0), Group(1, 0), Group(2, 12)]
