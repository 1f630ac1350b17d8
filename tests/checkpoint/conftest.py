"""Fixtures and options that several tests of checkpoints share."""

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
    """Parametrize tests of mutations by ``seeds``: as many as --mutations says.

    A quick run takes only the first seeds.
    """
    if "seeds" in metafunc.fixturenames:
        count = metafunc.config.getoption("mutations")
        # Parts are large enough that in each some mutations load, and some are refused.
        bounds = [0, *range(QUICK, count - QUICK + 1, AT_A_TIME), count]
        parts = [range(*pair) for pair in pairwise(bounds)]
        metafunc.parametrize("seeds", parts, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")


@pytest.fixture
def fuzz(
    layout: Any, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Damaged, range], None]:
    """Check that the mutation of every seed is loaded as allowed, or refused."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return lambda damaged, seeds: Fuzzer(damaged, layout, tmp_path / "fuzz", scratch).check(seeds)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    """Make the hub return a folder for every request; the result records the requests."""
    import huggingface_hub

    def give(folder: Path) -> dict[str, Any]:
        requests: dict[str, Any] = {}

        def download(name: str, **options: Any) -> str:
            requests.update(name=name, **options)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        # a folder of this name in the working directory would be used instead
        monkeypatch.chdir(tmp_path)
        return requests

    return give


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archive of a base model with RoPE scaling and an untied output layer."""
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
    """Folder with the unpacked archive, without checksums like archives of other programs."""
    folder = tmp_path / "folder"
    shutil.unpack_archive(tiny_archive, folder, "tar")
    (folder / "checksums.json").unlink()
    return folder


@pytest.fixture
def saved(layout: Any, tmp_path: Path) -> Path:
    """Folder with the tensors of ``weights/tensors.py``, saved by this package."""
    from nemo_aligner.checkpoint.weights.save import save_weights

    save_weights(request(), tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def index_reads() -> Iterator[list[str]]:
    """Record the paths of all indexes of distributed checkpoints that are opened for reading."""
    paths: list[str] = []
    is_watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watching and event == "open" and arguments[1] in ("r", "rb"):
            path = str(arguments[0])
            if path.endswith(".metadata"):
                paths.append(path)

    sys.addaudithook(watch)
    yield paths
    is_watching = False  # an audit hook cannot be removed
