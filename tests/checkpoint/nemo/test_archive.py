"""Unpacking of archives: unsafe members, limits, and checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.checkpoint.nemo import archive as archive_module
from nemo_aligner.checkpoint.nemo.archive import MAX_BYTES_VARIABLE, unpack
from nemo_aligner.checkpoint.nemo.checksums import (
    CHECKSUMS_NAME,
    has_checksums,
    sha256_of,
    verify_folder,
)
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.fuzzing import files_of

MEGABYTES = bytes(range(256)) * 2**13  # 2 MiB
FILES = {"config": b"a: 1", "deep/er/weights": MEGABYTES + b"end", "deep/empty": b""}


def everything(name: PurePosixPath) -> bool:
    return True


def sums_of(files: dict[str, bytes]) -> bytes:
    return json.dumps({name: hashlib.sha256(b).hexdigest() for name, b in files.items()}).encode()


def pack(path: Path, *members: tuple[str, bytes | None], **attributes: Any) -> Path:
    """Write a tar; None as content makes a folder, and all members have the ``attributes``."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            member.size = len(data or b"")
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data or b""))
    return path


def refuse(path: Path, scratch: Path, is_needed: Callable[..., bool] = everything) -> str:
    """Return the error for an archive; check that no unpacked file is left."""
    with pytest.raises(CheckpointError) as caught:
        unpack(path, is_needed)
    assert not list(scratch.iterdir())
    return str(caught.value)


def test_archive_files_come_out_as_they_went_in(tmp_path: Path, scratch: Path) -> None:
    path = pack(
        tmp_path / "a.nemo", ("deep", None), *FILES.items(), ("deep/", None), ("none", None)
    )
    plain = path.read_bytes()
    for content in (plain, gzip.compress(plain, 1)):
        path.write_bytes(content)
        root = unpack(path, everything)
        assert root.parent == scratch
        assert root.name.startswith("nemo_")
        assert files_of(root) == FILES
        assert (root / "none").is_dir()
        assert not has_checksums(root)


def test_archive_gives_only_what_is_wanted(tmp_path: Path, scratch: Path) -> None:
    sums = sums_of(FILES)
    path = pack(tmp_path / "a.nemo", *FILES.items(), (CHECKSUMS_NAME, sums), ("folder", None))
    root = unpack(path, lambda name: name.parts[0] in ("config", CHECKSUMS_NAME))
    assert files_of(root) == {"config": b"a: 1", CHECKSUMS_NAME: sums}
    assert not (root / "folder").exists()
    assert has_checksums(root)


def test_archive_attributes_stay_behind(tmp_path: Path, scratch: Path) -> None:
    path = pack(tmp_path / "a.nemo", ("tool", b"x"), mode=0o7777, mtime=0, uid=12345)
    file = unpack(path, everything) / "tool"
    own_file = tmp_path / "mine"
    own_file.write_bytes(b"")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(own_file.stat().st_mode)
    assert file.stat().st_uid == own_file.stat().st_uid
    assert file.stat().st_mtime > 1e9


def test_archive_that_is_none_or_ends_early_is_named(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "folder"):
        assert refuse(path, scratch) == (
            f"{path}: there is no checkpoint. Pass a .nemo file, the folder that it unpacks to, a "
            "Hugging Face folder, or a .gguf file"
        )
    path = pack(tmp_path / "a.nemo", ("a", b"x" * 2000))
    path.write_bytes(path.read_bytes()[: 512 + 1500])
    assert refuse(path, scratch) == (
        f"{path}: cannot unpack: unexpected end of data, so the file is incomplete. Copy or "
        "download it again"
    )
    near = refuse(tmp_path / "aa.nemo", scratch)
    assert near.startswith(f"{tmp_path / 'aa.nemo'}: there is no checkpoint; did you mean {path}? ")


def test_archive_names_that_are_refused(tmp_path: Path, scratch: Path) -> None:
    """Unsafe names are refused, also of members that are not needed; no file is written outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    out, odd = (
        "has a path outside the archive",
        "has a name with unprintable characters or a backslash",
    )
    for name, message in (
        (f"{outside}/x", out), ("a/../x", out), ("../x", out), ("./a/../../x", out),
        ("a\\x", odd), ("a\x07x", odd), ("a\nb", odd), ("a\x1b[2J", odd),
    ):  # fmt: skip
        path = pack(tmp_path / "a.nemo", ("fine", b"x"), (name, b"x"))
        for is_needed in (everything, lambda member: member.name == "fine"):
            assert refuse(path, scratch, is_needed) == f"{path}: member {name!r} {message}"
    assert not list(outside.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"a.nemo", "outside", "scratch"}


def test_archive_members_are_plain_files_once_and_folders(tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / "a.nemo"
    for first in (b"x", None):
        pack(path, ("./a", first), ("a", b"x"))
        assert refuse(path, scratch) == f"{path}: member 'a' occurs twice"
    unpack(pack(path, ("./a", None), ("a", None)), everything)
    shutil.rmtree(next(scratch.iterdir()))
    message = f"{path}: member 'a' is not a plain file or folder"
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"S"):
        for link in ("b", "/etc/hostname"):
            pack(path, ("a", b""), type=kind, linkname=link, devmajor=1, devminor=3)
            assert refuse(path, scratch) == message, kind
    sparse = tarfile.TarInfo("a")
    sparse.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40)}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(sparse)
    assert refuse(path, scratch) == message


def test_archive_is_refused_whose_folders_or_headers_are_nested_without_end(
    tmp_path: Path, scratch: Path
) -> None:
    fine = "/".join("a" * 63)
    shutil.rmtree(unpack(pack(tmp_path / "a.nemo", (f"{fine}/x", b"x")), everything))
    path = pack(tmp_path / "a.nemo", ("fine", b"x"), (f"{'a/' * 2000}x", b"x"))
    for is_needed in (everything, lambda member: member.name == "fine"):
        message = f"{path}: member 'a/a/a/.*'... is 2001 folders deep, wanted at most 64"
        assert re.match(message, refuse(path, scratch, is_needed))
    # Each header contains the name of the next one, which is such a header, too.
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2
    header = name.tobuf(tarfile.GNU_FORMAT) + b"x\0".ljust(512, b"\0")
    path.write_bytes(header * 3000 + bytes(1024))
    assert refuse(path, scratch).startswith(f"{path}: cannot unpack: ")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / CHECKSUMS_NAME).write_bytes(sums_of({}))
    inside = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("a", dir_fd=inside)
        outer, inside = inside, os.open("a", os.O_RDONLY, dir_fd=inside)
        os.close(outer)
    os.close(inside)
    with pytest.raises(CheckpointError, match="its folders are nested too deeply"):
        verify_folder(folder, everything)
    subprocess.run(["rm", "-rf", folder], check=True)  # shutil.rmtree is recursive, too


def test_archive_has_as_many_members_as_may_be(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "_MAX_MEMBERS", 3)
    members = [(str(number), b"") for number in range(4)]
    shutil.rmtree(unpack(pack(tmp_path / "a.nemo", *members[:3]), everything))
    path = pack(tmp_path / "b.nemo", *members)
    assert refuse(path, scratch, lambda name: False) == f"{path}: it has more than 3 members"


@pytest.mark.parametrize("spare", [2**20, 2**28])
def test_archive_leaves_a_spare_of_the_disk(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """Some space stays free on the disk, or half of the free space if that is less."""
    size = sum(map(len, FILES.values()))
    path = pack(tmp_path / "a.nemo", *FILES.items(), ("unneeded", b"x" * 1000))
    monkeypatch.setattr(archive_module, "_SPARE_BYTES", spare)
    enough = size + min(spare, size)

    def is_needed(name: PurePosixPath) -> bool:
        return name.name != "unneeded"

    for free in (enough, enough - 1):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda root, usage=usage: usage)
        if free == enough:
            shutil.rmtree(unpack(path, is_needed))
    message = refuse(path, scratch, is_needed)
    assert message.startswith(f"{path}: it does not fit into {scratch}; set TMPDIR")


def test_archive_limit_by_a_setting(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(tmp_path / "a.nemo", ("a", b"x" * 600))
    # A header, two blocks of content, and the block at the end of a tar.
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "2048")
    shutil.rmtree(unpack(path, everything))
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "2047")
    message = refuse(path, scratch)
    assert message.startswith(f"{path}: cannot unpack: it unpacks to more than 2047 bytes")
    assert MAX_BYTES_VARIABLE in message
    # Members that are not needed count, too.
    assert refuse(path, scratch, lambda name: False) == message
    for bad in ("", "-1", "1e9", "many"):
        monkeypatch.setenv(MAX_BYTES_VARIABLE, bad)
        expected = f"{MAX_BYTES_VARIABLE}: got {bad!r}, wanted a number of bytes"
        assert refuse(path, scratch) == expected


def test_archive_limit_by_the_size_on_the_disk(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacking a gzip bomb stops at a multiple of its size; 256 MiB are always allowed."""
    assert archive_module._max_bytes(pack(tmp_path / "empty.nemo")) == 2**28
    path = pack(tmp_path / "a.nemo", ("a", bytes(2**20)))
    path.write_bytes(gzip.compress(path.read_bytes()))
    shutil.rmtree(unpack(path, everything))
    monkeypatch.setattr(archive_module, "_ALWAYS_ALLOWED", 0)
    limit = 20 * path.stat().st_size
    assert f"it unpacks to more than {limit} bytes" in refuse(path, scratch)
    monkeypatch.setattr(archive_module, "_MAX_RATIO", 2**20)
    unpack(path, everything)


def test_archive_header_of_many_megabytes_is_not_read(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tarfile would read a complete name into memory, whatever length its header claims."""
    path = tmp_path / "a.nemo"
    gzip_read, sizes = gzip.GzipFile.read, list[int]()

    def noting(file: gzip.GzipFile, size: int = -1) -> bytes:
        sizes.append(size)
        return gzip_read(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", noting)
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
        messages = []
        for size in (2**24, 2**24 + 512):
            member = tarfile.TarInfo("././@LongLink")
            member.type, member.size = kind, size
            path.write_bytes(gzip.compress(member.tobuf() + b"a" * 1024))
            messages.append(refuse(path, scratch))
        assert "a header of" not in messages[0]
        assert "cannot unpack: a header of 16777728 bytes" in messages[1]
    assert 0 < min(sizes) <= max(sizes) <= 2**24


def test_checksum_is_that_of_the_whole_file(tmp_path: Path) -> None:
    for size in (0, 1, 2**20 - 1, 2**20, 2**20 + 1, len(MEGABYTES) + 3):
        data = (MEGABYTES + b"end")[:size]
        (tmp_path / "a").write_bytes(data)
        assert sha256_of(tmp_path / "a") == hashlib.sha256(data).hexdigest(), size


def test_checksums_name_a_file_that_is_not_the_one_that_was_written(
    tmp_path: Path, scratch: Path
) -> None:
    without_config = {name: data for name, data in FILES.items() if name != "config"}
    for change, files, name in (
        ("nothing", FILES, None),
        ("changed", {**FILES, "config": b"a: 2"}, "config"),
        ("missing", without_config, "config"),
        ("renamed", {**without_config, "confog": FILES["config"]}, "config"),
        ("added", {**FILES, "confag": b""}, "confag"),
    ):
        path = pack(tmp_path / "a.nemo", *files.items(), (CHECKSUMS_NAME, sums_of(FILES)))
        root = tmp_path / change
        with tarfile.open(path) as tar:
            tar.extractall(root, filter="data")
        assert has_checksums(root)
        if name is None:
            verify_folder(root, everything)
            shutil.rmtree(unpack(path, everything))
            continue
        actual, expected = (
            hashlib.sha256(group[name]).hexdigest() if name in group else None
            for group in (files, FILES)
        )
        message = f"{name}: got sha256 {actual}, but {CHECKSUMS_NAME} lists {expected}"
        assert refuse(path, scratch).startswith(f"{path}: {message}")
        with pytest.raises(CheckpointError) as caught:
            verify_folder(root, everything)
        assert str(caught.value).startswith(f"{root}: {message}")
        # Files that are not needed are not compared.
        verify_folder(root, lambda file: not file.name.startswith("conf"))
        (root / CHECKSUMS_NAME).unlink()
        verify_folder(root, everything)
