"""GGUF files convert to the tensors and the tokenizer of their source, or are refused."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaTokenizer,
    LlamaConfig,
    LlamaTokenizer,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.hf.gguf import GgufCheckpoint
from nemo_aligner.checkpoint.hf.gguf_config import llama3_divisors
from nemo_aligner.checkpoint.hf.source import open_source
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.distributed.launch import launch
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import config_of, edit
from tests.checkpoint.hf.gguf_writing import (
    LLAMA3,
    TEXTS,
    UNSAID,
    write_fields,
    write_gguf,
    write_sentencepiece,
)
from tests.checkpoint.refusals import refusals
from tests.harness import families, tiny

gguf = pytest.importorskip("gguf")

FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "nemotron"]
# Families that llama.cpp does not have, or whose files it names "chatglm", which is not read; and
# what no file can say: a rotation of other constants than Llama 3's, a dynamic one, some of YaRN's
# settings, layers of a SmolLM3 without a rotation but every fourth, and layers of Qwen's mixtures
# without experts.
NOT_READ = (
    "ministral", "glm", "helium", "qwen3_5_text", "hunyuan_v1_dense", "gpt_neox", "starcoder2",
    "cohere", "cohere2", "apertus", "glm4_moe", "deepseek_v3", "deepseek_v2", "glm4_moe_lite",
    "ernie4_5_moe", "qwen3_5_moe_text", "qwen3_next", "gpt_oss", "nemotron_h", "gemma4_text",
)  # fmt: skip
NOT_SAID = ("llama3", "llama_dynamic", "qwen2_yarn", "smollm3_untied_window", "gemma3_untied")
CASES = [
    case
    for case, config in families.CASES.items()
    if case not in (*NOT_SAID, "qwen3_moe_dense", "qwen2_moe_dense")
    and config["model_type"] not in NOT_READ
]


def content(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the config and the unsharded tensors of an archive."""
    with launch(), open_nemo(path) as folder:
        return folder.config, dist_checkpointing.load_plain_tensors(str(folder.weights))


def check_same(source: Path, base: Path, folder: Path) -> None:
    """Check that ``source`` converts to ``base``; adding 1 to norms may have rounded them."""
    (config, tensors), (wanted_config, expected) = (
        content(convert(source, folder / "from_gguf.nemo").output),
        content(base),
    )
    assert config.pop("tokenizer") == wanted_config.pop("tokenizer")
    assert config == wanted_config
    assert tensors.keys() == expected.keys()
    has_offset = source.stem.startswith(("gemma", "nemotron"))
    for key, tensor in expected.items():
        stored = tensor
        if has_offset and "norm" in key and key.endswith("weight"):
            stored = (tensor + 1) - 1
            # half a unit in the last place of values up to 4
            assert (stored - tensor).abs().max() <= 2**-23
        assert torch.equal(tensors[key], stored), key


@pytest.mark.parametrize("case", CASES)
def test_gguf_converts_to_what_it_was_made_of(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    families.write_hf_checkpoint(folder, case)
    if case == "ministral3":  # as in the released models, and in fields of the files
        rope = config_of(folder)["rope_parameters"]
        edit(folder, rope_parameters={**rope, "mscale": 1.0, "mscale_all_dim": 1.0})
    source = write_gguf(tmp_path / f"{case}.gguf", folder)
    edit(folder, **UNSAID.get(case, {}))
    check_same(source, convert(folder, tmp_path / "base.nemo").output, tmp_path)


def test_gguf_of_a_glm4_or_a_seed_oss_may_have_biases(tmp_path: Path) -> None:
    """No field says if there are biases; the tensors tell."""
    for case, has_biases in (("glm4", True), ("seed_oss", False)):
        folder = tmp_path / case
        families.write_hf_checkpoint(folder, case, attention_bias=has_biases)
        source = write_gguf(tmp_path / f"{case}.gguf", folder)
        check_same(source, convert(folder, tmp_path / f"{case}.nemo").output, folder)


def test_gguf_of_an_internlm2_has_the_tensors_of_a_llama(tmp_path: Path) -> None:
    llama, folder = tmp_path / "llama", tmp_path / "hf"
    families.write_hf_checkpoint(llama, "llama_untied")
    source = write_gguf(tmp_path / "internlm2.gguf", llama, arch="internlm2")
    shutil.copytree(llama, folder)
    renamed = families.internlm2_names(load_file(llama / "model.safetensors"))
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    edit(folder, model_type="internlm2", bias=False)
    check_same(source, convert(folder, tmp_path / "base.nemo").output, tmp_path)


def test_gguf_of_a_llama_3_keeps_its_rope_scaling(tmp_path: Path) -> None:
    base = tiny.write_base_nemo(
        tmp_path / "base.nemo", rope_parameters=LLAMA3, num_key_value_heads=4
    )
    check_same(write_gguf(tmp_path / "llama.gguf", base.with_suffix(".hf")), base, tmp_path)


def test_gguf_of_another_architecture_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The architecture is refused before the vocabulary is read, which takes long."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_token_list(["word"] * 100)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    monkeypatch.setattr(gguf, "GGUFReader", pytest.fail)
    with pytest.raises(CheckpointError, match=r"got 'mamba', wanted one of: llama, .*, olmoe, "):
        convert(tmp_path / "m.gguf", tmp_path / "out.nemo")


def test_folder_that_transformers_saved_of_a_gguf_is_taken(tmp_path: Path) -> None:
    """transformers leaves a quantization setting in the config, although the tensors are plain."""
    tiny.write_hf_checkpoint(tmp_path / "hf")
    expected = convert(tmp_path / "hf", tmp_path / "wanted.nemo")
    edit(tmp_path / "hf", quantization_config={"quant_method": "gguf", "modules": []})
    assert (
        content(convert(tmp_path / "hf", tmp_path / "got.nemo").output)[0]
        == (content(expected.output)[0])
    )


@pytest.mark.parametrize("case", [*FAMILIES, "mixtral", "phi3_untied", "glm4"])
def test_gguf_that_is_quantised_has_what_was_written(case: str, tmp_path: Path) -> None:
    folder, kind = tmp_path / "hf", gguf.GGMLQuantizationType.Q8_0
    families.write_hf_checkpoint(folder, case)
    tensors = GgufCheckpoint(write_gguf(tmp_path / "tiny.gguf", folder, kind)).tensors
    expected = load_file(folder / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.ndim == 2:
            tensor = torch.tensor(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
        atol = 2**-23 if tensor.ndim == 1 else 0
        torch.testing.assert_close(tensors[name].read(), tensor, rtol=0, atol=atol)


# transformers does not read GGUF files of the first Gemma.
@pytest.mark.parametrize("case", ["llama_untied", "qwen2", "qwen3", "gemma2", "nemotron"])
def test_gguf_is_read_the_same_by_transformers(case: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers needs it to load weights from GGUF
    folder, tokens = tmp_path / "hf", torch.tensor([families.SEQUENCES[1]])
    families.write_hf_checkpoint(folder, case)
    original = AutoModelForCausalLM.from_pretrained(folder)
    # The config is passed, because transformers does not read all relevant fields.
    options = {"config": AutoConfig.from_pretrained(folder), "dtype": torch.float32}
    source = write_gguf(tmp_path / "tiny.gguf", folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=source.name, **options)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, original(tokens).logits)

    source = write_gguf(tmp_path / "q8.gguf", folder, gguf.GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=source.name, **options)
    state = theirs.state_dict()
    for name, tensor in GgufCheckpoint(source).tensors.items():
        assert torch.equal(tensor.read(), state[name]), name


# Changed fields of a Llama's file, and the pattern of the error.
REFUSED = [
    (
        {"tokenizer.ggml.model": "rwkv"},
        r"tokenizer\.ggml\.model: got 'rwkv'.*Convert the Hugging",
    ),
    ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model: got None"),
    ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.model: got 'gpt2'"),
    (
        {"tokenizer.ggml.pre": "falcon"},
        r"tokenizer\.ggml\.pre: got 'falcon', wanted one of: gpt-2",
    ),
    ({"ARCH.rope.scaling.type": "su"}, r"llama\.rope\.scaling\.type: got 'su'"),
    ({"ARCH.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.factor: got None"),
    ({"ARCH.rope.scaling.type": "longrope"}, r"scaling\.type: got 'longrope', but the tensors"),
    (
        {"ARCH.rope.scaling.attn_factor": 1.19},
        r"rope\.scaling\.attn_factor: got 1\.19, which is not supported",
    ),
    (
        {"ARCH.rope.scaling.yarn_log_multiplier": 0.1},
        r"yarn_log_multiplier: got 0\.1, which is not supported",
    ),
    ({"split.count": 3}, r"split\.count: this is one of 3 files"),
    ({"ARCH.expert_count": 8}, r"tensor 'blk\.0\.ffn_up\.weight': a llama model has no such"),
    ({"ARCH.attention.sliding_window": 8}, r"llama\.attention\.sliding_window: got 8"),
    ({"ARCH.attention.causal": False}, r"llama\.attention\.causal: got False"),
    ({"ARCH.rope.dimension_count": 8}, r"rope\.dimension_count: got 8, wanted 16"),
    ({"ARCH.attention.value_length": 8}, r"value_length: got 8, wanted 16"),
    ({"ARCH.attention.head_count": [4, 4]}, r"head_count: got \[4, 4\], wanted a whole"),
    ({"ARCH.block_count": None}, r"llama\.block_count: got None, wanted a whole number"),
    (
        {"ARCH.attention.layer_norm_rms_epsilon": None},
        r"rms_epsilon: got None, wanted a number",
    ),
    ({"ARCH.attention.head_count_kv": 3}, r"num_query_groups: got 3, wanted a divisor"),
    ({"ARCH.feed_forward_length": 64}, r"got shape \[128, 64\], wanted \[64, 64\]"),
]


def test_gguf_of_what_the_model_cannot_do_is_refused(tmp_path: Path) -> None:
    tiny.write_hf_checkpoint(tmp_path / "hf")
    with refusals() as refused:
        for changes, pattern in REFUSED:
            source = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **changes)
            with refused(changes, rf"a\.gguf: .*{pattern}"):
                convert(source, tmp_path / "base.nemo")
    assert not (tmp_path / "base.nemo").exists()
    off = {"ARCH.expert_count": 0, "ARCH.attention.causal": True, "ARCH.logit_scale": 0.0}
    convert(write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **off), tmp_path / "base.nemo")


def test_gguf_of_no_family_or_with_damage_is_refused(tmp_path: Path) -> None:
    for case in ("nemotron", "llama3", "qwen3"):
        families.write_hf_checkpoint(tmp_path / case, case)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 20)
    # Its heads are larger than hidden / heads, so the file does not tell how much is rotated.
    larger = {"ARCH.attention.key_length": 32, "ARCH.attention.value_length": 32}
    write_gguf(tmp_path / "larger.gguf", tmp_path / "nemotron", **larger)
    write_gguf(tmp_path / "scaled.gguf", tmp_path / "llama3")
    write_gguf(tmp_path / "renamed.gguf", tmp_path / "qwen3", **{"general.architecture": "qwen2"})
    weights = load_file(tmp_path / "qwen3" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][2, 3] = math.nan
    save_file(weights, tmp_path / "qwen3" / "model.safetensors", {"format": "pt"})
    write_gguf(tmp_path / "nan.gguf", tmp_path / "qwen3")
    with refusals() as refused:
        for name, pattern in (
            ("larger", r"attention\.key_length: got 32, wanted 16"),
            ("scaled", r"rope_freqs\.weight: its values are not those of Llama"),
            ("nan", r"nan\.gguf: .*blk\.1\.ffn_up\.weight: got 1 of \d+ values that are NaN"),
            ("renamed", r"blk\.0\.attn_k_norm\.weight': a qwen2 model has no such"),
            ("other", r"other\.gguf: general\.architecture: got 'falcon', wanted one of: llama"),
            ("broken", r"broken\.gguf"),
            ("nowhere", r"nowhere\.gguf: there is no such file"),
        ):
            with refused(name, pattern):
                convert(tmp_path / f"{name}.gguf", tmp_path / "base.nemo")


# Counts of tensors and fields, a field, and the pattern of the error.
HEADERS = [
    ((0, 1), struct.pack("<IIQ", 9, 4, 2**62), "an array of 4611686018427387904 items"),
    (  # one more item than all arrays together may have
        (0, 2),
        struct.pack("<IIQBQcIIQ", 9, 0, 1, 0, 1, b"y", 9, 0, 2**23),
        "an array of 8388608 items",
    ),
    ((0, 1), struct.pack("<IIQ", 9, 4, 2**20), "a value of 4194304 bytes"),
    ((0, 1), struct.pack("<IQ", 8, 2**62), "a value of 4611686018427387904 bytes"),
    ((0, 1), struct.pack("<IIQ", 9, 9, 1), "a value of the unknown type 9"),
    ((0, 1), struct.pack("<IQ", 8, 2) + b"\xff\xfe", "codec can't decode"),
    ((1, 0), struct.pack("<I", 9), "a tensor of 9 axes"),
    ((2**62, 0), b"", "4611686018427387904 tensors"),
    ((0, 2**62), b"", "4611686018427387904 fields"),
]


def test_gguf_header_is_not_believed(tmp_path: Path) -> None:
    """A header with impossible counts is refused; the gguf package would read past the end."""
    path = tmp_path / "tiny.gguf"
    with refusals() as refused:
        for counts, field, pattern in HEADERS:
            name = struct.pack("<Q", 1) + b"x" if field else b""
            path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + name + field + bytes(64))
            with refused(pattern, f"not a readable GGUF file: .*{pattern}"):
                convert(path, tmp_path / "out.nemo")


def test_gguf_divisors_of_a_llama3_are_those_of_transformers() -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    actual = llama3_divisors(LLAMA3["rope_theta"], 64, LLAMA3)
    assert actual.min() == 1.0
    assert actual.max() == 32.0
    torch.testing.assert_close(actual, plain / scaled)


@pytest.mark.parametrize("layers", [42, 46])
def test_gguf_of_a_gemma2_scales_its_scores_as_llama_cpp_does(layers: int, tmp_path: Path) -> None:
    # The settings of the 9B and the 27B model, with tiny tensors.
    writer = gguf.GGUFWriter(tmp_path / "gemma2.gguf", "gemma2")
    heads = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
    shape = {"hidden_size": 4608, "num_hidden_layers": layers, **heads}
    write_fields(writer, "gemma2", {**families.hf_config("gemma2").to_dict(), **shape})
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = GgufCheckpoint(tmp_path / "gemma2.gguf").config
    assert config["query_pre_attn_scalar"] == {42: 128, 46: 144}[layers]


def carried_tokenizer(source: Path, folder: Path) -> Any:
    open_source(source).save_tokenizer(folder / source.stem)
    return load_tokenizer(folder / source.stem)


@pytest.mark.parametrize("case", FAMILIES)
def test_gguf_tokenizer_is_the_one_that_was_written(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    families.write_hf_checkpoint(folder, case)
    expected = load_tokenizer(folder)
    for name, bos, eos in (("unsaid", None, None), ("bos", True, False), ("eos", False, True)):
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        carried = carried_tokenizer(
            write_gguf(tmp_path / f"{name}.gguf", folder, **flags), tmp_path
        )
        assert (carried.adds_bos, carried.adds_eos) == (bool(bos), bool(eos))
        assert carried.chat_template == tiny.CHATML
        assert (carried.bos_token, carried.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert carried.vocab_size == expected.vocab_size
        assert carried.encode_batch(TEXTS) == expected.encode_batch(TEXTS)


def test_gguf_tokenizer_wants_a_new_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.9.1")
    tiny.write_hf_checkpoint(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"got transformers 5\.9\.1.* 5\.23 or newer"):
        carried_tokenizer(write_gguf(tmp_path / "tiny.gguf", tmp_path / "hf"), tmp_path)


@pytest.mark.parametrize("has_prefix", [None, False], ids=["prefix", "no_prefix"])
@pytest.mark.parametrize("case", ["llama", "mistral", "nemotron", "gemma", "gemma2"])
def test_gguf_tokenizer_of_sentencepiece(
    case: str, has_prefix: bool | None, tmp_path: Path
) -> None:
    is_gemma = case.startswith("gemma")
    bos, eos, *special = ("<bos>", "<eos>", "<pad>") if is_gemma else ("<s>", "</s>")
    (vocabulary, merges), write = write_sentencepiece([*special, eos, bos, "<unk>"])
    kind = GemmaTokenizer if is_gemma else LlamaTokenizer
    rule = {} if is_gemma or has_prefix is None else {"add_prefix_space": has_prefix}
    original = kind(vocab=vocabulary, merges=merges, **rule)

    families.write_hf_checkpoint(tmp_path / "hf", case)
    source = write_gguf(
        tmp_path / "spm.gguf",
        tmp_path / "hf",
        write_tokenizer=write,
        **{"tokenizer.ggml.add_space_prefix": has_prefix},
    )
    carried = carried_tokenizer(source, tmp_path)
    # No field says if BOS is added; this kind of vocabulary adds it.
    assert (carried.adds_bos, carried.adds_eos) == (True, False)
    for text in [*TEXTS, "  two  birds, \u00e9", f"a\nb {eos} the"]:
        assert carried.encode(text) == original.encode(text, add_special_tokens=False), text


def test_gguf_tokenizer_of_an_internlm2_has_the_character_0_again(tmp_path: Path) -> None:
    """llama.cpp's converter renames NUL to a dragon; a real dragon is four byte tokens."""
    dragon = "\N{DRAGON}"
    (vocabulary, _), write = write_sentencepiece([dragon, "</s>", "<s>", "<unk>"])
    families.write_hf_checkpoint(tmp_path / "hf", "llama")
    # An ordinary token, not a special one.
    kinds = [3] * 3 + [6] * 256
    kinds = [1, *kinds, *[1] * (len(vocabulary) - len(kinds) - 1)]
    changes = {
        "write_tokenizer": write,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.token_type": kinds,
    }
    source = write_gguf(tmp_path / "a.gguf", tmp_path / "hf", arch="internlm2", **changes)
    carried = carried_tokenizer(source, tmp_path)
    assert carried.encode("\0") == [vocabulary[dragon]]
    assert len(carried.encode(dragon)) == 4


def test_gguf_tokenizer_of_bytes_has_the_rules_of_its_family(tmp_path: Path) -> None:
    families.write_hf_checkpoint(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "tokenizer.json"

    def carried(cut: str) -> Any:
        changes = {"tokenizer.ggml.pre": cut}
        return carried_tokenizer(
            write_gguf(tmp_path / "a.gguf", tmp_path / "hf", **changes), tmp_path
        )

    # SmolLM splits off every digit, also from a space before it, so two spaces stay one token.
    assert not carried("smollm").adds_bos
    cut = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json")).pre_tokenizer
    pieces = [piece for piece, _ in cut.pre_tokenize_str("a  12")]
    assert pieces == ["a", "\u0120\u0120", "1", "2"]

    # GLM-4 splits like Llama 3: upper-case contractions, three digits, punctuation with line ends.
    for name in ("glm4", "chatglm-bpe"):
        assert not carried(name).adds_bos
        cut = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json")).pre_tokenizer
        pieces = [piece for piece, _ in cut.pre_tokenize_str("IT'S 1234?\n b")]
        assert pieces == ["IT", "'S", "\u0120", "123", "4", "?\u010a", "\u0120b"]

    # A word in Llama 3's vocabulary is one token, even if no merges produce it.
    content = json.loads(file.read_text())
    word = content["model"]["merges"].pop()
    file.write_text(json.dumps(content))
    text = "".join(word).replace("\u0120", " ")
    assert len(carried("gpt-2").encode(text)) > 1
    rules = carried("llama-bpe")
    assert rules.encode(text) == [content["model"]["vocab"]["".join(word)]]
    assert rules.adds_bos
