"""Hostile archives, by name: each is one error, before any weight is used, and runs nothing."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_aligner.checkpoint.nemo.archive import sha256_of
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.config.common import Precision
from nemo_aligner.errors import CheckpointError
from tests import tiny

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Bomb:
    """Unpickling one creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


@pytest.fixture(scope="module")
def archive(layout: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("strangers") / "base.nemo", **SHAPE)


@pytest.fixture
def folder(archive: Path, tmp_path: Path) -> Path:
    """The archive unpacked, as a stranger's: without checksums."""
    shutil.unpack_archive(archive, tmp_path / "folder", "tar")
    (tmp_path / "folder" / "checksums.json").unlink()
    return tmp_path / "folder"


def load(path: Path, layout: Any) -> Any:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

    return load_pretrained(path, layout, num_attributes=1, precision=Precision.fp32)


def refuse(path: Path, layout: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        load(path, layout)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "model_config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


def test_what_a_stranger_wrote_well_loads(folder: Path, layout: Any) -> None:
    load(folder, layout)


# The whole archive


def test_every_file_of_ours_is_known(archive: Path, layout: Any, tmp_path: Path) -> None:
    """One byte of any file, wherever it is: weights, settings, tokenizer, index."""
    with tarfile.open(archive) as tar:
        files = [member for member in tar if member.isreg() and member.size]
    assert len(files) >= 8
    for member in files:
        data = bytearray(archive.read_bytes())
        data[member.offset_data + member.size // 2] ^= 1
        changed = tmp_path / "changed.nemo"
        changed.write_bytes(data)
        refuse(changed, layout, r"sha256|checksums\.json")


def test_an_unpacked_archive_of_ours_is_compared_too(
    archive: Path, layout: Any, tmp_path: Path
) -> None:
    shutil.unpack_archive(archive, tmp_path / "ours", "tar")
    load(tmp_path / "ours", layout)
    with (tmp_path / "ours" / "model_config.yaml").open("a") as file:
        file.write("rotary_base: 5\n")
    refuse(tmp_path / "ours", layout, r"model_config\.yaml: got sha256")


def test_a_gzip_bomb_is_refused_before_it_fills_the_disk(
    layout: Any, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.nemo"
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        member = tarfile.TarInfo("./model_weights/zeros")
        member.size = 300 * 2**20
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    assert path.stat().st_size < 5 * 2**20
    refuse(path, layout, "more than 268435456 bytes.*NEMO_ALIGNER_MAX_ARCHIVE_BYTES")
    assert not list(scratch.iterdir())
    monkeypatch.setenv("NEMO_ALIGNER_MAX_ARCHIVE_BYTES", str(2**20))
    refuse(path, layout, "more than 1048576 bytes")
    monkeypatch.setenv("NEMO_ALIGNER_MAX_ARCHIVE_BYTES", "a lot")
    refuse(path, layout, "MAX_ARCHIVE_BYTES: got 'a lot'")
    monkeypatch.setenv("NEMO_ALIGNER_MAX_ARCHIVE_BYTES", str(2**30))
    refuse(path, layout, "got none of model_config.yaml")
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE], ids=["gnu", "pax"])
def test_a_header_is_not_a_bomb(
    kind: bytes, layout: Any, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tarfile reads a long name in one piece: 200 MB of it here, in 200 kB."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, 200 * 2**20
    path = tmp_path / "bomb.nemo"
    path.write_bytes(gzip.compress(header.tobuf() + bytes(header.size), 1))
    read, sizes = gzip.GzipFile.read, []

    def noting(file: gzip.GzipFile, size: int = -1) -> bytes:
        sizes.append(size)
        return read(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", noting)
    refuse(path, layout, "a header of 2097")
    assert 0 < min(sizes) <= max(sizes) <= 2**20
    assert not list(scratch.iterdir())


def test_many_members_are_a_bomb_too(
    layout: Any, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_aligner.checkpoint.nemo import archive as archive_module

    monkeypatch.setattr(archive_module, "_MAX_MEMBERS", 50)
    path = tmp_path / "many.nemo"
    with tarfile.open(path, "w") as tar:
        for number in range(60):
            tar.addfile(tarfile.TarInfo(f"./{number}"))
    refuse(path, layout, "more than 50 members")
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    "names", [["./a", "./a"], ["a", "./a"], ["a\nb"], ["a\\b"], ["a\x1b[2J"]], ids=repr
)
def test_odd_names_are_refused(
    names: list[str], layout: Any, scratch: Path, tmp_path: Path
) -> None:
    path = tmp_path / "odd.nemo"
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    refuse(path, layout, "there twice|odd characters")
    assert not list(scratch.iterdir())


def test_a_sparse_member_is_refused(layout: Any, scratch: Path, tmp_path: Path) -> None:
    path = tmp_path / "sparse.nemo"
    member = tarfile.TarInfo("./sparse")
    member.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40)}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member)
    refuse(path, layout, "not a plain file")
    assert not list(scratch.iterdir())


# Settings


LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (LAUGHS, "unfolds to more than 100000"),
        ("a: &a [*a]", "within itself|recursive"),
        ("a: " + "[" * 2000 + "]" * 2000, "nested deeper|RecursionError"),
        ("a: " + "9" * 5000, "a number of 5000 digits"),
        ("a: 0x" + "f" * 5000, "a number of 5002 digits"),
        ("a: !!python/name:os.system ''", "could not determine a constructor"),
        ("a: !nemo.run {x: 1}", "could not determine a constructor"),
        ("? [a, b]\n: c", "ConstructorError|wanted"),
        ("x: " + "y" * 2**21, "wanted at most 1048576"),
        ("a: \x00", "ReaderError"),
    ],
    ids=["laughs", "cycle", "deep", "digits", "hex", "tag", "own_tag", "key", "long", "control"],
)
def test_settings_are_small_plain_data(
    text: str, complaint: str, folder: Path, layout: Any
) -> None:
    (folder / "model_config.yaml").write_text(text)
    refuse(folder, layout, complaint)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("scoring_contract.json", "[" * 100_000),
        ("scoring_contract.json", "1" * 5000),
        ("scoring_contract.json", "[]"),
        ("model_weights/metadata.json", "[" * 100_000),
        ("checksums.json", "{"),
        ("checksums.json", '{"model_config.yaml": [1]}'),
    ],
)
def test_json_is_small_plain_data(name: str, content: str, folder: Path, layout: Any) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=name.rpartition("/")[2]), open_nemo(folder) as opened:
        _ = opened.contract


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
    changes: dict, folder: Path, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_aligner.checkpoint.nemo import reward_model

    def build(*unused: Any, **options: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(reward_model, "build_reward_model", build)
    edit(folder, **changes)
    refuse(folder, layout, next(iter(changes)) + "|layers of shape|settings want")


@pytest.mark.parametrize("has_checksums", [False, True])
def test_an_index_that_promises_too_much_is_refused(
    has_checksums: bool, folder: Path, layout: Any
) -> None:
    """Settings and index agree on a size that the files do not have; a stranger can write sums."""
    from nemo_aligner.checkpoint.weights.index import read_metadata

    weights = folder / "model_weights"
    metadata = read_metadata(weights)
    entry = metadata.state_dict_metadata["model.embedding.word_embeddings.weight"]
    size = torch.Size([2**30, 16])
    object.__setattr__(entry, "size", size)
    entry.chunks[0].sizes = size
    (weights / ".metadata").write_bytes(pickle.dumps(metadata))
    edit(folder, vocab_size=2**30)
    if has_checksums:
        sums = {file.relative_to(folder).as_posix(): sha256_of(file) for file in files_of(folder)}
        (folder / "checksums.json").write_text(json.dumps(sums))
    refuse(folder, layout, "wanted at least 68719476736")


# Weights


def distcp(folder: Path) -> Path:
    (path,) = (folder / "model_weights").glob("*.distcp")
    return path


@pytest.mark.parametrize("name", ["self_attention.linear_qkv.weight", "mlp.linear_fc2.weight"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_flipped_bit_of_a_strangers_weights_is_found(
    name: str, layer: int, folder: Path, layout: Any
) -> None:
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(str(folder / "model_weights"))
    row = tensors[f"model.decoder.layers.{name}"][layer, -1].numpy().tobytes()
    data = bytearray(distcp(folder).read_bytes())
    data[data.index(row) + 5] ^= 4
    distcp(folder).write_bytes(data)
    refuse(folder, layout, f"{name}: damaged: .* has another CRC-32")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: path.unlink(), "no such file, wanted the data of"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "the file ends at|damaged"),
        (lambda path: path.write_bytes(b""), "the file ends at 0"),
    ],
    ids=["missing", "cut", "empty"],
)
def test_a_shard_that_is_not_whole_is_named(
    damage: Callable[[Path], None], complaint: str, folder: Path, layout: Any
) -> None:
    damage(distcp(folder))
    refuse(folder, layout, complaint)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "_extra_state", "piece"])
def test_no_pickle_is_run(name: str, folder: Path, layout: Any, tmp_path: Path) -> None:
    """Wherever a checkpoint may hold one: it is refused, or never opened."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    from nemo_aligner.checkpoint.weights.index import read_metadata

    weights = folder / "model_weights"
    bomb = Bomb(tmp_path / "executed")
    if name == "common.pt":
        torch.save({"bomb": bomb}, weights / name)
        load(folder, layout)  # it is not asked for
    elif name == ".metadata":
        (weights / name).write_bytes(pickle.dumps(bomb))
        refuse(folder, layout, "refused")
    else:
        stream = io.BytesIO()
        torch.save(bomb, stream)
        (weights / "__1_0.distcp").write_bytes(stream.getvalue())
        metadata = read_metadata(weights)
        key = "model.decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
        place = MetadataIndex(key)
        if name == "piece":
            key = "model.decoder.final_layernorm.weight"
            place = MetadataIndex(key, torch.Size([0]))
        else:
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
        info = next(iter(metadata.storage_data.values()))
        metadata.storage_data[place] = type(info)("__1_0.distcp", 0, len(stream.getvalue()))
        (weights / ".metadata").write_bytes(pickle.dumps(metadata))
        if name == "piece":
            refuse(folder, layout, "final_layernorm|Weights only|weights_only")
        else:
            load(folder, layout)
    assert not (tmp_path / "executed").exists()


def test_an_index_may_not_change_the_classes_that_it_names(folder: Path, layout: Any) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    module = b"torch.distributed.checkpoint.metadata"
    # BUILD on a class: a pair of states, of which the second is set attribute by attribute.
    code = b"c" + module + b"\nMetadata\n(N}(S'planted'\nI1\nutb."
    (folder / "model_weights" / ".metadata").write_bytes(code)
    refuse(folder, layout, r"\.metadata: refused")
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
    damage: Callable[[Any], None], folder: Path, layout: Any
) -> None:
    from nemo_aligner.checkpoint.weights.index import read_metadata

    metadata = read_metadata(folder / "model_weights")
    damage(metadata)
    (folder / "model_weights" / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(folder, layout, r"\.metadata|word_embeddings\.weight: got none")


def test_a_wrong_shape_and_an_unknown_family_are_named(folder: Path, layout: Any) -> None:
    from nemo_aligner.checkpoint.weights.save import save_weights
    from tests.checkpoint.test_weights import sharded

    shutil.rmtree(folder / "model_weights")
    save_weights(
        {"a": sharded("model.decoder.final_layernorm.weight", torch.zeros(3))},
        folder / "model_weights",
    )
    refuse(folder, layout, r"word_embeddings\.weight: got none")
    edit(folder, position_embedding_type="alibi")
    refuse(folder, layout, "position_embedding_type: got 'alibi'")


def test_a_tokenizer_that_is_not_text_is_refused(folder: Path) -> None:
    from nemo_aligner.errors import DataError
    from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer

    def use(tokenizer: Tokenizer) -> None:
        _ = tokenizer.fingerprint, tokenizer.chat_template, tokenizer.bos_id

    for name, content in (
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"bos_token": 5}'),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ):
        path = folder / "tokenizer" / name
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            use(load_tokenizer(folder / "tokenizer"))
        path.write_bytes(before)


def test_the_checksums_are_those_of_sha256sum(archive: Path, tmp_path: Path) -> None:
    import hashlib

    root = tmp_path / "ours"
    shutil.unpack_archive(archive, root, "tar")
    sums = json.loads((root / "checksums.json").read_text())
    assert sums == {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files_of(root)
        if path.name != "checksums.json"
    }
