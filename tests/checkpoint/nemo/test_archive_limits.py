"""Unpacking on its own: what comes out, where the limits are, and which file is named."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.checkpoint.nemo import archive as archive_module
from nemo_aligner.checkpoint.nemo.archive import (
    CHECKSUMS_NAME,
    MAX_BYTES_VARIABLE,
    has_checksums,
    sha256_of,
    unpack,
    verify_folder,
)
from nemo_aligner.errors import CheckpointError

MEGABYTES = bytes(range(256)) * 2**13  # two of them
FILES = {"config": b"a: 1", "deep/er/weights": MEGABYTES + b"end", "deep/empty": b""}


def everything(name: PurePosixPath) -> bool:
    return True


def sums_of(files: dict[str, bytes]) -> bytes:
    return json.dumps({name: hashlib.sha256(b).hexdigest() for name, b in files.items()}).encode()


def pack(path: Path, *members: tuple[str, bytes | None], **attributes: Any) -> Path:
    """A tar of files, and of folders where there is no content; ``attributes`` of all members."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            member.size = len(data or b"")
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data or b""))
    return path


def read(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def refuse(path: Path, scratch: Path, wanted: Callable[..., bool] = everything) -> str:
    """What is said of an archive of which nothing is left."""
    with pytest.raises(CheckpointError) as caught:
        unpack(path, wanted)
    assert not list(scratch.iterdir())
    return str(caught.value)


@pytest.mark.parametrize("zipped", [False, True])
def test_files_come_out_as_they_went_in(zipped: bool, tmp_path: Path, scratch: Path) -> None:
    path = pack(
        tmp_path / "a.nemo", ("deep", None), *FILES.items(), ("deep/", None), ("none", None)
    )
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes(), 1))
    root = unpack(path, everything)
    assert root.parent == scratch
    assert root.name.startswith("nemo_")
    assert read(root) == FILES
    assert (root / "none").is_dir()
    assert not has_checksums(root)


def test_only_what_is_wanted_is_unpacked(tmp_path: Path, scratch: Path) -> None:
    sums = sums_of(FILES)
    path = pack(tmp_path / "a.nemo", *FILES.items(), (CHECKSUMS_NAME, sums), ("folder", None))
    root = unpack(path, lambda name: name.parts[0] in ("config", CHECKSUMS_NAME))
    assert read(root) == {"config": b"a: 1", CHECKSUMS_NAME: sums}
    assert not (root / "folder").exists()
    assert has_checksums(root)


def test_attributes_stay_behind(tmp_path: Path, scratch: Path) -> None:
    path = pack(tmp_path / "a.nemo", ("tool", b"x"), mode=0o7777, mtime=0, uid=12345)
    file = unpack(path, everything) / "tool"
    mine = tmp_path / "mine"
    mine.write_bytes(b"")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(mine.stat().st_mode)
    assert file.stat().st_uid == mine.stat().st_uid
    assert file.stat().st_mtime > 1e9


@pytest.mark.parametrize("name", ["nowhere", "folder"])
def test_what_is_no_file_is_named(name: str, tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert refuse(tmp_path / name, scratch) == f"{tmp_path / name}: no such .nemo archive or folder"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/etc/x", "member '/etc/x' has a path out of the archive"),
        ("a/../x", "member 'a/../x' has a path out of the archive"),
        ("a\\x", r"member 'a\\x' has a name of odd characters"),
        ("a\x07x", r"member 'a\x07x' has a name of odd characters"),
    ],
)
def test_names_that_are_refused(name: str, message: str, tmp_path: Path, scratch: Path) -> None:
    path = pack(tmp_path / "a.nemo", ("fine", b"x"), (name, b"x"))
    # Also of a member that nobody wants.
    for wanted in (everything, lambda member: member.name == "fine"):
        assert refuse(path, scratch, wanted) == f"{path}: {message}"


def test_a_file_may_be_there_once_and_a_folder_often(tmp_path: Path, scratch: Path) -> None:
    for first, second in ((b"x", b"x"), (None, b"x")):
        path = pack(tmp_path / "a.nemo", ("./a", first), ("a", second))
        assert refuse(path, scratch) == f"{path}: member 'a' is there twice"
    unpack(pack(tmp_path / "a.nemo", ("./a", None), ("a", None)), everything)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, b"S"])
def test_only_plain_files_and_folders_are_members(
    kind: bytes, tmp_path: Path, scratch: Path
) -> None:
    path = pack(tmp_path / "a.nemo", ("a", b""), type=kind, linkname="b")
    assert refuse(path, scratch) == f"{path}: member 'a' is not a plain file or folder"


def test_there_are_as_many_members_as_may_be(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "_MAX_MEMBERS", 3)
    members = [(str(number), b"") for number in range(4)]
    unpack(pack(tmp_path / "a.nemo", *members[:3]), everything)
    path = pack(tmp_path / "b.nemo", *members)
    with pytest.raises(CheckpointError, match=r"b\.nemo: more than 3 members"):
        unpack(path, lambda name: False)


def test_the_disk_keeps_a_spare(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, FILES.values()))
    path = pack(tmp_path / "a.nemo", *FILES.items(), ("unwanted", b"x" * 1000))
    for free in (size + 2**28, size + 2**28 - 1):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda root, usage=usage: usage)
        if free == size + 2**28:
            root = unpack(path, lambda name: name.name != "unwanted")
            archive_module.shutil.rmtree(root)
    assert refuse(path, scratch) == f"{path}: it does not fit into {scratch}; set TMPDIR"


def test_a_setting_limits_what_is_unpacked(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(tmp_path / "a.nemo", ("a", b"x" * 600))
    # A header, two blocks of content, and the block that ends a tar.
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "2048")
    archive_module.shutil.rmtree(unpack(path, everything))
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "2047")
    said = refuse(path, scratch)
    assert said == (
        f"{path}: cannot unpack: it unpacks to more than 2047 bytes; if it may, set "
        f"{MAX_BYTES_VARIABLE}"
    )
    # What nobody wants counts too.
    assert refuse(path, scratch, lambda name: False) == said
    for bad in ("", "-1", "1e9", "many"):
        monkeypatch.setenv(MAX_BYTES_VARIABLE, bad)
        wanted = f"{MAX_BYTES_VARIABLE}: got {bad!r}, wanted a number of bytes"
        assert refuse(path, scratch) == wanted


def test_without_it_the_size_on_the_disk_does(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(tmp_path / "a.nemo", ("a", bytes(2**20)))
    path.write_bytes(gzip.compress(path.read_bytes()))
    archive_module.shutil.rmtree(unpack(path, everything))  # 256 MiB are always allowed
    monkeypatch.setattr(archive_module, "_ALWAYS_ALLOWED", 0)
    limit = 20 * path.stat().st_size
    assert f"it unpacks to more than {limit} bytes; " in refuse(path, scratch)
    monkeypatch.setattr(archive_module, "_MAX_RATIO", 2**20)
    unpack(path, everything)


def test_256_mib_are_always_allowed_and_no_more(tmp_path: Path) -> None:
    assert archive_module._max_bytes(pack(tmp_path / "a.nemo")) == 2**28


def test_a_header_of_many_megabytes_is_not_read(tmp_path: Path, scratch: Path) -> None:
    """tarfile would hold all of a name, however long its header says that it is."""
    path = tmp_path / "a.nemo"
    said = []
    for size in (2**24, 2**24 + 512):
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, size
        path.write_bytes(member.tobuf() + b"a" * 1024)
        said.append(refuse(path, scratch))
    assert "a header of" not in said[0]
    assert "cannot unpack: a header of 16777728 bytes" in said[1]


def test_a_member_that_ends_early_is_named(tmp_path: Path, scratch: Path) -> None:
    path = pack(tmp_path / "a.nemo", ("a", b"x" * 2000))
    path.write_bytes(path.read_bytes()[: 512 + 1500])
    assert refuse(path, scratch).startswith(f"{path}: cannot unpack: ")


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, len(MEGABYTES) + 3])
def test_the_sum_is_that_of_the_whole_file(size: int, tmp_path: Path) -> None:
    data = (MEGABYTES + b"end")[:size]
    (tmp_path / "a").write_bytes(data)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def spoil(change: str) -> dict[str, bytes]:
    """FILES after something happened to "config"."""
    files = dict(FILES)
    if change == "changed":
        files["config"] = b"a: 2"
    elif change == "missing":
        del files["config"]
    elif change == "renamed":
        files["confog"] = files.pop("config")
    elif change == "added":
        files["confag"] = b""
    return files


@pytest.mark.parametrize(
    ("change", "name"),
    [("changed", "config"), ("missing", "config"), ("renamed", "config"), ("added", "confag")],
)
def test_a_file_that_is_not_the_one_that_was_written_is_named(
    change: str, name: str, tmp_path: Path, scratch: Path
) -> None:
    files = spoil(change)
    path = pack(tmp_path / "a.nemo", *files.items(), (CHECKSUMS_NAME, sums_of(FILES)))
    got, wanted = (
        hashlib.sha256(group[name]).hexdigest() if name in group else None
        for group in (files, FILES)
    )
    told = (
        f"{name}: got sha256 {got}, {CHECKSUMS_NAME} wants {wanted}: "
        "it is damaged, missing or was changed"
    )
    assert refuse(path, scratch) == f"{path}: {told}"
    root = tmp_path / "folder"
    with tarfile.open(path) as tar:
        tar.extractall(root, filter="data")
    with pytest.raises(CheckpointError) as caught:
        verify_folder(root, everything)
    assert str(caught.value) == f"{root}: {told}"
    # What is not wanted is not compared.
    verify_folder(root, lambda file: not file.name.startswith("conf"))
    (root / CHECKSUMS_NAME).unlink()
    verify_folder(root, everything)


def test_a_folder_as_it_was_written_passes(tmp_path: Path) -> None:
    for name, data in {**FILES, CHECKSUMS_NAME: sums_of(FILES)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    verify_folder(tmp_path, everything)
    assert has_checksums(tmp_path)
