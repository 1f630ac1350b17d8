"""A reward model's ``.nemo`` as a Hugging Face folder, which is checked before it gets its name.

Tensors are read from the archive one after the other; LoRA is folded into them. What was written is
loaded by transformers, and must give the same token ids, and rewards within 1e-4 in fp32, as the
archive does.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.card import model_card
from nemo_aligner.checkpoint.hf.check import (
    architecture_of,
    check_folder,
    cut,
    encode_texts,
    our_logits,
)
from nemo_aligner.checkpoint.hf.folder import (
    ShardWriter,
    choose_pad,
    folder_when_whole,
    hf_config,
    write_json,
    write_tokenizer,
)
from nemo_aligner.checkpoint.hf.layerwise import read_as_it_runs
from nemo_aligner.checkpoint.hf.reward_archive import RewardArchive, check_head
from nemo_aligner.checkpoint.hf.tensors import HEAD_KEY, HF_HEAD
from nemo_aligner.checkpoint.nemo.folders import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import reward_model_without_weights
from nemo_aligner.config.common import Precision
from nemo_aligner.console import say, waiting_for
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.precision import format_of
from nemo_aligner.text.contract import ScoringContract


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
            ranks = next(n for n in count(2) if -(-kept // n) * n == self.query_groups)
            lines.append(
                f"query groups: {kept}; {self.zero_groups} of zeros, which the archive has beside "
                "them for tensor parallelism, are left out; converted with tensor-parallel "
                f"{ranks} they come back"
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
    exported = exported_contract(contract, merge=options.merge, dtype=options.dtype)
    stored = format_of(options.dtype or archive.embedding_dtype)
    texts = encode_texts(contract, tokenizer)
    read_as_it_runs(loaded.model, partial(archive.read_as_exported, dtype=options.dtype))
    token_lists = [cut(ids, contract.seq_length) for _, ids in texts]
    with waiting_for("scoring texts"):
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


def exported_contract(
    contract: ScoringContract, *, merge: bool, dtype: torch.dtype | None = None
) -> ScoringContract:
    """The contract of what is written: of other numbers, or with all attributes in one."""
    if dtype is not None:
        contract = contract.with_dtype(format_of(dtype).precision)
    if not merge:
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
    archive: RewardArchive,
    staging: Path,
    contract: ScoringContract,
    vocab_size: int,
    options: ExportOptions,
) -> int:
    writer = ShardWriter(staging, options.max_shard_bytes)
    for name, tensor in archive.tensors(vocab_size, options.dtype):
        writer.add(name, tensor)
    writer.add(HF_HEAD, exported_head(archive, contract, merge=options.merge))
    return writer.finish()


def exported_head(archive: RewardArchive, contract: ScoringContract, *, merge: bool) -> Tensor:
    """The head ``[A, hidden]`` in fp32, or ``[1, hidden]`` with its rows summed by weight."""
    head = archive.store.read(HEAD_KEY).float()
    return torch.tensor(contract.attribute_weights)[None] @ head if merge else head
