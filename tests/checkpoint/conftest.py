"""What several tests of checkpoints have in common."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.checkpoint import foreign
from tests.checkpoint.fuzzing import TINY, Damaged, Fuzzer
from tests.checkpoint.loading import Theirs
from tests.checkpoint.weights.tensors import request
from tests.harness import tiny

QUICK, AT_A_TIME = 100, 1000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Mutations' ``seeds``: as many as --mutations says, the first ones in a quick test."""
    if "seeds" in metafunc.fixturenames:
        count = metafunc.config.getoption("mutations")
        # No part is so small that all of it may load, or none.
        bounds = [0, *range(QUICK, count - QUICK, AT_A_TIME), count]
        parts = [range(*pair) for pair in pairwise(bounds)]
        metafunc.parametrize("seeds", parts, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")


@pytest.fixture
def fuzz(
    layout: Any, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Damaged, range], None]:
    """Every seed's mutation of a checkpoint is loaded as it may be, or refused."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return lambda damaged, seeds: Fuzzer(damaged, layout, tmp_path / "fuzz", scratch).check(seeds)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    """Has the hub give a folder, whatever it is asked for; what that was is in the result."""
    import huggingface_hub

    def give(folder: Path) -> dict[str, Any]:
        requests: dict[str, Any] = {}

        def download(name: str, **options: Any) -> str:
            requests.update(name=name, **options)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.chdir(tmp_path)  # where no folder has the name
        return requests

    return give


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model's archive with rope scaling and an output layer of its own."""
    path = tmp_path_factory.mktemp("base") / "base.nemo"
    return tiny.write_base_nemo(path, tie_word_embeddings=False, rope_parameters=foreign.ROPE)


@pytest.fixture(scope="module")
def tensors(base: Path, layout: Any) -> foreign.Tensors:
    return foreign.tensors_of(base)


@pytest.fixture
def theirs(tensors: foreign.Tensors, tokenizer_folder: Path, tmp_path: Path) -> Theirs:
    """Writes a checkpoint of another program: ``theirs(nemo1, "folder", head, **settings)``.

    Of the base model's tensors with ``others`` beside or instead of them; None is without one.
    """

    def write(
        writer: foreign.Writer = foreign.nemo1,
        name: str = "theirs",
        replacements: Mapping[str, Tensor | None] | None = None,
        **settings: Any,
    ) -> Path:
        written = {**tensors, **(replacements or {})}
        stored = {key: tensor for key, tensor in written.items() if tensor is not None}
        return writer(tmp_path / name, stored, tokenizer_folder, **settings)

    return write


@pytest.fixture(scope="session")
def tiny_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "base.nemo"
    return tiny.write_base_nemo(path, **TINY)


@pytest.fixture
def unpacked(tiny_archive: Path, tmp_path: Path) -> Path:
    """The archive unpacked, as untrusted ones are: without checksums."""
    folder = tmp_path / "folder"
    shutil.unpack_archive(tiny_archive, folder, "tar")
    (folder / "checksums.json").unlink()
    return folder


@pytest.fixture
def saved(layout: Any, tmp_path: Path) -> Path:
    """The weights of ``weights/tensors.py``, as this package saves them."""
    from nemo_aligner.checkpoint.weights.save import save_weights

    save_weights(request(), tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def index_reads() -> Iterator[list[str]]:
    """The indexes of distributed checkpoints that are opened to be read, whoever does it."""
    paths: list[str] = []
    is_watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and event == "open" and arguments[1] in ("r", "rb"):
            path = str(arguments[0])
            if path.endswith(".metadata"):
                paths.append(path)

    sys.addaudithook(watch)
    yield paths
    is_watching = False  # such a hook cannot be taken away
