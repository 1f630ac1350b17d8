"""A reward model's ``.nemo`` as a Hugging Face folder, which is checked before it gets its name.

Tensors are read from the archive one after the other. What was written is loaded by transformers,
and must give the same token ids, and rewards within 1e-4 in fp32, as the archive does.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import EMBEDDING, HEAD, PREFIX
from nemo_aligner.checkpoint.hf.card import model_card
from nemo_aligner.checkpoint.hf.check import (
    architecture_of,
    check_folder,
    cut,
    encode_texts,
    our_logits,
)
from nemo_aligner.checkpoint.hf.families import family_of
from nemo_aligner.checkpoint.hf.families.family import ModelFamily
from nemo_aligner.checkpoint.hf.families.query_groups import add_zero_groups, remove_zero_groups
from nemo_aligner.checkpoint.hf.families.rules import Rule
from nemo_aligner.checkpoint.hf.folder import (
    ShardWriter,
    choose_pad,
    hf_config,
    write_json,
    write_tokenizer,
)
from nemo_aligner.checkpoint.hf.layerwise import read_as_it_runs
from nemo_aligner.checkpoint.hf.tensors import HEAD_KEY, HF_HEAD, megatron_key, model_rules
from nemo_aligner.checkpoint.nemo.folders import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import reward_model_without_weights
from nemo_aligner.checkpoint.nemo.write import scratch_beside, sync_to_disk
from nemo_aligner.checkpoint.weights.tensor_store import TensorStore
from nemo_aligner.config.common import Precision
from nemo_aligner.console import say
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.head_shape import check_is_linear
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.precision import format_of
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.one_reward import check_plain_reading

# What a config may leave out.
_WITH_DEFAULTS = ("kv_channels", "max_position_embeddings", "layernorm_epsilon", "rotary_base")


@dataclass(frozen=True)
class ExportOptions:
    """``dtype`` None is as stored; ``merge`` folds the attributes by their weights into one."""

    dtype: torch.dtype | None = None
    merge: bool = False
    max_shard_bytes: int = 5 * 10**9
    base_license: str = "unknown"


@dataclass(frozen=True)
class ExportSummary:
    """What was written where; ``largest_difference`` is that of a reward in the check.

    ``zero_groups`` of the archive's ``query_groups`` were of zeros, and were left out.
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
            lines.append(
                f"query groups: {kept}; {self.zero_groups} of zeros, which the archive has beside "
                "them for tensor parallelism, are left out; converted with tensor-parallel "
                f"{self.query_groups} they come back"
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
        CheckpointError: ``output`` exists, the archive is unsafe or no reward model, it holds what
            has no place in the folder, or what was written does not score like it.
    """
    output = Path(output)
    if layout.tp * layout.pp * layout.dp > 1:
        raise CheckpointError("an export runs in one process")
    with scratch_beside(output) as scratch, open_nemo(archive) as folder:
        staging = scratch / "folder"
        staging.mkdir()
        summary = _export(folder, staging, output, layout, options)
        for file in staging.iterdir():
            sync_to_disk(file)
        staging.rename(output)
    sync_to_disk(output.parent)
    return summary


@dataclass(frozen=True)
class _Archive:
    """A reward model's archive; ``config`` is without added query groups."""

    store: TensorStore
    embedding_dtype: torch.dtype
    family: ModelFamily
    config: dict[str, Any]
    num_query_groups: int
    rules: list[tuple[Rule, int | None]]

    @classmethod
    def of(cls, folder: NemoFolder) -> _Archive:
        """Raises CheckpointError where a tensor has no place in the family's model."""
        shape = ModelShape.from_config(folder.config)
        groups = shape.num_query_groups
        kept = groups - int(folder.config.get("zero_query_groups") or 0)
        config = {
            "share_embeddings_and_output_weights": True,  # NeMo's default
            **folder.config,
            **{name: getattr(shape, name) for name in _WITH_DEFAULTS},
            "num_attention_heads": shape.num_attention_heads // groups * kept,
            "num_query_groups": kept,
        }
        family = family_of(config)
        rules = model_rules(family, config, is_reward_model=True)
        known = {HEAD_KEY, *(megatron_key(rule, layer) for rule, layer in rules)}
        stored = folder.store.tensors
        unknown = sorted(stored.keys() - known)
        if unknown:
            raise CheckpointError(
                f"{folder.source}: {unknown[0]}: a {family.name} reward model of Hugging Face has "
                "no place for it"
            )
        dtype = stored[PREFIX + EMBEDDING][1]
        return cls(folder.store, dtype, family, config, groups, rules)

    def split(self, rule: Rule, data: Tensor) -> Sequence[Tensor]:
        """A whole Megatron tensor in Hugging Face's parts, without what was added to it."""
        if rule.megatron == EMBEDDING:
            data = data[: self.config["vocab_size"]]
        kept = self.config["num_query_groups"]
        data = remove_zero_groups(rule.megatron, data, self.num_query_groups, kept)
        return rule.split(data, self.config)

    def join(self, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of ``split``, but for vocabulary padding."""
        data = rule.join(parts, self.config)
        kept = self.config["num_query_groups"]
        return add_zero_groups(rule.megatron, data, kept, self.num_query_groups)

    def read_as_exported(self, name: str, layer: int | None, dtype: torch.dtype | None) -> Tensor:
        """A Megatron tensor with the numbers that the folder has: its parts are rounded there."""
        if name == HEAD:
            return self.store.read(HEAD_KEY)
        (rule,) = (rule for rule, at in self.rules if (rule.megatron, at) == (name, layer))
        parts = self.split(rule, self.store.read(megatron_key(rule, layer), layer))
        return self.join(rule, [part.to(dtype or part.dtype).float() for part in parts])

    def tensors(self, vocab_size: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the decoder by its Hugging Face name; ``dtype`` None is as stored.

        The embeddings get rows of zeros up to ``vocab_size``: a pad token may be new.
        """
        for rule, layer in self.rules:
            data = self.store.read(megatron_key(rule, layer), layer)
            for name, part in zip(rule.hf, self.split(rule, data), strict=True):
                part = part.to(dtype or part.dtype)
                if rule.megatron == EMBEDDING:
                    part = F.pad(part, (0, 0, 0, vocab_size - part.size(0)))
                yield name, part


def _export(
    folder: NemoFolder, staging: Path, output: Path, layout: ParallelLayout, options: ExportOptions
) -> ExportSummary:
    say(f"scoring texts with {folder.source} ...")
    loaded = reward_model_without_weights(folder, layout, Precision.fp32)
    contract = ScoringContract.from_dict(folder.contract or {})
    where, who = str(folder.source), "a reward model of Hugging Face"
    check_plain_reading(contract, where, who)
    check_is_linear(ModelShape.from_config(folder.config).head, where, who)
    archive = _Archive.of(folder)
    tokenizer, exported = loaded.tokenizer, _exported_contract(contract, options)
    stored = format_of(options.dtype or archive.embedding_dtype)
    texts = encode_texts(contract, tokenizer)
    read_as_it_runs(loaded.model, partial(archive.read_as_exported, dtype=options.dtype))
    token_lists = [cut(ids, contract.seq_length) for _, ids in texts]
    logits = our_logits(loaded.model, token_lists, layout)
    del loaded
    gc.collect()  # modules refer to themselves
    if options.merge:
        logits = logits @ torch.tensor(contract.attribute_weights)[:, None]
    pad_token, pad_id = choose_pad(tokenizer, {ids[-1] for _, ids in texts})
    architecture = architecture_of(archive.family.to_hf(archive.config)["model_type"])
    config = hf_config(
        archive.family, archive.config, exported, architecture, pad_id, stored.torch_name
    )
    say(f"writing {output} ...")
    shards = _write_weights(archive, staging, contract, config["vocab_size"], options)
    write_json(staging / "config.json", config)
    write_json(staging / CONTRACT_NAME, exported.to_dict())
    write_tokenizer(staging, tokenizer, exported, pad_token)
    card = model_card(
        output.name, exported, pad_token, folder.source, options.base_license, contract.dtype
    )
    (staging / "README.md").write_text(card, encoding="utf-8")
    say("scoring the same texts with transformers ...")
    return ExportSummary(
        output=output,
        architecture=architecture,
        dtype=stored.precision.value,
        shards=shards,
        contract=exported,
        pad_token=pad_token,
        texts=len(texts),
        largest_difference=check_folder(staging, exported, texts, logits),
        query_groups=archive.num_query_groups,
        zero_groups=archive.num_query_groups - archive.config["num_query_groups"],
    )


def _exported_contract(contract: ScoringContract, options: ExportOptions) -> ScoringContract:
    if options.dtype is not None:
        contract = contract.with_dtype(format_of(options.dtype).precision)
    if not options.merge:
        return contract

    def merged(values: Sequence[float]) -> tuple[float]:
        pairs = zip(contract.attribute_weights, values, strict=True)
        return (sum(weight * value for weight, value in pairs),)

    return dataclasses.replace(
        contract,
        attributes=("reward",),
        attribute_weights=(1.0,),
        label_means=merged(contract.label_means),
        # The spread of a sum is not known from the spreads of its parts.
        reward_mean=None,
        reward_std=None,
        measured_on=None,
    )


def _write_weights(
    archive: _Archive,
    staging: Path,
    contract: ScoringContract,
    vocab_size: int,
    options: ExportOptions,
) -> int:
    writer = ShardWriter(staging, options.max_shard_bytes)
    for name, tensor in archive.tensors(vocab_size, options.dtype):
        writer.add(name, tensor)
    head = archive.store.read(HEAD_KEY).float()
    if options.merge:
        head = torch.tensor(contract.attribute_weights)[None] @ head
    writer.add(HF_HEAD, head)
    return writer.finish()
