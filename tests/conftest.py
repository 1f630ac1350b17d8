"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nemo_aligner.parallel  # noqa: F401 - before any test imports megatron-core
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny
from tests.contracts import Contracts
from tests.environments import make_environment


@pytest.fixture(scope="module")
def layout() -> Iterator[Any]:
    """This process as the only rank, for all tests of a file."""
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import destroy_layout, initialize_layout

    with launch():
        yield initialize_layout()
        destroy_layout()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(scope="session")
def trl_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python with TRL and the module of rewardbench's pipeline."""
    folder = tmp_path_factory.mktemp("trl") / "environment"
    return make_environment(folder, "trl==1.16.0", alone=("rewardbench==0.1.4",))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def contracts(tokenizer: Tokenizer) -> Contracts:
    return Contracts(tokenizer)
