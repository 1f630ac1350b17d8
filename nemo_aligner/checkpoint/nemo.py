"""The .nemo archive: a tar of config, distributed weights, tokenizer and scoring contract."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed as dist
import yaml

from nemo_aligner.checkpoint.safe_metadata import stored_tensors
from nemo_aligner.checkpoint.weights import load_weights, save_weights
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.collectives import barrier, gather_objects

__all__ = [
    "NemoFolder",
    "load_weights",
    "open_nemo",
    "save_weights",
    "stored_tensors",
    "write_nemo",
]

CONFIG_NAME = "model_config.yaml"
WEIGHTS_NAME = "model_weights"
TOKENIZER_NAME = "tokenizer"
CONTRACT_NAME = "scoring_contract.json"
_MAX_MEMBERS = 100_000
_MAX_TEXT_BYTES = 16 * 2**20
_SPARE_BYTES = 2**28  # leave this much of the disk free
_LEGACY_WEIGHTS = ("model_weights.ckpt", "mp_rank_*", "tp_rank_*")


@dataclass(frozen=True)
class NemoFolder:
    """An unpacked archive; nothing in it is trusted, and nothing in it is unpickled here."""

    root: Path
    source: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """``model_config.yaml`` as plain data."""
        text = self._read(CONFIG_NAME)
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise CheckpointError(f"{self.source}: {CONFIG_NAME}: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(
                f"{self.source}: {CONFIG_NAME}: got {type(config).__name__}, wanted a mapping"
            )
        return config

    @property
    def weights(self) -> Path:
        """The distributed checkpoint's folder."""
        folder = self.root / WEIGHTS_NAME
        if folder.is_dir():
            return folder
        for pattern in _LEGACY_WEIGHTS:
            for found in self.root.glob(pattern):
                raise CheckpointError(
                    f"{self.source}: got legacy weights ({found.name}), which are pickles and are "
                    f"not read; wanted a distributed checkpoint in {WEIGHTS_NAME}/"
                )
        raise CheckpointError(f"{self.source}: it holds no {WEIGHTS_NAME} folder")

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's folder."""
        section = self.config.get("tokenizer")
        for key in ("type", "model"):
            value = section.get(key) if isinstance(section, dict) else None
            if isinstance(value, str) and value.startswith("nemo:"):
                return self._inside(value.removeprefix("nemo:"))
        return self._inside(TOKENIZER_NAME)

    @cached_property
    def contract(self) -> dict[str, Any] | None:
        """``scoring_contract.json``, or None in an archive that is no reward model of ours."""
        if not (self.root / CONTRACT_NAME).is_file():
            return None
        try:
            return json.loads(self._read(CONTRACT_NAME))
        except ValueError as error:
            raise CheckpointError(f"{self.source}: {CONTRACT_NAME}: {error}") from error

    def _read(self, name: str) -> str:
        path = self.root / name
        if not path.is_file():
            raise CheckpointError(f"{self.source}: it holds no {name}")
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise CheckpointError(f"{self.source}: {name}: larger than {_MAX_TEXT_BYTES} bytes")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.source}: {name}: {error}") from error

    def _inside(self, name: str) -> Path:
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root.resolve()) or not path.is_dir():
            raise CheckpointError(f"{self.source}: it holds no tokenizer folder {name!r}")
        return path


@contextmanager
def open_nemo(path: str | Path, *, with_weights: bool = True) -> Iterator[NemoFolder]:
    """Open a ``.nemo`` (plain or gzipped tar, or the folder it unpacks to) for reading.

    Without weights, ``NemoFolder.weights`` may not be asked for, and little is unpacked.

    Where torch.distributed is initialised every rank must call it: one rank of each host unpacks,
    into the temporary directory, and the folder is gone when all have left the block.

    Raises:
        CheckpointError: no such archive, an unsafe member, or one without the two parts that count.
    """
    path = Path(path)
    if path.is_dir():
        yield _checked(NemoFolder(path, path), with_weights)
        return
    unpacks, root = _unpack_once_per_host(path, with_weights)
    try:
        yield _checked(NemoFolder(root, path), with_weights)
        if dist.is_initialized():
            barrier()
    finally:
        if unpacks:
            shutil.rmtree(root, ignore_errors=True)


def _checked(folder: NemoFolder, with_weights: bool) -> NemoFolder:
    _ = folder.config, with_weights and folder.weights
    return folder


def _unpack_once_per_host(path: Path, with_weights: bool) -> tuple[bool, Path]:
    """Whether this rank unpacked (and so owns the folder), and the folder."""
    if not dist.is_initialized():
        return True, _unpack(path, with_weights)
    hosts = gather_objects(socket.gethostname())
    owner = hosts.index(hosts[dist.get_rank()])
    unpacks = owner == dist.get_rank()
    root, problem = _outcome(lambda: _unpack(path, with_weights)) if unpacks else (None, None)
    outcomes: list[Any] = gather_objects((root, problem))
    for _, found in outcomes:
        if found is not None:
            if root is not None:
                shutil.rmtree(root, ignore_errors=True)
            raise CheckpointError(found)
    return unpacks, Path(outcomes[owner][0])


def _outcome(unpack: Callable[[], Path]) -> tuple[Path | None, str | None]:
    try:
        return unpack(), None
    except CheckpointError as error:
        return None, str(error)


def _unpack(path: Path, with_weights: bool) -> Path:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such .nemo archive or folder")
    root = Path(tempfile.mkdtemp(prefix="nemo_"))
    try:
        with tarfile.open(path, "r:*") as archive:
            _extract(archive, root, path, with_weights)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        shutil.rmtree(root, ignore_errors=True)
        raise CheckpointError(f"{path}: cannot unpack: {error}") from error
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return root


def _extract(archive: tarfile.TarFile, root: Path, path: Path, with_weights: bool) -> None:
    budget = shutil.disk_usage(root).free - _SPARE_BYTES
    for count, member in enumerate(archive, start=1):
        # Links are no part of the format; tarfile's own filter is newer than Python 3.11.2.
        plain = (member.isreg() and not member.issparse()) or member.isdir()
        if not plain:
            raise CheckpointError(f"{path}: member {member.name!r} is not a plain file or folder")
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise CheckpointError(f"{path}: member {member.name!r} has a path out of the archive")
        if not with_weights and WEIGHTS_NAME in name.parts:
            continue
        budget -= member.size
        if budget < 0:
            raise CheckpointError(f"{path}: it does not fit into {root.parent}; set TMPDIR")
        if count > _MAX_MEMBERS:
            raise CheckpointError(f"{path}: more than {_MAX_MEMBERS} members")
        _write_member(archive, member, root / name)


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """A folder or a file with this machine's default permissions and no other attributes."""
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source = archive.extractfile(member)
    assert source is not None, "a regular file has content"
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


def write_nemo(
    path: str | Path,
    config: dict[str, Any],
    weights: Path,
    tokenizer: Path,
    contract: dict[str, Any] | None = None,
) -> None:
    """Write an archive that appears whole or not at all; one process calls it.

    ``weights`` and ``tokenizer`` are folders. The config's ``tokenizer.type`` is set to
    ``nemo:tokenizer``, NeMo's way to point into the archive.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {"library": "huggingface", "type": f"nemo:{TOKENIZER_NAME}"}
    config = {**config, "tokenizer": tokenizer_config}
    partial = path.with_name(f".{path.name}.partial")  # a killed write leaves it to the next
    try:
        with partial.open("wb") as stream:
            with tarfile.open(fileobj=stream, mode="w:", dereference=True) as archive:
                _add_text(archive, CONFIG_NAME, yaml.safe_dump(config, sort_keys=False))
                if contract is not None:
                    _add_text(archive, CONTRACT_NAME, json.dumps(contract, indent=2))
                archive.add(tokenizer, f"./{TOKENIZER_NAME}", filter=_anonymous)
                archive.add(weights, f"./{WEIGHTS_NAME}", filter=_anonymous)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        sync_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    member = tarfile.TarInfo(f"./{name}")
    member.size = len(data)
    archive.addfile(member, BytesIO(data))


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
