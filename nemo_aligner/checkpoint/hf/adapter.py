"""Export LoRA adapters and the reward head as an adapter for peft.

Tensors have the names that peft 0.17 writes for ``TaskType.SEQ_CLS``: two matrices for each linear
layer, and the complete reward head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD
from nemo_aligner.checkpoint.hf.reward_archive import (
    ExportOptions,
    RewardArchive,
    build_exported_head,
    convert_logits,
)
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX
from nemo_aligner.checkpoint.hf.transformers_classes import has_class
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.reward_model import reward_model_of
from nemo_aligner.checkpoint.safe_load import bounded_torch_load
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import PointwiseChoice
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
            LoRA adapter; or the adapter computes other rewards.
    """
    output = Path(output)
    with atomic_folder(output) as staging, open_nemo(archive) as folder:
        return _export_adapter(folder, staging, output, base, layout, options)


def _export_adapter(
    folder: NemoFolder,
    staging: Path,
    output: Path,
    base: str,
    layout: ParallelLayout,
    options: ExportOptions,
) -> str:
    from transformers import AutoTokenizer

    archive = RewardArchive.of(folder)
    shape = ModelShape.from_config(folder.config)
    lora = _require_lora(folder, archive.lora, shape)
    say(f"scoring samples with {folder.source} ...")
    loaded = reward_model_of(folder, layout, Precision.fp32, PointwiseChoice.eager)
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
    _write_tensors(archive, head.tensors[HF_HEAD], staging / _WEIGHTS_NAME)
    write_json(staging / _CONFIG_NAME, _build_config(archive, lora, base))
    write_json(staging / CONTRACT_NAME, exported.to_dict())
    write_tokenizer(staging, loaded.tokenizer, exported, pad_token)
    card_arguments = (options.name_card(output), exported, pad_token, folder, options.base_license)
    is_known = has_class(REWARD_SUFFIX, archive.family.to_hf(archive.config)["model_type"])
    card = model_card(*card_arguments, contract.dtype, base, is_loaded_with_head=is_known)
    (staging / "README.md").write_text(card, encoding="utf-8")
    lines = [
        f"{output}: adapter of {base}: LoRA of {lora}, and the head of "
        f"{', '.join(exported.attributes)}",
        f"scoring contract: {exported.hash}",
    ]
    if not Path(base).is_dir():
        return "\n".join([*lines, f"NOT CHECKED: {base} is not a folder on this machine"])
    say(f"scoring the same samples with {base} ...")
    tokenizer = AutoTokenizer.from_pretrained(staging, local_files_only=True)
    model = _load_adapted(base, staging, lora.scale, pad_id)
    if lora.base_precision is not None:
        lines.append(_describe_dense_base(base, lora, model, tokenizer, texts, logits))
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


def _write_tensors(archive: RewardArchive, head: Tensor, path: Path) -> None:
    tensors = {f"{_PREFIX}{HF_HEAD}": head}
    for name, low, high in archive.adapters():
        linear = _PREFIX + archive.family.name_in_memory(name).removesuffix(".weight")
        # Copy A, because several weights may share it, and safetensors refuses to write the same
        # memory under two names.
        tensors[f"{linear}.lora_A.weight"] = low.clone()
        tensors[f"{linear}.lora_B.weight"] = high.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def _build_config(archive: RewardArchive, lora: LoraShape, base: str) -> dict[str, Any]:
    # peft adapts every module whose name ends with one of target_modules, so the last part of each
    # name suffices for all layers.
    names = [name.removesuffix(".weight") for name, *_ in archive.adapters()]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "modules_to_save": [HF_HEAD.removesuffix(".weight")],
        "inference_mode": True,
    }


def _reward_model_class(base: str) -> Any:
    """Return the class that loads the decoder ``base`` with a linear head on top.

    It is transformers' ``ForSequenceClassification`` of that decoder. If transformers has none, the
    class is built here from transformers' generic code for such classes.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES
    from transformers import MODEL_MAPPING, AutoConfig
    from transformers.modeling_layers import GenericForSequenceClassification

    config = type(AutoConfig.from_pretrained(base, local_files_only=True))
    if config in CLASSES:
        return CLASSES[config]
    decoder: Any = MODEL_MAPPING[config]
    bases = GenericForSequenceClassification, decoder.__base__
    # If multimodal models also use this decoder, its base class has their config class, so replace
    # it.
    return type("RewardModel", bases, {"config_class": config})


def _load_adapted(
    base: str, folder: Path, scale: float, pad_id: int, archive: RewardArchive | None = None
) -> Any:
    """Load the base model with transformers in fp32, and fold the adapter in ``folder`` into it.

    Args:
        base: the base model's folder.
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
            model = _reward_model_class(base).from_pretrained(
                base, dtype=torch.float32, local_files_only=True, num_labels=head.size(0)
            )
    except Exception as error:  # third-party code may raise anything
        raise CheckpointError(f"transformers cannot load {base}: {error}") from error
    # The adapter is applied here, so that peft need not be installed.
    model.score.weight.data = head
    model.config.pad_token_id = pad_id
    if archive is not None:
        for name, weight in archive.base_linears():
            model.get_parameter(archive.family.name_in_memory(name)).data = weight.float()
    names = {name.rpartition(".lora_")[0] for name in tensors}
    for name in names:
        low, high = (tensors[f"{name}.lora_{letter}.weight"] for letter in "AB")
        weight = model.get_parameter(f"{name.removeprefix(_PREFIX)}.weight")
        if weight.shape != (high.size(0), low.size(1)):
            raise CheckpointError(
                f"{base}: {name.removeprefix(_PREFIX)}: got shape {list(weight.shape)}, but the "
                f"adapter has {[high.size(0), low.size(1)]}, so this is not the base of the reward "
                "model. Pass the model from which it was trained"
            )
        weight.data = fold_into_weight(weight.data, low, high, scale)
    return model.to(current_device()).eval()
