"""A GGUF file converts to the very tensors that it was made of, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_aligner.errors import CheckpointError
from tests import families, tiny
from tests.checkpoint.hf.conversion import (
    convert,
)
from tests.checkpoint.hf.gguf.writing import (
    LLAMA3,
    UNSAID,
    write_gguf,
)

gguf = pytest.importorskip("gguf")


# Without the one whose rotation has other constants than Llama 3's, which no file can say.
CASES = [case for case in families.CASES if case != "llama3"]


def content(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An archive's config and whole tensors."""
    from megatron.core import dist_checkpointing

    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.parallel.launch import launch

    with launch(), open_nemo(path) as folder:
        return folder.config, dist_checkpointing.load_plain_tensors(str(folder.weights))


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
