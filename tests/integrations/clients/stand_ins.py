"""Replace modules that another project's file imports, during a test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class StandIns:
    """Adds stand-in modules, and restores the original ones after the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def add(self, name: str, **members: Any) -> None:
        """Add an empty module under this name, and its packages if they do not exist."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            package = ".".join(parts[:count])
            if package not in sys.modules:
                self._put(package, __path__=[])
        self._put(name, **members)

    def load(self, name: str, path: Path) -> Any:
        """Load a file as the module ``name``, without the packages around it."""
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        self._monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def _put(self, name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        self._monkeypatch.setitem(sys.modules, name, module)
