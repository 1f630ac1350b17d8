"""Checkpoints of NeMo and Megatron: opening any of them, and writing ``.nemo`` archives.

``open_nemo`` opens archives of this package; NeMo 1.x and NeMo-Aligner archives (tar or tar.gz, or
unpacked; weights as torch_dist or zarr); NeMo 2 folders (``weights/`` and ``context/``); folders of
Megatron-LM and Megatron-Bridge (``iter_0000100/``, or the one above). Each gives a ``NemoFolder``;
see docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import tarfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias

import torch.distributed as dist
import yaml

from nemo_aligner.checkpoint.decoder_tensors import PREFIX
from nemo_aligner.checkpoint.nemo.archive import (
    CHECKSUMS_NAME,
    has_checksums,
    unpack,
    verify_folder,
)
from nemo_aligner.checkpoint.nemo.megatron_config import (
    check_nemo1,
    from_arguments,
    from_transformer_config,
)
from nemo_aligner.checkpoint.run_folder import refuse_run
from nemo_aligner.checkpoint.safe_load import MAX_TEXT_BYTES, read_json, read_text, read_yaml
from nemo_aligner.checkpoint.weights.store import open_weights
from nemo_aligner.checkpoint.weights.tensor_store import (
    StoredTensors,
    TensorStore,
    is_optimizer_state,
)
from nemo_aligner.checkpoint.weights.torch_dist import COMMON_NAME, INDEX_NAME, read_common
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.distributed.collectives import barrier, gather_objects
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown
from nemo_aligner.utils.processes import make_temporary, remove_temporary

# An opened checkpoint: its settings, weights and tokenizer.

CONFIG_NAME = "model_config.yaml"
WEIGHTS_NAME = "model_weights"
TOKENIZER_NAME = "tokenizer"
CONTRACT_NAME = "scoring_contract.json"
_LEGACY_WEIGHTS = ("model_weights.ckpt", "mp_rank_*", "tp_rank_*")
# NeMo's defaults for missing keys; this package writes all of them.
_NEMO_DEFAULTS = {
    "normalization": "layernorm",
    "activation": "gelu",
    "bias": True,
    "position_embedding_type": "learned_absolute",
}
_PLAIN = (bool, int, float, str, type(None))
# Keys of NeMo and, last, of Megatron-LM; without any the tokenizer decides.
_VOCABULARY_KEYS = ("vocab_size", "override_vocab_size", "padded_vocab_size")
_TRACKER = "latest_checkpointed_iteration.txt"
_RUN_CONFIG = "run_config.yaml"
_MODEL_YAML = "context/model.yaml"
_HF_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"


@dataclass(frozen=True)
class NemoFolder:
    """An unpacked archive. Nothing in it is trusted, and nothing is unpickled here.

    ``given_tokenizer`` and ``given_config`` replace what the checkpoint lacks, or has in a form
    that is not read.
    """

    root: Path
    source: Path
    given_tokenizer: Path | None = None
    given_config: Path | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the stored tensors' names."""
        return PREFIX

    @cached_property
    def _stated(self) -> dict[str, Any]:
        given = self.given_config
        where = f"{self.source}: {CONFIG_NAME}" if given is None else str(given)
        config = self._own_config() if given is None else read_yaml(given, where)
        check_nemo1(config, where)
        return config

    @cached_property
    def config(self) -> dict[str, Any]:
        """Settings of the model by the keys of ``model_config.yaml``, with ``vocab_size``.

        NeMo's own configs lack the latter: it is ``override_vocab_size``, or the tokenizer's.
        """
        config = self._stated
        if config.get("vocab_size") is not None:
            return config
        config = {**_NEMO_DEFAULTS, **config, "vocab_size": self._vocabulary[0]}
        if "geglu" in str(config["activation"]) and not config.get("openai_gelu"):
            raise CheckpointError(
                f"{self.source}: activation: got {shown(config['activation'])} without "
                "openai_gelu, wanted the GELU with tanh (openai_gelu: true)"
            )
        return config

    @cached_property
    def _vocabulary(self) -> tuple[Any, str]:
        """Size of the vocabulary, and where it is from."""
        for key in _VOCABULARY_KEYS:
            if self._stated.get(key) is not None:
                return self._stated[key], f"by {key}"
        return self.load_tokenizer().vocab_size, "by its tokenizer"

    @property
    def vocab_size_from(self) -> str:
        """Source of the vocabulary's size; rows past it are padding."""
        return self._vocabulary[1]

    @property
    def weights(self) -> Path:
        """Folder of the distributed checkpoint."""
        folder = self.root / WEIGHTS_NAME
        if folder.is_dir():
            return folder
        for pattern in _LEGACY_WEIGHTS:
            for found in self.root.glob(pattern):
                raise CheckpointError(
                    f"{self.source}: got legacy weights ({found.name}), which are pickles and are "
                    f"not read; wanted a distributed checkpoint in {WEIGHTS_NAME}/"
                )
        raise CheckpointError(f"{self.source}: it holds no {WEIGHTS_NAME} folder")

    @cached_property
    def store(self) -> TensorStore:
        """Tensors in ``weights``, opened once."""
        return open_weights(self.weights)

    @cached_property
    def tensors(self) -> StoredTensors:
        """Shape and dtype of every weight by its name without the prefix."""
        return {
            name.removeprefix(self.prefix): entry
            for name, entry in self.store.tensors.items()
            if name.startswith(self.prefix) and not is_optimizer_state(name)
        }

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.given_tokenizer or self._own_tokenizer()

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer; errors name the checkpoint, which may be unpacked elsewhere."""
        path = self.tokenizer
        return load_tokenizer(path, f"{self.source}: {path.name}")

    @cached_property
    def contract(self) -> dict[str, Any] | None:
        """Contents of ``scoring_contract.json``; None in other archives than our reward models."""
        path = self.root / CONTRACT_NAME
        return read_json(path, f"{self.source}: {CONTRACT_NAME}") if path.is_file() else None

    def _own_config(self) -> dict[str, Any]:
        return read_yaml(self.root / CONFIG_NAME, f"{self.source}: {CONFIG_NAME}")

    def _own_tokenizer(self) -> Path:
        section = self._own_config().get("tokenizer")
        section = section if isinstance(section, dict) else {}
        for key in ("type", "model"):
            value = section.get(key)
            if isinstance(value, str) and value.startswith("nemo:"):
                return self._inside(value.removeprefix("nemo:"))
        if section.get("type") and not (self.root / TOKENIZER_NAME).is_dir():
            raise self._no_tokenizer(f"only the name of one, {shown(section['type'])}")
        return self._inside(TOKENIZER_NAME)

    def _inside(self, name: str) -> Path:
        path = (self.root / name).resolve()
        if path.is_relative_to(self.root.resolve()) and path.is_dir():
            return path
        raise self._no_tokenizer(
            f"the file {name!r}" if path.is_file() else f"no tokenizer folder {shown(name)}"
        )

    def _tokenizer_among(self, folders: Iterable[Path], usual: str) -> Path:
        for folder in folders:
            if (folder / "tokenizer.json").is_file():
                return folder
        raise self._no_tokenizer(f"none in {usual}")

    def _transformer_config(self, name: str, key: str) -> dict[str, Any]:
        """Read megatron-core's settings from the section ``key`` of a YAML file."""
        where = f"{self.source}: {name}"
        section = read_yaml(self.root / name, where).get(key)
        if not isinstance(section, dict):
            raise CheckpointError(f"{where}: {key}: got {shown(section)}, wanted a mapping")
        return from_transformer_config(section, f"{where}: {key}")

    def _no_tokenizer(self, got: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: tokenizer: got {got}, wanted a folder with a tokenizer.json; "
            "`nemo-aligner import` takes such a folder, or the name of one on the hub"
        )


class Nemo2Folder(NemoFolder):
    """``weights/`` and ``context/`` of NeMo 2; nemo-run's YAML is read as data, and not run."""

    @property
    def prefix(self) -> str:
        return "module."

    @property
    def weights(self) -> Path:
        return _existing(self.root / "weights", self.source)

    def _own_config(self) -> dict[str, Any]:
        return self._transformer_config(_MODEL_YAML, "config")

    def _own_tokenizer(self) -> Path:
        names = ("nemo_tokenizer", "artifacts", ".")
        folders = (self.root / "context" / name for name in names)
        return self._tokenizer_among(folders, "context/nemo_tokenizer")


class MegatronFolder(NemoFolder):
    """``iter_0000100/`` of Megatron-Bridge, with its ``run_config.yaml``, or of Megatron-LM."""

    @property
    def prefix(self) -> str:
        return ""

    @property
    def weights(self) -> Path:
        return self.root

    def _own_config(self) -> dict[str, Any]:
        if (self.root / _RUN_CONFIG).is_file():
            return self._transformer_config(_RUN_CONFIG, "model")
        common = read_common(self.root)
        arguments = common.get("args") if isinstance(common, dict) else None
        if not isinstance(arguments, Namespace):
            raise CheckpointError(
                f"{self.source}: {COMMON_NAME}: got no args of Megatron-LM; "
                f"`nemo-aligner import` takes a {CONFIG_NAME} that says what the model is"
            )
        plain = {key: _as_plain(value) for key, value in vars(arguments).items()}
        return from_arguments(plain, f"{self.source}: {COMMON_NAME}")

    def _own_tokenizer(self) -> Path:
        folders = (self.root / TOKENIZER_NAME, self.root.parent / TOKENIZER_NAME)
        return self._tokenizer_among(folders, "its folder tokenizer/")


def _as_plain(value: Any) -> Any:
    """Keep a plain setting; another object, such as a tensor, becomes text that fits no setting."""
    parts = value if type(value) in (list, tuple) else (value,)
    return value if all(type(part) in _PLAIN for part in parts) else shown(value)


def _existing(folder: Path, source: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{source}: it holds no {folder.name} folder")
    return folder


def folder_of(
    root: Path, source: Path, tokenizer: Path | None = None, config: Path | None = None
) -> NemoFolder:
    """Find the checkpoint in a folder, whoever wrote it; ``source`` names it in errors.

    Raises:
        CheckpointError: there is none of NeMo or Megatron.
    """
    kind, inner = _kind_of(root, source)
    return kind(inner, source, tokenizer, config)


def _kind_of(root: Path, source: Path) -> tuple[type[NemoFolder], Path]:
    """Detect the format of a checkpoint, and its folder within ``root``."""
    if (root / CONFIG_NAME).is_file():
        return NemoFolder, root
    refuse_run(root, source)
    if (root / "context").is_dir():
        return Nemo2Folder, root
    if (root / _TRACKER).is_file():
        return MegatronFolder, _existing(root / _tracked(root), source)
    if any((root / name).is_file() for name in (_RUN_CONFIG, COMMON_NAME, INDEX_NAME)):
        return MegatronFolder, root
    refuse_hugging_face(root, source)
    raise CheckpointError(
        f"{source}: got none of {CONFIG_NAME}, {_MODEL_YAML}, {_TRACKER}, {_RUN_CONFIG} and "
        f"{COMMON_NAME}; wanted a checkpoint of NeMo or Megatron"
    )


def refuse_hugging_face(path: Path, source: Path) -> None:
    """Raise for a Hugging Face folder or a GGUF file, and name the verb that converts it.

    ``source`` names it in errors.

    Raises:
        CheckpointError: it is one.
    """
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if is_gguf or (path / _HF_CONFIG).is_file():
        got = "a GGUF file" if is_gguf else f"a Hugging Face folder ({_HF_CONFIG})"
        raise CheckpointError(
            f"{source}: got {got}, wanted a checkpoint of NeMo or Megatron; "
            "`nemo-aligner convert` makes a .nemo of it"
            + ("" if is_gguf else ", and hf_model= evaluates a reward model as it is")
        )
    refuse_adapter(path, source)


def refuse_adapter(folder: Path, source: Path) -> None:
    """Raise for a LoRA adapter without its base; raises as ``refuse_hugging_face``."""
    if (folder / _ADAPTER_CONFIG).is_file() and not (folder / _HF_CONFIG).is_file():
        raise CheckpointError(
            f"{source}: got an adapter ({_ADAPTER_CONFIG}), wanted a whole model; merge it into "
            "its base first (merge_and_unload of peft)"
        )


def _tracked(root: Path) -> str:
    step = read_text(root / _TRACKER, str(root / _TRACKER)).strip()
    if step != "release" and not re.fullmatch(r"\d{1,15}", step):
        raise CheckpointError(f"{root / _TRACKER}: got {shown(step)}, wanted a step or 'release'")
    return step if step == "release" else f"iter_{int(step):07d}"


# Opening: unpacked once per host, and checked before any use.


@contextmanager
def open_nemo(
    path: str | Path,
    *,
    with_weights: bool = True,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
) -> Iterator[NemoFolder]:
    """Open a checkpoint of NeMo or Megatron for reading.

    Where torch.distributed is initialised every rank must call it. One rank of each host unpacks
    an archive into the temporary directory, and removes it when all have left the block (or when
    its process ends, if one of several fails). It also reads all weights once, so that damage is
    found before any is used.

    Args:
        with_weights: without, little is unpacked, and ``NemoFolder.weights`` must not be used.
        tokenizer: folder that replaces the checkpoint's own tokenizer.
        config: file that replaces the checkpoint's own settings.

    Raises:
        CheckpointError: no such archive, an unsafe member, a missing part, or damaged data.
    """
    path = Path(path)
    given = [None if part is None else Path(part) for part in (tokenizer, config)]

    def opened(root: Path) -> NemoFolder:
        folder = folder_of(root, path, *given)
        _ = folder.config, with_weights and folder.weights
        return folder

    prepared, root = _once_per_host(path, lambda: _prepare(path, with_weights, opened))
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    try:
        yield opened(root) if prepared is None else prepared[1]
    except BaseException:
        if not has_peers:  # a failing rank's peers may still be reading
            _remove(root, path)
        raise
    if has_peers:
        barrier()
    _remove(root, path)


# The folder that a checkpoint was unpacked to, and the checkpoint, which was checked.
_Prepared: TypeAlias = tuple[Path, NemoFolder]


def _remove(root: Path, path: Path) -> None:
    """Remove a folder that this process unpacked; a folder that was given stays."""
    if root != path:
        remove_temporary(root)


def _prepare(path: Path, with_weights: bool, opened: Callable[[Path], NemoFolder]) -> _Prepared:
    """Unpack an archive, or take the folder itself, and check its contents."""

    def wanted(name: PurePosixPath) -> bool:
        return with_weights or WEIGHTS_NAME not in name.parts

    if path.is_file():
        refuse_hugging_face(path, path)
    root = path if path.is_dir() else unpack(path, wanted)
    try:
        if root == path:
            verify_folder(root, wanted)
        folder = opened(root)
        if with_weights and not has_checksums(root):
            folder.store.check_data(read=True)
    except BaseException:
        _remove(root, path)
        raise
    return root, folder


def _once_per_host(path: Path, prepare: Callable[[], _Prepared]) -> tuple[_Prepared | None, Path]:
    """Call ``prepare`` on one rank of each host; returns its result there, the folder on all."""
    if not dist.is_initialized():
        prepared = prepare()
        return prepared, prepared[0]
    hosts = gather_objects(socket.gethostname())
    owner = hosts.index(hosts[dist.get_rank()])
    is_owner = owner == dist.get_rank()
    mine, problem = _outcome(prepare) if is_owner else (None, None)
    outcomes: list[Any] = gather_objects((None if mine is None else mine[0], problem))
    for _, found in outcomes:
        if found is not None:
            if mine is not None:
                _remove(mine[0], path)
            raise CheckpointError(found)
    return mine, Path(outcomes[owner][0])


def _outcome(prepare: Callable[[], _Prepared]) -> tuple[_Prepared | None, str | None]:
    try:
        return prepare(), None
    except CheckpointError as error:
        return None, str(error)


# Writing.


@contextmanager
def scratch_beside(output: Path) -> Iterator[Path]:
    """Temporary folder on the disk of ``output``, which must not exist yet.

    Raises:
        CheckpointError: ``output`` exists, or its folder is not writable.
    """
    if output.exists():
        raise CheckpointError(f"{output}: it exists, wanted the name of a new one")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = make_temporary(f".{output.name}.", output.parent)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {error}") from error
    try:
        yield scratch
    finally:
        remove_temporary(scratch)


def write_nemo(
    path: str | Path,
    config: dict[str, Any],
    weights: Path,
    tokenizer: Path,
    contract: dict[str, Any] | None = None,
) -> None:
    """Write an archive that appears whole or not at all; one process calls it.

    The config's ``tokenizer.type`` is set to ``nemo:tokenizer``, NeMo's way to point into the
    archive. The last member, ``checksums.json``, has the sha256 of every other.

    Args:
        weights: folder of a distributed checkpoint.
        tokenizer: folder of a tokenizer.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {"library": "huggingface", "type": f"nemo:{TOKENIZER_NAME}"}
    config = {**config, "tokenizer": tokenizer_config}
    partial = path.with_name(f".{path.name}.partial")  # a killed write's is overwritten
    try:
        with partial.open("wb") as stream:
            with _SummingTar(fileobj=stream, mode="w", dereference=True) as archive:
                archive.add_text(CONFIG_NAME, yaml.safe_dump(config, sort_keys=False))
                if contract is not None:
                    archive.add_text(CONTRACT_NAME, json.dumps(contract, indent=2, allow_nan=False))
                archive.add(tokenizer, f"./{TOKENIZER_NAME}", filter=_anonymous)
                archive.add(weights, f"./{WEIGHTS_NAME}", filter=_anonymous)
                archive.add_text(CHECKSUMS_NAME, json.dumps(archive.sums, indent=2))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        sync_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


class _SummingTar(tarfile.TarFile):
    """Tar writer that records the sha256 of each member by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sums: dict[str, str] = {}

    def add_text(self, name: str, text: str) -> None:
        data = text.encode()
        if len(data) > MAX_TEXT_BYTES:  # the reader would refuse it
            raise CheckpointError(f"{name}: {len(data)} bytes, wanted at most {MAX_TEXT_BYTES}")
        member = tarfile.TarInfo(f"./{name}")
        member.size = len(data)
        self.addfile(member, BytesIO(data))

    def addfile(self, member: tarfile.TarInfo, fileobj: Any = None) -> None:
        if fileobj is None:
            super().addfile(member)
            return
        summed = _Summed(fileobj)
        super().addfile(member, summed)  # type: ignore[arg-type]
        self.sums[PurePosixPath(member.name).as_posix()] = summed.digest.hexdigest()


class _Summed:
    """File that hashes what is read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self.digest.update(block)
        return block


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def sync_to_disk(path: Path) -> None:
    """Fsync a file, or a folder's directory entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_model_config(path: Path) -> Mapping[str, Any]:
    """Read a model's config from a YAML file, a .nemo archive, or the folder it unpacks to.

    Raises:
        ConfigError: it does not exist, or is no YAML mapping.
        CheckpointError: an archive or a folder cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"config: got {path}, which does not exist")
    if path.suffix == ".nemo" or path.is_dir():
        with open_nemo(path, with_weights=False) as folder:
            return folder.config
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config: {path}: got {type(config).__name__}, wanted a mapping")
    return config
