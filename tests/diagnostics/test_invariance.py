"""What counts as the same reward, and that a reward that is not the same is noticed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_aligner.diagnostics.invariance import (
    FP32_BAR,
    Bar,
    Row,
    Scored,
    choose_bar,
    compare,
    fitting_layouts,
    render_rows,
    summarise,
)
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.layout import LayoutSizes

SHAPE = ModelShape.from_config(
    {
        "num_layers": 6,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 320,
        "encoder_seq_length": 256,
    }
)
# Two pairs, two attributes.
REFERENCE = np.array([[2.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.5, 1e-6]])
EXACT = Bar(FP32_BAR, 0.0)


def row(rewards: np.ndarray, bar: Bar = EXACT) -> Row:
    return compare("TP=2", "alone", rewards, REFERENCE, (1.0, 1.0), bar)


def test_the_same_is_the_same() -> None:
    found = row(REFERENCE)
    assert (found.difference, found.flips, found.ok, found.texts) == (0.0, 0, True, 4)


def test_a_difference_above_the_bar_is_noticed() -> None:
    near, far = REFERENCE.copy(), REFERENCE.copy()
    near[0, 1] += 0.9e-5
    far[0, 1] += 2e-5
    assert row(near).ok
    assert not row(far).ok
    assert row(far).difference == pytest.approx(2e-5)
    assert not row(np.full_like(REFERENCE, np.nan)).ok


def test_a_verdict_that_turns_is_noticed_however_small_its_margin() -> None:
    turned = REFERENCE.copy()
    turned[3, 1] -= 3e-6
    assert row(turned).difference < FP32_BAR
    assert (row(turned).flips, row(turned).ok) == (1, False)
    assert row(turned, Bar(1e-3, 2e-3)).ok


def test_the_bar_of_bf16_follows_the_spread_of_the_rewards() -> None:
    assert choose_bar("fp32", 30, REFERENCE / 2) == EXACT
    assert choose_bar("fp32", 30, REFERENCE).reward == pytest.approx(2e-5)
    bar = choose_bar("bf16", 30, REFERENCE)
    spread = REFERENCE[:, 0].std()
    assert bar.reward == pytest.approx(4 * 2**-8 * 60**0.5 * spread)
    assert bar.margin == 2 * bar.reward
    assert choose_bar("fp16", 30, REFERENCE).reward == pytest.approx(bar.reward / 8)


def test_layouts_that_fit_and_why_others_do_not() -> None:
    assert fitting_layouts(1, SHAPE) == ([LayoutSizes(tp=1, pp=1, dp=1)], [])
    fitting, reasons = fitting_layouts(4, SHAPE)
    assert list(map(str, fitting)) == [
        "TP=2 PP=2 DP=1",
        "TP=2+SP PP=2 DP=1",
        "TP=1 PP=2 DP=2",
        "TP=2 PP=1 DP=2",
        "TP=2+SP PP=1 DP=2",
        "TP=1 PP=1 DP=4",
    ]
    assert [reason.partition(":")[0] for reason in reasons] == ["TP=1 PP=4 DP=1", "TP=4 PP=1 DP=1"]
    assert "got 4, wanted a divisor of the model's 6 layers" in reasons[0]
    assert "got 4, wanted a divisor of the model's 2 query groups" in reasons[1]


def test_the_table_says_what_is_missed() -> None:
    far = REFERENCE + 1e-3
    table = render_rows([row(REFERENCE), row(far)])
    assert table.splitlines()[0].startswith("layout  variant")
    assert table.splitlines()[1].split() == ["TP=2", "alone", "4", "0.00e+00", "0"]
    assert table.splitlines()[2].endswith("1.00e-03      0   MISSED")
    assert summarise([row(REFERENCE), row(far)], EXACT).startswith("MISSED in 1 of 2 rows")
    hidden = summarise([row(np.full_like(REFERENCE, np.nan)), row(REFERENCE)], EXACT)
    assert "largest |difference| inf" in hidden
    assert summarise([row(REFERENCE)], EXACT).startswith("the same everywhere")


def test_what_a_world_found_comes_through_a_file() -> None:
    rewards = {"TP=1": {"alone": REFERENCE.astype(np.float32), "all together": REFERENCE}}
    scored = Scored(rewards, REFERENCE, ["TP=2: why not"])
    again = Scored.from_dict(json.loads(json.dumps(scored.to_dict())))
    assert again.reasons == scored.reasons
    assert np.array_equal(again.reference, REFERENCE)
    assert again.rewards.keys() == rewards.keys()
    for name, found in again.rewards["TP=1"].items():
        assert np.array_equal(found, rewards["TP=1"][name])
