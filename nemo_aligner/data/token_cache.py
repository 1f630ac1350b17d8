"""The token cache: a data file's records as token ids on disk, made once and checked before use."""

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

import numpy as np
import torch

from nemo_aligner import __version__
from nemo_aligner.batch.packed import LabelColumns
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.readers import FileRules, Reading, open_file
from nemo_aligner.data.record_arrays import (
    Arrays,
    ArraysInFolder,
    ArraysInMemory,
    Origins,
)
from nemo_aligner.data.report import (
    MOST_KEPT,
    FileSummary,
    LabelSummary,
    LengthSummary,
    PrefixSummary,
    Prompts,
    far_labels,
    first_of_each,
)
from nemo_aligner.data.tokenize import (
    TokenizedBlock,
    TokenRules,
    tokenize_blocks,
    usable_processes,
)
from nemo_aligner.distributed.collectives import run_on_some
from nemo_aligner.utils.console import say, show_duration
from nemo_aligner.utils.errors import ConfigError, DataError
from nemo_aligner.utils.processes import find_process, make_temporary, remove_temporary

# The index of a data file: its records as token ids, and all that a run needs of them.

_INT = np.dtype(np.int64)
_COUNT = np.dtype(np.int32)  # of what every rank has in memory for each pair
_KEY = np.dtype(np.uint64)
_LABEL = np.dtype(np.float32)
# Called with the number of records tokenized so far.
Told = Callable[[int], None]


@dataclass(frozen=True)
class IndexRules:
    """Rules that, with the file, decide what an index holds."""

    reading: Reading
    contract: ScoringContract
    tokenizer: Tokenizer


@dataclass(frozen=True)
class IndexFacts:
    """Facts about a file that an index holds beside its arrays.

    Attributes:
        summary: summary of the file.
        columns: names of the label columns.
        parsed: records that were read and not dropped before they were tokenized.
        token_type: type of the ids.
        digest: sha256 (hex) of token ids, labels and ranks (see ``digest_of``).
        has_steps: whether sequences have a reward for each of their turns or steps.
    """

    summary: FileSummary
    columns: tuple[str, ...]
    parsed: int
    token_type: str
    digest: str
    has_steps: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "summary": self.summary.to_dict(), "columns": list(self.columns)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: str) -> IndexFacts:
        """The inverse of ``to_dict``, of the file at ``path``."""
        summary = FileSummary.from_dict(values["summary"], path)
        return cls(**{**values, "summary": summary, "columns": tuple(values["columns"])})


class FileIndex:
    """N records with S sequences of T tokens.

    Attributes:
        tokens: ``[T]`` uint16 or int32, sequence after sequence.
        offsets: ``[S + 1]`` int64, from 0 to T.
        bounds: ``[N + 1]`` int64 sequences of the records, from 0 to S.
        ranks, reply_lengths: ``[S]`` int32, as in ``TokenizedDataset``.
        prefixes: ``[N]`` int32, as there.
        lines: ``[N]`` int64.
        sources: ``[N]`` int32, which of the names in ``facts.summary.sources``.
        labels: ``[N, C]`` float32.
        reads, read_bounds: where there are steps, ``[S]`` int32 places of rewards and ``[Q + 1]``
            int64 rewards of Q sequences; ``labels`` of ratings are then ``[S, C]``.
        record_keys: uint64 in ascending order, of records that differ.
        prompts: prompts of all records.
    """

    def __init__(self, facts: IndexFacts, arrays: Arrays) -> None:
        self.facts = facts
        self.tokens = arrays.read("tokens", np.dtype(facts.token_type))
        self.offsets = arrays.read("offsets", _INT)
        self.bounds = arrays.read("bounds", _INT)
        self.ranks = arrays.read("ranks", _COUNT)
        self.reply_lengths = arrays.read("reply_lengths", _COUNT)
        self.prefixes = arrays.read("prefixes", _COUNT)
        self.lines = arrays.read("lines", _INT)
        self.sources = arrays.read("sources", np.dtype(np.int32))
        self.labels = _labels(arrays, len(self.lines), facts.columns)
        self.reads = arrays.read("reads", _COUNT) if facts.has_steps else None
        self.read_bounds = arrays.read("read_bounds", _INT) if facts.has_steps else None
        self.record_keys = arrays.read("record_keys", _KEY)
        prompts = arrays.read("prompt_keys", _KEY), arrays.read("prompt_lines", _INT)
        self.prompts = Prompts(facts.summary.path, *prompts)

    def __len__(self) -> int:
        return len(self.lines)


def _labels(arrays: Arrays, records: int, columns: Sequence[str]) -> np.ndarray:
    if not columns:
        return np.zeros((records, 0), _LABEL)
    return arrays.read("labels", _LABEL, len(columns))


def make_index(
    path: str,
    rules: IndexRules,
    arrays: Arrays,
    processes: int = 1,
    told: Told | None = None,
) -> FileIndex:
    """Tokenize a file into ``arrays``, which are empty.

    Raises:
        ConfigError: there is no format of the name.
        DataError: the file as a whole cannot be read, or see ``tokenize_blocks``.
        OSError: the arrays cannot be written.
    """
    of_file, blocks = open_file(path, rules.reading)
    to_tokens = TokenRules(of_file, rules.contract, rules.tokenizer)
    writer = _Writer(arrays, rules.contract.has_steps)
    for block in tokenize_blocks(blocks, to_tokens, processes):
        writer.add(block)
        if told is not None:
            told(writer.records)
    return FileIndex(writer.finish(of_file, to_tokens.token_type.name), arrays)


class _Writer:
    """Block after block to arrays; what is left in memory does not grow with them."""

    def __init__(self, arrays: Arrays, has_steps: bool) -> None:
        self.records = 0
        self._arrays = arrays
        self._all = TokenizedBlock()
        self._names: dict[str, int] = {}
        self._sources: list[int] = []
        self._ends = {"offsets": 0, "bounds": 0}
        self._digest = hashlib.sha256()
        if has_steps:
            self._ends["read_bounds"] = 0
        for name in self._ends:
            arrays.append(name, np.zeros(1, _INT))

    def add(self, block: TokenizedBlock) -> None:
        """Append a block."""
        every, parts = self._all, dict(block.arrays)
        every.counts.update(block.counts)
        every.parsed += block.parsed
        every.malformed += block.malformed[: MOST_KEPT - len(every.malformed)]
        every.pairs += block.pairs
        every.longer += block.longer
        self._add_to_digest(parts["tokens"], parts["lengths"])
        self._add_ends("offsets", parts.pop("lengths"))
        self._add_ends("bounds", parts.pop("sizes"))
        if "read_bounds" in self._ends:
            self._add_ends("read_bounds", parts.pop("read_counts"))
        parts["sources"] = self._codes(block.sources)
        for name, part in parts.items():
            self._arrays.append(name, part)
        self.records += len(block.sources)

    def _add_ends(self, name: str, lengths: np.ndarray) -> None:
        ends = self._ends[name] + lengths.cumsum()
        self._arrays.append(name, ends)
        self._ends[name] += int(lengths.sum())

    def _codes(self, sources: Sequence[str]) -> np.ndarray:
        names, counts = self._names, self._sources
        codes = [names.setdefault(source, len(names)) for source in sources]
        counts += [0] * (len(names) - len(counts))
        for code in codes:
            counts[code] += 1
        return np.array(codes, dtype=np.int32)

    def _add_to_digest(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        start = 0
        for length in lengths.tolist():
            add_sequence(self._digest, tokens[start : start + length])
            start += length

    def finish(self, rules: FileRules, token_type: str) -> IndexFacts:
        """Summary of all blocks, after the last one."""
        arrays, every = self._arrays, self._all
        lines = arrays.read("lines", _INT)
        different = np.unique(arrays.read("record_keys", _KEY))
        keys, first_lines = first_of_each(arrays.read("prompt_keys", _KEY), lines)
        arrays.replace("record_keys", different)
        arrays.replace("prompt_keys", keys)
        arrays.append("prompt_lines", first_lines)
        counts = {
            **every.counts,
            "duplicates": self.records - len(different),
            "kept": self.records,
        }
        has_steps = "read_bounds" in self._ends
        labels = _labels(arrays, self.records, rules.columns)
        ranks, bounds = arrays.read("ranks", _COUNT), arrays.read("bounds", _INT)
        prefixes = arrays.read("prefixes", _COUNT)
        saved = prefixes * (np.diff(bounds) - 1)
        reads = arrays.read("reads", _COUNT) if has_steps else None
        if has_steps:
            bounds = arrays.read("read_bounds", _INT)[bounds]
        # A row of labels for each record or, of rated steps, for each reward.
        rows = np.diff(bounds) if len(labels) == bounds[-1] else 1
        columns = LabelColumns.of(rules.columns, torch.from_numpy(labels))
        summary = FileSummary(
            path=rules.path,
            kind=rules.kind,
            format=rules.format,
            counts={reason: count for reason, count in counts.items() if count or reason == "kept"},
            lengths=LengthSummary.of(np.diff(arrays.read("offsets", _INT))),
            reply_lengths=LengthSummary.of(arrays.read("reply_lengths", _COUNT)),
            sources=dict(zip(self._names, self._sources, strict=True)),
            labels=LabelSummary.of(columns),
            longer_chosen=every.longer / every.pairs if every.pairs else None,
            prefixes=PrefixSummary(int(saved.sum()), int((prefixes == 0).sum())),
            malformed=every.malformed,
            far_labels=far_labels(columns, Origins([(rules.path, np.repeat(lines, rows))])),
        )
        end_digest(self._digest, labels, ranks, bounds, reads)
        digest = self._digest.hexdigest()
        return IndexFacts(summary, rules.columns, every.parsed, token_type, digest, has_steps)


def add_sequence(digest: Any, tokens: np.ndarray) -> None:
    """Add the ids of one sequence to a digest, whatever their type."""
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.astype(np.int32).tobytes())


def end_digest(
    digest: Any,
    labels: np.ndarray,
    ranks: np.ndarray,
    bounds: np.ndarray,
    reads: np.ndarray | None = None,
) -> None:
    """Add labels to a digest, ranks where the order of completions does not say them, and reads."""
    digest.update(np.ascontiguousarray(labels).tobytes())
    places = np.arange(len(ranks)) - np.repeat(bounds[:-1], np.diff(bounds))
    if not np.array_equal(ranks, places):
        digest.update(ranks.astype(_INT).tobytes())
    if reads is not None:
        add_sequence(digest, reads)


# The folder of a file's index, and whether the index still fits the file.
#
# ``<file>.index-<rules>/`` has a file for each array, and ``index.json``. Its name identifies the
# rules, its content the file that it was made from. It is written under another name, and renamed
# once it is complete on the disk.

VERSION = 4
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
class Stamp:
    """Size and times by which a file counts as unchanged without reading it."""

    size: int
    mtime_ns: int
    # mtime can be set back, as cp -p and rsync -t do; ctime cannot.
    ctime_ns: int

    @classmethod
    def of(cls, path: str) -> Stamp:
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
        **({} if how.neutral == Reading.neutral else {"neutral": how.neutral}),
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
    now, then = Stamp.of(path), Stamp(**held["stamp"])
    if now == then and held["settled"]:
        return True
    if now.size != then.size or content_digest(path) != held["content"]:
        return False
    held = {**held, "stamp": asdict(now), "settled": _is_settled(now, time.time_ns())}
    with suppress(OSError):  # it is right without, and read once more at the next start
        _write_facts(folder, held)
    return True


def _is_settled(stamp: Stamp, now_ns: int) -> bool:
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
    begun, stamp, arrays = time.time_ns(), Stamp.of(path), ArraysInFolder(part)
    processes = min(usable_processes(), 1 + stamp.size // _BYTES_PER_PROCESS)
    with ThreadPoolExecutor(1) as beside:
        # hashlib lets go of the GIL: the file is hashed while it is tokenized.
        content = beside.submit(content_digest, path)
        index = make_index(path, rules, arrays, processes, _Told(path, say))
        arrays.close()
        held = {
            "rules": describe_rules(rules),
            "stamp": asdict(stamp),
            "settled": _is_settled(stamp, begun),
            "content": content.result(),
            "sizes": arrays.sizes(),
            "facts": index.facts.to_dict(),
        }
    if Stamp.of(path) != stamp:
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


class _Told:
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
    return place.folder is not None or Stamp.of(path).size >= SMALL_BYTES


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
            f"{path}: its tokens cannot be written to {folder}: {error}; wanted a folder with "
            "space as model.data.index_dir"
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
