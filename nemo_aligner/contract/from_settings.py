"""The scoring contract that training settings define, and comparisons of two contracts.

``build_contract`` makes the contract of a model about to be trained. If training starts from a
reward model, ``continue_contract`` compares it with that model's contract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from nemo_aligner.config.common import Aggregate, Overlong, Precision, RewardModelType, as_yaml
from nemo_aligner.config.model import (
    DEFAULT_SEQ_LENGTH,
    TRL_FORMAT,
    DataConfig,
    ModelConfig,
    ScoredPosition,
)
from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.contract.principles import PRINCIPLE_KEY, resolve_principle_template
from nemo_aligner.contract.readout import SIGMOID
from nemo_aligner.contract.steps import SEPARATED
from nemo_aligner.contract.template_check import check_template, freeze_date
from nemo_aligner.contract.template_trials import PROBE
from nemo_aligner.contract.templates import canonical_kwargs, resolve_template
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import make_reply_marker
from nemo_aligner.utils.errors import CheckpointError, ConfigError, DataError


def build_contract(
    config: ModelConfig,
    tokenizer: Tokenizer,
    precision: Precision,
    start: ScoringContract | None = None,
    previous: ScoringContract | None = None,
) -> ScoringContract:
    """Build the contract of a model about to be trained; ``label_means`` are still zero.

    Args:
        start: contract of the reward model that training starts from, or None. Settings that are
            null take its values.
        previous: contract of the run that is resumed, or None. If ``start`` or ``previous`` has an
            earlier version of the chosen built-in template, that version stays.

    Raises:
        ConfigError: the template is not found or fails its checks (``check_template``), or the
            settings add a BOS or EOS that the tokenizer does not have.
    """
    data, ranking = config.data, config.reward_model_type is RewardModelType.binary_ranking
    attributes = ("reward",) if ranking else tuple(config.regression.attributes)
    weights = {} if ranking else config.regression.attribute_weights
    bos, eos = tokenizer.adds_bos, tokenizer.adds_eos
    if start is not None:
        bos, eos = start.add_bos, start.add_eos
    eos = eos or data.format == TRL_FORMAT
    source = _choose_template(data, tokenizer, start, previous)
    kwargs = _choose_template_kwargs(data, source, start, tokenizer)
    template = ChatTemplate.of(source, tokenizer, kwargs)
    reads = config.head.reads
    is_mean, limits = reads is ScoredPosition.reply_mean, choose_limits(data, start)
    contract = ScoringContract(
        template=template.source,
        add_bos=_resolve_flag(data.add_bos, bos, tokenizer.bos_id, "add_bos"),
        add_eos=_resolve_flag(data.add_eos, eos, tokenizer.eos_id, "add_eos"),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        overlong=limits.overlong.value,
        seq_length=limits.seq_length,
        attributes=attributes,
        attribute_weights=tuple(weights.get(name, 0.0 if weights else 1.0) for name in attributes),
        label_means=(0.0,) * len(attributes),
        dtype=precision.value,
        tokenizer_fingerprint=tokenizer.fingerprint,
        reward_model_type=config.reward_model_type.value,
        scored_position=reads.value,
        reply_marker=make_reply_marker(template, tokenizer) if is_mean else None,
        chat_template_kwargs=template.kwargs or None,
        reward_token_id=None if start is None else start.reward_token_id,
        step_separator=_choose_step_separator(data, reads, start),
        principle_template=_choose_principle_template(data, reads, template.source, start),
        base_precision=_base_precision(config),
        trailing_pad_id=_choose_trailing_pad(reads, start),
    )
    _check_template(contract, data.template or "tokenizer", tokenizer)
    return _check_principle(contract, tokenizer)


def _check_template(contract: ScoringContract, name: str, tokenizer: Tokenizer) -> None:
    """Check the chat template; without one, there may be no template variables."""
    if contract.template:
        check_template(contract.chat_template(tokenizer), name, tokenizer)
    elif contract.template_kwargs:
        raise ConfigError(
            "model.data.chat_template_kwargs: got template variables, but there is no chat "
            "template. Set model.data.template, or omit them"
        )


def _choose_trailing_pad(reads: ScoredPosition, start: ScoringContract | None) -> int | None:
    """Return ``trailing_pad_id`` of ``start``; None unless rewards are read at the last token."""
    is_last = reads is ScoredPosition.last_token
    return start.trailing_pad_id if start is not None and is_last else None


def _base_precision(config: ModelConfig) -> str | None:
    precision = config.lora.base_precision if config.lora.rank > 0 else None
    return None if precision is None else precision.value


class Limits(NamedTuple):
    """The maximum number of tokens of a sample, and the rule for longer samples."""

    seq_length: int
    overlong: Overlong


def choose_limits(data: DataConfig, start: ScoringContract | None) -> Limits:
    """Return the limits in the settings; a null one comes from ``start`` or is the default."""
    length = DEFAULT_SEQ_LENGTH if start is None else start.seq_length
    rule = Overlong.drop if start is None else Overlong(start.overlong)
    return Limits(data.seq_length or length, data.overlong or rule)


def with_aggregate(contract: ScoringContract, rule: str | None) -> ScoringContract:
    """Return a copy of the contract that combines the rewards of steps by ``rule``.

    Args:
        rule: an ``Aggregate`` value or None. ``last`` is stored as None, and so is any rule of a
            model without turns or steps.

    Raises:
        DataError: there is no such rule.
    """
    is_named = contract.has_steps and rule != Aggregate.last.value
    return dataclasses.replace(contract, aggregate=rule if is_named else None)


def _choose_template(
    data: DataConfig,
    tokenizer: Tokenizer,
    start: ScoringContract | None,
    previous: ScoringContract | None,
) -> str:
    """Return the template to train with, in which today's date is replaced by a fixed one.

    The first of these templates that exists is taken: the one in the settings, that of ``start``,
    that of the tokenizer.
    """
    if data.template is None and start is not None:
        template = start.template
    else:
        contracts = [contract for contract in (start, previous) if contract is not None]
        contract_templates = [contract.template for contract in contracts]
        template = resolve_template(data.template or "tokenizer", tokenizer, contract_templates)
    # ``freeze_date`` may change the template. Then the variables of ``start`` no longer apply,
    # so the caller chooses the variables again for the template returned here.
    kwargs = _choose_template_kwargs(data, template, start, tokenizer)
    return freeze_date(ChatTemplate.of(template, tokenizer, kwargs)).source


def _choose_template_kwargs(
    data: DataConfig, template: str, start: ScoringContract | None, tokenizer: Tokenizer
) -> str:
    """Return the template's variables as canonical JSON: special tokens, and those of the settings.

    If the settings have none, use those of ``start``, provided that it has the same template.
    """
    kwargs = data.chat_template_kwargs
    if kwargs is None and start is not None and start.template == template:
        return start.template_kwargs
    return canonical_kwargs({**_find_special_tokens(template, tokenizer), **(kwargs or {})})


# Special tokens that transformers passes to a template. BOS and EOS are always passed.
_SPECIAL_TOKENS = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _find_special_tokens(template: str, tokenizer: Tokenizer) -> dict[str, str]:
    """Map the special tokens that a template writes and the tokenizer has to their texts."""
    try:
        variables = ChatTemplate(template).variables
    except DataError:  # the template is invalid; ``check_template`` will report that
        return {}
    texts = {name: tokenizer.special_token(name) for name in _SPECIAL_TOKENS if name in variables}
    return {name: text for name, text in texts.items() if text}


def _choose_step_separator(
    data: DataConfig, reads: ScoredPosition, start: ScoringContract | None
) -> str | None:
    """Return the separator of steps; None if ``reads`` does not cut replies into steps.

    It is the separator in the settings or, if that is null, the one of ``start``. If there is none
    either, it is a blank line.
    """
    separator = data.step_separator
    if reads.value not in SEPARATED:
        if separator is not None:
            raise ConfigError(
                f"model.data.step_separator: got {separator!r}, wanted null: model.head.reads is "
                f"{reads.value}, and only {', '.join(SEPARATED)} cut replies into steps"
            )
        return None
    if separator == "":
        raise ConfigError("model.data.step_separator: got an empty text, wanted a separator")
    start_separator = None if start is None else start.step_separator
    return separator or start_separator or "\n\n"


def _choose_principle_template(
    data: DataConfig, reads: ScoredPosition, template: str, start: ScoringContract | None
) -> str | None:
    """Return the text about a sample's principle: that of the settings or, if null, of ``start``.

    The text of ``start`` is dropped if rewards are not read behind it, or no template writes it.

    Args:
        reads: where rewards are read.
        template: the chat template; empty if there is none.
    """
    if data.principle_template is None:
        is_usable = reads is ScoredPosition.last_token and bool(template)
        return start.principle_template if start is not None and is_usable else None
    text = resolve_principle_template(data.principle_template)
    if text is not None and reads is not ScoredPosition.last_token:
        raise ConfigError(
            f"{PRINCIPLE_KEY}: got a text with model.head.reads={reads.value}. Set "
            "model.head.reads=last_token: the principle follows the reply"
        )
    if text is not None and not template:
        raise ConfigError(
            f"{PRINCIPLE_KEY}: got a text, but there is no chat template to write it with. Set "
            "model.data.template"
        )
    return text


def _check_principle(contract: ScoringContract, tokenizer: Tokenizer) -> ScoringContract:
    """Check that the chat template renders a question about a principle; return the contract.

    Raises:
        ConfigError: it rejects this turn of the user, or renders only a part of the sample.
    """
    if contract.principle_template is None:
        return contract
    try:
        contract.tokenize(tokenizer, [Conversation(PROBE, principle="a principle")])
    except DataError as error:
        raise ConfigError(
            f"{PRINCIPLE_KEY}: the chat template cannot write a principle after the reply: "
            f"{error}. Set model.data.template=chatml, for example"
        ) from error
    return contract


def _resolve_flag(setting: bool | None, default: bool, token_id: int | None, name: str) -> bool:
    """Return whether BOS or EOS is added: ``setting`` or, if it is null, ``default``.

    Args:
        token_id: id of BOS or EOS; None if the tokenizer has no such token.
        name: ``add_bos`` or ``add_eos``.

    Raises:
        ConfigError: a token is to be added that the tokenizer does not have.
    """
    is_added = default if setting is None else setting
    if is_added and token_id is None:
        token = name.removeprefix("add_").upper()
        cause = f"{name}: got true" if setting else f"format: got {TRL_FORMAT}"
        raise ConfigError(f"model.data.{cause}, but the tokenizer has no {token} token")
    return is_added


# Differences between two scoring contracts, and which of them are allowed when training starts from
# a reward model.

# The setting that decides each field of a contract, for error messages.
_SETTINGS = {
    "template": "model.data.template",
    "chat_template_kwargs": "model.data.chat_template_kwargs",
    "add_bos": "model.data.add_bos",
    "add_eos": "model.data.add_eos",
    "overlong": "model.data.overlong",
    "seq_length": "model.data.seq_length",
    "attributes": "model.regression.attributes",
    "dtype": "trainer.precision",
    "scored_position": "model.head.reads",
    "step_separator": "model.data.step_separator",
    "aggregate": "model.objective_kwargs.aggregate",
    "reward_model_type": "model.reward_model_type",
    "principle_template": PRINCIPLE_KEY,
    "base_precision": "model.lora.base_precision",
}
# Fields with long values. If their settings are null, they take the value of the reward model that
# training starts from.
_TAKEN_IF_NULL = ("template", "chat_template_kwargs", "step_separator", "principle_template")
_SHOWN_CHARACTERS = 40
# Fields that describe the head. The first tuple has those that come from the settings, the second
# all that a new head resets.
_HEAD_SETTINGS = ("reward_model_type", "attributes", "aggregate")
_HEAD_FIELDS = (*_HEAD_SETTINGS, "attribute_weights", "label_means", "readout")
_KEEP_HEAD_HINT = (
    " with a new head on its body; to keep the head instead, set "
    "pretrained_checkpoint.allow_contract_change=true"
)


def continue_contract(
    contract: ScoringContract,
    start: ScoringContract,
    *,
    allow_change: bool = False,
    new_head: bool = False,
    new_weights: bool = False,
) -> ScoringContract:
    """Return the contract for training that starts from a reward model.

    Label means, readout and attribute weights of ``start`` are kept with its head.

    Args:
        contract: the contract of the settings.
        start: the contract of the reward model that training starts from.
        allow_change: accept differences in all fields. But if the head is kept, the number of
            attributes must stay the same.
        new_head: take all fields of the head from ``contract``.
        new_weights: take the attribute weights from ``contract``.

    Raises:
        ConfigError: the two contracts differ in a way that is not allowed.
    """
    if not new_head:
        contract = dataclasses.replace(contract, readout=start.readout)
    if start.attributes == contract.attributes and not new_head:
        weights = contract.attribute_weights if new_weights else start.attribute_weights
        contract = dataclasses.replace(
            contract, label_means=start.label_means, attribute_weights=weights
        )
    differences = start.differences(contract)
    head_differences = {
        name: values for name, values in differences.items() if name in _HEAD_SETTINGS
    }
    other_differences = {
        name: values
        for name, values in differences.items()
        # Training that folds adapters into a dense base no longer has the base's precision.
        if name not in (*_HEAD_FIELDS, "base_precision")
    }
    head_fits = len(start.attributes) == len(contract.attributes)
    is_allowed = {
        "new_head": not head_differences or new_head or (allow_change and head_fits),
        "allow_contract_change": not other_differences or allow_change,
    }
    if not all(is_allowed.values()):
        rejected = {**head_differences, **other_differences}
        switches = [
            f"pretrained_checkpoint.{name}=true" for name in is_allowed if not is_allowed[name]
        ]
        can_keep_head = not is_allowed["new_head"] and head_fits and not other_differences
        hint = _KEEP_HEAD_HINT if can_keep_head else ""
        raise ConfigError(
            f"the reward model to start from has another scoring contract ({start.hash[:12]}) than "
            f"these settings ({contract.hash[:12]}): {describe_differences(rejected)}"
            f". {_advise_settings(rejected, start)} {' and '.join(switches)} to "
            f"train another model{hint}"
        )
    return contract


def _advise_settings(rejected: Mapping[str, tuple[Any, Any]], start: ScoringContract) -> str:
    """Describe which settings give a run the contract of ``start``, and begin the next sentence.

    Args:
        rejected: the fields of the contract that differ.
    """
    needed = [name for name in rejected if name in _SETTINGS]
    if start.reward_model_type == RewardModelType.binary_ranking.value:
        needed = [name for name in needed if name != "attributes"]  # pairs have no attributes
    assignments = []
    for name in needed:
        value = getattr(start, name)
        if name in _TAKEN_IF_NULL:
            value = None
        elif name == "attributes":
            value = f"[{','.join(value)}]"
        elif name == "aggregate":
            value = value or Aggregate.last.value
        assignments.append(f"{_SETTINGS[name]}={as_yaml(value)}")
    if not assignments:
        return "Set"
    return f"To keep the contract of that model, set {' '.join(assignments)}. Or set"


def check_expected(contract: ScoringContract, expected: str | None, key: str) -> None:
    """Check that a contract has the hash ``expected``; None accepts any.

    Args:
        key: the setting with the expected hash, for the error message.

    Raises:
        ConfigError: the hashes differ; the message names both.
    """
    if expected is not None and expected != contract.hash:
        raise ConfigError(
            f"{key}: got a reward model with the scoring contract {contract.hash}, wanted "
            f"{expected}. Choose the model that has this contract; or, if rewards of the other one "
            f"are what you need, set {key}={contract.hash}"
        )


def find_conflicts(
    first: ScoringContract, second: ScoringContract, may_differ: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """Map each field in which two contracts differ, except ``may_differ``, to its two values."""
    differences = first.differences(second)
    return {name: values for name, values in differences.items() if name not in may_differ}


def describe_differences(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """Format differences as ``setting: first -> second``.

    A long value is cut to the characters around the first difference.
    """
    return "; ".join(
        f"{name}: {' -> '.join(texts)}" for name, texts in show_differences(differences).items()
    )


def show_differences(differences: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[str, str]]:
    """Format differences as a mapping from a setting to its two values, which may be shortened."""
    return {
        _SETTINGS.get(name, name): _show_difference(*values) for name, values in differences.items()
    }


def _show_difference(first: Any, second: Any) -> tuple[str, str]:
    texts = (repr(first), repr(second))
    if max(map(len, texts)) <= _SHOWN_CHARACTERS:
        return texts
    differs_at = next(index for index, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
    start = max(0, differs_at - _SHOWN_CHARACTERS // 2)
    excerpts = [text[start : start + _SHOWN_CHARACTERS] for text in texts]
    return f"{'...' * (start > 0)}{excerpts[0]}...", f"{'...' * (start > 0)}{excerpts[1]}..."


# Checks for code that supports only a plain head (one output per attribute, read at the last
# token): critics, value heads, exports to other programs.


def check_plain_reading(contract: ScoringContract, location: str, reader: str) -> None:
    """Check that a model has a plain head: one output per attribute, read at the last token.

    Args:
        location: the model's file, for the error message.
        reader: the code that supports only plain heads, such as "a critic", for the error message.

    Raises:
        CheckpointError: the model has another head.
    """
    check_last_token(contract, location, reader)
    readout = contract.output_readout
    if readout is not None and readout.kind == SIGMOID:
        raise CheckpointError(
            f"{location}: its rewards are probabilities, the sigmoid of the head's output; wanted "
            f"a head whose output is the reward: {reader} applies no sigmoid "
            "(model.objective_kwargs.scale=log_odds trains one)"
        )
    if readout is not None:
        raise CheckpointError(
            f"{location}: its head has {readout.width} outputs for each attribute "
            f"({readout.kind}), wanted one that is the reward: {reader} cannot turn them into a "
            "reward"
        )


def check_last_token(contract: ScoringContract, location: str, reader: str) -> None:
    """Check that a model reads its rewards only at the last token; it may have several outputs.

    ``location`` is the model's file and ``reader`` the code that needs this, such as "a critic",
    both for the error message.

    Raises:
        CheckpointError: the model reads turns, steps, or the mean of the reply.
    """
    if contract.reply_marker is not None:
        raise CheckpointError(
            f"{location}: its head reads the mean of the reply (model.head.reads), wanted one that "
            f"reads the last token: {reader} cannot average over the reply"
        )
    if contract.has_steps:
        raise CheckpointError(
            f"{location}: its head reads every turn or step (model.head.reads is "
            f"{contract.scored_position}), wanted one that reads the last token: {reader} has one "
            "reward for each sample"
        )
