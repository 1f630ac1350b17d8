"""Checks of a scoring contract's fields, as an archive is untrusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from nemo_aligner.config.common import Aggregate, Overlong, Precision, RewardModelType
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.steps import SEPARATED, STEPPED
from nemo_aligner.utils.errors import DataError, shown

# Far more than any has; as JSON in an archive it takes at most 12 bytes a character.
MAX_TEMPLATE = 2**16
_MOST = 2**31
_LONGEST_SEPARATOR = 100


def check_fields(contract: Any) -> None:
    """Refuse a ``ScoringContract`` that no text could be scored by.

    Raises:
        DataError: it names the field, its value, and what was wanted.
    """
    for name, (fits, wanted) in _FIELDS.items():
        value = getattr(contract, name)
        if not fits(value):
            raise DataError(f"scoring contract: {name}: got {shown(value)}, wanted {wanted}")
    is_mean = contract.scored_position == ScoredPosition.reply_mean.value
    if is_mean == (contract.reply_marker is None):
        raise DataError(
            f"scoring contract: reply_marker: got {shown(contract.reply_marker)} where "
            f"{contract.scored_position} is scored, wanted it for reply_mean, and for nothing else"
        )
    has_steps = contract.scored_position in SEPARATED
    if has_steps == (contract.step_separator is None):
        raise DataError(
            f"scoring contract: step_separator: got {shown(contract.step_separator)} where "
            f"{contract.scored_position} is scored, wanted it for {' and '.join(SEPARATED)}, and "
            "for nothing else"
        )
    has_one_output = contract.scored_position in STEPPED and contract.readout is None
    if contract.aggregate is not None and not has_one_output:
        raise DataError(
            f"scoring contract: aggregate: got {shown(contract.aggregate)} where "
            f"{contract.scored_position} is scored, wanted it for {', '.join(STEPPED)} of a head "
            "with one output for each attribute, and for nothing else"
        )


def is_text(value: Any) -> bool:
    """True if ``value`` is a text of whole characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        return False
    return True


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < _MOST


def _is_id(value: Any) -> bool:
    return value is None or _is_whole(value, 0)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_whole(each, 0) for each in value)


def _is_json_object(value: Any) -> bool:
    if not is_text(value) or len(value) > MAX_TEMPLATE:
        return False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return False
    # Names that are none would be code where a template is written with them inside.
    return isinstance(found, dict) and bool(found) and all(map(str.isidentifier, found))


def are_numbers(value: Any) -> bool:
    """True if ``value`` is a list of finite numbers."""
    return isinstance(value, list | tuple) and all(
        isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e300
        for number in value
    )


def _are_numbers_or_none(value: Any) -> bool:
    return value is None or are_numbers(value)


def _one_of(kind: type[Enum]) -> tuple[Callable[[Any], bool], str]:
    values: Sequence[Any] = [member.value for member in kind]
    return lambda value: value in values, " or ".join(map(repr, values))


_FLAG = (_is_flag, "true or false")
_ID = (_is_id, "a token's id or null")
_NUMBERS = (are_numbers, "numbers")
# The rule of a contract that names none is the last one's.
_AGGREGATES = tuple(how.value for how in Aggregate if how is not Aggregate.last)
_TEXT_OR_NONE = (lambda value: value is None or is_text(value), "a text or null")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "template": (
        lambda value: is_text(value) and len(value) <= MAX_TEMPLATE,
        f"a text of at most {MAX_TEMPLATE} characters",
    ),
    "add_bos": _FLAG,
    "add_eos": _FLAG,
    "bos_id": _ID,
    "eos_id": _ID,
    "overlong": _one_of(Overlong),
    "seq_length": (lambda value: _is_whole(value, 1), "a number of tokens"),
    "attributes": (
        lambda value: isinstance(value, list | tuple) and all(map(is_text, value)),
        "names",
    ),
    "attribute_weights": _NUMBERS,
    "label_means": _NUMBERS,
    "dtype": _one_of(Precision),
    "tokenizer_fingerprint": (is_text, "a text"),
    "reward_model_type": _one_of(RewardModelType),
    "scored_position": _one_of(ScoredPosition),
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
    "step_separator": (
        lambda value: value is None or (is_text(value) and 0 < len(value) <= _LONGEST_SEPARATOR),
        f"a text of 1 to {_LONGEST_SEPARATOR} characters, or null",
    ),
    "aggregate": (
        lambda value: value is None or value in _AGGREGATES,
        f"{', '.join(_AGGREGATES)} or null",
    ),
    "reply_marker": (
        lambda value: value is None or (_are_ids(value) and len(value) > 0),
        "ids of tokens, or null",
    ),
}
