"""Open NeMo archives safely, once per host; ``write.py`` writes them.

``.nemo`` files are tar archives, plain or gzipped. The last member of an archive of this package is
``checksums.json`` with the sha256 of every other member, which other programs' archives lack.
``open_nemo`` opens archives and folders, and a Hugging Face model through ``conversion_cache``.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import socket
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from threading import Event
from typing import BinaryIO, TypeAlias

import torch.distributed as dist

from nemo_aligner.checkpoint.conversion_cache import find_archive, is_hub_name
from nemo_aligner.checkpoint.nemo.checksums import (
    compare_checksums,
    has_checksums,
    verify_folder,
)
from nemo_aligner.checkpoint.nemo.folder import (
    WEIGHTS_NAME,
    NemoFolder,
    folder_of,
)
from nemo_aligner.checkpoint.safe_load import MAX_TEXT_BYTES
from nemo_aligner.distributed.collectives import (
    barrier,
    gather_objects,
    once_per_node,
    raise_everywhere,
    run_on_some,
)
from nemo_aligner.utils.errors import CheckpointError, short
from nemo_aligner.utils.missing import near_name_hint
from nemo_aligner.utils.processes import find_process, make_temporary, remove_temporary
from nemo_aligner.utils.writing import write_problem

# Opening: an archive is unpacked once per host, and checked before anything in it is used.


@contextmanager
def open_nemo(
    path: str | Path,
    *,
    with_weights: bool = True,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
) -> Iterator[NemoFolder]:
    """Open a checkpoint of NeMo or Megatron, or a Hugging Face model, for reading.

    If torch.distributed is initialised, every rank must call it. One rank of each host unpacks an
    archive into the temporary directory, and removes the folder when all ranks have left the block
    (or when its process ends, if a rank fails). That rank also reads all weights once, so that
    damage is found before any weight is used. In a block of ``keep_archives`` the folder stays for
    the next call with the same ``path``.

    Args:
        path: an archive, or a folder. A Hugging Face folder, a ``.gguf`` file or a name of the hub
            is converted first, unless the cache has its archive; the first rank of each node does
            that. Errors then name ``path``, not the archive in the cache.
        with_weights: if false, weights are not unpacked, and ``NemoFolder.weights`` must not be
            used.
        tokenizer: folder that replaces the checkpoint's tokenizer.
        config: file that replaces the checkpoint's settings.

    Raises:
        CheckpointError: no such archive, an unsafe member, a missing part, or damaged data; or a
            model that cannot be downloaded or converted.
    """
    path = Path(path)
    opening = _unpack_and_open(path, with_weights, tokenizer, config)
    if not _keeping or not with_weights or tokenizer is not None or config is not None:
        with opening as folder:
            yield folder
        return
    stack, folders = _keeping[-1]
    if path not in folders:
        folders[path] = stack.enter_context(opening)
    yield folders[path]


# The blocks of ``keep_archives`` that are running: each has the archives that it keeps, by path.
_keeping: list[tuple[ExitStack, dict[Path, NemoFolder]]] = []


@contextmanager
def keep_archives() -> Iterator[None]:
    """Keep archives that are opened with their weights unpacked until the block ends; collective.

    It is for loading two models from one archive, which is then unpacked and checked once.
    """
    with ExitStack() as stack:
        _keeping.append((stack, {}))
        try:
            yield
        finally:
            _keeping.pop()


@contextmanager
def _unpack_and_open(
    path: Path, with_weights: bool, tokenizer: str | Path | None, config: str | Path | None
) -> Iterator[NemoFolder]:
    """Open as ``open_nemo`` does, and remove the folder at the end of the block; collective."""
    archive = once_per_node(lambda: find_archive(path))
    replacements = [None if part is None else Path(part) for part in (tokenizer, config)]

    def open_folder(root: Path) -> NemoFolder:
        folder = folder_of(root, path, *replacements)
        _ = folder.config, with_weights and folder.weights
        return folder

    prepared, root = _once_per_host(archive, lambda: _prepare(archive, with_weights, open_folder))
    has_peers = dist.is_initialized() and dist.get_world_size() > 1

    def open_here() -> NemoFolder:
        # The rank that unpacked the archive has opened the folder already.
        return open_folder(root) if prepared is None else prepared[1]

    try:
        yield raise_everywhere(open_here) if has_peers else open_here()
    except BaseException:
        if not has_peers:  # else other ranks may still be reading
            _remove_unpacked(root, archive)
        raise
    if has_peers:
        barrier()
    _remove_unpacked(root, archive)


# Result of ``_prepare``: the folder with the files, and the checkpoint that was opened in it.
_Prepared: TypeAlias = tuple[Path, NemoFolder]


def _remove_unpacked(root: Path, path: Path) -> None:
    """Remove ``root``, into which the archive ``path`` was unpacked.

    If ``path`` is a folder, nothing was unpacked, and the folder stays.
    """
    if root != path:
        remove_temporary(root)


def _prepare(
    path: Path, with_weights: bool, open_folder: Callable[[Path], NemoFolder]
) -> _Prepared:
    """Unpack the archive ``path`` (a folder is used unchanged), and check its contents.

    Returns:
        The folder with the contents, and the checkpoint that ``open_folder`` opened in it.
    """

    def is_needed(name: PurePosixPath) -> bool:
        return with_weights or WEIGHTS_NAME not in name.parts

    root = path if path.is_dir() else unpack(path, is_needed)
    try:
        if root == path:
            verify_folder(root, is_needed)
        folder = open_folder(root)
        # Unpacking has compared the checksums, if the archive has any. Otherwise compare the CRC-32
        # of each shard of the weights.
        if with_weights and not has_checksums(root):
            folder.store.check_data(read=True)
    except BaseException:
        _remove_unpacked(root, path)
        raise
    return root, folder


def _once_per_host(path: Path, prepare: Callable[[], _Prepared]) -> tuple[_Prepared | None, Path]:
    """Call ``prepare``, which unpacks an archive, on one rank of each host; collective.

    If ``prepare`` fails on any host, every rank raises its error.

    Returns:
        What ``prepare`` returned (None on ranks that did not call it), and the folder that was
        prepared on this rank's host.
    """
    if not dist.is_initialized():
        prepared = prepare()
        return prepared, prepared[0]
    places = gather_objects((socket.gethostname(), find_process(os.environ).local_rank))
    preparing_rank = find_preparing_rank(places, dist.get_rank())
    local: list[_Prepared] = []
    is_given_up = Event()

    def prepare_here() -> Path:
        prepared = prepare()
        local.append(prepared)
        if is_given_up.is_set():  # another host's archive has failed meanwhile
            _remove_unpacked(prepared[0], path)
        return prepared[0]

    is_preparing = preparing_rank == dist.get_rank()
    try:
        # A large archive may need longer than the time limit of a single collective.
        root = run_on_some(prepare_here if is_preparing else None)[preparing_rank]
    except BaseException:
        is_given_up.set()
        for unpacked, _ in local:
            _remove_unpacked(unpacked, path)
        raise
    assert root is not None, "the preparing rank has returned it"
    return (local[0] if local else None), root


def find_preparing_rank(places: Sequence[tuple[str, int]], rank: int) -> int:
    """Return the first rank on the node of ``rank``.

    Args:
        places: for each rank the name of its host, and its rank on this node.
    """
    # Nodes may have equal names, as containers often do. Then a local rank occurs once per node.
    nodes = [
        (host, places[:number].count((host, local_rank)))
        for number, (host, local_rank) in enumerate(places)
    ]
    return nodes.index(nodes[rank])


# Unpacking, with limits against malicious files.

MAX_BYTES_VARIABLE = "NEMO_ALIGNER_MAX_ARCHIVE_BYTES"
_MAX_MEMBERS = 100_000
_MAX_RATIO = 20  # weights hardly compress: a higher ratio means a decompression bomb
_ALWAYS_ALLOWED = 2**28
_SPARE_BYTES = 2**28  # bytes that stay free on the disk, or half of the free space if less
_BLOCK = 2**20
# Errors that tarfile raises for a damaged archive. RecursionError: tarfile reads nested headers by
# calling itself.
_UNREADABLE = (
    tarfile.TarError, OSError, EOFError, ValueError, OverflowError, zlib.error, RecursionError,
)  # fmt: skip
_MAX_FOLDER_DEPTH = 64  # real archives have 4 levels of folders or fewer


def unpack(path: Path, is_needed: Callable[[PurePosixPath], bool]) -> Path:
    """Unpack the members that ``is_needed`` accepts into a new temporary folder.

    The caller removes the folder. At most ``NEMO_ALIGNER_MAX_ARCHIVE_BYTES`` are unpacked; the
    default is 20 times the size of the archive, and at least 256 MiB. So that the disk never fills
    up, 256 MiB stay free, or half of the free space if that is less.

    Raises:
        CheckpointError: no such archive; a member that is not a plain file or folder, occurs twice,
            or has a path outside the archive; too many bytes; or a checksum that does not match.
        ConfigError: no temporary folder can be made.
    """
    if not path.is_file():
        raise CheckpointError(no_such_archive(path))
    root = make_temporary("nemo_")
    try:
        with _open_tar(path) as archive:
            sums = _extract(archive, root, path, is_needed)
        compare_checksums(sums, root, path, is_needed)
    except _UNREADABLE as error:
        problem = write_problem(root, error)
        if "unexpected end" in problem:
            problem += ", so the file is incomplete. Copy or download it again"
        remove_temporary(root)
        raise CheckpointError(f"{path}: cannot unpack: {problem}") from error
    except BaseException:
        remove_temporary(root)
        raise
    return root


def check_exists(source: str | Path) -> None:
    """Raise CheckpointError if a checkpoint does not exist.

    It is for checks before anything large is loaded. A name of the hub passes: only opening it
    queries the hub.
    """
    if not Path(source).exists() and not is_hub_name(source):
        raise CheckpointError(no_such_archive(source))


def no_such_archive(source: str | Path) -> str:
    """Return the error text for a missing archive."""
    return (
        f"{source}: there is no checkpoint{near_name_hint(source) or '.'} Pass a .nemo file, the "
        "folder that it unpacks to, a Hugging Face folder, or a .gguf file"
    )


class _BoundedFile:
    """File for ``tarfile`` that raises an error after ``limit`` bytes, or at a header over 16 MiB.

    Without this limit, tarfile would read a header into memory at once, whatever size it claims.
    """

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self._limit = limit
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= 16 * _BLOCK:
            raise tarfile.ReadError(
                f"a header of {size} bytes, wanted at most {16 * _BLOCK}; the archive is damaged "
                "or malicious"
            )
        self._check(self.tell() + size)
        return self._file.read(size)

    def seek(self, position: int) -> int:
        self._check(position)
        return self._file.seek(position)

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise tarfile.ReadError(
                f"it unpacks to more than {self._limit} bytes. If you trust it, set the "
                f"environment variable {MAX_BYTES_VARIABLE} to a higher number"
            )


@contextmanager
def _open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    with path.open("rb") as raw:
        is_zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw) if is_zipped else raw
        bounded = _BoundedFile(file, _max_bytes(path))  # type: ignore[arg-type]
        with tarfile.TarFile(fileobj=bounded, errorlevel=2) as archive:  # type: ignore[arg-type]
            yield archive


def _max_bytes(path: Path) -> int:
    setting = os.environ.get(MAX_BYTES_VARIABLE)
    if setting is None:
        return max(_MAX_RATIO * path.stat().st_size, _ALWAYS_ALLOWED)
    if not setting.isdecimal():
        raise CheckpointError(f"{MAX_BYTES_VARIABLE}: got {setting!r}, wanted a number of bytes")
    return int(setting)


def read_members(path: Path, first: str, *more_names: str) -> dict[str, str]:
    """Read small text members of an archive by name, without unpacking it.

    Reading stops after the member ``first``, which is near the beginning. Missing members are left
    out of the result.

    Returns:
        The members' content by their names.

    Raises:
        CheckpointError: the file is not an archive or is damaged, or one of the members is too
            large.
    """
    members = {}
    try:
        with _open_tar(path) as archive:
            for count, member in enumerate(archive):
                name = _checked_name(member, path).as_posix()
                if count > _MAX_MEMBERS:
                    raise CheckpointError(f"{path}: it has more than {_MAX_MEMBERS} members")
                if name not in (first, *more_names) or member.isdir():
                    continue
                if member.size > MAX_TEXT_BYTES:
                    raise CheckpointError(
                        f"{path}: {name}: got {member.size} bytes, wanted at most {MAX_TEXT_BYTES}"
                    )
                content = archive.extractfile(member)
                assert content is not None, "a regular file has content"
                members[name] = content.read().decode()
                if name == first:
                    break
    except _UNREADABLE as error:
        raise CheckpointError(f"{path}: cannot be read: {short(error)}") from error
    return members


def _extract(
    archive: tarfile.TarFile, root: Path, path: Path, is_needed: Callable[[PurePosixPath], bool]
) -> dict[str, str]:
    """Extract the members that are needed into ``root``, and return each file's sha256 by name."""
    free = shutil.disk_usage(root).free
    budget = max(free - _SPARE_BYTES, free // 2)
    names: set[PurePosixPath] = set()
    sums = {}
    for member in archive:
        name = _checked_name(member, path)
        if name in names and not member.isdir():
            raise CheckpointError(f"{path}: member {member.name!r} occurs twice")
        names.add(name)
        if len(names) > _MAX_MEMBERS:
            raise CheckpointError(f"{path}: it has more than {_MAX_MEMBERS} members")
        if not is_needed(name):
            continue
        # Checking the size in the header keeps the disk from filling up: no more bytes than that
        # are written.
        budget -= member.size
        if budget < 0:
            raise CheckpointError(
                f"{path}: it does not fit into {root.parent}; set TMPDIR to a folder on a disk "
                "with more free space"
            )
        if member.isdir():
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            sums[name.as_posix()] = _write_member(archive, member, root / name)
    return sums


def _checked_name(member: tarfile.TarInfo, path: Path) -> PurePosixPath:
    """Return the name of a member after checking that it is safe to unpack.

    tarfile's own filter does the same checks, but only from Python 3.11.4 on.
    """
    # Reject links and other special files: NeMo archives contain none, and a link can lead out of
    # the folder.
    if not ((member.isreg() and not member.issparse()) or member.isdir()) or member.size < 0:
        raise CheckpointError(f"{path}: member {member.name!r} is not a plain file or folder")
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise CheckpointError(f"{path}: member {member.name!r} has a path outside the archive")
    if len(name.parts) > _MAX_FOLDER_DEPTH:
        raise CheckpointError(
            f"{path}: member {member.name[:60]!r}... is {len(name.parts)} folders deep, wanted at "
            f"most {_MAX_FOLDER_DEPTH}, which is more than any checkpoint needs"
        )
    if not member.name.isprintable() or "\\" in member.name:
        raise CheckpointError(
            f"{path}: member {member.name!r} has a name with unprintable characters or a backslash"
        )
    return name


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    """Write a member's content to ``target`` with default permissions; return its sha256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = archive.extractfile(member)
    assert source is not None, "a regular file has content"
    digest = hashlib.sha256()
    remaining = member.size
    # Mode "x" fails if the file exists, so a link at the target cannot redirect the write.
    with source, target.open("xb") as file:
        while block := source.read(min(remaining, _BLOCK)):
            digest.update(block)
            file.write(block)
            remaining -= len(block)
    if remaining:
        raise tarfile.ReadError(
            f"member {member.name!r} ends {remaining} bytes early, so the archive is cut off"
        )
    return digest.hexdigest()
