"""The token cache: token indexes of data files on disk, written once and checked before each use.

The cache of ``<file>`` is the folder ``<file>.index-<rules>/`` next to it, or in
``model.data.index_dir``. The folder has a file for each array of a ``FileIndex``, and
``index.json``. The folder's name identifies the rules that the file was tokenized by, and
``index.json`` identifies the content of the file: if either changes, the file is tokenized again. A
cache is written under a temporary name and renamed once it is complete on the disk. On a cluster
the first rank of each node writes the caches that are missing (``open_indexes``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_aligner import __version__
from nemo_aligner.data.formats import custom_format_source
from nemo_aligner.data.readers import ReaderConfig
from nemo_aligner.data.token_index import (
    Arrays,
    ArraysInFolder,
    ArraysInMemory,
    FileIndex,
    IndexFacts,
    IndexRules,
    ShowProgress,
    make_index,
)
from nemo_aligner.distributed.collectives import once_per_node
from nemo_aligner.utils.cache import INDEX_MARK
from nemo_aligner.utils.console import say, show_duration
from nemo_aligner.utils.errors import ConfigError, DataError
from nemo_aligner.utils.missing import describe_unreadable
from nemo_aligner.utils.processes import make_temporary, remove_temporary, usable_cores
from nemo_aligner.utils.writing import replacing, write_problem

# The cache of one file: the name of its folder, the check that it is up to date, and its writing.

VERSION = 12
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
    "principle_template",
    "trailing_pad_id",
)
_DECIDE_STEPS = ("scored_position", "step_separator")
# A file that is written twice within one tick of its file system's clock keeps the same times. The
# longest tick is that of FAT, 2 s.
_TICK_NS = 2_000_000_000
_READ_BYTES = 1 << 22
_BYTES_PER_PROCESS = 1 << 21
_TRIES = 3
Say = Callable[[str], None]


@dataclass(frozen=True)
class FileStat:
    """Size and times of a file, which reveal a change of its content without reading it."""

    size: int
    mtime_ns: int
    # Compare ctime in addition to mtime: cp -p and rsync -t set mtime to an old value, but ctime
    # cannot be set.
    ctime_ns: int

    @classmethod
    def of(cls, path: str) -> FileStat:
        """Read size and times of the file at ``path``; raise DataError if that fails."""
        try:
            stat = os.stat(path)
        except OSError as error:
            raise DataError(describe_unreadable(path, error)) from error
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def describe_rules(rules: IndexRules) -> dict[str, Any]:
    """List, as JSON values, everything but the file's content that determines an index.

    A change of any value makes the cache invalid, because it changes the name of its folder.
    """
    import tokenizers

    reading, contract = rules.reading, rules.contract
    steps = {name: getattr(contract, name) for name in _DECIDE_STEPS}
    return {
        **(steps if contract.has_steps else {}),
        "version": VERSION,
        "nemo_aligner": __version__,
        "tokenizers": tokenizers.__version__,
        "contract": {name: getattr(contract, name) for name in _DECIDE_IDS},
        "kind": None if reading.kind is None else reading.kind.value,
        "format": reading.format,
        **custom_format_source(reading.format),
        "attributes": list(reading.attributes),
        "loss_mask_val": reading.loss_mask_val,
        "pair_columns": list(reading.pair_columns),
        "pair_keys": None if reading.pair_keys is None else asdict(reading.pair_keys),
        "prompts": None if reading.prompts is None else asdict(reading.prompts),
        "ties": reading.ties,
        **({} if reading.neutral == ReaderConfig.neutral else {"neutral": reading.neutral}),
        "contradicting": reading.contradicting.value,
    }


def index_folder(path: str, rules: IndexRules, index_dir: str | None) -> Path:
    """Return the path of a file's cache folder, in ``index_dir`` or, if None, next to the file."""
    described = describe_rules(rules)
    if index_dir is not None:
        # Caches of all files are in ``index_dir``, where two files of the same name need different
        # folders.
        described["path"] = str(Path(path).resolve())
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    parent = Path(path).parent if index_dir is None else Path(index_dir)
    return parent / f"{Path(path).name}{INDEX_MARK}{digest[:12]}"


def open_index(folder: Path, path: str) -> FileIndex | None:
    """Open the index in ``folder``, which was made from the file at ``path``.

    Returns:
        The index; None if it is missing or damaged, or if the file has changed since.
    """
    try:
        header = json.loads((folder / _FACTS).read_text())
        arrays = ArraysInFolder(folder)
        # Compare sizes first, because they show a truncated copy without reading it.
        if arrays.sizes() != header["sizes"] or not _is_up_to_date(header, folder, path):
            return None
        facts = IndexFacts.from_dict(header["facts"], path)
        return FileIndex(facts, arrays, header["content"])
    except (OSError, ValueError, KeyError, TypeError):
        # Another version wrote the index, or it is damaged. The caller writes it again.
        return None


def _is_up_to_date(header: dict[str, Any], folder: Path, path: str) -> bool:
    """True if the file at ``path`` has the content that the index in ``folder`` was made from.

    ``header`` is the content of ``index.json``. If only the file's times have changed, it is
    written again with the new times.
    """
    stat, indexed = FileStat.of(path), FileStat(**header["stamp"])
    if stat == indexed and header["settled"]:
        return True
    if stat.size != indexed.size or content_digest(path) != header["content"]:
        return False
    header = {**header, "stamp": asdict(stat), "settled": _is_settled(stat, time.time_ns())}
    # If the header cannot be written, the next start compares the content again.
    with suppress(OSError):
        _write_facts(folder, header)
    return True


def _is_settled(stat: FileStat, now_ns: int) -> bool:
    """True if the file was last changed more than one clock tick (``_TICK_NS``) before ``now_ns``.

    A later change then shows in the file's times. A second change within the same tick would not
    show, so the content of a file that is not settled has to be compared.
    """
    return now_ns - stat.mtime_ns > _TICK_NS


def content_digest(path: str) -> str:
    """Compute the sha256 (hex) of a file's bytes; raise DataError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
    except OSError as error:
        raise DataError(describe_unreadable(path, error)) from error
    return digest.hexdigest()


def write_index(path: str, rules: IndexRules, folder: Path, say: Say) -> None:
    """Tokenize a file and write its index to ``folder``.

    Raises:
        ConfigError: ``rules`` name a data format that does not exist.
        DataError: the file cannot be read or tokenized, or changed while it was tokenized.
        OSError: the folder cannot be written.
    """
    part = make_temporary(f".{folder.name}.part-", folder.parent)
    try:
        # mkdtemp creates a folder that only its owner can read. Give the index the permissions of
        # its parent folder, so that other users of the data can read it.
        os.chmod(part, folder.parent.stat().st_mode & 0o777)
        _write_arrays(path, rules, part, say)
        _publish(part, folder, path)
    finally:
        remove_temporary(part)


def _write_arrays(path: str, rules: IndexRules, part: Path, say: Say) -> None:
    start_ns, stat, arrays = time.time_ns(), FileStat.of(path), ArraysInFolder(part)
    processes = min(usable_cores(), 1 + stat.size // _BYTES_PER_PROCESS)
    index = _make_hashed_index(path, rules, stat, arrays, processes, _ProgressLines(path, say))
    arrays.close()
    header = {
        "rules": describe_rules(rules),
        "stamp": asdict(stat),
        "settled": _is_settled(stat, start_ns),
        "content": index.content_digest,
        "sizes": arrays.sizes(),
        "facts": index.facts.to_dict(),
    }
    _write_facts(part, header)


def _make_hashed_index(
    path: str,
    rules: IndexRules,
    stat: FileStat,
    arrays: Arrays,
    processes: int = 1,
    show: ShowProgress | None = None,
) -> FileIndex:
    """Call ``make_index`` and hash the file; ``stat`` is the file's state before.

    Raises:
        DataError: the file cannot be read or tokenized, or changed while it was tokenized.
    """
    with ThreadPoolExecutor(1) as hasher:
        # hashlib releases the GIL, so that the file is hashed while it is tokenized.
        content = hasher.submit(content_digest, path)
        index = make_index(path, rules, arrays, processes, show)
        index.content_digest = content.result()
    check_unchanged(path, stat, "tokenized")
    return index


def check_unchanged(path: str, previous: FileStat, action: str) -> None:
    """Raise DataError if a file has changed since ``previous``, while it was ``action``."""
    if FileStat.of(path) != previous:
        raise DataError(
            f"{path}: the file changed while it was {action}. Start again when it is complete"
        )


def _write_facts(folder: Path, header: dict[str, Any]) -> None:
    # Sync the file, so that after a crash there is a complete file or none.
    with replacing(folder / _FACTS, sync=True) as new:
        new.write_text(json.dumps(header, indent=1))


def _publish(part: Path, folder: Path, path: str) -> None:
    """Rename the finished index ``part`` to ``folder``, unless another process did so before."""
    for _ in range(_TRIES):
        with suppress(OSError):
            # The rename fails if ``folder`` exists and is not empty.
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
    """Logs every 20 s how many records of a file are tokenized so far; called for each block."""

    _SECONDS = 20.0

    def __init__(self, path: str, say: Say) -> None:
        self._path, self._say = path, say
        self._start = self._last = time.monotonic()

    def __call__(self, records: int) -> None:
        time_s = time.monotonic()
        if time_s - self._last > self._SECONDS:
            self._last = time_s
            rate = records / (time_s - self._start)
            self._say(f"{self._path}: {records} records tokenized, {rate:.0f} per second")


# The indexes of a run's files on every rank. The first rank of each node writes missing indexes.

# A file with fewer bytes gets no cache, unless ``model.data.index_dir`` is set: every rank
# tokenizes it in memory, which takes about a second.
SMALL_BYTES = 4 << 20
# The cache folder of each file that has one, by the path of the file.
Folders = dict[str, Path]


@dataclass(frozen=True)
class IndexPlace:
    """The settings of token caches: where they are written, and whether they are kept.

    Attributes:
        folder: folder of the caches of all files (``model.data.index_dir``). None puts them next to
            the files, and only for files of ``SMALL_BYTES`` or more.
        is_kept: keep caches for later runs (``model.data.keep_index``); False writes them to a
            temporary folder.
    """

    folder: str | None = None
    is_kept: bool = True


def open_indexes(
    paths: Sequence[str], rules: IndexRules, place: IndexPlace = IndexPlace()
) -> list[FileIndex]:
    """Open the index of every file, and tokenize the files that have none.

    Every rank must call this function, because the ranks that write caches tell the others where
    they are. Indexes on the disk are memory-mapped.

    Raises:
        ConfigError: the folder of ``place`` cannot be written.
        DataError: a file cannot be read or tokenized, or its index cannot be written.
    """
    different = list(dict.fromkeys(paths))
    large = [path for path in different if _is_indexed(path, place)]
    prepare = lambda: {path: _prepare(path, rules, place) for path in large}  # noqa: E731
    folders = once_per_node(prepare) if large else {}
    opened = {
        path: _open(path, folders[path])
        if path in folders
        else _make_hashed_index(path, rules, FileStat.of(path), ArraysInMemory())
        for path in different
    }
    return [opened[path] for path in paths]


def are_kept(paths: Sequence[str], place: IndexPlace) -> bool:
    """True if ``open_indexes`` keeps the index of at least one of these files on the disk."""
    return place.is_kept and any(_is_indexed(path, place) for path in paths)


def _is_indexed(path: str, place: IndexPlace) -> bool:
    return place.folder is not None or FileStat.of(path).size >= SMALL_BYTES


def _open(path: str, folder: Path) -> FileIndex:
    index = open_index(folder, path)
    if index is None:
        raise DataError(
            f"{path}: its token cache {folder} was removed or changed while the run started. "
            "Start again"
        )
    return index


def _prepare(path: str, rules: IndexRules, place: IndexPlace) -> Path:
    folder = index_folder(path, rules, place.folder)
    if open_index(folder, path) is not None:
        say(f"{path}: already tokenized, in {folder}")
        return folder
    is_kept = place.is_kept and _can_write(folder.parent, place)
    if not is_kept:
        folder = make_temporary("nemo_aligner_index_") / folder.name
    say(f"{path}: tokenizing to {folder}" + " (for this run only)" * (not is_kept))
    start = time.monotonic()
    try:
        write_index(path, rules, folder, say)
    except OSError as error:
        raise DataError(
            f"{path}: its tokens cannot be written to {folder}: {write_problem(folder, error)}. "
            "Set another folder with model.data.index_dir"
        ) from error
    say(f"{path}: tokenized in {show_duration(time.monotonic() - start)}")
    return folder


def _can_write(folder: Path, place: IndexPlace) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Try to make a folder, because os.access can be wrong on NFS, where the server decides. Its
        # name is random, because containers and hosts that share the disk have equal process ids.
        Path(tempfile.mkdtemp(prefix=".nemo_aligner_", dir=folder)).rmdir()
    except OSError as error:
        if place.folder is not None:
            raise ConfigError(
                f"model.data.index_dir: {place.folder} cannot be written: {error}. Set a folder "
                "that you can write to"
            ) from error
        say(f"{folder}: cannot keep a token cache next to the data ({error.strerror})")
        return False
    return True
