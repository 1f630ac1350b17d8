"""Checks of a scoring contract's fields: a contract comes from an archive, which is untrusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from nemo_aligner.config.common import Aggregate, Overlong, Precision, RewardModelType
from nemo_aligner.config.model import BasePrecision, ScoredPosition
from nemo_aligner.contract.principles import is_principle_template
from nemo_aligner.contract.steps import SEPARATED, STEPPED
from nemo_aligner.utils.errors import DataError, shown

# Largest length of a template in characters (at most 12 bytes each in JSON), so that an untrusted
# contract stays small. No real template is near it.
MAX_TEMPLATE = 2**16
_MAX_INT = 2**31
_MAX_SEPARATOR = 100


def check_fields(contract: Any) -> None:
    """Check the type and range of every field of a ``ScoringContract``, and their combinations.

    Raises:
        DataError: a field is invalid; the message names the field and its value.
    """
    for name, (is_valid, expected) in _FIELDS.items():
        value = getattr(contract, name)
        if not is_valid(value):
            raise DataError(f"scoring contract: {name}: got {shown(value)}, wanted {expected}")
    is_mean = contract.scored_position == ScoredPosition.reply_mean.value
    if is_mean == (contract.reply_marker is None):
        raise DataError(
            f"scoring contract: reply_marker: got {shown(contract.reply_marker)} with "
            f"scored_position {contract.scored_position}, wanted token ids if scored_position is "
            f"{ScoredPosition.reply_mean.value}, else null"
        )
    has_steps = contract.scored_position in SEPARATED
    if has_steps == (contract.step_separator is None):
        raise DataError(
            f"scoring contract: step_separator: got {shown(contract.step_separator)} with "
            f"scored_position {contract.scored_position}, wanted a separator if scored_position is "
            f"one of {', '.join(SEPARATED)}, else null"
        )
    reads_last = contract.scored_position == ScoredPosition.last_token.value
    if contract.principle_template is not None and not (reads_last and contract.template):
        raise DataError(
            "scoring contract: principle_template: got a text with scored_position "
            f"{contract.scored_position} and {'a' if contract.template else 'no'} chat template, "
            f"wanted scored_position {ScoredPosition.last_token.value} and a chat template: the "
            "reward for a principle is read after the question that follows the reply"
        )
    if contract.trailing_pad_id is not None and not reads_last:
        raise DataError(
            f"scoring contract: trailing_pad_id: got {contract.trailing_pad_id} with "
            f"scored_position {contract.scored_position}, wanted null: it moves the last token, so "
            f"it fits only {ScoredPosition.last_token.value}, which reads no other token"
        )
    if (
        contract.trailing_pad_id is not None
        and contract.trailing_pad_id == contract.reward_token_id
    ):
        raise DataError(
            f"scoring contract: trailing_pad_id: got {contract.trailing_pad_id}, wanted another "
            "token than reward_token_id, which is appended to be read"
        )
    has_one_output = contract.scored_position in STEPPED and contract.readout is None
    if contract.aggregate is not None and not has_one_output:
        raise DataError(
            f"scoring contract: aggregate: got {shown(contract.aggregate)} with scored_position "
            f"{contract.scored_position} and readout {shown(contract.readout)}, wanted null: only "
            f"a model that scores each turn or step ({', '.join(STEPPED)}), without a readout, has "
            "several rewards to combine into one"
        )


def is_text(value: Any) -> bool:
    """Return whether ``value`` is a string of valid Unicode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return False
    return True


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any, minimum: int) -> bool:
    return type(value) is int and minimum <= value < _MAX_INT


def _is_token_id_or_none(value: Any) -> bool:
    return value is None or _is_count(value, 0)


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_count(token_id, 0) for token_id in value)


def _is_json_object(value: Any) -> bool:
    if not is_text(value) or len(value) > MAX_TEMPLATE:
        return False
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        return False
    # ``with_kwargs_inside`` writes the names into template code, so they must be identifiers.
    return isinstance(content, dict) and bool(content) and all(map(str.isidentifier, content))


def are_numbers(value: Any) -> bool:
    """Return whether ``value`` is a list or tuple of finite numbers."""
    return isinstance(value, list | tuple) and all(
        isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e300
        for number in value
    )


def _are_numbers_or_none(value: Any) -> bool:
    return value is None or are_numbers(value)


def _check_member(kind: type[Enum]) -> tuple[Callable[[Any], bool], str]:
    values: Sequence[Any] = [member.value for member in kind]
    return lambda value: value in values, " or ".join(map(repr, values))


_FLAG = (_is_flag, "true or false")
_ID = (_is_token_id_or_none, "a token's id or null")
_NUMBERS = (are_numbers, "numbers")
# All rules except ``last``, which a contract stores as null.
_BASE_PRECISIONS = tuple(precision.value for precision in BasePrecision)
_AGGREGATES = tuple(rule.value for rule in Aggregate if rule is not Aggregate.last)
_TEXT_OR_NONE = (lambda value: value is None or is_text(value), "a string or null")
# For each field a check of its value, and the expected value in words, for the error message.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "template": (
        lambda value: is_text(value) and len(value) <= MAX_TEMPLATE,
        f"a string of at most {MAX_TEMPLATE} characters",
    ),
    "add_bos": _FLAG,
    "add_eos": _FLAG,
    "bos_id": _ID,
    "eos_id": _ID,
    "overlong": _check_member(Overlong),
    "seq_length": (lambda value: _is_count(value, 1), "a number of tokens"),
    "attributes": (
        lambda value: isinstance(value, list | tuple) and all(map(is_text, value)),
        "names",
    ),
    "attribute_weights": _NUMBERS,
    "label_means": _NUMBERS,
    "dtype": _check_member(Precision),
    "tokenizer_fingerprint": (is_text, "a string"),
    "reward_model_type": _check_member(RewardModelType),
    "scored_position": _check_member(ScoredPosition),
    "reward_mean": (_are_numbers_or_none, "numbers or null"),
    "reward_std": (_are_numbers_or_none, "numbers or null"),
    "measured_on": _TEXT_OR_NONE,
    "shaping": _TEXT_OR_NONE,
    "readout": _TEXT_OR_NONE,
    "chat_template_kwargs": (
        lambda value: value is None or _is_json_object(value),
        "a JSON object that is not empty, or null",
    ),
    "reward_token_id": _ID,
    "trailing_pad_id": _ID,
    "step_separator": (
        lambda value: value is None or (is_text(value) and 0 < len(value) <= _MAX_SEPARATOR),
        f"a string of 1 to {_MAX_SEPARATOR} characters, or null",
    ),
    "aggregate": (
        lambda value: value is None or value in _AGGREGATES,
        f"{', '.join(_AGGREGATES)} or null",
    ),
    "principle_template": (
        lambda value: value is None or (is_text(value) and is_principle_template(value)),
        "a text with {principle} once, or null",
    ),
    "base_precision": (
        lambda value: value is None or value in _BASE_PRECISIONS,
        f"{', '.join(_BASE_PRECISIONS)} or null",
    ),
    "reply_marker": (
        lambda value: value is None or (_are_token_ids(value) and len(value) > 0),
        "ids of tokens, or null",
    ),
}
