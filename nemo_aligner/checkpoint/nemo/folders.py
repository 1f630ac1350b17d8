"""What lies in an opened checkpoint of NeMo or Megatron: its settings, weights and tokenizer."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.decoder_tensors import PREFIX
from nemo_aligner.checkpoint.nemo.megatron_config import (
    check_nemo1,
    from_arguments,
    from_transformer_config,
)
from nemo_aligner.checkpoint.run_folder import refuse_run
from nemo_aligner.checkpoint.untrusted import read_json, read_text, read_yaml
from nemo_aligner.checkpoint.weights.common import COMMON_NAME, read_common
from nemo_aligner.checkpoint.weights.index import INDEX_NAME
from nemo_aligner.checkpoint.weights.store import open_weights
from nemo_aligner.checkpoint.weights.tensor_store import (
    StoredTensors,
    TensorStore,
    is_optimizer_state,
)
from nemo_aligner.errors import CheckpointError, shown
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer

CONFIG_NAME = "model_config.yaml"
WEIGHTS_NAME = "model_weights"
TOKENIZER_NAME = "tokenizer"
CONTRACT_NAME = "scoring_contract.json"
_LEGACY_WEIGHTS = ("model_weights.ckpt", "mp_rank_*", "tp_rank_*")
# What NeMo builds where a key is missing; this package writes them all.
_NEMO_DEFAULTS = {
    "normalization": "layernorm",
    "activation": "gelu",
    "bias": True,
    "position_embedding_type": "learned_absolute",
}
_PLAIN = (bool, int, float, str, type(None))
# Of NeMo, and the last one of Megatron-LM; where none is stated, the tokenizer counts.
_VOCABULARY_KEYS = ("vocab_size", "override_vocab_size", "padded_vocab_size")
_TRACKER = "latest_checkpointed_iteration.txt"
_RUN_CONFIG = "run_config.yaml"
_MODEL_YAML = "context/model.yaml"
_HF_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"


@dataclass(frozen=True)
class NemoFolder:
    """An unpacked archive; nothing in it is trusted, and nothing in it is unpickled here.

    ``given_tokenizer`` and ``given_config`` stand for what the checkpoint lacks, or has in a form
    that is not read.
    """

    root: Path
    source: Path
    given_tokenizer: Path | None = None
    given_config: Path | None = None

    @property
    def prefix(self) -> str:
        """What the names of the stored tensors begin with."""
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
        """The model's settings by the keys of ``model_config.yaml``, with ``vocab_size``.

        A config of NeMo's own has none: there it is ``override_vocab_size``, or the tokenizer's.
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
        """Its size, and who says it."""
        for key in _VOCABULARY_KEYS:
            if self._stated.get(key) is not None:
                return self._stated[key], f"by {key}"
        return self.load_tokenizer().vocab_size, "by its tokenizer"

    @property
    def vocab_size_from(self) -> str:
        """Who says how large the vocabulary is; rows past it are padding."""
        return self._vocabulary[1]

    @property
    def weights(self) -> Path:
        """The distributed checkpoint's folder."""
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
        """What is in ``weights``, opened once."""
        return open_weights(self.weights)

    @cached_property
    def tensors(self) -> StoredTensors:
        """Name (without the prefix) -> (shape, dtype) of every tensor that is a weight."""
        return {
            name.removeprefix(self.prefix): entry
            for name, entry in self.store.tensors.items()
            if name.startswith(self.prefix) and not is_optimizer_state(name)
        }

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's folder."""
        return self.given_tokenizer or self._own_tokenizer()

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer; errors name the checkpoint, which may be unpacked elsewhere."""
        path = self.tokenizer
        return load_tokenizer(path, f"{self.source}: {path.name}")

    @cached_property
    def contract(self) -> dict[str, Any] | None:
        """``scoring_contract.json``, or None in an archive that is no reward model of ours."""
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
        """The section ``key`` of a file, in which megatron-core's own settings are."""
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
    """``weights/`` and ``context/`` of NeMo 2: settings are nemo-run's YAML, and none is run."""

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
    """What a setting may be; another object, such as a tensor, stands as its text: it fits none."""
    parts = value if type(value) in (list, tuple) else (value,)
    return value if all(type(part) in _PLAIN for part in parts) else shown(value)


def _existing(folder: Path, source: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{source}: it holds no {folder.name} folder")
    return folder


def folder_of(
    root: Path, source: Path, tokenizer: Path | None = None, config: Path | None = None
) -> NemoFolder:
    """The checkpoint in a folder, whoever wrote it; ``source`` names it in errors.

    Raises:
        CheckpointError: there is none of NeMo or Megatron.
    """
    kind, inner = _kind_of(root, source)
    return kind(inner, source, tokenizer, config)


def _kind_of(root: Path, source: Path) -> tuple[type[NemoFolder], Path]:
    """Whose checkpoint it is, and in which folder of ``root``."""
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
    """Say where a Hugging Face folder or a GGUF file goes that was given for one of NeMo's.

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
        )
    refuse_adapter(path, source)


def refuse_adapter(folder: Path, source: Path) -> None:
    """Say what a LoRA adapter lacks; raises as ``refuse_hugging_face`` does."""
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
