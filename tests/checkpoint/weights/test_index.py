"""The index of untrusted weights: nothing in it is run, and it points nowhere else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
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
from tests.checkpoint.loading import Bomb, refuse
from tests.checkpoint.weights.tensors import check_loaded, load

pytestmark = pytest.mark.usefixtures("layout")


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
    """As an opaque object beside the tensors, and instead of a tensor."""
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


def test_an_index_may_not_change_the_classes_that_it_names(unpacked: Path, layout: Any) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    module = b"torch.distributed.checkpoint.metadata"
    # BUILD on a class: a pair of states, of which the second is set attribute by attribute.
    code = b"c" + module + b"\nMetadata\n(N}(S'planted'\nI1\nutb."
    (unpacked / "model_weights" / ".metadata").write_bytes(code)
    refuse(unpacked, layout, r"\.metadata: refused")
    assert not hasattr(Metadata, "planted")


def break_info(metadata: Any, name: str) -> None:
    object.__delattr__(next(iter(metadata.storage_data.values())), name)


def break_entry(metadata: Any, name: str) -> None:
    object.__delattr__(metadata.state_dict_metadata["model.decoder.final_layernorm.weight"], name)


@pytest.mark.parametrize(
    "damage",
    [
        lambda metadata: break_info(metadata, "offset"),
        lambda metadata: break_info(metadata, "length"),
        lambda metadata: break_info(metadata, "relative_path"),
        lambda metadata: break_entry(metadata, "size"),
        lambda metadata: break_entry(metadata, "properties"),
        lambda metadata: break_entry(metadata, "chunks"),
        lambda metadata: delattr(metadata, "state_dict_metadata"),
        lambda metadata: setattr(metadata, "storage_data", {}),
        lambda metadata: setattr(metadata, "storage_data", [1]),
        lambda metadata: metadata.state_dict_metadata.clear(),
    ],
)
def test_an_index_that_lacks_something_is_refused(
    damage: Callable[[Any], None], unpacked: Path, layout: Any
) -> None:
    from nemo_aligner.checkpoint.weights.index import read_metadata

    metadata = read_metadata(unpacked / "model_weights")
    damage(metadata)
    (unpacked / "model_weights" / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(unpacked, layout, r"\.metadata|word_embeddings\.weight: got none")


def index_of(key: bytes) -> bytes:
    """An index in which the object that ``key`` makes is the key of a dict."""
    return b"}" + key + b"Ns."


def test_index_of_objects_in_objects_is_refused_at_once(tmp_path: Path) -> None:
    """Each level names the one below twice: 40 of them would take hours to hash."""
    module = b"torch.distributed.checkpoint."
    record = b"c" + module + b"metadata\nMetadataIndex\n)\x81"
    tuples = b")" + b"2\x86" * 40
    records = (
        record
        + b"q\x00"
        + b"".join(
            b"0%bq%c}(X\x03\x00\x00\x00fqnh%cX\x06\x00\x00\x00offseth%cub"
            % (record, level, level - 1, level - 1)
            for level in range(1, 40)
        )
    )
    pickles = {
        "tuples": index_of(tuples),
        "put and got": index_of(b")" + b"q\x00h\x00\x86" * 40),
        "records": index_of(records),
        "in a set": b"\x8f(" + tuples + b"\x90.",
        "in a frozen set": b"(" + tuples + b"\x91.",
        "an argument": b"c" + module + b"planner\nWriteItemType\n" + tuples + b"R.",
        "lists": b"c"
        + module
        + b"planner\nWriteItemType\n]"
        + b"q\x00](h\x00h\x00e" * 40
        + b"\x85R.",
    }
    for name, content in pickles.items():
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match="of more than 10000 parts"):
            read_metadata(tmp_path)
        assert len(content) < 5000, name


def test_index_that_is_wrong_is_told_in_few_words(saved: Path) -> None:
    whole = (saved / ".metadata").read_bytes()
    long = "x" * 10**6
    much: Any = [1]
    for _ in range(40):
        much = [much, much]

    def change_dtype(metadata: Any, value: Any) -> None:
        entries = metadata.state_dict_metadata.values()
        properties = next(each.properties for each in entries if hasattr(each, "properties"))
        object.__setattr__(properties, "dtype", value)

    def change_file(metadata: Any, value: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = value

    def name_file(metadata: Any, value: Any) -> None:
        info = next(iter(metadata.storage_data.values()))
        metadata.storage_data[MetadataIndex(value)] = info

    for change, value, wanted in (
        (change_dtype, much, "got list, wanted a dtype"),
        (change_dtype, long, "got str, wanted a dtype"),
        (change_file, much, "got list, "),
        (change_file, f"{long}/", "is not in its folder"),
        (name_file, (1, 2), "got tuple, wanted the name of a tensor"),
    ):
        (saved / ".metadata").write_bytes(whole)
        metadata = read_metadata(saved)
        change(metadata, value)
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=wanted) as caught:
            read_metadata(saved)
        assert len(str(caught.value)) < 1000
