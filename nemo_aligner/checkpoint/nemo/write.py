"""Write NeMo archives completely or not at all, with the sha256 of every member."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from nemo_aligner.checkpoint.nemo.checksums import CHECKSUMS_NAME
from nemo_aligner.checkpoint.nemo.fingerprint import build_fingerprints
from nemo_aligner.checkpoint.nemo.folder import (
    CONFIG_NAME,
    CONTRACT_NAME,
    FINGERPRINT_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
)
from nemo_aligner.checkpoint.safe_load import MAX_TEXT_BYTES
from nemo_aligner.checkpoint.weights.save import LazyTensor, save_lazy
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.processes import make_temporary, remove_temporary
from nemo_aligner.utils.writing import (
    explaining_full_disk,
    sync_to_disk,
    temporary_beside,
    write_problem,
)


@contextmanager
def scratch_beside(output: Path) -> Iterator[Path]:
    """Provide a temporary folder next to ``output``, on the same disk; remove it after the block.

    Raises:
        CheckpointError: ``output`` exists already, or cannot be written.
    """
    if output.exists():
        raise CheckpointError(f"{output}: it exists already. Choose another name, or remove it")
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
    fingerprints: Mapping[str, str] | None = None,
) -> None:
    """Write an archive that appears complete or not at all.

    One process calls it. If several programs write ``path``, the last one to finish wins.

    The config's ``tokenizer.type`` is set to ``nemo:tokenizer``, which is how NeMo refers to a
    member of the archive. The last member, ``checksums.json``, has the sha256 of all others.

    Args:
        config: settings of the model by the keys of ``model_config.yaml``.
        weights: folder of a distributed checkpoint, in a temporary folder on the disk of ``path``.
        tokenizer: folder of a tokenizer.
        contract: content of ``scoring_contract.json``; None for a base model.
        fingerprints: content of ``model_fingerprint.json``, see ``build_fingerprints``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {"library": "huggingface", "type": f"nemo:{TOKENIZER_NAME}"}
    config = {**config, "tokenizer": tokenizer_config}
    # The file is written in the folder of the weights, because a killed process may leave it, and
    # the callers remove that folder.
    with temporary_beside(weights.absolute().parent / path.name) as partial:
        with partial.open("wb") as stream:
            with _ChecksummingTar(fileobj=stream, mode="w", dereference=True) as archive:
                archive.add_text(CONFIG_NAME, yaml.safe_dump(config, sort_keys=False))
                if contract is not None:
                    archive.add_text(CONTRACT_NAME, json.dumps(contract, indent=2, allow_nan=False))
                # Put the fingerprints before the weights, so that ``read_members`` finds it without
                # reading past them.
                if fingerprints is not None:
                    archive.add_text(FINGERPRINT_NAME, json.dumps(fingerprints))
                archive.add(tokenizer, f"./{TOKENIZER_NAME}", filter=_remove_owner)
                archive.add(weights, f"./{WEIGHTS_NAME}", filter=_remove_owner)
                # Put the checksums last: a tar is written in one pass, and they are complete only
                # now.
                archive.add_text(CHECKSUMS_NAME, json.dumps(archive.checksums, indent=2))
            stream.flush()
            os.fsync(stream.fileno())
        # os.replace is atomic: after a crash, ``path`` is either the complete old archive or the
        # complete new one.
        os.replace(partial, path)
        sync_to_disk(path.parent)


def write_lazy_nemo(
    output: Path,
    config: dict[str, Any],
    tensors: Mapping[str, LazyTensor],
    layers: Mapping[str, Sequence[LazyTensor]],
    scratch: Path,
    contract: ScoringContract | None,
) -> None:
    """Write a conversion's archive with its fingerprints, one tensor at a time.

    So no model is held in memory.

    Args:
        output: path of the new archive.
        config: settings of the model by the keys of ``model_config.yaml``.
        tensors: tensors outside the layers, by their stored names.
        layers: for each stored name in the layers, one tensor of each layer.
        scratch: temporary folder on the disk of ``output``. Its folder ``tokenizer`` already has
            the tokenizer's files.
        contract: scoring contract of a reward model; None for a base model.
    """
    weights, rules = scratch / "weights", None if contract is None else contract.to_dict()
    fingerprints = build_fingerprints(save_lazy(tensors, layers, weights), config)
    write_nemo(output, config, weights, scratch / "tokenizer", rules, fingerprints)


class _ChecksummingTar(tarfile.TarFile):
    """Tar writer that computes the sha256 of each member, for ``checksums.json``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.checksums: dict[str, str] = {}

    def add_text(self, name: str, text: str) -> None:
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:  # ``read_members`` would reject such a member
            raise CheckpointError(f"{name}: got {len(data)} bytes, wanted at most {MAX_TEXT_BYTES}")
        member = tarfile.TarInfo(f"./{name}")
        member.size = len(data)
        self.addfile(member, BytesIO(data))

    def addfile(self, member: tarfile.TarInfo, fileobj: Any = None) -> None:
        if fileobj is None:
            super().addfile(member)
            return
        hashing_file = _HashingFile(fileobj)
        super().addfile(member, hashing_file)  # type: ignore[arg-type]
        self.checksums[PurePosixPath(member.name).as_posix()] = hashing_file.digest.hexdigest()


class _HashingFile:
    """File that computes the sha256 of all bytes that are read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self.digest.update(block)
        return block


def _remove_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Filter for ``TarFile.add`` that removes the private names and ids of a file's owner."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
