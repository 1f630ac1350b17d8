"""Export of a reward model as a Hugging Face folder or a peft adapter, checked before it is named.

Tensors are read from the archive one after the other. What was written is loaded by transformers,
and must give the archive's token ids, and its rewards within 1e-4 in fp32.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.card import model_card
from nemo_aligner.checkpoint.hf.check import (
    TWO_LAYERS_SUFFIX,
    architecture_of,
    check_folder,
    compare,
    cut,
    encode_texts,
    has_class,
    our_logits,
    read_as_it_runs,
)
from nemo_aligner.checkpoint.hf.convert import (
    RewardArchive,
    check_head,
    exported_contract,
    read_head,
)
from nemo_aligner.checkpoint.hf.families.base import ModelFamily
from nemo_aligner.checkpoint.hf.heads import (
    LINEAR,
    PREFIX_KEY,
    REWARD_TOKEN_KEY,
    head_to_hf,
    quiet_about_heads,
)
from nemo_aligner.checkpoint.hf.source import HF_HEAD, REWARD_SUFFIX
from nemo_aligner.checkpoint.nemo.open import (
    CONTRACT_NAME,
    NemoFolder,
    open_nemo,
    scratch_beside,
    sync_to_disk,
)
from nemo_aligner.checkpoint.nemo.reward_model import reward_model_of, reward_model_without_weights
from nemo_aligner.checkpoint.weights.safe_pickle import bounded_torch_load
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.templates import with_kwargs_inside
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.lora import folded
from nemo_aligner.models.shape import LoraShape, ModelShape, check_is_linear
from nemo_aligner.utils.console import say, waiting_for
from nemo_aligner.utils.errors import CheckpointError

# Export as a folder; LoRA is folded into the weights.


@dataclass(frozen=True)
class ExportOptions:
    """``dtype`` None keeps the stored one; ``merge`` merges the attributes into one reward."""

    dtype: torch.dtype | None = None
    merge: bool = False
    max_shard_bytes: int = 5 * 10**9
    base_license: str = "unknown"


@dataclass(frozen=True)
class ExportSummary:
    """Result of an export.

    Attributes:
        largest_difference: of a reward in the check.
        zero_groups: query groups of zeros that were left out, of the archive's ``query_groups``.
    """

    output: Path
    architecture: str
    dtype: str
    shards: int
    contract: ScoringContract
    pad_token: str
    texts: int
    largest_difference: float
    query_groups: int
    zero_groups: int

    def __str__(self) -> str:
        lines = [
            f"{self.output}: {self.architecture} of {', '.join(self.contract.attributes)}, weights "
            f"in {self.dtype}, safetensors files: {self.shards}, pad token {self.pad_token!r}",
            f"checked: {self.texts} texts, alone and padded; the largest difference of a reward is "
            f"{self.largest_difference:.1e}",
            f"scoring contract: {self.contract.hash}",
        ]
        if self.zero_groups:
            kept = self.query_groups - self.zero_groups
            ranks = next(n for n in count(2) if -(-kept // n) * n == self.query_groups)
            lines.append(
                f"query groups: {kept}; left out {self.zero_groups} of zeros that the archive has "
                f"for tensor parallelism (convert --tensor-parallel {ranks} adds them again)"
            )
        if any(self.contract.label_means):
            means = dict(zip(self.contract.attributes, self.contract.label_means, strict=True))
            lines.append(
                f"WARNING: the logits are not yet the rewards. The head has no bias: add {means} "
                "(label_means in config.json)"
            )
        return "\n".join(lines)


def export_to_hf(
    archive: str | Path, output: str | Path, layout: ParallelLayout, options: ExportOptions
) -> ExportSummary:
    """Write the reward model ``archive`` as the new folder ``output``; one process calls it.

    Raises:
        CheckpointError: ``output`` exists, the archive is unsafe or no reward model, parts of it
            have no place in the folder, or the folder does not score like it.
    """
    output = Path(output)
    if layout.tp * layout.pp * layout.dp > 1:
        raise CheckpointError("an export runs in one process")
    with folder_when_whole(output) as staging, open_nemo(archive) as folder:
        return _export(folder, staging, output, layout, options)


def _export(
    folder: NemoFolder, staging: Path, output: Path, layout: ParallelLayout, options: ExportOptions
) -> ExportSummary:
    say(f"scoring texts with {folder.source} ...")
    loaded = reward_model_without_weights(folder, layout, Precision.fp32, with_adapters=False)
    contract, tokenizer = ScoringContract.from_dict(folder.contract or {}), loaded.tokenizer
    check_head(folder, contract)
    archive = RewardArchive.of(folder)
    head, offset = head_to_hf(read_head(archive, contract, merge=options.merge))
    exported = exported_contract(contract, offset, merge=options.merge, dtype=options.dtype)
    stored = format_of(options.dtype or archive.embedding_dtype)
    texts = encode_texts(contract, tokenizer)
    read_as_it_runs(loaded.model, partial(archive.read_as_exported, dtype=options.dtype))
    token_lists = [cut(ids, contract.seq_length) for _, ids in texts]
    with waiting_for("scoring texts"):
        logits = our_logits(loaded.model, token_lists, layout)
    del loaded
    gc.collect()  # the modules form reference cycles
    logits = _as_exported(logits, contract, offset, merge=options.merge)
    pad_token, pad_id = choose_pad(tokenizer, {ids[-1] for _, ids in texts})
    model_type = archive.family.to_hf(archive.config)["model_type"]
    architecture = architecture_of(model_type)
    if HF_HEAD not in head:
        architecture = architecture.removesuffix(REWARD_SUFFIX) + TWO_LAYERS_SUFFIX
    config = hf_config(
        archive.family, archive.config, exported, architecture, pad_id, stored.torch_name
    )
    say(f"writing {output} ...")
    shards = _write_weights(archive, head, staging, config["vocab_size"], options)
    write_json(staging / "config.json", config)
    write_json(staging / CONTRACT_NAME, exported.to_dict())
    write_tokenizer(staging, tokenizer, exported, pad_token)
    card = model_card(
        output.name,
        exported,
        pad_token,
        folder.source,
        options.base_license,
        contract.dtype,
        is_linear=HF_HEAD in head,
        is_loaded_whole=has_class(architecture, model_type),
    )
    (staging / "README.md").write_text(card, encoding="utf-8")
    say("scoring the same texts with transformers ...")
    with waiting_for("scoring with transformers"):
        largest_difference = check_folder(staging, exported, texts, logits)
    return ExportSummary(
        output=output,
        architecture=architecture,
        dtype=stored.precision.value,
        shards=shards,
        contract=exported,
        pad_token=pad_token,
        texts=len(texts),
        largest_difference=largest_difference,
        query_groups=archive.num_query_groups,
        zero_groups=archive.num_query_groups - archive.config["num_query_groups"],
    )


def _as_exported(
    logits: Tensor, contract: ScoringContract, offset: Tensor | None, *, merge: bool
) -> Tensor:
    """Logits ``[N, A]`` of the exported head, from those of the archive's."""
    if merge:
        logits = logits @ torch.tensor(contract.attribute_weights)[:, None]
    return logits if offset is None else logits - offset


def _write_weights(
    archive: RewardArchive,
    head: Mapping[str, Tensor],
    staging: Path,
    vocab_size: int,
    options: ExportOptions,
) -> int:
    writer = ShardWriter(staging, options.max_shard_bytes)
    for name, tensor in archive.tensors(vocab_size, options.dtype):
        writer.add(name, tensor)
    for name, tensor in head.items():
        writer.add(name, tensor)
    return writer.finish()


# Files of a Hugging Face reward model: safetensors shards, config and tokenizer.

_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_CLASS_OF_5, _CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"
_NEW_PAD = "<|pad|>"
# Tokens that vocabularies reserve and no text ends with, the likeliest first.
_PAD_LIKE = (r"pad", r"endoftext", r"reserved|unused")


@contextmanager
def folder_when_whole(output: Path) -> Iterator[Path]:
    """Folder that is renamed to ``output`` if the block succeeds.

    Raises:
        CheckpointError: ``output`` exists, or cannot be made.
    """
    with scratch_beside(output) as scratch:
        staging = scratch / "folder"
        staging.mkdir()
        yield staging
        for file in staging.iterdir():
            sync_to_disk(file)
        staging.rename(output)
    sync_to_disk(output.parent)


class ShardWriter:
    """Writes tensors as they come to files of at most ``max_bytes``, or of one larger tensor."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; write those before it if it does not fit beside them."""
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._bytes + size > self._max_bytes:
            self._flush()
        # A view would keep all of a larger tensor in memory.
        is_part = tensor.untyped_storage().nbytes() > size
        self._waiting[name] = tensor.clone() if is_part else tensor
        self._bytes += size
        self._total += size

    def finish(self) -> int:
        """Write the rest, name the files and, if there are several, index them; their number."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._path(1).rename(self._folder / "model.safetensors")
            return count
        weight_map = {}
        for number, names in enumerate(self._files, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        write_json(self._folder / "model.safetensors.index.json", index)
        return count

    def _flush(self) -> None:
        self._files.append(list(self._waiting))
        tensors = {name: tensor.contiguous() for name, tensor in self._waiting.items()}
        path = self._path(len(self._files))
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._folder}: the weights cannot be written: {error}"
            ) from error
        path.chmod(mode)  # safetensors creates files that only their owner may read
        self._waiting, self._bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f".shard-{number}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON."""
    path.write_text(
        json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )


def choose_pad(tokenizer: Tokenizer, last_ids: Collection[int]) -> tuple[str, int]:
    """Choose a pad token and its id; an id past all others is of a token to be added.

    transformers reads the reward at the last token that is not padding, so no text may end with the
    pad token: not EOS, and none of ``last_ids``.
    """
    taken = {tokenizer.bos_id, tokenizer.eos_id, *last_ids}
    specials = {
        tokenizer.decode([token_id]): token_id for token_id in sorted(tokenizer.special_ids)
    }
    free = [token for token, token_id in specials.items() if token_id not in taken]
    if tokenizer.pad_token in free:
        return tokenizer.pad_token, specials[tokenizer.pad_token]
    for pattern in _PAD_LIKE:
        for token in free:
            if re.search(pattern, token, re.IGNORECASE):
                return token, specials[token]
    return _NEW_PAD, tokenizer.vocab_size


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, contract: ScoringContract, pad_token: str
) -> None:
    """Copy the tokenizer's files, changing only its pad token, class and chat template.

    The template is the contract's, with its ``chat_template_kwargs`` inside. transformers adds a
    token that ``tokenizer.json`` lacks behind all others.
    """
    tokenizer.save(folder)
    changes: dict[str, Any] = {}
    if tokenizer.pad_token != pad_token:
        changes["pad_token"] = pad_token
    template = with_kwargs_inside(contract.template, contract.template_kwargs)
    if template and contract.reward_token_id is not None:
        # For programs that do not know of it.
        template += "{{ " + json.dumps(tokenizer.decode([contract.reward_token_id])) + " }}"
    if (tokenizer.chat_template or "") != template:
        changes["chat_template"] = None
        (folder / _TEMPLATE).unlink(missing_ok=True)
        if template:
            (folder / _TEMPLATE).write_text(template, encoding="utf-8", newline="")
    config = _read_json(folder / _TOKENIZER_CONFIG)
    _change_json(folder / _TOKENIZER_CONFIG, {**changes, **_for_transformers_4(config)})
    if (folder / _SPECIAL_TOKENS).is_file():
        _change_json(folder / _SPECIAL_TOKENS, changes)


def _for_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that transformers 4 needs in a ``tokenizer_config.json`` that 5 wrote.

    Version 5 names a class of its own for any ``tokenizer.json``, which 4 refuses; and 4's class
    returns token types, which decoders refuse, unless it is told the model's inputs.
    """
    if config.get("tokenizer_class") not in (_CLASS_OF_5, _CLASS_OF_BOTH):
        return {}
    inputs = config.get("model_input_names") or ["input_ids", "attention_mask"]
    return {"tokenizer_class": _CLASS_OF_BOTH, "model_input_names": inputs}


def _change_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Set these keys, or drop those that are None; rewrite the file only if it changes."""
    content = _read_json(path)
    changed = {k: v for k, v in {**content, **changes}.items() if v is not None}
    if changed != content:
        write_json(path, changed)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def hf_config(
    family: ModelFamily,
    config: Mapping[str, Any],
    contract: ScoringContract,
    architecture: str,
    pad_id: int,
    dtype: str,
) -> dict[str, Any]:
    """``config.json`` of a reward model; ``config`` is NeMo's, ``dtype`` the stored weights'."""
    names = dict(enumerate(contract.attributes))
    statistics: dict[str, Any] = {}
    reward_token_id = contract.reward_token_id
    if contract.reward_mean and contract.reward_std and len(names) == 1:
        # For OpenRLHF, which normalizes logits by them if it is told --normalize_reward.
        mean = contract.reward_mean[0] - contract.label_means[0]
        statistics = {PREFIX_KEY: LINEAR.last, "mean": mean, "std": contract.reward_std[0]}
    return {
        "architectures": [architecture],
        **family.to_hf(config),
        "vocab_size": max(config["vocab_size"], pad_id + 1),
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "problem_type": "regression",  # so that vLLM returns raw scores
        "bos_token_id": contract.bos_id,
        "eos_token_id": contract.eos_id,
        "pad_token_id": pad_id,
        # transformers 5 reads the first, 4 the second.
        "dtype": dtype,
        "torch_dtype": dtype,
        "scoring_contract_hash": contract.hash,
        **({} if reward_token_id is None else {REWARD_TOKEN_KEY: reward_token_id}),
        # A reward is the logit plus its attribute's mean label and the head's bias.
        "label_means": dict(zip(contract.attributes, contract.label_means, strict=True)),
        **statistics,
    }


# Export of LoRA as an adapter of peft, to be loaded onto its base model.
#
# Names are those that peft 0.17 writes for ``TaskType.SEQ_CLS``: the matrices beside each linear
# layer, and the reward head as a module that was trained and saved whole.

_CONFIG_NAME, _WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
# Prefix of peft's wrapper around the base model.
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterOptions:
    """Options of ``export_adapter``.

    Attributes:
        base: model that peft is to load: a folder, or a name.
        merge: merge the attributes into one reward.
    """

    base: str
    merge: bool = False
    base_license: str = "unknown"


def export_adapter(
    archive: str | Path, output: str | Path, layout: ParallelLayout, options: AdapterOptions
) -> str:
    """Write LoRA and head of the reward model ``archive`` as the new folder ``output``.

    One process calls it. If the base model is a folder, the adapter is loaded onto it, and must
    give the archive's rewards within 1e-4 before the folder gets its name.

    Raises:
        CheckpointError: ``output`` exists, the archive is unsafe, no reward model or without LoRA,
            or the adapter does not score like it.
    """
    output = Path(output)
    with folder_when_whole(output) as staging, open_nemo(archive) as folder:
        return _export_adapter(folder, staging, output, layout, options)


def _export_adapter(
    folder: NemoFolder, staging: Path, output: Path, layout: ParallelLayout, options: AdapterOptions
) -> str:
    archive = RewardArchive.of(folder)
    if archive.lora is None:
        raise CheckpointError(f"{folder.source}: it has no LoRA, so it has no adapter to write")
    say(f"scoring texts with {folder.source} ...")
    loaded = reward_model_of(folder, layout, Precision.fp32)
    contract = ScoringContract.from_dict(folder.contract or {})
    check_head(folder, contract)
    shape = ModelShape.from_config(folder.config)
    check_is_linear(shape.head, str(folder.source), "an adapter of peft")
    head, offset = head_to_hf(read_head(archive, contract, merge=options.merge))
    exported = exported_contract(contract, offset, merge=options.merge)
    texts = encode_texts(contract, loaded.tokenizer)
    token_lists = [cut(ids, contract.seq_length) for _, ids in texts]
    logits = our_logits(loaded.model, token_lists, layout)
    logits = _as_exported(logits, contract, offset, merge=options.merge)
    pad_token, pad_id = choose_pad(loaded.tokenizer, {ids[-1] for _, ids in texts})
    if pad_id >= archive.config["vocab_size"]:
        raise CheckpointError(
            f"{folder.source}: its tokenizer has no pad token, and an adapter cannot add one to "
            "the base model; export it without --adapter-of"
        )
    say(f"writing {output} ...")
    _write_tensors(archive, head[HF_HEAD], staging / _WEIGHTS_NAME)
    write_json(staging / _CONFIG_NAME, _config(archive, archive.lora, options.base))
    write_json(staging / CONTRACT_NAME, exported.to_dict())
    write_tokenizer(staging, loaded.tokenizer, exported, pad_token)
    written = (output.name, exported, pad_token, folder.source, options.base_license)
    card = model_card(*written, contract.dtype, options.base)
    (staging / "README.md").write_text(card, encoding="utf-8")
    lines = [
        f"{output}: adapter of {options.base}: LoRA of {archive.lora}, and the head of "
        f"{', '.join(exported.attributes)}",
        f"scoring contract: {exported.hash}",
    ]
    if not Path(options.base).is_dir():
        return "\n".join([*lines, f"NOT CHECKED: {options.base} is not a folder on this machine"])
    say(f"scoring the same texts with {options.base} ...")
    model = _adapted(options.base, staging, archive.lora.scale, pad_id)
    difference = compare(_tokenizer(staging), model, exported, texts, logits)
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


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _adapted(base: str, folder: Path, scale: float, pad_id: int) -> Any:
    """Load the base model with the adapter in ``folder``, in fp32."""
    from transformers import AutoModelForSequenceClassification

    tensors = load_file(folder / _WEIGHTS_NAME)
    head = tensors.pop(_PREFIX + HF_HEAD)
    try:
        with quiet_about_heads(), bounded_torch_load():  # its weights may be pickles
            model = AutoModelForSequenceClassification.from_pretrained(
                base, dtype=torch.float32, local_files_only=True, num_labels=head.size(0)
            )
    except Exception as error:  # third-party code on files that may be wrong
        raise CheckpointError(f"transformers does not load {base}: {error}") from error
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
        weight.data = folded(weight.data, low, high, scale)
    return model.to(current_device()).eval()
