"""Open the source of a conversion: a Hugging Face folder, a model on the hub, or a GGUF file.

This module also compares the tensors of a checkpoint with those that its model family has.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_aligner.checkpoint.conversion_cache import (
    MODEL_FILES,
    TOKENIZER_FILES,
    find_or_download,
)
from nemo_aligner.checkpoint.decoder_tensors import (
    EMBEDDING,
    LAYERS,
    OUTPUT_LAYER,
    PREFIX,
    Shapes,
    layer_tensors,
    model_tensors,
)
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config
from nemo_aligner.checkpoint.hf.gguf import GgufCheckpoint, save_gguf_tokenizer
from nemo_aligner.checkpoint.hf.multimodal import (
    decoder_config,
    decoder_name,
    describe_dropped_parts,
    is_multimodal,
)
from nemo_aligner.checkpoint.hf.quantized.methods import read_format, with_dequantized
from nemo_aligner.checkpoint.hf.quantized.stored import UnreadableTensor
from nemo_aligner.checkpoint.hf.tensor_names import without_wrappers
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, refuse_adapter
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.config.dtypes import safetensors_dtypes
from nemo_aligner.contract.added_tokens import load_hf_tokenizer
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import CheckpointError, short, shown

_SINGLE_NAME, _INDEX_SUFFIX = "model.safetensors", ".safetensors.index.json"
_INDEX_NAME = f"model{_INDEX_SUFFIX}"
# Files to which LLaMA-Factory writes a reward head, separately from the other weights.
HEAD_NAME, _PICKLED_HEAD = "value_head.safetensors", "value_head.bin"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
# Limit of the index, which has a line of about 100 bytes for each tensor. 100 layers with 1,000
# experts each, more than any published model has, are 300,000 tensors.
_MAX_INDEX_BYTES = 2**27
_MAX_NAME_LENGTH = 255  # limit of common file systems; opening a longer name raises OSError
_DTYPES = safetensors_dtypes()


@dataclass(frozen=True)
class Source:
    """An opened checkpoint that can be converted.

    Attributes:
        config: content of ``config.json``.
        tensors: tensors by their Hugging Face names; their values are read when they are needed.
        save_tokenizer: writes the tokenizer's files into a new folder.
        contract: content of the scoring contract, if this package exported the checkpoint.
        remakes_tokenizer: whether ``save_tokenizer`` rebuilds the tokenizer's files, as it does
            from a GGUF file. Rebuilt files do not have the fingerprint in the contract.
        notes: lines for the user about how the checkpoint was read.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    save_tokenizer: Callable[[Path], None]
    contract: Mapping[str, Any] | None = None
    remakes_tokenizer: bool = False
    notes: tuple[str, ...] = ()


def open_source(source: str | Path) -> Source:
    """Open a checkpoint: a folder, a ``.gguf`` file, or a model on the hub.

    A source like ``org/name`` is first looked for as a folder, then on the hub.

    Raises:
        CheckpointError: the checkpoint does not exist, is incomplete or damaged, has pickled
            weights or an unsupported quantization, or the hub cannot be reached.
    """
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    if path.suffix.lower() == ".nemo":
        raise CheckpointError(
            "got a .nemo archive. An archive of this package needs no conversion; import one of "
            "NeMo with `nemo-aligner import`"
        )
    return _open_folder(find_or_download(source, MODEL_FILES))


def read_settings(source: Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Read a checkpoint's settings alone; of a model on the hub, nothing else is downloaded.

    Returns:
        The text decoder's ``config.json``; and the scoring contract, None without one.

    Raises:
        CheckpointError: there is no such checkpoint, it has no settings, or they are damaged.
    """
    if source.suffix.lower() == ".gguf":
        checkpoint = GgufCheckpoint(source)
        return checkpoint.config, checkpoint.contract
    folder = find_or_download(source, ["config.json", CONTRACT_NAME])
    config = read_json(folder / "config.json")
    config.pop("quantization_config", None)
    contract = folder / CONTRACT_NAME
    return (
        decoder_config(config, ()) if is_multimodal(config) else config,
        read_json(contract) if contract.is_file() else None,
    )


def tokenizer_folder(source: str | Path) -> Path:
    """Return ``source`` if it is a folder; otherwise download that hub model's tokenizer.

    Raises:
        CheckpointError: there is no such folder or model, or it has no ``tokenizer.json``.
    """
    folder = find_or_download(source, TOKENIZER_FILES)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{folder}: it has no tokenizer.json, the file of a fast tokenizer. transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it"
        )
    return folder


def find_exported_contract(source: str | Path) -> Path | None:
    """Find the scoring contract's file in a model; None unless this package exported the model.

    Args:
        source: a folder, or a model on the hub, of which only the settings are downloaded.

    Raises:
        CheckpointError: there is no such folder or model.
    """
    path = find_or_download(source, TOKENIZER_FILES) / CONTRACT_NAME
    return path if path.is_file() else None


def _open_gguf(path: Path) -> Source:
    if not path.is_file():
        raise CheckpointError("there is no such file. Correct the path")
    checkpoint = GgufCheckpoint(path)
    save_tokenizer = partial(save_gguf_tokenizer, path, checkpoint.fields)
    return Source(
        checkpoint.config,
        checkpoint.tensors,
        save_tokenizer,
        checkpoint.contract,
        remakes_tokenizer=True,
    )


def _open_folder(folder: Path) -> Source:
    # Check for an adapter first: its folder has no config.json, and the error below would mislead.
    refuse_adapter(folder, folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: it has no config.json, so it is not a Hugging Face checkpoint. Pass a "
            "checkpoint folder or a .gguf file"
        )
    config = read_json(folder / "config.json")
    quantized = read_format(config)
    tokenizer_folder(folder)
    contract = folder / CONTRACT_NAME
    weights = _find_weights(folder, config)
    dtypes = _DTYPES if quantized is None else {**_DTYPES, **quantized.dtypes}
    tensors, notes = without_wrappers(_open_safetensors(folder, weights, dtypes))
    if quantized is not None:
        tensors, quantization_notes = with_dequantized(tensors, quantized, config)
        notes += quantization_notes
    config.pop("quantization_config", None)
    if (folder / HEAD_NAME).is_file():
        tensors |= _read_headers(folder / HEAD_NAME)
    elif (folder / _PICKLED_HEAD).is_file():
        raise CheckpointError(
            f"{folder / _PICKLED_HEAD}: pickled reward heads are not supported. Save the head as "
            f"{HEAD_NAME}"
        )
    if contract.is_file():
        tensors |= _open_head_folders(folder)
    contract_fields = read_json(contract) if contract.is_file() else None
    source = Source(
        config,
        tensors,
        # Copy the tokenizer files of an export unchanged, because the contract has their
        # fingerprint.
        partial(_copy_tokenizer, folder, is_exported=contract_fields is not None),
        contract_fields,
        notes=(*_describe_unread_weights(folder, weights), *notes),
    )
    return _extract_decoder(source) if is_multimodal(config) else source


def _open_head_folders(folder: Path) -> dict[str, LazyTensor]:
    """Open a head that was exported for sentence-transformers: a folder for each of its layers.

    Returns:
        Lazy tensors by their names in a head, such as ``score.weight``.
    """
    return {
        name.replace("linear", file.parent.name): tensor
        for file in sorted(folder.glob(f"score*/{_SINGLE_NAME}"))
        for name, tensor in _read_headers(file).items()
    }


def _extract_decoder(source: Source) -> Source:
    """Return the text decoder of a multimodal model as a ``Source``.

    Tensors of the other parts are dropped, and a note for the user names these parts.
    """
    decoder_names = {name: decoder_name(name) for name in source.tensors}
    tensors = {
        new_name: source.tensors[name]
        for name, new_name in decoder_names.items()
        if new_name is not None
    }
    config = decoder_config(source.config, tensors)
    notes = (*source.notes, *describe_dropped_parts(decoder_names))
    return replace(source, config=config, tensors=tensors, notes=notes)


def _find_weights(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Find the file that transformers reads first: one file of all weights, or an index of shards.

    ``transformers_weights`` in the config may name the file. None if there is no such file.
    """
    name = config.get("transformers_weights")
    if name is not None:
        is_in_folder = isinstance(name, str) and Path(name).name == name
        if not (is_in_folder and name.endswith((".safetensors", _INDEX_SUFFIX))):
            raise CheckpointError(
                f"transformers_weights: got {shown(name)}, wanted a .safetensors file or its index "
                "in the same folder"
            )
        return folder / name
    files = [folder / _SINGLE_NAME, folder / _INDEX_NAME]
    return next((file for file in files if file.is_file()), None)


def _describe_unread_weights(folder: Path, weights: Path | None) -> Iterator[str]:
    """Yield a note if a folder has both a single file of weights and an index of shards.

    transformers reads the single file, and so does this package.
    """
    index = folder / _INDEX_NAME
    if weights is not None and weights != index and index.is_file():
        yield (
            f"note: reading {weights.name}, like transformers, and not the shards that "
            f"{index.name} lists"
        )


def _open_safetensors(
    folder: Path, weights: Path | None, dtypes: Mapping[str, torch.dtype]
) -> dict[str, LazyTensor]:
    """Open the tensors of a folder of safetensors, without reading their values.

    ``weights`` is a single file or an index of shards; None opens all files of the folder.
    ``dtypes`` are the supported dtypes, by their names in safetensors files.
    """
    if weights is None:
        files = _list_safetensors(folder)
    elif weights.name.endswith(_INDEX_SUFFIX):
        files = _read_index(weights)
    else:
        files = {weights.name: set()}
    tensors: dict[str, LazyTensor] = {}
    for name, listed in files.items():
        stored = _read_headers(folder / name, dtypes)
        missing = sorted(listed - stored.keys())
        if missing:
            raise CheckpointError(
                f"{folder / name}: tensor {short(missing[0])} is missing, which the index assigns "
                "to this file. Download the checkpoint again"
            )
        # Several files may contain the same tensor, so use only the tensors that the index assigns
        # to this file.
        tensors.update({key: stored[key] for key in listed or stored})
    return tensors


def _read_index(index: Path) -> dict[str, set[str]]:
    """Map each file name to the tensors that the index assigns to it.

    Names of files in other folders raise a CheckpointError, because an index from the hub is not
    trusted.
    """
    weight_map = read_json(index, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: it has no weight_map, which maps names of tensors to names of files"
        )
    files: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        # Unprintable characters, such as half of a surrogate pair, may make opening the file fail
        # with an error of another type.
        is_name = isinstance(name, str) and Path(name).name == name and name.isprintable()
        if not is_name or len(name) > _MAX_NAME_LENGTH:
            raise CheckpointError(
                f"{index}: got {shown(name)}, wanted file names in the same folder"
            )
        files.setdefault(name, set()).add(tensor)
    return dict(sorted(files.items()))


def _list_safetensors(folder: Path) -> dict[str, set[str]]:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: it has no *.safetensors files. Pickled weights (.bin) are not supported"
        )
    return {name: set() for name in files}


def _read_headers(path: Path, dtypes: Mapping[str, torch.dtype] = _DTYPES) -> dict[str, LazyTensor]:
    """Read the header of a safetensors file; return its tensors by name, without their values.

    Tensors of other dtypes than ``dtypes`` are ``UnreadableTensor``: the model may not need them.
    """
    tensors: dict[str, LazyTensor] = {}
    try:
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                header = stored.get_slice(name)
                kind = header.get_dtype()
                shape = tuple(header.get_shape())
                if kind not in dtypes:
                    tensors[name] = UnreadableTensor.of(
                        shape,
                        f"{path}: tensor {short(name)}: got the dtype {kind}, wanted one of "
                        f"{', '.join(dtypes)}; quantized weights need a supported "
                        "quantization_config in config.json",
                    )
                    continue
                tensors[name] = LazyTensor(
                    shape,
                    dtypes[kind],
                    partial(read_tensor, path, name),
                    partial(read_tensor, path, name),
                )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {short(error)}") from error
    return tensors


def read_tensor(path: Path, name: str, part: int | None = None) -> Tensor:
    """Read a tensor of a safetensors file to the CPU.

    With ``part``, read only the slice at this index of its first axis.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    # safe_open maps the file, and pages that were read stay in memory until it is closed. So open
    # and close it for each tensor.
    with safe_open(path, framework="pt") as stored:
        tensor = stored.get_tensor(name) if part is None else stored.get_slice(name)[part]
    check_finite(tensor, f"{path}: {name}")
    return tensor


def _copy_tokenizer(source: Path, folder: Path, *, is_exported: bool = False) -> None:
    """Copy a tokenizer's files, and write tokens that ``tokenizer.json`` lacks into it.

    With ``is_exported`` (the folder is an export of this package), the files are copied unchanged.
    """
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            # Not their modes: files that may only be read could not be rewritten below.
            shutil.copyfile(source / name, folder / name)
    if not is_exported:
        load_hf_tokenizer(folder, str(source)).save(folder)


# Names and shapes of the tensors that a model of a family must have, and comparison with a
# checkpoint.

REWARD_SUFFIX = "ForSequenceClassification"


def model_rules(
    family: ModelFamily, config: Config, *, has_output_layer: bool
) -> list[tuple[Rule, int | None]]:
    """List the rules of a family, each with its layer (None outside the layers).

    The rule of the output layer is listed only if ``has_output_layer``: a reward model has none.
    """
    return [
        (rule, layer)
        for rule, layer in family.rules(config)
        if has_output_layer or rule is not family.untied
    ]


def megatron_key(rule: Rule, layer: int | None, *, is_stacked: bool) -> str:
    """Return the name under which an archive stores a rule's Megatron tensor.

    Args:
        is_stacked: True if one stored tensor stacks all layers, so that the name has no layer
            number (``ModelShape.is_uniform``).
    """
    if layer is None:
        return PREFIX + rule.megatron
    return PREFIX + LAYERS + ("" if is_stacked else f"{layer}.") + rule.megatron


def hf_shapes(rules: list[tuple[Rule, int | None]], config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every Hugging Face tensor by its name.

    Args:
        config: NeMo config of the model, in which added query groups of zeros do not count.
    """
    decoder = ModelShape.from_config(config)
    outside, kinds = model_tensors(decoder), dict[ModelShape, Shapes]()
    outside[OUTPUT_LAYER] = outside[EMBEDDING]
    shapes = {}
    for rule, layer in rules:
        tensors = outside
        if layer is not None:
            of_layer = decoder.of_layer(layer + 1)
            tensors = kinds.get(of_layer) or kinds.setdefault(of_layer, layer_tensors(of_layer))
        size = tensors[rule.megatron]
        try:
            # A tensor on the meta device has no data, so this computes only the shapes of the
            # parts.
            parts = rule.split(torch.empty(size, device="meta"), config)
        except (RuntimeError, TypeError) as error:  # raised by torch if a size is too large
            raise CheckpointError(
                f"config.json: its sizes give the tensor {rule.megatron} the shape {list(size)}, "
                "which torch cannot create. Correct the sizes, such as hidden_size or vocab_size."
            ) from error
        for name, part in zip(rule.hf, parts, strict=True):
            shapes[name] = tuple(part.shape)
    return shapes


# transformers 5 keeps the matrices of all experts of a layer in two fused tensors: gate and up
# projections [E, 2 f, h] and down projections [E, h, f]. save_pretrained with
# ``save_original_format=False`` writes these names.
_FUSED = {
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
# The name of the first expert's matrix, of which the fused tensor lacks the number and the ending.
_FIRST_EXPERT = re.compile(r"(?<=\.mixer\.experts)\.0(\.\w+)\.weight$")
_FUSED_ROUTER = ("mlp.router.weight", "mlp.gate.weight")


def split_fused_experts(
    family: ModelFamily,
    rules: Sequence[tuple[Rule, int | None]],
    tensors: Mapping[str, LazyTensor],
) -> Mapping[str, LazyTensor]:
    """Split tensors that hold the matrices of all experts into one tensor for each matrix.

    Published files have a tensor for each matrix, and the families' rules expect that. Tensors that
    are not fused are returned unchanged, except that a prefix in ``ModelFamily.prefixes`` is
    replaced by the published one.
    """
    split = {family.published_name(name): tensor for name, tensor in tensors.items()}
    for rule, layer in rules:
        prefix = f"{family.layer_prefix}{layer}."
        names = (prefix + _FUSED.get(rule.megatron, ""), _FIRST_EXPERT.sub(r"\1", rule.hf[0]))
        # Not for gpt-oss and Gemma 4, whose rules expect the fused tensors.
        for fused in [split.pop(name) for name in names if name in split.keys() - set(rule.hf)]:
            split |= _split_fused(fused, rule.hf)
        if rule.megatron == _FUSED_ROUTER[0] and rule.hf[0] not in split:
            router = split.pop(prefix + _FUSED_ROUTER[1], None)
            split |= {} if router is None else {rule.hf[0]: router}
    return split


def _split_fused(fused: LazyTensor, names: Sequence[str]) -> dict[str, LazyTensor]:
    """Split ``fused [E, rows, in]`` into single matrices with the given names.

    Args:
        names: the names of the first expert's matrices, then those of the second, and so on.
    """
    read = fused.read_part
    num_experts = fused.shape[0] if len(fused.shape) == 3 else len(names) + 1
    parts, remainder = divmod(len(names), num_experts)
    # Ignore a tensor of another layout; check_tensors later reports the matrices as missing.
    if read is None or remainder or not parts or fused.shape[1] % parts:
        return {}
    rows = fused.shape[1] // parts
    size = (rows, *fused.shape[2:])

    def single(number: int) -> LazyTensor:
        expert, part = divmod(number, parts)
        first = part * rows
        if isinstance(fused, UnreadableTensor):
            return replace(fused, shape=size)
        return LazyTensor(size, fused.dtype, lambda: read(expert)[first : first + rows].clone())

    return {name: single(number) for number, name in enumerate(names)}


def check_tensors(
    family: ModelFamily,
    config: Config,
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, LazyTensor],
    dropped: Iterable[str] = (),
) -> None:
    """Check that a Hugging Face checkpoint has exactly the expected tensors.

    Args:
        expected: shapes by the names of the tensors.
        dropped: names of tensors that the checkpoint may have in addition.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape, or its values cannot be
            read; the message names the first such tensor.
    """
    tied = config["share_embeddings_and_output_weights"]
    ignored = (*family.unused, *(family.untied.hf if tied else ()))
    surplus = tensors.keys() - expected.keys() - {*dropped}
    unknown = sorted(name for name in surplus if not name.endswith(ignored))
    # Before missing tensors are reported: a tensor in an unsupported dtype may be the stored form
    # of one of them.
    for name in sorted(tensors.keys() & {*expected, *unknown}):
        if isinstance(tensor := tensors[name], UnreadableTensor):
            raise CheckpointError(tensor.problem)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of a {family.name} model are missing, the first is "
            f"{missing[0]}"
        )
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors do not belong to a {family.name} model, "
            f"the first is {short(unknown[0])}"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"tensor {name}: got shape {list(tensors[name].shape)}, wanted {list(shape)}"
            )
