"""Values that JSON does not have become null."""

from __future__ import annotations

import json
import math

from nemo_aligner.utils.finite import finite_or_none


def test_nan_and_infinity_are_null_at_every_depth() -> None:
    value = {"a": math.nan, "b": [1.5, (math.inf, -math.inf)], "c": {"d": math.nan, "e": "NaN"}}
    converted = finite_or_none(value)
    assert converted == {"a": None, "b": [1.5, [None, None]], "c": {"d": None, "e": "NaN"}}
    assert json.loads(json.dumps(converted, allow_nan=False)) == converted
    assert [finite_or_none(number) for number in (math.nan, 0.0, True, 10**400)] == [
        None,
        0.0,
        True,
        10**400,
    ]
