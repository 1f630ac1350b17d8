"""Untrusted indexes and shards: no code runs, and missing or misplaced data is found."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import SavePlan

from nemo_aligner.checkpoint.safe_load import read_metadata
from nemo_aligner.checkpoint.weights import open_weights
from tests.checkpoint.fuzzing import files_of
from tests.checkpoint.loading import Bomb, edit, refuse
from tests.checkpoint.refusals import check_damages, overwrite, refusals
from tests.checkpoint.weights.tensors import check_loaded, load

pytestmark = pytest.mark.usefixtures("layout")

EMBEDDING = "model.embedding"


@contextmanager
def edited_index(folder: Path) -> Iterator[Any]:
    """Yield the index of the weights in ``folder``, and write it back after the block."""
    metadata = read_metadata(folder)
    yield metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def index_edit(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with edited_index(folder) as metadata:
            change(metadata)

    return damage


def check_and_load(folder: Path) -> None:
    """Check and load weights like those of an archive without checksums."""
    open_weights(folder).check_data(read=True)
    check_loaded(load(folder))


def first_info(metadata: Any) -> Any:
    """Return the storage info of the first shard."""
    return next(iter(metadata.storage_data.values()))


def test_code_is_never_run(saved: Path, tmp_path: Path) -> None:
    """A pickle in any file of the weights is refused or not read."""
    bomb = Bomb(tmp_path / "executed")

    def write(name: str) -> Callable[[Path], object]:
        return lambda folder: (folder / name).write_bytes(pickle.dumps(bomb))

    def put_under(key: str, is_object: bool = True) -> Callable[[Path], None]:
        def damage(folder: Path) -> None:
            file = folder / "__9_9.distcp"
            torch.save(bomb, file)
            with edited_index(folder) as metadata:
                index = MetadataIndex(key, None if is_object else torch.Size([0, 0]))
                if is_object:
                    metadata.state_dict_metadata[key] = BytesStorageMetadata()
                info = type(first_info(metadata))
                metadata.storage_data[index] = info(file.name, 0, file.stat().st_size)

        return damage

    damages = [
        (write(".metadata"), "cannot be read safely"),
        (write("common.pt"), "cannot be read safely"),
        (
            index_edit(lambda metadata: setattr(metadata, "planner_data", {"x": bomb})),
            "cannot be read safely",
        ),
        (put_under(EMBEDDING), r"missing: model\.embedding"),
        (put_under(EMBEDDING, is_object=False), r"model\.embedding: cannot be read"),
    ]
    check_damages(saved, damages, load)
    put_under("model._extra_state/shard_0_1")(saved)
    check_and_load(saved)
    write("common.pt")(saved)
    open_weights(saved).check_data(read=True)
    assert not (tmp_path / "executed").exists()


class Attribute:
    """An object that is pickled as ``getattr(owner, name)``."""

    def __init__(self, owner: object, name: str) -> None:
        self.call = (getattr, (owner, name))

    def __reduce__(self) -> tuple:
        return self.call


def test_index_getattr_gives_members_of_enums_and_nothing_else(saved: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickle enum members with ``getattr``; nothing else may use it."""
    with edited_index(saved) as metadata:
        metadata.planner_data = {"x": Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")}
    assert read_metadata(saved).planner_data == {"x": _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST}
    with refusals() as refused:
        for owner in (_MEM_FORMAT_ENCODING, MetadataIndex):
            metadata.planner_data = {"x": Attribute(owner, "__init__")}
            (saved / ".metadata").write_bytes(pickle.dumps(metadata))
            with refused(owner, "attribute '__init__'"):
                read_metadata(saved)


def hostile_pickles() -> Iterator[tuple[bytes, str]]:
    """Pickles of objects in objects, each naming the one below twice: 40 would take hours to hash.

    And one that changes a class: BUILD with a pair of states sets the second one's attributes.
    """
    module = b"torch.distributed.checkpoint."
    yield (
        b"c" + module + b"metadata\nMetadata\n(N}(S'planted'\nI1\nutb.",
        r"\.metadata: cannot be read safely",
    )

    tuples = b")" + b"2\x86" * 40
    record = b"c" + module + b"metadata\nMetadataIndex\n)\x81"
    state = b"0%bq%c}(X\x03\x00\x00\x00fqnh%cX\x06\x00\x00\x00offseth%cub"
    records = b"".join(state % (record, level, level - 1, level - 1) for level in range(1, 40))
    function = b"c" + module + b"planner\nWriteItemType\n"
    for content in (
        b"}" + tuples + b"Ns.",
        b"})" + b"q\x00h\x00\x86" * 40 + b"Ns.",
        b"}" + record + b"q\x00" + records + b"Ns.",
        b"\x8f(" + tuples + b"\x90.",
        b"(" + tuples + b"\x91.",
        function + tuples + b"R.",
        function + b"]" + b"q\x00](h\x00h\x00e" * 40 + b"\x85R.",
    ):
        assert len(content) < 5000
        yield content, "of more than 10000 parts"


def test_index_that_is_a_hostile_pickle_is_refused_at_once(tmp_path: Path) -> None:
    with refusals() as refused:
        for content, pattern in hostile_pickles():
            (tmp_path / ".metadata").write_bytes(content)
            with refused(content[:60], pattern):
                read_metadata(tmp_path)
    assert not hasattr(Metadata, "planted")


def wrong_numbers() -> Iterator[tuple[Callable[[Any], object], str]]:
    def put(kind: str, name: str, value: Any) -> Callable[[Any], object]:
        def change(metadata: Any) -> None:
            entry = metadata.state_dict_metadata[EMBEDDING]
            changed = {"entry": entry, "chunk": entry.chunks[0], "info": first_info(metadata)}
            setattr(changed[kind], name, value)

        return change

    for wrong in (-1, 6.0, True, "6"):
        for kind, name in (("entry", "size"), ("chunk", "offsets"), ("chunk", "sizes")):
            yield put(kind, name, (wrong, 4)), "'model.embedding': a shape has entries that are not"
        for name in ("offset", "length"):
            yield put("info", name, wrong), "wanted a file name, an offset in the file and a length"


def damages_of_the_index() -> Iterator[tuple[Callable[[Any], object], str]]:
    """Yield changes of the index with the pattern of the error."""
    long = "x" * 10**6
    much: Any = [1]
    for _ in range(40):
        much = [much, much]

    def set_file(value: Any) -> Callable[[Any], object]:
        return lambda metadata: setattr(first_info(metadata), "relative_path", value)

    def set_dtype(value: Any) -> Callable[[Any], object]:
        def change(metadata: Any) -> None:
            properties = metadata.state_dict_metadata[EMBEDDING].properties
            object.__setattr__(properties, "dtype", value)

        return change

    def resize(rows: int) -> Callable[[Any], object]:
        size = torch.Size([rows, 4])
        return lambda metadata: setattr(metadata.state_dict_metadata[EMBEDDING], "size", size)

    for name in ("offset", "length", "relative_path"):
        yield lambda m, name=name: object.__delattr__(first_info(m), name), rf"\.metadata.*{name}"
    for name in ("size", "properties", "chunks"):
        yield (
            lambda m, name=name: object.__delattr__(m.state_dict_metadata[EMBEDDING], name),
            rf"\.metadata.*{name}",
        )
    yield lambda metadata: delattr(metadata, "state_dict_metadata"), r"\.metadata"
    yield (
        lambda metadata: setattr(metadata, "storage_data", {}),
        r"\.metadata: model\.\S+: the index does not say in which file the shard at \(0, ",
    )
    yield lambda metadata: setattr(metadata, "storage_data", [1]), r"\.metadata"
    yield lambda metadata: metadata.state_dict_metadata.clear(), "tensors are missing"
    yield set_dtype(much), "got list, wanted a dtype"
    yield set_dtype(long), "got str, wanted a dtype"
    yield set_file(much), "types list, "
    yield (
        lambda m: m.storage_data.update({MetadataIndex((1, 2)): first_info(m)}),
        "got tuple, wanted the name of a tensor",
    )
    for name in ("../secret", "/etc/hostname", "..", f"{long}/"):
        yield set_file(name), "outside the checkpoint's folder"
    yield resize(5), r"model\.embedding: .*lies outside"
    yield resize(7), r"model\.embedding: .*do not cover its shape"


def wrong_shards() -> Iterator[tuple[Callable[[Any], object], str]]:
    def cut(metadata: Any, size: tuple[int, ...], rows: int, starts: tuple[int, ...]) -> None:
        """Make a shard of ``rows`` rows at each of ``starts``."""
        entry, info = metadata.state_dict_metadata[EMBEDDING], first_info(metadata)
        entry.size = torch.Size(size)
        entry.chunks.clear()
        for row in starts:
            offsets, sizes = torch.Size([row, *[0] * (len(size) - 1)]), [rows, *size[1:]]
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(sizes)))
            metadata.storage_data[MetadataIndex(EMBEDDING, offsets)] = info

    # These overlap, but have as many elements as the tensor, whose last rows they lack.
    yield lambda m: cut(m, (6, 4), 2, (0, 1, 2)), r"model\.embedding: its shards overlap or do not"
    yield (
        lambda m: cut(m, (6, 4, *[1] * 38), 6, (0,)),
        r"model\.embedding: got a shape of 40 axes, wanted at most 8",
    )


def test_index_that_is_wrong_is_refused(saved: Path) -> None:
    changes = (*damages_of_the_index(), *wrong_numbers(), *wrong_shards())
    check_damages(
        saved, ((index_edit(change), pattern) for change, pattern in changes), check_and_load
    )


def test_index_of_another_kind_is_refused(saved: Path) -> None:
    """An index of another class is refused, even if it has the same fields."""
    metadata = read_metadata(saved)
    look_alike = SavePlan([])
    vars(look_alike).update(vars(metadata))
    wrong = pickle.dumps(look_alike)
    pattern = "got SavePlan, wanted a checkpoint index"
    check_damages(saved, [(overwrite(".metadata", wrong), pattern)], check_and_load)


def test_data_that_is_missing_cut_off_or_a_link_is_named(saved: Path, tmp_path: Path) -> None:
    (name,) = (path.name for path in saved.glob("*.distcp"))

    def link(folder: Path) -> None:
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")

    damages = [
        (lambda folder: (folder / name).unlink(), "no such file, but the index places"),
        (lambda folder: cut(folder / name, -100), "the file ends at|damaged"),
        (lambda folder: cut(folder / name, 0), "the file ends at 0"),
        (link, "is a link"),
    ]
    check_damages(saved, damages, check_and_load)


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def test_index_that_promises_too_much_is_refused(unpacked: Path, layout: Any) -> None:
    """Sizes in settings and index that the files lack are refused, even with correct checksums."""
    weights, size = unpacked / "model_weights", torch.Size([2**30, 16])
    with edited_index(weights) as metadata:
        entry = metadata.state_dict_metadata["model.embedding.word_embeddings.weight"]
        entry.size = entry.chunks[0].sizes = size
    edit(unpacked, vocab_size=2**30)
    refuse(unpacked, layout, "wanted at least 68719476736")
    files = files_of(unpacked).items()
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files}
    (unpacked / "checksums.json").write_text(json.dumps(sums))
    refuse(unpacked, layout, "wanted at least 68719476736")


def test_piece_with_a_flipped_bit_is_found_once_it_is_read(unpacked: Path, layout: Any) -> None:
    weights = unpacked / "model_weights"
    tensors = dist_checkpointing.load_plain_tensors(str(weights))
    (file,) = weights.glob("*.distcp")
    content = file.read_bytes()
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc2.weight"):
        for layer in range(2):
            row = tensors[f"model.decoder.layers.{name}"][layer, -1].numpy().tobytes()
            data = bytearray(content)
            data[data.index(row) + 5] ^= 4
            file.write_bytes(data)
            open_weights(weights).check_data(read=False)
            refuse(unpacked, layout, f"{name}: damaged: the CRC-32 of .* does not match")
