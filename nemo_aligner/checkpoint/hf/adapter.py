"""Export of LoRA as an adapter of peft, to be loaded onto its base model.

Names are those that peft 0.17 writes for ``TaskType.SEQ_CLS``: the matrices beside each linear
layer, and the reward head as a module that was trained and saved whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.card import model_card
from nemo_aligner.checkpoint.hf.check import (
    compare,
    encode_texts,
    has_class,
    our_logits,
)
from nemo_aligner.checkpoint.hf.export import (
    choose_pad,
    folder_when_whole,
    write_json,
    write_tokenizer,
)
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD
from nemo_aligner.checkpoint.hf.heads import quiet_about_heads
from nemo_aligner.checkpoint.hf.reward_archive import (
    ExportOptions,
    RewardArchive,
    as_exported,
    head_of,
)
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.reward_model import reward_model_of
from nemo_aligner.checkpoint.safe_load import bounded_torch_load
from nemo_aligner.config.common import Precision
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_plain_reading
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.lora import fold_into_weight
from nemo_aligner.models.shape import EXPERT_LINEARS, LoraShape, ModelShape, check_is_linear
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

    ``base`` is the model that peft is to load: a folder, or a name. Weights keep their dtype, and
    the head its form, as an adapter of peft has only one. One process calls it. If the base is a
    folder, the adapter is loaded onto it, and must give the archive's rewards within 1e-4 before
    the folder gets its name.

    Raises:
        CheckpointError: ``output`` exists, the archive is unsafe, no reward model or without LoRA,
            or the adapter does not score like it.
    """
    output = Path(output)
    with folder_when_whole(output) as staging, open_nemo(archive) as folder:
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
    if archive.lora is None:
        raise CheckpointError(f"{folder.source}: it has no LoRA, so it has no adapter to write")
    shape = ModelShape.from_config(folder.config)
    if shape.experts is not None and set(archive.lora.targets) & EXPERT_LINEARS.keys():
        raise CheckpointError(
            f"{folder.source}: it has LoRA on experts, which no adapter of peft has for single "
            "experts; export it without --adapter-of"
        )
    say(f"scoring texts with {folder.source} ...")
    loaded = reward_model_of(folder, layout, Precision.fp32)
    contract = ScoringContract.from_dict(folder.contract or {})
    check_plain_reading(contract, str(folder.source), "a reward model of Hugging Face")
    check_is_linear(shape.head, str(folder.source), "an adapter of peft")
    head, exported = head_of(archive, contract, options)
    texts = encode_texts(contract, loaded.tokenizer)
    logits = our_logits(loaded.model, texts, layout)
    logits = as_exported(logits, contract, head, merge=options.merge)
    pad_token, pad_id = choose_pad(loaded.tokenizer, {each.token_ids[-1] for each in texts})
    if pad_id >= archive.config["vocab_size"]:
        raise CheckpointError(
            f"{folder.source}: its tokenizer has no pad token, and an adapter cannot add one to "
            "the base model; export it without --adapter-of"
        )
    say(f"writing {output} ...")
    _write_tensors(archive, head.tensors[HF_HEAD], staging / _WEIGHTS_NAME)
    write_json(staging / _CONFIG_NAME, _config(archive, archive.lora, base))
    write_json(staging / CONTRACT_NAME, exported.to_dict())
    write_tokenizer(staging, loaded.tokenizer, exported, pad_token)
    written = (output.name, exported, pad_token, folder.source, options.base_license)
    model_type = archive.family.to_hf(archive.config)["model_type"]
    is_whole = has_class(REWARD_SUFFIX, model_type)
    card = model_card(*written, contract.dtype, base, is_loaded_whole=is_whole)
    (staging / "README.md").write_text(card, encoding="utf-8")
    lines = [
        f"{output}: adapter of {base}: LoRA of {archive.lora}, and the head of "
        f"{', '.join(exported.attributes)}",
        f"scoring contract: {exported.hash}",
    ]
    if not Path(base).is_dir():
        return "\n".join([*lines, f"NOT CHECKED: {base} is not a folder on this machine"])
    say(f"scoring the same texts with {base} ...")
    tokenizer = AutoTokenizer.from_pretrained(staging, local_files_only=True)
    model = _adapted(base, staging, archive.lora.scale, pad_id)
    difference = compare(tokenizer, model, exported, texts, logits)
    checked = f"checked: {len(texts)} texts, alone and padded; the largest difference of a reward"
    return "\n".join([*lines, f"{checked} is {difference:.1e}"])


def _write_tensors(archive: RewardArchive, head: Tensor, path: Path) -> None:
    tensors = {f"{_PREFIX}{HF_HEAD}": head}
    for name, low, high in archive.adapters():
        linear = _PREFIX + name.removesuffix(".weight")
        # safetensors refuses two names for the same storage.
        tensors[f"{linear}.lora_A.weight"] = low.clone()
        tensors[f"{linear}.lora_B.weight"] = high.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def _config(archive: RewardArchive, lora: LoraShape, base: str) -> dict[str, Any]:
    # peft matches by the end of a module's name, in every layer.
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


def _class_for(base: str) -> Any:
    """transformers' class of a reward model on ``base``, or what it would be if there were one."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES
    from transformers import MODEL_MAPPING, AutoConfig
    from transformers.modeling_layers import GenericForSequenceClassification

    config = type(AutoConfig.from_pretrained(base, local_files_only=True))
    if config in CLASSES:
        return CLASSES[config]
    decoder: Any = MODEL_MAPPING[config]
    bases = GenericForSequenceClassification, decoder.__base__
    return type("RewardModel", bases, {})


def _adapted(base: str, folder: Path, scale: float, pad_id: int) -> Any:
    """Load the base model with the adapter in ``folder``, in fp32."""
    tensors = load_file(folder / _WEIGHTS_NAME)
    head = tensors.pop(_PREFIX + HF_HEAD)
    try:
        with quiet_about_heads(), bounded_torch_load():  # its weights may be pickles
            model = _class_for(base).from_pretrained(
                base, dtype=torch.float32, local_files_only=True, num_labels=head.size(0)
            )
    except Exception as error:  # third-party code on files that may be wrong
        raise CheckpointError(f"transformers does not load {base}: {error}") from error
    # Set by hand: loading with peft would need it installed here.
    model.score.weight.data = head
    model.config.pad_token_id = pad_id
    names = {name.rpartition(".lora_")[0] for name in tensors}
    for name in names:
        low, high = (tensors[f"{name}.lora_{each}.weight"] for each in "AB")
        weight = model.get_parameter(f"{name.removeprefix(_PREFIX)}.weight")
        if weight.shape != (high.size(0), low.size(1)):
            raise CheckpointError(
                f"{base}: {name.removeprefix(_PREFIX)}: got shape {list(weight.shape)}, wanted "
                f"{[high.size(0), low.size(1)]}: it is not the base of this reward model"
            )
        weight.data = fold_into_weight(weight.data, low, high, scale)
    return model.to(current_device()).eval()
