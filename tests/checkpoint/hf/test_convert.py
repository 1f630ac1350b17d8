"""Conversion: the logits, rewards and tokens of transformers, and refusals that name the reason."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from nemo_aligner.checkpoint.hf import source as hf_source
from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, read_text_rules
from nemo_aligner.checkpoint.weights import load_weights
from nemo_aligner.checkpoint.weights.save import _ReadingPlanner
from nemo_aligner.config.common import Precision
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import (
    NAMES,
    REWARD_CASES,
    LiveBytes,
    check_refused,
    config_edits,
    config_of,
    edit,
    edit_tensors,
    export,
    tensors_of,
)
from tests.checkpoint.refusals import overwrite, refusals
from tests.harness import tiny
from tests.harness.families import LLAMA3_ROPE

pytestmark = pytest.mark.usefixtures("layout")

INDEX = "model.safetensors.index.json"


def megatron_logits(path: Path, tokens: Tensor) -> Tensor:
    """Logits of megatron-core's own GPTModel, loaded from a ``.nemo``."""
    same = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "kv_channels", "layernorm_epsilon",
    )  # fmt: skip
    off = (
        "add_bias_linear", "gradient_accumulation_fusion", "masked_softmax_fusion",
        "bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm",
    )  # fmt: skip
    with open_nemo(path) as folder:
        shape = folder.config
        model = GPTModel(
            TransformerConfig(
                **{key: shape[key] for key in same},
                **dict.fromkeys(off, False),
                normalization="RMSNorm",
                gated_linear_unit=True,
                activation_func=F.silu,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
            ),
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=384,
            max_sequence_length=shape["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=shape["rotary_base"],
            share_embeddings_and_output_weights=shape["share_embeddings_and_output_weights"],
        ).eval()
        state = load_weights(model.sharded_state_dict(prefix="model."), folder.weights)
        model.load_state_dict({key.removeprefix("model."): state[key] for key in state})
    if shape["scale_positional_embedding"]:
        rope = model.rotary_pos_emb
        rope.inv_freq = rope._apply_scaling(
            rope.inv_freq,
            factor=shape["scale_factor"],
            low_freq_factor=shape["low_freq_factor"],
            high_freq_factor=shape["high_freq_factor"],
            original_max_position_embeddings=shape["old_context_len"],
        )
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, positions, future)[..., : shape["vocab_size"]]


def test_conversion_has_the_logits_of_transformers(tmp_path: Path) -> None:
    """In megatron-core's own model, as NeMo would read it; the output layer included."""
    tokens = torch.randint(
        0, tiny.SHAPE["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(1)
    )
    for case, changes in {
        "tied": {"num_key_value_heads": 4},
        "untied": {"tie_word_embeddings": False},
        "llama3": {"rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    }.items():
        path = tiny.write_base_nemo(tmp_path / f"{case}.nemo", **changes)
        theirs = LlamaForCausalLM.from_pretrained(path.with_suffix(".hf")).eval()
        with torch.no_grad():
            wanted = theirs(tokens).logits
        assert wanted.std() > 0.1
        torch.testing.assert_close(megatron_logits(path, tokens), wanted, atol=2e-5, rtol=1e-4)


def test_conversion_says_and_keeps_what_was_converted(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    count = LlamaForCausalLM.from_pretrained(base_checkpoint).num_parameters()
    for dtype, name, precision in ((None, "fp32", 32), (torch.bfloat16, "bf16", "bf16")):
        output = tmp_path / name / "base.nemo"
        summary = convert(base_checkpoint, output, dtype)
        assert f"llama base model, {count:,} parameters in {name}, 4 layers of 64" in str(summary)
        assert list(output.parent.iterdir()) == [output]
        with open_nemo(output) as folder:
            assert folder.config["vocab_size"] == tiny.SHAPE["vocab_size"]
            assert folder.config["precision"] == precision
            assert folder.contract is None
            stored = {dtype for _, dtype in folder.store.tensors.values()}
            assert stored == {dtype or torch.float32}
            carried = {file.name: file.read_bytes() for file in folder.tokenizer.iterdir()}
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= carried.keys()
        assert carried == {name: (base_checkpoint / name).read_bytes() for name in carried}


def test_conversion_of_shards_and_old_rope_keys_is_the_same(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    sharded = tmp_path / "sharded"
    model = LlamaForCausalLM.from_pretrained(base_checkpoint)
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    tiny.write_tokenizer(sharded)
    edit(sharded, rope_parameters=None, rope_theta=10000.0)
    found = []
    for source in (base_checkpoint, sharded):
        with open_nemo(convert(source, tmp_path / f"{source.name}.nemo").output) as folder:
            tensors = dist_checkpointing.load_plain_tensors(str(folder.weights))
            found.append((folder.config, tensors))
    (config, tensors), (other_config, others) = found
    assert config == other_config
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)


def test_conversion_verb_reports_and_fails_clearly(base_checkpoint: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "base.nemo")
    arguments = ("--input", str(base_checkpoint), "--output", output)
    done = tiny.run_verb("convert", *arguments, env={"HF_HUB_OFFLINE": "1"})
    assert "base.nemo: llama" in done.stdout
    failed = tiny.run_verb("convert", "--input", "nowhere", "--output", output, check=False)
    assert failed.returncode == 1
    assert "CheckpointError: nowhere" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_conversion_overwrites_nothing_and_takes_a_parallel_size_from_1_on(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.nemo"
    mine.write_text("precious")
    with refusals() as refused:
        for output, tensor_parallel, pattern in (
            (mine, 1, r"mine\.nemo: it exists"),
            (mine / "base.nemo", 1, r"mine\.nemo/base\.nemo: cannot be written"),
            (tmp_path / "base.nemo", 0, "tensor_parallel: got 0, wanted 1"),
            (tmp_path / "base.nemo", -2, "tensor_parallel: got -2, wanted 1"),
        ):
            with refused(pattern, pattern):
                convert(base_checkpoint, output, tensor_parallel=tensor_parallel)
    assert mine.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("case", REWARD_CASES)
def test_conversion_has_the_rewards_of_transformers(case: str, layout: Any, tmp_path: Path) -> None:
    tiny.write_hf_reward_model(tmp_path / "hf", **REWARD_CASES[case])
    tensor_parallel = 2 if case == "zero_groups" else 1
    summary = convert(tmp_path / "hf", tmp_path / "rm.nemo", tensor_parallel=tensor_parallel)
    assert summary.zero_groups == tensor_parallel - 1
    scorer = load_scorer(tmp_path / "rm.nemo", layout)
    rng = random.Random(3)
    texts: list = [tiny.sentence(rng, 1, 30) for _ in range(5)]
    conversation = [
        {"role": "user", "content": "what is good"},
        {"role": "assistant", "content": "the house"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    written = [*texts, tokenizer.apply_chat_template(conversation, tokenize=False)]
    batch = tokenizer(written, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = model(batch.input_ids, attention_mask=batch.attention_mask).logits.numpy()
    assert wanted.std() > 0.1
    got = score_all(scorer, [*texts, conversation])
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=1e-5)


def test_conversion_reads_tensors_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_hf_reward_model(tmp_path / "hf", num_hidden_layers=16)
    read, joined = LiveBytes(), LiveBytes()
    monkeypatch.setattr(hf_source, "read_tensor", read.watch(hf_source.read_tensor))
    lookup = _ReadingPlanner.lookup_object
    monkeypatch.setattr(_ReadingPlanner, "lookup_object", joined.watch(lookup))
    convert(tmp_path / "hf", tmp_path / "rm.nemo")
    stored = (tmp_path / "hf/model.safetensors").stat().st_size
    assert read.total > 0.9 * stored
    assert joined.total > 0.9 * stored
    layer = stored / 18
    assert read.peak < 3 * layer
    # torch's writer keeps the last tensor of every key.
    assert joined.peak < 5 * layer
    assert read.now == 0


def test_conversion_refuses_a_base_model_that_cannot_be_carried(changed_base: Path) -> None:
    """By its settings, which the table of every family has besides, or by the files it lacks."""
    settings = config_edits(
        ({"model_type": "mamba"}, "model_type: got 'mamba', wanted one of: llama"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"mlp_bias": True}, "mlp_bias: got True"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"sliding_window": 128}, "sliding_window: got 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type: got 'mrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor: got 0\.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got None"),
        ({"num_hidden_layers": 5}, r"9 tensors are missing, the first is model\.layers\.4"),
        ({"num_hidden_layers": 3}, r"9 tensors have no place .* is model\.layers\.3"),
        ({"tie_word_embeddings": False}, r"1 tensors are missing, the first is lm_head\.weight"),
    )
    index = json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}})
    files = [
        (partial(lose, name="config.json"), r"config\.json"),
        (partial(lose, name="model.safetensors"), r"pickled weights \(\.bin\) are not read"),
        (partial(lose, name="tokenizer.json"), r"no tokenizer\.json"),
        (overwrite("model.safetensors", b"\x10" * 100), r"model\.safetensors"),
        (partial(only_index, content=index), "wanted file names in the same folder"),
    ]
    check_refused(changed_base, [*settings, *files])
    check_refused(changed_base, [(lambda folder: None, "a base model has none")], seq_length=100)


def lose(folder: Path, name: str) -> None:
    (folder / name).unlink()


def only_index(folder: Path, content: str) -> None:
    """An index without the whole file, which would be read in its place."""
    lose(folder, "model.safetensors")
    (folder / INDEX).write_text(content)


def test_conversion_of_no_checkpoint_is_directed_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.nemo").touch()
    for folder, name in (("adapter", "adapter_config.json"), ("nothing", "other.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    for name, pattern in (
        ("model.nemo", r"got a \.nemo, which training and serving take"),
        ("adapter", r"got an adapter .*its base first"),
        ("nothing", r"got no config\.json; wanted a checkpoint folder"),
    ):
        source = tmp_path / name
        with pytest.raises(CheckpointError, match=pattern) as caught:
            convert(source, tmp_path / "base.nemo")
        assert str(caught.value).count(str(source)) == 1


def test_conversion_reads_the_shards_of_the_index(changed_reward: Path, tmp_path: Path) -> None:
    """Or the one file of the model, and no file of other tools beside them."""
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
        (partial(edit, name=INDEX, weight_map=[1]), r"index\.json: got no weight_map"),
        (partial(lose, name=second), second),
        (lambda folder: cut(folder / first), rf"{first}: "),
    ]
    check_refused(changed_reward, damages)


def test_conversion_of_a_folder_that_was_saved_twice_reads_what_transformers_reads(
    changed_reward: Path, layout: Any, tmp_path: Path
) -> None:
    """The whole file, if other weights are in shards next to it; or the file of the config."""
    model = AutoModelForSequenceClassification.from_pretrained(changed_reward).eval()
    whole = changed_reward / "model.safetensors"
    moved = whole.rename(tmp_path / "whole")
    model.score.weight.data *= -3
    model.save_pretrained(changed_reward, max_shard_size="200KB")
    moved.rename(whole)
    for name, settings in (
        ("model.safetensors", {}),
        (INDEX, {"transformers_weights": INDEX}),
    ):
        edit(changed_reward, **settings)
        theirs = AutoModelForSequenceClassification.from_pretrained(changed_reward).eval()
        tokenizer = AutoTokenizer.from_pretrained(changed_reward)
        with torch.no_grad():
            wanted = theirs(**tokenizer("the cat sings", return_tensors="pt")).logits.numpy()
        summary = convert(changed_reward, tmp_path / f"{name}.nemo")
        assert (f"note: read {whole.name}, as transformers does, and not" in str(summary)) == (
            not settings
        )
        got = score_all(load_scorer(tmp_path / f"{name}.nemo", layout), ["the cat sings"])
        np.testing.assert_allclose(got, wanted, atol=1e-4)
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
    """A token that tokenizer.json lacks is one token, not its letters."""
    tiny.write_hf_checkpoint(changed_base, vocab_size=tiny.SHAPE["vocab_size"] + 4)
    file, rows = changed_base / "tokenizer.json", tiny.SHAPE["vocab_size"]
    before = file.read_bytes()
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    known = config_of(changed_base, "tokenizer.json")["added_tokens"]
    by_id = {token.pop("id"): token for token in known}
    extra = {"content": "<step>", **rules, "special": True}
    # Of a token that stands in both, the rules of the config.
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
        wanted = theirs(text, add_special_tokens=False).input_ids
        assert max(wanted) >= rows
        with open_nemo(convert(changed_base, tmp_path / f"{number}.nemo").output) as folder:
            assert folder.load_tokenizer().encode(text) == wanted, case
    assert file.read_bytes() == before
    (changed_base / "tokenizer_config.json").write_text(
        json.dumps({**plain, "extra_special_tokens": None, "additional_special_tokens": None})
    )
    (changed_base / "added_tokens.json").write_text(json.dumps({"<step>": rows}))
    wanted = AutoTokenizer.from_pretrained(changed_base)(text).input_ids
    assert rows in wanted
    with open_nemo(convert(changed_base, tmp_path / "older.nemo").output) as folder:
        assert folder.load_tokenizer().encode(text) == wanted
    of_config = partial(edit, name="tokenizer_config.json")
    damages = [
        (partial(of_config, added_tokens_decoder=[1]), r"got \[1\], wanted tokens by"),
        (partial(of_config, added_tokens_decoder={"1": 2}), "got 2, wanted a token"),
        (partial(edit, name="added_tokens.json", **{"<a>": "b"}), "wanted ids by token"),
        (partial(of_config, extra_special_tokens=3), "got 3, wanted a list"),
    ]
    check_refused(changed_base, damages)


def test_conversion_takes_a_wrapper_out_of_the_names_of_tensors(
    changed_reward: Path, tmp_path: Path
) -> None:
    """A full fine-tune that was saved from torch.compile, DDP, FSDP or peft's wrapper."""
    tensors = tensors_of(changed_reward)
    wanted = convert(changed_reward, tmp_path / "plain.nemo")

    def rename(folder: Path, change: Callable[[str], str]) -> None:
        renamed = {change(name): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})

    for number, prefix in enumerate(
        ("_orig_mod.", "module.", "module._orig_mod.", "base_model.model.", "_orig_mod.module.")
    ):
        rename(changed_reward, lambda name, prefix=prefix: prefix + name)
        summary = convert(changed_reward, tmp_path / f"{number}.nemo")
        assert f"{len(tensors)} tensors have a wrapper's prefix: read {prefix}" in str(summary)
        assert (summary.contract, summary.head) == (wanted.contract, wanted.head)
    inside = ".layers.{}._fsdp_wrapped_module._checkpoint_wrapped_module."
    rename(
        changed_reward,
        lambda name: re.sub(r"\.layers\.(\d+)\.", lambda found: inside.format(found[1]), name),
    )
    assert convert(changed_reward, tmp_path / "inside.nemo").contract == wanted.contract
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
            r"got it next to another one of score\.weight",
        ),
    ]
    check_refused(changed_reward, refused)


def test_conversion_of_a_body_alone_needs_no_output_layer(layout: Any, tmp_path: Path) -> None:
    """Saved by AutoModel; or a reward model's, whose embeddings are not tied to one either."""
    tiny.write_hf_reward_model(tmp_path / "reward", tie_word_embeddings=False)
    body = AutoModel.from_pretrained(tmp_path / "reward")
    body.save_pretrained(tmp_path / "body")
    tiny.write_tokenizer(tmp_path / "body")
    assert "layers.0.mlp.up_proj.weight" in tensors_of(tmp_path / "body")
    found = []
    for name, head in (("reward", "none"), ("body", None)):
        summary = convert(tmp_path / name, tmp_path / f"{name}.nemo", head=head)
        assert "untied embeddings" in str(summary)
        with open_nemo(tmp_path / f"{name}.nemo") as folder:
            assert folder.contract is None
            assert not folder.config["share_embeddings_and_output_weights"]
            found.append(dist_checkpointing.load_plain_tensors(str(folder.weights)))
    of_reward, of_body = found
    assert of_reward.keys() == of_body.keys()
    assert all(torch.equal(of_reward[key], of_body[key]) for key in of_body)
    start = load_pretrained(
        tmp_path / "reward.nemo", layout, num_attributes=1, precision=Precision.fp32
    )
    assert start.head_is_new
    edit(tmp_path / "reward", architectures=["LlamaForCausalLM"])
    edit_tensors(tmp_path / "reward", {"score.weight": None})
    check_refused(tmp_path / "reward", [(lambda folder: None, r"first is lm_head\.weight")])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def test_conversion_of_a_hub_name_downloads_it(
    hub: Callable[..., Any], reward_checkpoint: Path, tmp_path: Path
) -> None:
    asked = hub(reward_checkpoint)
    assert convert("some-org/Tiny-RM", tmp_path / "rm.nemo").contract is not None
    assert asked["name"] == "some-org/Tiny-RM"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


def test_conversion_without_a_network_reads_the_cache_of_the_hub(
    reward_checkpoint: Path, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "home/hub/models--some-org--Tiny-RM"
    shutil.copytree(reward_checkpoint, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit)
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    options = ("--output", str(tmp_path / "out/rm.nemo"), "--input")
    lost = tiny.run_verb("convert", *options, "some-org/Lost", env=environment, check=False)
    assert lost.returncode == 1
    assert "CheckpointError: some-org/Lost: there is no such folder, and the hub" in lost.stderr
    assert "Traceback" not in lost.stderr
    assert not (tmp_path / "out").exists()
    done = tiny.run_verb("convert", *options, "some-org/Tiny-RM", env=environment)
    assert "llama reward model of reward" in done.stdout


def test_contract_is_made_of_the_folder(tmp_path: Path) -> None:
    tiny.write_hf_reward_model(tmp_path / "one")
    summary = convert(tmp_path / "one", tmp_path / "one.nemo", dtype=torch.bfloat16)
    _, contract = read_text_rules(tmp_path / "one.nemo")
    assert contract == summary.contract
    assert contract.attributes == ("reward",)
    assert (contract.reward_model_type, contract.dtype) == ("binary_ranking", "bf16")
    assert (contract.attribute_weights, contract.label_means) == ((1.0,), (0.0,))
    assert (contract.template, contract.seq_length) == (tiny.CHATML, 256)
    assert f"reward model of reward, {summary.parameters:,} parameters in bf16" in str(summary)
    assert contract.hash in str(summary)
    with open_nemo(tmp_path / "one.nemo") as folder:
        dtypes = {key: dtype for key, (_, dtype) in folder.store.tensors.items()}
        assert folder.config["reward_model_type"] == "binary_ranking"
    assert dtypes.pop("model.rm_head.weight") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}

    named = {"id2label": dict(enumerate(NAMES)), "max_position_embeddings": 9000}
    tiny.write_hf_reward_model(tmp_path / "three", labels=3, **named)
    three = convert(tmp_path / "three", tmp_path / "three.nemo").contract
    assert (three.attributes, three.reward_model_type) == (NAMES, "regression")
    assert three.seq_length == 4096
    given = {"template": "plain", "seq_length": 77, "attributes": ("a", "b", "c")}
    other = convert(tmp_path / "three", tmp_path / "other.nemo", **given).contract
    assert (other.seq_length, other.attributes) == (77, ("a", "b", "c"))
    assert other.template != three.template


def test_contract_template_has_to_write_the_conversation(
    changed_reward: Path, tmp_path: Path
) -> None:
    """Else every reply would be the same text, and have the same reward."""
    name = "chat_template.jinja"
    hello = overwrite(name, "hello world")
    check_refused(changed_reward, [(hello, "writes 'hello world', without .*'a question'")])
    hello(changed_reward)
    given = convert(changed_reward, tmp_path / "given.nemo", template="chatml")
    assert "hello" not in given.contract.template
    lose(changed_reward, name)
    assert "raw texts only" in str(convert(changed_reward, tmp_path / "none.nemo"))
    refused = [(lambda folder: None, "template: got 'tokenizer', but the tokenizer")]
    check_refused(changed_reward, refused, template="tokenizer")
    refused = [(lambda folder: None, r"attributes: got \['a', 'b'\], wanted 1")]
    check_refused(changed_reward, refused, attributes=("a", "b"))


def test_template_that_writes_the_date_writes_one_day_wherever_it_goes(
    changed_reward: Path, layout: Any, tmp_path: Path
) -> None:
    """In the archive, the folder as transformers runs it, and an export."""
    own = "{{ 'Today ' ~ strftime_now('%d %b %Y') ~ '\\n' }}" + tiny.CHATML
    overwrite("chat_template.jinja", own)(changed_reward)
    summary = convert(changed_reward, tmp_path / "rm.nemo")
    assert convert(changed_reward, tmp_path / "again.nemo").contract.hash == summary.contract.hash
    tokenizer, contract = read_text_rules(str(tmp_path / "rm.nemo"))
    assert contract is not None
    said = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "the house"}]
    ids = contract.encode(tokenizer, said).token_ids
    assert tokenizer.decode(ids).startswith("Today 26 Jul 2024\n")
    assert load_hf_reward_model(str(changed_reward), None, 8192).encode(said).token_ids == ids
    export(tmp_path / "rm.nemo", tmp_path / "exported", layout)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = theirs.apply_chat_template(said, tokenize=False)
    assert theirs(text, add_special_tokens=False).input_ids == ids
    back = convert(tmp_path / "exported", tmp_path / "back.nemo").contract
    assert back.hash == contract.hash


def test_conversion_refuses_a_reward_model_that_does_not_fit(changed_reward: Path) -> None:
    settings = config_edits(
        ({"id2label": {"0": "a", "1": "b"}}, r"got shape \[1, 64\], wanted \[2, 64\]"),
        ({"id2label": {"zero": "a"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"id2label": [float("inf")]}, r"id2label: got \[inf\], wanted names for the numbers"),
        ({"id2label": None, "num_labels": "two"}, r"num_labels: got 'two' and 1 rows"),
        ({"id2label": None, "num_labels": 2}, r"num_labels: got 2 and 1 rows"),
        ({"architectures": {"a": "b"}}, r"architectures: got .*, wanted a list"),
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"problem_type": "single_label_classification"}, r"a classifier are no rewards"),
        ({"is_causal": False}, r"is_causal: got False, which is not supported"),
    )
    layer = "model.layers.1.self_attn.k_proj.weight"
    whole = torch.zeros(128, 64, dtype=torch.int8)
    tensors = [
        ({"score.bias": torch.zeros(2)}, r"score\.bias: got shape \[2\], wanted \[1\]"),
        ({"score.weight": torch.tensor(1.0)}, r"score\.weight: got shape \[\], wanted \[1, 64\]"),
        ({"score.weight": None}, r"LlamaForSequenceClassification without score\.weight"),
        ({"score.weight": torch.zeros(2, 64)}, r"got shape \[2, 64\], wanted \[1, 64"),
        ({"gate.weight": torch.zeros(1, 64)}, r"no place in a llama model.* gate\.weight"),
        ({layer: torch.zeros(64, 64)}, rf"{layer}: got shape \[64, 64\], wanted \[32, 64\]"),
        ({"model.layers.3.mlp.up_proj.weight": whole}, r"3\.mlp\.up_proj\.weight: got I8 numbers"),
    ]
    told = "1 of 2048 values that are NaN or infinite in float32, the first at "
    for value in (math.nan, math.inf, -math.inf):
        damaged = torch.zeros(32, 64)
        damaged[3, 5] = value
        tensors.append(({layer: damaged}, rf"/model\.safetensors: {layer}: got {told}\[3, 5\]"))
    nothing = {"score.weight": torch.full((1, 64), math.nan)}
    tensors.append((nothing, r"score\.weight: got 64 of 64 values that"))
    changes = [(partial(edit_tensors, changes=each), pattern) for each, pattern in tensors]
    changes.append((two_classes, r"problem_type: got none for the outputs \['no', 'yes'\], which"))
    tokens = config_of(changed_reward, "tokenizer.json")["added_tokens"]
    rows = tiny.SHAPE["vocab_size"]
    extra = [*tokens, {**tokens[0], "id": rows, "content": "<extra>"}]
    no_row = partial(edit, name="tokenizer.json", added_tokens=extra)
    told = rf"got ids up to {rows} \('<extra>' is {rows}\)"
    check_refused(changed_reward, [*settings, *changes, (no_row, told)])
    large = partial(edit_tensors, changes={layer: torch.full((32, 64), 1e5)})
    told = "values that are NaN or infinite in float16, which ends at 65504: try bf16"
    check_refused(changed_reward, [(large, told)], dtype=torch.float16)


def two_classes(folder: Path) -> None:
    edit_tensors(folder, {"score.weight": torch.zeros(2, 64)})
    edit(folder, id2label={"0": "no", "1": "yes"}, problem_type=None)


def test_conversion_of_several_outputs_that_are_named_or_stated_as_rewards(
    changed_reward: Path, tmp_path: Path
) -> None:
    two_classes(changed_reward)
    named = convert(changed_reward, tmp_path / "named.nemo", attributes=("no", "yes")).contract
    edit(changed_reward, problem_type="regression")
    assert convert(changed_reward, tmp_path / "stated.nemo").contract == named
    edit(changed_reward, problem_type="single_label_classification")
    refused = [(lambda folder: None, "problem_type: got 'single_label_class")]
    check_refused(changed_reward, refused, attributes=("no", "yes"))


def test_conversion_of_a_reward_model_leaves_out_an_output_layer(
    changed_reward: Path, tmp_path: Path
) -> None:
    tied = tensors_of(changed_reward)["model.embed_tokens.weight"].clone()
    edit_tensors(changed_reward, {"lm_head.weight": tied})
    for is_tied in (True, False):
        edit(changed_reward, tie_word_embeddings=is_tied)
        summary = convert(changed_reward, tmp_path / f"{is_tied}.nemo")
        assert summary.head.endswith("kept; left out: lm_head.weight")


def test_contract_has_the_widest_dtype_of_all_matrices(
    changed_reward: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(changed_reward)
    narrow = {name: tensors[name].bfloat16() for name in tensors}
    some = ("model.embed_tokens.weight", "model.norm.weight")
    edit_tensors(changed_reward, {name: narrow[name] for name in some})
    assert convert(changed_reward, tmp_path / "rm.nemo").contract.dtype == "fp32"
    edit_tensors(changed_reward, {n: data for n, data in narrow.items() if data.dim() == 2})
    assert convert(changed_reward, tmp_path / "narrow.nemo").contract.dtype == "bf16"


def test_contract_of_an_export_is_checked_on_the_way_back(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    export(three, folder, layout)
    labels = {**config_of(folder)["id2label"], "0": "other"}
    contract = partial(edit, name="scoring_contract.json", seq_length=9)
    normalizer = partial(edit, name="tokenizer.json", normalizer={"type": "NFC"})
    damages = [
        (contract, "was changed after"),
        (partial(edit, id2label=labels), "id2label: got"),
        (normalizer, "fingerprint: got"),
    ]
    check_refused(folder, damages)
    check_refused(folder, [(lambda folder: None, "it brings its own")], seq_length=9)
