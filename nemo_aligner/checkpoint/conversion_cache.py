"""Convert Hugging Face folders, GGUF files and models of the hub once, into a cache of archives.

``open_nemo`` calls ``find_archive``, so all commands and functions that take a ``.nemo`` archive
also take these models. An archive in the cache is the one that ``nemo-aligner convert`` writes with
its default options. It is reused as long as ``_identify`` returns the same values for the model.

A conversion runs in a separate process, for two reasons: it needs a process group of one rank,
while the caller may be one of several; and the process returns all of its memory when it ends.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from nemo_aligner import __version__
from nemo_aligner.checkpoint.custom_families import describe_custom_family
from nemo_aligner.utils.cache import cache_folder, cached_file
from nemo_aligner.utils.console import say, waiting_for
from nemo_aligner.utils.errors import CheckpointError, one_line
from nemo_aligner.utils.processes import environment_of_one_process, verb_command

# Raise this number if a conversion writes other archives than before.
CONVERSION_VERSION = 3
# Files in subfolders are not downloaded, because some repositories use them for other formats;
# exceptions are the heads in this package's exports (score*). Mistral's second copy of its weights
# (consolidated*) is not downloaded, either.
TOKENIZER_FILES = ["*.json", "*.jinja"]
MODEL_FILES = ["*.safetensors", *TOKENIZER_FILES]
_NOT_DOWNLOADED = ["[!s]*/*", "consolidated*"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".nemo", ".gguf", ".yaml", ".yml", ".json", ".safetensors")
# Any of these files or folders identifies a checkpoint of NeMo or Megatron.
_OF_NEMO = (
    "model_config.yaml", "context", "latest_checkpointed_iteration.txt", "run_config.yaml",
    "common.pt", ".metadata",
)  # fmt: skip
_MAX_HEADER_BYTES = 1 << 26
_KEY_CHARACTERS = 12


def find_archive(source: Path) -> Path:
    """Return the archive to open for ``source``: itself, or its conversion in the cache.

    A path that does not exist and is not a name on the hub is returned, too; opening it fails.

    Raises:
        CheckpointError: the model cannot be downloaded or converted.
        ConfigError: the cache cannot be written.
    """
    folder = source
    if is_hub_name(source):
        folder = _download(str(source))
    elif not is_hugging_face(source):
        return source
    identity = _identify(folder)
    name = re.sub(r"[^\w.-]", "_", source.resolve().name)
    path = cache_folder() / "models" / f"{name}-{_hash(identity)}.nemo"

    def convert(output: Path) -> None:
        _convert(source, folder, output)
        if _identify(folder) != identity:
            raise CheckpointError(
                f"{source}: it changed while it was converted. Start again when it is complete"
            )

    return cached_file(path, str(source), convert)


def is_hugging_face(path: Path) -> bool:
    """Tell if ``path`` is a GGUF file or a folder in Hugging Face's format."""
    if path.is_file():
        return path.suffix.lower() == ".gguf"
    is_of_nemo = any((path / name).exists() for name in _OF_NEMO)
    return (path / "config.json").is_file() and not is_of_nemo


def is_hub_name(source: str | Path) -> bool:
    """Tell if ``source`` means a model of the Hugging Face hub: ``organization/name``.

    A path whose parent folder exists is a misspelled path, for which the hub is not queried.
    """
    path = Path(source)
    return looks_like_hub_name(str(source)) and not path.exists() and not path.parent.is_dir()


def looks_like_hub_name(text: str) -> bool:
    """Tell if ``text`` has the form ``organization/name``, and not the ending of a file."""
    return bool(_HUB_NAME.fullmatch(text)) and not text.lower().endswith(_FILE_SUFFIXES)


def find_tokenizer(source: Path) -> Path:
    """Return ``source``, or download only the tokenizer if it is a name of the hub."""
    return find_or_download(source, TOKENIZER_FILES) if is_hub_name(source) else source


def find_or_download(source: str | Path, files: list[str]) -> Path:
    """Return an existing path unchanged, or download ``files`` of a model on the hub.

    Raises:
        CheckpointError: there is no such path or model, or the hub cannot be reached.
    """
    path = Path(source)
    if path.exists():
        return path
    missing = f"{source}: there is no such folder or file"
    if not _HUB_NAME.fullmatch(str(source)):
        raise CheckpointError(
            f"{missing}. Pass an existing path, or the name of a model on the hub as "
            "ORGANIZATION/NAME"
        )
    if path.parent.is_dir():
        raise CheckpointError(
            f"{missing}, and {path.parent} is a folder here. Correct the path, or run from another "
            "folder if you mean the model on the hub"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(source), allow_patterns=files, ignore_patterns=_NOT_DOWNLOADED)
        )
    except Exception as error:  # the network library may raise anything
        raise CheckpointError(_describe_failed_download(str(source), error)) from error


def _describe_failed_download(name: str, error: Exception) -> str:
    from huggingface_hub.errors import RepositoryNotFoundError

    missing = f"{name}: there is no such folder"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{missing}, and no such model on the hub that you may read. Correct the name; for a "
            "private or gated model, log in with `hf auth login`"
        )
    return (
        f"{missing}, and no such model can be downloaded from the hub ({one_line(error)}). Without "
        f"a network, pass a local folder, or run `hf download {name}` where there is one and copy "
        "the hub's cache"
    )


@cache
def _download(name: str) -> Path:
    """Download a model; a process queries the hub only once for each name.

    So the model is the same for the whole run, even if a new revision is pushed meanwhile.
    """
    say(f"looking for {name} on the Hugging Face hub ...")
    return find_or_download(name, MODEL_FILES)


def _convert(source: Path, folder: Path, output: Path) -> None:
    """Run ``nemo-aligner convert`` on ``folder``; ``source`` is the user's name for it."""
    command = verb_command("convert", "--input", str(folder), "--output", str(output))
    say(f"{source}: converting it to an archive ...")
    with waiting_for(f"converting {source}"):
        done = subprocess.run(
            command,
            env=environment_of_one_process(),
            capture_output=True,
            text=True,
            errors="replace",
        )
    if done.returncode == 0:
        return
    errors = re.findall(r"^\w*Error: (.*)", done.stderr, re.MULTILINE)
    problem = errors[-1] if errors else one_line(done.stderr[-500:])
    if done.returncode < 0:
        problem = f"the conversion was ended by signal {-done.returncode}"
    prefix = "" if problem.startswith(str(source)) else f"{source}: "
    raise CheckpointError(
        f"{prefix}{problem}. `nemo-aligner convert` has options for other heads and templates; "
        "its archive can be used here instead"
    )


def _hash(identity: Any) -> str:
    text = json.dumps([CONVERSION_VERSION, __version__, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARACTERS]


def _identify(path: Path) -> Any:
    """Return JSON values that change if the model at ``path`` changes; no weights are read.

    For a snapshot of the hub this is its revision. Otherwise it lists each file: settings and
    tokenizer by their content; weights by name, size, header and time of the last change, because a
    model that is trained further and saved again has the same names, sizes and headers. For a
    family from a user's code, it includes that code.
    """
    if path.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", path.name):
        identity: list[Any] = [path.parent.parent.name, path.name]
    else:
        identity = [list(_describe_file(path, file)) for file in _list_files(path)]
    return identity + describe_custom_family(path)


def _list_files(path: Path) -> list[Path]:
    """List the files that a conversion may read, in a fixed order."""
    if path.is_file():
        return [path]
    patterns = (*MODEL_FILES, "score*/*.safetensors", "score*/*.json")
    return sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})


def _describe_file(folder: Path, file: Path) -> Iterator[Any]:
    """Yield name, size, time of the last change (0 for settings), and sha256 of the content.

    For weights this is the sha256 of the header alone.
    """
    stat = file.stat()
    is_weights = file.suffix not in (".json", ".jinja")
    with file.open("rb") as stream:
        size = stat.st_size
        if file.suffix == ".safetensors":
            size = 8 + int.from_bytes(stream.read(8), "little")
            stream.seek(0)
        content = stream.read(min(size, _MAX_HEADER_BYTES) if is_weights else size)
    yield file.name if file == folder else file.relative_to(folder).as_posix()
    yield from (stat.st_size, stat.st_mtime_ns if is_weights else 0)
    yield hashlib.sha256(content).hexdigest()
