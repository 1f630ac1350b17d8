"""Stored pieces that are missing, cut off, damaged, or no tensors at all."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from nemo_aligner.checkpoint.nemo.archive import sha256_of
from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.checkpoint.weights.pieces import check_pieces
from nemo_aligner.errors import CheckpointError
from tests.checkpoint.loading import (
    Bomb,
    edit,
    files_of,
    load,
    refuse,
)


@pytest.mark.parametrize("has_checksums", [False, True])
def test_an_index_that_promises_too_much_is_refused(
    has_checksums: bool, unpacked: Path, layout: Any
) -> None:
    """Settings and index agree on a size that the files do not have; anyone can write sums."""
    from nemo_aligner.checkpoint.weights.index import read_metadata

    weights = unpacked / "model_weights"
    metadata = read_metadata(weights)
    entry = metadata.state_dict_metadata["model.embedding.word_embeddings.weight"]
    size = torch.Size([2**30, 16])
    object.__setattr__(entry, "size", size)
    entry.chunks[0].sizes = size
    (weights / ".metadata").write_bytes(pickle.dumps(metadata))
    edit(unpacked, vocab_size=2**30)
    if has_checksums:
        sums = {
            file.relative_to(unpacked).as_posix(): sha256_of(file) for file in files_of(unpacked)
        }
        (unpacked / "checksums.json").write_text(json.dumps(sums))
    refuse(unpacked, layout, "wanted at least 68719476736")


def distcp(unpacked: Path) -> Path:
    (path,) = (unpacked / "model_weights").glob("*.distcp")
    return path


@pytest.mark.parametrize("name", ["self_attention.linear_qkv.weight", "mlp.linear_fc2.weight"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_flipped_bit_of_untrusted_weights_is_found(
    name: str, layer: int, unpacked: Path, layout: Any
) -> None:
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(str(unpacked / "model_weights"))
    row = tensors[f"model.decoder.layers.{name}"][layer, -1].numpy().tobytes()
    data = bytearray(distcp(unpacked).read_bytes())
    data[data.index(row) + 5] ^= 4
    distcp(unpacked).write_bytes(data)
    refuse(unpacked, layout, f"{name}: damaged: .* has another CRC-32")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "no such file, wanted the data of"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "the file ends at|damaged"),
        (lambda path: path.write_bytes(b""), "the file ends at 0"),
    ],
    ids=["missing", "cut", "empty"],
)
def test_a_shard_that_is_not_whole_is_named(
    damage: Callable[[Path], None], message: str, unpacked: Path, layout: Any
) -> None:
    damage(distcp(unpacked))
    refuse(unpacked, layout, message)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "_extra_state", "piece"])
def test_no_pickle_is_run(name: str, unpacked: Path, layout: Any, tmp_path: Path) -> None:
    """Wherever a checkpoint may hold one: it is refused, or never opened."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    from nemo_aligner.checkpoint.weights.index import read_metadata

    weights = unpacked / "model_weights"
    bomb = Bomb(tmp_path / "executed")
    if name == "common.pt":
        torch.save({"bomb": bomb}, weights / name)
        load(unpacked, layout)  # it is not asked for
    elif name == ".metadata":
        (weights / name).write_bytes(pickle.dumps(bomb))
        refuse(unpacked, layout, "refused")
    else:
        stream = io.BytesIO()
        torch.save(bomb, stream)
        (weights / "__1_0.distcp").write_bytes(stream.getvalue())
        metadata = read_metadata(weights)
        key = "model.decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
        index = MetadataIndex(key)
        if name == "piece":
            key = "model.decoder.final_layernorm.weight"
            index = MetadataIndex(key, torch.Size([0]))
        else:
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
        info = next(iter(metadata.storage_data.values()))
        metadata.storage_data[index] = type(info)("__1_0.distcp", 0, len(stream.getvalue()))
        (weights / ".metadata").write_bytes(pickle.dumps(metadata))
        if name == "piece":
            refuse(unpacked, layout, "final_layernorm|Weights only|weights_only")
        else:
            load(unpacked, layout)
    assert not (tmp_path / "executed").exists()


def first_tensor(metadata: Any) -> tuple[str, Any]:
    """A tensor of at least two numbers, by name, and its entry in the index."""
    return next(
        (name, entry)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and math.prod(entry.size) > 1
    )


def test_pieces_that_make_up_every_tensor_pass(saved: Path) -> None:
    check_pieces(saved, read_metadata(saved), read=True)


@pytest.mark.parametrize("rows", [-1, 1])
def test_pieces_have_to_make_up_the_shape_of_their_tensor(rows: int, saved: Path) -> None:
    metadata = read_metadata(saved)
    name, entry = first_tensor(metadata)
    entry.size = torch.Size([entry.size[0] - rows, *entry.size[1:]])
    wanted = "lies outside" if rows > 0 else "do not make up its shape"
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: .*{wanted}"):
        check_pieces(saved, metadata, read=False)


def test_a_damaged_piece_is_named_when_it_is_read(saved: Path) -> None:
    metadata = read_metadata(saved)
    name, entry = first_tensor(metadata)
    info = metadata.storage_data[MetadataIndex(name, entry.chunks[0].offsets)]
    file = saved / info.relative_path
    data = bytearray(file.read_bytes())
    stored = torch.load(io.BytesIO(data[info.offset :][: info.length]), weights_only=True)
    data[data.index(stored.flatten().view(torch.uint8).numpy().tobytes(), info.offset)] ^= 1
    file.write_bytes(data)
    check_pieces(saved, metadata, read=False)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: damaged: "):
        check_pieces(saved, metadata, read=True)
