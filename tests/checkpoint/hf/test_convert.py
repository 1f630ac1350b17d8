"""Conversion: the logits, rewards and tokens of transformers, and refusals that name the reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.errors import CheckpointError
from tests import tiny
from tests.checkpoint.hf.conversion import (
    REWARD_CASES,
    LiveBytes,
    convert,
    edit,
    edit_tensors,
    refused,
)
from tests.families import LLAMA3_ROPE

pytestmark = pytest.mark.usefixtures("layout")


CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one_group_per_head": {"num_key_value_heads": 4},
    "llama3_rope_own_head_dim": {"rope_parameters": LLAMA3_ROPE, "head_dim": 32},
}


def megatron_logits(path: Path, tokens: Tensor) -> Tensor:
    """Logits of megatron-core's own GPTModel, loaded from a ``.nemo``."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.checkpoint.weights.store import load_weights

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


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    path = tiny.write_base_nemo(tmp_path / "base.nemo", **CASES[case])
    tokens = torch.randint(
        0, tiny.SHAPE["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(1)
    )
    theirs = LlamaForCausalLM.from_pretrained(path.with_suffix(".hf")).eval()
    with torch.no_grad():
        wanted = theirs(tokens).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(megatron_logits(path, tokens), wanted, atol=2e-5, rtol=1e-4)


def test_the_summary_and_the_config_say_what_was_converted(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    from nemo_aligner.checkpoint.nemo.open import open_nemo

    summary = convert(base_checkpoint, tmp_path / "out" / "base.nemo")
    count = LlamaForCausalLM.from_pretrained(base_checkpoint).num_parameters()
    assert f"llama base model, {count:,} parameters in fp32, 4 layers of 64" in str(summary)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["base.nemo"]
    with open_nemo(summary.output) as folder:
        assert folder.config["vocab_size"] == tiny.SHAPE["vocab_size"]
        assert folder.config["precision"] == 32
        assert folder.contract is None


def test_dtype_is_as_stored_or_as_asked(base_checkpoint: Path, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.nemo.open import open_nemo

    summary = convert(base_checkpoint, tmp_path / "base.nemo", torch.bfloat16)
    assert summary.dtype == "bf16"
    with open_nemo(tmp_path / "base.nemo") as folder:
        assert folder.config["precision"] == "bf16"
        assert {dtype for _, dtype in folder.store.tensors.values()} == {torch.bfloat16}


def test_the_tokenizer_is_carried_over_unchanged(base_checkpoint: Path, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.nemo.open import open_nemo

    convert(base_checkpoint, tmp_path / "base.nemo")
    with open_nemo(tmp_path / "base.nemo") as folder:
        carried = {file.name: file.read_bytes() for file in folder.tokenizer.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= carried.keys()
    assert carried == {name: (base_checkpoint / name).read_bytes() for name in carried}


def test_shards_and_old_rope_keys_read_the_same(base_checkpoint: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    sharded = tmp_path / "sharded"
    LlamaForCausalLM.from_pretrained(base_checkpoint).save_pretrained(
        sharded, max_shard_size="100KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 1
    tiny.write_tokenizer(sharded)
    edit(sharded, rope_parameters=None, rope_theta=10000.0)
    tokens = torch.arange(40)[None]
    for folder in (base_checkpoint, sharded):
        convert(folder, tmp_path / f"{folder.name}.nemo")
    one, many = (megatron_logits(tmp_path / f"{name}.nemo", tokens) for name in ("tiny", "sharded"))
    torch.testing.assert_close(one, many, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type: got 'mamba', wanted one of: llama"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"mlp_bias": True}, "mlp_bias: got True"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"sliding_window": 128}, "sliding_window: got 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type: got 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor: got 0\.5"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got None"),
        ({"num_hidden_layers": 5}, r"9 tensors are missing, the first is model\.layers\.4"),
        ({"num_hidden_layers": 3}, r"9 tensors have no place .* is model\.layers\.3"),
        ({"tie_word_embeddings": False}, r"1 tensors are missing, the first is lm_head\.weight"),
    ],
)
def test_what_cannot_be_carried_is_refused(
    changes: dict, message: str, changed_base: Path, tmp_path: Path
) -> None:
    edit(changed_base, **changes)
    with pytest.raises(CheckpointError, match=message):
        convert(changed_base, tmp_path / "out" / "base.nemo")
    assert not (tmp_path / "out").exists()


def test_the_script_reports_and_fails_clearly(base_checkpoint: Path, tmp_path: Path) -> None:
    verb, output = "convert", str(tmp_path / "base.nemo")
    done = tiny.run_verb(
        verb, "--input", str(base_checkpoint), "--output", output, env={"HF_HUB_OFFLINE": "1"}
    )
    assert "base.nemo: llama" in done.stdout
    failed = tiny.run_verb(verb, "--input", "nowhere", "--output", output, check=False)
    assert failed.returncode == 1
    assert "CheckpointError: nowhere" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_query_groups_of_zeros_change_no_logit(tmp_path: Path) -> None:
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    tiny.write_hf_checkpoint(tmp_path / "hf", **heads)
    plain, padded = tmp_path / "plain.nemo", tmp_path / "padded.nemo"
    convert(tmp_path / "hf", plain)
    summary = convert(tmp_path / "hf", padded, None, 2)
    assert summary.zero_groups == 1
    tokens = torch.arange(3, 40)[None]
    torch.testing.assert_close(
        megatron_logits(padded, tokens), megatron_logits(plain, tokens), rtol=0, atol=1e-5
    )


def test_what_is_there_is_not_overwritten(base_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.nemo").write_text("precious")
    with pytest.raises(CheckpointError, match=r"mine\.nemo: it exists"):
        convert(base_checkpoint, tmp_path / "mine.nemo")
    assert (tmp_path / "mine.nemo").read_text() == "precious"
    with pytest.raises(CheckpointError, match=r"mine\.nemo/base\.nemo: cannot be written"):
        convert(base_checkpoint, tmp_path / "mine.nemo" / "base.nemo")


@pytest.mark.parametrize("count", [0, -2])
def test_a_tensor_parallel_size_is_at_least_one(
    count: int, base_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"tensor_parallel: got {count}, wanted 1"):
        convert(base_checkpoint, tmp_path / "base.nemo", tensor_parallel=count)


@pytest.mark.parametrize("case", REWARD_CASES)
def test_rewards_are_those_of_transformers(case: str, layout: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from nemo_aligner.scoring.scorer import load_scorer

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
    got = scorer.score([*texts, conversation])
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=1e-5)


def test_a_token_without_an_embedding_is_refused(changed_reward: Path, tmp_path: Path) -> None:
    file = changed_reward / "tokenizer.json"
    content = json.loads(file.read_text())
    rows = tiny.SHAPE["vocab_size"]
    token = {**content["added_tokens"][0], "id": rows, "content": "<extra>"}
    content["added_tokens"].append(token)
    file.write_text(json.dumps(content))
    refused(changed_reward, tmp_path, rf"got ids up to {rows} \('<extra>' is {rows}\)")


def test_matrices_of_two_dtypes_are_scored_in_the_wider(
    changed_reward: Path, tmp_path: Path
) -> None:
    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            tensors[name] = tensors[name].bfloat16()

    edit_tensors(changed_reward, narrow)
    assert convert(changed_reward, tmp_path / "rm.nemo").contract.dtype == "fp32"
    edit_tensors(
        changed_reward,
        lambda tensors: tensors.update(
            {name: data.bfloat16() for name, data in tensors.items() if data.dim() == 2}
        ),
    )
    assert convert(changed_reward, tmp_path / "narrow.nemo").contract.dtype == "bf16"


def test_tensors_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf import source as hf_source
    from nemo_aligner.checkpoint.weights.stream import _ReadingPlanner

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
