"""Every field of a scoring contract takes what a text can be scored by, and nothing beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nemo_aligner.errors import DataError
from nemo_aligner.text.contract_fields import MAX_TEMPLATE
from tests.text.test_contract import FIXED

HALF_A_PAIR = "\ud800"
NOT_NUMBERS = (
    1.0, None, "12", [1.0, "2"], [1.0, None], [True, 1.0],
    [1.0, float("nan")], [float("inf"), 0.0], [-1e300, 0.0], [1e300, 0.0],
)  # fmt: skip
GOOD: dict[str, tuple[Any, ...]] = {
    "template": ("", "é", "x" * MAX_TEMPLATE),
    "add_bos": (True, False),
    "bos_id": (None, 0, 1, 2**31 - 1),
    "overlong": ("truncate_left", "drop", "error"),
    "seq_length": (1, 2**31 - 1),
    "attribute_weights": ([0, -9e299], (1.0, 2)),
    "label_means": ([0, -9e299], (1.0, 2)),
    "dtype": ("fp32", "bf16", "fp16"),
    "reward_model_type": ("binary_ranking", "regression"),
    "reward_mean": (None, (1.0, 2.0), []),
    "reward_std": (None, (1.0, 2.0)),
    "measured_on": (None, "", "heldout.jsonl"),
}
BAD: dict[str, tuple[str, tuple[Any, ...]]] = {
    "template": (
        "a text of at most 65536 characters",
        (None, 1, b"x", HALF_A_PAIR, "x" * (MAX_TEMPLATE + 1)),
    ),
    "add_bos": ("true or false", (None, 0, 1, "true")),
    "add_eos": ("true or false", (None, 0, 1, "true")),
    "bos_id": ("a token's id or null", (-1, 2**31, 1.0, True, "1")),
    "eos_id": ("a token's id or null", (-1, 2**31, 1.0, True, "1")),
    "overlong": ("'drop' or 'truncate_left' or 'error'", (None, "keep", ["drop"])),
    "seq_length": ("a number of tokens", (0, -1, None, 2**31, 8.0, True)),
    "attributes": ("names", (None, "help", ["help", 1], ["help", HALF_A_PAIR])),
    "attribute_weights": ("numbers", NOT_NUMBERS),
    "label_means": ("numbers", NOT_NUMBERS),
    "dtype": ("'fp32' or ", (None, "fp8", "float32")),
    "tokenizer_fingerprint": ("a text", (None, 1, HALF_A_PAIR)),
    "reward_model_type": ("'binary_ranking' or 'regression'", (None, "ranking")),
    "scored_position": ("'last_token'", (None, "first_token", "")),
    "reward_mean": ("numbers or null", tuple(bad for bad in NOT_NUMBERS if bad is not None)),
    "reward_std": ("numbers or null", tuple(bad for bad in NOT_NUMBERS if bad is not None)),
    "measured_on": ("a text or null", (1, HALF_A_PAIR, ["x"])),
    "shaping": ("a text or null", (1, HALF_A_PAIR, {"clip": [0, 1]})),
    "readout": ("a text or null", (1, HALF_A_PAIR, {"kind": "bins"})),
    "reply_marker": ("ids of tokens, or null", (1, "x", (), (1, -1), (1.5,), [True])),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_fits_is_taken(name: str) -> None:
    for value in GOOD[name]:
        dataclasses.replace(FIXED, **{name: value})


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named_with_what_was_wanted(name: str) -> None:
    wanted, values = BAD[name]
    for value in values:
        with pytest.raises(DataError) as caught:
            dataclasses.replace(FIXED, **{name: value})
        said = str(caught.value)
        assert said.startswith(f"scoring contract: {name}: got "), value
        assert f"wanted {wanted}" in said, value


def test_every_field_has_a_rule() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(FIXED)}
