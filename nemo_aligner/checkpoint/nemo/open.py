"""The .nemo archive, and every other folder of Megatron's weights that opens like one.

``open_nemo`` opens what this package writes; NeMo 1.x and NeMo-Aligner archives (tar or tar.gz, or
unpacked; weights as torch_dist or zarr); NeMo 2 folders (``weights/`` and ``context/``); folders of
Megatron-LM and Megatron-Bridge (``iter_0000100/``, or the one above them). All give a
``NemoFolder``; see docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch.distributed as dist
import yaml

from nemo_aligner.checkpoint.nemo.archive import (
    CHECKSUMS_NAME,
    has_checksums,
    unpack,
    verify_folder,
)
from nemo_aligner.checkpoint.nemo.folders import (
    CONFIG_NAME,
    CONTRACT_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    NemoFolder,
    folder_of,
    refuse_hugging_face,
)
from nemo_aligner.checkpoint.untrusted import MAX_TEXT_BYTES
from nemo_aligner.checkpoint.weights.torch_dist import (
    check_data,
    load_tensors,
    load_weights,
    save_weights,
    stored_tensors,
)
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.collectives import barrier, gather_objects

__all__ = [
    "NemoFolder",
    "load_tensors",
    "load_weights",
    "open_nemo",
    "save_weights",
    "scratch_beside",
    "stored_tensors",
    "write_nemo",
]


@contextmanager
def open_nemo(
    path: str | Path,
    *,
    with_weights: bool = True,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
) -> Iterator[NemoFolder]:
    """Open a checkpoint of NeMo or Megatron for reading; see the top of this file for which.

    Without weights, ``NemoFolder.weights`` may not be asked for, and little is unpacked. A folder
    ``tokenizer`` and a file ``config`` stand for the checkpoint's own.

    Where torch.distributed is initialised every rank must call it: one rank of each host unpacks
    an archive, into the temporary directory, and the folder is gone when all have left the block.
    That rank also reads all weights once, so that damage is known before any is used.

    Raises:
        CheckpointError: no such archive, an unsafe member, one without the parts that count, or one
            that is damaged.
    """
    path = Path(path)
    given = [None if part is None else Path(part) for part in (tokenizer, config)]

    def opened(root: Path) -> NemoFolder:
        folder = folder_of(root, path, *given)
        _ = folder.config, with_weights and folder.weights
        return folder

    owns, root = _once_per_host(path, lambda: _prepare(path, with_weights, opened))
    try:
        yield opened(root)
        if dist.is_initialized():
            barrier()
    finally:
        if owns:
            _remove(root, path)


def _remove(root: Path, path: Path) -> None:
    if root != path:
        shutil.rmtree(root, ignore_errors=True)


def _prepare(path: Path, with_weights: bool, opened: Callable[[Path], NemoFolder]) -> Path:
    """The folder of an archive, or the folder itself, once its content is found whole."""

    def wanted(name: PurePosixPath) -> bool:
        return with_weights or WEIGHTS_NAME not in name.parts

    if path.is_file():
        refuse_hugging_face(path, path)
    root = path if path.is_dir() else unpack(path, wanted)
    try:
        if root == path:
            verify_folder(root, wanted)
        folder = opened(root)
        if with_weights and not has_checksums(root):
            check_data(folder.weights, read=True)
    except BaseException:
        _remove(root, path)
        raise
    return root


def _once_per_host(path: Path, prepare: Callable[[], Path]) -> tuple[bool, Path]:
    """Whether this rank called ``prepare`` for its host, and what that gave."""
    if not dist.is_initialized():
        return True, prepare()
    hosts = gather_objects(socket.gethostname())
    owner = hosts.index(hosts[dist.get_rank()])
    is_owner = owner == dist.get_rank()
    root, problem = _outcome(prepare) if is_owner else (None, None)
    outcomes: list[Any] = gather_objects((root, problem))
    for _, found in outcomes:
        if found is not None:
            if root is not None:
                _remove(root, path)
            raise CheckpointError(found)
    return is_owner, Path(outcomes[owner][0])


def _outcome(prepare: Callable[[], Path]) -> tuple[Path | None, str | None]:
    try:
        return prepare(), None
    except CheckpointError as error:
        return None, str(error)


@contextmanager
def scratch_beside(output: Path) -> Iterator[Path]:
    """A folder on the disk of ``output``, which is to be new; it is gone afterwards.

    Raises:
        CheckpointError: ``output`` exists, or nothing can be written where it is to be.
    """
    if output.exists():
        raise CheckpointError(f"{output}: it exists, wanted the name of a new one")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {error}") from error
    with scratch as folder:
        yield Path(folder)


def write_nemo(
    path: str | Path,
    config: dict[str, Any],
    weights: Path,
    tokenizer: Path,
    contract: dict[str, Any] | None = None,
) -> None:
    """Write an archive that appears whole or not at all; one process calls it.

    ``weights`` and ``tokenizer`` are folders. The config's ``tokenizer.type`` is set to
    ``nemo:tokenizer``, NeMo's way to point into the archive. The last file, ``checksums.json``, has
    the sha256 of every other.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {"library": "huggingface", "type": f"nemo:{TOKENIZER_NAME}"}
    config = {**config, "tokenizer": tokenizer_config}
    partial = path.with_name(f".{path.name}.partial")  # a killed write leaves it to the next
    try:
        with partial.open("wb") as stream:
            with _SummingTar(fileobj=stream, mode="w", dereference=True) as archive:
                archive.add_text(CONFIG_NAME, yaml.safe_dump(config, sort_keys=False))
                if contract is not None:
                    archive.add_text(CONTRACT_NAME, json.dumps(contract, indent=2))
                archive.add(tokenizer, f"./{TOKENIZER_NAME}", filter=_anonymous)
                archive.add(weights, f"./{WEIGHTS_NAME}", filter=_anonymous)
                archive.add_text(CHECKSUMS_NAME, json.dumps(archive.sums, indent=2))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        sync_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


class _SummingTar(tarfile.TarFile):
    """A tar in the making that knows the sha256 of what it was given, by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sums: dict[str, str] = {}

    def add_text(self, name: str, text: str) -> None:
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:  # it could not be read again
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
    """A file whose sha256 is taken as it is read."""

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
    """Wait until the file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
