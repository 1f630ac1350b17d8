"""How two scoring contracts differ, and what of that training may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nemo_aligner.errors import ConfigError
from nemo_aligner.text.contract import ScoringContract

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
    "reward_model_type": "model.reward_model_type",
}
_SHOWN_CHARACTERS = 40
# Of a head, by the settings; and all that begins anew with a new one.
_OF_HEAD = ("reward_model_type", "attributes")
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
