"""Sources of a conversion: a Hugging Face folder, a model of the hub, or a GGUF file."""

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

from nemo_aligner.checkpoint.decoder_tensors import (
    EMBEDDING,
    LAYERS,
    OUTPUT_LAYER,
    PREFIX,
    layer_tensors,
    model_tensors,
)
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config
from nemo_aligner.checkpoint.hf.gguf import GgufCheckpoint, save_gguf_tokenizer
from nemo_aligner.checkpoint.hf.tensor_names import without_wrappers
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, refuse_adapter
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.config.dtypes import safetensors_dtypes
from nemo_aligner.contract.added_tokens import load_hf_tokenizer
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, short, shown

_WHOLE_NAME, _INDEX_SUFFIX = "model.safetensors", ".safetensors.index.json"
_INDEX_NAME = f"model{_INDEX_SUFFIX}"
# LLaMA-Factory's reward head, beside the decoder.
HEAD_NAME, _PICKLED_HEAD = "value_head.safetensors", "value_head.bin"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Not downloaded: files in subfolders, which some repositories use for other formats, but for those
# of our exports' heads (score*); and Mistral's second copy of its weights.
_TOKENIZER = ["*.json", "*.jinja"]
_DOWNLOADED = ["*.safetensors", *_TOKENIZER]
_NOT_DOWNLOADED = ["[!s]*/*", "consolidated*"]
_LONGEST_NAME = 255  # of a file on the usual file systems; a longer one is an OSError to open
_DTYPES = safetensors_dtypes()


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert.

    Attributes:
        config: ``config.json``.
        tensors: lazy, by their Hugging Face names.
        save_tokenizer: writes the tokenizer's files into a new folder.
        contract: the scoring contract, in a folder or file that this package exported.
        remakes_tokenizer: its files are not those that the contract was made with.
        notes: what a user should know of how it was read, a line each.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    save_tokenizer: Callable[[Path], None]
    contract: Mapping[str, Any] | None = None
    remakes_tokenizer: bool = False
    notes: tuple[str, ...] = ()


def open_source(source: str | Path) -> Source:
    """Open a folder, a ``.gguf`` file, or a model of the hub (``org/name``, if no such folder).

    Raises:
        CheckpointError: there is none, it is incomplete or damaged, its weights are pickled or
            quantised, or the hub cannot be reached.
    """
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    if path.suffix.lower() == ".nemo":
        raise CheckpointError(
            "got a .nemo, which training and serving take as it is, or `nemo-aligner import`"
        )
    return _open_folder(_local(source, _DOWNLOADED))


def tokenizer_folder(source: str | Path) -> Path:
    """Find the folder ``source``, or download the tokenizer of that model of the hub."""
    folder = _local(source, _TOKENIZER)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{folder}: got no tokenizer.json; wanted a fast tokenizer's file, as transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it"
        )
    return folder


def find_exported_contract(source: str | Path) -> Path | None:
    """Find the scoring contract next to a reward model that this package exported.

    Args:
        source: a folder, or a model of the hub, of which the settings are then downloaded.

    Raises:
        CheckpointError: there is neither; nothing was asked of the hub about a path.
    """
    path = _local(source, _TOKENIZER) / CONTRACT_NAME
    return path if path.is_file() else None


def _local(source: str | Path, files: list[str]) -> Path:
    """Return a folder as it is, or download ``files`` of a model of the hub."""
    path = Path(source)
    if path.exists():
        return path
    missing = f"{source}: there is no such folder or file"
    if not _HUB_NAME.fullmatch(str(source)):
        raise CheckpointError(
            f"{missing}. Give the path of one, or the name of a model of the hub as "
            "ORGANIZATION/NAME"
        )
    # The hub is not queried for a path with a typing error.
    if path.parent.is_dir():
        raise CheckpointError(
            f"{missing}, and {path.parent} is a folder here. Give the path of one in it, or run "
            "from another folder if you mean the model of the hub"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(str(source), allow_patterns=files, ignore_patterns=_NOT_DOWNLOADED)
        )
    except Exception as error:  # whatever the network library raises
        raise CheckpointError(
            f"there is no such folder, and the hub gave no such model: {error}"
        ) from error


def _open_gguf(path: Path) -> Source:
    if not path.is_file():
        raise CheckpointError("no such file")
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
    # Before the rest: an adapter lacks a config.json, which would be the error otherwise.
    refuse_adapter(folder, folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: got no config.json; wanted a checkpoint folder or a .gguf file"
        )
    config = read_json(folder / "config.json")
    quantization = config.pop("quantization_config", None)
    # transformers keeps this one when it saves what it has read of a GGUF file, in plain tensors.
    is_of_gguf = isinstance(quantization, dict) and quantization.get("quant_method") == "gguf"
    if quantization is not None and not is_of_gguf:
        raise CheckpointError(
            f"quantization_config: got {shown(quantization)}, which is not supported; wanted "
            "weights as they were trained"
        )
    tokenizer_folder(folder)
    contract = folder / CONTRACT_NAME
    weights = _weights_file(folder, config)
    tensors, wrapper_notes = without_wrappers(_safetensors(folder, weights))
    if (folder / HEAD_NAME).is_file():
        tensors |= _outlines(folder / HEAD_NAME)
    elif (folder / _PICKLED_HEAD).is_file():
        raise CheckpointError(
            f"{folder / _PICKLED_HEAD}: got a pickled reward head, which is not read; wanted it as "
            f"{HEAD_NAME}"
        )
    if contract.is_file():
        tensors |= _head_of_modules(folder)
    contract_fields = read_json(contract) if contract.is_file() else None
    found = Source(
        config,
        tensors,
        # The contract of an export has the fingerprint of the files as they are.
        partial(_copy_tokenizer, folder, is_exported=contract_fields is not None),
        contract_fields,
        notes=(*_describe_unread_weights(folder, weights), *wrapper_notes),
    )
    return _text_decoder(found) if is_multimodal(config) else found


def _head_of_modules(folder: Path) -> dict[str, LazyTensor]:
    """Layers of a head in folders of their own, as in our exports for sentence-transformers."""
    return {
        name.replace("linear", file.parent.name): tensor
        for file in sorted(folder.glob(f"score*/{_WHOLE_NAME}"))
        for name, tensor in _outlines(file).items()
    }


def _text_decoder(found: Source) -> Source:
    """The decoder in a multimodal model, as if it were alone."""
    named = {name: decoder_name(name) for name in found.tensors}
    tensors = {ours: found.tensors[name] for name, ours in named.items() if ours is not None}
    config = decoder_config(found.config, tensors)
    notes = (*found.notes, *describe_others(named))
    return replace(found, config=config, tensors=tensors, notes=notes)


def _weights_file(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Find the file that transformers loads first: the whole model, or an index of its shards.

    A config may name it (``transformers_weights``). None if there is neither.
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
    files = [folder / _WHOLE_NAME, folder / _INDEX_NAME]
    return next((file for file in files if file.is_file()), None)


def _describe_unread_weights(folder: Path, weights: Path | None) -> Iterator[str]:
    """Say which index is not read, where a folder was saved both whole and in shards."""
    index = folder / _INDEX_NAME
    if weights is not None and weights != index and index.is_file():
        yield f"note: read {weights.name}, as transformers does, and not the shards of {index.name}"


def _safetensors(folder: Path, weights: Path | None) -> dict[str, LazyTensor]:
    if weights is None:
        files = _files_without_index(folder)
    elif weights.name.endswith(_INDEX_SUFFIX):
        files = _files_of_index(weights)
    else:
        files = {weights.name: set()}
    tensors: dict[str, LazyTensor] = {}
    for name, listed in files.items():
        found = _outlines(folder / name)
        missing = sorted(listed - found.keys())
        if missing:
            raise CheckpointError(f"{folder / name}: tensor {short(missing[0])} is missing")
        # Only what the index lists: files may hold more than one copy.
        tensors.update({key: found[key] for key in listed or found})
    return tensors


def _files_of_index(index: Path) -> dict[str, set[str]]:
    """Map each file name to the tensors that the index assigns to it.

    Only names in the same folder are taken: an index from the hub must not point at other files.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: got no weight_map, wanted tensor and file names")
    files: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        # Not printable, such as half of a surrogate pair: no file has such a name.
        is_name = isinstance(name, str) and Path(name).name == name and name.isprintable()
        if not is_name or len(name) > _LONGEST_NAME:
            raise CheckpointError(
                f"{index}: got {shown(name)}, wanted file names in the same folder"
            )
        files.setdefault(name, set()).add(tensor)
    return dict(sorted(files.items()))


def _files_without_index(folder: Path) -> dict[str, set[str]]:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: got no *.safetensors, wanted some; pickled weights (.bin) are not read"
        )
    return {name: set() for name in files}


def _outlines(path: Path) -> dict[str, LazyTensor]:
    """Lazy tensors of a file by name, from its header."""
    tensors = {}
    try:
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                header = stored.get_slice(name)
                kind = header.get_dtype()
                if kind not in _DTYPES:
                    raise CheckpointError(
                        f"{path}: tensor {short(name)}: got {kind} numbers, wanted one of "
                        f"{', '.join(_DTYPES)}; quantised weights are not read"
                    )
                tensors[name] = LazyTensor(
                    tuple(header.get_shape()),
                    _DTYPES[kind],
                    partial(read_tensor, path, name),
                    partial(read_tensor, path, name),
                )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {short(error)}") from error
    return tensors


def read_tensor(path: Path, name: str, part: int | None = None) -> Tensor:
    """Read a tensor of a safetensors file into memory of its own, or a part of its first axis.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    # Opened anew each time: pages read from a mapped file stay resident until it is closed.
    with safe_open(path, framework="pt") as stored:
        tensor = stored.get_tensor(name) if part is None else stored.get_slice(name)[part]
    check_finite(tensor, f"{path}: {name}")
    return tensor


def _copy_tokenizer(source: Path, folder: Path, *, is_exported: bool = False) -> None:
    """Copy the files of a tokenizer, with all tokens in ``tokenizer.json``."""
    folder.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    if not is_exported:
        load_hf_tokenizer(folder, str(source)).save(folder)


# The text decoder inside a model of several modalities. The models that are read call it like any
# other one, on embedded tokens, so that for a text alone they are that decoder.
# ``tests/checkpoint/hf/test_multimodal.py`` compares each of them.

# model_type of the whole, and that of its text_config unless it says otherwise.
_DECODERS = {
    "gemma3": "gemma3_text",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
_QWEN2 = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "max_window_layers": 80}
# Decoders that are a known family's: that family, and the defaults of theirs that it has not.
# Their rotation by three coordinates (mrope) is the usual one for a text, whose three are equal.
_SAME_AS: dict[str, tuple[str, dict[str, Any]]] = {
    # LLaVA's releases leave out what does not differ from transformers' class.
    "llama": ("llama", {**_SIZES, "intermediate_size": 11008, "max_position_embeddings": 2048}),
    "mistral": ("mistral", {**_SIZES, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "qwen2_vl_text": ("qwen2", _QWEN2),
    "qwen2_5_vl_text": ("qwen2", _QWEN2),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 500000.0}),
}
_WHY_NOT = {
    "gemma3n": "its decoder has embeddings in every layer",
    "llama4": "the layout of its experts is not read",
    "mllama": "layers of its decoder attend to images",
    "paligemma": "its decoder sees a prompt in both directions",
    "qwen3_vl_moe": "the layout of its experts is not read",
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_DECODER = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")
_OTHER_PARTS = re.compile(
    r"(?:model\.)?(vision_tower|vision_model|visual|multi_modal_projector|image_newline)\b"
)
_HEADS = ("lm_head.", "score.")
# Settings of a reward head, which stand beside the decoder's.
_OF_HEAD = (
    "architectures",
    "id2label",
    "problem_type",
    "value_head_prefix",
    "reward_token_id",
    "classifier_from_token",
    "method",
    "mean",
    "std",
)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Tell if a ``config.json`` is of a model with more than a text decoder."""
    return config.get("model_type") in tuple(_DECODERS) or isinstance(
        config.get("text_config"), Mapping
    )


def decoder_config(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Extract the decoder's ``config.json`` from that of the whole.

    Args:
        names: the decoder's tensors, by ``decoder_name``.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _DECODERS:
        why = _WHY_NOT.get(kind, "") if isinstance(kind, str) else ""
        raise CheckpointError(
            f"model_type: got {shown(kind)}, a model with more than a text decoder"
            + (f": {why}" if why else "")
            + f"; wanted a decoder, or one of {', '.join(_DECODERS)}"
        )
    inside = config.get("text_config")
    if not isinstance(inside, Mapping | None):
        raise CheckpointError(f"text_config: got {shown(inside)}, wanted keys and values")
    # Older Qwen-VL has the decoder's settings among the others.
    text = {key: value for key, value in (inside or config).items() if value is not None}
    own = text["model_type"] if inside and "model_type" in text else _DECODERS[kind]
    family, defaults = _SAME_AS.get(own, (own, {})) if isinstance(own, str) else (own, {})
    of_head: dict[str, Any] = {key: config[key] for key in _OF_HEAD if key in config}
    tied = [each.get("tie_word_embeddings") for each in (config, text)]
    return {
        **defaults,
        **text,
        **{key: _without_mrope(text[key]) for key in _ROPE_KEYS if key in text},
        **of_head,
        "model_type": family,
        "tie_word_embeddings": next(
            (each for each in tied if each is not None), "lm_head.weight" not in set(names)
        ),
    }


def _without_mrope(rope: Any) -> Any:
    if not isinstance(rope, Mapping):
        return rope
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def decoder_name(name: str) -> str | None:
    """Name of a tensor in the decoder alone; None for one of another part."""
    if _OTHER_PARTS.match(name):
        return None
    found = _DECODER.fullmatch(name)
    if found is None:
        return name
    rest = found[1]
    return rest if rest.startswith(_HEADS) else f"model.{rest}"


def describe_others(names: Iterable[str]) -> Iterator[str]:
    """Say in a line which parts of the whole were left out, if any."""
    left = [name for name in names if decoder_name(name) is None]
    parts = sorted({found[1] for name in left if (found := _OTHER_PARTS.match(name))})
    if left:
        yield f"left out: {len(left)} tensors of other parts ({', '.join(parts)})"


# Expected tensors of a model: names and shapes.

REWARD_SUFFIX = "ForSequenceClassification"


def model_rules(
    family: ModelFamily, config: Config, *, has_output_layer: bool
) -> list[tuple[Rule, int | None]]:
    """List every rule with its layer number; a reward model has no output layer."""
    return [
        (rule, layer)
        for rule, layer in family.rules(config)
        if has_output_layer or rule is not family.untied
    ]


def megatron_key(rule: Rule, layer: int | None) -> str:
    """Key of a rule's tensor in a distributed checkpoint, where all layers share one."""
    return PREFIX + ("" if layer is None else LAYERS) + rule.megatron


def hf_shapes(rules: list[tuple[Rule, int | None]], config: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor by name; ``config`` has no added query groups."""
    decoder = ModelShape.from_config(config)
    of_model, of_layer = model_tensors(decoder), layer_tensors(decoder)
    of_model[OUTPUT_LAYER] = of_model[EMBEDDING]
    shapes = {}
    for rule, layer in rules:
        size = (of_model if layer is None else of_layer)[rule.megatron]
        try:
            # Tensors without data: a rule's split says the shapes, whatever the model's size.
            parts = rule.split(torch.empty(size, device="meta"), config)
        except (RuntimeError, TypeError) as error:  # sizes that overflow torch's counts
            raise CheckpointError(
                f"config.json: it asks for a {rule.megatron} of {size}"
            ) from error
        for name, part in zip(rule.hf, parts, strict=True):
            shapes[name] = tuple(part.shape)
    return shapes


# How transformers 5 has the matrices of a layer's experts in memory, and writes them if it is told
# to (``save_original_format=False``): a gate and a projection in one, [E, 2 f, h], and [E, h, f].
_FUSED = {
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
_FUSED_ROUTER = ("mlp.router.weight", "mlp.gate.weight")


def with_single_experts(
    family: ModelFamily,
    rules: Sequence[tuple[Rule, int | None]],
    tensors: Mapping[str, LazyTensor],
) -> Mapping[str, LazyTensor]:
    """Replace fused matrices of experts by those of single ones, as published files have them."""
    found = dict(tensors)
    for rule, layer in rules:
        prefix = f"{family.layer_prefix}{layer}."
        whole = found.pop(prefix + _FUSED.get(rule.megatron, ""), None)
        if whole is not None:
            found |= _apart(whole, rule.hf)
        if rule.megatron == _FUSED_ROUTER[0] and rule.hf[0] not in found:
            router = found.pop(prefix + _FUSED_ROUTER[1], None)
            found |= {} if router is None else {rule.hf[0]: router}
    return found


def _apart(whole: LazyTensor, names: Sequence[str]) -> dict[str, LazyTensor]:
    """Single matrices of ``whole [E, rows, in]``, with the names of each expert side by side."""
    read = whole.read_part
    # How many names an expert has; a rest, or none, means another layout.
    parts, odd = divmod(len(names), whole.shape[0] if len(whole.shape) == 3 else len(names) + 1)
    if read is None or odd or not parts or whole.shape[1] % parts:
        return {}  # the names are then missing, and named
    rows = whole.shape[1] // parts
    size = (rows, *whole.shape[2:])

    def single(number: int) -> LazyTensor:
        expert, part = divmod(number, parts)
        first = part * rows
        return LazyTensor(size, whole.dtype, lambda: read(expert)[first : first + rows].clone())

    return {name: single(number) for number, name in enumerate(names)}


def check_tensors(
    family: ModelFamily,
    config: Config,
    wanted: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, LazyTensor],
    left_out: Iterable[str] = (),
) -> None:
    """Check that a Hugging Face checkpoint has exactly the expected tensors, and ``left_out``.

    Raises:
        CheckpointError: it names the first tensor that is missing, unknown, or of another shape.
    """
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    tied = config["share_embeddings_and_output_weights"]
    ignored = (*family.unused, *(family.untied.hf if tied else ()))
    others = tensors.keys() - wanted.keys() - {*left_out}
    unknown = sorted(name for name in others if not name.endswith(ignored))
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors have no place in a {family.name} model, "
            f"the first is {short(unknown[0])}"
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"tensor {name}: got shape {list(tensors[name].shape)}, wanted {list(shape)}"
            )
