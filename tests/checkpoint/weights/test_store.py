"""Opened weights: they come back as they were, and what does not fit is one clear error."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.checkpoint.weights.store import open_weights
from nemo_aligner.errors import CheckpointError
from tests.checkpoint.weights.tensors import check_loaded, load, request, sharded

pytestmark = pytest.mark.usefixtures("layout")


def test_tensors_come_back_bit_for_bit(saved: Path) -> None:
    check_loaded(load(saved))
    assert open_weights(saved).tensors == {
        "model.embedding": ((6, 4), torch.float32),
        "model.layers.weight": ((2, 3, 4), torch.float32),
    }


def test_the_format_is_megatron_cores_own_both_ways(tmp_path: Path, saved: Path) -> None:
    from megatron.core import dist_checkpointing

    wanted = request(fill=-1.0)
    del wanted["model._extra_state"]
    check_loaded(dist_checkpointing.load(wanted, str(saved)))

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    dist_checkpointing.save(request(), str(theirs))
    check_loaded(load(theirs))


def test_weights_take_the_models_dtype(saved: Path) -> None:
    state = load(saved, request(fill=0.0, dtype=torch.bfloat16))
    assert state["model.embedding"].dtype is torch.bfloat16
    assert state["model.embedding"][0, 1] == 1.5


@pytest.mark.parametrize("rows", [5, 8])
def test_a_padded_vocabulary_may_differ_in_rows(rows: int, saved: Path) -> None:
    embedding = sharded("model.embedding", torch.full((rows, 4), 7.0), allow_shape_mismatch=True)
    loaded = load(saved, {"model.embedding": embedding})["model.embedding"]
    common = min(rows, 6)
    torch.testing.assert_close(loaded[:common], request()["model.embedding"].data[:common])
    assert not loaded[common:].any()


def test_missing_tensors_are_listed(saved: Path) -> None:
    wanted = {
        f"model.new.{number}": sharded(f"model.new.{number}", torch.zeros(2)) for number in range(8)
    }
    with pytest.raises(
        CheckpointError, match=r"8 tensors are missing: model\.new\.0, .* and 3 more"
    ):
        load(saved, wanted)


def test_another_shape_names_both(saved: Path) -> None:
    wanted = {"w": sharded("model.layers.weight", torch.zeros(2, 3, 5))}
    with pytest.raises(
        CheckpointError, match=r"layers\.weight: got shape \[2, 3, 4\], wanted \[2, 3, 5\]"
    ):
        load(saved, wanted)


def test_damaged_data_is_an_error_of_ours(saved: Path) -> None:
    for data in saved.glob("*.distcp"):
        data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="weights"):
        load(saved)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_a_missing_part_is_named(name: str, saved: Path) -> None:
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load(saved)


def test_what_lies_beside_the_tensors_cannot_take_the_name_of_one(saved: Path) -> None:
    for common in ({"model.embedding": 1}, [1]):
        torch.save(common, saved / "common.pt")
        with pytest.raises(CheckpointError, match="beside the tensors: Duplicate"):
            load(saved)


def test_another_format_is_named(saved: Path) -> None:
    description = {"sharded_backend": "fsdp_dtensor", "sharded_backend_version": 1}
    (saved / "metadata.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="got the format 'fsdp_dtensor', wanted 'torch_dist'"):
        load(saved)


def test_a_load_reads_the_index_once(saved: Path, index_reads: list[str]) -> None:
    load(saved)
    assert index_reads == [str(saved / ".metadata")]
    index_reads.clear()
    store = open_weights(saved)
    store.check_data(read=True)
    for layer in range(2):
        torch.testing.assert_close(
            store.read("model.layers.weight", layer), request()[f"{layer}.weight"].data
        )
    store.load(request(fill=0.0))
    assert len(index_reads) == 1


def test_a_tensor_that_is_not_there_cannot_be_read(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the tensor model\.new is missing"):
        open_weights(saved).read("model.new")


def test_a_piece_that_the_index_lacks_is_no_whole_tensor(saved: Path) -> None:
    metadata = read_metadata(saved)
    del metadata.state_dict_metadata["model.layers.weight"].chunks[1]
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    for use in (lambda: load(saved), lambda: open_weights(saved).read("model.layers.weight")):
        with pytest.raises(CheckpointError, match=r"layers\.weight: got a part of it"):
            use()
