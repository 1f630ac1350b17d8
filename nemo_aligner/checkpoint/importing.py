"""Import checkpoints of NeMo and Megatron as archives of this package.

A reward model of NeMo-Aligner becomes an archive with a scoring contract. Its head may do more
than a linear map; the import folds all of it into weights and contract, so scores stay the same:

    NeMo-Aligner:  (w . (W h + b) - mean) / std        here:  W' h + offset

``w`` are the attribute weights if ``merge_attributes`` is set; mean and std come from
``reward_standardization`` if that is enabled. ``offset`` is stored as the contract's
``label_means``. Formulas and keys are those of NeMo-Aligner's ``RewardModelHead`` and
``MegatronGPTRewardModel``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.conversion_cache import is_hugging_face
from nemo_aligner.checkpoint.decoder_tensors import (
    HEAD,
    HEAD_BIAS,
    OUTPUT_LAYER,
    PREFIX,
    attribute_names,
)
from nemo_aligner.checkpoint.hf.source import tokenizer_folder
from nemo_aligner.checkpoint.nemo.archive import no_such_archive, open_nemo
from nemo_aligner.checkpoint.nemo.folder import NemoFolder, refuse_hugging_face
from nemo_aligner.checkpoint.nemo.load_weights import as_lazy_tensor, lazy_decoder, model_shape
from nemo_aligner.checkpoint.nemo.write import scratch_beside, write_lazy_nemo
from nemo_aligner.checkpoint.weights.save import LazyTensor, dtype_of_matrices
from nemo_aligner.config.common import Overlong, Precision, RewardModelType
from nemo_aligner.config.dtypes import NumberFormat, format_of
from nemo_aligner.contract.added_tokens import describe_removed_tokens
from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.fields import are_numbers
from nemo_aligner.contract.template_check import check_template, freeze_date
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES, resolve_template
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.distributed.launch import single_process
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import with_lora
from nemo_aligner.utils.errors import CheckpointError, ConfigError, DataError, shown

RAW_TEXT = "none"
_HEAD_KEYS = (
    "reward_model_type", "regression", "reward_standardization", "output_sequence", "use_avg_pool",
    "force_head_dtype",
)  # fmt: skip
# NeMo applies these settings in a separate customization step, which NeMo-Aligner's reward model
# skips.
_IGNORED_BY_NEMO_ALIGNER = ("scale_positional_embedding", "apply_embedding_scaling")


def import_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    config: Path | None = None,
    template: str | None = None,
    attributes: tuple[str, ...] = (),
    keep_scaling: bool = False,
) -> str:
    """Write ``source`` as the archive ``output``, and return a summary; one process calls it.

    It builds no model: each tensor is read when it is written.

    Args:
        source: a checkpoint of NeMo or Megatron, as an archive or a folder.
        tokenizer: a folder, or a model's name on the hub; None means the checkpoint's tokenizer.
        config: a ``model_config.yaml`` that replaces the checkpoint's settings.
        template: for reward models, a value of ``model.data.template``; ``none`` allows only raw
            texts.
        attributes: names of a reward model's outputs, if there are several.
        keep_scaling: apply the RoPE and embedding scaling in the settings. NeMo-Aligner's reward
            models ignored it in training and in serving, so by default it is switched off.

    Raises:
        CheckpointError: the checkpoint cannot be read, or something in it is not supported.
        ConfigError: the template is unfit, or an option for reward models is set for a base model.
    """
    output = Path(output)
    folder_of_tokenizer = None if tokenizer is None else tokenizer_folder(tokenizer)
    with (
        single_process(),
        scratch_beside(output) as scratch,
        open_nemo(_nemo_path(source), tokenizer=folder_of_tokenizer, config=config) as folder,
    ):
        if folder.contract is not None:
            raise CheckpointError(f"{source}: it is an archive of nemo-aligner and needs no import")
        options = {"template": template is not None, "attributes": bool(attributes)}
        _check_options(folder, source, {**options, "keep_scaling": keep_scaling})
        settings, ignored = _decoder_settings(folder, keep_scaling)
        shape = model_shape(folder, settings)
        new_tokenizer = folder.load_tokenizer()
        # The ids of another model's tokenizer would select the embeddings of other tokens.
        new_tokenizer.check_fits(shape.vocab_size)
        head = _read_head(folder, shape)
        tensors, layers = lazy_decoder(folder, shape)
        # A reward model of NeMo-Aligner still stores its base model's output layer, unused.
        if head is not None:
            tensors.pop(PREFIX + OUTPUT_LAYER, None)
        precision = _find_precision(folder, {**tensors, **layers})
        contract = None
        if head is not None:
            contract = _build_contract(
                folder, new_tokenizer, *head, template, attributes, precision
            )
            tensors[PREFIX + HEAD] = as_lazy_tensor(head[0])
        new_tokenizer.save(scratch / "tokenizer")
        write_lazy_nemo(output, with_lora(settings, None), tensors, layers, scratch, contract)
        return _summarize(output, folder, ignored, contract)


def _nemo_path(source: str | Path) -> Path:
    """Return ``source``; CheckpointError for a model that ``open_nemo`` would convert."""
    path = Path(source)
    if not path.exists():
        raise CheckpointError(no_such_archive(path))
    if is_hugging_face(path):
        refuse_hugging_face(path, path)
    return path


def _decoder_settings(folder: NemoFolder, keep_scaling: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the decoder's settings, and the names of the scaling settings that it switches off.

    Scaling is switched off in a reward model unless ``keep_scaling``; see ``import_checkpoint``.
    """
    settings = {key: value for key, value in folder.config.items() if key not in _HEAD_KEYS}
    if HEAD not in folder.tensors or keep_scaling:
        return settings, []
    ignored = [key for key in _IGNORED_BY_NEMO_ALIGNER if settings.get(key)]
    return settings | dict.fromkeys(ignored, False), ignored


def _check_options(folder: NemoFolder, source: str | Path, options: Mapping[str, bool]) -> None:
    """Raise ConfigError if the checkpoint is a base model, and an option for reward models is set.

    Args:
        options: name of each option -> whether the user has set it.
    """
    names = [name for name, is_set in options.items() if is_set]
    if names and HEAD not in folder.tensors:
        raise ConfigError(
            f"{source}: this is a base model (it has no {HEAD}), but {', '.join(names)} is set, "
            "which is for reward models only. Omit it"
        )


def _summarize(
    output: Path,
    folder: NemoFolder,
    ignored: list[str],
    contract: ScoringContract | None,
) -> str:
    """Describe an import: its model, settings that are switched off, and removed tokens."""
    config = folder.config
    lines = [
        f"{output}: {config['num_layers']} layers of {config['hidden_size']}",
        f"vocabulary of {config['vocab_size']}, {folder.vocab_size_source}",
    ]
    if contract is None:
        lines.append("a base model")
    else:
        lines.append(f"a reward model of {', '.join(contract.attributes)}")
        lines.append(f"scoring contract {contract.hash}, offsets {list(contract.label_means)}")
        lines += _note_critic_values(config, contract)
    lines += [f"{key} is switched off, because NeMo-Aligner never applied it" for key in ignored]
    if removed := folder.removed_tokens:
        lines.append(describe_removed_tokens(removed, config["vocab_size"]))
    return "\n  ".join(lines)


def _note_critic_values(config: Mapping[str, Any], contract: ScoringContract) -> list[str]:
    """Return a note if a PPO critic would start from other values here than in NeMo-Aligner.

    NeMo-Aligner standardizes the weighted sum of the attributes. This package standardizes each
    attribute, which gives the same values if the weights sum to 1.
    """
    total = sum(contract.attribute_weights)
    is_standard = _section(config, "reward_standardization").get("enable")
    if not is_standard or len(contract.attributes) == 1 or math.isclose(total, 1, abs_tol=1e-6):
        return []
    return [
        "a critic's values differ from NeMo-Aligner's by a constant: reward_standardization is "
        f"applied to each attribute, and attribute_weights sum to {total:g}, not 1"
    ]


def fold_head(
    weight: Tensor, bias: Tensor | None, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Fold a NeMo-Aligner reward head, with its merging and scaling, into one linear map.

    Args:
        weight: ``[A, hidden]`` for A attributes.
        bias: ``[A]``.
        config: the model's settings.

    Returns:
        A weight ``[A, hidden]`` and offsets ``[A]``, both fp32; A is 1 if attributes are merged.

    Raises:
        CheckpointError: the head reads more than the last token, or a setting is invalid.
    """
    for key in ("output_sequence", "use_avg_pool"):
        if config.get(key):
            raise CheckpointError(
                f"{key}: got true, but only heads that read the last token are supported"
            )
    # NeMo-Aligner computes W h + b first, then the weighted sum, then mean and std.
    offsets = weight.new_zeros(len(weight)) if bias is None else bias
    regression = _section(config, "regression")
    if regression.get("merge_attributes"):
        weights = _numbers(regression, "attribute_weights", len(weight)) or (
            [1 / len(weight)] * len(weight)
        )
        merge = torch.tensor([weights], dtype=torch.float64)
        weight, offsets = merge @ weight.double(), merge[0] @ offsets.double()[:, None]
    standard = _section(config, "reward_standardization")
    if standard.get("enable"):
        mean, std = (_numbers(standard, key, len(weight)) for key in ("mean", "std"))
        if mean is None or std is None or min(std) <= 0:
            raise CheckpointError(
                f"reward_standardization: got mean {shown(mean)} and std {shown(std)}, wanted a "
                "mean, and a std above 0"
            )
        spread = torch.tensor(std, dtype=torch.float64)
        offsets = (offsets - torch.tensor(mean, dtype=torch.float64)) / spread
        weight = weight / spread[:, None]
    return weight.float(), offsets.float()


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{key}: got {shown(section)}, wanted a mapping")
    return section


def _numbers(section: Mapping[str, Any], key: str, count: int) -> list[float] | None:
    """Read the setting ``key`` as one number for each attribute; None if it is not set.

    A single number in the settings applies to all attributes.
    """
    values = section.get(key)
    if values is None:
        return None
    values = values if isinstance(values, list) else [values] * count
    if len(values) != count or not are_numbers(values):
        raise CheckpointError(f"{key}: got {shown(values)}, wanted {count} numbers")
    return [float(value) for value in values]


def _read_head(folder: NemoFolder, shape: ModelShape) -> tuple[Tensor, Tensor] | None:
    """Read NeMo-Aligner's head, and fold it into a weight ``[A, hidden]`` and offsets ``[A]``.

    Return None for a base model, which has no head. ``fold_head`` explains the result.
    """
    stored = folder.tensors
    if HEAD not in stored:
        return None
    size = stored[HEAD][0]
    if size[1:] != (shape.hidden_size,):
        raise CheckpointError(
            f"{folder.source}: {HEAD}: got shape {list(size)}, wanted rows of {shape.hidden_size} "
            "values, the hidden size"
        )
    weight = folder.store.read(folder.prefix + HEAD).float()
    bias = folder.store.read(folder.prefix + HEAD_BIAS).float() if HEAD_BIAS in stored else None
    try:
        return fold_head(weight, bias, folder.config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder.source}: {error}") from error


def _find_precision(
    folder: NemoFolder, tensors: Mapping[str, LazyTensor | list[LazyTensor]]
) -> Precision:
    """Return the precision of the decoder's matrices; fp32 if they have different dtypes."""
    stored = []
    for key, entry in tensors.items():
        parts = entry if isinstance(entry, list) else [entry]
        for tensor in parts:
            if len(tensor.shape) > 1:
                _format_of(tensor.dtype, f"{folder.source}: {key}")
        stored += parts
    return _format_of(dtype_of_matrices(stored), folder.source).precision


def _format_of(dtype: torch.dtype, location: object) -> NumberFormat:
    try:
        return format_of(dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{location}: {error}") from error


def _build_contract(
    folder: NemoFolder,
    tokenizer: Tokenizer,
    weight: Tensor,
    offsets: Tensor,
    template: str | None,
    attributes: tuple[str, ...],
    precision: Precision,
) -> ScoringContract:
    """Build the contract of an imported reward model.

    It says what NeMo-Aligner does: read the reward at the last token, and add neither BOS nor EOS.
    """
    kind = folder.config.get("reward_model_type") or RewardModelType.binary_ranking.value
    if kind not in [member.value for member in RewardModelType]:
        raise CheckpointError(
            f"{folder.source}: reward_model_type: got {shown(kind)}, wanted one of: "
            f"{', '.join(member.value for member in RewardModelType)}"
        )
    count = len(weight)
    # If the settings have no attribute weights, NeMo-Aligner takes the mean of the attributes.
    weights = [1 / count] * count
    if count > 1:
        regression = _section(folder.config, "regression")
        weights = _numbers(regression, "attribute_weights", count) or weights
    try:
        return ScoringContract(
            template=_resolve_template(template, tokenizer),
            add_bos=False,
            add_eos=False,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            overlong=Overlong.drop.value,
            seq_length=folder.config.get("encoder_seq_length") or 1024,
            attributes=_name_attributes(attributes, count),
            attribute_weights=tuple(weights),
            label_means=tuple(offsets.tolist()),
            dtype=precision.value,
            tokenizer_fingerprint=tokenizer.fingerprint,
            reward_model_type=kind,
        )
    except (ConfigError, DataError) as error:
        raise type(error)(f"{folder.source}: {error}") from error


def _resolve_template(setting: str | None, tokenizer: Tokenizer) -> str:
    """Return the chat template that ``setting`` names; empty if only raw texts are allowed."""
    if setting is None:
        raise ConfigError(
            "template: it is not set, and this reward model does not say how a conversation is "
            f"rendered as text. Set it to 'tokenizer', {', '.join(map(repr, BUILT_IN_TEMPLATES))}, "
            f"a file, or {RAW_TEXT!r} for raw texts only"
        )
    if setting == RAW_TEXT:
        return ""
    template = ChatTemplate.of(resolve_template(setting, tokenizer), tokenizer)
    if not template.source:
        raise ConfigError(f"template: got {setting!r}, but the tokenizer has no chat template")
    template = freeze_date(template)
    check_template(template, setting, tokenizer)
    return template.source


def _name_attributes(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Check the attribute names that the user gave; if there are none, make up ``count`` names."""
    if names:
        return attribute_names(names, count)
    return ("reward",) if count == 1 else tuple(f"attribute_{n}" for n in range(1, count + 1))
