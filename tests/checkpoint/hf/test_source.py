"""Sources of a conversion: which files of a folder or a hub model are read, and which names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from nemo_aligner.checkpoint.hf import source as source_module
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import (
    INDEX,
    check_refused,
    config_edits,
    config_of,
    edit,
    edit_tensors,
    lose,
    tensors_of,
)
from tests.harness import tiny
from tests.harness.launching import run_code

WITHOUT_A_NETWORK = """
import sys
from pathlib import Path
from nemo_aligner.cli.main import main
output = Path(sys.argv[1])
options = ("convert", "--output", str(output), "--input")
code = main([*options, "some-org/Lost"])
print("LOST", code, output.parent.exists())
sys.exit(main([*options, "some-org/Tiny-RM"]))
"""
pytestmark = pytest.mark.usefixtures("layout")


def test_conversion_of_no_checkpoint_is_directed_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.nemo").touch()
    for folder, name in (("adapter", "adapter_config.json"), ("nothing", "other.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    for name, pattern in (
        ("model.nemo", r"got a \.nemo archive.*nemo-aligner import"),
        ("adapter", r"got an adapter .*its base first"),
        ("nothing", r"it has no config\.json"),
    ):
        source = tmp_path / name
        with pytest.raises(CheckpointError, match=pattern) as caught:
            convert(source, tmp_path / "base.nemo")
        assert str(caught.value).count(str(source)) == 1


def test_conversion_reads_the_shards_of_the_index(changed_reward: Path, tmp_path: Path) -> None:
    """Only the shards in the index are read, or the single file, and no files of other tools."""
    (changed_reward / "consolidated.safetensors").write_bytes(b"other names for the same tensors")
    convert(changed_reward, tmp_path / "whole.nemo")
    model = AutoModelForSequenceClassification.from_pretrained(changed_reward)
    (changed_reward / "model.safetensors").unlink()
    model.save_pretrained(changed_reward, max_shard_size="200KB")
    content = config_of(changed_reward, INDEX)
    first, second, *_ = sorted(set(content["weight_map"].values()))
    convert(changed_reward, tmp_path / "rm.nemo")
    moved = next(name for name, file in content["weight_map"].items() if file == first)
    wrong = {**content["weight_map"], moved: second}
    damages = [
        (partial(edit, name=INDEX, weight_map=wrong), rf"{second}: tensor {moved} is missing"),
        (partial(edit, name=INDEX, weight_map=[1]), r"index\.json: it has no weight_map"),
        (partial(lose, name=second), second),
        (lambda folder: cut(folder / first), rf"{first}: "),
    ]
    check_refused(changed_reward, damages)


def test_conversion_of_a_folder_that_was_saved_twice_reads_what_transformers_reads(
    changed_reward: Path, layout: Any, tmp_path: Path
) -> None:
    """The single file is read, if there are shards, too; or the file that the config names."""
    model = AutoModelForSequenceClassification.from_pretrained(changed_reward).eval()
    single_file = changed_reward / "model.safetensors"
    moved = single_file.rename(tmp_path / "whole")
    model.score.weight.data *= -3
    model.save_pretrained(changed_reward, max_shard_size="200KB")
    moved.rename(single_file)
    for name, settings in (
        ("model.safetensors", {}),
        (INDEX, {"transformers_weights": INDEX}),
    ):
        edit(changed_reward, **settings)
        theirs = AutoModelForSequenceClassification.from_pretrained(changed_reward).eval()
        tokenizer = AutoTokenizer.from_pretrained(changed_reward)
        with torch.no_grad():
            expected = theirs(**tokenizer("the cat sings", return_tensors="pt")).logits.numpy()
        summary = convert(changed_reward, tmp_path / f"{name}.nemo")
        assert (
            f"note: reading {single_file.name}, like transformers, and not" in str(summary)
        ) == (not settings)
        actual = score_all(load_scorer(tmp_path / f"{name}.nemo", layout), ["the cat sings"])
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    check_refused(
        changed_reward,
        config_edits(
            ({"transformers_weights": "../a.safetensors"}, r"transformers_weights: got '\.\./a"),
            ({"transformers_weights": "a.bin"}, r"got 'a\.bin', wanted a \.safetensors file"),
            ({"transformers_weights": "a.safetensors"}, r"a\.safetensors: "),
        ),
    )


def test_conversion_gives_tokens_of_the_config_the_ids_of_transformers(
    changed_base: Path, tmp_path: Path
) -> None:
    """A token that only tokenizer_config.json has is a single token."""
    tiny.write_hf_checkpoint(changed_base, vocab_size=tiny.SHAPE["vocab_size"] + 4)
    file, rows = changed_base / "tokenizer.json", tiny.SHAPE["vocab_size"]
    original = file.read_bytes()
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added_tokens = config_of(changed_base, "tokenizer.json")["added_tokens"]
    by_id = {token.pop("id"): token for token in added_tokens}
    extra = {"content": "<step>", **rules, "special": True}
    # For a token in both files, the rules of tokenizer_config.json count.
    by_id[2] = {**by_id[2], "rstrip": True}
    text = "the<step>cat<note><|im_end|>  dog<tool>"
    cases = [
        {"added_tokens_decoder": {**by_id, rows + 7: extra}},
        {"added_tokens_decoder": {rows: {**extra, "content": "<note>", "special": False}}},
        {"additional_special_tokens": ["<tool>", "<step>"]},
        {"extra_special_tokens": {"tool_token": "<tool>"}, "eos_token": "<note>"},
    ]
    plain = config_of(changed_base, "tokenizer_config.json")
    for number, case in enumerate(cases):
        edit(changed_base, "tokenizer_config.json", **{**plain, **case})
        theirs = AutoTokenizer.from_pretrained(changed_base)
        expected = theirs(text, add_special_tokens=False).input_ids
        assert max(expected) >= rows
        with open_nemo(convert(changed_base, tmp_path / f"{number}.nemo").output) as folder:
            assert folder.load_tokenizer().encode(text) == expected, case
    assert file.read_bytes() == original
    (changed_base / "tokenizer_config.json").write_text(
        json.dumps({**plain, "extra_special_tokens": None, "additional_special_tokens": None})
    )
    (changed_base / "added_tokens.json").write_text(json.dumps({"<step>": rows}))
    expected = AutoTokenizer.from_pretrained(changed_base)(text).input_ids
    assert rows in expected
    with open_nemo(convert(changed_base, tmp_path / "older.nemo").output) as folder:
        assert folder.load_tokenizer().encode(text) == expected
    of_config = partial(edit, name="tokenizer_config.json")
    damages = [
        (
            partial(of_config, added_tokens_decoder=[1]),
            r"got \[1\], wanted an object that maps ids",
        ),
        (partial(of_config, added_tokens_decoder={"1": 2}), "got 2, wanted a token"),
        (
            partial(edit, name="added_tokens.json", **{"<a>": "b"}),
            "wanted an object that maps tokens",
        ),
        (partial(of_config, extra_special_tokens=3), "got 3, wanted a list"),
    ]
    check_refused(changed_base, damages)


def test_conversion_takes_a_wrapper_out_of_the_names_of_tensors(
    changed_reward: Path, tmp_path: Path
) -> None:
    """The prefixes of torch.compile, DDP, FSDP and peft are removed from tensor names."""
    tensors = tensors_of(changed_reward)
    expected = convert(changed_reward, tmp_path / "plain.nemo")

    def rename(folder: Path, change: Callable[[str], str]) -> None:
        renamed = {change(name): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})

    for number, prefix in enumerate(
        ("_orig_mod.", "module.", "module._orig_mod.", "base_model.model.", "_orig_mod.module.")
    ):
        rename(changed_reward, lambda name, prefix=prefix: prefix + name)
        summary = convert(changed_reward, tmp_path / f"{number}.nemo")
        assert f"{len(tensors)} tensors have a wrapper's prefix: {prefix}" in str(summary)
        assert (summary.contract, summary.head) == (expected.contract, expected.head)
    inside = ".layers.{}._fsdp_wrapped_module._checkpoint_wrapped_module."
    rename(
        changed_reward,
        lambda name: re.sub(r"\.layers\.(\d+)\.", lambda match: inside.format(match[1]), name),
    )
    assert convert(changed_reward, tmp_path / "inside.nemo").contract == expected.contract
    layer = "model.layers.0.self_attn.q_proj."
    peft = {
        f"base_model.model.{layer}base_layer.weight": torch.ones(64, 64),
        f"base_model.model.{layer}lora_A.default.weight": torch.ones(2, 64),
    }
    rename(changed_reward, lambda name: name)
    refused = [
        (partial(edit_tensors, changes=peft), r"got 2 tensors of peft, .* after merge_and_unload"),
        (
            partial(edit_tensors, changes={"module.score.weight": torch.ones(1, 64)}),
            r"another tensor with the name score\.weight",
        ),
    ]
    check_refused(changed_reward, refused)


def test_conversion_of_a_body_alone_needs_no_output_layer(layout: Any, tmp_path: Path) -> None:
    """A decoder saved by AutoModel, or by a reward model's class, has no output layer."""
    tiny.write_hf_reward_model(tmp_path / "reward", tie_word_embeddings=False)
    body = AutoModel.from_pretrained(tmp_path / "reward")
    body.save_pretrained(tmp_path / "body")
    tiny.write_tokenizer(tmp_path / "body")
    assert "layers.0.mlp.up_proj.weight" in tensors_of(tmp_path / "body")
    contents = []
    for name, head in (("reward", "none"), ("body", None)):
        summary = convert(tmp_path / name, tmp_path / f"{name}.nemo", head=head)
        assert "untied embeddings" in str(summary)
        with open_nemo(tmp_path / f"{name}.nemo") as folder:
            assert folder.contract is None
            assert not folder.config["share_embeddings_and_output_weights"]
            contents.append(dist_checkpointing.load_plain_tensors(str(folder.weights)))
    of_reward, of_body = contents
    assert of_reward.keys() == of_body.keys()
    assert all(torch.equal(of_reward[key], of_body[key]) for key in of_body)
    start = load_pretrained(
        tmp_path / "reward.nemo", layout, num_attributes=1, precision=Precision.fp32
    )
    assert start.head_is_new
    edit(tmp_path / "reward", architectures=["LlamaForCausalLM"])
    edit_tensors(tmp_path / "reward", {"score.weight": None})
    check_refused(tmp_path / "reward", [(lambda folder: None, r"first is lm_head\.weight")])


def test_conversion_reads_an_index_of_a_model_with_many_experts(
    changed_reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of Qwen3-30B-A3B has 1.7 MB, more than any file of settings may have."""
    model = AutoModelForSequenceClassification.from_pretrained(changed_reward)
    (changed_reward / "model.safetensors").unlink()
    model.save_pretrained(changed_reward, max_shard_size="200KB")
    edit(changed_reward, INDEX, metadata={"total_size": 1, "filler": "x" * 2**20})
    assert convert(changed_reward, tmp_path / "rm.nemo").contract is not None
    monkeypatch.setattr(source_module, "_MAX_INDEX_BYTES", 2**20)
    with pytest.raises(CheckpointError, match=rf"{INDEX}: got \d+ bytes, wanted at most {2**20}"):
        convert(changed_reward, tmp_path / "again.nemo")


def test_conversion_ignores_the_dtypes_of_tensors_that_it_drops(
    changed_base: Path, tmp_path: Path
) -> None:
    """Published files have masks of bools, positions and fp8 layers in parts that are dropped."""
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(changed_base, {unused: torch.ones(8, dtype=torch.int64)})
    convert(changed_base, tmp_path / "base.nemo")
    edit_tensors(changed_base, {unused: None})
    tensors = {f"language_model.{name}": value for name, value in tensors_of(changed_base).items()}
    positions = {"vision_tower.embeddings.position_ids": torch.arange(9)[None]}
    save_file({**tensors, **positions}, changed_base / "model.safetensors", {"format": "pt"})
    text_config = config_of(changed_base)
    llava = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    edit(changed_base, **llava, text_config=text_config)
    assert "dropped: 1 tensors of other parts (vision_tower)" in str(
        convert(changed_base, tmp_path / "llava.nemo")
    )
    needed = "language_model.model.layers.1.mlp.up_proj.weight"
    masks = {"language_model.model.mask": torch.ones(2, dtype=torch.bool)}
    refused = [
        (
            partial(edit_tensors, changes={needed: tensors[needed].to(torch.float8_e4m3fn)}),
            rf"model\.safetensors: tensor {needed}: got the dtype F8_E4M3, wanted one of",
        ),
        (partial(edit_tensors, changes=masks), r"model\.mask: got the dtype BOOL"),
    ]
    check_refused(changed_base, refused)


def test_conversion_removes_added_tokens_without_an_embedding(
    changed_base: Path, tmp_path: Path
) -> None:
    """Gemma 3 1B has a token of images beyond its embeddings, Llama 2 a pad token."""
    rows = tiny.SHAPE["vocab_size"]
    tiny.write_hf_checkpoint(changed_base)
    tokenizer = AutoTokenizer.from_pretrained(changed_base)
    tokenizer.add_tokens([f"<unused{number}>" for number in range(rows - len(tokenizer))])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(changed_base)
    edit(changed_base, "tokenizer_config.json", image_token="<image>")
    (changed_base / "added_tokens.json").write_text(json.dumps({"<pad>": rows + 1}))
    summary = convert(changed_base, tmp_path / "base.nemo")
    assert f"removed from the tokenizer: <image>, <pad>, because the model has only {rows}" in str(
        summary
    )
    with open_nemo(tmp_path / "base.nemo") as folder:
        read = folder.load_tokenizer()
        assert read.vocab_size == rows
        for file in folder.tokenizer.glob("*.json"):
            assert "<image>" not in file.read_text()
            assert "<pad>" not in file.read_text()
    text = "the cat<unused0><|im_end|>"
    assert read.encode(text) == tokenizer(text, add_special_tokens=False).input_ids
    needed = [(partial(edit, name="tokenizer_config.json", eos_token="<image>"), "got ids up to")]
    check_refused(changed_base, needed)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def test_conversion_of_a_hub_name_downloads_it(
    hub: Callable[..., Any], reward_checkpoint: Path, tmp_path: Path
) -> None:
    requests = hub(reward_checkpoint)
    assert convert("some-org/Tiny-RM", tmp_path / "rm.nemo").contract is not None
    assert requests["name"] == "some-org/Tiny-RM"
    assert requests["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


def test_tokenizer_of_files_that_may_only_be_read_is_copied(
    changed_base: Path, tmp_path: Path
) -> None:
    for file in changed_base.iterdir():
        file.chmod(0o444)
    source_module.open_source(changed_base).save_tokenizer(tmp_path / "copy")
    # A test may run as root, who may write to them anyway.
    assert all(file.stat().st_mode & 0o200 for file in (tmp_path / "copy").iterdir())


def test_conversion_without_a_network_reads_the_cache_of_the_hub(
    reward_checkpoint: Path, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "home/hub/models--some-org--Tiny-RM"
    shutil.copytree(reward_checkpoint, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit)
    environment = tiny.environment(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    done = run_code(WITHOUT_A_NETWORK, str(tmp_path / "out/rm.nemo"), environment=environment)
    assert done.returncode == 0, done.stderr
    found = done.stdout.partition("LOST 1 False\n")[2]
    assert "CheckpointError: some-org/Lost: there is no such folder, and no such" in done.stderr
    assert "Traceback" not in done.stderr
    assert "llama reward model with the output reward" in found
