"""Where the index of a file lies, and whether it is still one of that file.

``<file>.index-<rules>/`` has a file for each array, and ``index.json``. The name says by which
rules the index was made, the content whether the file is the one that it was made of. It is written
under another name and renamed when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_aligner import __version__
from nemo_aligner.data.store.arrays import ArraysInFolder
from nemo_aligner.data.store.index import FileIndex, IndexFacts, IndexRules, make_index
from nemo_aligner.data.store.pool import usable_processes
from nemo_aligner.errors import DataError
from nemo_aligner.temporary import make_temporary, remove_temporary

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
)
# A file may be written to twice within one tick of its clock (coarse: two seconds on FAT).
_TICK_NS = 2_000_000_000
_READ_BYTES = 1 << 22
_BYTES_PER_PROCESS = 1 << 21
_TRIES = 3
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stamp:
    """By which a file is taken for unchanged without reading it."""

    size: int
    mtime_ns: int
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
    return {
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
    }


def index_folder(path: str, rules: IndexRules, index_dir: str | None) -> Path:
    """Where the index of a file lies: beside it, or in ``index_dir``."""
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
    """Whether a change from ``now_ns`` on would show."""
    return now_ns - stamp.mtime_ns > _TICK_NS


def content_digest(path: str) -> str:
    """sha256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def write_index(path: str, rules: IndexRules, folder: Path, say: Say) -> None:
    """Put the index of a file into ``folder``, beside which there must be space.

    Raises:
        ConfigError, DataError: as ``make_index``, or the file changed meanwhile.
        OSError: nothing can be written there.
    """
    part = make_temporary(f".{folder.name}.part-", folder.parent)
    try:
        os.chmod(part, folder.parent.stat().st_mode & 0o777)
        _fill(path, rules, part, say)
        _publish(part, folder, path)
    finally:
        remove_temporary(part)


def _fill(path: str, rules: IndexRules, part: Path, say: Say) -> None:
    begun, stamp, arrays = time.time_ns(), Stamp.of(path), ArraysInFolder(part)
    processes = min(usable_processes(), 1 + stamp.size // _BYTES_PER_PROCESS)
    with ThreadPoolExecutor(1) as beside:
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
        raise DataError(f"{path}: it was changed while it was read; start again when it is whole")
    _write_facts(part, held)


def _write_facts(folder: Path, held: dict[str, Any]) -> None:
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
