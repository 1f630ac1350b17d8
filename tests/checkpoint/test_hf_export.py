"""Export to Hugging Face: tensors, ids and rewards as in the archive, or an error and no folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nemo_aligner.errors import CheckpointError
from tests import tiny
from tests.checkpoint.test_hf_reward import CASES, NAMES, LiveBytes, convert

WEIGHTS, MEANS = (0.5, -2.0, 0.25), (1.5, 0.0, -0.5)


pytestmark = pytest.mark.usefixtures("layout")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, layout: Any) -> Path:
    """A regression model of three attributes, with label means, as training would save it."""
    folder = tmp_path_factory.mktemp("three")
    tiny.write_hf_reward_model(folder / "hf", **CASES["three_labels"])
    convert(folder / "hf", folder / "converted.nemo")
    save_again(
        folder / "converted.nemo",
        folder / "rm.nemo",
        layout,
        attribute_weights=WEIGHTS,
        label_means=MEANS,
        reward_mean=(2.0, 1.0, 0.0),
        reward_std=(1.0, 1.0, 0.5),
        measured_on="validation-heldout",
    )
    return folder / "rm.nemo"


def save_again(source: Path, target: Path, layout: Any, **contract: Any) -> None:
    """The archive as training writes it (its vocabulary is padded), with a changed contract."""
    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model

    loaded = load_reward_model(source, layout)
    save_reward_model(
        target,
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        dataclasses.replace(loaded.contract, **contract),
    )


def export(archive: Path, output: Path, layout: Any, **options: Any) -> Any:
    from nemo_aligner.checkpoint.hf.export import ExportOptions, export_to_hf

    return export_to_hf(archive, output, layout, ExportOptions(**options))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)


def test_the_way_there_and_back_changes_no_tensor(layout: Any, tmp_path: Path) -> None:
    for case, changes in CASES.items():
        folder = tmp_path / case
        tiny.write_hf_reward_model(folder / "hf", **changes)
        tensor_parallel = 2 if case == "zero_groups" else 1
        convert(folder / "hf", folder / "rm.nemo", tensor_parallel=tensor_parallel)
        summary = export(folder / "rm.nemo", folder / "out", layout)
        assert summary.architecture == "LlamaForSequenceClassification"
        assert summary.texts == 7
        assert_same(tensors_of(folder / "out"), tensors_of(folder / "hf"))
        before, after = (
            json.loads((folder / f / "config.json").read_text()) for f in ("hf", "out")
        )
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
            assert after[key] == before[key]
        # Whoever may read the one may read the other.
        files = [folder / "out" / name for name in ("config.json", "model.safetensors")]
        assert len({file.stat().st_mode for file in files}) == 1
        if case != "one_label":
            continue
        again = convert(folder / "out", folder / "again.nemo")
        assert again.contract == summary.contract
        export(folder / "again.nemo", folder / "twice", layout)
        assert_same(tensors_of(folder / "twice"), tensors_of(folder / "hf"))


def test_a_config_may_leave_out_what_has_a_default(layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.checkpoint.nemo.write import write_nemo

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


def test_vocabulary_padding_is_cut_off(three: Path, layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.nemo.open import open_nemo

    with open_nemo(three) as folder:
        stored = folder.store.tensors
    assert stored["model.embedding.word_embeddings.weight"][0] == (384, 64)
    export(three, tmp_path / "out", layout)
    assert_same(tensors_of(tmp_path / "out"), tensors_of(three.parent / "hf"))


def test_the_config_and_the_card_say_what_there_is(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    summary = export(three, tmp_path / "out", layout, base_license="apache-2.0")
    config = config_of(tmp_path / "out")
    assert config["id2label"] == {str(number): name for number, name in enumerate(NAMES)}
    assert config["label2id"] == {name: number for number, name in enumerate(NAMES)}
    assert (config["num_labels"], config["problem_type"]) == (3, "regression")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["label_means"] == dict(zip(NAMES, MEANS, strict=True))
    assert config["scoring_contract_hash"] == summary.contract.hash
    assert "WARNING: the logits are not yet the rewards" in str(summary)
    card = (tmp_path / "out/README.md").read_text()
    for said in ("license: apache-2.0", "logits alone are not the rewards", *NAMES, "| 1 | 1 |"):
        assert said in card, said
    contract = json.loads((tmp_path / "out/scoring_contract.json").read_text())
    assert contract == summary.contract.to_dict()


def test_the_card_s_program_gives_the_rewards(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_aligner.scoring.scorer import load_scorer

    export(three, tmp_path / "out", layout)
    _, _, program = (tmp_path / "out/README.md").read_text().partition("```python\n")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(program.partition("```")[0], variables)
    wanted = load_scorer(three, layout).score([variables["conversation"]])
    np.testing.assert_allclose(variables["rewards"].numpy(), wanted, atol=1e-4, rtol=0)
    assert np.abs(variables["logits"].numpy() - wanted).max() > 1


def test_a_merged_model_gives_the_weighted_sum(three: Path, layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.scoring.scorer import load_scorer

    summary = export(three, tmp_path / "out", layout, merge=True)
    constant = sum(weight * mean for weight, mean in zip(WEIGHTS, MEANS, strict=True))
    assert summary.contract.attributes == ("reward",)
    assert summary.contract.label_means == pytest.approx((constant,))
    assert f"add {{'reward': {constant}}}" in str(summary)
    config = config_of(tmp_path / "out")
    assert (config["id2label"], config["label_means"]) == ({"0": "reward"}, {"reward": constant})
    # The folder's own contract comes back with it, constant included.
    convert(tmp_path / "out", tmp_path / "merged.nemo")
    texts = ["the cat sleeps", "a dog"]
    parts, merged = (
        load_scorer(path, layout).score(texts) for path in (three, tmp_path / "merged.nemo")
    )
    np.testing.assert_allclose(merged, parts @ np.array(WEIGHTS)[:, None], atol=1e-4, rtol=0)


def test_a_bf16_export_is_rounded_once(three: Path, layout: Any, tmp_path: Path) -> None:
    summary = export(three, tmp_path / "out", layout, dtype=torch.bfloat16)
    assert summary.contract.dtype == summary.dtype == "bf16"
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    card = (tmp_path / "out/README.md").read_text()
    assert "trained in fp32 and is rounded to bf16 here" in card
    wanted = tensors_of(three.parent / "hf")
    rounded = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    assert_same(tensors_of(tmp_path / "out"), {**rounded, "score.weight": wanted["score.weight"]})
    assert convert(tmp_path / "out", tmp_path / "rm.nemo").contract == summary.contract


def test_shards_are_no_larger_than_asked(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_aligner.checkpoint.weights.tensor_store import TensorStore

    live = LiveBytes()
    monkeypatch.setattr(TensorStore, "read", live.watch(TensorStore.read))
    summary = export(three, tmp_path / "out", layout, max_shard_bytes=100_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert summary.shards == len(files) > 5
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert {path.name for path in files} == set(index["weight_map"].values())
    wanted = tensors_of(three.parent / "hf")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    for path in files:
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 100_000
    assert_same(tensors_of(tmp_path / "out"), wanted)
    # A shard, and the tensor that begins the next.
    assert live.total > 600_000
    assert live.peak < 250_000


def damage_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf.folder import ShardWriter

    add = ShardWriter.add

    def damaged(self: Any, name: str, tensor: Tensor) -> None:
        add(self, name, tensor * 1.01 if name.endswith("2.mlp.up_proj.weight") else tensor)

    monkeypatch.setattr(ShardWriter, "add", damaged)


def lose_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf.folder import ShardWriter

    add = ShardWriter.add
    monkeypatch.setattr(
        ShardWriter, "add", lambda self, name, tensor: "norm" in name or add(self, name, tensor)
    )


def damage_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf import export as hf_export

    write = hf_export.write_tokenizer

    def damaged(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        content = json.loads((folder / "tokenizer.json").read_text())
        content["normalizer"] = {"type": "Lowercase"}
        (folder / "tokenizer.json").write_text(json.dumps(content))

    monkeypatch.setattr(hf_export, "write_tokenizer", damaged)


def damage_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_aligner.checkpoint.hf import export as hf_export

    monkeypatch.setattr(hf_export, "choose_pad", lambda *_: ("<|endoftext|>", 2))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damage_tensor, "transformers scores .* wanted .* within 0.0001"),
        (lose_tensor, "tensors do not match: .*norm"),
        (damage_tokenizer, "transformers tokenizes .* wanted the scoring contract's"),
        (damage_pad, "pad token: got id 0, wanted 2"),
    ],
)
def test_a_damaged_export_fails_and_leaves_nothing(
    damage: Callable[[pytest.MonkeyPatch], None],
    complaint: str,
    three: Path,
    layout: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(monkeypatch)
    with pytest.raises(CheckpointError, match=complaint):
        export(three, tmp_path / "out" / "hf", layout)
    assert not list((tmp_path / "out").iterdir())


def test_tokenizer_files_are_carried_over_byte_for_byte(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    export(three, tmp_path / "out", layout)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        original = (three.parent / "hf" / name).read_bytes()
        assert (tmp_path / "out" / name).read_bytes() == original


def test_the_template_is_the_contract_s(three: Path, layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.text.templates import BUILT_IN_TEMPLATES

    for name, template in (("plain", BUILT_IN_TEMPLATES["plain"]), ("none", "")):
        save_again(three, tmp_path / f"{name}.nemo", layout, template=template)
        summary = export(tmp_path / f"{name}.nemo", tmp_path / name, layout)
        path = tmp_path / name / "chat_template.jinja"
        assert (path.read_text() if template else path.exists()) == (template or False)
        assert summary.texts == (7 if template else 3)
    assert "no chat template" in (tmp_path / "none/README.md").read_text()


def test_bos_and_eos_of_bare_texts_are_in_the_check(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_again(three, tmp_path / "rm.nemo", layout, add_bos=True, add_eos=True, template="")
    export(tmp_path / "rm.nemo", tmp_path / "out", layout)
    card = (tmp_path / "out/README.md").read_text()
    assert 'texts = [tokenizer.bos_token + "a text" + tokenizer.eos_token]' in card


def without_a_pad_token(folder: Path, specials: tuple[str, ...]) -> None:
    """Pad with EOS, as many tokenizers do, and let only ``specials`` be special."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|im_end|>"}))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in specials
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("specials", "rows", "pad", "pad_id", "vocab_size"),
    [
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), 320, "<|endoftext|>", 0, 320),
        # No token to be had: the row behind the words, or one more, is a new one's.
        (("<|im_start|>", "<|im_end|>"), None, "<|pad|>", None, None),
        (("<|im_start|>", "<|im_end|>"), 340, "<|pad|>", None, 340),
    ],
)
def test_the_pad_token_is_never_eos(
    specials: tuple[str, ...],
    rows: int | None,
    pad: str,
    pad_id: int | None,
    vocab_size: int | None,
    layout: Any,
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    from nemo_aligner.text.tokenizer import load_tokenizer

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


def test_its_own_contract_is_checked_on_the_way_back(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    export(three, tmp_path / "out", layout)
    with pytest.raises(CheckpointError, match="it brings its own"):
        convert(tmp_path / "out", tmp_path / "rm.nemo", options=ContractOptions(seq_length=9))

    def changed(name: str, change: Callable[[dict], None], complaint: str) -> None:
        folder = Path(shutil.copytree(tmp_path / "out", tmp_path / "changed"))
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=complaint):
            convert(folder, tmp_path / "rm.nemo")
        assert not (tmp_path / "rm.nemo").exists()
        shutil.rmtree(folder)

    changed("scoring_contract.json", lambda c: c.update(seq_length=9), "was changed after")
    changed("config.json", lambda c: c["id2label"].update({"0": "other"}), "id2label: got")
    changed("tokenizer.json", lambda c: c.update(normalizer={"type": "NFC"}), "fingerprint: got")


def test_what_cannot_be_exported_is_refused(three: Path, layout: Any, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="it exists, wanted the name of a new one"):
        export(three, tmp_path / "there", layout)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written"):
        export(three, tmp_path / "file" / "out", layout)
    base = tiny.write_base_nemo(tmp_path / "base.nemo", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"base\.nemo: it has no scoring contract"):
        export(base, tmp_path / "out", layout)
    for extra, complaint in (
        ("model.rm_head.bias", "its reward head has a bias"),
        ("model.decoder.layers.mlp.router.weight", r"no place .*router\.weight"),
    ):
        path = with_tensor(three, extra, tmp_path / "extra.nemo")
        with pytest.raises(CheckpointError, match=complaint):
            export(path, tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def with_tensor(archive: Path, key: str, path: Path) -> Path:
    """A copy of the archive that has a tensor more."""
    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.checkpoint.nemo.write import write_nemo
    from nemo_aligner.checkpoint.weights.stream import UnreadTensor, save_unread

    with open_nemo(archive) as folder:
        tensors = {
            name: UnreadTensor(shape, dtype, partial(folder.store.read, name))
            for name, (shape, dtype) in folder.store.tensors.items()
        }
        tensors[key] = UnreadTensor((3,), torch.float32, partial(torch.zeros, 3))
        weights = path.with_suffix(".weights")
        shutil.rmtree(weights, ignore_errors=True)
        save_unread(tensors, {}, weights)
        write_nemo(path, folder.config, weights, folder.tokenizer, folder.contract)
    return path


def test_the_script_exports_and_fails_clearly(three: Path, tmp_path: Path) -> None:
    script, output = "scripts/convert_nemo_to_hf.py", str(tmp_path / "out")
    arguments = ("--input", str(three), "--output", output, "--dtype", "bf16", "--merge")
    done = tiny.run_script(script, *arguments, "--max-shard-size", "0.1mb")
    assert "LlamaForSequenceClassification of reward, weights in bf16" in done.stdout
    assert "WARNING: the logits are not yet the rewards" in done.stdout
    failed = tiny.run_script(script, *arguments, check=False)
    assert failed.returncode == 1
    assert "error: " in failed.stderr
    assert "it exists" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "Loading weights" not in done.stderr
    wrong = tiny.run_script(script, *arguments, "--max-shard-size", "5", check=False)
    assert wrong.returncode == 2
    assert "wanted for example 5GB" in wrong.stderr
