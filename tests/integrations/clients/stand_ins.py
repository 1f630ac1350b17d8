"""Modules that stand in for what another project's file imports, while a test runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class StandIns:
    """Modules are as they were once the test is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def add(self, name: str, **members: Any) -> None:
        """A module that is imported instead of the one with this name, in packages without one."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            package = ".".join(parts[:count])
            if package not in sys.modules:
                self._put(package, __path__=[])
        self._put(name, **members)

    def load(self, name: str, path: Path) -> Any:
        """The file as the module ``name``, past the packages around it."""
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
