"""Stored pieces that are missing, cut off, damaged, or no tensors at all."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.nemo.archive import sha256_of
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
