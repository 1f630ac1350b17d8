"""Write a ``.nemo`` archive, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from nemo_aligner.checkpoint.nemo.archive import CHECKSUMS_NAME
from nemo_aligner.checkpoint.nemo.folders import (
    CONFIG_NAME,
    CONTRACT_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
)
from nemo_aligner.checkpoint.untrusted import MAX_TEXT_BYTES
from nemo_aligner.errors import CheckpointError
from nemo_aligner.temporary import make_temporary, remove_temporary


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
        scratch = make_temporary(f".{output.name}.", output.parent)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {error}") from error
    try:
        yield scratch
    finally:
        remove_temporary(scratch)


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
                    archive.add_text(CONTRACT_NAME, json.dumps(contract, indent=2, allow_nan=False))
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
