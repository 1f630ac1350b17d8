"""Opened archives have the written content; other files are refused by name."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from nemo_aligner.checkpoint.nemo.archive import find_preparing_rank, keep_archives, open_nemo
from nemo_aligner.checkpoint.nemo.write import write_nemo
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.fuzzing import files_of
from tests.checkpoint.loading import Bomb
from tests.checkpoint.refusals import refusals
from tests.harness import tiny

CONFIG = {"vocab_size": 320, "num_layers": 2, "layernorm_epsilon": 1e-5, "precision": "bf16"}
CONTRACT = {"version": 1, "template": "{{ messages }} é"}
Parts = tuple[Path, Path]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """Folders in place of weights and tokenizer; packing does not read their content."""
    weights, tokenizer = tmp_path / "w", tmp_path / "t"
    for folder, name in ((weights, "__0_0.distcp"), (tokenizer, "tokenizer.json")):
        folder.mkdir()
        (folder / name).write_bytes(name.encode() * 1000)
    return weights, tokenizer


@pytest.fixture
def archive(tmp_path: Path, parts: Parts) -> Path:
    path = tmp_path / "model.nemo"
    write_nemo(path, CONFIG, *parts, CONTRACT)
    return path


def test_archive_is_unpacked_once_on_each_node() -> None:
    """Also on nodes with equal names, as containers have, whose ranks may alternate."""
    for places, expected in (
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [0, 0, 2, 2]),
        ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [0, 0, 2, 2]),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [0, 1, 0, 1]),
        ([("a", 0), ("a", 0), ("a", 1), ("a", 1)], [0, 1, 0, 1]),
    ):
        assert [find_preparing_rank(places, rank) for rank in range(4)] == expected


def check(path: Path) -> Path:
    """Open an archive, compare its content, and return the folder to which it was unpacked."""
    with open_nemo(path) as folder:
        tokenizer = {"library": "huggingface", "type": "nemo:tokenizer"}
        assert folder.config == {**CONFIG, "tokenizer": tokenizer}
        assert folder.contract == CONTRACT
        assert (folder.weights / "__0_0.distcp").read_bytes() == b"__0_0.distcp" * 1000
        assert [file.name for file in folder.tokenizer.iterdir()] == ["tokenizer.json"]
        return folder.root


def test_open_gives_what_was_written(archive: Path, parts: Parts, tmp_path: Path) -> None:
    """Plain, gzipped and unpacked archives open alike; an unpacked one stays in its place."""
    assert not check(archive).exists()
    with tarfile.open(archive, "r:") as tar:
        assert all(name.startswith("./") for name in tar.getnames())
    zipped = tmp_path / "zipped.nemo"
    zipped.write_bytes(gzip.compress(archive.read_bytes(), 1))
    check(zipped)
    shutil.unpack_archive(archive, tmp_path / "folder", "tar")
    assert check(tmp_path / "folder") == tmp_path / "folder"
    (tmp_path / "folder" / "model_config.yaml").write_text("rotary_base: 5\n")
    with pytest.raises(CheckpointError, match=r"model_config\.yaml: got sha256"):
        check(tmp_path / "folder")
    write_nemo(tmp_path / "base.nemo", CONFIG, *parts)
    with open_nemo(tmp_path / "base.nemo") as folder:
        assert folder.contract is None


@pytest.mark.usefixtures("layout")
def test_open_leaves_nothing_where_its_block_fails(archive: Path) -> None:
    """A failing block leaves no files, also with torch.distributed and one process."""
    with pytest.raises(CheckpointError), open_nemo(archive) as folder:
        raise CheckpointError("elsewhere")
    assert not folder.root.exists()


def test_open_refuses_legacy_weights_unread(tmp_path: Path) -> None:
    with refusals() as refused:
        for name in ("model_weights", "mp_rank_00/model_weights", "tp_rank_00_pp_rank_000/w"):
            folder = tmp_path / name.replace("/", "_")
            path = folder / f"{name}.ckpt"
            path.parent.mkdir(parents=True)
            (folder / "model_config.yaml").write_text("vocab_size: 320")
            path.write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
            with refused(name, "legacy weights"), open_nemo(folder):
                pass
    assert not (tmp_path / "executed").exists()


def test_open_names_what_is_no_archive_of_a_model(archive: Path, tmp_path: Path) -> None:
    original = archive.read_bytes()
    with refusals() as refused:
        for content in (original[:4000], b"", b"not a tar", b"\x1f\x8b\x08\x00broken"):
            archive.write_bytes(content)
            with refused(content[:20], r"model\.nemo"), open_nemo(archive):
                pass
        with (
            refused("nowhere", r"nowhere\.nemo: there is no checkpoint"),
            open_nemo("nowhere.nemo"),
        ):
            pass
        with tarfile.open(archive, "w") as tar:
            tar.add(tmp_path / "t", "./tokenizer")
        with refused("tokenizer", "got none of model_config.yaml"), open_nemo(archive):
            pass
        folder = tmp_path / "outside"
        (folder / "model_weights").mkdir(parents=True)
        config = {"vocab_size": 3, "tokenizer": {"type": "nemo:../../etc"}}
        (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
        with (
            refused("outside", "no tokenizer folder"),
            open_nemo(folder, with_weights=False) as opened,
        ):
            _ = opened.tokenizer


def test_write_stores_files_and_their_checksums(
    tiny_archive: Path, tmp_path: Path, parts: Parts
) -> None:
    """Links, such as those in a cache of the hub, are stored as files."""
    source = parts[1] / "tokenizer.json"
    source.rename(tmp_path / "blob")
    source.symlink_to(tmp_path / "blob")
    write_nemo(tmp_path / "linked.nemo", CONFIG, *parts, CONTRACT)
    check(tmp_path / "linked.nemo")
    root = tmp_path / "ours"
    shutil.unpack_archive(tiny_archive, root, "tar")
    sums = json.loads((root / "checksums.json").read_text())
    assert sums == {
        name: hashlib.sha256(data).hexdigest()
        for name, data in files_of(root).items()
        if name != "checksums.json"
    }


def test_write_that_is_killed_leaves_nothing_under_the_name(tmp_path: Path, parts: Parts) -> None:
    path = tmp_path / "out" / "model.nemo"
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from nemo_aligner.checkpoint.nemo.write import write_nemo\n"
        "os.fsync = lambda stream: os.kill(os.getpid(), 9)\n"
        "write_nemo(sys.argv[1], {}, Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    done = subprocess.run([sys.executable, "-c", script, path, *parts], cwd=tiny.ROOT)
    assert done.returncode == -9
    assert not list(path.parent.iterdir())
    write_nemo(path, CONFIG, *parts, CONTRACT)
    check(path)
    assert list(path.parent.iterdir()) == [path]


def test_archive_that_two_programs_write_is_complete(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync = tmp_path / "model.nemo", os.fsync

    def interrupt(descriptor: int) -> None:
        """Let the other program write the archive while this one is about to finish."""
        monkeypatch.setattr("os.fsync", sync)
        write_nemo(path, {"vocab_size": 3}, *parts)

    monkeypatch.setattr("os.fsync", interrupt)
    write_nemo(path, CONFIG, *parts, CONTRACT)
    check(path)
    assert set(tmp_path.iterdir()) == {path, *parts}


def test_write_that_fails_leaves_what_was_there(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old" / "model.nemo", tmp_path / "new" / "model.nemo"
    write_nemo(old, CONFIG, *parts, CONTRACT)

    def fail(stream: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    for path in (old, new):
        with pytest.raises(OSError, match="no space"):
            write_nemo(path, {"vocab_size": 3}, *parts)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"contract\.json: got 2097\d+ bytes, wanted at most"):
        write_nemo(new, CONFIG, *parts, {"template": "x" * 2**21})  # a reader would refuse it
    assert list(old.parent.iterdir()) == [old]
    check(old)
    assert not list(new.parent.iterdir())


def test_archive_is_unpacked_once_where_two_models_are_loaded_from_it(archive: Path) -> None:
    with keep_archives():
        with open_nemo(archive) as first:
            pass
        with open_nemo(archive) as second, open_nemo(archive, with_weights=False) as third:
            assert second is first
            assert third.root != first.root
        assert not third.root.exists()
        assert first.root.exists()
    assert not first.root.exists()
    with open_nemo(archive) as last:
        assert last.root != first.root
    with pytest.raises(KeyError), keep_archives(), open_nemo(archive) as failed:
        raise KeyError
    assert not failed.root.exists()
