"""Export to Hugging Face: tensors, rewards, tokenizer and card, or an error and no folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from nemo_aligner.api.reward_model import export_archive
from nemo_aligner.checkpoint.hf import export as hf_export
from nemo_aligner.checkpoint.hf.card import _read_states as read_states
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.hf.export import ShardWriter
from nemo_aligner.checkpoint.hf.exported_tokenizer import write_tokenizer
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.write import write_nemo
from nemo_aligner.checkpoint.run_folder import MODEL_NAME
from nemo_aligner.checkpoint.weights.save import LazyTensor, save_lazy
from nemo_aligner.checkpoint.weights.store import TensorStore
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import ConfigError
from tests.checkpoint.hf.exporting import (
    MEANS,
    NAMES,
    REWARD_CASES,
    WEIGHTS,
    LiveBytes,
    assert_same,
    config_of,
    edit,
    edit_tensors,
    export,
    save_again,
    tensors_of,
)
from tests.checkpoint.refusals import refusals
from tests.harness import families, tiny
from tests.harness.contracts import Contracts

pytestmark = pytest.mark.usefixtures("layout")


@pytest.mark.smoke
def test_export_and_the_way_back_change_no_tensor(layout: Any, tmp_path: Path) -> None:
    for case, changes in REWARD_CASES.items():
        folder = tmp_path / case
        tiny.write_hf_reward_model(folder / "hf", **changes)
        tensor_parallel = 2 if case == "zero_groups" else 1
        convert(folder / "hf", folder / "rm.nemo", tensor_parallel=tensor_parallel)
        summary = export(folder / "rm.nemo", folder / "out", layout)
        assert summary.architecture == "LlamaForSequenceClassification"
        assert summary.texts == 7
        assert_same(tensors_of(folder / "out"), tensors_of(folder / "hf"))
        original, after = config_of(folder / "hf"), config_of(folder / "out")
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
            assert after[key] == original[key]
        # The exported files have the same permissions as the archive.
        files = [folder / "out" / name for name in ("config.json", "model.safetensors")]
        assert len({file.stat().st_mode for file in files}) == 1
        if case != "one_label":
            continue
        again = convert(folder / "out", folder / "again.nemo")
        assert again.contract == summary.contract
        export(folder / "again.nemo", folder / "twice", layout)
        assert_same(tensors_of(folder / "twice"), tensors_of(folder / "hf"))


def test_export_leaves_out_query_groups_of_zeros_and_says_so(layout: Any, tmp_path: Path) -> None:
    tiny.write_hf_reward_model(tmp_path / "hf")  # of 2 query groups
    convert(tmp_path / "hf", tmp_path / "plain.nemo")
    assert "query groups" not in str(export(tmp_path / "plain.nemo", tmp_path / "plain", layout))
    made = convert(tmp_path / "hf", tmp_path / "padded.nemo", tensor_parallel=3)
    summary = str(export(tmp_path / "padded.nemo", tmp_path / "out", layout))
    (groups_line,) = (line for line in summary.splitlines() if line.startswith("query groups"))
    assert groups_line.startswith("query groups: 2; dropped 1 of zeros")
    assert "convert --tensor-parallel 3" in groups_line
    again = convert(tmp_path / "out", tmp_path / "again.nemo", tensor_parallel=3)
    assert again.zero_groups == made.zero_groups == 1


def test_export_takes_a_config_without_what_has_a_default(layout: Any, tmp_path: Path) -> None:
    tiny.write_hf_reward_model(tmp_path / "hf", num_key_value_heads=4)
    convert(tmp_path / "hf", tmp_path / "rm.nemo")
    optional = (
        "num_query_groups", "kv_channels", "max_position_embeddings", "layernorm_epsilon",
        "rotary_base", "share_embeddings_and_output_weights", "scale_positional_embedding",
    )  # fmt: skip
    with open_nemo(tmp_path / "rm.nemo") as folder:
        config = {key: value for key, value in folder.config.items() if key not in optional}
        path = tmp_path / "short.nemo"
        write_nemo(path, config, folder.weights, folder.tokenizer, folder.contract)
    export(path, tmp_path / "out", layout)
    assert_same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))
    assert config_of(tmp_path / "out")["num_key_value_heads"] == 4


def write_run(folder: Path, archive: Path) -> Path:
    """Write the folder of the run that trained ``archive``, with two validations."""
    folder.mkdir()
    config = {
        "pretrained_checkpoint": {"restore_from_path": "base.nemo"},
        "model": {
            "data": {
                "data_prefix": {"train": ["data/train.jsonl", "org/pairs:test"], "validation": []}
            }
        },
    }
    for step, metrics in ((5, {"v/loss": 0.5}), (10, {"v/loss": 0.25, "v/temperature": None})):
        state = {"step": step, "consumed_samples": step, "metrics": metrics, "config": config}
        (folder / f"step_{step:08d}").mkdir()
        (folder / f"step_{step:08d}" / "run_state.json").write_text(json.dumps(state))
    return Path(shutil.copy(archive, folder / MODEL_NAME))


def test_card_tells_of_a_run_only_for_the_archive_that_the_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "rm.nemo").touch()
    archive = write_run(tmp_path / "run", tmp_path / "rm.nemo")
    (tmp_path / "link.nemo").symlink_to(archive)
    for path, steps in (
        (archive, [5, 10]),
        (tmp_path / "link.nemo", [5, 10]),
        (archive.with_name("rm.nemo"), []),
    ):
        assert [state["step"] for state in read_states(path)] == steps, path


def test_export_has_tensors_config_card_and_tokenizer_of_the_archive(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    """transformers 4 has the tokenizer's class; tests/paths/readers reads the export by it."""
    with open_nemo(three) as folder:
        padded = folder.store.tensors["model.embedding.word_embeddings.weight"][0]
    assert padded == (384, 64)
    archive, out, hf = write_run(tmp_path / "run", three), tmp_path / "out", three.parent / "hf"
    summary = export(archive, out, layout, base_license="apache-2.0")
    assert_same(tensors_of(out), tensors_of(hf))
    config = config_of(out)
    assert config["id2label"] == {str(number): name for number, name in enumerate(NAMES)}
    assert config["label2id"] == {name: number for number, name in enumerate(NAMES)}
    assert (config["num_labels"], config["problem_type"]) == (3, "regression")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["label_means"] == dict(zip(NAMES, MEANS, strict=True))
    assert config["scoring_contract_hash"] == summary.contract.hash
    assert config_of(out, "scoring_contract.json") == summary.contract.to_dict()
    assert "WARNING: the logits are not the rewards" in str(summary)
    card = (out / "README.md").read_text()
    trained = """- train data: `train.jsonl`, `org/pairs:test`
- validation data: none
- trained from `base.nemo`, 10 records

| | after step 5 | after step 10 |
|---|---|---|
| v/loss | 0.5 | 0.25 |
| v/temperature |  |  |
"""
    by = "Higher is better. It was trained with nemo_aligner (regression) and exported from `"
    phrases = ("license: apache-2.0", by, "logits alone are not the rewards", "| 1 | 1 |", trained)
    for phrase in (*phrases, *NAMES):
        assert phrase in card, phrase
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (hf / name).read_bytes()
    original = config_of(hf, "tokenizer_config.json")
    assert original["tokenizer_class"] == "TokenizersBackend"
    assert config_of(out, "tokenizer_config.json") == {
        **original,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }


def test_export_card_has_a_program_that_gives_the_rewards(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(three, tmp_path / "out", layout)
    _, _, program = (tmp_path / "out/README.md").read_text().partition("```python\n")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(program.partition("```")[0], variables)
    expected = score_all(load_scorer(three, layout), [variables["conversation"]])
    np.testing.assert_allclose(variables["rewards"].numpy(), expected, atol=1e-4, rtol=0)
    assert np.abs(variables["logits"].numpy() - expected).max() > 1


@pytest.mark.parametrize(
    ("settings", "rules", "changes"),
    [
        # A class that runs the rules of tokenizer.json, and one that replaces them.
        ({"tokenizer_class": "GPT2TokenizerFast"}, {}, {}),
        (
            {"tokenizer_class": "GPT2TokenizerFast"},
            {"normalizer": {"type": "Lowercase"}},
            {"tokenizer_class": "PreTrainedTokenizerFast"},
        ),
        # Code that an export does not have.
        (
            {
                "tokenizer_class": "XTokenizer",
                "auto_map": {"AutoTokenizer": ["x.XTokenizer", None]},
            },
            {},
            {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": None},
        ),
        # transformers 4 reads a list only under the other key.
        (
            {"tokenizer_class": "GPT2TokenizerFast", "extra_special_tokens": ["<|im_end|>"]},
            {},
            {"extra_special_tokens": None, "additional_special_tokens": ["<|im_end|>"]},
        ),
    ],
    ids=["plain", "other_rules", "code", "special_tokens"],
)
def test_exported_tokenizer_loads_in_both_versions_of_transformers(
    tokenizer: Any,
    tmp_path: Path,
    settings: dict[str, Any],
    rules: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    for name in ("source", "out"):
        (tmp_path / name).mkdir()
    tokenizer.save(tmp_path / "source")
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    edit(tmp_path / "source", "tokenizer_config.json", **inputs, **settings)
    edit(tmp_path / "source", "tokenizer.json", **rules)
    source = load_tokenizer(tmp_path / "source")
    write_tokenizer(tmp_path / "out", source, Contracts(source)(), source.pad_token)
    before, after = (
        config_of(tmp_path / name, "tokenizer_config.json") for name in ("source", "out")
    )
    assert after == {key: v for key, v in {**before, **changes}.items() if v is not None}
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    text = "The CAT<|im_end|> 12"
    assert loaded(text, add_special_tokens=False).input_ids == source.encode(text)


def test_export_takes_another_template_out_of_the_tokenizers_settings(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Older tokenizers have the template in their settings, from which it is removed."""
    for name in ("old", "out"):
        (tmp_path / name).mkdir()
    tokenizer.save(tmp_path / "old")
    (tmp_path / "old" / "chat_template.jinja").unlink()
    edit(tmp_path / "old", "tokenizer_config.json", chat_template="{{ messages }}")
    old = load_tokenizer(tmp_path / "old")
    assert old.chat_template == "{{ messages }}"
    contract = replace(Contracts(old)(), template="")
    write_tokenizer(tmp_path / "out", old, contract, old.pad_token)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None


def test_export_has_the_template_bos_and_eos_of_the_contract(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    plain, bare = BUILT_IN_TEMPLATES["plain"], {"template": "", "add_bos": True, "add_eos": True}
    bare |= dict.fromkeys(("reward_mean", "reward_std", "measured_on"))
    for name, contract, texts in (("plain", {"template": plain}, 7), ("none", bare, 3)):
        save_again(three, tmp_path / f"{name}.nemo", layout, **contract)
        assert export(tmp_path / f"{name}.nemo", tmp_path / name, layout).texts == texts
    assert (tmp_path / "plain/chat_template.jinja").read_text() == plain
    assert not (tmp_path / "none/chat_template.jinja").exists()
    card = (tmp_path / "none/README.md").read_text()
    assert "no chat template" in card
    assert "Higher is better. It was converted by nemo_aligner from `" in card
    assert 'texts = [tokenizer.bos_token + "a text" + tokenizer.eos_token]' in card


def without_a_pad_token(folder: Path, specials: tuple[str, ...]) -> None:
    """Make EOS the pad token, as in many tokenizers, and make only ``specials`` special."""
    edit(folder, "tokenizer_config.json", pad_token="<|im_end|>")
    tokens = config_of(folder, "tokenizer.json")["added_tokens"]
    remaining = [token for token in tokens if token["content"] in specials]
    edit(folder, "tokenizer.json", added_tokens=remaining)


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("specials", "rows", "pad", "pad_id", "vocab_size"),
    [
        (SPECIALS, 320, "<|endoftext|>", 0, 320),
        # There is no unused token, so the next row, or an additional one, is for a new token.
        (SPECIALS[1:], None, "<|pad|>", None, None),
        (SPECIALS[1:], 340, "<|pad|>", None, 340),
    ],
)
def test_export_pads_with_another_token_than_eos(
    specials: tuple[str, ...],
    rows: int | None,
    pad: str,
    pad_id: int | None,
    vocab_size: int | None,
    layout: Any,
    tmp_path: Path,
) -> None:
    tiny.write_tokenizer(tmp_path / "words")
    words = load_tokenizer(tmp_path / "words").vocab_size
    tiny.write_hf_reward_model(tmp_path / "hf", vocab_size=rows or words)
    without_a_pad_token(tmp_path / "hf", specials)
    convert(tmp_path / "hf", tmp_path / "rm.nemo")
    summary = export(tmp_path / "rm.nemo", tmp_path / "out", layout)
    wanted_id = words if pad_id is None else pad_id
    config = config_of(tmp_path / "out")
    assert summary.pad_token == pad
    assert config["pad_token_id"] == wanted_id != config["eos_token_id"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (pad, wanted_id)
    assert config["vocab_size"] == (vocab_size or words + 1)
    embeddings = tensors_of(tmp_path / "out")["model.embed_tokens.weight"]
    assert embeddings.shape[0] == config["vocab_size"]
    original = (tmp_path / "hf/tokenizer.json").read_bytes()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == original
    again = convert(tmp_path / "out", tmp_path / "again.nemo")
    assert again.contract == summary.contract


def test_export_merged_gives_the_weighted_sum(three: Path, layout: Any, tmp_path: Path) -> None:
    summary = export(three, tmp_path / "out", layout, merge=True)
    constant = sum(weight * mean for weight, mean in zip(WEIGHTS, MEANS, strict=True))
    assert summary.contract.attributes == ("reward",)
    assert summary.contract.label_means == pytest.approx((constant,))
    assert f"Add {{'reward': {constant}}}" in str(summary)
    config = config_of(tmp_path / "out")
    assert (config["id2label"], config["label_means"]) == ({"0": "reward"}, {"reward": constant})
    # A conversion of the export has the same contract, with its constant.
    convert(tmp_path / "out", tmp_path / "merged.nemo")
    texts = ["the cat sleeps", "a dog"]
    parts, merged = (
        score_all(load_scorer(path, layout), texts) for path in (three, tmp_path / "merged.nemo")
    )
    np.testing.assert_allclose(merged, parts @ np.array(WEIGHTS)[:, None], atol=1e-4, rtol=0)


def test_export_in_bf16_is_rounded_once(three: Path, layout: Any, tmp_path: Path) -> None:
    summary = export(three, tmp_path / "out", layout, dtype=torch.bfloat16)
    assert summary.contract.dtype == summary.dtype == "bf16"
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    card = (tmp_path / "out/README.md").read_text()
    assert "trained in fp32 and is rounded to bf16 here" in card
    expected = tensors_of(three.parent / "hf")
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_same(tensors_of(tmp_path / "out"), {**rounded, "score.weight": expected["score.weight"]})
    assert convert(tmp_path / "out", tmp_path / "rm.nemo").contract == summary.contract


def test_router_stays_fp32_and_further_layers_are_dropped(layout: Any, tmp_path: Path) -> None:
    """transformers reads weight and bias of the router in fp32, whatever dtype it is asked for.

    GLM-4.5's files have a layer behind the last one, which predicts further tokens.
    """
    families.write_reward_model(tmp_path / "hf", "glm4_moe", torch.float32)
    edit_tensors(tmp_path / "hf", {"model.layers.4.eh_proj.weight": torch.ones(2, 2)})
    summary = convert(tmp_path / "hf", tmp_path / "rm.nemo", dtype=torch.bfloat16)
    assert "dropped: 1 tensors model.layers.4.*" in str(summary)
    assert "parameters in bf16" in str(summary)
    source = tensors_of(tmp_path / "hf")
    export(tmp_path / "rm.nemo", tmp_path / "back", layout, dtype=torch.bfloat16)
    exported = tensors_of(tmp_path / "back")
    assert exported["model.layers.2.self_attn.o_proj.weight"].dtype is torch.bfloat16
    theirs = families.classifier(families.hf_config("glm4_moe"))
    read = theirs.from_pretrained(tmp_path / "back", dtype=torch.bfloat16).state_dict()
    for name, key in (("expert_bias", "e_score_correction_bias"), ("weight", "weight")):
        hf_name = f"model.layers.2.mlp.gate.{key}"
        expected = source[hf_name]
        assert not torch.equal(expected, expected.bfloat16().float())
        with open_nemo(tmp_path / "rm.nemo") as folder:
            stored = folder.store.read(f"model.decoder.layers.2.mlp.router.{name}")
        for tensor in (stored, exported[hf_name], read[hf_name]):
            assert tensor.dtype is torch.float32
            assert torch.equal(tensor, expected)


def test_export_shards_are_no_larger_than_asked_for(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveBytes()
    monkeypatch.setattr(TensorStore, "read", live.watch(TensorStore.read))
    summary = export(three, tmp_path / "out", layout, max_shard_bytes=100_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert summary.shards == len(files) > 5
    index = config_of(tmp_path / "out", "model.safetensors.index.json")
    assert {path.name for path in files} == set(index["weight_map"].values())
    expected = tensors_of(three.parent / "hf")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for path in files:
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 100_000
    assert_same(tensors_of(tmp_path / "out"), expected)
    # For each shard: its size and that of the next shard's first tensor exceed the limit.
    assert live.total > 600_000
    assert live.peak < 250_000


def damage_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ShardWriter.add

    def damaged(self: Any, name: str, tensor: Tensor) -> None:
        add(self, name, tensor * 1.01 if name.endswith("2.mlp.up_proj.weight") else tensor)

    monkeypatch.setattr(ShardWriter, "add", damaged)


def lose_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ShardWriter.add
    monkeypatch.setattr(
        ShardWriter, "add", lambda self, name, tensor: "norm" in name or add(self, name, tensor)
    )


def damage_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    write = hf_export.write_tokenizer

    def damaged(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        edit(folder, "tokenizer.json", normalizer={"type": "Lowercase"})

    monkeypatch.setattr(hf_export, "write_tokenizer", damaged)


def damage_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_export, "choose_pad", lambda *_: ("<|endoftext|>", 2))


def test_export_that_transformers_reads_otherwise_fails_and_leaves_nothing(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damages: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
        (damage_tensor, "transformers scores .* .* the tolerance is 0.0001"),
        (lose_tensor, "other tensors than the exported files.*norm"),
        (damage_tokenizer, "transformers tokenizes .* but the scoring contract"),
        (damage_pad, "pad token: .* the id 0 .* has 2"),
    ]
    with refusals() as refused:
        for damage, pattern in damages:
            with monkeypatch.context() as patch, refused(pattern, pattern):
                damage(patch)
                export(three, tmp_path / "out" / "hf", layout)
    assert not list((tmp_path / "out").iterdir())


def test_export_refuses_what_has_no_place_or_would_be_overwritten(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    base = tiny.write_base_nemo(tmp_path / "base.nemo", tie_word_embeddings=False)
    bias = with_tensor(three, "model.rm_head.bias", tmp_path / "bias.nemo")
    router = with_tensor(three, "model.decoder.layers.mlp.router.weight", tmp_path / "router.nemo")
    with refusals() as refused:
        for archive, output, pattern in (
            (three, "there", "it exists already"),
            (three, "file/out", r"file/out: cannot be written"),
            (base, "out", r"base\.nemo: it is a base model without a reward head"),
            (bias, "out", "its reward head has a bias"),
            (router, "out", r"do not belong to the model.*router\.weight"),
        ):
            with refused(pattern, pattern):
                export(archive, tmp_path / output, layout)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def with_tensor(archive: Path, key: str, path: Path) -> Path:
    """Copy the archive with an additional tensor."""
    with open_nemo(archive) as folder:
        tensors = {
            name: LazyTensor(shape, dtype, partial(folder.store.read, name))
            for name, (shape, dtype) in folder.store.tensors.items()
        }
        tensors[key] = LazyTensor((3,), torch.float32, partial(torch.zeros, 3))
        weights = path.with_suffix(".weights")
        shutil.rmtree(weights, ignore_errors=True)
        save_lazy(tensors, {}, weights)
        write_nemo(path, folder.config, weights, folder.tokenizer, folder.contract)
    return path


def test_export_verb_reports_and_fails_clearly(three: Path, tmp_path: Path) -> None:
    verb, output = "export", str(tmp_path / "out")
    arguments = ("--input", str(three), "--output", output, "--dtype", "bf16", "--merge")
    done = tiny.run_verb(verb, *arguments, "--max-shard-size", "0.1mb")
    assert "LlamaForSequenceClassification with the output reward, weights in bf16" in done.stdout
    assert "WARNING: the logits are not the rewards" in done.stdout
    failed = tiny.run_verb(verb, *arguments, check=False)
    assert failed.returncode == 1
    assert "CheckpointError: " in failed.stderr
    assert "it exists" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "Loading weights" not in done.stderr
    wrong = tiny.run_verb(verb, *arguments, "--max-shard-size", "5", check=False)
    assert wrong.returncode == 2
    assert "wanted for example 5GB" in wrong.stderr


@pytest.mark.parametrize(
    ("output", "adapter_of", "problem"),
    [
        ("rm.gguf", None, r"max_shard_bytes: got 9, but the output is a \.gguf file"),
        ("adapter", "base", "max_shard_bytes: got 9, but the output is a peft adapter"),
        ("adapter", __file__, r"adapter_of: .* is a file; wanted the base model as peft loads it"),
    ],
)
def test_options_of_an_export_that_do_not_fit_are_refused(
    tmp_path: Path, output: str, adapter_of: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        export_archive(
            tmp_path / "rm.nemo",
            tmp_path / output,
            dtype=None,
            merge=False,
            head=None,
            adapter_of=adapter_of,
            max_shard_bytes=None if adapter_of == __file__ else 9,
            base_license="unknown",
        )
