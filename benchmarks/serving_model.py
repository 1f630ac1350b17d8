"""Reward models for serving.py: a base model with a random head, or a tiny random model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, prepare_model
from serving_servers import SEQ_LENGTH

WORDS = "the a cat dog tree house stone blue red green what is where who why how good bad yes no"
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
)


def prepare_reward_model(source: Path, work: Path, reads: str = "last_token") -> Path:
    """Write ``work / "reward.nemo"``: the base model ``source`` with a random head.

    An existing file is kept. ``reads`` is the setting ``model.head.reads``.
    """
    _, base = prepare_model(source, work)
    reward_model = work / "reward.nemo"
    if not reward_model.is_file():
        write_reward_model(base, reward_model, reads)
    return reward_model


def export(reward_model: Path, folder: Path) -> Path:
    """Export the reward model to a Hugging Face folder, as vLLM loads; an existing one is kept."""
    if not folder.is_dir():
        command = [sys.executable, "-m", "nemo_aligner", "export"]
        paths = ["--input", str(reward_model), "--output", str(folder)]
        subprocess.run([*command, *paths], check=True, cwd=ROOT)
    return folder


def write_tiny(folder: Path, dtype: str = "float32", **changes: Any) -> Path:
    """Write a Hugging Face folder with a random Llama: 4 layers, hidden size 64.

    ``changes`` are fields of its LlamaConfig that differ.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2 * SEQ_LENGTH,
        "initializer_range": 0.1,
    }
    shape = LlamaConfig(**{**settings, **changes})
    LlamaForCausalLM(shape).to(getattr(torch, dtype)).save_pretrained(folder)
    _write_tokenizer(folder, shape.vocab_size)
    return folder


def _write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = _CHATML
    fast.save_pretrained(folder)


def write_reward_model(base: Path, output: Path, reads: str = "last_token") -> None:
    """Write a reward model's ``.nemo``: the weights of ``base`` and a random head."""
    import torch

    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
    from nemo_aligner.config.common import Overlong, Precision
    from nemo_aligner.config.model import DataConfig, HeadConfig, ModelConfig, ScoredPosition
    from nemo_aligner.contract.from_settings import build_contract
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout

    settings = ModelConfig(
        data=DataConfig(seq_length=SEQ_LENGTH, overlong=Overlong.truncate_left),
        head=HeadConfig(reads=ScoredPosition(reads)),
    )
    with launch():
        layout = initialize_layout()
        loaded = load_pretrained(base, layout, num_attributes=1, precision=Precision.fp32)
        torch.manual_seed(0)
        torch.nn.init.normal_(loaded.model.rm_head.weight, std=0.02)
        contract = build_contract(settings, loaded.tokenizer, Precision.fp32)
        save_reward_model(output, loaded.model, loaded.config, loaded.tokenizer, contract)
        destroy_layout()
