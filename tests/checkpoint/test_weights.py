"""Distributed weights: round trip, clear complaints, and nothing a stranger wrote is executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    MetadataIndex,
)

from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.errors import CheckpointError


class Bomb:
    """Unpickling one creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    from nemo_aligner.parallel.launch import launch

    with launch():
        yield


def sharded(key: str, data: torch.Tensor, *offsets: tuple, **options: Any) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, data, *offsets, **options)


def request(fill: float | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """An embedding, two stacked layers, an opaque object; of counted numbers, or of ``fill``."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def tensor(start: float, *shape: int) -> torch.Tensor:
        numbers = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
        return (numbers if fill is None else torch.full(shape, fill)).to(dtype)

    layers = {
        f"{layer}.weight": sharded(
            "model.layers.weight", tensor(100.0 * layer, 3, 4), (0, layer, 2), prepend_axis_num=1
        )
        for layer in range(2)
    }
    return {
        "model.embedding": sharded("model.embedding", tensor(0.5, 6, 4), allow_shape_mismatch=True),
        **layers,
        "model._extra_state": ShardedObject("model._extra_state", None, (1,), (0,)),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    from nemo_aligner.checkpoint.weights.save import save_weights

    save_weights(request(), tmp_path / "weights")
    return tmp_path / "weights"


def check_loaded(state: dict[str, Any]) -> None:
    wanted = request()
    assert state.keys() == wanted.keys() - {"model._extra_state"}
    for name, value in state.items():
        torch.testing.assert_close(value, wanted[name].data, rtol=0, atol=0)


def load(folder: Path, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    from nemo_aligner.checkpoint.weights.store import load_weights

    return load_weights(request(fill=-1.0) if wanted is None else wanted, folder)


def test_tensors_come_back_bit_for_bit(saved: Path) -> None:
    from nemo_aligner.checkpoint.weights.store import open_weights

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
    shared = min(rows, 6)
    torch.testing.assert_close(loaded[:shared], request()["model.embedding"].data[:shared])
    assert not loaded[shared:].any()


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


def test_another_format_is_named(saved: Path) -> None:
    description = {"sharded_backend": "fsdp_dtensor", "sharded_backend_version": 1}
    (saved / "metadata.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="got the format 'fsdp_dtensor', wanted 'torch_dist'"):
        load(saved)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_pickle_is_not_executed(name: str, saved: Path, tmp_path: Path) -> None:
    (saved / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match="refused"):
        load(saved)
    assert not (tmp_path / "executed").exists()


def test_code_hidden_inside_a_good_index_is_not_executed(saved: Path, tmp_path: Path) -> None:
    metadata = read_metadata(saved)
    metadata.planner_data = {"x": Bomb(tmp_path / "executed")}
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="refused"):
        load(saved)
    assert not (tmp_path / "executed").exists()


class Attribute:
    """Pickled as ``getattr(owner, name)``."""

    def __init__(self, owner: object, name: str) -> None:
        self.call = (getattr, (owner, name))

    def __reduce__(self) -> tuple:
        return self.call


def test_getattr_gives_members_of_enums_and_nothing_else(saved: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickle the member of an enum like this."""
    metadata = read_metadata(saved)
    metadata.planner_data = {"x": Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")}
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_metadata(saved).planner_data == {"x": _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST}
    for owner, name in ((_MEM_FORMAT_ENCODING, "__init__"), (MetadataIndex, "__init__")):
        metadata.planner_data = {"x": Attribute(owner, name)}
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="it asks for attribute '__init__'"):
            read_metadata(saved)


@pytest.mark.parametrize("key", ["model._extra_state/shard_0_1", "model.embedding"])
def test_opaque_bytes_are_not_executed(key: str, saved: Path, tmp_path: Path) -> None:
    """As an opaque object beside the tensors, and in the place of a tensor."""
    metadata = read_metadata(saved)
    bomb = saved / "__9_9.distcp"
    torch.save(Bomb(tmp_path / "executed"), bomb)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    some_info = next(iter(metadata.storage_data.values()))
    metadata.storage_data[MetadataIndex(key)] = type(some_info)(bomb.name, 0, bomb.stat().st_size)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    if key == "model.embedding":
        with pytest.raises(CheckpointError, match=r"missing: model\.embedding"):
            load(saved)
    else:
        check_loaded(load(saved))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", ".."])
def test_data_outside_the_folder_is_refused(name: str, saved: Path) -> None:
    metadata = read_metadata(saved)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="not in its folder"):
        load(saved)


def test_linked_data_is_refused(saved: Path, tmp_path: Path) -> None:
    data = next(saved.glob("*.distcp"))
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        load(saved)


def test_a_pending_save_writes_its_copies(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.weights.save import copy_tensors, start_saving
    from nemo_aligner.checkpoint.weights.store import load_weights

    state, host = request(), {}
    live = [entry.data for entry in state.values() if entry.data is not None]
    copy_tensors(state, host)
    pending = start_saving(state, tmp_path / "weights")
    for tensor in live:
        tensor.zero_()
    pending.finish()
    assert pending.is_written
    check_loaded(load_weights(request(fill=0.0), tmp_path / "weights"))
    memory = [tensor.data_ptr() for tensor in host.values()]
    copy_tensors(request(fill=2.0), host)
    assert [tensor.data_ptr() for tensor in host.values()] == memory
    assert all(bool((tensor == 2.0).all()) for tensor in host.values())


def test_a_failed_write_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    from nemo_aligner.checkpoint.weights.save import start_saving

    def fail(*unused: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    pending = start_saving(request(), tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"weights: rank 0: \[Errno 28\] No space left"):
        pending.finish()
    assert pending.is_written
    assert not (tmp_path / "weights" / "metadata.json").exists()
