"""Comparison of rewards: which differences pass the limit, and how the table shows them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.tools.invariance import (
    Compared,
    Limits,
    Row,
    Scored,
    choose_limits,
    compare,
    compare_all,
    render_rows,
    summarise,
)
from tests.harness import families

# Two pairs, two attributes.
REFERENCE = np.array([[2.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.5, 1e-6]])
EXACT = Limits(1e-5, 0.0)


def row(rewards: np.ndarray, limit: Limits = EXACT) -> Row:
    return compare(Compared.layout, "TP=2", "alone", rewards, REFERENCE, (1.0, 1.0), limit)


def test_compared_rewards_above_the_bar_and_verdicts_that_turn_are_noticed() -> None:
    same = row(REFERENCE)
    assert (same.difference, same.flips, same.ok, same.texts) == (0.0, 0, True, 4)
    assert same.changed == 0
    near, far, flipped = (REFERENCE.copy() for _ in range(3))
    near[0, 1] += 0.9e-5
    far[0, 1] += 2e-5
    assert row(near).ok
    assert not row(far).ok
    assert row(far).difference == pytest.approx(2e-5)
    assert not row(np.full_like(REFERENCE, np.nan)).ok
    # A flip counts, however small the margin is.
    flipped[3, 1] -= 3e-6
    assert row(flipped).difference < 1e-5
    assert (row(flipped).flips, row(flipped).ok) == (1, False)
    assert row(flipped, Limits(1e-3, 2e-3)).ok


def test_compared_bar_of_bf16_follows_the_spread_of_the_rewards() -> None:
    exact = choose_limits("fp32", 30, REFERENCE / 4)
    expected = 100 * 2**-24 * 68**0.5
    assert exact[Compared.batch] == Limits(0.0, 0.0)
    assert exact[Compared.layout] == exact[Compared.training]
    assert exact[Compared.layout].reward == pytest.approx(expected)
    assert exact[Compared.layout].margin == pytest.approx(2 * expected)
    assert choose_limits("fp32", 30, REFERENCE)[Compared.layout].reward == pytest.approx(
        2 * expected
    )
    limits = choose_limits("bf16", 30, REFERENCE)
    spread = REFERENCE[:, 0].std()
    assert limits[Compared.batch] == Limits(0.0, 0.0)
    limit = limits[Compared.precision]
    assert limit.reward == pytest.approx(6 * 2**-8 * 68**0.5 * spread)
    assert limit.margin == 2 * limit.reward
    assert limits[Compared.layout] == limit
    assert limits[Compared.training].reward == pytest.approx(10 / 6 * limit.reward)
    half = choose_limits("fp16", 30, REFERENCE)[Compared.precision]
    assert half.reward == pytest.approx(limit.reward / 8)


def test_limit_of_fp32_lets_pass_what_layouts_of_a_real_model_differ_by() -> None:
    """Gemma 3 270M differed by 3.91e-5 in rewards of up to 3.9; twice that must pass, too."""
    reference = np.array([[3.9], [2.5], [1.0], [0.99999]])
    limit = choose_limits("fp32", 18, reference)[Compared.layout]
    for difference in (3.91e-5, 7.82e-5):
        # The verdict of the second pair flips, but its margin is below the limit.
        rewards = reference - [[difference], [0], [difference], [0]]
        row = compare(Compared.layout, "TP=2", "alone", rewards, reference, (1.0,), limit)
        assert row.ok, (row, limit)


def test_compared_rewards_have_references_of_their_own() -> None:
    first, second, exact = REFERENCE + 0.01, REFERENCE + 0.02, REFERENCE
    other_batch = second + 1e-9
    rewards = {
        "TP=1": {"alone": first, "all together": first, "training": first},
        "TP=2": {"alone": second, "all together": other_batch},
        "server": {"alone": first},
    }
    limits = choose_limits("bf16", 30, exact)
    rows = compare_all(Scored(rewards, exact, []), (1.0, 1.0), limits)
    rows_by_name = {(row.compared, row.layout, row.variant): row for row in rows}
    batch, layout, training, precision = Compared
    assert rows_by_name.keys() == {
        (batch, "TP=1", "all together"),
        (batch, "TP=2", "all together"),
        (batch, "server", "alone"),
        (layout, "TP=1", "alone"),
        (training, "TP=1", "training"),
        (layout, "TP=2", "alone"),
        (precision, "TP=1", "alone"),
        (precision, "TP=2", "alone"),
    }
    missed = rows_by_name.pop((batch, "TP=2", "all together"))
    assert (missed.changed, missed.ok) == (8, False)
    assert all(row.ok for row in rows_by_name.values())
    assert rows_by_name[layout, "TP=2", "alone"].difference == pytest.approx(0.01)
    assert rows_by_name[precision, "TP=2", "alone"].difference == pytest.approx(0.02)
    exact_limits = choose_limits("fp32", 30, exact)
    rows = compare_all(Scored(rewards, first, []), (1.0, 1.0), exact_limits)
    assert {row.compared for row in rows} == {batch, layout, training}


def test_compared_rows_are_a_table_that_says_what_is_missed() -> None:
    rows, far = [row(REFERENCE)], row(REFERENCE + 1e-3)
    lines = render_rows([*rows, far]).splitlines()
    assert lines[0] == "against another layout"
    assert lines[1].startswith("layout  variant")
    assert lines[2].split() == ["TP=2", "alone", "4", "0", "0.00e+00", "0"]
    assert lines[3].split()[3:] == ["8", "1.00e-03", "0", "FAILED"]
    limits = {Compared.layout: EXACT, Compared.batch: Limits(0.0, 0.0)}
    assert summarise([*rows, far], limits).startswith("FAILED in 1 of 2 rows\n")
    hidden = summarise([row(np.full_like(REFERENCE, np.nan)), *rows], limits)
    assert "largest |difference| inf (wanted 1e-05 or less), 2 verdicts flipped" in hidden
    same = summarise(rows, limits)
    assert same.startswith("the same everywhere\n")
    assert "batch" not in same


def test_scored_rewards_come_through_a_file() -> None:
    rewards = {"TP=1": {"alone": REFERENCE.astype(np.float32), "all together": REFERENCE}}
    scored = Scored(rewards, REFERENCE, ["TP=2: why not"])
    again = Scored.from_dict(json.loads(json.dumps(scored.to_dict())))
    assert again.reasons == scored.reasons
    assert np.array_equal(again.reference, REFERENCE)
    assert again.rewards.keys() == rewards.keys()
    for name, variant_rewards in again.rewards["TP=1"].items():
        assert np.array_equal(variant_rewards, rewards["TP=1"][name])


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "nemotron", "olmo2"])
def test_limit_of_fp32_is_far_above_its_error_and_far_below_that_of_bf16(
    case: str, tmp_path: Path, layout: ParallelLayout
) -> None:
    """The reference is transformers in float64, whose rounding errors do not matter here."""
    settings = families.odd_settings(case)
    families.write_reward_model(tmp_path / "hf", case, torch.float32, **settings)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo")
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    exact_model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", **options)
    with torch.no_grad():
        exact = np.concatenate(
            [exact_model(torch.tensor([ids])).logits.numpy() for ids in families.SEQUENCES]
        )
    assert exact.dtype == np.float64
    scores = {
        precision: np.concatenate(
            [
                load_scorer(
                    tmp_path / "rm.nemo", layout, precision=precision, micro_batch_tokens=8192
                ).score_token_lists([ids])
                for ids in families.SEQUENCES
            ]
        )
        for precision in (Precision.fp32, Precision.bf16)
    }
    errors = {
        precision: float(np.abs(rewards - exact).max()) for precision, rewards in scores.items()
    }
    layers = exact_model.config.get_text_config().num_hidden_layers
    limit = choose_limits("fp32", layers, exact)[Compared.layout].reward
    assert errors[Precision.fp32] < limit / 4, (errors, limit)
    assert errors[Precision.bf16] > 10 * limit, (errors, limit)
