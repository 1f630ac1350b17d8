"""The scoring contract that training settings ask for, and how two contracts differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_aligner.config.common import Aggregate, Precision, RewardModelType
from nemo_aligner.config.model import TRL_FORMAT, DataConfig, ModelConfig, ScoredPosition
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import SIGMOID
from nemo_aligner.contract.steps import SEPARATED
from nemo_aligner.contract.template_check import check_template, freeze_date
from nemo_aligner.contract.templates import canonical_kwargs, resolve_template
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import make_reply_marker
from nemo_aligner.utils.errors import CheckpointError, ConfigError


def build_contract(
    config: ModelConfig,
    tokenizer: Tokenizer,
    precision: Precision,
    start: ScoringContract | None = None,
    before: ScoringContract | None = None,
) -> ScoringContract:
    """The contract of a model about to be trained; ``label_means`` are still zero.

    ``start`` is the contract of the reward model that training starts from, if it starts from one:
    it decides what the settings leave open. ``before`` is that of the run that goes on. Where one
    of the two has an earlier text of the built-in template that is asked for, it stays.

    Raises:
        ConfigError: the template is not found, or fails its checks (see ``check_template``), or a
            BOS or EOS is asked for that the tokenizer does not have.
    """
    data = config.data
    ranking = config.reward_model_type is RewardModelType.binary_ranking
    attributes = ("reward",) if ranking else tuple(config.regression.attributes)
    weights = {} if ranking else config.regression.attribute_weights
    bos, eos = tokenizer.adds_bos, tokenizer.adds_eos
    if start is not None:
        bos, eos = start.add_bos, start.add_eos
    eos = eos or data.format == TRL_FORMAT
    known = [each.template for each in (start, before) if each is not None]
    template = _template(data.template, tokenizer, start, known)
    bos_token, eos_token = tokenizer.bos_token, tokenizer.eos_token
    template = freeze_date(template, bos_token, eos_token, _kwargs(data, template, start))
    # Once more: the variables of `start` are for its template, and not for a frozen one.
    kwargs, reads = _kwargs(data, template, start), config.head.reads
    is_mean = reads is ScoredPosition.reply_mean
    contract = ScoringContract(
        template=template,
        add_bos=_resolve(data.add_bos, bos, tokenizer.bos_id, "add_bos"),
        add_eos=_resolve(data.add_eos, eos, tokenizer.eos_id, "add_eos"),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        overlong=data.overlong.value,
        seq_length=data.seq_length,
        attributes=attributes,
        attribute_weights=tuple(weights.get(name, 0.0 if weights else 1.0) for name in attributes),
        label_means=(0.0,) * len(attributes),
        dtype=precision.value,
        tokenizer_fingerprint=tokenizer.fingerprint,
        reward_model_type=config.reward_model_type.value,
        scored_position=reads.value,
        reply_marker=make_reply_marker(template, tokenizer, kwargs) if is_mean else None,
        chat_template_kwargs=kwargs or None,
        reward_token_id=None if start is None else start.reward_token_id,
        step_separator=_separator(data, reads, start),
    )
    if contract.template:
        check_template(contract.template, data.template or "tokenizer", tokenizer, kwargs)
    elif kwargs:
        raise ConfigError(
            "model.data.chat_template_kwargs: got some, wanted none: there is no chat template"
        )
    return contract


def with_aggregate(contract: ScoringContract, rule: str | None) -> ScoringContract:
    """Return the contract of a model whose samples have one reward by ``rule``, an ``Aggregate``'s.

    Without turns or steps a sample has only one reward, and the contract has no rule. It does not
    name the rule ``last``, which is that of a contract without one, as is None.

    Raises:
        DataError: there is no such rule.
    """
    is_named = contract.has_steps and rule != Aggregate.last.value
    return dataclasses.replace(contract, aggregate=rule if is_named else None)


def _template(
    setting: str | None, tokenizer: Tokenizer, start: ScoringContract | None, known: Sequence[str]
) -> str:
    if setting is None and start is not None:
        return start.template
    return resolve_template(setting or "tokenizer", tokenizer, known)


def _kwargs(data: DataConfig, template: str, start: ScoringContract | None) -> str:
    """Template variables of the settings, or else of ``start``, if its template stays."""
    if data.chat_template_kwargs is not None:
        return canonical_kwargs(data.chat_template_kwargs)
    return start.template_kwargs if start is not None and start.template == template else ""


def _separator(
    data: DataConfig, reads: ScoredPosition, start: ScoringContract | None
) -> str | None:
    """What stands between steps: of the settings, or else of ``start``, or a blank line."""
    given = data.step_separator
    if reads.value not in SEPARATED:
        if given is not None:
            raise ConfigError(
                f"model.data.step_separator: got {given!r}, wanted null: model.head.reads is "
                f"{reads.value}, and only {' and '.join(SEPARATED)} cut replies into steps"
            )
        return None
    if given == "":
        raise ConfigError("model.data.step_separator: got an empty text, wanted a separator")
    known = None if start is None else start.step_separator
    return given or known or "\n\n"


def _resolve(setting: bool | None, habit: bool, token_id: int | None, name: str) -> bool:
    is_added = habit if setting is None else setting
    if is_added and token_id is None:
        token = name.removeprefix("add_").upper()
        cause = f"{name}: got true" if setting else f"format: got {TRL_FORMAT}"
        raise ConfigError(f"model.data.{cause}, but the tokenizer has no {token} token")
    return is_added


# Differences between two scoring contracts, and those that training may make.

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
}
_SHOWN_CHARACTERS = 40
# Fields of a head, from the settings, and fields that start anew with a new head.
_OF_HEAD = ("reward_model_type", "attributes", "aggregate")
_OF_ANY_HEAD = (*_OF_HEAD, "attribute_weights", "label_means", "readout")
_KEEPS_HEAD = (
    " on its body; pretrained_checkpoint.allow_contract_change=true keeps the head for them instead"
)


def continue_contract(
    contract: ScoringContract,
    start: ScoringContract,
    *,
    allow_change: bool = False,
    new_head: bool = False,
    new_weights: bool = False,
) -> ScoringContract:
    """The contract for training on from a reward model, with that model's label means.

    With ``new_head`` all that belongs to a head is that of the settings; a head that is kept has
    as many attributes as it had. With ``new_weights`` their weights are those of the settings.

    Raises:
        ConfigError: the settings ask for another contract, and nobody allowed that.
    """
    if not new_head:
        contract = dataclasses.replace(contract, readout=start.readout)
    if start.attributes == contract.attributes and not new_head:
        weights = contract.attribute_weights if new_weights else start.attribute_weights
        contract = dataclasses.replace(
            contract, label_means=start.label_means, attribute_weights=weights
        )
    differences = start.differences(contract)
    of_head = {name: values for name, values in differences.items() if name in _OF_HEAD}
    of_texts = {name: each for name, each in differences.items() if name not in _OF_ANY_HEAD}
    fits = len(start.attributes) == len(contract.attributes)
    is_allowed = {
        "new_head": not of_head or new_head or (allow_change and fits),
        "allow_contract_change": not of_texts or allow_change,
    }
    if not all(is_allowed.values()):
        shown = describe_differences({**of_head, **of_texts})
        wanted = [
            f"pretrained_checkpoint.{name}=true" for name in is_allowed if not is_allowed[name]
        ]
        keeps = "" if is_allowed["new_head"] or not fits or of_texts else _KEEPS_HEAD
        raise ConfigError(
            f"the reward model to start from has another scoring contract ({start.hash[:12]}) than "
            f"these settings ({contract.hash[:12]}): {shown}"
            f". Set them alike, or set {' and '.join(wanted)} to train another model{keeps}"
        )
    return contract


def check_expected(contract: ScoringContract, expected: str | None, key: str) -> None:
    """Refuse a contract that does not have the hash ``expected``; None takes any.

    Raises:
        ConfigError: it names both hashes; ``key`` is the setting that held the expected one.
    """
    if expected is not None and expected != contract.hash:
        raise ConfigError(
            f"{key}: got a reward model with the scoring contract {contract.hash}, "
            f"wanted {expected}"
        )


def describe_differences(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """``setting: mine -> other`` for people, long texts from where they part."""
    return "; ".join(
        f"{_SETTINGS.get(name, name)}: {' -> '.join(_parting(*values))}"
        for name, values in differences.items()
    )


def _parting(first: Any, second: Any) -> tuple[str, str]:
    shown = (repr(first), repr(second))
    if max(map(len, shown)) <= _SHOWN_CHARACTERS:
        return shown
    same = next(index for index, (a, b) in enumerate(zip(*shown, strict=False)) if a != b)
    start = max(0, same - _SHOWN_CHARACTERS // 2)
    cut = [text[start : start + _SHOWN_CHARACTERS] for text in shown]
    return f"{'...' * (start > 0)}{cut[0]}...", f"{'...' * (start > 0)}{cut[1]}..."


# Models whose head others can read: a critic, a value head, another program.


def check_plain_reading(contract: ScoringContract, where: str, who: str) -> None:
    """Refuse a model that reads more than the last token, or has several outputs an attribute.

    Raises:
        CheckpointError: it names the file ``where`` and ``who`` takes one output for each.
    """
    check_last_token(contract, where, who)
    readout = contract.output_readout
    if readout is not None and readout.kind == SIGMOID:
        raise CheckpointError(
            f"{where}: its rewards are probabilities, the sigmoid of the head's output; wanted a "
            f"head whose output is the reward: {who} takes no sigmoid "
            "(model.objective_kwargs.scale=log_odds trains one)"
        )
    if readout is not None:
        raise CheckpointError(
            f"{where}: its head has {readout.width} outputs for each attribute ({readout.kind}), "
            f"wanted one that is the reward: {who} cannot turn them into a reward"
        )


def check_last_token(contract: ScoringContract, where: str, who: str) -> None:
    """Refuse a model that reads more than the last token; see ``check_plain_reading``."""
    if contract.reply_marker is not None:
        raise CheckpointError(
            f"{where}: its head reads the mean of the reply (model.head.reads), wanted one that "
            f"reads the last token: {who} cannot average"
        )
    if contract.has_steps:
        raise CheckpointError(
            f"{where}: its head reads every turn or step (model.head.reads is "
            f"{contract.scored_position}), wanted one that reads the last token: {who} has one "
            "reward for each text"
        )
