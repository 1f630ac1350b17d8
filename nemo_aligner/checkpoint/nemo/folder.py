"""Find settings, weights and tokenizer in the checkpoint folders of NeMo and Megatron.

Supported are unpacked archives of this package, of NeMo 1 and NeMo-Aligner, and the folders of NeMo
2, Megatron-Bridge and Megatron-LM; see docs/checkpoints.md. Each becomes a ``NemoFolder``, whose
settings have the keys of NeMo 1's ``model_config.yaml``, whatever the source calls them.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.decoder_tensors import PREFIX
from nemo_aligner.checkpoint.nemo.settings import (
    check_nemo1,
    from_arguments,
    from_transformer_config,
)
from nemo_aligner.checkpoint.run_folder import refuse_run
from nemo_aligner.checkpoint.safe_load import INDEX_NAME, read_json, read_text, read_yaml
from nemo_aligner.checkpoint.weights import open_weights
from nemo_aligner.checkpoint.weights.store import (
    COMMON_NAME,
    StoredTensors,
    TensorStore,
    is_optimizer_state,
    read_common,
)
from nemo_aligner.config.common import count_of_config
from nemo_aligner.contract.added_tokens import load_hf_tokenizer, without_surplus_tokens
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.utils.errors import CheckpointError, shown

CONFIG_NAME = "model_config.yaml"
WEIGHTS_NAME = "model_weights"
TOKENIZER_NAME = "tokenizer"
CONTRACT_NAME = "scoring_contract.json"
FINGERPRINT_NAME = "model_fingerprint.json"
_LEGACY_WEIGHTS = ("model_weights.ckpt", "mp_rank_*", "tp_rank_*")
# NeMo's defaults for keys that are missing in ``model_config.yaml``. Archives of this package have
# all of these keys.
_NEMO_DEFAULTS = {
    "normalization": "layernorm",
    "activation": "gelu",
    "bias": True,
    "position_embedding_type": "learned_absolute",
}
_PLAIN = (bool, int, float, str, type(None))
# Keys that may hold the vocabulary's size; the first one that is set counts. padded_vocab_size is
# Megatron-LM's. If no key is set, the tokenizer's size is used.
_VOCABULARY_KEYS = ("vocab_size", "override_vocab_size", "padded_vocab_size")
_TRACKER = "latest_checkpointed_iteration.txt"
_RUN_CONFIG = "run_config.yaml"
_MODEL_YAML = "context/model.yaml"
_HF_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"


@dataclass(frozen=True)
class NemoFolder:
    """An unpacked archive of this package or of NeMo 1. Its files are not trusted.

    Attributes:
        root: the folder.
        source: name of the checkpoint for errors, because ``root`` may be a temporary folder.
        replacement_tokenizer: folder of a tokenizer to use instead of the checkpoint's, which may
            be missing or of an unsupported kind.
        replacement_config: file with settings to use instead of the checkpoint's.
    """

    root: Path
    source: Path
    replacement_tokenizer: Path | None = None
    replacement_config: Path | None = None

    @property
    def prefix(self) -> str:
        """Prefix of all tensor names in the checkpoint, such as ``model.``."""
        return PREFIX

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The checkpoint's settings by NeMo 1's keys, before ``config`` adds the default values."""
        replacement = self.replacement_config
        if replacement is None:
            config, location = self._read_config(), f"{self.source}: {CONFIG_NAME}"
        else:
            config, location = read_yaml(replacement), str(replacement)
        check_nemo1(config, location)
        return config

    @cached_property
    def config(self) -> dict[str, Any]:
        """Settings of the model by the keys of ``model_config.yaml``, with ``vocab_size``.

        If the file has no ``vocab_size``, as in NeMo, the size comes from another key of
        ``_VOCABULARY_KEYS`` or from the tokenizer.
        """
        config = self._settings
        # Only this package writes vocab_size, and its files have all keys, so they need no
        # defaults.
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
        """The vocabulary's size, and where it is from: the name of a setting, or the tokenizer."""
        for key in _VOCABULARY_KEYS:
            if self._settings.get(key) is not None:
                return self._settings[key], f"by {key}"
        return self._whole_tokenizer.vocab_size, "by its tokenizer"

    @property
    def vocab_size_source(self) -> str:
        """Source of the vocabulary's size, for errors: "by vocab_size" or "by its tokenizer"."""
        return self._vocabulary[1]

    @property
    def weights(self) -> Path:
        """Folder of the distributed checkpoint; CheckpointError if there is none."""
        folder = self.root / WEIGHTS_NAME
        if folder.is_dir():
            return folder
        # Raise a specific error for weights in an old format; "no such folder" would suggest a
        # damaged archive.
        for pattern in _LEGACY_WEIGHTS:
            for legacy_file in self.root.glob(pattern):
                raise CheckpointError(
                    f"{self.source}: got legacy weights ({legacy_file.name}), which are not "
                    "supported because they are pickles; wanted a distributed checkpoint in "
                    f"{WEIGHTS_NAME}/"
                )
        raise CheckpointError(f"{self.source}: it holds no {WEIGHTS_NAME} folder")

    @cached_property
    def store(self) -> TensorStore:
        """The stored tensors of the checkpoint; reads their index at the first access."""
        store = open_weights(self.weights)
        store.source = self.source
        return store

    @cached_property
    def tensors(self) -> StoredTensors:
        """Shape and dtype of every weight, by its name without the prefix."""
        return {
            name.removeprefix(self.prefix): entry
            for name, entry in self.store.tensors.items()
            if name.startswith(self.prefix) and not is_optimizer_state(name)
        }

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer; CheckpointError if there is none."""
        return self.replacement_tokenizer or self._find_tokenizer()

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer.

        If there is a scoring contract, the tokenizer's files are used unchanged, because the
        contract has their fingerprint. Otherwise the tokenizer is loaded as transformers would load
        it, without its ``removed_tokens``.
        """
        return self._fitting_tokenizer[0]

    @property
    def removed_tokens(self) -> list[str]:
        """Added tokens of a base model for which it has no embedding; no sample contains one."""
        return self._fitting_tokenizer[1]

    @cached_property
    def _fitting_tokenizer(self) -> tuple[Tokenizer, list[str]]:
        tokenizer = self._whole_tokenizer
        if self.contract is not None:
            return tokenizer, []
        return without_surplus_tokens(tokenizer, count_of_config(self.config, "vocab_size"))

    @cached_property
    def _whole_tokenizer(self) -> Tokenizer:
        path = self.tokenizer
        # Errors name the checkpoint, because the tokenizer's folder may be a temporary one.
        load = load_hf_tokenizer if self.contract is None else load_tokenizer
        return load(path, f"{self.source}: {path.name}")

    @cached_property
    def contract(self) -> dict[str, Any] | None:
        """Content of ``scoring_contract.json``.

        None for base models, and for reward models that this package did not write.
        """
        path = self.root / CONTRACT_NAME
        return read_json(path, f"{self.source}: {CONTRACT_NAME}") if path.is_file() else None

    def read_contract(self) -> ScoringContract | None:
        """Return ``contract`` as an object; CheckpointError if it is not a valid one."""
        try:
            return None if self.contract is None else ScoringContract.from_dict(self.contract)
        except CheckpointError as error:
            raise CheckpointError(f"{self.source}: {error}") from error

    def _read_config(self) -> dict[str, Any]:
        """Read the checkpoint's settings, and translate them to the keys of NeMo 1."""
        return read_yaml(self.root / CONFIG_NAME, f"{self.source}: {CONFIG_NAME}")

    def _find_tokenizer(self) -> Path:
        """Find the folder of the checkpoint's tokenizer; CheckpointError if there is none."""
        section = self._read_config().get("tokenizer")
        section = section if isinstance(section, dict) else {}
        for key in ("type", "model"):
            value = section.get(key)
            if isinstance(value, str) and value.startswith("nemo:"):
                return self._find_folder(value.removeprefix("nemo:"))
        if section.get("type") and not (self.root / TOKENIZER_NAME).is_dir():
            raise self._no_tokenizer(f"only the name of a tokenizer, {shown(section['type'])}")
        return self._find_folder(TOKENIZER_NAME)

    def _find_folder(self, name: str) -> Path:
        # The name comes from the untrusted archive, so it must not lead out of it, like
        # nemo:../../etc.
        path = (self.root / name).resolve()
        if path.is_relative_to(self.root.resolve()) and path.is_dir():
            return path
        raise self._no_tokenizer(
            f"the file {name!r}" if path.is_file() else f"no tokenizer folder {shown(name)}"
        )

    def _first_tokenizer(self, folders: Iterable[Path], usual: str) -> Path:
        """Return the first of ``folders`` that has a tokenizer.

        Args:
            usual: where a tokenizer normally is, for the error if no folder has one.
        """
        for folder in folders:
            if (folder / "tokenizer.json").is_file():
                return folder
        raise self._no_tokenizer(f"none in {usual}")

    def _read_transformer_config(self, name: str, key: str) -> dict[str, Any]:
        """Read megatron-core's settings from the section ``key`` of the YAML file ``name``."""
        location = f"{self.source}: {name}"
        section = read_yaml(self.root / name, location).get(key)
        if not isinstance(section, dict):
            raise CheckpointError(f"{location}: {key}: got {shown(section)}, wanted a mapping")
        return from_transformer_config(section, f"{location}: {key}")

    def _no_tokenizer(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: tokenizer: got {problem}, wanted a folder with a tokenizer.json. Run "
            "`nemo-aligner import`, and pass it such a folder, or the name of a model on the hub"
        )


class Nemo2Folder(NemoFolder):
    """A checkpoint of NeMo 2, with the folders ``weights/`` and ``context/``.

    Its settings are YAML that names Python classes (written by nemo-run). It is read as plain data,
    and no code runs.
    """

    @property
    def prefix(self) -> str:
        return "module."

    @property
    def weights(self) -> Path:
        return _check_exists(self.root / "weights", self.source)

    def _read_config(self) -> dict[str, Any]:
        return self._read_transformer_config(_MODEL_YAML, "config")

    def _find_tokenizer(self) -> Path:
        names = ("nemo_tokenizer", "artifacts", ".")
        folders = (self.root / "context" / name for name in names)
        return self._first_tokenizer(folders, "context/nemo_tokenizer")


class MegatronFolder(NemoFolder):
    """A checkpoint of Megatron-Bridge (with a ``run_config.yaml``) or of Megatron-LM.

    The folder has a name such as ``iter_0000100/``.
    """

    @property
    def prefix(self) -> str:
        return ""

    @property
    def weights(self) -> Path:
        return self.root

    def _read_config(self) -> dict[str, Any]:
        if (self.root / _RUN_CONFIG).is_file():
            return self._read_transformer_config(_RUN_CONFIG, "model")
        common = read_common(self.root)
        arguments = common.get("args") if isinstance(common, dict) else None
        if not isinstance(arguments, Namespace):
            raise CheckpointError(
                f"{self.source}: {COMMON_NAME}: it has no args of Megatron-LM, so the model's "
                f"settings are unknown. Pass `nemo-aligner import` a {CONFIG_NAME}"
            )
        plain = {key: _as_plain(value) for key, value in vars(arguments).items()}
        return from_arguments(plain, f"{self.source}: {COMMON_NAME}")

    def _find_tokenizer(self) -> Path:
        folders = (self.root / TOKENIZER_NAME, self.root.parent / TOKENIZER_NAME)
        return self._first_tokenizer(folders, "its folder tokenizer/")


def _as_plain(value: Any) -> Any:
    """Return a plain value (number, text, list) unchanged, and any other as a string.

    No setting accepts such a string, so later checks reject it with an error.
    """
    parts = value if type(value) in (list, tuple) else (value,)
    return value if all(type(part) in _PLAIN for part in parts) else shown(value)


def _check_exists(folder: Path, source: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{source}: it holds no {folder.name} folder")
    return folder


def folder_of(
    root: Path, source: Path, tokenizer: Path | None = None, config: Path | None = None
) -> NemoFolder:
    """Find the checkpoint in a folder, and detect its format.

    Args:
        root: the folder.
        source: name of the checkpoint in errors.
        tokenizer: folder that replaces the checkpoint's tokenizer.
        config: file that replaces the checkpoint's settings.
    """
    folder_class, inner = _detect_format(root, source)
    return folder_class(inner, source, tokenizer, config)


def _detect_format(root: Path, source: Path) -> tuple[type[NemoFolder], Path]:
    """Return the class that reads a checkpoint's format, and its folder within ``root``."""
    if (root / CONFIG_NAME).is_file():
        return NemoFolder, root
    # Check for a training run of this package first: its files would look like a Megatron
    # checkpoint's.
    refuse_run(root, source)
    if (root / "context").is_dir():
        return Nemo2Folder, root
    # The user may have passed the folder above iter_0000100/. A file in it names the latest step.
    if (root / _TRACKER).is_file():
        return MegatronFolder, _check_exists(root / _read_tracker(root), source)
    if any((root / name).is_file() for name in (_RUN_CONFIG, COMMON_NAME, INDEX_NAME)):
        return MegatronFolder, root
    refuse_hugging_face(root, source)
    raise CheckpointError(
        f"{source}: got none of {CONFIG_NAME}, {_MODEL_YAML}, {_TRACKER}, {_RUN_CONFIG} and "
        f"{COMMON_NAME}; wanted a checkpoint of NeMo or Megatron"
    )


def refuse_hugging_face(path: Path, source: Path) -> None:
    """Raise CheckpointError for a Hugging Face folder or a GGUF file, and say how to convert it.

    Args:
        source: name of the checkpoint in errors.
    """
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if is_gguf or (path / _HF_CONFIG).is_file():
        description = "a GGUF file" if is_gguf else f"a Hugging Face folder ({_HF_CONFIG})"
        raise CheckpointError(
            f"{source}: got {description}, wanted a checkpoint of NeMo or Megatron; "
            "`nemo-aligner convert` converts it to a .nemo archive"
        )
    refuse_adapter(path, source)


def refuse_adapter(folder: Path, source: Path) -> None:
    """Raise CheckpointError for a LoRA adapter without its base model."""
    if (folder / _ADAPTER_CONFIG).is_file() and not (folder / _HF_CONFIG).is_file():
        raise CheckpointError(
            f"{source}: got an adapter ({_ADAPTER_CONFIG}), wanted a complete model; merge it into "
            "its base first (merge_and_unload of peft)"
        )


def _read_tracker(root: Path) -> str:
    """Read which folder holds the latest step, from Megatron's file with the step's number."""
    step = read_text(root / _TRACKER).strip()
    if step != "release" and not re.fullmatch(r"\d{1,15}", step):
        raise CheckpointError(f"{root / _TRACKER}: got {shown(step)}, wanted a step or 'release'")
    return step if step == "release" else f"iter_{int(step):07d}"
