"""Export a reward model as a Hugging Face folder, and check the folder before it is published.

Tensors are read from the archive one after the other, and written to a temporary folder. Then
transformers loads this folder. For a few samples it must compute the same token ids as the archive,
and the same rewards within 1e-4 in fp32. Only then is the folder renamed to ``output``.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
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
    CheckedText,
    check_folder,
    compute_reference_logits,
    encode_texts,
    load_layers_on_demand,
)
from nemo_aligner.checkpoint.hf.exported_tokenizer import (
    choose_pad,
    write_json,
    write_tokenizer,
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
    ExportedHead,
    ExportOptions,
    RewardArchive,
    build_exported_head,
    build_reference_model,
    convert_logits,
)
from nemo_aligner.checkpoint.hf.source import HEAD_NAME, REWARD_SUFFIX
from nemo_aligner.checkpoint.hf.transformers_classes import (
    BODY_SUFFIX,
    LANGUAGE_MODEL_SUFFIX,
    class_name,
    has_class,
)
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.write import scratch_beside
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import HEADS, SIGMOID
from nemo_aligner.contract.steps import MARKS
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.utils.console import say, waiting_for
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.writing import sync_to_disk, write_problem

# Export as a folder, with LoRA folded into the weights.


@dataclass(frozen=True)
class ExportSummary:
    """Result of an export, which the command prints.

    Attributes:
        output: the exported folder.
        architecture: name of the class in ``config.json``.
        dtype: precision of the stored weights.
        shards: number of safetensors files.
        contract: scoring contract of the exported model.
        pad_token: the pad token.
        texts: number of samples that were compared.
        largest_difference: largest difference between a reward of transformers and of this package
            in the comparison.
        query_groups: number of query groups in the archive.
        zero_groups: number of query groups of zeros in the archive. They were added for tensor
            parallelism, and are not exported.
        notes: lines for the user about how to read the exported head.
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
        outputs = self.contract.attributes
        lines = [
            f"{self.output}: {self.architecture} with the output{'s' * (len(outputs) > 1)} "
            f"{', '.join(outputs)}, weights in {self.dtype}, safetensors files: "
            f"{self.shards}, pad token {self.pad_token!r}",
            f"checked: {self.texts} samples, in batches of one and padded; the largest difference "
            f"of a reward is {self.largest_difference:.1e}",
            f"scoring contract: {self.contract.hash}",
        ]
        if self.zero_groups:
            exported_groups = self.query_groups - self.zero_groups
            ranks = next(n for n in count(2) if -(-exported_groups // n) * n == self.query_groups)
            lines.append(
                f"query groups: {exported_groups}; dropped {self.zero_groups} of zeros, which the "
                f"archive has for tensor parallelism (convert --tensor-parallel {ranks} adds them "
                "again)"
            )
        lines += self.notes
        if any(self.contract.label_means):
            means = dict(zip(self.contract.attributes, self.contract.label_means, strict=True))
            lines.append(
                "WARNING: the logits are not the rewards, because the head has no bias. Add "
                f"{means} to them (label_means in config.json)"
            )
        return "\n".join(lines)


def export_to_hf(
    archive: str | Path, output: str | Path, layout: ParallelLayout, options: ExportOptions
) -> ExportSummary:
    """Write the reward model ``archive`` as the new folder ``output``; one process calls it.

    Raises:
        CheckpointError: ``output`` exists; the archive is unsafe or is not a reward model; a
            Hugging Face folder cannot represent it; or the exported folder computes other rewards.
    """
    output = Path(output)
    if layout.num_ranks > 1:
        raise CheckpointError(
            f"an export runs in one process, but there are {layout.num_ranks} ranks"
        )
    with atomic_folder(output) as staging, open_nemo(archive) as folder:
        return _export(folder, staging, output, layout, options)


def _export(
    folder: NemoFolder, staging: Path, output: Path, layout: ParallelLayout, options: ExportOptions
) -> ExportSummary:
    say(f"scoring samples with {folder.source} ...")
    loaded = build_reference_model(folder, layout)
    contract, tokenizer = ScoringContract.from_dict(folder.contract or {}), loaded.tokenizer
    reads_mean = contract.reply_marker is not None
    archive = RewardArchive.of(folder)
    head, exported = build_exported_head(archive, contract, options)
    if reads_mean:
        require_package()
    stored = format_of(options.dtype or archive.embedding_dtype)
    texts = encode_texts(contract, tokenizer)
    load_layers_on_demand(loaded.model, partial(archive.read_as_exported, dtype=options.dtype))
    with waiting_for("scoring samples"):
        logits = compute_reference_logits(loaded.model, texts, layout)
    notes = _describe_folding(folder, archive, texts, layout, logits)
    del loaded  # so that it is not in memory together with transformers' copy
    gc.collect()  # modules form reference cycles, which only gc frees
    logits = convert_logits(logits, contract, head, merge=options.merge)
    pad_token, pad_id = choose_pad(tokenizer, contract, {text.token_ids[-1] for text in texts})
    architecture = _choose_class(archive, head, contract)
    config = hf_config(
        archive.family, archive.config, exported, architecture, pad_id, stored.torch_name
    ) | step_settings(exported, tokenizer)
    say(f"writing {output} ...")
    head_tensors = {} if reads_mean else head.tensors
    shards = _write_weights(archive, head_tensors, staging, config["vocab_size"], options)
    if reads_mean:
        write_modules(staging, head, config["hidden_size"])
    if head.form == VALUE_LAYER.last:
        save_file(head.tensors, staging / HEAD_NAME, metadata={"format": "pt"})
    write_json(staging / "config.json", config)
    write_json(staging / CONTRACT_NAME, exported.to_dict())
    write_tokenizer(staging, tokenizer, exported, pad_token)
    card = model_card(
        options.name_card(output),
        exported,
        pad_token,
        folder,
        options.base_license,
        contract.dtype,
        form=head.form,
        is_loaded_with_head=_fits_class(head, contract, config),
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
        largest_difference=_compare_rewards(staging, exported, texts, logits),
        query_groups=archive.num_query_groups,
        zero_groups=archive.num_query_groups - archive.config["num_query_groups"],
        notes=(*notes, *_describe_head(contract, exported, head.form), *_warn_of_pad(exported)),
    )


def _describe_folding(
    folder: NemoFolder,
    archive: RewardArchive,
    texts: list[CheckedText],
    layout: Any,
    logits: Tensor,
) -> list[str]:
    """Tell how far ``logits`` are from those of adapters that are not folded into their base."""
    if archive.lora is None or archive.lora.base_precision is None:
        return []
    loaded = build_reference_model(folder, layout)
    load_layers_on_demand(loaded.model, archive.read_unrounded)
    exact = compute_reference_logits(loaded.model, texts, layout)
    return [
        f"base precision: {archive.lora.base_precision.value}. The adapters are folded into the "
        f"dequantized weights; a reward changes by up to {float((exact - logits).abs().max()):.1e}"
    ]


def _compare_rewards(
    folder: Path, exported: ScoringContract, texts: list[CheckedText], logits: Tensor
) -> float:
    """Score the samples with the exported folder; return the largest difference from ``logits``."""
    check = check_folder if exported.reply_marker is None else check_pooled_folder
    say("scoring the same samples with transformers ...")
    with waiting_for("scoring with transformers"):
        return check(folder, exported, texts, logits)


# Suffix of the class name in config.json, by the form of the head. vLLM loads a head of two layers
# as Qwen2ForRewardModel; a value head needs the language model's class.
_SUFFIXES = {TWO_LAYERS.last: "ForRewardModel", VALUE_LAYER.last: LANGUAGE_MODEL_SUFFIX}
_STEP_SUFFIXES = {SCORE_WITH_BIAS: TOKEN_SUFFIX, TWO_LAYERS.last: STEP_SUFFIX}


def _choose_class(archive: RewardArchive, head: ExportedHead, contract: ScoringContract) -> str:
    """Return the class name for ``config.json``, from the archive's decoder and the head's form."""
    suffixes = _STEP_SUFFIXES if contract.has_steps else _SUFFIXES
    suffix = suffixes.get(head.form, REWARD_SUFFIX)
    # A reward-model class reads the last token, but this head reads the mean of a response, so only
    # the decoder's class fits.
    if contract.reply_marker is not None:
        suffix = BODY_SUFFIX
    return class_name(archive.family.to_hf(archive.config)["model_type"], suffix)


def _fits_class(head: ExportedHead, contract: ScoringContract, config: Mapping[str, Any]) -> bool:
    """Tell if transformers has a class that loads both decoder and head.

    ``config`` is the exported ``config.json``.
    """
    is_loaded = head.form == (SCORE_WITH_BIAS if contract.has_steps else LINEAR.last)
    return is_loaded and has_class(config["architectures"][0], config["model_type"])


def _describe_head(
    contract: ScoringContract, exported: ScoringContract, form: str
) -> Iterator[str]:
    """Yield lines for the user: what the exported head lacks, and how programs have to read it."""
    if contract.readout != exported.readout:
        readout = contract.output_readout
        if readout is not None and readout.kind == HEADS:
            yield (
                "dropped: the single heads. Only their mean, which is the reward, is exported, so "
                "the exported model does not tell how certain a reward is"
            )
        else:
            yield (
                "dropped: all quantiles except the median, which is the reward, so the exported "
                "model does not tell how certain a reward is"
            )
    exported_readout = exported.output_readout
    if exported_readout is not None and exported_readout.kind == SIGMOID:
        yield "the logits are log-odds: a reward is their sigmoid (readout in config.json)"
    elif exported_readout is not None:
        yield (
            "WARNING: the logits are those of bins. A reward is the mean of the bins' values, "
            "weighted by their softmax (readout in config.json; the model card has the program)"
        )
    if contract.principle_template is not None:
        yield (
            "programs that use the model have to append the question about the principle to the "
            "messages, as a turn of the user, with add_generation_prompt=True "
            "(principle_template in config.json)"
        )
    if contract.has_steps:
        yield (
            "programs that use the model have to split a response into steps, and read each step "
            "where the model card says (scored_position and step_separator in config.json)"
        )
        if contract.aggregate is not None:
            yield (
                f"WARNING: the reward of a sample is the {contract.aggregate} of its steps' "
                "rewards (aggregate in config.json). Other programs return only the steps' "
                "rewards: aggregate them as the program in the model card does"
            )
    elif contract.reply_marker is not None:
        yield "load it with sentence-transformers, and pass the text before a response as prompt"
    elif form == SCORE_WITH_BIAS:
        yield "WARNING: transformers ignores score.bias; vLLM and this package read it"


def _warn_of_pad(contract: ScoringContract) -> Iterator[str]:
    """Yield a line for the user if samples end with the pad token, which transformers skips."""
    if contract.trailing_pad_id is not None:
        yield (
            f"WARNING: samples end with the pad token (id {contract.trailing_pad_id}), which "
            "transformers skips as padding. Programs that read the last token, such as vLLM, need "
            "samples without it (trailing_pad_id in scoring_contract.json)"
        )


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


# Functions that write the files of a Hugging Face reward model: safetensors shards and config.


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Provide a temporary folder that is renamed to ``output`` if the block succeeds.

    If the block fails, the temporary folder is removed, so ``output`` never is incomplete. All
    files get the mode that the umask gives.
    """
    with scratch_beside(output) as scratch:
        staging = scratch / "folder"
        staging.mkdir()
        yield staging
        new_file = scratch / "file"
        new_file.touch()
        for file in staging.rglob("*"):
            if file.is_file():  # safetensors creates files that only their owner may read
                file.chmod(new_file.stat().st_mode)
            sync_to_disk(file)
        staging.rename(output)
    sync_to_disk(output.parent)


class ShardWriter:
    """Writes tensors to safetensors files of at most ``max_bytes`` in ``folder``.

    A tensor of more than ``max_bytes`` gets a file of its own.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current file; begin a new file if it does not fit."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._bytes + size > self._max_bytes:
            self._flush()
        # Copy a view, because it would keep the larger tensor, of which it is a part, in memory.
        is_part = tensor.untyped_storage().nbytes() > size
        self._pending[name] = tensor.clone() if is_part else tensor
        self._bytes += size
        self._total += size

    def finish(self) -> int:
        """Write the last file, name all files, and write an index if there are several.

        Returns:
            The number of files.
        """
        self._flush()
        count = len(self._files)
        if count == 1:
            self._path(1).rename(self._folder / "model.safetensors")
            return count
        # Each name contains the number of files, so the files are named at the end.
        weight_map = {}
        for number, names in enumerate(self._files, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        write_json(self._folder / "model.safetensors.index.json", index)
        return count

    def _flush(self) -> None:
        self._files.append(list(self._pending))
        tensors = {name: tensor.contiguous() for name, tensor in self._pending.items()}
        path = self._path(len(self._files))
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._folder}: the weights cannot be written: "
                f"{write_problem(self._folder, error)}"
            ) from error
        self._pending, self._bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f".shard-{number}"


# sentence-transformers' CrossEncoder applies a sigmoid to a single output, unless the config has
# this setting.
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
    """Build the ``config.json`` of an exported reward model.

    Args:
        config: settings of the model by the keys of ``model_config.yaml``.
        contract: scoring contract of the exported model.
        architecture: name of the model's class, for the key ``architectures``.
        pad_id: id of the pad token.
        dtype: torch's name of the stored weights' dtype.
    """
    names = dict(enumerate(contract.output_names))
    readout = contract.output_readout
    statistics: dict[str, Any] = {}
    reward_token_id, principle = contract.reward_token_id, contract.principle_template
    reads_last_token = not contract.has_steps and contract.reply_marker is None
    is_read_by_openrlhf = len(names) == 1 and architecture.endswith(REWARD_SUFFIX)
    if contract.reward_mean and contract.reward_std and is_read_by_openrlhf:
        # OpenRLHF normalizes logits with these values if --normalize_reward is set.
        mean = contract.reward_mean[0] - contract.label_means[0]
        statistics = {PREFIX_KEY: LINEAR.last, "mean": mean, "std": contract.reward_std[0]}
    return {
        "architectures": [architecture],
        **family.to_hf(config),
        "vocab_size": max(config["vocab_size"], pad_id + 1),
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "problem_type": "regression",  # makes vLLM return raw scores
        **({_ACTIVATION_KEY: _NO_ACTIVATION} if reads_last_token else {}),
        "bos_token_id": contract.bos_id,
        "eos_token_id": contract.eos_id,
        "pad_token_id": pad_id,
        # transformers 5 reads "dtype", transformers 4 "torch_dtype".
        "dtype": dtype,
        "torch_dtype": dtype,
        "scoring_contract_hash": contract.hash,
        **({} if reward_token_id is None else {REWARD_TOKEN_KEY: reward_token_id}),
        **({} if principle is None else {"principle_template": principle}),
        # The readout tells programs how to compute rewards from the logits of bins.
        **({} if readout is None else {READOUT_KEY: json.loads(readout.to_json())}),
        # Constants that a program must add to the logits to get rewards. They are 0 if the exported
        # head's bias already contains them.
        "label_means": dict(zip(contract.attributes, contract.label_means, strict=True)),
        **statistics,
    }


def step_settings(contract: ScoringContract, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the additional settings of ``config.json`` for a model with one reward per step.

    For one attribute with two outputs, ``problem_type`` is None: vLLM then returns the softmax of
    the outputs, as for Qwen2.5-Math-PRM.
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
