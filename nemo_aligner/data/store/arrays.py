"""Named arrays that grow at their end: files of a folder, or bytes in memory.

megatron-core's IndexedDataset is not used: it knows sequences and documents, and whatever else a
record has (ranks, labels, the length of its replies, its line) would lie beside it in such files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np


class Arrays(Protocol):
    """Where arrays are put, part after part, and read from once that is done."""

    def append(self, name: str, part: np.ndarray) -> None: ...

    def replace(self, name: str, array: np.ndarray) -> None: ...

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray: ...

    def sizes(self) -> dict[str, int]: ...


class ArraysInMemory:
    """They end with the process."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytearray] = {}

    def append(self, name: str, part: np.ndarray) -> None:
        """Put ``part`` behind what is there."""
        self._bytes.setdefault(name, bytearray()).extend(part.tobytes())

    def replace(self, name: str, array: np.ndarray) -> None:
        """Put ``array`` where another was."""
        self._bytes[name] = bytearray(array.tobytes())

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray:
        """All of it, ``[n]`` or ``[n, width]``."""
        return _shaped(np.frombuffer(bytearray(self._bytes.get(name, b"")), dtype), width)

    def sizes(self) -> dict[str, int]:
        """Bytes of each."""
        return {name: len(content) for name, content in self._bytes.items()}


class ArraysInFolder:
    """Each is a file of ``folder``, without a header; what is read is mapped, and costs no memory.

    Raises:
        OSError: a file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def append(self, name: str, part: np.ndarray) -> None:
        """Put ``part`` behind what is there."""
        if name not in self._open:
            self._open[name] = self._path(name).open("ab")
        self._open[name].write(part.tobytes())

    def replace(self, name: str, array: np.ndarray) -> None:
        """Put ``array`` where another was."""
        file = self._open.pop(name, None)
        if file is not None:
            file.close()
        # Not written over: what is mapped of the old file stays.
        self._path(name).unlink(missing_ok=True)
        self.append(name, array)

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray:
        """All of it, ``[n]`` or ``[n, width]``; what is written to it stays in this process."""
        if name in self._open:
            self._open[name].flush()
        path = self._path(name)
        if not path.exists() or path.stat().st_size == 0:
            return _shaped(np.zeros(0, dtype), width)
        return _shaped(np.memmap(path, dtype, mode="c"), width)

    def sizes(self) -> dict[str, int]:
        """Bytes of each."""
        return {path.stem: path.stat().st_size for path in self._folder.glob("*.bin")}

    def close(self) -> None:
        """Have all of it on the disk."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._open.clear()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"


def _shaped(array: np.ndarray, width: int | None) -> np.ndarray:
    # Not a memmap: each slice of one costs much more than one of a plain array.
    plain = array.view(np.ndarray)
    if width is None:
        return plain
    return plain.reshape(-1, width) if width else np.zeros((0, 0), array.dtype)
