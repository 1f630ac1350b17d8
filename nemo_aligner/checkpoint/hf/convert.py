"""Conversion of Hugging Face checkpoints to ``.nemo``, base models and reward models.

No model is built: tensors are read one after the other as they are written. A reward model is of a
known family, with a head of a known layout (``heads.py``), and gets a scoring contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import HEAD_PREFIX, PREFIX, attribute_names
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.base import Rule, add_zero_groups
from nemo_aligner.checkpoint.hf.heads import (
    REWARD_TOKEN_KEY,
    FoundHead,
    architecture_in,
    check_are_rewards,
    describe_head,
    find_head,
    lacks_output_layer,
    reads_steps,
    unread_head_tensors,
)
from nemo_aligner.checkpoint.hf.source import (
    REWARD_SUFFIX,
    Source,
    check_tensors,
    hf_shapes,
    megatron_key,
    model_rules,
    open_source,
    with_single_experts,
)
from nemo_aligner.checkpoint.nemo.archive import scratch_beside
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME
from nemo_aligner.checkpoint.nemo.write import write_lazy_nemo
from nemo_aligner.checkpoint.weights.save import LazyTensor, dtype_of_matrices
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.config.model import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    RegressionConfig,
    ScoredPosition,
)
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.fields import are_numbers
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.readout import BINS, Readout
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.distributed.launch import single_process
from nemo_aligner.models.shape import ModelShape, with_head_shape
from nemo_aligner.utils.errors import AlignerError, CheckpointError, DataError, shown


@dataclass(frozen=True)
class ConversionSummary:
    """Result of a conversion; a base model has no contract."""

    family: str
    parameters: int
    dtype: str
    layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    zero_groups: int
    head: str
    contract: ScoringContract | None
    output: Path
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        kind, meaning = "base model", ""
        if self.contract is not None:
            kind = f"reward model of {', '.join(self.contract.attributes)}"
            length = f"texts of up to {self.contract.seq_length} tokens"
            raw = "" if self.contract.template else ", no chat template: raw texts only"
            meaning = f"\n{length}{raw}, scoring contract {self.contract.hash}"
        added = f"; query groups of zeros added: {self.zero_groups}" if self.zero_groups else ""
        notes = "".join(f"\n{note}" for note in self.notes)
        return (
            f"{self.output}: {self.family} {kind}, {self.parameters:,} parameters in {self.dtype}, "
            f"{self.layers} layers of {self.hidden_size}, vocabulary of {self.vocab_size}, "
            f"{tied} embeddings{added}{notes}\nhead: {self.head}{meaning}"
        )


def convert_hf_to_nemo(
    source: str | Path,
    output: str | Path,
    dtype: torch.dtype | None = None,
    tensor_parallel: int = 1,
    head: str | None = None,
    *,
    template: str | None = None,
    seq_length: int | None = None,
    attributes: Sequence[str] | None = None,
    step_separator: str | None = None,
    reads: ScoredPosition | None = None,
) -> ConversionSummary:
    """Write the model in ``source`` as the archive ``output``; one process calls it.

    Args:
        source: a folder with ``config.json``, safetensors and a tokenizer, a ``.gguf`` file, or a
            model's name on the hub.
        dtype: None keeps the stored one (GGUF: fp32). A reward head is fp32.
        tensor_parallel: if it does not divide the model's query groups, groups of zeros are added,
            which change no output and never train.
        head: see ``find_head``.
        template: of a reward model, as ``model.data.template``; None is its tokenizer's.
        seq_length: of a reward model, tokens of the longest text; None is the model's own limit,
            but at most 4096.
        attributes: of a reward model, names of its outputs; None are those of ``id2label``.
        step_separator: the text behind each step, where a reward is read for each; None is none, or
            ``<extra_0>`` for a class that reads steps.
        reads: rule of steps, where a reward is read for each; None is ``step_marks``, if there is a
            separator or the class reads steps.

    Raises:
        CheckpointError: an unknown family, an unsupported setting, a missing or surplus tensor, or
            one whose shape contradicts the config; or a reward model without a valid contract.
    """
    try:
        if tensor_parallel < 1:
            raise CheckpointError(f"tensor_parallel: got {tensor_parallel}, wanted 1 or more")
        with single_process():
            found = open_source(source)
            given = _ContractOptions(template, seq_length, attributes, step_separator, reads)
            return _convert(found, Path(output), dtype, tensor_parallel, head, given)
    except AlignerError as error:
        # Errors of a folder name the file already; those of a config or a tensor do not.
        named = str(error).startswith((str(source), str(output)))
        raise CheckpointError(str(error) if named else f"{source}: {error}") from error


def _convert(
    found: Source,
    output: Path,
    dtype: torch.dtype | None,
    tensor_parallel: int,
    choice: str | None,
    given: _ContractOptions,
) -> ConversionSummary:
    family = find_family(found.config.get("model_type"))
    config = family.to_nemo(found.config)
    found = replace(found, tensors=with_single_experts(family, family.rules(config), found.tensors))
    head = find_head(found, choice)
    labels = _labels_of(found, head, given.attributes)
    if head is not None and given.asks_for_steps:
        head = head.at_steps()
    _refuse_options(found, labels, given)
    rules = _rules_of(found, config, labels, choice)
    # The embeddings, whose rows a head may be of, are among the others already.
    wanted = _sizes_of_head(found, head, labels, config["hidden_size"]) | hf_shapes(rules, config)
    # Whatever is not wanted and not left out on purpose is refused: it might change the model.
    left_out = unread_head_tensors(found, head, choice)
    if head is not None:
        left_out += [name for name in family.untied.hf if name in found.tensors.keys() - wanted]
    check_tensors(family, config, wanted, found.tensors, left_out)
    zero_groups = -config["num_query_groups"] % tensor_parallel
    tensors, layers = _plan(rules, config, found.tensors, dtype, zero_groups)
    stored = format_of(dtype_of_matrices(_all(tensors, layers)))
    shaped = with_head_shape(config, None if head is None else head.shape)
    archived = _with_zero_groups({**shaped, "precision": stored.nemo}, zero_groups)
    with scratch_beside(output) as scratch:
        tokenizer = _save_tokenizer(found, scratch / "tokenizer", config["vocab_size"])
        shape = ModelShape.from_config(config)
        how = stored.precision, shape.max_position_embeddings, given, head
        contract = _contract_of(found, labels, tokenizer, *how)
        if head is not None and contract is not None:
            # A LongRoPE or dynamic rotation depends on a length, which only the contract has.
            shape.length_dependent_rope(contract.seq_length)  # raises if it has none
            head = head.with_rows_of(tokenizer).with_outputs(contract.num_outputs)
            for name, tensor in head.tensors(config["hidden_size"]).items():
                tensors[PREFIX + HEAD_PREFIX + name] = tensor
            archived["reward_model_type"] = contract.reward_model_type
            archived["regression"] = {"num_attributes": contract.num_outputs}
        write_lazy_nemo(output, archived, tensors, layers, scratch, contract)
    return ConversionSummary(
        family=family.name,
        parameters=sum(prod(tensor.shape) for tensor in _all(tensors, layers)),
        dtype=stored.precision.value,
        layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tied=config["share_embeddings_and_output_weights"],
        zero_groups=zero_groups,
        head=describe_head(head, left_out, contract),
        contract=contract,
        output=output,
        notes=found.notes,
    )


def _rules_of(
    found: Source, config: Mapping[str, Any], labels: Sequence[str] | None, choice: str | None
) -> list[tuple[Rule, int | None]]:
    """Rules of the decoder; with its output layer, if that belongs to a base model."""
    family = find_family(found.config.get("model_type"))
    has_output_layer = labels is None and not lacks_output_layer(found, choice)
    return model_rules(family, config, has_output_layer=has_output_layer)


def _sizes_of_head(
    found: Source, head: FoundHead | None, labels: Sequence[str] | None, hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """Shapes that a reward head's tensors have to have."""
    if head is None or labels is None:
        return {}
    return head.sizes(hidden_size, _num_outputs(found, head, labels))


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
    """Write the tokenizer and load it, to find damage now rather than in training."""
    found.save_tokenizer(folder)
    tokenizer = load_tokenizer(folder, "tokenizer")
    _ = tokenizer.fingerprint
    tokenizer.check_fits(vocab_size)
    return tokenizer


def _plan(
    rules: Sequence[tuple[Rule, int | None]],
    config: Mapping[str, Any],
    stored: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    zero_groups: int,
) -> tuple[dict[str, LazyTensor], dict[str, list[LazyTensor]]]:
    """Lazy Megatron tensors by key, outside and inside the layers."""
    tensors: dict[str, LazyTensor] = {}
    layers: dict[str, list[LazyTensor]] = {}
    for rule, layer in rules:
        parts = [stored[name] for name in rule.hf]

        # A default, because a closure would see the last rule of the loop.
        def join(parts: Sequence[Tensor], rule: Rule = rule) -> Tensor:
            data = rule.join(parts, config)
            groups = config["num_query_groups"]
            data = add_zero_groups(rule.group_axis, data, groups, groups + zero_groups)
            return data.to(dtype or data.dtype).contiguous()

        def read(parts: Sequence[LazyTensor] = parts, join: Any = join) -> Tensor:
            return join([part.read() for part in parts])

        # On the meta device: shape and dtype of the result, without a byte read.
        outline = join([part.outline() for part in parts])
        tensor = LazyTensor(tuple(outline.shape), outline.dtype, read)
        key = megatron_key(rule, layer)
        if layer is None:
            tensors[key] = tensor
        else:
            layers.setdefault(key, []).append(tensor)
    return tensors, layers


def _all(
    tensors: Mapping[str, LazyTensor], layers: Mapping[str, Sequence[LazyTensor]]
) -> list[LazyTensor]:
    return [*tensors.values(), *(tensor for stack in layers.values() for tensor in stack)]


# The names of a reward model's outputs, and its scoring contract.

_MAX_DEFAULT_SEQ_LENGTH = 4096


def _labels_of(
    found: Source, head: FoundHead | None, attributes: Sequence[str] | None
) -> list[str] | None:
    """Names of a reward model's outputs, in order; None for a base model.

    Args:
        attributes: names to use instead of those of ``id2label``.
    """
    if head is None:
        return None
    if reads_steps(found):
        return _labels_of_steps(found, head, attributes)
    problem = found.config.get("problem_type")
    if attributes is not None:
        check_are_rewards(problem)
        return list(attribute_names(attributes, head.outputs))
    labels, contract = _stated_labels(found, head), _contract_of_bins(found)
    may_be_classes = head.outputs > 1 and architecture_in(found).endswith(REWARD_SUFFIX)
    remedy = "name them with --attributes, or set problem_type to regression in config.json"
    check_are_rewards(problem, labels if may_be_classes else (), remedy)
    if contract is None:
        return labels
    if labels != contract.output_names:
        raise CheckpointError(
            f"config.json: id2label: got {shown(labels)}, {CONTRACT_NAME} wants "
            f"{shown(contract.output_names)}"
        )
    return list(contract.attributes)


def _num_outputs(found: Source, head: FoundHead, labels: Sequence[str]) -> int:
    """Outputs that a head of these ``_labels_of`` has to have; any, of a stranger's steps."""
    if reads_steps(found):
        if found.contract is None:
            return head.outputs
        wanted = ScoringContract.from_dict(found.contract).num_outputs
        return max(wanted, 2)  # one reward is exported as two outputs
    contract = _contract_of_bins(found)
    return len(labels if contract is None else contract.output_names)


def _contract_of_bins(found: Source) -> ScoringContract | None:
    """The contract of our export of a head of bins, which has several outputs an attribute."""
    if found.contract is None or found.contract.get("readout") is None:
        return None
    return ScoringContract.from_dict(found.contract)


def _labels_of_steps(found: Source, head: FoundHead, attributes: Sequence[str] | None) -> list[str]:
    """One name: a head of two outputs says how probable a wrong and a right step are.

    Our exports have those of their contracts.
    """
    if found.contract is not None:
        contract = ScoringContract.from_dict(found.contract)
        if not contract.has_steps:
            raise CheckpointError(
                f"architectures: got {shown(found.config.get('architectures'))}, which reads "
                f"steps, but {CONTRACT_NAME} has none (scored_position: {contract.scored_position})"
            )
        return list(contract.attributes)
    if head.outputs > 2:
        name = head.names["weight"]
        raise CheckpointError(
            f"{name}: got {head.outputs} rows, wanted 2 (a step is wrong or right) or 1, as "
            f"architectures is {shown(found.config.get('architectures'))}; head none takes its "
            "body as a base model"
        )
    return ["reward"] if attributes is None else list(attribute_names(attributes, 1))


def _stated_labels(found: Source, head: FoundHead) -> list[str]:
    if head.rows:  # what a config may say of labels is not about them
        return ["reward"]
    names = found.config.get("id2label")
    try:
        if names is None:
            names = {number: f"LABEL_{number}" for number in range(_num_labels(found, head))}
        by_number = {int(key): str(names[key]) for key in names}
        labels = [by_number[number] for number in range(len(names))]
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"id2label: got {shown(names)}, wanted names for the numbers from 0 on (or num_labels)"
        ) from error
    return ["reward"] if labels == ["LABEL_0"] else labels


def _num_labels(found: Source, head: FoundHead) -> int:
    count = found.config.get("num_labels", head.outputs)
    if count != head.outputs:
        raise CheckpointError(
            f"num_labels: got {shown(count)} and {head.outputs} rows of {head.names['weight']}, "
            "wanted as many"
        )
    return head.outputs


class _ContractOptions(NamedTuple):
    """Options of a new contract, as of ``convert_hf_to_nemo``; None where not given."""

    template: str | None = None
    seq_length: int | None = None
    attributes: Sequence[str] | None = None
    step_separator: str | None = None
    reads: ScoredPosition | None = None

    @property
    def asks_for_steps(self) -> bool:
        """True if they say how steps are read."""
        return self.step_separator is not None or self.reads is not None


def _refuse_options(found: Source, labels: list[str] | None, given: _ContractOptions) -> None:
    """Refuse options of a contract where there is none to make by them."""
    makes_contract = labels is not None and found.contract is None
    if not makes_contract and any(each is not None for each in given):
        why = "a base model has none" if labels is None else f"it brings its own, {CONTRACT_NAME}"
        raise CheckpointError(f"got options for a scoring contract, but {why}")


def _contract_of(
    found: Source,
    labels: list[str] | None,
    tokenizer: Tokenizer,
    precision: Precision,
    longest: int,
    given: _ContractOptions,
    head: FoundHead | None,
) -> ScoringContract | None:
    """Contract of a reward model: its own if this package exported it, else a new one.

    Args:
        labels: as ``_labels_of`` gives them.
        longest: tokens of the model's longest text.
    """
    if labels is None:
        return None
    if found.contract is not None:
        contract = ScoringContract.from_dict(found.contract)
        # GGUF keeps no tokenizer.json: ours is made anew, with other bytes and the same ids.
        if found.remakes_tokenizer:
            fingerprint = tokenizer.fingerprint
            contract = replace(contract, tokenizer_fingerprint=fingerprint)
        # The template is the file's: it might loop for ever.
        contract.check_template_ends(tokenizer)
        _check_own(contract, labels, tokenizer.fingerprint)
        return contract.with_dtype(precision)
    contract = _new_contract(found, labels, tokenizer, precision, longest, given)
    if contract.has_steps and head is not None and (head.outputs, len(labels)) == (2, 1):
        contract = contract.with_readout(Readout(BINS, ((0.0, 1.0),)))
    is_ranking = contract.reward_model_type == RewardModelType.binary_ranking.value
    statistics: list[Any] = [found.config.get(key) for key in ("mean", "std")]
    if is_ranking and are_numbers(statistics) and statistics[1] > 0:
        # OpenRLHF's, which it subtracts and divides by only if told to (--normalize_reward).
        mean, std = statistics
        contract = contract.with_statistics([mean], [std], "OpenRLHF's evaluation (config.json)")
    token_id = found.config.get(REWARD_TOKEN_KEY)
    if token_id is not None:
        contract = replace(contract, reward_token_id=token_id)
        if token_id >= tokenizer.vocab_size:
            raise CheckpointError(
                f"{REWARD_TOKEN_KEY}: got {token_id}, wanted a token of {tokenizer.vocab_size}"
            )
    if given.template is not None and not contract.template:
        raise CheckpointError(
            f"template: got {given.template!r}, but the tokenizer has no chat template"
        )
    return replace(contract, attributes=tuple(labels))


def _new_contract(
    found: Source,
    labels: list[str],
    tokenizer: Tokenizer,
    precision: Precision,
    longest: int,
    given: _ContractOptions,
) -> ScoringContract:
    has_steps = reads_steps(found) or given.asks_for_steps
    is_ranking = len(labels) == 1 and not has_steps
    reads, step_separator = given.reads, given.step_separator
    if reads is None:
        reads = ScoredPosition.step_marks if has_steps else ScoredPosition.last_token
    if reads is ScoredPosition.step_marks:
        step_separator = _separator(tokenizer, step_separator)
    settings = ModelConfig(
        reward_model_type=RewardModelType.binary_ranking
        if is_ranking
        else RewardModelType.regression,
        regression=RegressionConfig(attributes=labels),
        data=DataConfig(
            template=given.template,
            seq_length=given.seq_length or min(longest, _MAX_DEFAULT_SEQ_LENGTH),
            step_separator=step_separator,
        ),
        head=HeadConfig(reads=reads),
    )
    return build_contract(settings, tokenizer, precision)


# The step token of Qwen2.5-Math-PRM.
_STEP_TOKEN = "<extra_0>"


def _separator(tokenizer: Tokenizer, given: str | None) -> str:
    """The text behind each step, which checkpoints do not say."""
    if given is not None:
        return given
    try:
        tokenizer.token_id(_STEP_TOKEN)
    except DataError as error:
        raise CheckpointError(
            f"step_separator: got none, and the tokenizer has no {_STEP_TOKEN}; wanted the text "
            "behind each step, at which the head reads (a line break, if TRL trained it)"
        ) from error
    return _STEP_TOKEN


def _check_own(contract: ScoringContract, labels: Sequence[str], fingerprint: str) -> None:
    for name, got, wanted in (
        ("config.json: id2label", list(labels), list(contract.attributes)),
        ("tokenizer fingerprint", fingerprint, contract.tokenizer_fingerprint),
    ):
        if got != wanted:
            raise CheckpointError(
                f"{name}: got {shown(got)}, {CONTRACT_NAME} wants {shown(wanted)}"
            )
