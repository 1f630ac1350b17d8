"""Write files atomically, and explain why a write failed, most often because the disk is full."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from nemo_aligner.utils.errors import CheckpointError, ConfigError, one_line

# Parts of error messages that mean a full disk. torch's zip writer hides the system's error, and
# raises one of the texts in _CUT_OFF. safetensors quotes the system's error, which is the text in
# _FULL.
_CUT_OFF = ("unexpected pos", "PytorchStreamWriter failed", "iostream error")
_FULL = ("No space left on device",)


def is_disk_full(error: BaseException) -> bool:
    """Tell if a write failed, or probably failed, because the disk or the user's quota is full."""
    is_system_error = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_system_error or any(words in str(error) for words in (*_FULL, *_CUT_OFF))


def write_problem(path: Path, error: BaseException) -> str:
    """Describe why a write to ``path`` failed.

    For a full disk, the text also says how much space is free and what to do.
    """
    # Imported here, because ``console`` imports tqdm, and ``nemo-aligner doctor`` must start with
    # only the standard library.
    from nemo_aligner.utils.console import show_bytes

    if not is_disk_full(error):
        return one_line(error)
    folder = next((part for part in (path, *path.parents) if part.is_dir()), Path.cwd())
    problem = "the disk is full"
    if isinstance(error, OSError) and error.errno == errno.EDQUOT:
        problem = "the disk quota is used up"
    elif any(words in str(error) for words in _CUT_OFF):
        problem = "a write was cut off, as by a full disk"
    free = show_bytes(shutil.disk_usage(folder).free)
    location = "there" if folder == path else f"in {folder}"
    return f"{problem}, with {free} free {location}. Free some space, or choose another disk"


@contextmanager
def explaining_full_disk(output: Path) -> Iterator[None]:
    """Turn the OSError of a full disk in the block into a CheckpointError that names the file.

    Args:
        output: the file or folder that the block writes. The message names it if the OSError does
            not name a file.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        # The OSError may name another file, for example a temporary one in another folder.
        path = Path(error.filename).absolute() if error.filename else output
        problem = write_problem(path, error)
        raise CheckpointError(f"{path}: cannot be written: {problem}") from error


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path for a temporary file next to ``path``, and remove the file after the block.

    Every call yields another path, so that several programs can write ``path`` at the same time.
    """
    # A random name, because processes of two machines or containers may have the same id.
    partial = path.with_name(f".{path.name}.{uuid4().hex[:12]}.partial")
    try:
        yield partial
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[Path]:
    """Write a file atomically: yield a path to write to, and rename this file to ``path`` after it.

    If the block raises, a file that existed before is unchanged. If several programs write ``path``
    at the same time, the last one to finish wins. A path that is not a regular file, such as
    /dev/stdout, is yielded itself, and written directly.

    Args:
        sync: write the file to the disk before it is renamed, and then the new name, so that
            ``path`` is a complete file even after the machine has crashed.

    Raises:
        OSError: the file cannot be written or renamed.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()  # resolve: replace the target of a symbolic link, not the link
    with temporary_beside(target) as partial:
        yield partial
        if sync:
            sync_to_disk(partial)
        os.replace(partial, target)
        if sync:
            sync_to_disk(target.parent)


# Ends of names that no output of a command has: compressed files, tables and models.
_OTHER_FORMATS = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".arrow", ".csv", ".tsv")
_MODELS = (".nemo", ".gguf", ".safetensors")


def check_outputs(outputs: Mapping[str, Path], inputs: Mapping[str, Path]) -> None:
    """Check before a command starts that its outputs can be written, and replace no input or model.

    Args:
        outputs: the text files to write (JSON or HTML), by the settings that name them.
        inputs: the files to read, by their descriptions in the error.

    Raises:
        ConfigError: an output is the same file as an input or another output, or is a folder or
            a model; or its folder is a file or read-only; or its name is that of another format.
    """
    described = {os.path.realpath(path): name for name, path in inputs.items()}
    for setting, path in outputs.items():
        if os.path.isdir(path):
            raise ConfigError(f"{setting}: {path} is a folder. Name a file")
        above = next((folder for folder in path.parents if os.path.exists(folder)), Path())
        if not os.path.isdir(above):
            raise ConfigError(f"{setting}: {path}: {above} is not a folder. Name a file in one")
        # /dev/null and the like are not replaced, so that several settings may name them.
        if os.path.exists(path) and not os.path.isfile(path):
            continue
        name = described.setdefault(os.path.realpath(path), f"the file of {setting}")
        if name != f"the file of {setting}":
            raise ConfigError(f"{setting}: {path} is {name}. Name another")
        if not os.access(above, os.W_OK):
            raise ConfigError(f"{setting}: {path}: nothing can be written to {above}. Name another")
        if path.suffix in _OTHER_FORMATS:
            raise ConfigError(
                f"{setting}: {path}: its content will be text, not {path.suffix}. Name it, for "
                f"example, {path.name.partition('.')[0]}.jsonl"
            )
        if path.suffix in _MODELS or (os.path.isfile(path) and tarfile.is_tarfile(path)):
            raise ConfigError(f"{setting}: {path} is a model or an archive. Name another")


def check_replaces_nothing_in(folder: Path, setting: str, output: Path) -> None:
    """Raise ConfigError if ``output`` is an existing file in ``folder``, other than a page."""
    is_inside = folder.is_dir() and folder.resolve() in output.resolve().parents
    if is_inside and output.is_file() and output.suffix != ".html":
        raise ConfigError(
            f"{setting}: {output} is a file of the folder {folder}, which is read. Name another"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file with ``replacing``; missing folders are created.

    Raises:
        OSError: the file cannot be written. A file that existed before is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_bytes(content)


def write_lines(path: Path, lines: Iterable[str], setting: str = "output") -> str:
    """Write lines in UTF-8 to a file; see ``write_output``."""
    return write_output(path, encode_lines(lines), setting)


def write_output(path: Path, content: bytes, setting: str = "output") -> str:
    """Write a file, and make its folder if necessary.

    A reader sees the complete old or new file at any time.

    Args:
        setting: name of the setting that chose the file or its folder.

    Returns:
        The path, and whether another file was replaced, for a message.

    Raises:
        ConfigError: the file cannot be written; the error names the setting.
    """
    try:
        replaces = path.is_file() and path.read_bytes() != content
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {path} cannot be written: {write_problem(path, error)}. Name another path"
        ) from error
    return f"{path} (in place of another)" if replaces else str(path)


def encode_lines(lines: Iterable[str]) -> bytes:
    """Encode lines as ``write_lines`` writes them."""
    return "".join(f"{line}\n" for line in lines).encode()


def sync_to_disk(path: Path) -> None:
    """Call fsync for a file, or for the directory entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
