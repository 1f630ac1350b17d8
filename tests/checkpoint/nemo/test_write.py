"""An archive appears whole or not at all, and has files where there were links."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.checkpoint.nemo.write import write_nemo
from tests import tiny
from tests.checkpoint.loading import files_of
from tests.checkpoint.nemo.archives import CONFIG, CONTRACT, check


def test_linked_source_files_are_stored_as_files(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    """A hub cache is made of links; an archive must not be."""
    source = parts[1] / "tokenizer.json"
    source.rename(tmp_path / "blob")
    source.symlink_to(tmp_path / "blob")
    write_nemo(tmp_path / "linked.nemo", CONFIG, *parts, CONTRACT)
    check(tmp_path / "linked.nemo")


def test_a_killed_write_leaves_nothing_under_the_name(
    tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    path = tmp_path / "out" / "model.nemo"
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from nemo_aligner.checkpoint.nemo.write import write_nemo\n"
        "os.fsync = lambda stream: os.kill(os.getpid(), 9)\n"
        "write_nemo(sys.argv[1], {}, Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    done = subprocess.run([sys.executable, "-c", script, path, *parts], cwd=tiny.ROOT)
    assert done.returncode == -9
    assert [file.name for file in path.parent.iterdir()] == [".model.nemo.partial"]
    write_nemo(path, CONFIG, *parts, CONTRACT)
    check(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("existing", [False, True])
def test_a_write_that_fails_leaves_what_was_there(
    existing: bool, tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "model.nemo"
    if existing:
        write_nemo(path, CONFIG, *parts, CONTRACT)

    def fail(stream: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_nemo(path, {"vocab_size": 3}, *parts)
    assert list(path.parent.iterdir()) == ([path] if existing else [])
    if existing:
        check(path)


def test_the_checksums_are_those_of_sha256sum(tiny_archive: Path, tmp_path: Path) -> None:
    import hashlib

    root = tmp_path / "ours"
    shutil.unpack_archive(tiny_archive, root, "tar")
    sums = json.loads((root / "checksums.json").read_text())
    assert sums == {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files_of(root)
        if path.name != "checksums.json"
    }
