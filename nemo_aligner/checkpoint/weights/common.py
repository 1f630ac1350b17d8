"""What a checkpoint holds beside tensors, as plain data.

It lies in ``common.pt``, as NeMo and megatron-core up to 0.16 write it, and this package with any.
Since 0.17 megatron-core itself writes it among the tensors' pieces.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from nemo_aligner.checkpoint.weights.index import INDEX_NAME, read_metadata
from nemo_aligner.checkpoint.weights.pickles import load_plain
from nemo_aligner.errors import CheckpointError, short

COMMON_NAME = "common.pt"
# As megatron-core names an object that is whole in one piece: a list of nothing but it.
_AMONG_PIECES = "common_state/shard_0_1"


def write_common(common: dict[str, Any], folder: Path) -> None:
    """Raises OSError where it cannot be written."""
    torch.save(common, folder / COMMON_NAME)


def read_common(folder: Path) -> dict[str, Any]:
    """What ``folder`` holds beside tensors.

    megatron-core's list of harmless classes counts as plain, ``argparse.Namespace`` among them.

    Raises:
        CheckpointError: it is missing, is damaged, or would run as code.
    """
    common = folder / COMMON_NAME
    if not common.exists() and (folder / INDEX_NAME).is_file():
        return _among_pieces(folder)
    try:
        with common.open("rb") as stored:
            return _plain(stored, common)
    except OSError as error:
        raise CheckpointError(f"{common}: refused or unreadable: {short(error)}") from error


def _among_pieces(folder: Path) -> dict[str, Any]:
    where = (read_metadata(folder).storage_data or {}).get(MetadataIndex(_AMONG_PIECES))
    if where is None:
        raise CheckpointError(
            f"{folder}: got neither {COMMON_NAME} nor {_AMONG_PIECES} in {INDEX_NAME}, "
            "wanted what lies beside the tensors"
        )
    path = folder / where.relative_path
    try:
        with path.open("rb") as file:
            file.seek(where.offset)
            stored = file.read(where.length)
    except OSError as error:
        raise CheckpointError(f"{path}: {_AMONG_PIECES}: cannot be read: {error}") from error
    found = _plain(BytesIO(stored), f"{path}: {_AMONG_PIECES}")
    return found[0] if type(found) is list and len(found) == 1 else found


def _plain(stored: BinaryIO, name: Path | str) -> Any:
    try:
        return load_plain(stored)
    except Exception as error:
        raise CheckpointError(f"{name}: refused or unreadable: {short(error)}") from error
