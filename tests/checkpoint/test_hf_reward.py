"""A reward model of Hugging Face as a ``.nemo``: transformers' rewards, and a contract for them."""

from __future__ import annotations

import json
import random
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.errors import CheckpointError
from tests import tiny

NAMES = ("helpfulness", "correctness", "verbosity")
HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
CASES: dict[str, dict[str, Any]] = {
    "one_label": {},
    "three_labels": {"labels": 3, "id2label": dict(enumerate(NAMES))},
    "untied": {"tie_word_embeddings": False},
    "zero_groups": HEADS,
}


pytestmark = pytest.mark.usefixtures("layout")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "tiny"
    tiny.write_hf_reward_model(folder)
    return folder


@pytest.fixture
def changed(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "tiny"))


def convert(source: Path | str, output: Path, **options: Any) -> Any:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    return convert_hf_to_nemo(source, output, **options)


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(source: Path | str, folder: Path, complaint: str, **options: Any) -> None:
    """The conversion fails with ``complaint``, and leaves nothing."""
    with pytest.raises(CheckpointError, match=complaint):
        convert(source, folder / "out" / "reward.nemo", **options)
    assert not list((folder / "out").glob("*"))


@pytest.mark.parametrize("case", CASES)
def test_rewards_are_those_of_transformers(case: str, layout: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from nemo_aligner.scoring.scorer import load_scorer

    tiny.write_hf_reward_model(tmp_path / "hf", **CASES[case])
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


def test_the_contract_is_made_of_the_folder(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions
    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules

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
    options = ContractOptions("plain", 77)
    other = convert(tmp_path / "three", tmp_path / "other.nemo", options=options).contract
    assert other.seq_length == 77
    assert other.template != three.template


def test_outputs_without_names_can_be_given_some(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    tiny.write_hf_reward_model(tmp_path / "hf", labels=2)
    given = ContractOptions(attributes=("helpful", "honest"))
    contract = convert(tmp_path / "hf", tmp_path / "rm.nemo", options=given).contract
    assert contract.attributes == ("helpful", "honest")
    wrong = ContractOptions(attributes=("helpful",))
    with pytest.raises(CheckpointError, match=r"attributes: got \['helpful'\], wanted 2"):
        convert(tmp_path / "hf", tmp_path / "other.nemo", options=wrong)


def test_a_template_has_to_write_the_conversation(changed: Path, tmp_path: Path) -> None:
    """Else every reply would be the same text, and have the same reward."""
    (changed / "chat_template.jinja").write_text("hello world")
    refused(changed, tmp_path, r"it writes 'hello world', without the conversation's 'a question'")


def test_without_a_chat_template_only_raw_texts_are_scored(changed: Path, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    (changed / "chat_template.jinja").unlink()
    assert "raw texts only" in str(convert(changed, tmp_path / "rm.nemo"))
    options = ContractOptions(template="tokenizer")
    with pytest.raises(CheckpointError, match=r"--template: got 'tokenizer', but the tokenizer"):
        convert(changed, tmp_path / "other.nemo", options=options)


def test_a_token_without_an_embedding_is_refused(changed: Path, tmp_path: Path) -> None:
    file = changed / "tokenizer.json"
    content = json.loads(file.read_text())
    rows = tiny.SHAPE["vocab_size"]
    token = {**content["added_tokens"][0], "id": rows, "content": "<extra>"}
    content["added_tokens"].append(token)
    file.write_text(json.dumps(content))
    refused(changed, tmp_path, rf"got ids up to {rows} \('<extra>' is {rows}\)")


def test_matrices_of_two_dtypes_are_scored_in_the_wider(changed: Path, tmp_path: Path) -> None:
    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            tensors[name] = tensors[name].bfloat16()

    edit_tensors(changed, narrow)
    assert convert(changed, tmp_path / "rm.nemo").contract.dtype == "fp32"
    edit_tensors(
        changed,
        lambda tensors: tensors.update(
            {name: data.bfloat16() for name, data in tensors.items() if data.dim() == 2}
        ),
    )
    assert convert(changed, tmp_path / "narrow.nemo").contract.dtype == "bf16"


def test_a_tied_output_layer_is_no_part_of_it(changed: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(changed, add)
    assert convert(changed, tmp_path / "rm.nemo").contract is not None
    edit(changed, tie_word_embeddings=False)
    refused(changed, tmp_path, r"have no place in a llama model, the first is lm_head\.weight")


def replace_tensor(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("score.bias", torch.zeros(1), r"score\.bias: got a head with a bias"),
        ("score.weight", torch.tensor(1.0), r"score\.weight: got shape \[\], wanted \[1, 64\]"),
        ("score.weight", None, r"LlamaForSequenceClassification without score\.weight"),
        ("score.weight", torch.zeros(2, 64), r"score\.weight: got shape \[2, 64\], wanted \[1, 64"),
        ("v_head.weight", torch.zeros(1, 64), r"no place in a llama model.* v_head\.weight"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            torch.zeros(64, 64),
            r"layers\.1\.self_attn\.k_proj\.weight: got shape \[64, 64\], wanted \[32, 64\]",
        ),
        (
            "model.layers.3.mlp.up_proj.weight",
            torch.zeros(128, 64, dtype=torch.int8),
            r"layers\.3\.mlp\.up_proj\.weight: got I8 numbers",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, value: Tensor | None, complaint: str, changed: Path, tmp_path: Path
) -> None:
    edit_tensors(changed, replace_tensor(name, value))
    refused(changed, tmp_path, complaint)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"got shape \[1, 64\], wanted \[2, 64\]"),
        ({"id2label": {"zero": "a"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"id2label": None, "num_labels": "two"}, r"num_labels: got 'two' and 1 rows"),
        ({"id2label": None, "num_labels": 2}, r"num_labels: got 2 and 1 rows"),
        ({"architectures": {"a": "b"}}, r"architectures: got .*, wanted a list"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: got"),
        ({"model_type": "mamba"}, r"model_type: got 'mamba'"),
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"problem_type": "single_label_classification"}, r"a classifier are no rewards"),
        ({"architectures": None}, r"architectures: got \[''\] beside score\.weight"),
        ({"is_causal": False}, r"is_causal: got False, which is not supported"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict, complaint: str, changed: Path, tmp_path: Path
) -> None:
    edit(changed, **changes)
    refused(changed, tmp_path, complaint)


def test_a_template_with_a_date_is_refused_and_another_can_be_given(
    changed: Path, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    dated = "{{ strftime_now('%d %b %Y') }}" + tiny.CHATML
    (changed / "chat_template.jinja").write_text(dated)
    refused(changed, tmp_path, "depends on the date")
    summary = convert(changed, tmp_path / "rm.nemo", options=ContractOptions(template="chatml"))
    assert "strftime" not in summary.contract.template


def test_options_for_a_contract_need_a_model_without_one(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    tiny.write_hf_checkpoint(tmp_path / "base")
    options = ContractOptions(seq_length=100)
    refused(tmp_path / "base", tmp_path, "a base model has none", options=options)


def shard(folder: Path) -> Path:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder / "model.safetensors.index.json"


def test_shards_must_be_those_of_the_index(changed: Path, tmp_path: Path) -> None:
    index = shard(changed)
    convert(changed, tmp_path / "rm.nemo")
    content = json.loads(index.read_text())
    first, second = sorted(set(content["weight_map"].values()))[:2]
    moved = next(name for name, file in content["weight_map"].items() if file == first)
    wrong = {**content, "weight_map": {**content["weight_map"], moved: second}}
    index.write_text(json.dumps(wrong))
    refused(changed, tmp_path, rf"{second}: tensor {moved} is missing")
    index.write_text(json.dumps({"weight_map": [1]}))
    refused(changed, tmp_path, r"index\.json: got no weight_map")
    index.write_text(json.dumps(content))
    (changed / second).unlink()
    refused(changed, tmp_path, second)


def test_a_truncated_shard_is_refused(changed: Path, tmp_path: Path) -> None:
    path = changed / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(changed, tmp_path, r"model\.safetensors: ")


def test_a_hub_name_is_downloaded(
    hub: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    asked = hub(checkpoint)
    assert convert("some-org/Tiny-RM", tmp_path / "rm.nemo").contract is not None
    assert asked["name"] == "some-org/Tiny-RM"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


def test_without_a_network_the_hub_s_cache_is_read(checkpoint: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "home/hub/models--some-org--Tiny-RM"
    shutil.copytree(checkpoint, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit)
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    script, output = "scripts/convert_hf_to_nemo.py", str(tmp_path / "out/rm.nemo")
    lost = tiny.run_script(
        script, "--input", "some-org/Lost", "--output", output, env=environment, check=False
    )
    assert lost.returncode == 1
    assert "error: some-org/Lost: there is no such folder, and the hub does not" in lost.stderr
    assert "Traceback" not in lost.stderr
    assert not (tmp_path / "out").exists()
    done = tiny.run_script(
        script, "--input", "some-org/Tiny-RM", "--output", output, env=environment
    )
    assert "llama reward model of reward" in done.stdout


class LiveBytes:
    """Counts the bytes of tensors that are in memory, from when they were read until let go."""

    def __init__(self) -> None:
        self.now = self.peak = self.total = 0

    def watch(self, read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(*arguments: Any) -> Tensor:
            tensor = read(*arguments)
            size = tensor.numel() * tensor.element_size()
            self.now += size
            self.total += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(tensor.untyped_storage(), self._release, size)
            return tensor

        return watched

    def _release(self, size: int) -> None:
        self.now -= size


def test_tensors_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf import source as hf_source
    from nemo_aligner.checkpoint.weights.stream import _ReadingPlanner

    tiny.write_hf_reward_model(tmp_path / "hf", num_hidden_layers=16)
    read, joined = LiveBytes(), LiveBytes()
    monkeypatch.setattr(hf_source, "_read", read.watch(hf_source._read))
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
