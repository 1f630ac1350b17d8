"""A GGUF file converts to the very tensors that it was made of, with its tokenizer.

The files are written here as llama.cpp's ``convert_hf_to_gguf.py`` writes them: names by the gguf
package's own table, changed tensors and fields as read in its source.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_aligner.errors import CheckpointError
from tests import families, tiny

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
# What the converter leaves out of a file, so that the model is another one without it.
UNSAID = {
    "mistral_untied_window": {"sliding_window": None},
    "qwen2_untied_window": {"use_sliding_window": False, "layer_types": None},
    "gemma_untied": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma2_untied": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
}
# Without the one whose rotation has other constants than Llama 3's, which no file can say.
CASES = [case for case in families.CASES if case != "llama3"]


def pairs_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the rows of q and k of a Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def rope_freqs(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """The converter's divisors of a Llama 3.1's frequencies; it looks for 8192 in another place."""
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
    """As ``set_gguf_parameters`` of each architecture."""
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    # The base class takes Nemotron's for an RMS norm's, and Nemotron's own writes it once more.
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])
    if arch in ("gemma", "gemma2"):
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
    if arch == "nemotron":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_layer_norm_eps(config["norm_eps"])
        width = int(rope["partial_rotary_factor"] * config["hidden_size"])
        writer.add_rope_dimension_count(width // config["num_attention_heads"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def write_byte_level(writer: Any, source: Path, vocab_size: int) -> None:
    """The folder's own tokenizer."""
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
    """As ``modify_tensors`` of each architecture; ``kind`` is that of matrices, None is fp32."""
    (number,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name == "lm_head.weight" and arch in ("gemma", "gemma2"):
            continue
        module = name.split(".")[-2]
        if arch == "llama" and module in heads:
            tensor = pairs_order(tensor, heads[module])
        if arch in ("gemma", "gemma2", "nemotron") and name.endswith("norm.weight"):
            tensor = tensor + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        data, raw = tensor.numpy(), None
        if kind is not None and tensor.ndim == 2:
            data, raw = gguf.quantize(data, kind), kind
        writer.add_tensor(stored, data, raw_dtype=raw)


def write_gguf(
    path: Path,
    source: Path,
    kind: Any = None,
    write_tokenizer: Callable[[Any, Path, int], None] = write_byte_level,
    **changes: Any,
) -> Path:
    """The checkpoint in ``source`` as llama.cpp would write it; ``changes``: fields, None: without.

    An ``ARCH.`` in front of a field stands for the architecture.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source).to_dict()
    arch = config["model_type"].replace("mistral", "llama")
    writer = gguf.GGUFWriter(path, arch)
    write_fields(writer, arch, config)
    if config["rope_parameters"]["rope_type"] == "llama3":
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


def content(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An archive's config and whole tensors."""
    from megatron.core import dist_checkpointing

    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.parallel.launch import launch

    with launch(), open_nemo(path) as folder:
        return folder.config, dist_checkpointing.load_plain_tensors(str(folder.weights))


def convert(source: Path, output: Path) -> Any:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    return convert_hf_to_nemo(source, output)


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def check_same(source: Path, base: Path, folder: Path) -> None:
    """The file ``source`` converts to ``base``, but for what its norms lost by 1 more and less."""
    (config, tensors), (wanted_config, wanted) = (
        content(convert(source, folder / "from_gguf.nemo").output),
        content(base),
    )
    assert config.pop("tokenizer") == wanted_config.pop("tokenizer")
    assert config == wanted_config
    assert tensors.keys() == wanted.keys()
    has_offset = source.stem.startswith(("gemma", "nemotron"))
    for key, tensor in wanted.items():
        stored = tensor
        if has_offset and "norm" in key and key.endswith("weight"):
            stored = (tensor + 1) - 1
            assert (stored - tensor).abs().max() <= 2**-23  # half of the last bit of up to 4
        assert torch.equal(tensors[key], stored), key


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_converts_to_what_it_was_made_of(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    families.write_hf_checkpoint(folder, case)
    source = write_gguf(tmp_path / f"{case}.gguf", folder)
    change_config(folder, UNSAID.get(case, {}))
    check_same(source, convert(folder, tmp_path / "base.nemo").output, tmp_path)


def test_a_llama_3_keeps_its_rope_scaling(tmp_path: Path) -> None:
    base = tiny.write_base_nemo(
        tmp_path / "base.nemo", rope_parameters=LLAMA3, num_key_value_heads=4
    )
    check_same(write_gguf(tmp_path / "llama.gguf", base.with_suffix(".hf")), base, tmp_path)


def test_llama3_divisors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from nemo_aligner.checkpoint.hf.families.gguf_fields import llama3_divisors

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    got = llama3_divisors(LLAMA3["rope_theta"], 64, LLAMA3)
    assert got.min() == 1.0
    assert got.max() == 32.0
    torch.testing.assert_close(got, plain / scaled)


@pytest.mark.parametrize("layers", [42, 46])
def test_gemma2_scales_its_scores_as_llama_cpp_does(layers: int, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.gguf.file import GgufCheckpoint

    # 9B and 27B, but for the tensors.
    writer = gguf.GGUFWriter(tmp_path / "gemma2.gguf", "gemma2")
    shape = {"hidden_size": 4608, "num_attention_heads": 32, "num_key_value_heads": 16}
    write_fields(
        writer,
        "gemma2",
        {
            **families.hf_config("gemma2").to_dict(),
            **shape,
            "head_dim": 128,
            "num_hidden_layers": layers,
        },
    )
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = GgufCheckpoint(tmp_path / "gemma2.gguf").config
    assert config["query_pre_attn_scalar"] == {42: 128, 46: 144}[layers]


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "nemotron"])
def test_quantised_weights_are_those_that_were_written(case: str, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.gguf.file import GgufCheckpoint

    folder, kind = tmp_path / "hf", gguf.GGMLQuantizationType.Q8_0
    families.write_hf_checkpoint(folder, case)
    tensors = GgufCheckpoint(write_gguf(tmp_path / "tiny.gguf", folder, kind)).tensors
    wanted = load_file(folder / "model.safetensors")
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor.ndim == 2:
            tensor = torch.tensor(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
        atol = 2**-23 if tensor.ndim == 1 else 0
        torch.testing.assert_close(tensors[name].read(), tensor, rtol=0, atol=atol)


# Transformers reads no Gemma of the first generation.
@pytest.mark.parametrize("case", ["llama_untied", "qwen2", "qwen3", "gemma2", "nemotron"])
def test_transformers_reads_the_same_of_these_files(case: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers wants it to load weights from GGUF
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_aligner.checkpoint.hf.gguf.file import GgufCheckpoint

    folder, tokens = tmp_path / "hf", torch.tensor([families.SEQUENCES[1]])
    families.write_hf_checkpoint(folder, case)
    original = AutoModelForCausalLM.from_pretrained(folder)
    # With its config: transformers does not read all fields that matter.
    where = {"config": AutoConfig.from_pretrained(folder), "dtype": torch.float32}
    source = write_gguf(tmp_path / "tiny.gguf", folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=source.name, **where)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, original(tokens).logits)

    source = write_gguf(tmp_path / "q8.gguf", folder, gguf.GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=source.name, **where)
    state = theirs.state_dict()
    for name, tensor in GgufCheckpoint(source).tensors.items():
        assert torch.equal(tensor.read(), state[name]), name


def carried_tokenizer(source: Path, folder: Path) -> Any:
    from nemo_aligner.checkpoint.hf.source import open_source
    from nemo_aligner.text.tokenizer import load_tokenizer

    open_source(source).save_tokenizer(folder / source.stem)
    return load_tokenizer(folder / source.stem)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "nemotron"])
def test_the_tokenizer_is_the_one_that_was_written(case: str, tmp_path: Path) -> None:
    from nemo_aligner.text.tokenizer import load_tokenizer

    folder = tmp_path / "hf"
    families.write_hf_checkpoint(folder, case)
    wanted = load_tokenizer(folder)
    for name, bos, eos in (("unsaid", None, None), ("bos", True, False), ("eos", False, True)):
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        carried = carried_tokenizer(
            write_gguf(tmp_path / f"{name}.gguf", folder, **flags), tmp_path
        )
        assert (carried.adds_bos, carried.adds_eos) == (bool(bos), bool(eos))
        assert carried.chat_template == tiny.CHATML
        assert (carried.bos_token, carried.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert carried.vocab_size == wanted.vocab_size
        assert carried.encode_batch(TEXTS) == wanted.encode_batch(TEXTS)


def test_an_old_transformers_makes_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.9.1")
    tiny.write_hf_checkpoint(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"got transformers 5\.9\.1.*wanted 5\.23 or newer"):
        carried_tokenizer(write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf"), tmp_path)


def sentencepiece(special: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a BPE with bytes for what it does not know, as sentencepiece's."""
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


@pytest.mark.parametrize("has_prefix", [None, False], ids=["prefix", "no_prefix"])
@pytest.mark.parametrize("case", ["llama", "mistral", "nemotron", "gemma", "gemma2"])
def test_a_sentencepiece_vocabulary(case: str, has_prefix: bool | None, tmp_path: Path) -> None:
    from transformers import GemmaTokenizer, LlamaTokenizer

    is_gemma = case.startswith("gemma")
    bos, eos, *others = ("<bos>", "<eos>", "<pad>") if is_gemma else ("<s>", "</s>")
    vocabulary, merges = sentencepiece([*others, eos, bos, "<unk>"])
    kind = GemmaTokenizer if is_gemma else LlamaTokenizer
    rule = {} if is_gemma or has_prefix is None else {"add_prefix_space": has_prefix}
    original = kind(vocab=vocabulary, merges=merges, **rule)

    def write_vocabulary(writer: Any, source: Path, vocab_size: int) -> None:
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        assert len(tokens) <= vocab_size
        types = {"<unk>": 2, **dict.fromkeys([*others, bos, eos], 3)}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(place) for place in range(len(tokens))])
        writer.add_token_types(
            [types.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
        )
        writer.add_bos_token_id(vocabulary[bos])
        writer.add_eos_token_id(vocabulary[eos])
        writer.add_unk_token_id(vocabulary["<unk>"])

    families.write_hf_checkpoint(tmp_path / "hf", case)
    source = write_gguf(
        tmp_path / "spm.gguf",
        tmp_path / "hf",
        write_tokenizer=write_vocabulary,
        **{"tokenizer.ggml.add_space_prefix": has_prefix},
    )
    carried = carried_tokenizer(source, tmp_path)
    # Nothing is said on BOS, which such a vocabulary has.
    assert (carried.adds_bos, carried.adds_eos) == (True, False)
    for text in [*TEXTS, "  two  birds, \u00e9", f"a\nb {eos} the"]:
        assert carried.encode(text) == original.encode(text, add_special_tokens=False), text


def test_rules_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    families.write_hf_checkpoint(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "tokenizer.json"

    def carried(cut: str) -> Any:
        changes = {"tokenizer.ggml.pre": cut}
        return carried_tokenizer(
            write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **changes), tmp_path
        )

    # SmolLM cuts every digit off, also from the space before it, so that two spaces stay one token.
    assert not carried("smollm").adds_bos
    cut = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json")).pre_tokenizer
    pieces = [piece for piece, _ in cut.pre_tokenize_str("a  12")]
    assert pieces == ["a", "\u0120\u0120", "1", "2"]

    # A word of Llama 3's vocabulary is one token, even where no merges lead to it.
    content = json.loads(file.read_text())
    word = content["model"]["merges"].pop()
    file.write_text(json.dumps(content))
    text = "".join(word).replace("\u0120", " ")
    assert len(carried("gpt-2").encode(text)) > 1
    got = carried("llama-bpe")
    assert got.encode(text) == [content["model"]["vocab"]["".join(word)]]
    assert got.adds_bos


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer.ggml.model": "rwkv"},
            r"tokenizer\.ggml\.model: got 'rwkv'.*wanted the Hugging",
        ),
        ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model: got None"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.model: got 'gpt2'"),
        (
            {"tokenizer.ggml.pre": "falcon"},
            r"tokenizer\.ggml\.pre: got 'falcon', wanted one of: gpt-2",
        ),
        ({"ARCH.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type: got 'yarn'"),
        ({"split.count": 3}, r"split\.count: got one of 3 files"),
        ({"ARCH.expert_count": 8}, r"llama\.expert_count: got 8, which is not supported"),
        ({"ARCH.attention.sliding_window": 8}, r"llama\.attention\.sliding_window: got 8"),
        ({"ARCH.attention.causal": False}, r"llama\.attention\.causal: got False"),
        ({"ARCH.rope.dimension_count": 8}, r"rope\.dimension_count: got 8, wanted the head's 16"),
        ({"ARCH.attention.value_length": 8}, r"value_length: got 8, wanted the keys' 16"),
        ({"ARCH.attention.head_count": [4, 4]}, r"head_count: got \[4, 4\], wanted a whole"),
        ({"ARCH.block_count": None}, r"llama\.block_count: got None, wanted a whole number"),
        (
            {"ARCH.attention.layer_norm_rms_epsilon": None},
            r"rms_epsilon: got None, wanted a number",
        ),
        ({"ARCH.attention.head_count_kv": 3}, r"num_query_groups: got 3, wanted a divisor"),
        ({"ARCH.feed_forward_length": 64}, r"got shape \[128, 64\], wanted \[64, 64\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_model_cannot_do_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny.write_hf_checkpoint(tmp_path / "hf")
    source = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **changes)
    with pytest.raises(CheckpointError, match=rf"a\.gguf: .*{message}"):
        convert(source, tmp_path / "base.nemo")
    assert not (tmp_path / "base.nemo").exists()


def test_a_nemotron_with_larger_heads_does_not_say_what_is_rotated(tmp_path: Path) -> None:
    families.write_hf_checkpoint(tmp_path / "hf", "nemotron")
    larger = {"ARCH.attention.key_length": 32, "ARCH.attention.value_length": 32}
    source = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **larger)
    with pytest.raises(CheckpointError, match=r"attention\.key_length: got 32, wanted 16"):
        convert(source, tmp_path / "base.nemo")


def test_fields_that_are_off_are_no_obstacle(tmp_path: Path) -> None:
    tiny.write_hf_checkpoint(tmp_path / "hf")
    off = {"ARCH.expert_count": 0, "ARCH.attention.causal": True, "ARCH.logit_scale": 0.0}
    convert(write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **off), tmp_path / "base.nemo")


def test_tensors_and_scalings_that_no_family_has_are_refused(tmp_path: Path) -> None:
    families.write_hf_checkpoint(tmp_path / "llama3", "llama3")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight: not the rope scaling of Llama"):
        convert(write_gguf(tmp_path / "a.gguf", tmp_path / "llama3"), tmp_path / "base.nemo")
    families.write_hf_checkpoint(tmp_path / "qwen3", "qwen3")
    renamed = {"general.architecture": "qwen2"}
    qwen3 = write_gguf(tmp_path / "b.gguf", tmp_path / "qwen3", **renamed)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k_norm\.weight' is unknown"):
        convert(qwen3, tmp_path / "base.nemo")


def test_other_architectures_and_other_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    wanted = r"other\.gguf: general\.architecture: got 'falcon', wanted one of: llama, qwen2, qwen3"
    with pytest.raises(CheckpointError, match=wanted):
        convert(tmp_path / "other.gguf", tmp_path / "base.nemo")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        convert(tmp_path / "broken.gguf", tmp_path / "base.nemo")
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: no such file"):
        convert(tmp_path / "nowhere.gguf", tmp_path / "base.nemo")


@pytest.mark.parametrize(
    ("counts", "field", "complaint"),
    [
        ((0, 1), struct.pack("<IIQ", 9, 4, 2**62), "an array of 4611686018427387904 items"),
        ((0, 1), struct.pack("<IIQ", 9, 4, 2**20), "4194304 bytes more"),
        ((0, 1), struct.pack("<IQ", 8, 2**62), "4611686018427387904 bytes more"),
        ((0, 1), struct.pack("<IIQ", 9, 9, 1), "a value of type 9"),
        ((2**62, 0), b"", "4611686018427387904 tensors"),
        ((0, 2**62), b"", "4611686018427387904 fields"),
    ],
    ids=["items", "past_the_end", "string", "arrays_in_arrays", "tensors", "fields"],
)
def test_a_header_is_not_believed(
    counts: tuple[int, int], field: bytes, complaint: str, tmp_path: Path
) -> None:
    """The gguf package would go on past the file's end, without one."""
    name = struct.pack("<Q", 1) + b"x" if field else b""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + name + field + bytes(64))
    with pytest.raises(CheckpointError, match=f"not a readable GGUF file: .*{complaint}"):
        convert(path, tmp_path / "out.nemo")
