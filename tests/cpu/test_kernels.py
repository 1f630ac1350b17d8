"""The C kernels' compiled library in the cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_aligner.cpu import kernels
from nemo_aligner.utils.cache import VARIABLE, cache_folder
from nemo_aligner.utils.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
SOURCE = Path(kernels.__file__).with_name(kernels.KERNELS)


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count how often loading the library compiles it, with an empty cache at first."""
    count = 0
    compile_source = kernels._compile

    def compile_counted(*arguments: object) -> Path:
        nonlocal count
        count += 1
        return compile_source(*arguments)  # type: ignore[arg-type]

    def load() -> int:
        nonlocal count
        count = 0
        assert kernels._load(SOURCE).attend
        return count

    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_compile", compile_counted)
    return load


def test_kernels_are_compiled_once(compilations: Callable[[], int], tmp_path: Path) -> None:
    assert [compilations(), compilations()] == [1, 0]
    (library,) = (tmp_path / "cache" / "kernels").iterdir()
    assert library.name.startswith("kernels-")


def test_damaged_library_is_compiled_again(
    compilations: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilations()
    (library,) = (tmp_path / "cache" / "kernels").iterdir()
    # In another folder, because this process has loaded the library of this path.
    damaged = tmp_path / "other" / "kernels" / library.name
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(library.read_bytes()[:40])
    damaged.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
    assert [compilations(), compilations()] == [1, 0]


def test_library_that_others_could_have_written_is_not_loaded(
    compilations: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compilations() == 1
    folder = tmp_path / "cache" / "kernels"
    (library,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, library.stat().st_mode & 0o777) == (0o700, 0o600)
    library.chmod(0o620)
    assert [compilations(), compilations()] == [1, 0]
    folder.chmod(0o777)
    assert [compilations(), compilations()] == [1, 1]
    folder.chmod(0o700)
    assert compilations() == 0
    monkeypatch.setattr(os, "getuid", lambda: library.stat().st_uid + 1)
    assert compilations() == 1


def test_without_a_cache_every_process_compiles_the_kernels(
    compilations: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert [compilations(), compilations()] == [1, 1]
    monkeypatch.setenv(VARIABLE, "~no-such-user/cache")
    assert compilations() == 1
    with pytest.raises(ConfigError, match=f"{VARIABLE}: got ~no-such-user/cache, and this user"):
        cache_folder()


def test_another_compiler_or_processor_has_a_library_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    wrapper = tmp_path / "cc"
    wrapper.write_text("")
    keys = {kernels._build_key(compiler, SOURCE), kernels._build_key(str(wrapper), SOURCE)}
    wrapper.write_text("updated")
    keys.add(kernels._build_key(str(wrapper), SOURCE))
    keys.add(kernels._build_key(compiler, SOURCE.with_name(kernels.GATED_DELTA)))
    monkeypatch.setattr(kernels, "_PROCESSOR_FACTS", ("flags",))
    keys.add(kernels._build_key(compiler, SOURCE))
    assert len(keys) == 5
    assert kernels._build_key(compiler, SOURCE) in keys
