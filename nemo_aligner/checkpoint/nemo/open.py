"""The .nemo archive, and every other folder of Megatron's weights that opens like one.

``open_nemo`` opens what this package writes; NeMo 1.x and NeMo-Aligner archives (tar or tar.gz, or
unpacked; weights as torch_dist or zarr); NeMo 2 folders (``weights/`` and ``context/``); folders of
Megatron-LM and Megatron-Bridge (``iter_0000100/``, or the one above them). All give a
``NemoFolder``; see docs/checkpoints.md.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed as dist

from nemo_aligner.checkpoint.nemo.archive import has_checksums, unpack, verify_folder
from nemo_aligner.checkpoint.nemo.folders import (
    WEIGHTS_NAME,
    NemoFolder,
    folder_of,
    refuse_hugging_face,
)
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.collectives import barrier, gather_objects
from nemo_aligner.temporary import remove_temporary


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
    an archive, into the temporary directory, and the folder is gone when all have left the block,
    or with that rank's process where one of several fails. It also reads all weights once, so that
    damage is known before any is used.

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

    prepared, root = _once_per_host(path, lambda: _prepare(path, with_weights, opened))
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    try:
        yield opened(root) if prepared is None else prepared.folder
    except BaseException:
        if not has_peers:  # else some may still read in it
            _remove(root, path)
        raise
    if has_peers:
        barrier()
    _remove(root, path)


@dataclass(frozen=True)
class _Prepared:
    """A checkpoint whose content was found whole, and the folder that it was unpacked to."""

    root: Path
    folder: NemoFolder


def _remove(root: Path, path: Path) -> None:
    """The folder that this process unpacked; one that was given stays, whoever made it."""
    if root != path:
        remove_temporary(root)


def _prepare(path: Path, with_weights: bool, opened: Callable[[Path], NemoFolder]) -> _Prepared:
    """Unpack an archive, or take the folder itself; its content is found whole."""

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
            folder.store.check_data(read=True)
    except BaseException:
        _remove(root, path)
        raise
    return _Prepared(root, folder)


def _once_per_host(path: Path, prepare: Callable[[], _Prepared]) -> tuple[_Prepared | None, Path]:
    """What ``prepare`` gave, on the one rank of a host that called it; and the folder, on all."""
    if not dist.is_initialized():
        prepared = prepare()
        return prepared, prepared.root
    hosts = gather_objects(socket.gethostname())
    owner = hosts.index(hosts[dist.get_rank()])
    is_owner = owner == dist.get_rank()
    mine, problem = _outcome(prepare) if is_owner else (None, None)
    outcomes: list[Any] = gather_objects((None if mine is None else mine.root, problem))
    for _, found in outcomes:
        if found is not None:
            if mine is not None:
                _remove(mine.root, path)
            raise CheckpointError(found)
    return mine, Path(outcomes[owner][0])


def _outcome(prepare: Callable[[], _Prepared]) -> tuple[_Prepared | None, str | None]:
    try:
        return prepare(), None
    except CheckpointError as error:
        return None, str(error)
