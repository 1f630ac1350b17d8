"""NeMo archives: unpacked safely, opened once per host, and written whole.

``.nemo`` files are tar archives, plain or gzipped. Those of this package end with
``checksums.json``, the sha256 of every other member, compared while unpacking; archives of others
have none. ``open_nemo`` takes every checkpoint of NeMo or Megatron, also as a folder.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias

import torch.distributed as dist
import yaml

from nemo_aligner.checkpoint.nemo.folder import (
    CONFIG_NAME,
    CONTRACT_NAME,
    FINGERPRINT_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    NemoFolder,
    folder_of,
    refuse_hugging_face,
)
from nemo_aligner.checkpoint.safe_load import MAX_TEXT_BYTES, read_json
from nemo_aligner.distributed.collectives import barrier, gather_objects
from nemo_aligner.utils.errors import CheckpointError, ConfigError, short
from nemo_aligner.utils.processes import make_temporary, remove_temporary
from nemo_aligner.utils.writing import explaining_full_disk, write_problem

# Opening: unpacked once per host, and checked before any use.


@contextmanager
def open_nemo(
    path: str | Path,
    *,
    with_weights: bool = True,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
) -> Iterator[NemoFolder]:
    """Open a checkpoint of NeMo or Megatron for reading.

    Where torch.distributed is initialised every rank must call it. One rank of each host unpacks
    an archive into the temporary directory, and removes it when all have left the block (or when
    its process ends, if one of several fails). It also reads all weights once, so that damage is
    found before any is used.

    Args:
        with_weights: without, little is unpacked, and ``NemoFolder.weights`` must not be used.
        tokenizer: folder that replaces the checkpoint's own tokenizer.
        config: file that replaces the checkpoint's own settings.

    Raises:
        CheckpointError: no such archive, an unsafe member, a missing part, or damaged data.
    """
    path = Path(path)
    given = [None if part is None else Path(part) for part in (tokenizer, config)]

    def opened(root: Path) -> NemoFolder:
        folder = folder_of(root, path, *given)
        _ = folder.config, with_weights and folder.weights
        return folder

    # Only the rank that unpacked has the checked folder in hand; the others open it again.
    prepared, root = _once_per_host(path, lambda: _prepare(path, with_weights, opened))
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    try:
        yield opened(root) if prepared is None else prepared[1]
    except BaseException:
        if not has_peers:  # a failing rank's peers may still be reading
            _remove(root, path)
        raise
    if has_peers:
        barrier()
    _remove(root, path)


# The folder that a checkpoint was unpacked to, and the checkpoint, which was checked.
_Prepared: TypeAlias = tuple[Path, NemoFolder]


def _remove(root: Path, path: Path) -> None:
    """Remove a folder that this process unpacked; a folder that was given stays."""
    if root != path:
        remove_temporary(root)


def _prepare(path: Path, with_weights: bool, opened: Callable[[Path], NemoFolder]) -> _Prepared:
    """Unpack an archive, or take the folder itself, and check its contents."""

    def wanted(name: PurePosixPath) -> bool:
        return with_weights or WEIGHTS_NAME not in name.parts

    # A GGUF file would be an unreadable tar.
    if path.is_file():
        refuse_hugging_face(path, path)
    root = path if path.is_dir() else unpack(path, wanted)
    try:
        if root == path:
            verify_folder(root, wanted)
        folder = opened(root)
        # Checksums have covered every byte already; others' shards have a CRC-32 of their own.
        if with_weights and not has_checksums(root):
            folder.store.check_data(read=True)
    except BaseException:
        _remove(root, path)
        raise
    return root, folder


def _once_per_host(path: Path, prepare: Callable[[], _Prepared]) -> tuple[_Prepared | None, Path]:
    """Call ``prepare`` on one rank of each host; returns its result there, the folder on all."""
    if not dist.is_initialized():
        prepared = prepare()
        return prepared, prepared[0]
    hosts = gather_objects(socket.gethostname())
    owner = hosts.index(hosts[dist.get_rank()])
    mine, problem = None, None
    if owner == dist.get_rank():
        try:
            mine = prepare()
        except CheckpointError as error:
            problem = str(error)
    # Every rank hears of a failure, also on another host: none may wait in the next collective.
    outcomes: list[Any] = gather_objects((None if mine is None else mine[0], problem))
    for _, found in outcomes:
        if found is not None:
            if mine is not None:
                _remove(mine[0], path)
            raise CheckpointError(found)
    return mine, Path(outcomes[owner][0])


# Unpacking.

CHECKSUMS_NAME = "checksums.json"
MAX_BYTES_VARIABLE = "NEMO_ALIGNER_MAX_ARCHIVE_BYTES"
_MAX_MEMBERS = 100_000
_MAX_RATIO = 20  # weights hardly compress; a higher ratio is a decompression bomb
_ALWAYS_ALLOWED = 2**28
_SPARE_BYTES = 2**28  # leave this much of the disk free, or half of what is free
_BLOCK = 2**20
# A recursion: tarfile reads headers of headers by calling itself.
_UNREADABLE = (
    tarfile.TarError, OSError, EOFError, ValueError, OverflowError, zlib.error, RecursionError,
)  # fmt: skip
_DEEPEST = 64  # folders in folders: those of a distributed checkpoint are 4


def unpack(path: Path, wanted: Callable[[PurePosixPath], bool]) -> Path:
    """Unpack the ``wanted`` members into a new temporary folder, which the caller removes.

    At most ``NEMO_ALIGNER_MAX_ARCHIVE_BYTES`` are unpacked; by default 20 times the archive's own
    size, at least 256 MiB, and never so much that the disk fills up: 256 MiB of it stay free, or
    half of what is free where that is less.

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
        problem = write_problem(root, error)
        remove_temporary(root)
        raise CheckpointError(f"{path}: cannot unpack: {problem}") from error
    except BaseException:
        remove_temporary(root)
        raise
    return root


def no_such_archive(source: str | Path) -> str:
    """Message for a missing archive, with a hint if the path looks like a model on the hub."""
    path = Path(source)
    missing = f"{path}: no such .nemo archive or folder"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or path.suffix == ".nemo":
        return missing
    return (
        f"{missing}; a model of the Hugging Face hub has to be converted first: nemo-aligner "
        f"convert --input {path} --output {path.name}.nemo"
    )


def verify_folder(root: Path, wanted: Callable[[PurePosixPath], bool]) -> None:
    """Compare the ``wanted`` files of an unpacked archive with its checksums, if it has any."""
    if not (root / CHECKSUMS_NAME).is_file():
        return
    try:
        names = [file.relative_to(root) for file in root.rglob("*") if file.is_file()]
    except RecursionError as error:
        raise CheckpointError(f"{root}: its folders are nested too deeply to be read") from error
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


def read_members(path: Path, first: str, *others: str) -> dict[str, str]:
    """Read small text members of an archive by name, without unpacking it.

    It stops at ``first``, which need not be there; the headers behind it are not read.

    Raises:
        CheckpointError: it is no archive, is damaged, or one of the members is too large.
    """
    texts = {}
    try:
        with _opened(path) as archive:
            for count, member in enumerate(archive):
                name = _checked_name(member, path).as_posix()
                if count > _MAX_MEMBERS:
                    raise CheckpointError(f"{path}: more than {_MAX_MEMBERS} members")
                if name not in (first, *others) or member.isdir():
                    continue
                if member.size > MAX_TEXT_BYTES:
                    raise CheckpointError(
                        f"{path}: {name}: got {member.size} bytes, wanted at most {MAX_TEXT_BYTES}"
                    )
                content = archive.extractfile(member)
                assert content is not None, "a regular file has content"
                texts[name] = content.read().decode()
                if name == first:
                    break
    except _UNREADABLE as error:
        raise CheckpointError(f"{path}: cannot be read: {short(error)}") from error
    return texts


def _extract(
    archive: tarfile.TarFile, root: Path, path: Path, wanted: Callable[[PurePosixPath], bool]
) -> dict[str, str]:
    """Extract the wanted members; returns the sha256 of every file by name."""
    free = shutil.disk_usage(root).free
    budget = max(free - _SPARE_BYTES, free // 2)
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
        # The header's size is what is written at most, so the disk is safe before a byte is.
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
    if len(name.parts) > _DEEPEST:
        raise CheckpointError(
            f"{path}: member {member.name[:60]!r}... is {len(name.parts)} folders deep, wanted at "
            f"most {_DEEPEST}; no checkpoint is"
        )
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
    # "x": an existing file is never opened, nor what a link in its place points to.
    with source, target.open("xb") as file:
        while block := source.read(min(left, _BLOCK)):
            digest.update(block)
            file.write(block)
            left -= len(block)
    if left:
        raise tarfile.ReadError(f"member {member.name!r} ends {left} bytes early")
    return digest.hexdigest()


# Writing.


@contextmanager
def scratch_beside(output: Path) -> Iterator[Path]:
    """Temporary folder on the disk of ``output``, which must not exist yet."""
    if output.exists():
        raise CheckpointError(f"{output}: it exists, wanted the name of a new one")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = make_temporary(f".{output.name}.", output.parent)
    except OSError as error:
        problem = write_problem(output, error)
        raise CheckpointError(f"{output}: cannot be written: {problem}") from error
    try:
        with explaining_full_disk(output):
            yield scratch
    finally:
        remove_temporary(scratch)


def write_nemo(
    path: str | Path,
    config: dict[str, Any],
    weights: Path,
    tokenizer: Path,
    contract: dict[str, Any] | None = None,
    fingerprint: str | None = None,
) -> None:
    """Write an archive that appears whole or not at all; one process calls it.

    The config's ``tokenizer.type`` is set to ``nemo:tokenizer``, NeMo's way to point into the
    archive. The last member, ``checksums.json``, has the sha256 of every other.

    Args:
        weights: folder of a distributed checkpoint.
        tokenizer: folder of a tokenizer.
        fingerprint: of the weights, see ``build_fingerprint``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {"library": "huggingface", "type": f"nemo:{TOKENIZER_NAME}"}
    config = {**config, "tokenizer": tokenizer_config}
    partial = path.with_name(f".{path.name}.partial")  # a killed write's is overwritten
    try:
        with partial.open("wb") as stream:
            with _SummingTar(fileobj=stream, mode="w", dereference=True) as archive:
                archive.add_text(CONFIG_NAME, yaml.safe_dump(config, sort_keys=False))
                if contract is not None:
                    archive.add_text(CONTRACT_NAME, json.dumps(contract, indent=2, allow_nan=False))
                if fingerprint is not None:  # before the weights: a reader stops there
                    archive.add_text(FINGERPRINT_NAME, json.dumps({"fingerprint": fingerprint}))
                archive.add(tokenizer, f"./{TOKENIZER_NAME}", filter=_anonymous)
                archive.add(weights, f"./{WEIGHTS_NAME}", filter=_anonymous)
                # Last, because a tar is written in one pass.
                archive.add_text(CHECKSUMS_NAME, json.dumps(archive.sums, indent=2))
            stream.flush()
            os.fsync(stream.fileno())
        # A crash before this leaves the old archive, one after it the new.
        os.replace(partial, path)
        sync_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


class _SummingTar(tarfile.TarFile):
    """Tar writer that records the sha256 of each member by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sums: dict[str, str] = {}

    def add_text(self, name: str, text: str) -> None:
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:  # the reader would refuse it
            raise CheckpointError(f"{name}: {len(data)} bytes, wanted at most {MAX_TEXT_BYTES}")
        member = tarfile.TarInfo(f"./{name}")
        member.size = len(data)
        self.addfile(member, BytesIO(data))

    def addfile(self, member: tarfile.TarInfo, fileobj: Any = None) -> None:
        if fileobj is None:
            super().addfile(member)
            return
        summed = _Summed(fileobj)
        super().addfile(member, summed)  # type: ignore[arg-type]
        self.sums[PurePosixPath(member.name).as_posix()] = summed.digest.hexdigest()


class _Summed:
    """File that hashes what is read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self.digest.update(block)
        return block


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def sync_to_disk(path: Path) -> None:
    """Fsync a file, or a folder's directory entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_model_config(path: Path) -> Mapping[str, Any]:
    """Read a model's config from a YAML file, a .nemo archive, or the folder it unpacks to.

    Raises:
        ConfigError: it does not exist, or is no YAML mapping.
        CheckpointError: an archive or a folder cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"config: got {path}, which does not exist")
    if path.suffix == ".nemo" or path.is_dir():
        with open_nemo(path, with_weights=False) as folder:
            return folder.config
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config: {path}: got {type(config).__name__}, wanted a mapping")
    return config
