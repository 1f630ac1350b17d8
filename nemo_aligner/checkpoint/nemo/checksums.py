"""The sha256 of an archive's files, which ``checksums.json`` in the archive lists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.utils.errors import CheckpointError

CHECKSUMS_NAME = "checksums.json"
_BLOCK = 2**20


def verify_folder(root: Path, is_needed: Callable[[PurePosixPath], bool]) -> None:
    """Compare an unpacked archive's files with its checksums, if it has any.

    Files that ``is_needed`` does not accept are skipped.
    """
    if not has_checksums(root):
        return
    try:
        names = [file.relative_to(root) for file in root.rglob("*") if file.is_file()]
    except RecursionError as error:
        raise CheckpointError(f"{root}: its folders are nested too deeply to be read") from error
    sums = {
        name.as_posix(): sha256_of(root / name) for name in names if is_needed(PurePosixPath(name))
    }
    compare_checksums(sums, root, root, is_needed)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def has_checksums(root: Path) -> bool:
    """Tell if an unpacked archive has ``checksums.json``, so that opening it compared all files."""
    return (root / CHECKSUMS_NAME).is_file()


def compare_checksums(
    sums: dict[str, str], root: Path, source: Path, is_needed: Callable[[PurePosixPath], bool]
) -> None:
    """Raise CheckpointError if a file's sha256 differs from ``checksums.json``.

    If there is no ``checksums.json``, nothing is compared.

    Args:
        sums: sha256 of each unpacked file, by its name in the archive.
        root: folder with the unpacked files.
        source: name of the archive in errors.
        is_needed: tells which files were unpacked; the others are not compared.
    """
    if not has_checksums(root):
        return
    listed = read_json(root / CHECKSUMS_NAME, f"{source}: {CHECKSUMS_NAME}")
    expected = {name: listed[name] for name in listed if is_needed(PurePosixPath(name))}
    actual = {name: digest for name, digest in sums.items() if name != CHECKSUMS_NAME}
    for name in sorted(expected.keys() | actual.keys()):
        if actual.get(name) != expected.get(name):
            raise CheckpointError(
                f"{source}: {name}: got sha256 {actual.get(name)}, but {CHECKSUMS_NAME} lists "
                f"{expected.get(name)}: the file was changed, added or removed. Use an unchanged "
                "copy of the archive"
            )
