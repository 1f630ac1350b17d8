"""A Hugging Face checkpoint as a ``.nemo``: a base model, or a reward model with its contract.

No model is built, and tensors are read one after the other as they are written. A reward model is
a ``*ForSequenceClassification`` of a known family; its head ``score`` has no bias.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf_names import Rule, add_zero_groups, find_family, hf_layer_name
from nemo_aligner.checkpoint.hf_source import CONTRACT_NAME, Source, open_source
from nemo_aligner.checkpoint.hf_tensors import (
    HEAD_KEY,
    HF_HEAD,
    REWARD_SUFFIX,
    check_tensors,
    hf_shapes,
    megatron_key,
    model_rules,
)
from nemo_aligner.checkpoint.nemo import write_nemo
from nemo_aligner.checkpoint.streaming import UnreadTensor, save_unread
from nemo_aligner.config.schema import (
    DataConfig,
    ModelConfig,
    Precision,
    RegressionConfig,
    RewardModelType,
)
from nemo_aligner.data.contract import ScoringContract, build_contract
from nemo_aligner.data.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.errors import AlignerError, CheckpointError, short, shown

MAX_DEFAULT_SEQ_LENGTH = 4096
# A tensor without columns may have any number of rows, and takes no byte.
_MOST_LABELS = 10_000
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NEMO_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: 16}


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
            meaning = f"\n{length}, scoring contract {self.contract.hash}"
        added = f"; query groups of zeros added: {self.zero_groups}" if self.zero_groups else ""
        return (
            f"{self.output}: {self.family} {kind}, {self.parameters:,} parameters in {self.dtype}, "
            f"{self.layers} layers of {self.hidden_size}, vocabulary of {self.vocab_size}, "
            f"{tied} embeddings{added}{meaning}"
        )


@dataclass(frozen=True)
class ContractOptions:
    """What a reward model's folder leaves open: ``model.data.template`` and ``seq_length``.

    None is the tokenizer's template, and the model's longest text, but at most 4096 tokens.
    """

    template: str | None = None
    seq_length: int | None = None


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
        return _convert(open_source(source), Path(output), dtype, tensor_parallel, options)
    except AlignerError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _convert(
    found: Source,
    output: Path,
    dtype: torch.dtype | None,
    tensor_parallel: int,
    options: ContractOptions | None,
) -> ConversionSummary:
    family = find_family(found.config.get("model_type"))
    config = family.to_nemo(found.config)
    labels = _labels(found)
    rules = model_rules(family, config, labels is not None)
    wanted = hf_shapes(rules, config)
    if labels is not None:
        wanted[HF_HEAD] = (len(labels), config["hidden_size"])
    check_tensors(family, config, wanted, found.tensors)
    groups = config["num_query_groups"]
    zero_groups = -groups % tensor_parallel
    tensors, layers = _plan(rules, config, found.tensors, dtype, groups + zero_groups)
    stored = next(iter(tensors.values())).dtype
    archived = {**config, "precision": _NEMO_PRECISIONS.get(stored, 32)}
    if zero_groups:
        archived["num_attention_heads"] += config["num_attention_heads"] // groups * zero_groups
        archived["num_query_groups"] += zero_groups
        archived["zero_query_groups"] = zero_groups
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert_", dir=output.parent) as scratch:
        weights, tokenizer = Path(scratch, "weights"), Path(scratch, "tokenizer")
        found.save_tokenizer(tokenizer)
        # Looked at for a base model, too: a damaged one would only be found by training.
        read = load_tokenizer(tokenizer, "tokenizer")
        _ = read.fingerprint
        contract = _contract(found, labels, read, Precision(DTYPE_NAMES[stored]), options)
        if contract is not None:
            tensors[HEAD_KEY] = _as_fp32(found.tensors[HF_HEAD])
            archived["reward_model_type"] = contract.reward_model_type
            archived["regression"] = {"num_attributes": len(contract.attributes)}
        save_unread(tensors, layers, weights)
        write_nemo(
            output, archived, weights, tokenizer, None if contract is None else contract.to_dict()
        )
    everything = [*tensors.values(), *(tensor for stack in layers.values() for tensor in stack)]
    return ConversionSummary(
        family=family.name,
        parameters=sum(prod(tensor.shape) for tensor in everything),
        dtype=DTYPE_NAMES[stored],
        layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tied=config["share_embeddings_and_output_weights"],
        zero_groups=zero_groups,
        contract=contract,
        output=output,
    )


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
        parts = [stored[hf_layer_name(name, layer)] for name in rule.hf]

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


def _read_and_join(
    parts: Sequence[UnreadTensor], join: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    return join([part.read() for part in parts])


def _as_fp32(tensor: UnreadTensor) -> UnreadTensor:
    return UnreadTensor(tensor.shape, torch.float32, lambda: tensor.read().float())


def _labels(found: Source) -> list[str] | None:
    """The names of a reward model's outputs, in order; None for a base model.

    Raises:
        CheckpointError: the head is not one linear map without a bias, or its outputs have no
            names that fit.
    """
    architectures = found.config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise CheckpointError(f"architectures: got {shown(architectures)}, wanted a list of names")
    architecture = str(architectures[0])
    if not architecture.endswith(REWARD_SUFFIX):
        return None
    if "score.bias" in found.tensors:
        raise CheckpointError("score.bias: got a head with a bias, wanted one without")
    if HF_HEAD not in found.tensors:
        raise CheckpointError(
            f"got a {short(architecture)} without {HF_HEAD}, wanted it as its head"
        )
    names = found.config.get("id2label")
    try:
        if names is None:
            names = {number: f"LABEL_{number}" for number in range(_num_labels(found))}
        labels = [str(name) for _, name in sorted((int(key), names[key]) for key in names)]
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"id2label: got {shown(names)}, wanted numbers and names (or num_labels)"
        ) from error
    return ["reward"] if labels == ["LABEL_0"] else labels


def _num_labels(found: Source) -> int:
    rows = next(iter(found.tensors[HF_HEAD].shape), 0)
    count = found.config.get("num_labels", rows)
    if count != rows or rows > _MOST_LABELS:
        raise CheckpointError(
            f"num_labels: got {shown(count)} and {rows} rows of {HF_HEAD}, wanted as many, and at "
            f"most {_MOST_LABELS}"
        )
    return rows


def _contract(
    found: Source,
    labels: list[str] | None,
    tokenizer: Tokenizer,
    precision: Precision,
    options: ContractOptions | None,
) -> ScoringContract | None:
    """What a score of this model means: its own contract if we exported it, else a new one."""
    if options is not None and (labels is None or found.contract is not None):
        why = "a base model has none" if labels is None else f"it brings its own, {CONTRACT_NAME}"
        raise CheckpointError(f"got options for a scoring contract, but {why}")
    if labels is None:
        return None
    if found.contract is not None:
        contract = ScoringContract.from_dict(found.contract)
        contract.check_template_ends(tokenizer)
        _check_own(contract, labels, tokenizer.fingerprint)
        return contract.with_dtype(precision)
    options = options or ContractOptions()
    longest = int(found.config["max_position_embeddings"])
    is_ranking = len(labels) == 1
    settings = ModelConfig(
        reward_model_type=RewardModelType.binary_ranking
        if is_ranking
        else RewardModelType.regression,
        regression=RegressionConfig(attributes=labels),
        data=DataConfig(
            template=options.template,
            seq_length=options.seq_length or min(longest, MAX_DEFAULT_SEQ_LENGTH),
        ),
    )
    contract = build_contract(settings, tokenizer, precision)
    return dataclasses.replace(contract, attributes=tuple(labels))


def _check_own(contract: ScoringContract, labels: Sequence[str], fingerprint: str) -> None:
    for name, got, wanted in (
        ("config.json: id2label", list(labels), list(contract.attributes)),
        ("tokenizer fingerprint", fingerprint, contract.tokenizer_fingerprint),
    ):
        if got != wanted:
            raise CheckpointError(
                f"{name}: got {shown(got)}, {CONTRACT_NAME} wants {shown(wanted)}"
            )
