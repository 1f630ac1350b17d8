"""What several tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fuzzing import Door, Files, Mutation, check_all


@pytest.fixture
def fuzz(
    layout: Any,
    scratch: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Every seed's mutation of a checkpoint's files is met by the door that ``convert`` is."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)

    def fuzz(
        files: Files,
        mutations: Sequence[Mutation],
        seeds: range,
        convert: Callable[[Path, Path], Any],
        source: str = ".",
    ) -> None:
        door = Door(files, convert, layout, tmp_path_factory.mktemp("doors"), scratch, source)
        check_all(door, mutations, seeds)

    return fuzz


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    """Has the hub give a folder, whatever it is asked for; what that was is in the result."""
    import huggingface_hub

    def give(folder: Path) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def download(name: str, **options: Any) -> str:
            asked.update(name=name, **options)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.chdir(tmp_path)  # where no folder has the name
        return asked

    return give
