"""The file that says that a server answers, and where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ready_file(path: str | None, url: str) -> Iterator[None]:
    """While the server answers, ``path`` holds its URL."""
    if path is None:
        yield
        return
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(url + "\n")
    partial.replace(target)
    try:
        yield
    finally:
        target.unlink(missing_ok=True)
