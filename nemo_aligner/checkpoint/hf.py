"""A Hugging Face checkpoint (safetensors or GGUF) as a base ``.nemo``; no model is built."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_aligner.checkpoint.gguf import GgufCheckpoint
from nemo_aligner.checkpoint.hf_names import Family, add_zero_groups, find_family, hf_layer_name
from nemo_aligner.checkpoint.nemo import save_weights, write_nemo
from nemo_aligner.errors import CheckpointError

Readers = Mapping[str, Callable[[], Tensor]]
PREFIX = "model."
_INDEX_NAME = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
_NEMO_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: 16}
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class ConversionSummary:
    """What was converted, and where it is."""

    family: str
    parameters: int
    dtype: str
    layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    zero_groups: int
    output: Path

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        added = f"; query groups of zeros added: {self.zero_groups}" if self.zero_groups else ""
        return (
            f"{self.output}: {self.family}, {self.parameters:,} parameters in {self.dtype}, "
            f"{self.layers} layers of {self.hidden_size}, vocabulary of {self.vocab_size}, "
            f"{tied} embeddings{added}"
        )


@dataclass(frozen=True)
class _Source:
    config: Mapping[str, Any]
    tensors: Readers
    save_tokenizer: Callable[[Path], None]


def convert_hf_to_nemo(
    source: str | Path,
    output: str | Path,
    dtype: torch.dtype | None = None,
    tensor_parallel: int = 1,
) -> ConversionSummary:
    """Write the base model in ``source`` as the archive ``output``; one process, no network.

    ``source`` is a folder with ``config.json``, safetensors and a tokenizer, or a ``.gguf`` file.
    ``dtype`` None keeps what is stored (GGUF: fp32). Where ``tensor_parallel`` does not divide the
    model's query groups, groups of zeros are added, which change no output and never train.

    Raises:
        CheckpointError: an unknown family, an unsupported setting, or a tensor too few or too many.
    """
    source, output = Path(source), Path(output)
    found = _open_gguf(source) if source.suffix == ".gguf" else _open_folder(source)
    try:
        return _convert(found, output, dtype, tensor_parallel)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _convert(
    found: _Source, output: Path, dtype: torch.dtype | None, tensor_parallel: int
) -> ConversionSummary:
    family = find_family(found.config.get("model_type"))
    config = family.to_nemo(found.config)
    _check_names(family, config, found.tensors)
    groups = config["num_query_groups"]
    zero_groups = -groups % tensor_parallel
    tensors = _megatron_tensors(family, config, found.tensors, dtype, groups + zero_groups)
    if zero_groups:
        config["num_attention_heads"] += config["num_attention_heads"] // groups * zero_groups
        config["num_query_groups"] += zero_groups
        config["zero_query_groups"] = zero_groups
    stored = next(tensor.dtype for tensor in tensors.values())
    config["precision"] = _NEMO_PRECISIONS.get(stored, 32)
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".convert_", dir=output.parent) as scratch,
        _single_process_group(),
    ):
        weights, tokenizer = Path(scratch, "weights"), Path(scratch, "tokenizer")
        found.save_tokenizer(tokenizer)
        save_weights(dict(tensors), weights)
        write_nemo(output, config, weights, tokenizer)
    return ConversionSummary(
        family=family.name,
        parameters=sum(tensor.data.numel() for tensor in tensors.values()),
        dtype=_DTYPE_NAMES.get(stored, str(stored)),
        layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tied=config["share_embeddings_and_output_weights"],
        zero_groups=zero_groups,
        output=output,
    )


def _check_names(family: Family, config: Mapping[str, Any], readers: Readers) -> None:
    wanted = {
        hf_layer_name(name, layer) for rule, layer in family.rules(config) for name in rule.hf
    }
    missing = sorted(wanted - readers.keys())
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    ignored = ("lm_head.weight",) if config["share_embeddings_and_output_weights"] else ()
    unknown = sorted(
        name for name in readers.keys() - wanted if not name.endswith((*family.unused, *ignored))
    )
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors have no place in a {family.name} model, "
            f"the first is {unknown[0]}"
        )


def _megatron_tensors(
    family: Family,
    config: Mapping[str, Any],
    readers: Readers,
    dtype: torch.dtype | None,
    num_query_groups: int,
) -> dict[str, ShardedTensor]:
    """Whole tensors, named and placed as megatron-core does for a stack of equal layers."""
    tensors = {}
    for rule, layer in family.rules(config):
        parts = [readers[hf_layer_name(name, layer)]() for name in rule.hf]
        data = rule.join(parts, config)
        data = add_zero_groups(rule.megatron, data, config["num_query_groups"], num_query_groups)
        data = data.to(dtype or data.dtype).contiguous()
        if layer is None:
            key = PREFIX + rule.megatron
            tensors[key] = ShardedTensor.from_rank_offsets(key, data)
            continue
        tensors[f"{layer}.{rule.megatron}"] = ShardedTensor.from_rank_offsets(
            f"{PREFIX}decoder.layers.{rule.megatron}",
            data,
            (0, layer, config["num_layers"]),
            prepend_axis_num=1,
        )
    return tensors


@contextmanager
def _single_process_group() -> Iterator[None]:
    """megatron-core saves through torch.distributed; lend it a group of one where there is none."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise CheckpointError("a conversion runs in one process")
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _open_gguf(path: Path) -> _Source:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    checkpoint = GgufCheckpoint(path)
    return _Source(checkpoint.config, checkpoint.tensors, partial(_save_gguf_tokenizer, path))


def _save_gguf_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    # From a folder of its own: transformers would also take other tokenizer files that lie beside.
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, "model.gguf").symlink_to(path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(
            alone, gguf_file="model.gguf", local_files_only=True
        )
    tokenizer.save_pretrained(str(folder))


def _open_folder(folder: Path) -> _Source:
    config_path = folder / "config.json"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{config_path}: {error}; wanted a checkpoint folder or a .gguf file"
        ) from error
    return _Source(config, _safetensors_readers(folder), partial(_copy_tokenizer, folder))


def _safetensors_readers(folder: Path) -> Readers:
    readers = {}
    for path in _safetensors_files(folder):
        try:
            with safe_open(path, framework="pt") as stored:
                names = list(stored.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        readers.update({name: partial(_read_safetensor, path, name) for name in names})
    return readers


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / _INDEX_NAME
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index}: wanted file names in the same folder")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: got no *.safetensors, wanted some; pickled weights (.bin) are not read"
        )
    return files


def _read_safetensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as stored:
        return stored.get_tensor(name)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise CheckpointError(f"{source}: got no tokenizer.json; wanted a fast tokenizer's file")
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
