"""Convert Hugging Face checkpoints to ``.nemo`` archives, base models and reward models.

No model is built in memory: each tensor is read, converted and written before the next one. A
reward model must belong to a known family (``families``) and have a head of a known layout
(``heads.py``). The archive gets a scoring contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nemo_aligner.checkpoint.conversion_cache import is_hub_name, is_hugging_face
from nemo_aligner.checkpoint.decoder_tensors import HEAD_PREFIX, PREFIX
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.base import MTP_LAYERS, ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.query_groups import add_zero_groups
from nemo_aligner.checkpoint.hf.families.settings import HfSettings
from nemo_aligner.checkpoint.hf.heads import (
    FoundHead,
    describe_head,
    find_head,
    lacks_output_layer,
    unread_head_tensors,
)
from nemo_aligner.checkpoint.hf.labels import count_outputs, read_labels
from nemo_aligner.checkpoint.hf.new_contract import (
    ContractLimits,
    ContractOptions,
    predict_limits,
    read_or_build_contract,
    refuse_options,
)
from nemo_aligner.checkpoint.hf.scored_token import describe_scored_token
from nemo_aligner.checkpoint.hf.source import (
    Source,
    check_tensors,
    hf_shapes,
    megatron_key,
    model_rules,
    open_source,
    read_settings,
    split_fused_experts,
)
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.write import scratch_beside, write_lazy_nemo
from nemo_aligner.checkpoint.weights.save import LazyTensor, dtype_of_matrices
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.added_tokens import (
    ADDED_NAME,
    describe_removed_tokens,
    without_surplus_tokens,
)
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.distributed.launch import single_process
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import with_head_shape
from nemo_aligner.utils.errors import AlignerError, CheckpointError, ConfigError


@dataclass(frozen=True)
class ConversionSummary:
    """Result of a conversion, which the command prints.

    Attributes:
        family: name of the model family.
        parameters: number of weights in the archive.
        dtype: dtype of the decoder's matrices.
        layers: number of layers.
        hidden_size: channels of a hidden state.
        vocab_size: number of tokens in the vocabulary, the rows of the embedding.
        tied: whether the output layer (LM head) uses the embedding's weights.
        zero_groups: number of query groups of zeros that were added for tensor parallelism.
        head: one line about the reward head, from ``describe_head``.
        contract: scoring contract of the archive; None for a base model.
        output: path of the archive.
        notes: further lines for the user.
    """

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
            outputs = self.contract.attributes
            kind = f"reward model with the output{'s' * (len(outputs) > 1)} {', '.join(outputs)}"
            length = f"samples of up to {self.contract.seq_length} tokens"
            raw = "" if self.contract.template else ", no chat template: raw texts only"
            meaning = f"\n{length}{raw}\nscoring contract: {self.contract.hash}"
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
    reward_token: str | None = None,
) -> ConversionSummary:
    """Write the model in ``source`` as the archive ``output``; one process calls it.

    Args:
        source: a folder with ``config.json``, safetensors and a tokenizer, a ``.gguf`` file, or a
            model's name on the hub.
        output: path of the new archive.
        dtype: dtype of the weights; None keeps the stored one (for GGUF, fp32). A reward head is
            always fp32.
        tensor_parallel: tensor parallel size that the archive must support. If it does not divide
            the number of query groups, groups of zeros are added, which change no output and are
            never trained.
        head: which head to read, see ``find_head``. This and the next arguments are for reward
            models.
        template: chat template, as in ``model.data.template``; None means the tokenizer's.
        seq_length: tokens of the longest sample; None means the model's limit, but at most 4096.
        attributes: names of the outputs; None means the names in ``id2label``.
        step_separator: for one reward per step, the text after each step; None means no separator,
            or ``<extra_0>`` for a class that reads steps.
        reads: for one reward per step, the rule that finds the steps; None means ``step_marks``, if
            there is a separator or the class reads steps.
        reward_token: token that is appended to every sample and at which the head reads, by its
            text or its id; None means ``reward_token_id`` in ``config.json``, if it is there.

    Raises:
        CheckpointError: an unknown family, an unsupported setting, a missing or surplus tensor, or
            one whose shape contradicts the config; or a reward model without a valid contract.
    """
    try:
        if tensor_parallel < 1:
            raise CheckpointError(f"tensor_parallel: got {tensor_parallel}, wanted 1 or more")
        with single_process():
            opened = open_source(source)
            options = ContractOptions(
                template, seq_length, attributes, step_separator, reads, reward_token
            )
            return _convert(opened, Path(output), dtype, tensor_parallel, head, options)
    except AlignerError as error:
        raise _with_path(error, source, output) from error


def _with_path(error: AlignerError, source: str | Path, *files: str | Path) -> CheckpointError:
    """Return the error with the path of the source in front.

    Errors about files already begin with the file's path, in ``source`` or one of the ``files``.
    Errors about a setting or a tensor do not.
    """
    is_named = str(error).startswith((str(source), *map(str, files)))
    return CheckpointError(str(error) if is_named else f"{source}: {error}")


def read_config_and_limits(path: Path) -> tuple[Mapping[str, Any], ContractLimits | None]:
    """Read a model's config from a YAML file, or from any model that can be trained further.

    Of a model of Hugging Face only the settings are read; it is not converted.

    Returns:
        The config; and limits in the scoring contract that the model has, or will have after its
        conversion; None for a base model.

    Raises:
        ConfigError: the file does not exist, or holds no YAML mapping.
        CheckpointError: a model cannot be read, or is not supported.
    """
    if is_hugging_face(path) or is_hub_name(path):
        try:
            settings, fields = read_settings(path)
            config = find_family(settings.get("model_type"), settings).to_nemo(settings)
            if fields is None:
                longest = ModelShape.from_config(config).max_position_embeddings
                return config, predict_limits(settings, longest)
        except CheckpointError as error:
            raise _with_path(error, path) from error
        return config, _limits_in(ScoringContract.from_dict(fields))
    if not path.exists():
        raise ConfigError(f"config: got {path}, which does not exist")
    if path.suffix == ".nemo" or path.is_dir():
        with open_nemo(path, with_weights=False) as folder:
            return folder.config, _limits_in(folder.read_contract())
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config: {path}: got {type(config).__name__}, wanted a mapping")
    return config, None


def _limits_in(contract: ScoringContract | None) -> ContractLimits | None:
    return None if contract is None else ContractLimits(contract.seq_length, contract.dtype)


def _convert(
    source: Source,
    output: Path,
    dtype: torch.dtype | None,
    tensor_parallel: int,
    choice: str | None,
    options: ContractOptions,
) -> ConversionSummary:
    family = find_family(source.config.get("model_type"), source.config)
    config = family.to_nemo(source.config)
    single_experts = split_fused_experts(family, family.rules(config), source.tensors)
    source = _without_dropped(family, replace(source, tensors=single_experts))
    head = find_head(source, choice)
    labels = read_labels(source, head, options.attributes)
    if head is not None and options.has_steps:
        head = head.at_steps()
    refuse_options(source, labels, options)
    rules = _select_rules(source, config, labels, choice)
    head_sizes = _head_sizes(source, head, labels, config["hidden_size"])
    expected = head_sizes | hf_shapes(rules, config)
    dropped = _list_dropped(family, source, head, choice, expected)
    check_tensors(family, config, expected, source.tensors, dropped)
    zero_groups = _count_zero_groups(ModelShape.from_config(config), tensor_parallel)
    tensors, layers = _plan_tensors(rules, config, source.tensors, dtype, zero_groups)
    stored = format_of(_dtype_of_weights(tensors, layers))
    headed_config = with_head_shape(config, None if head is None else head.shape)
    archived = _add_zero_groups({**headed_config, "precision": stored.nemo}, zero_groups)
    with scratch_beside(output) as scratch:
        tokenizer, notes = _save_tokenizer(source, scratch / "tokenizer", config["vocab_size"])
        shape = ModelShape.from_config(config)
        limits = stored.precision, shape.max_position_embeddings
        contract = read_or_build_contract(source, labels, tokenizer, *limits, options, head)
        if head is not None and contract is not None:
            notes += describe_scored_token(source, contract, tokenizer)
            # Called only for its error: RoPE may not support the contract's seq_length.
            shape.length_dependent_rope(contract.seq_length)
            head = head.with_rows_of(tokenizer).with_outputs(contract.num_outputs)
            for name, tensor in head.tensors(config["hidden_size"]).items():
                tensors[PREFIX + HEAD_PREFIX + name] = tensor
            archived["reward_model_type"] = contract.reward_model_type
            archived["regression"] = {"num_attributes": contract.num_outputs}
        write_lazy_nemo(output, archived, tensors, layers, scratch, contract)
    return ConversionSummary(
        family=family.name,
        parameters=sum(prod(tensor.shape) for tensor in _list_all(tensors, layers)),
        dtype=stored.precision.value,
        layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tied=config["share_embeddings_and_output_weights"],
        zero_groups=zero_groups,
        head=describe_head(head, dropped, contract),
        contract=contract,
        output=output,
        notes=(*source.notes, *notes),
    )


def _list_dropped(
    family: ModelFamily,
    source: Source,
    head: FoundHead | None,
    choice: str | None,
    expected: Mapping[str, Any],
) -> list[str]:
    """List tensors that may be there although they are not converted.

    They are parts of other heads and, in a reward model, the output layer. ``check_tensors``
    rejects all other tensors that are not ``expected``.
    """
    dropped = unread_head_tensors(source, head, choice)
    if head is not None:
        dropped += [name for name in family.untied.hf if name in source.tensors.keys() - expected]
    return dropped


def _without_dropped(family: ModelFamily, source: Source) -> Source:
    """Return ``source`` without the tensors that the family drops, with a note that names them."""
    if not family.dropped:
        return source
    prefixes = family.dropped(source.config) if callable(family.dropped) else [family.dropped]
    if family.dropped == MTP_LAYERS:
        reader = HfSettings(source.config)
        first, key = reader.layers(), "num_nextn_predict_layers"
        last = first + reader.count(key, reader.count("num_mtp_layers", 1, minimum=0), minimum=0)
        prefixes = [MTP_LAYERS.format(mtp=layer) for layer in range(first, last)]
    tensors = {
        name: tensor
        for name, tensor in source.tensors.items()
        if not name.startswith(tuple(prefixes))
    }
    count = len(source.tensors) - len(tensors)
    names = ", ".join(
        f"{prefix}*"
        for prefix in prefixes
        if any(name.startswith(prefix) for name in source.tensors)
    )
    notes = [f"dropped: {count} tensors {names}"] if count else []
    return replace(source, tensors=tensors, notes=(*source.notes, *notes))


def _select_rules(
    source: Source, config: Mapping[str, Any], labels: Sequence[str] | None, choice: str | None
) -> list[tuple[Rule, int | None]]:
    """List the decoder's rules, each with its layer, or None outside the layers.

    For a base model, which has no reward head, the list includes the rule of the output layer.
    """
    family = find_family(source.config.get("model_type"))
    has_output_layer = labels is None and not lacks_output_layer(source, choice)
    return model_rules(family, config, has_output_layer=has_output_layer)


def _head_sizes(
    source: Source, head: FoundHead | None, labels: Sequence[str] | None, hidden_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the head's tensors by name; empty without a head."""
    if head is None or labels is None:
        return {}
    return head.sizes(hidden_size, count_outputs(source, head, labels))


def _count_zero_groups(shape: ModelShape, tensor_parallel: int) -> int:
    """Count the query groups of zeros that the archive needs for its tensor parallel size.

    Raises:
        CheckpointError: the layers of a Gemma 4, which differ in their query groups, need some.
    """
    counts = {shape.of_layer(layer + 1).num_query_groups for layer in range(shape.num_layers)}
    if shape.gemma4 is not None and any(count % tensor_parallel for count in counts):
        raise CheckpointError(
            f"tensor_parallel: got {tensor_parallel}, wanted a divisor of the numbers of query "
            f"groups of the layers, {sorted(counts)}. Query groups of zeros cannot be added to a "
            "Gemma 4, whose layers have several numbers of query groups."
        )
    return -shape.num_query_groups % tensor_parallel


def _add_zero_groups(config: Mapping[str, Any], zero_groups: int) -> dict[str, Any]:
    """Return a NeMo config with ``zero_groups`` more query groups, and the heads in them."""
    if not zero_groups:
        return {**config}
    heads, groups = config["num_attention_heads"], config["num_query_groups"]
    return {
        **config,
        "num_attention_heads": heads + heads // groups * zero_groups,
        "num_query_groups": groups + zero_groups,
        "zero_query_groups": zero_groups,
    }


def _save_tokenizer(source: Source, folder: Path, vocab_size: int) -> tuple[Tokenizer, list[str]]:
    """Write the source's tokenizer into ``folder``, then load and check it.

    Added tokens for which the model has no embedding are removed: no sample contains one. The check
    makes the conversion fail, and not a later training run, if the tokenizer is damaged or has more
    tokens than the model's ``vocab_size``.

    Returns:
        The tokenizer, and notes for the user.
    """
    source.save_tokenizer(folder)
    tokenizer, notes = load_tokenizer(folder, "tokenizer"), list[str]()
    if source.contract is None:  # the contract of an export has its tokenizer's fingerprint
        tokenizer, removed = without_surplus_tokens(tokenizer, vocab_size)
        if removed:
            tokenizer.save(folder)
            # Its tokens are in tokenizer.json, too.
            (folder / ADDED_NAME).unlink(missing_ok=True)
            notes.append(describe_removed_tokens(removed, vocab_size))
    _ = tokenizer.fingerprint
    tokenizer.check_fits(vocab_size)
    return tokenizer, notes


def _plan_tensors(
    rules: Sequence[tuple[Rule, int | None]],
    config: Mapping[str, Any],
    stored: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    zero_groups: int,
) -> tuple[dict[str, LazyTensor], dict[str, list[LazyTensor]]]:
    """Return Megatron's tensors as lazy ones, which are read and converted when they are written.

    Args:
        rules: rules of the decoder, each with its layer (None outside the layers).
        config: NeMo config, in which added query groups of zeros do not count.
        stored: lazy Hugging Face tensors by name.
        dtype: dtype of the result; None keeps the stored one.
        zero_groups: number of query groups of zeros to add.

    Returns:
        Two mappings by stored names: the tensors outside the layers, and for each name in the
        layers a list with one tensor of each layer. If the layers' shapes differ, each layer's
        tensors have names of their own; then all tensors are in the first mapping.
    """
    is_stacked = ModelShape.from_config(config).is_uniform
    tensors: dict[str, LazyTensor] = {}
    layers: dict[str, list[LazyTensor]] = {}
    for rule, layer in rules:
        parts = [stored[name] for name in rule.hf]

        # Bind ``rule`` as a default argument: ``join`` is called after the loop, when the variable
        # holds the last rule.
        def join(parts: Sequence[Tensor], rule: Rule = rule) -> Tensor:
            data = rule.join(parts, config)
            groups = config["num_query_groups"]
            data = add_zero_groups(rule.group_axis, data, groups, groups + zero_groups)
            return data.to(rule.dtype or dtype or data.dtype).contiguous()

        def read(parts: Sequence[LazyTensor] = parts, join: Any = join) -> Tensor:
            return join([part.read() for part in parts])

        # The parts' outlines are tensors on the meta device, so this finds shape and dtype of the
        # result without reading data.
        outline = join([part.outline() for part in parts])
        tensor = LazyTensor(tuple(outline.shape), outline.dtype, read)
        key = megatron_key(rule, layer, is_stacked=is_stacked)
        if layer is None or not is_stacked:
            tensors[key] = tensor
        else:
            layers.setdefault(key, []).append(tensor)
    return tensors, layers


def _dtype_of_weights(
    tensors: Mapping[str, LazyTensor], layers: Mapping[str, list[LazyTensor]]
) -> torch.dtype:
    """Return the dtype that all matrices share, or fp32 if they differ.

    Routers do not count: transformers stores some of them in fp32 in a model of bf16 matrices.
    """
    parts = ({key: [tensor] for key, tensor in tensors.items()}, layers)
    stacks = (stack for part in parts for key, stack in part.items() if ".mlp.router." not in key)
    return dtype_of_matrices(chain.from_iterable(stacks))


def _list_all(
    tensors: Mapping[str, LazyTensor], layers: Mapping[str, Sequence[LazyTensor]]
) -> list[LazyTensor]:
    return [*tensors.values(), *(tensor for stack in layers.values() for tensor in stack)]
