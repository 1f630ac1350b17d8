"""Conversion: logits and rewards of transformers, and refusals that name the reason."""

from __future__ import annotations

import json
import math
import random
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
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from nemo_aligner.checkpoint.hf import source as hf_source
from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.hf.convert import read_config_and_limits
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.checkpoint.weights import load_weights
from nemo_aligner.checkpoint.weights.save import _ReadingPlanner
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
    lose,
    tensors_of,
    write_only_index,
)
from tests.checkpoint.refusals import overwrite, refusals
from tests.harness import tiny
from tests.harness.family_cases import LLAMA3_ROPE

pytestmark = pytest.mark.usefixtures("layout")


def megatron_logits(path: Path, tokens: Tensor) -> Tensor:
    """Compute the logits of megatron-core's own GPTModel, loaded from a ``.nemo``."""
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
    """megatron-core's own model, as NeMo would load it, has the same logits as transformers."""
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
            expected = theirs(tokens).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(megatron_logits(path, tokens), expected, atol=2e-5, rtol=1e-4)


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
    contents = []
    for source in (base_checkpoint, sharded):
        with open_nemo(convert(source, tmp_path / f"{source.name}.nemo").output) as folder:
            tensors = dist_checkpointing.load_plain_tensors(str(folder.weights))
            contents.append((folder.config, tensors))
    (config, tensors), (other_config, other_tensors) = contents
    assert config == other_config
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensors[key], other_tensors[key]) for key in tensors)


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
    existing = tmp_path / "mine.nemo"
    existing.write_text("precious")
    with refusals() as refused:
        for output, tensor_parallel, pattern in (
            (existing, 1, r"mine\.nemo: it exists"),
            (existing / "base.nemo", 1, r"mine\.nemo/base\.nemo: cannot be written"),
            (tmp_path / "base.nemo", 0, "tensor_parallel: got 0, wanted 1"),
            (tmp_path / "base.nemo", -2, "tensor_parallel: got -2, wanted 1"),
        ):
            with refused(pattern, pattern):
                convert(base_checkpoint, output, tensor_parallel=tensor_parallel)
    assert existing.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [existing]


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
        expected = model(batch.input_ids, attention_mask=batch.attention_mask).logits.numpy()
    assert expected.std() > 0.1
    actual = score_all(scorer, [*texts, conversation])
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-5)


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
    # torch's writer keeps the last tensor of every key in memory.
    assert joined.peak < 5 * layer
    assert read.now == 0


def test_conversion_refuses_a_base_model_that_cannot_be_carried(changed_base: Path) -> None:
    """Unsupported settings and missing files are refused."""
    settings = config_edits(
        ({"model_type": "mamba"}, "got 'mamba', which is not supported: state-space"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"mlp_bias": True}, "mlp_bias: got True"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"sliding_window": 128}, "sliding_window: got 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type: got 'mrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor: got 0\.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got None"),
        ({"num_hidden_layers": 5}, r"9 tensors of a .* missing, the first is model\.layers\.4"),
        ({"num_hidden_layers": 3}, r"9 tensors do not belong .* is model\.layers\.3"),
        (
            {"tie_word_embeddings": False},
            r"1 tensors of a .* missing, the first is lm_head\.weight",
        ),
    )
    index = json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}})
    files = [
        (partial(lose, name="config.json"), r"config\.json"),
        (partial(lose, name="model.safetensors"), r"Pickled weights \(\.bin\) are not supported"),
        (partial(lose, name="tokenizer.json"), r"no tokenizer\.json"),
        (overwrite("model.safetensors", b"\x10" * 100), r"model\.safetensors"),
        (partial(write_only_index, content=index), "wanted file names in the same folder"),
    ]
    check_refused(changed_base, [*settings, *files])
    check_refused(changed_base, [(lambda folder: None, "a base model has none")], seq_length=100)


def test_contract_is_made_of_the_folder(tmp_path: Path) -> None:
    tiny.write_hf_reward_model(tmp_path / "one")
    summary = convert(tmp_path / "one", tmp_path / "one.nemo", dtype=torch.bfloat16)
    _, contract = read_text_rules(tmp_path / "one.nemo")
    assert contract == summary.contract
    assert contract.attributes == ("reward",)
    assert (contract.reward_model_type, contract.dtype) == ("binary_ranking", "bf16")
    assert (contract.attribute_weights, contract.label_means) == ((1.0,), (0.0,))
    assert (contract.template, contract.seq_length) == (tiny.CHATML, 256)
    assert f"reward model with the output reward, {summary.parameters:,} parameters in bf16" in str(
        summary
    )
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
    # ``plan`` has only the folder's settings, and training starts from the conversion.
    assert read_config_and_limits(tmp_path / "three")[1] == (4096, "fp32")
    options = {"template": "plain", "seq_length": 77, "attributes": ("a", "b", "c")}
    other = convert(tmp_path / "three", tmp_path / "other.nemo", **options).contract
    assert (other.seq_length, other.attributes) == (77, ("a", "b", "c"))
    assert other.template != three.template


def test_contract_template_has_to_write_the_conversation(
    changed_reward: Path, tmp_path: Path
) -> None:
    """A template that omits the conversation is refused; all responses would score the same."""
    name = "chat_template.jinja"
    hello = overwrite(name, "hello world")
    check_refused(changed_reward, [(hello, "'hello world', without .*'a question'")])
    hello(changed_reward)
    with_template = convert(changed_reward, tmp_path / "given.nemo", template="chatml")
    assert "hello" not in with_template.contract.template
    lose(changed_reward, name)
    assert "raw texts only" in str(convert(changed_reward, tmp_path / "none.nemo"))
    refused = [(lambda folder: None, "template: got 'tokenizer', but the tokenizer")]
    check_refused(changed_reward, refused, template="tokenizer")
    refused = [(lambda folder: None, r"attributes: got \['a', 'b'\], wanted 1")]
    check_refused(changed_reward, refused, attributes=("a", "b"))


def test_template_that_writes_the_date_writes_one_day_wherever_it_goes(
    changed_reward: Path, layout: Any, tmp_path: Path
) -> None:
    """A template with today's date gets a fixed date: in archives, by transformers, in exports."""
    dated_template = "{{ 'Today ' ~ strftime_now('%d %b %Y') ~ '\\n' }}" + tiny.CHATML
    overwrite("chat_template.jinja", dated_template)(changed_reward)
    summary = convert(changed_reward, tmp_path / "rm.nemo")
    assert convert(changed_reward, tmp_path / "again.nemo").contract.hash == summary.contract.hash
    tokenizer, contract = read_text_rules(str(tmp_path / "rm.nemo"))
    assert contract is not None
    conversation = [
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": "the house"},
    ]
    ids = contract.encode(tokenizer, conversation).token_ids
    assert tokenizer.decode(ids).startswith("Today 26 Jul 2024\n")
    assert (
        load_hf_reward_model(str(changed_reward), None, 8192).encode(conversation).token_ids == ids
    )
    export(tmp_path / "rm.nemo", tmp_path / "exported", layout)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = theirs.apply_chat_template(conversation, tokenize=False)
    assert theirs(text, add_special_tokens=False).input_ids == ids
    back = convert(tmp_path / "exported", tmp_path / "back.nemo").contract
    assert back.hash == contract.hash


def test_conversion_refuses_a_reward_model_that_does_not_fit(changed_reward: Path) -> None:
    settings = config_edits(
        ({"id2label": {"0": "a", "1": "b"}}, r"got shape \[1, 64\], wanted \[2, 64\]"),
        ({"id2label": {"zero": "a"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"id2label": [float("inf")]}, r"id2label: got \[inf\], wanted names for the numbers"),
        ({"id2label": None, "num_labels": "two"}, r"num_labels: got 'two', but .* has 1 rows"),
        ({"id2label": None, "num_labels": 2}, r"num_labels: got 2, but .* has 1 rows"),
        ({"architectures": {"a": "b"}}, r"architectures: got .*, wanted a list"),
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"problem_type": "single_label_classification"}, r"a classifier are not rewards"),
        ({"is_causal": False}, r"is_causal: got False, which is not supported"),
    )
    layer = "model.layers.1.self_attn.k_proj.weight"
    integers = torch.zeros(128, 64, dtype=torch.int8)
    tensors = [
        ({"score.bias": torch.zeros(2)}, r"score\.bias: got shape \[2\], wanted \[1\]"),
        ({"score.weight": torch.tensor(1.0)}, r"score\.weight: got shape \[\], wanted \[1, 64\]"),
        ({"score.weight": None}, r"LlamaForSequenceClassification without .*score\.weight"),
        ({"score.weight": torch.zeros(2, 64)}, r"got shape \[2, 64\], wanted \[1, 64"),
        ({"gate.weight": torch.zeros(1, 64)}, r"do not belong to a llama model.* gate\.weight"),
        ({layer: torch.zeros(64, 64)}, rf"{layer}: got shape \[64, 64\], wanted \[32, 64\]"),
        (
            {"model.layers.3.mlp.up_proj.weight": integers},
            r"3\.mlp\.up_proj\.weight: got the dtype I8",
        ),
    ]
    message = "1 of 2048 values that are NaN or infinite in float32, the first at "
    for value in (math.nan, math.inf, -math.inf):
        damaged = torch.zeros(32, 64)
        damaged[3, 5] = value
        tensors.append(({layer: damaged}, rf"/model\.safetensors: {layer}: got {message}\[3, 5\]"))
    nothing = {"score.weight": torch.full((1, 64), math.nan)}
    tensors.append((nothing, r"score\.weight: got 64 of 64 values that"))
    changes = [(partial(edit_tensors, changes=edits), pattern) for edits, pattern in tensors]
    changes.append((two_classes, r"problem_type: .* outputs, \['no', 'yes'\]\. transformers"))
    tokens = config_of(changed_reward, "tokenizer.json")["added_tokens"]
    rows = tiny.SHAPE["vocab_size"]
    extra = [*tokens, {**tokens[0], "id": rows, "content": "<extra>"}]

    def no_row(folder: Path) -> None:
        """Add a token without an embedding that the chat template writes."""
        edit(folder, name="tokenizer.json", added_tokens=extra)
        (folder / "chat_template.jinja").write_text(tiny.CHATML + "<extra>")

    message = rf"got ids up to {rows} \('<extra>' is {rows}\)"
    check_refused(changed_reward, [*settings, *changes, (no_row, message)])
    large = partial(edit_tensors, changes={layer: torch.full((32, 64), 1e5)})
    message = "values that are NaN or infinite in float16, which ends at 65504: try bf16"
    check_refused(changed_reward, [(large, message)], dtype=torch.float16)


def test_config_of_a_model_is_read_without_its_weights(
    base_checkpoint: Path, tmp_path: Path, hub: Callable[[Path], dict[str, Any]]
) -> None:
    """Of a folder, a model of the hub, a multimodal model, and a GGUF file."""
    convert(base_checkpoint, tmp_path / "base.nemo")
    with open_nemo(tmp_path / "base.nemo") as folder:
        converted = folder.config

    def check(source: Path) -> None:
        config, limits = read_config_and_limits(source)
        assert limits is None
        assert {key: converted[key] for key in config} == config

    requests = hub(base_checkpoint)
    check(Path("org/model"))
    assert requests["allow_patterns"] == ["config.json", "scoring_contract.json"]
    parts = tmp_path / "parts"
    parts.mkdir()
    settings = {"text_config": config_of(base_checkpoint), "quantization_config": {"bits": 4}}
    (parts / "config.json").write_text(json.dumps({"model_type": "llava", **settings}))
    check(parts)
    text = {**settings["text_config"], "torch_dtype": None}
    for dtypes in (
        {"torch_dtype": "float32", "text_config": text},
        {"torch_dtype": None, "text_config": {**text, "dtype": "float32"}},
        # Saved by transformers after the model was loaded in another dtype.
        {"torch_dtype": "float32", "text_config": {**text, "dtype": "bfloat16"}},
    ):
        edit(parts, architectures=["LlavaForSequenceClassification"], **dtypes)
        assert read_config_and_limits(parts)[1] == (256, "fp32"), dtypes
    edit(parts, model_type="mllama")
    with pytest.raises(CheckpointError, match="parts: model_type: got 'mllama'"):
        read_config_and_limits(parts)
    from tests.checkpoint.hf.gguf_writing import write_gguf  # skips without the package gguf

    check(write_gguf(tmp_path / "model.gguf", base_checkpoint))


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
        assert summary.head.endswith("kept; dropped: lm_head.weight")


def test_contract_has_the_widest_dtype_of_all_matrices(
    changed_reward: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(changed_reward)
    narrow = {name: tensors[name].bfloat16() for name in tensors}
    bf16_names = ("model.embed_tokens.weight", "model.norm.weight")
    edit_tensors(changed_reward, {name: narrow[name] for name in bf16_names})
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
    check_refused(
        folder, [(lambda folder: None, "the model has scoring_contract.json")], seq_length=9
    )
