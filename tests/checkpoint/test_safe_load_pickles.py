"""Small pickles that would take hours to load are refused by every function that reads one."""

from __future__ import annotations

import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.checkpoint.safe_load import bounded_torch_load, read_metadata
from nemo_aligner.checkpoint.weights import open_weights
from nemo_aligner.checkpoint.weights.store import read_common
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.loading import Bomb
from tests.harness import tiny

# Without a limit each bomb takes one or two seconds; each further level doubles that.
_LEVELS = 26
_TUPLES = b")" + b"q\x00h\x00\x86" * _LEVELS
_LISTS = b"]" + b"q\x00](h\x00h\x00e" * _LEVELS
_NAMESPACE = b"cargparse\nNamespace\n"
BOMBS = {
    "a key": b"}" + _TUPLES + b"Ns.",
    "one of several keys": b"}(K\x01N" + _TUPLES + b"Nu.",
    "the id of a storage": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    + _TUPLES
    + b"X\x03\x00\x00\x00cpuK\x01tQ.",
    "what is called": _TUPLES + b")R.",
    "an argument": b"ctorch\nSize\n" + _TUPLES + b"\x85R.",
    "lists in an argument": b"ccollections\nCounter\n" + _LISTS + b"\x85R.",
    "an argument of a new object": _NAMESPACE + _TUPLES + b"\x85\x81.",
    "the state of an object": _NAMESPACE + b")\x81}X\x01\x00\x00\x00a" + _TUPLES + b"sb.",
    "a value": b"}K\x01" + _TUPLES + b"s.",
    "a terabyte of zeros": b"cbuiltins\nbytearray\n\x8a\x06" + b"\x00" * 5 + b"\x01\x85R.",
}
Door = Callable[[Path], object]


def as_torch_saves(content: bytes, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in (("data.pkl", content), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", member)


def put_among_shards(path: Path, index: MetadataIndex) -> Path:
    """Make the index next to ``path`` name that file as the data of ``index``."""
    metadata = read_metadata(path.parent)
    info = next(iter(metadata.storage_data.values()))
    metadata.storage_data[index] = type(info)(path.name, 0, path.stat().st_size)
    (path.parent / ".metadata").write_bytes(pickle.dumps(metadata))
    return path.parent


@pytest.fixture
def doors(saved: Path, tmp_path: Path) -> list[tuple[str, Path, Door]]:
    """Yield every function that reads pickles, with the file that it reads."""
    classifier = tmp_path / "classifier"
    classifier.mkdir()
    tiny.write_hf_reward_model(classifier)
    (classifier / "model.safetensors").unlink()
    (tmp_path / "newer").mkdir()
    for file in saved.iterdir():
        (tmp_path / "newer" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "newer" / "common.pt").unlink()
    common_index = MetadataIndex("common_state/shard_0_1")
    embedding = MetadataIndex("model.embedding", torch.Size([0, 0]))
    return [
        ("common.pt", saved / "common.pt", lambda _: read_common(saved)),
        (
            "common state among shards",
            tmp_path / "newer" / "__9_9.distcp",
            lambda path: read_common(put_among_shards(path, common_index)),
        ),
        (
            "a tensor's shard",
            saved / "__9_9.distcp",
            lambda path: open_weights(put_among_shards(path, embedding)).read("model.embedding"),
        ),
        (
            "another's weights",
            classifier / "pytorch_model.bin",
            lambda path: load_hf_reward_model(str(path.parent), None, 8192),
        ),
    ]


def test_pickle_bombs_are_refused_at_once_at_every_door(doors: list[Any]) -> None:
    wrong = []
    for door, path, read in doors:
        for bomb, content in BOMBS.items():
            for form, write in (("zip", as_torch_saves), ("pickle", _as_plain_pickle)):
                write(content, path)
                began = time.perf_counter()
                with pytest.raises(CheckpointError) as caught:
                    read(path)
                took, message = time.perf_counter() - began, str(caught.value)
                is_refused_by_size = (
                    form == "pickle" or " parts" in message or "bytearray" in message
                )
                if not is_refused_by_size or len(message) > 1000 or took > 10:
                    wrong.append((door, bomb, form, f"{took:.1f} s", message[:200]))
    assert not wrong, wrong


def _as_plain_pickle(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def test_pickle_of_a_compressed_file_is_refused(saved: Path) -> None:
    """Compressed files are refused, because they may expand to any size."""
    with zipfile.ZipFile(saved / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"N" * 10**7 + b".")
    with pytest.raises(CheckpointError, match="it is compressed"):
        read_common(saved)


def test_pickle_that_another_library_loads_runs_no_code(tmp_path: Path) -> None:
    path, content = tmp_path / "pytorch_model.bin", {"weight": torch.ones(2)}
    torch.save({**content, "x": Bomb(tmp_path / "executed")}, path)
    with bounded_torch_load(), pytest.raises(pickle.UnpicklingError, match="Weights only"):
        torch.load(path, weights_only=False)
    assert not (tmp_path / "executed").exists()
    torch.save(content, path)
    with bounded_torch_load(), path.open("rb") as stored:
        assert torch.equal(torch.load(stored)["weight"], content["weight"])


def test_pickles_of_plain_data_and_tensors_are_read(saved: Path, tmp_path: Path) -> None:
    content = {
        "args": {"rope": [1.5, None, True], ("a", 1): "x", "raw": b"\x00\xff", "many": {1, 2}},
        "size": torch.Size([2, 3]),
        "tensor": torch.arange(6.0).reshape(2, 3).T,
        "mutable": bytearray(b"abc"),
    }
    torch.save(content, saved / "common.pt")
    common = read_common(saved)
    assert torch.equal(common.pop("tensor"), content.pop("tensor"))
    assert common == content

    tiny.write_hf_reward_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    model = load_hf_reward_model(str(tmp_path), None, 8192)
    assert score_all(model, ["a cat"]).shape == (1, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2),
        torch.arange(100.0)[4:28].reshape(2, 4, 3),
        torch.arange(24).reshape(2, 4, 3).to(torch.float8_e4m3fn),
        torch.arange(24).reshape(2, 4, 3).bfloat16(),
        torch.nn.Parameter(torch.arange(24.0).reshape(2, 4, 3), requires_grad=False),
    ],
)
def test_piece_laid_out_in_any_way_is_read(tensor: torch.Tensor, saved: Path) -> None:
    """Shards are read from contiguous, offset and strided storages, and in rare dtypes."""
    from nemo_aligner.checkpoint.weights.shards import read_shard

    path = saved / "shard"
    torch.save(tensor, path)
    for offsets, shape in (([0, 0, 0], (2, 4, 3)), ([1, 1, 0], (1, 2, 3)), ([0, 1, 1], (2, 2, 2))):
        target = torch.full(shape, -1.0)
        with path.open("rb") as stored:
            read_shard(stored, offsets, tensor.shape, target)
        box = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
        assert torch.equal(target, tensor[box].float()), (offsets, shape)
