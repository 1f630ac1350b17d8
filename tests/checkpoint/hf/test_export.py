"""Export to Hugging Face: tensors and rewards as in the archive, or an error and no folder."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_aligner.errors import CheckpointError
from tests import tiny
from tests.checkpoint.hf.conversion import (
    REWARD_CASES,
    LiveBytes,
    convert,
)
from tests.checkpoint.hf.exporting import (
    MEANS,
    WEIGHTS,
    assert_same,
    config_of,
    export,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("layout")


@pytest.mark.smoke
def test_the_way_there_and_back_changes_no_tensor(layout: Any, tmp_path: Path) -> None:
    for case, changes in REWARD_CASES.items():
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


def test_query_groups_of_zeros_are_left_out_and_the_way_back_is_told(
    layout: Any, tmp_path: Path
) -> None:
    tiny.write_hf_reward_model(tmp_path / "hf")  # of 2 query groups
    convert(tmp_path / "hf", tmp_path / "plain.nemo")
    assert "query groups" not in str(export(tmp_path / "plain.nemo", tmp_path / "plain", layout))
    made = convert(tmp_path / "hf", tmp_path / "padded.nemo", tensor_parallel=3)
    said = str(export(tmp_path / "padded.nemo", tmp_path / "out", layout))
    (told,) = (line for line in said.splitlines() if line.startswith("query groups"))
    assert told == (
        "query groups: 2; 1 of zeros, which the archive has beside them for tensor parallelism, "
        "are left out; converted with tensor-parallel 3 they come back"
    )
    again = convert(tmp_path / "out", tmp_path / "again.nemo", tensor_parallel=3)
    assert again.zero_groups == made.zero_groups == 1


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
    for extra, message in (
        ("model.rm_head.bias", "its reward head has a bias"),
        ("model.decoder.layers.mlp.router.weight", r"no place .*router\.weight"),
    ):
        path = with_tensor(three, extra, tmp_path / "extra.nemo")
        with pytest.raises(CheckpointError, match=message):
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
    verb, output = "export", str(tmp_path / "out")
    arguments = ("--input", str(three), "--output", output, "--dtype", "bf16", "--merge")
    done = tiny.run_verb(verb, *arguments, "--max-shard-size", "0.1mb")
    assert "LlamaForSequenceClassification of reward, weights in bf16" in done.stdout
    assert "WARNING: the logits are not yet the rewards" in done.stdout
    failed = tiny.run_verb(verb, *arguments, check=False)
    assert failed.returncode == 1
    assert "CheckpointError: " in failed.stderr
    assert "it exists" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "Loading weights" not in done.stderr
    wrong = tiny.run_verb(verb, *arguments, "--max-shard-size", "5", check=False)
    assert wrong.returncode == 2
    assert "wanted for example 5GB" in wrong.stderr
