"""A Hugging Face checkpoint as a ``.nemo``: a base model, or a reward model with its contract.

No model is built, and tensors are read one after the other as they are written. A reward model is
a ``*ForSequenceClassification`` of a known family; its head ``score`` has no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.contract import ContractOptions, contract_of, labels_of
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.query_groups import add_zero_groups
from nemo_aligner.checkpoint.hf.families.rules import Rule
from nemo_aligner.checkpoint.hf.source import Source, open_source
from nemo_aligner.checkpoint.hf.tensors import (
    HEAD_KEY,
    HF_HEAD,
    check_tensors,
    hf_shapes,
    megatron_key,
    model_rules,
)
from nemo_aligner.checkpoint.nemo.write import scratch_beside, write_nemo
from nemo_aligner.checkpoint.weights.stream import UnreadTensor, dtype_of_matrices, save_unread
from nemo_aligner.errors import AlignerError, CheckpointError
from nemo_aligner.parallel.launch import single_process
from nemo_aligner.precision import format_of
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class ConversionSummary:
    """What was converted, and where it is; a base model has no contract."""

    family: str
    parameters: int
    dtype: str
    layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    zero_groups: int
    contract: ScoringContract | None
    output: Path

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        kind, meaning = "base model", ""
        if self.contract is not None:
            kind = f"reward model of {', '.join(self.contract.attributes)}"
            length = f"texts of up to {self.contract.seq_length} tokens"
            raw = "" if self.contract.template else ", no chat template: raw texts only"
            meaning = f"\n{length}{raw}, scoring contract {self.contract.hash}"
        added = f"; query groups of zeros added: {self.zero_groups}" if self.zero_groups else ""
        return (
            f"{self.output}: {self.family} {kind}, {self.parameters:,} parameters in {self.dtype}, "
            f"{self.layers} layers of {self.hidden_size}, vocabulary of {self.vocab_size}, "
            f"{tied} embeddings{added}{meaning}"
        )


def convert_hf_to_nemo(
    source: str | Path,
    output: str | Path,
    dtype: torch.dtype | None = None,
    tensor_parallel: int = 1,
    options: ContractOptions | None = None,
) -> ConversionSummary:
    """Write the model in ``source`` as the archive ``output``; one process.

    ``source`` is a folder with ``config.json``, safetensors and a tokenizer, a ``.gguf`` file, or a
    model's name on the hub. ``dtype`` None keeps what is stored (GGUF: fp32); a reward head is
    fp32. Where ``tensor_parallel`` does not divide the model's query groups, groups of zeros are
    added, which change no output and never train.

    Raises:
        CheckpointError: an unknown family, an unsupported setting, a tensor too few or too many, or
            of another shape than the config says; or a reward model whose contract cannot be.
    """
    try:
        if tensor_parallel < 1:
            raise CheckpointError(f"tensor_parallel: got {tensor_parallel}, wanted 1 or more")
        with single_process():
            return _convert(open_source(source), Path(output), dtype, tensor_parallel, options)
    except AlignerError as error:
        named = str(error).startswith((str(source), str(output)))
        raise CheckpointError(str(error) if named else f"{source}: {error}") from error


def _convert(
    found: Source,
    output: Path,
    dtype: torch.dtype | None,
    tensor_parallel: int,
    options: ContractOptions | None,
) -> ConversionSummary:
    family = find_family(found.config.get("model_type"))
    config = family.to_nemo(found.config)
    labels = labels_of(found, options)
    rules = model_rules(family, config, labels is not None)
    wanted = hf_shapes(rules, config)
    if labels is not None:
        wanted[HF_HEAD] = (len(labels), config["hidden_size"])
    check_tensors(family, config, wanted, found.tensors)
    groups = config["num_query_groups"]
    zero_groups = -groups % tensor_parallel
    tensors, layers = _plan(rules, config, found.tensors, dtype, groups + zero_groups)
    stored = format_of(dtype_of_matrices(_all(tensors, layers)))
    archived = _with_zero_groups({**config, "precision": stored.nemo}, zero_groups)
    with scratch_beside(output) as scratch:
        tokenizer = _save_tokenizer(found, scratch / "tokenizer", config["vocab_size"])
        contract = contract_of(found, labels, tokenizer, stored.precision, options)
        if contract is not None:
            tensors[HEAD_KEY] = _as_fp32(found.tensors[HF_HEAD])
            archived["reward_model_type"] = contract.reward_model_type
            archived["regression"] = {"num_attributes": len(contract.attributes)}
        save_unread(tensors, layers, scratch / "weights")
        score_rules = None if contract is None else contract.to_dict()
        write_nemo(output, archived, scratch / "weights", scratch / "tokenizer", score_rules)
    return ConversionSummary(
        family=family.name,
        parameters=sum(prod(tensor.shape) for tensor in _all(tensors, layers)),
        dtype=stored.precision.value,
        layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tied=config["share_embeddings_and_output_weights"],
        zero_groups=zero_groups,
        contract=contract,
        output=output,
    )


def _with_zero_groups(config: Mapping[str, Any], zero_groups: int) -> dict[str, Any]:
    if not zero_groups:
        return {**config}
    heads, groups = config["num_attention_heads"], config["num_query_groups"]
    return {
        **config,
        "num_attention_heads": heads + heads // groups * zero_groups,
        "num_query_groups": groups + zero_groups,
        "zero_query_groups": zero_groups,
    }


def _save_tokenizer(found: Source, folder: Path, vocab_size: int) -> Tokenizer:
    """Write it, and look at it, also for a base model: else only training would find damage."""
    found.save_tokenizer(folder)
    tokenizer = load_tokenizer(folder, "tokenizer")
    _ = tokenizer.fingerprint
    tokenizer.check_fits(vocab_size)
    return tokenizer


def _plan(
    rules: Sequence[tuple[Rule, int | None]],
    config: Mapping[str, Any],
    stored: Mapping[str, UnreadTensor],
    dtype: torch.dtype | None,
    num_query_groups: int,
) -> tuple[dict[str, UnreadTensor], dict[str, list[UnreadTensor]]]:
    """Megatron's tensors by key, outside the layers and inside; nothing is read."""
    tensors: dict[str, UnreadTensor] = {}
    layers: dict[str, list[UnreadTensor]] = {}
    for rule, layer in rules:
        parts = [stored[name] for name in rule.hf]

        def join(parts: Sequence[Tensor], rule: Rule = rule) -> Tensor:
            data = rule.join(parts, config)
            groups = config["num_query_groups"]
            data = add_zero_groups(rule.megatron, data, groups, num_query_groups)
            return data.to(dtype or data.dtype).contiguous()

        outline = join([part.outline() for part in parts])
        read = partial(_read_and_join, parts, join)
        tensor = UnreadTensor(tuple(outline.shape), outline.dtype, read)
        key = megatron_key(rule, layer)
        if layer is None:
            tensors[key] = tensor
        else:
            layers.setdefault(key, []).append(tensor)
    return tensors, layers


def _all(
    tensors: Mapping[str, UnreadTensor], layers: Mapping[str, Sequence[UnreadTensor]]
) -> list[UnreadTensor]:
    return [*tensors.values(), *(tensor for stack in layers.values() for tensor in stack)]


def _read_and_join(
    parts: Sequence[UnreadTensor], join: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    return join([part.read() for part in parts])


def _as_fp32(tensor: UnreadTensor) -> UnreadTensor:
    return UnreadTensor(tensor.shape, torch.float32, lambda: tensor.read().float())
