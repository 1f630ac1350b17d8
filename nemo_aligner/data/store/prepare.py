"""The indexes of a run's files on every rank: the first rank of each node makes what is missing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_aligner.console import say, show_duration
from nemo_aligner.data.store.arrays import ArraysInMemory
from nemo_aligner.data.store.folder import Stamp, index_folder, open_index, write_index
from nemo_aligner.data.store.index import FileIndex, IndexRules, make_index
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.parallel.collectives import run_on_some
from nemo_aligner.processes import find_process
from nemo_aligner.temporary import make_temporary

# What is smaller is tokenized in a second, by every rank: not worth a folder beside the data.
SMALL_BYTES = 4 << 20
# Of the files that are not small, where each one's index lies.
Folders = dict[str, Path]


@dataclass(frozen=True)
class IndexPlace:
    """Where indexes are kept: in ``folder``, None for beside the files; unless it is not ``kept``.

    In a folder of its own every file has one, beside the files those that are not small.
    """

    folder: str | None = None
    kept: bool = True


def open_indexes(
    paths: Sequence[str], rules: IndexRules, place: IndexPlace = IndexPlace()
) -> list[FileIndex]:
    """The index of every file, mapped where it is on the disk; every rank calls it.

    Raises:
        ConfigError: ``place`` cannot be written to.
        DataError: see ``make_index``; an index cannot be written.
    """
    different = list(dict.fromkeys(paths))
    large = [path for path in different if _is_indexed(path, place)]
    folders = _prepare_on_nodes(partial(_prepare, large, rules, place)) if large else {}
    opened = {
        path: _open(path, folders[path])
        if path in folders
        else make_index(path, rules, ArraysInMemory())
        for path in different
    }
    return [opened[path] for path in paths]


def are_kept(paths: Sequence[str], place: IndexPlace) -> bool:
    """Whether ``open_indexes`` leaves something on the disk, where it can."""
    return place.kept and any(_is_indexed(path, place) for path in paths)


def _is_indexed(path: str, place: IndexPlace) -> bool:
    return place.folder is not None or Stamp.of(path).size >= SMALL_BYTES


def _open(path: str, folder: Path) -> FileIndex:
    index = open_index(folder, path)
    if index is None:
        raise DataError(f"{path}: its index {folder} was there, and is no more; start again")
    return index


def _prepare_on_nodes(prepare: Callable[[], Folders]) -> Folders:
    """What this node's first rank says; nodes that share a disk find what rank 0 has made."""
    process, host = find_process(os.environ), socket.gethostname()

    def on_node() -> tuple[str, Folders]:
        return host, prepare()

    made = run_on_some(on_node if process.rank == 0 else None)
    if process.local_world_size < process.world_size:
        first_elsewhere = process.local_rank == 0 and process.rank > 0
        made += run_on_some(on_node if first_elsewhere else None)
    found = [folders for where, folders in filter(None, made) if where == host]
    return found[0]


def _prepare(paths: Sequence[str], rules: IndexRules, place: IndexPlace) -> Folders:
    return {path: _prepare_one(path, rules, place) for path in paths}


def _prepare_one(path: str, rules: IndexRules, place: IndexPlace) -> Path:
    folder = index_folder(path, rules, place.folder)
    if open_index(folder, path) is not None:
        say(f"{path}: its tokens are in {folder}")
        return folder
    kept = place.kept and _can_write(folder.parent, place)
    if not kept:
        folder = make_temporary("nemo_aligner_index_") / folder.name
    say(f"{path}: tokenizing it, into {folder}" + " for this run alone" * (not kept))
    begun = time.monotonic()
    try:
        write_index(path, rules, folder, say)
    except OSError as error:
        raise DataError(
            f"{path}: its tokens cannot be written to {folder}: {error}; wanted a folder with "
            "space as model.data.index_dir"
        ) from error
    say(f"{path}: tokenized in {show_duration(time.monotonic() - begun)}")
    return folder


def _can_write(folder: Path, place: IndexPlace) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".nemo_aligner_{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        if place.folder is not None:
            raise ConfigError(
                f"model.data.index_dir: got {place.folder}, wanted a folder to write to: {error}"
            ) from error
        say(f"{folder}: no index can be kept beside the data ({error.strerror})")
        return False
    return True
