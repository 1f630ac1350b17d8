"""Export LoRA adapters and the reward head as an adapter for peft.

Tensors have the names that peft 0.17 writes for ``TaskType.SEQ_CLS``: two matrices for each linear
layer, and the complete reward head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.checkpoint.conversion_cache import TOKENIZER_FILES, find_or_download
from nemo_aligner.checkpoint.hf.body_with_head import quiet_about_heads
from nemo_aligner.checkpoint.hf.card import model_card
from nemo_aligner.checkpoint.hf.check import (
    CheckedText,
    compare,
    compute_reference_logits,
    encode_texts,
    transformers_logits,
)
from nemo_aligner.checkpoint.hf.export import atomic_folder
from nemo_aligner.checkpoint.hf.exported_tokenizer import (
    choose_pad,
    write_json,
    write_tokenizer,
)
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD, ModelFamily
from nemo_aligner.checkpoint.hf.multimodal import decoder_config, is_multimodal
from nemo_aligner.checkpoint.hf.reward_archive import (
    ExportOptions,
    RewardArchive,
    build_exported_head,
    convert_logits,
)
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX
from nemo_aligner.checkpoint.hf.transformers_classes import has_class, load_pretrained
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.reward_model import reward_model_of
from nemo_aligner.checkpoint.safe_load import bounded_torch_load, read_json
from nemo_aligner.config.common import Precision
from nemo_aligner.config.kernels import TORCH_KERNELS
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_plain_reading
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.lora import fold_into_weight
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import check_is_linear
from nemo_aligner.models.shapes.lora import EXPERT_LINEARS, LoraShape
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import CheckpointError

_CONFIG_NAME, _WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
# Prefix of peft's wrapper around the base model.
_PREFIX = "base_model.model."
# Prefix of a decoder's modules, in a model by itself and in a multimodal one.
_DECODER, _INNER_DECODER = "model.", "model.language_model."
# transformers 5 renames the weights of these models' files only for its own classes, and has none
# with a reward head: the class in the model card would have random weights.
_WITHOUT_CLASS = ("qwen2_vl", "qwen2_5_vl")


@dataclass(frozen=True)
class _BaseModel:
    """The base model onto which peft will load the adapter.

    Attributes:
        name: a folder, or a name on the hub.
        is_multimodal: whether it has further parts, such as a vision encoder.
        has_class: whether transformers has a class that loads it with a reward head.
        family: model family of the archive; its modules have the same names.
    """

    name: str
    is_multimodal: bool
    has_class: bool
    family: ModelFamily

    @classmethod
    def of(cls, name: str, archive: RewardArchive) -> _BaseModel:
        """Read the base model's ``config.json``; of a model on the hub, download only settings.

        Raises:
            CheckpointError: there is no such model, it is not supported, or its modules have other
                names than those of the archive's family.
        """
        config = read_json(find_or_download(name, TOKENIZER_FILES) / "config.json")
        has_parts = is_multimodal(config)
        try:
            decoder = decoder_config(config, ()) if has_parts else config
            family = find_family(decoder.get("model_type"), decoder)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        if not _has_same_names(family, archive):
            raise CheckpointError(
                f"{name}: model_type: got {family.name}, whose tensors have other names than those "
                f"of {archive.family.name}, the family of the reward model. Pass a base model of "
                "that family, or export without --adapter-of"
            )
        model_type = config["model_type"]
        if model_type in _WITHOUT_CLASS:
            raise CheckpointError(
                f"{name}: model_type: got {model_type}, which transformers cannot load with a "
                "reward head, so peft could not load the adapter. Export without --adapter-of"
            )
        if not has_parts:
            model_type = archive.family.to_hf(archive.config)["model_type"]
        return cls(name, has_parts, has_class(REWARD_SUFFIX, model_type), archive.family)

    def module_name(self, weight: str) -> str:
        """Return the name in transformers' model of the module with the archive's ``weight``."""
        name = self.family.name_in_memory(weight).removesuffix(".weight")
        return _INNER_DECODER + name.removeprefix(_DECODER) if self.is_multimodal else name


def _has_same_names(family: ModelFamily, archive: RewardArchive) -> bool:
    """Tell if the archive's decoder has the same tensor names as a model of ``family``."""
    if family is archive.family:
        return True
    # A family's rules are only defined for its own decoders.
    if not family.has(ModelShape.from_config(archive.config)):
        return False
    names, archive_names = (
        [rule.hf for rule, _ in either.rules(archive.config)] for either in (family, archive.family)
    )
    return names == archive_names


def export_adapter(
    archive: str | Path,
    output: str | Path,
    base: str,
    layout: ParallelLayout,
    options: ExportOptions,
) -> str:
    """Write LoRA and head of the reward model ``archive`` as the new folder ``output``.

    Only one process may call this. If ``base`` is a folder, the adapter is loaded onto that model
    and must compute the archive's rewards within 1e-4; if it does not, ``output`` is not created.

    Args:
        base: the base model that peft will load: a folder, or a name on the hub.
        options: options of the export. ``dtype`` and ``head`` have no effect: an adapter's weights
            keep their dtype, and peft supports only one form of the head.

    Returns:
        Lines to print.

    Raises:
        CheckpointError: ``output`` exists; the archive is unsafe, is not a reward model or has no
            LoRA adapter; the base model cannot be read or is another; or the adapter computes other
            rewards.
    """
    output = Path(output)
    with atomic_folder(output) as staging, open_nemo(archive) as folder:
        return _export_adapter(folder, staging, output, base, layout, options)


def _export_adapter(
    folder: NemoFolder,
    staging: Path,
    output: Path,
    base_name: str,
    layout: ParallelLayout,
    options: ExportOptions,
) -> str:
    from transformers import AutoTokenizer

    archive = RewardArchive.of(folder)
    shape = ModelShape.from_config(folder.config)
    lora = _require_lora(folder, archive.lora, shape)
    base = _BaseModel.of(base_name, archive)
    say(f"scoring samples with {folder.source} ...")
    loaded = reward_model_of(folder, layout, Precision.fp32, TORCH_KERNELS)
    contract = ScoringContract.from_dict(folder.contract or {})
    check_plain_reading(contract, str(folder.source), "a reward model of Hugging Face")
    check_is_linear(shape.head, str(folder.source), "an adapter of peft")
    head, exported = build_exported_head(archive, contract, options)
    exported = replace(exported, base_precision=contract.base_precision)
    texts = encode_texts(contract, loaded.tokenizer)
    logits = compute_reference_logits(loaded.model, texts, layout)
    logits = convert_logits(logits, contract, head, merge=options.merge)
    last_ids = {text.token_ids[-1] for text in texts}
    pad_token, pad_id = choose_pad(loaded.tokenizer, contract, last_ids)
    if pad_id >= archive.config["vocab_size"]:
        raise CheckpointError(
            f"{folder.source}: its tokenizer has no pad token, and an adapter cannot add one to "
            "the base model. Export it without --adapter-of"
        )
    say(f"writing {output} ...")
    _write_tensors(archive, head.tensors[HF_HEAD], base, staging / _WEIGHTS_NAME)
    write_json(staging / _CONFIG_NAME, _build_config(archive, lora, base))
    write_json(staging / CONTRACT_NAME, exported.to_dict())
    write_tokenizer(staging, loaded.tokenizer, exported, pad_token)
    card_inputs = (options.name_card(output), exported, pad_token, folder, options.base_license)
    card = model_card(*card_inputs, contract.dtype, base_name, is_loaded_with_head=base.has_class)
    (staging / "README.md").write_text(card, encoding="utf-8")
    lines = [
        f"{output}: adapter of {base_name}: LoRA of {lora}, and the head of "
        f"{', '.join(exported.attributes)}",
        f"scoring contract: {exported.hash}",
    ]
    if not Path(base_name).is_dir():
        return "\n".join([*lines, f"NOT CHECKED: {base_name} is not a folder on this machine"])
    say(f"scoring the same samples with {base_name} ...")
    tokenizer = load_pretrained(AutoTokenizer, staging, local_files_only=True)
    model = _load_adapted(base, staging, lora.scale, pad_id)
    if lora.base_precision is not None:
        lines.append(_describe_dense_base(base_name, lora, model, tokenizer, texts, logits))
        del model
        model = _load_adapted(base, staging, lora.scale, pad_id, archive)
    difference = compare(tokenizer, model, exported, texts, logits)
    lines.append(
        f"checked: {len(texts)} samples, in batches of one and padded; the largest difference of "
        f"a reward is {difference:.1e}"
    )
    return "\n".join(lines)


def _describe_dense_base(
    base: str,
    lora: LoraShape,
    model: Any,
    tokenizer: Any,
    texts: Sequence[CheckedText],
    logits: Tensor,
) -> str:
    """Tell how far rewards are from the archive's where the base is not quantized."""
    dense = [transformers_logits(model, tokenizer, [text])[0] for text in texts]
    difference = float((torch.cat(dense) - logits).abs().max())
    precision = "" if lora.base_precision is None else lora.base_precision.value
    return (
        f"base precision: {precision}. The adapter was trained on a base in {precision}; on {base} "
        f"without quantization, a reward differs by up to {difference:.1e}"
    )


def _require_lora(folder: NemoFolder, lora: LoraShape | None, shape: ModelShape) -> LoraShape:
    """Return the archive's LoRA shape; raise CheckpointError if peft cannot represent it."""
    if lora is None:
        raise CheckpointError(
            f"{folder.source}: it has no LoRA adapter. Export it without --adapter-of"
        )
    if shape.experts is not None and set(lora.targets) & EXPERT_LINEARS.keys():
        raise CheckpointError(
            f"{folder.source}: it has LoRA on experts, which peft does not support. Export it "
            "without --adapter-of"
        )
    return lora


def _write_tensors(archive: RewardArchive, head: Tensor, base: _BaseModel, path: Path) -> None:
    tensors = {f"{_PREFIX}{HF_HEAD}": head}
    for name, low, high in archive.adapters():
        linear = _PREFIX + base.module_name(name)
        # Copy A, because several weights may share it, and safetensors refuses to write the same
        # memory under two names.
        tensors[f"{linear}.lora_A.weight"] = low.clone()
        tensors[f"{linear}.lora_B.weight"] = high.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def _build_config(archive: RewardArchive, lora: LoraShape, base: _BaseModel) -> dict[str, Any]:
    # peft adapts every module whose name ends with one of target_modules, so the last part of each
    # name suffices for all layers.
    modules = [base.module_name(name) for name, *_ in archive.adapters()]
    targets: list[str] | str = sorted({module.rpartition(".")[2] for module in modules})
    if base.is_multimodal:
        # The other parts have modules of the same names. peft reads a string as a regex.
        targets = rf"{re.escape(_INNER_DECODER)}.+\.({'|'.join(targets)})"
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "base_model_name_or_path": base.name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": targets,
        "modules_to_save": [HF_HEAD.removesuffix(".weight")],
        "inference_mode": True,
    }


def _reward_model_class(base: str) -> Any:
    """Return the class that loads the model ``base`` with a linear head on top.

    It is transformers' ``ForSequenceClassification`` of that model. If transformers has none, the
    class is built here from transformers' generic code for such classes.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES
    from transformers import MODEL_MAPPING, AutoConfig
    from transformers.modeling_layers import GenericForSequenceClassification

    config = type(load_pretrained(AutoConfig, base, local_files_only=True))
    if config in CLASSES:
        return CLASSES[config]
    decoder: Any = MODEL_MAPPING[config]
    bases = GenericForSequenceClassification, decoder.__base__
    # If multimodal models also use this decoder, its base class has their config class, so replace
    # it.
    return type("RewardModel", bases, {"config_class": config})


def _load_adapted(
    base: _BaseModel,
    folder: Path,
    scale: float,
    pad_id: int,
    archive: RewardArchive | None = None,
) -> Any:
    """Load the base model with transformers in fp32, and fold the adapter in ``folder`` into it.

    Args:
        base: the base model, a folder.
        scale: factor of ``B A``, LoRA's product, when it is added to a weight.
        pad_id: id of the pad token, by which transformers finds a sample's last token.
        archive: replaces the base's linear weights by this archive's, which are dequantized.

    Returns:
        transformers' reward model on this rank's device, with the adapter's head.
    """
    tensors = load_file(folder / _WEIGHTS_NAME)
    head = tensors.pop(_PREFIX + HF_HEAD)
    try:
        with quiet_about_heads(), bounded_torch_load():  # the base model's weights may be pickles
            model = load_pretrained(
                _reward_model_class(base.name),
                base.name,
                dtype=torch.float32,
                local_files_only=True,
                num_labels=head.size(0),
            )
    except Exception as error:  # third-party code may raise anything
        raise CheckpointError(f"transformers cannot load {base.name}: {error}") from error
    # The adapter is applied here, so that peft need not be installed.
    model.score.weight.data = head
    model.config.get_text_config().pad_token_id = pad_id
    if archive is not None:
        for name, weight in archive.base_linears():
            _find_weight(model, base, base.module_name(name), weight.shape).data = weight.float()
    for name in {name.rpartition(".lora_")[0] for name in tensors}:
        low, high = (tensors[f"{name}.lora_{letter}.weight"] for letter in "AB")
        size = high.size(0), low.size(1)
        weight = _find_weight(model, base, name.removeprefix(_PREFIX), size)
        weight.data = fold_into_weight(weight.data, low, high, scale)
    return model.to(current_device()).eval()


def _find_weight(model: Any, base: _BaseModel, module: str, size: Sequence[int]) -> Tensor:
    """Return the weight of a module; raise CheckpointError if it has not the shape ``size``."""
    try:
        weight: Tensor = model.get_parameter(f"{module}.weight")
        problem = f"got shape {list(weight.shape)}"
    except AttributeError:
        problem = "there is no such module"
    else:
        if tuple(weight.shape) == tuple(size):
            return weight
    raise CheckpointError(
        f"{base.name}: {module}: {problem}, but the adapter has {list(size)}, so this is not the "
        "base of the reward model. Pass the model from which it was trained"
    )
