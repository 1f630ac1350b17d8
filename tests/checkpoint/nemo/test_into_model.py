"""Weights into a model: their sizes are checked first, and every layout gets the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.errors import CheckpointError
from tests import tiny
from tests.checkpoint import foreign
from tests.checkpoint.foreign import (
    Writer,
    bridge,
    nemo1,
    nemo2,
    zarr_folder,
)
from tests.checkpoint.loading import (
    Tensors,
    edit,
    load,
    refuse,
)
from tests.checkpoint.resave import LAYOUTS


def test_untrusted_weights_that_are_well_load(unpacked: Path, layout: Any) -> None:
    load(unpacked, layout)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 10**12},
        {"hidden_size": 2**30},
        {"num_layers": 10**9},
        {"ffn_hidden_size": 10**12},
        {"ffn_hidden_size": 2**30},
        {"num_attention_heads": 2**30},
        {"num_query_groups": 2**30},
        {"kv_channels": 2**30},
        {"vocab_size": 2**30},
        {"make_vocab_size_divisible_by": 2**30},
        {"num_layers": "four"},
        {"num_layers": [4]},
        {"num_attention_heads": 0},
        {"hidden_size": -16},
        {"hidden_size": 16.5},
        {"layernorm_epsilon": float("nan")},
        {"rotary_base": float("inf")},
        {"rotary_percentage": "all"},
        {"activation": ["fast-swiglu"]},
        {"normalization": "batchnorm"},
    ],
    ids=lambda changes: "_".join(f"{key}_{value}" for key, value in changes.items()),
)
def test_sizes_are_checked_before_anything_is_allocated(
    changes: dict, unpacked: Path, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_aligner.checkpoint.nemo import reward_model

    def build(*unused: Any, **options: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(reward_model, "build_reward_model", build)
    edit(unpacked, **changes)
    refuse(unpacked, layout, next(iter(changes)) + "|layers of shape|settings want")


def test_a_wrong_shape_and_an_unknown_family_are_named(unpacked: Path, layout: Any) -> None:
    from nemo_aligner.checkpoint.weights.save import save_weights
    from tests.checkpoint.weights.tensors import sharded

    shutil.rmtree(unpacked / "model_weights")
    save_weights(
        {"a": sharded("model.decoder.final_layernorm.weight", torch.zeros(3))},
        unpacked / "model_weights",
    )
    refuse(unpacked, layout, r"word_embeddings\.weight: got none")
    edit(unpacked, position_embedding_type="alibi")
    refuse(unpacked, layout, "position_embedding_type: got 'alibi'")


@pytest.mark.parametrize("write", [nemo1, bridge], ids=lambda write: write.__name__)
def test_a_tensor_too_few_or_too_many_is_named(
    write: Writer, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    bias = {"decoder.layers.self_attention.linear_qkv.bias": torch.ones(foreign.LAYERS, 128)}
    more = write(tmp_path / "more", {**tensors, **bias}, tokenizer_folder)
    with pytest.raises(CheckpointError, match=r"no place in the model.*linear_qkv\.bias"):
        load(more, layout)
    name = "decoder.final_layernorm.weight"
    few = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=r"final_layernorm\.weight: got none"):
        load(write(tmp_path / "fewer", few, tokenizer_folder), layout)


def test_nothing_under_the_prefix_is_nothing(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    """NeMo 1 settings over NeMo 2 weights would leave a model as it was drawn."""
    foreign.nemo1(tmp_path / "theirs", tensors, tokenizer_folder)
    shutil.rmtree(tmp_path / "theirs" / "model_weights")
    foreign.save(tmp_path / "theirs" / "model_weights", tensors, "module.")
    with pytest.raises(CheckpointError, match=r"model\.embedding.*: got none"):
        load(tmp_path / "theirs", layout)


@pytest.mark.parametrize("write", [bridge, nemo2, zarr_folder], ids=lambda write: write.__name__)
def test_ranks_get_what_was_written(
    write: Writer, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    """At TP=2 and at PP=2, from layers stacked and apart."""
    from megatron.core import dist_checkpointing

    from tests.checkpoint.resave import LAYOUTS

    if write is zarr_folder:
        pytest.importorskip("zarr")
    source = write(tmp_path / "theirs", tensors, tokenizer_folder)
    tiny.run_script("tests/checkpoint/resave.py", str(source), str(tmp_path), processes=2)
    for name in LAYOUTS:
        got = dist_checkpointing.load_plain_tensors(str(tmp_path / name))
        for key, tensor in tensors.items():
            if key != "output_layer.weight":
                rows = slice(tiny.SHAPE["vocab_size"] if "embedding" in key else None)
                found = got[f"model.{key}"][rows]
                torch.testing.assert_close(found, tensor[rows], rtol=0, atol=0)


def test_weights_survive_another_layout(layout: Any, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    done = tiny.run_script("tests/checkpoint/resave.py", str(base), str(tmp_path), processes=2)
    assert done.stdout.count("all ranks know: missing.nemo: no such") == 2 * len(LAYOUTS)
    with open_nemo(base) as folder:
        wanted = dist_checkpointing.load_plain_tensors(str(folder.weights))
    for layout in LAYOUTS:
        got = dist_checkpointing.load_plain_tensors(str(tmp_path / layout))
        assert got.keys() == wanted.keys() | {"model.rm_head.weight"}
        for key, tensor in wanted.items():
            rows = slice(tiny.SHAPE["vocab_size"]) if "embedding" in key else slice(None)
            torch.testing.assert_close(got[key][rows], tensor, rtol=0, atol=0)
