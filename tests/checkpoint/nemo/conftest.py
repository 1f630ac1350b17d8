"""Archives for tests of the format."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_aligner.checkpoint.nemo.write import write_nemo
from tests.checkpoint.nemo.archives import CONFIG, CONTRACT


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """Folders that stand for weights and tokenizer; the archive does not look into them."""
    weights, tokenizer = tmp_path / "w", tmp_path / "t"
    for folder, name in ((weights, "__0_0.distcp"), (tokenizer, "tokenizer.json")):
        folder.mkdir()
        (folder / name).write_bytes(name.encode() * 1000)
    return weights, tokenizer


@pytest.fixture
def archive(tmp_path: Path, parts: tuple[Path, Path]) -> Path:
    path = tmp_path / "model.nemo"
    write_nemo(path, CONFIG, *parts, CONTRACT)
    return path
