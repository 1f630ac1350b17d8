"""Export of a reward model as a Hugging Face folder, checked before it is named.

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

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.card import model_card
from nemo_aligner.checkpoint.hf.check import (
    BODY_SUFFIX,
    LANGUAGE_MODEL_SUFFIX,
    CheckedText,
    check_folder,
    class_name,
    compute_reference_logits,
    encode_texts,
    has_class,
    load_layers_on_demand,
)
from nemo_aligner.checkpoint.hf.families.base import ModelFamily
from nemo_aligner.checkpoint.hf.heads import (
    LINEAR,
    PREFIX_KEY,
    READOUT_KEY,
    REWARD_TOKEN_KEY,
    SCORE_WITH_BIAS,
    STEP_SUFFIX,
    TOKEN_SUFFIX,
    TWO_LAYERS,
    VALUE_LAYER,
)
from nemo_aligner.checkpoint.hf.pooling import check_pooled_folder, require_package, write_modules
from nemo_aligner.checkpoint.hf.reward_archive import (
    ExportOptions,
    HeadOut,
    RewardArchive,
    as_exported,
    head_of,
)
from nemo_aligner.checkpoint.hf.source import HEAD_NAME, REWARD_SUFFIX
from nemo_aligner.checkpoint.nemo.archive import open_nemo, scratch_beside, sync_to_disk
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.reward_model import reward_model_without_weights
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import HEADS, SIGMOID
from nemo_aligner.contract.steps import MARKS
from nemo_aligner.contract.templates import with_kwargs_inside
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.utils.console import say, waiting_for
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.writing import write_problem

# Export as a folder; LoRA is folded into the weights.


@dataclass(frozen=True)
class ExportSummary:
    """Result of an export.

    Attributes:
        largest_difference: of a reward in the check.
        zero_groups: query groups of zeros that were left out, of the archive's ``query_groups``.
        notes: what a reader of the head has to know.
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
    notes: tuple[str, ...] = ()

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
        lines += self.notes
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
    if layout.num_ranks > 1:
        raise CheckpointError("an export runs in one process")
    with folder_when_whole(output) as staging, open_nemo(archive) as folder:
        return _export(folder, staging, output, layout, options)


def _export(
    folder: NemoFolder, staging: Path, output: Path, layout: ParallelLayout, options: ExportOptions
) -> ExportSummary:
    say(f"scoring texts with {folder.source} ...")
    loaded = reward_model_without_weights(folder, layout, Precision.fp32, with_adapters=False)
    contract, tokenizer = ScoringContract.from_dict(folder.contract or {}), loaded.tokenizer
    reads_mean = contract.reply_marker is not None
    archive = RewardArchive.of(folder)
    head, exported = head_of(archive, contract, options)
    if reads_mean:
        require_package()
    stored = format_of(options.dtype or archive.embedding_dtype)
    texts = encode_texts(contract, tokenizer)
    load_layers_on_demand(loaded.model, partial(archive.read_as_exported, dtype=options.dtype))
    with waiting_for("scoring texts"):
        logits = compute_reference_logits(loaded.model, texts, layout)
    # Before transformers' copy is loaded, or both would be in memory.
    del loaded
    gc.collect()  # the modules form reference cycles
    logits = as_exported(logits, contract, head, merge=options.merge)
    pad_token, pad_id = choose_pad(tokenizer, {each.token_ids[-1] for each in texts})
    architecture = _class_of(archive, head, contract)
    config = hf_config(
        archive.family, archive.config, exported, architecture, pad_id, stored.torch_name
    ) | step_settings(exported, tokenizer)
    say(f"writing {output} ...")
    beside = {} if reads_mean else head.tensors
    shards = _write_weights(archive, beside, staging, config["vocab_size"], options)
    if reads_mean:
        write_modules(staging, head, config["hidden_size"])
    if head.form == VALUE_LAYER.last:
        save_file(head.tensors, staging / HEAD_NAME, metadata={"format": "pt"})
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
        form=head.form,
        is_loaded_whole=_is_whole(head, contract) and has_class(architecture, config["model_type"]),
    )
    (staging / "README.md").write_text(card, encoding="utf-8")
    return ExportSummary(
        output=output,
        architecture=architecture,
        dtype=stored.precision.value,
        shards=shards,
        contract=exported,
        pad_token=pad_token,
        texts=len(texts),
        largest_difference=_check(staging, exported, texts, logits),
        query_groups=archive.num_query_groups,
        zero_groups=archive.num_query_groups - archive.config["num_query_groups"],
        notes=tuple(_notes(contract, exported, head.form)),
    )


def _check(
    folder: Path, exported: ScoringContract, texts: list[CheckedText], logits: Tensor
) -> float:
    """Score the same texts with the folder, and return the largest difference of a reward."""
    check = check_folder if exported.reply_marker is None else check_pooled_folder
    say("scoring the same texts with transformers ...")
    with waiting_for("scoring with transformers"):
        return check(folder, exported, texts, logits)


# Ends of a class's name, by the form of its head: two layers as in vLLM's Qwen2ForRewardModel; the
# value head stands beside a language model.
_SUFFIXES = {TWO_LAYERS.last: "ForRewardModel", VALUE_LAYER.last: LANGUAGE_MODEL_SUFFIX}
_STEP_SUFFIXES = {SCORE_WITH_BIAS: TOKEN_SUFFIX, TWO_LAYERS.last: STEP_SUFFIX}


def _class_of(archive: RewardArchive, head: HeadOut, contract: ScoringContract) -> str:
    """Name of the class that an archive's decoder is with such a head."""
    suffixes = _STEP_SUFFIXES if contract.has_steps else _SUFFIXES
    suffix = suffixes.get(head.form, REWARD_SUFFIX)
    if contract.reply_marker is not None:  # as a reward model it would be read at the last token
        suffix = BODY_SUFFIX
    return class_name(archive.family.to_hf(archive.config)["model_type"], suffix)


def _is_whole(head: HeadOut, contract: ScoringContract) -> bool:
    """Tell if all of a head has its place in transformers' class, if there is one."""
    return head.form == (SCORE_WITH_BIAS if contract.has_steps else LINEAR.last)


def _notes(contract: ScoringContract, exported: ScoringContract, form: str) -> Iterator[str]:
    """Say what the exported head lacks, or asks of its readers."""
    if contract.readout != exported.readout:
        readout = contract.output_readout
        has_heads = readout is not None and readout.kind == HEADS
        left = "heads but their mean" if has_heads else "quantiles but the median"
        yield f"left out: all {left}, which is the reward; with them goes how certain it is"
    exported_readout = exported.output_readout
    if exported_readout is not None and exported_readout.kind == SIGMOID:
        yield "the logits are log-odds: a reward is their sigmoid (readout in config.json)"
    elif exported_readout is not None:
        yield (
            "WARNING: the logits are those of bins. A reward is the mean of an attribute's values "
            "by their softmax (readout in config.json; the model card has the program)"
        )
    if contract.has_steps:
        yield (
            "its readers have to cut a text into steps, and read each where the model card says "
            "(scored_position and step_separator in config.json)"
        )
        if contract.aggregate is not None:
            yield (
                f"WARNING: the reward of a text is the {contract.aggregate} of its steps' rewards "
                "(aggregate in config.json). Other programs answer the steps' alone: merge them as "
                "the program in the model card does"
            )
    elif contract.reply_marker is not None:
        yield "sentence-transformers reads it, given what comes before a reply as its prompt"
    elif form == SCORE_WITH_BIAS:
        yield "WARNING: transformers leaves score.bias out; vLLM and this package read it"


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
    """Folder that is renamed to ``output`` if the block succeeds."""
    with scratch_beside(output) as scratch:
        staging = scratch / "folder"
        staging.mkdir()
        yield staging
        for file in staging.rglob("*"):
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
        # The number of files is in each name, so they are named last.
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
        # For its mode, by the umask.
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._folder}: the weights cannot be written: "
                f"{write_problem(self._folder, error)}"
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
    # An unused special token needs no new row in the embeddings.
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
    if contract.reply_marker is not None:
        # sentence-transformers would not count the last token of a prompt if it were one of these.
        changes |= dict.fromkeys(("extra_special_tokens", "additional_special_tokens"))
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


# sentence-transformers' CrossEncoder puts a sigmoid on a single output, unless it finds this.
_ACTIVATION_KEY = "sentence_transformers"
_NO_ACTIVATION = {"activation_fn": "torch.nn.modules.linear.Identity"}


def hf_config(
    family: ModelFamily,
    config: Mapping[str, Any],
    contract: ScoringContract,
    architecture: str,
    pad_id: int,
    dtype: str,
) -> dict[str, Any]:
    """``config.json`` of a reward model; ``config`` is NeMo's, ``dtype`` the stored weights'."""
    names = dict(enumerate(contract.output_names))
    readout = contract.output_readout
    statistics: dict[str, Any] = {}
    reward_token_id = contract.reward_token_id
    reads_last_token = not contract.has_steps and contract.reply_marker is None
    is_read_by_openrlhf = len(names) == 1 and architecture.endswith(REWARD_SUFFIX)
    if contract.reward_mean and contract.reward_std and is_read_by_openrlhf:
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
        **({_ACTIVATION_KEY: _NO_ACTIVATION} if reads_last_token else {}),
        "bos_token_id": contract.bos_id,
        "eos_token_id": contract.eos_id,
        "pad_token_id": pad_id,
        # transformers 5 reads the first, 4 the second.
        "dtype": dtype,
        "torch_dtype": dtype,
        "scoring_contract_hash": contract.hash,
        **({} if reward_token_id is None else {REWARD_TOKEN_KEY: reward_token_id}),
        # How rewards follow from the logits of bins.
        **({} if readout is None else {READOUT_KEY: json.loads(readout.to_json())}),
        # A reward is the logit plus its attribute's mean label and the head's bias.
        "label_means": dict(zip(contract.attributes, contract.label_means, strict=True)),
        **statistics,
    }


def step_settings(contract: ScoringContract, tokenizer: Tokenizer) -> dict[str, Any]:
    """Settings of ``config.json`` for a model that reads steps; none for another.

    Without ``problem_type`` vLLM answers with the softmax of two outputs, as for Qwen2.5-Math-PRM.
    """
    if not contract.has_steps:
        return {}
    settings: dict[str, Any] = {"scored_position": contract.scored_position}
    if contract.step_separator is not None:
        settings["step_separator"] = contract.step_separator
        ids = tokenizer.encode(contract.step_separator)
        if contract.scored_position == MARKS and len(ids) == 1:
            settings["step_tag_id"] = ids[0]
    if contract.aggregate is not None:
        settings["aggregate"] = contract.aggregate
    names = contract.output_names
    if len(names) == 1:
        names = [f"not {names[0]}", names[0]]
        settings |= {"num_labels": 2, "id2label": dict(enumerate(names))}
        settings["label2id"] = {name: number for number, name in enumerate(names)}
    if len(names) == 2 and len(contract.attributes) == 1:
        settings["problem_type"] = None
    return settings
