"""Hostile archives, by name: each is one error, and leaves nothing behind."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint.nemo import archive as archive_module
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.errors import CheckpointError
from tests.checkpoint.loading import (
    load,
    refuse,
)
from tests.checkpoint.nemo.archives import write_tar


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("../escaped", {"data": b"x"}),
        ("./a/../../escaped", {"data": b"x"}),
        ("{outside}/escaped", {"data": b"x"}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "/etc/hostname"}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "model_config.yaml"}),
        ("hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/hostname"}),
        ("pipe", {"type": tarfile.FIFOTYPE}),
        ("device", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
    ],
    ids=[
        "dotdot",
        "inner_dotdot",
        "absolute",
        "symlink",
        "symlink_inside",
        "hardlink",
        "fifo",
        "device",
    ],
)
def test_hostile_members_are_refused(
    name: str, attributes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    scratch.mkdir()
    outside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    path = write_tar(tmp_path / "bad.nemo", (name.format(outside=outside), dict(attributes)))
    with pytest.raises(CheckpointError, match=r"bad\.nemo"), open_nemo(path):
        pass
    assert not list(scratch.iterdir())
    assert not list(outside.iterdir())
    assert not (tmp_path / "escaped").exists()


def test_a_setuid_member_loses_the_bit(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.nemo", ("./tool", {"data": b"x", "mode": 0o4777}))
    with open_nemo(path, with_weights=False) as folder:
        assert (folder.root / "tool").stat().st_mode & 0o7022 == 0


def test_too_much_for_the_disk_is_refused_before_it_is_written(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "_SPARE_BYTES", 10**18)
    with pytest.raises(CheckpointError, match="does not fit"), open_nemo(archive):
        pass


def test_too_many_members_are_refused(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_MAX_MEMBERS", 3)
    with pytest.raises(CheckpointError, match="more than 3 members"), open_nemo(archive):
        pass


def test_every_file_of_ours_is_known(tiny_archive: Path, layout: Any, tmp_path: Path) -> None:
    """One byte of any file, wherever it is: weights, settings, tokenizer, index."""
    with tarfile.open(tiny_archive) as tar:
        files = [member for member in tar if member.isreg() and member.size]
    assert len(files) >= 8
    for member in files:
        data = bytearray(tiny_archive.read_bytes())
        data[member.offset_data + member.size // 2] ^= 1
        changed = tmp_path / "changed.nemo"
        changed.write_bytes(data)
        refuse(changed, layout, r"sha256|checksums\.json")


def test_an_unpacked_archive_of_ours_is_compared_too(
    tiny_archive: Path, layout: Any, tmp_path: Path
) -> None:
    shutil.unpack_archive(tiny_archive, tmp_path / "ours", "tar")
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
