"""A GGUF file converts to the very tensors that it was made of, with transformers' tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.errors import CheckpointError
from tests import tiny

gguf = pytest.importorskip("gguf")

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


def pairs_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the rows of q and k."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, source: Path, quantized: bool = False, **extra: Any) -> Path:
    """The checkpoint in ``source`` as llama.cpp would write it; ``extra``: more fields."""
    import json

    from transformers import AutoTokenizer, LlamaForCausalLM

    from nemo_aligner.checkpoint.gguf import _LAYER_NAMES, _MODEL_NAMES, llama3_divisors

    model = LlamaForCausalLM.from_pretrained(source)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for key, value in extra.items():
        writer.add_string(key, value)
    if config.rope_parameters["rope_type"] == "llama3":
        head_dim = config.hidden_size // config.num_attention_heads
        divisors = llama3_divisors(config.rope_parameters["rope_theta"], head_dim, LLAMA3)
        writer.add_tensor("rope_freqs.weight", divisors.numpy())

    tokenizer = AutoTokenizer.from_pretrained(source)
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token or f"[unused{index}]" for index, token in enumerate(tokens)])
    writer.add_token_types([3 if index in special else 1 for index in range(config.vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = model.state_dict()
    for ours, theirs in _MODEL_NAMES.items():
        if ours != "output.weight" or not config.tie_word_embeddings:
            writer.add_tensor(ours, state[theirs].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_NAMES.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            data = (pairs_order(weight, heads[ours]) if ours in heads else weight).numpy()
            kind = None
            if quantized and weight.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                data = gguf.quantize(data, kind)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def content(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An archive's config and whole tensors."""
    from megatron.core import dist_checkpointing

    from nemo_aligner.checkpoint.nemo import open_nemo
    from nemo_aligner.parallel.launch import launch

    with launch(), open_nemo(path) as folder:
        return folder.config, dist_checkpointing.load_plain_tensors(str(folder.weights))


def convert(source: Path, output: Path) -> Any:
    from nemo_aligner.checkpoint.hf import convert_hf_to_nemo

    return convert_hf_to_nemo(source, output)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"rope_parameters": LLAMA3, "num_key_value_heads": 4}],
    ids=["tied", "untied", "llama3_rope"],
)
def test_a_gguf_converts_to_what_it_was_made_of(changes: dict, tmp_path: Path) -> None:
    base = tiny.write_base_nemo(tmp_path / "base.nemo", **changes)
    source = write_gguf(tmp_path / "tiny.gguf", base.with_suffix(".hf"))
    summary = convert(source, tmp_path / "from_gguf.nemo")
    assert summary.dtype == "fp32"
    (config, tensors), (wanted_config, wanted) = content(summary.output), content(base)
    assert config.pop("tokenizer") == wanted_config.pop("tokenizer")
    assert config == pytest.approx(wanted_config)
    assert tensors.keys() == wanted.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=0)


def test_llama3_divisors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from nemo_aligner.checkpoint.gguf import llama3_divisors

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    got = llama3_divisors(LLAMA3["rope_theta"], 64, LLAMA3)
    assert got.min() == 1.0
    assert got.max() == 32.0
    torch.testing.assert_close(got, plain / scaled)


def test_quantised_weights_and_the_tokenizer_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers wants it to load weights from GGUF
    from transformers import AutoTokenizer, LlamaForCausalLM

    from nemo_aligner.checkpoint.gguf import GgufCheckpoint
    from nemo_aligner.checkpoint.nemo import open_nemo
    from nemo_aligner.data.tokenizer import load_tokenizer

    tiny.write_hf_checkpoint(tmp_path / "hf")
    source = write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf", quantized=True)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=source.name).state_dict()
    ours = GgufCheckpoint(source).tensors
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.read(), theirs[name], rtol=0, atol=0)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.name)
    with open_nemo(convert(source, tmp_path / "ours.nemo").output) as folder:
        carried = load_tokenizer(folder.tokenizer)
    assert carried.chat_template == tiny.CHATML
    assert (carried.bos_token, carried.eos_token) == ("<|im_start|>", "<|im_end|>")
    for text in TEXTS:
        assert carried.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_what_a_llama_gguf_does_not_hold_is_refused(tmp_path: Path) -> None:
    tiny.write_hf_checkpoint(tmp_path / "hf")
    scaled = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **{"llama.rope.scaling.type": "yarn"})
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type: got 'yarn'"):
        convert(scaled, tmp_path / "base.nemo")


def test_other_architectures_and_other_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture: got 'falcon', wanted 'llama'"):
        convert(tmp_path / "other.gguf", tmp_path / "base.nemo")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        convert(tmp_path / "broken.gguf", tmp_path / "base.nemo")
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: no such file"):
        convert(tmp_path / "nowhere.gguf", tmp_path / "base.nemo")
