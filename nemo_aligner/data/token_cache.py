"""The token cache: indexes of data files on disk, made once and checked before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_aligner import __version__
from nemo_aligner.data.readers import ReaderConfig
from nemo_aligner.data.token_index import (
    ArraysInFolder,
    ArraysInMemory,
    FileIndex,
    IndexFacts,
    IndexRules,
    make_index,
)
from nemo_aligner.data.tokenize import usable_processes
from nemo_aligner.distributed.collectives import run_on_some
from nemo_aligner.utils.console import say, show_duration
from nemo_aligner.utils.errors import ConfigError, DataError
from nemo_aligner.utils.processes import find_process, make_temporary, remove_temporary
from nemo_aligner.utils.writing import write_problem

# The folder of a file's index, and whether the index still fits the file.
#
# ``<file>.index-<rules>/`` has a file for each array, and ``index.json``. Its name identifies the
# rules, its content the file that it was made from. It is written under another name, and renamed
# once it is complete on the disk.

VERSION = 6
_FACTS = "index.json"
_DECIDE_IDS = (
    "template",
    "chat_template_kwargs",
    "add_bos",
    "add_eos",
    "bos_id",
    "eos_id",
    "overlong",
    "seq_length",
    "tokenizer_fingerprint",
    "reward_token_id",
)
_DECIDE_STEPS = ("scored_position", "step_separator")
# A file may be written to twice within one tick of its clock (coarse: two seconds on FAT).
_TICK_NS = 2_000_000_000
_READ_BYTES = 1 << 22
_BYTES_PER_PROCESS = 1 << 21
_TRIES = 3
Say = Callable[[str], None]


@dataclass(frozen=True)
class FileStat:
    """Size and times by which a file counts as unchanged without reading it."""

    size: int
    mtime_ns: int
    # mtime can be set back, as cp -p and rsync -t do; ctime cannot.
    ctime_ns: int

    @classmethod
    def of(cls, path: str) -> FileStat:
        """Raises DataError where there is no such file."""
        try:
            found = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def describe_rules(rules: IndexRules) -> dict[str, Any]:
    """Everything but the file that decides what an index holds, as JSON values."""
    import tokenizers

    how, contract = rules.reading, rules.contract
    steps = {name: getattr(contract, name) for name in _DECIDE_STEPS}
    return {
        **(steps if contract.has_steps else {}),
        "version": VERSION,
        "nemo_aligner": __version__,
        "tokenizers": tokenizers.__version__,
        "contract": {name: getattr(contract, name) for name in _DECIDE_IDS},
        "kind": None if how.kind is None else how.kind.value,
        "format": how.format,
        "attributes": list(how.attributes),
        "loss_mask_val": how.loss_mask_val,
        "pair_columns": list(how.pair_columns),
        "pair_keys": None if how.pair_keys is None else asdict(how.pair_keys),
        "prompts": None if how.prompts is None else asdict(how.prompts),
        "ties": how.ties,
        **({} if how.neutral == ReaderConfig.neutral else {"neutral": how.neutral}),
        "contradicting": how.contradicting.value,
    }


def index_folder(path: str, rules: IndexRules, index_dir: str | None) -> Path:
    """Folder of a file's index: beside the file, or in ``index_dir``."""
    described = describe_rules(rules)
    if index_dir is not None:
        # Files of one name from several folders.
        described["path"] = str(Path(path).resolve())
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    parent = Path(path).parent if index_dir is None else Path(index_dir)
    return parent / f"{Path(path).name}.index-{digest[:12]}"


def open_index(folder: Path, path: str) -> FileIndex | None:
    """The index in ``folder``, if it is whole, and of the file as it is now."""
    try:
        held = json.loads((folder / _FACTS).read_text())
        arrays = ArraysInFolder(folder)
        # Sizes first: a copy that was cut off shows in them, without reading it.
        if arrays.sizes() != held["sizes"] or not _is_of(held, folder, path):
            return None
        return FileIndex(IndexFacts.from_dict(held["facts"], path), arrays)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # of another version, or damaged: it is made anew


def _is_of(held: dict[str, Any], folder: Path, path: str) -> bool:
    now, then = FileStat.of(path), FileStat(**held["stamp"])
    if now == then and held["settled"]:
        return True
    if now.size != then.size or content_digest(path) != held["content"]:
        return False
    held = {**held, "stamp": asdict(now), "settled": _is_settled(now, time.time_ns())}
    with suppress(OSError):  # it is right without, and read once more at the next start
        _write_facts(folder, held)
    return True


def _is_settled(stamp: FileStat, now_ns: int) -> bool:
    """True if a change after ``now_ns`` would show in the file's times."""
    return now_ns - stamp.mtime_ns > _TICK_NS


def content_digest(path: str) -> str:
    """sha256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def write_index(path: str, rules: IndexRules, folder: Path, say: Say) -> None:
    """Write the index of a file to ``folder``; its disk must have space for it.

    Raises:
        ConfigError, DataError: as ``make_index``, or the file changed meanwhile.
        OSError: nothing can be written there.
    """
    part = make_temporary(f".{folder.name}.part-", folder.parent)
    try:
        # mkdtemp lets its owner alone in; an index is for all who may read the folder it is in.
        os.chmod(part, folder.parent.stat().st_mode & 0o777)
        _fill(path, rules, part, say)
        _publish(part, folder, path)
    finally:
        remove_temporary(part)


def _fill(path: str, rules: IndexRules, part: Path, say: Say) -> None:
    begun, stamp, arrays = time.time_ns(), FileStat.of(path), ArraysInFolder(part)
    processes = min(usable_processes(), 1 + stamp.size // _BYTES_PER_PROCESS)
    with ThreadPoolExecutor(1) as beside:
        # hashlib lets go of the GIL: the file is hashed while it is tokenized.
        content = beside.submit(content_digest, path)
        index = make_index(path, rules, arrays, processes, _ProgressLines(path, say))
        arrays.close()
        held = {
            "rules": describe_rules(rules),
            "stamp": asdict(stamp),
            "settled": _is_settled(stamp, begun),
            "content": content.result(),
            "sizes": arrays.sizes(),
            "facts": index.facts.to_dict(),
        }
    if FileStat.of(path) != stamp:
        raise DataError(f"{path}: it changed while it was read; start again when it is complete")
    _write_facts(part, held)


def _write_facts(folder: Path, held: dict[str, Any]) -> None:
    # On the disk before it gets its name: after a crash there is a whole one or none.
    new = folder / f".{_FACTS}.{os.getpid()}"
    with new.open("w") as file:
        json.dump(held, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _FACTS)


def _publish(part: Path, folder: Path, path: str) -> None:
    """Give what is written its name; one that another process has written meanwhile stays."""
    for _ in range(_TRIES):
        with suppress(OSError):
            # It fails where there is such a folder, unless that is empty.
            part.rename(folder)
            return
        if open_index(folder, path) is not None:
            return
        old = part.with_name(f"{part.name}.old")
        with suppress(OSError):
            folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    part.rename(folder)


class _ProgressLines:
    """A line about a file every few seconds."""

    _SECONDS = 20.0

    def __init__(self, path: str, say: Say) -> None:
        self._path, self._say = path, say
        self._begun = self._last = time.monotonic()

    def __call__(self, records: int) -> None:
        now = time.monotonic()
        if now - self._last > self._SECONDS:
            self._last = now
            rate = records / (now - self._begun)
            self._say(f"{self._path}: {records} records tokenized, {rate:.0f} a second")


# The indexes of a run's files on every rank: the first rank of each node makes what is missing.

# Smaller files are tokenized in a second by every rank, which is not worth a folder.
SMALL_BYTES = 4 << 20
# File -> folder of its index, for files that are not small.
Folders = dict[str, Path]


@dataclass(frozen=True)
class IndexPlace:
    """Place of the indexes: ``folder``, or beside the files if None; temporary unless ``kept``.

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
    prepare = lambda: {path: _prepare(path, rules, place) for path in large}  # noqa: E731
    folders = _prepare_on_nodes(prepare) if large else {}
    opened = {
        path: _open(path, folders[path])
        if path in folders
        else make_index(path, rules, ArraysInMemory())
        for path in different
    }
    return [opened[path] for path in paths]


def are_kept(paths: Sequence[str], place: IndexPlace) -> bool:
    """True if ``open_indexes`` keeps the indexes on the disk."""
    return place.kept and any(_is_indexed(path, place) for path in paths)


def _is_indexed(path: str, place: IndexPlace) -> bool:
    return place.folder is not None or FileStat.of(path).size >= SMALL_BYTES


def _open(path: str, folder: Path) -> FileIndex:
    index = open_index(folder, path)
    if index is None:
        raise DataError(f"{path}: its index {folder} has disappeared; start again")
    return index


def _prepare_on_nodes(prepare: Callable[[], Folders]) -> Folders:
    """Take the answer of this node's first rank; nodes that share a disk reuse rank 0's files."""
    process, host = find_process(os.environ), socket.gethostname()

    def on_node() -> tuple[str, Folders]:
        return host, prepare()

    made = run_on_some(on_node if process.rank == 0 else None)
    # Rank 0 comes first, so that nodes with its disk find its files and write none.
    if process.local_world_size < process.world_size:
        first_elsewhere = process.local_rank == 0 and process.rank > 0
        made += run_on_some(on_node if first_elsewhere else None)
    found = [folders for where, folders in filter(None, made) if where == host]
    return found[0]


def _prepare(path: str, rules: IndexRules, place: IndexPlace) -> Path:
    folder = index_folder(path, rules, place.folder)
    if open_index(folder, path) is not None:
        say(f"{path}: already tokenized, in {folder}")
        return folder
    kept = place.kept and _can_write(folder.parent, place)
    if not kept:
        folder = make_temporary("nemo_aligner_index_") / folder.name
    say(f"{path}: tokenizing to {folder}" + " (for this run only)" * (not kept))
    begun = time.monotonic()
    try:
        write_index(path, rules, folder, say)
    except OSError as error:
        raise DataError(
            f"{path}: its tokens cannot be written to {folder}: {write_problem(folder, error)}. "
            "model.data.index_dir sets another folder"
        ) from error
    say(f"{path}: tokenized in {show_duration(time.monotonic() - begun)}")
    return folder


def _can_write(folder: Path, place: IndexPlace) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".nemo_aligner_{os.getpid()}"
        # Tried, as os.access is wrong where a server has the last word, as on NFS.
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        if place.folder is not None:
            raise ConfigError(
                f"model.data.index_dir: got {place.folder}, wanted a folder to write to: {error}"
            ) from error
        say(f"{folder}: cannot keep an index beside the data ({error.strerror})")
        return False
    return True
