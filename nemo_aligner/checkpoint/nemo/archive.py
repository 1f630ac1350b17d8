"""Unpacking of untrusted tar archives (plain or gzipped), and their checksums.

Archives of this package end with ``checksums.json``, the sha256 of every other member, compared
while unpacking. Archives of others have none.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.processes import make_temporary, remove_temporary

CHECKSUMS_NAME = "checksums.json"
MAX_BYTES_VARIABLE = "NEMO_ALIGNER_MAX_ARCHIVE_BYTES"
_MAX_MEMBERS = 100_000
_MAX_RATIO = 20  # weights hardly compress; a higher ratio is a decompression bomb
_ALWAYS_ALLOWED = 2**28
_SPARE_BYTES = 2**28  # leave this much of the disk free
_BLOCK = 2**20
_UNREADABLE = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, zlib.error)


def unpack(path: Path, wanted: Callable[[PurePosixPath], bool]) -> Path:
    """Unpack the ``wanted`` members into a new temporary folder, which the caller removes.

    At most ``NEMO_ALIGNER_MAX_ARCHIVE_BYTES`` are unpacked; by default 20 times the archive's own
    size, at least 256 MiB, and never so much that the disk fills up.

    Raises:
        CheckpointError: no such archive; a member that is no plain file or folder, is there twice,
            or has a path out of the archive; too many bytes; or a checksum that does not match.
    """
    if not path.is_file():
        raise CheckpointError(no_such_archive(path))
    root = make_temporary("nemo_")
    try:
        with _opened(path) as archive:
            sums = _extract(archive, root, path, wanted)
        _compare(sums, root, path, wanted)
    except _UNREADABLE as error:
        remove_temporary(root)
        raise CheckpointError(f"{path}: cannot unpack: {error}") from error
    except BaseException:
        remove_temporary(root)
        raise
    return root


def no_such_archive(path: Path) -> str:
    """Message for a missing archive, with a hint if the path looks like a model on the hub."""
    missing = f"{path}: no such .nemo archive or folder"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or path.suffix == ".nemo":
        return missing
    return (
        f"{missing}; a model of the Hugging Face hub has to be converted first: nemo-aligner "
        f"convert --input {path} --output {path.name}.nemo"
    )


def verify_folder(root: Path, wanted: Callable[[PurePosixPath], bool]) -> None:
    """Compare the ``wanted`` files of an unpacked archive with its checksums, if it has any.

    Raises:
        CheckpointError: a checksum does not match.
    """
    if not (root / CHECKSUMS_NAME).is_file():
        return
    names = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
    sums = {
        name.as_posix(): sha256_of(root / name) for name in names if wanted(PurePosixPath(name))
    }
    _compare(sums, root, root, wanted)


def sha256_of(path: Path) -> str:
    """Hash a file's content, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def has_checksums(root: Path) -> bool:
    """True if the folder's files have checksums, which were compared when it was opened."""
    return (root / CHECKSUMS_NAME).is_file()


def _compare(
    sums: dict[str, str], root: Path, source: Path, wanted: Callable[[PurePosixPath], bool]
) -> None:
    if not has_checksums(root):
        return
    written = read_json(root / CHECKSUMS_NAME, f"{source}: {CHECKSUMS_NAME}")
    expected = {name: written[name] for name in written if wanted(PurePosixPath(name))}
    found = {name: digest for name, digest in sums.items() if name != CHECKSUMS_NAME}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{source}: {name}: got sha256 {found.get(name)}, {CHECKSUMS_NAME} wants "
                f"{expected.get(name)}: it is damaged, missing or was changed"
            )


class _Bounded:
    """File for ``tarfile`` that ends at ``limit`` and refuses headers of many megabytes.

    tarfile reads long names and extended headers in one piece, whatever size they claim.
    """

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self._limit = limit
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= 16 * _BLOCK:
            raise tarfile.ReadError(f"a header of {size} bytes")
        self._check(self.tell() + size)
        return self._file.read(size)

    def seek(self, position: int) -> int:
        self._check(position)
        return self._file.seek(position)

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise tarfile.ReadError(
                f"it unpacks to more than {self._limit} bytes; if it may, set {MAX_BYTES_VARIABLE}"
            )


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    with path.open("rb") as raw:
        is_zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw) if is_zipped else raw
        bounded = _Bounded(file, _max_bytes(path))  # type: ignore[arg-type]
        with tarfile.TarFile(fileobj=bounded, errorlevel=2) as archive:  # type: ignore[arg-type]
            yield archive


def _max_bytes(path: Path) -> int:
    setting = os.environ.get(MAX_BYTES_VARIABLE)
    if setting is None:
        return max(_MAX_RATIO * path.stat().st_size, _ALWAYS_ALLOWED)
    if not setting.isdecimal():
        raise CheckpointError(f"{MAX_BYTES_VARIABLE}: got {setting!r}, wanted a number of bytes")
    return int(setting)


def _extract(
    archive: tarfile.TarFile, root: Path, path: Path, wanted: Callable[[PurePosixPath], bool]
) -> dict[str, str]:
    """Extract the wanted members; returns the sha256 of every file by name."""
    budget = shutil.disk_usage(root).free - _SPARE_BYTES
    seen: set[PurePosixPath] = set()
    sums = {}
    for member in archive:
        name = _checked_name(member, path)
        if name in seen and not member.isdir():
            raise CheckpointError(f"{path}: member {member.name!r} is there twice")
        seen.add(name)
        if len(seen) > _MAX_MEMBERS:
            raise CheckpointError(f"{path}: more than {_MAX_MEMBERS} members")
        if not wanted(name):
            continue
        budget -= member.size
        if budget < 0:
            raise CheckpointError(f"{path}: it does not fit into {root.parent}; set TMPDIR")
        if member.isdir():
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            sums[name.as_posix()] = _write_member(archive, member, root / name)
    return sums


def _checked_name(member: tarfile.TarInfo, path: Path) -> PurePosixPath:
    # The format has no links; tarfile's own filter is newer than Python 3.11.2.
    if not ((member.isreg() and not member.issparse()) or member.isdir()) or member.size < 0:
        raise CheckpointError(f"{path}: member {member.name!r} is not a plain file or folder")
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise CheckpointError(f"{path}: member {member.name!r} has a path outside the archive")
    if not member.name.isprintable() or "\\" in member.name:
        raise CheckpointError(
            f"{path}: member {member.name!r} has a name with unprintable characters or a backslash"
        )
    return name


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    """Write a file with default permissions and no other attributes; returns its sha256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = archive.extractfile(member)
    assert source is not None, "a regular file has content"
    digest = hashlib.sha256()
    left = member.size
    with source, target.open("xb") as file:
        while block := source.read(min(left, _BLOCK)):
            digest.update(block)
            file.write(block)
            left -= len(block)
    if left:
        raise tarfile.ReadError(f"member {member.name!r} ends {left} bytes early")
    return digest.hexdigest()
