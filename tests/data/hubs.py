"""A Hugging Face ``datasets`` whose every data set has the rows of one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.data.files import rows_of


@dataclass
class FakeHub:
    """The hub: ``requests`` are the names, subsets (if any) and splits that were loaded."""

    path: Path
    problem: Exception | None = None
    requests: list[tuple[str, ...]] = field(default_factory=list)

    def put_into(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        module = ModuleType("datasets")
        monkeypatch.setattr(module, "disable_progress_bars", lambda: None, raising=False)
        monkeypatch.setattr(module, "load_dataset", self._load, raising=False)
        monkeypatch.setitem(sys.modules, "datasets", module)
        return self

    def _load(self, name: str, subset: str | None, *, split: str, **_: Any) -> Iterator[Any]:
        self.requests.append((name, *([] if subset is None else [subset]), split))
        if self.problem is not None:
            raise self.problem
        return iter(rows_of(self.path))
