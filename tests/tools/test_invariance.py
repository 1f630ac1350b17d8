"""What counts as the same reward, and that ``check`` notices and says where it is another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import LayoutSizes, ParallelLayout
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.tools import invariance
from nemo_aligner.tools.invariance import (
    Bar,
    Check,
    Compared,
    Row,
    Scored,
    _choose_texts,
    choose_bars,
    compare,
    compare_all,
    fitting_layouts,
    render_rows,
    run_check,
    run_world,
    summarise,
)
from nemo_aligner.utils.errors import PeerError
from tests.harness import families, tiny

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
EXACT = Bar(1e-5, 0.0)


def row(rewards: np.ndarray, bar: Bar = EXACT) -> Row:
    return compare(Compared.layout, "TP=2", "alone", rewards, REFERENCE, (1.0, 1.0), bar)


def test_compared_rewards_above_the_bar_and_verdicts_that_turn_are_noticed() -> None:
    found = row(REFERENCE)
    assert (found.difference, found.flips, found.ok, found.texts) == (0.0, 0, True, 4)
    assert found.changed == 0
    near, far, turned = (REFERENCE.copy() for _ in range(3))
    near[0, 1] += 0.9e-5
    far[0, 1] += 2e-5
    assert row(near).ok
    assert not row(far).ok
    assert row(far).difference == pytest.approx(2e-5)
    assert not row(np.full_like(REFERENCE, np.nan)).ok
    # A verdict, however small its margin.
    turned[3, 1] -= 3e-6
    assert row(turned).difference < 1e-5
    assert (row(turned).flips, row(turned).ok) == (1, False)
    assert row(turned, Bar(1e-3, 2e-3)).ok


def test_compared_bar_of_bf16_follows_the_spread_of_the_rewards() -> None:
    exact = choose_bars("fp32", 30, REFERENCE / 4)
    limit = 100 * 2**-24 * 68**0.5
    assert exact[Compared.company] == Bar(0.0, 0.0)
    assert exact[Compared.layout] == exact[Compared.training]
    assert exact[Compared.layout].reward == pytest.approx(limit)
    assert exact[Compared.layout].margin == pytest.approx(2 * limit)
    assert choose_bars("fp32", 30, REFERENCE)[Compared.layout].reward == pytest.approx(2 * limit)
    bars = choose_bars("bf16", 30, REFERENCE)
    spread = REFERENCE[:, 0].std()
    assert bars[Compared.company] == Bar(0.0, 0.0)
    bar = bars[Compared.precision]
    assert bar.reward == pytest.approx(6 * 2**-8 * 68**0.5 * spread)
    assert bar.margin == 2 * bar.reward
    assert bars[Compared.layout] == bar
    assert bars[Compared.training].reward == pytest.approx(10 / 6 * bar.reward)
    half = choose_bars("fp16", 30, REFERENCE)[Compared.precision]
    assert half.reward == pytest.approx(bar.reward / 8)


def test_limit_of_fp32_lets_pass_what_layouts_of_a_real_model_differ_by() -> None:
    """Gemma 3 270M differed by 3.91e-5 in rewards of up to 3.9; twice that must pass, too."""
    reference = np.array([[3.9], [2.5], [1.0], [0.99999]])
    bar = choose_bars("fp32", 18, reference)[Compared.layout]
    for difference in (3.91e-5, 7.82e-5):
        # The verdict of the second pair flips, whose margin is within the rounding.
        rewards = reference - [[difference], [0], [difference], [0]]
        row = compare(Compared.layout, "TP=2", "alone", rewards, reference, (1.0,), bar)
        assert row.ok, (row, bar)


def test_compared_rewards_have_references_of_their_own() -> None:
    first, second, exact = REFERENCE + 0.01, REFERENCE + 0.02, REFERENCE
    others = second + 1e-9
    rewards = {
        "TP=1": {"alone": first, "all together": first, "training": first},
        "TP=2": {"alone": second, "all together": others},
        "server": {"alone": first},
    }
    bars = choose_bars("bf16", 30, exact)
    rows = compare_all(Scored(rewards, exact, []), (1.0, 1.0), bars)
    found = {(row.compared, row.layout, row.variant): row for row in rows}
    company, layout, training, precision = Compared
    assert found.keys() == {
        (company, "TP=1", "all together"),
        (company, "TP=2", "all together"),
        (company, "server", "alone"),
        (layout, "TP=1", "alone"),
        (training, "TP=1", "training"),
        (layout, "TP=2", "alone"),
        (precision, "TP=1", "alone"),
        (precision, "TP=2", "alone"),
    }
    missed = found.pop((company, "TP=2", "all together"))
    assert (missed.changed, missed.ok) == (8, False)
    assert all(row.ok for row in found.values())
    assert found[layout, "TP=2", "alone"].difference == pytest.approx(0.01)
    assert found[precision, "TP=2", "alone"].difference == pytest.approx(0.02)
    exact_bars = choose_bars("fp32", 30, exact)
    rows = compare_all(Scored(rewards, first, []), (1.0, 1.0), exact_bars)
    assert {row.compared for row in rows} == {company, layout, training}


def test_fitting_layouts_and_why_others_do_not_fit() -> None:
    assert fitting_layouts(1, SHAPE) == ([LayoutSizes(tp=1, pp=1, dp=1)], [])
    fitting, reasons = fitting_layouts(4, SHAPE)
    assert list(map(str, fitting)) == [
        "TP=2 PP=2 DP=1",
        "TP=2+SP PP=2 DP=1",
        "TP=1 PP=2 DP=2",
        "TP=2 PP=1 DP=2",
        "TP=2+SP PP=1 DP=2",
        "TP=1 PP=1 DP=4",
        "TP=1 CP=4 PP=1 DP=1",
    ]
    assert [reason.partition(":")[0] for reason in reasons] == ["TP=1 PP=4 DP=1", "TP=4 PP=1 DP=1"]
    assert "got 4, wanted a divisor of the model's 6 layers" in reasons[0]
    assert "got 4, wanted a divisor of the model's 2 query groups" in reasons[1]


def test_compared_rows_are_a_table_that_says_what_is_missed() -> None:
    rows, far = [row(REFERENCE)], row(REFERENCE + 1e-3)
    lines = render_rows([*rows, far]).splitlines()
    assert lines[0] == "against another layout"
    assert lines[1].startswith("layout  variant")
    assert lines[2].split() == ["TP=2", "alone", "4", "0", "0.00e+00", "0"]
    assert lines[3].endswith("8              1.00e-03      0   MISSED")
    bars = {Compared.layout: EXACT, Compared.company: Bar(0.0, 0.0)}
    assert summarise([*rows, far], bars).startswith("MISSED in 1 of 2 rows\n")
    hidden = summarise([row(np.full_like(REFERENCE, np.nan)), *rows], bars)
    assert "largest |difference| inf (wanted 1e-05 or less), 2 verdicts turned" in hidden
    same = summarise(rows, bars)
    assert same.startswith("the same everywhere\n")
    assert "company" not in same


def test_scored_rewards_come_through_a_file() -> None:
    rewards = {"TP=1": {"alone": REFERENCE.astype(np.float32), "all together": REFERENCE}}
    scored = Scored(rewards, REFERENCE, ["TP=2: why not"])
    again = Scored.from_dict(json.loads(json.dumps(scored.to_dict())))
    assert again.reasons == scored.reasons
    assert np.array_equal(again.reference, REFERENCE)
    assert again.rewards.keys() == rewards.keys()
    for name, found in again.rewards["TP=1"].items():
        assert np.array_equal(found, rewards["TP=1"][name])


def test_check_leaves_out_and_counts_pairs_that_cannot_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 4)
    bad = [
        {"prompt": "why", "chosen": 3, "rejected": "a"},
        {"prompt": "why", "chosen": "a<|im_end|>", "rejected": "a"},
        {"prompt": "why", "chosen": "a " * 2000, "rejected": "a"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in bad)
    pairs.write_text(text + pairs.read_text())
    several = tmp_path / "several.jsonl"
    several.write_text(json.dumps(tiny.ranked("why", (0, "a"), (1, "aa"), (2, "aaa"))))
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo")
    rules = read_text_rules(model)
    texts = _choose_texts(Check(str(model), data=str(pairs)), *rules)  # type: ignore[arg-type]
    assert len(texts) == 8
    shown = capsys.readouterr().out
    assert "4 pairs, 2 left out as malformed, 1 left out as too long; scoring contract" in shown
    best, worst = _choose_texts(Check(str(model), data=str(several)), *rules)  # type: ignore[arg-type]
    assert (best[-1]["content"], worst[-1]["content"]) == ("a", "aaa")


def test_check_says_once_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {"TP=1": {"alone": REFERENCE, "all together": REFERENCE + 1}}
    scored = Scored(rewards, REFERENCE, ["TP=4: why not", "TP=4: why not"])
    monkeypatch.setattr(invariance, "run_world", lambda job, size: scored)
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo")
    assert not run_check(Check(str(model), pairs=1, processes=1), tmp_path / "table.json")
    shown = capsys.readouterr().out
    assert shown.count("does not fit: TP=4: why not\n") == 1
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["ok"] for row in table["rows"]] == [True, False]
    assert table["summary"] in shown


def test_check_in_a_world_that_fails_says_why_once(capfd: pytest.CaptureFixture[str]) -> None:
    job = {"checkpoint": "nowhere.nemo", "texts": ["a"], "precision": "fp32"}
    with pytest.raises(PeerError, match="the run of 2 processes failed"):
        run_world(job, 2)
    assert capfd.readouterr().err == (
        "CheckpointError: nowhere.nemo: no such .nemo archive or folder\n"
    )


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "nemotron", "olmo2"])
def test_limit_of_fp32_is_far_above_its_error_and_far_below_that_of_bf16(
    case: str, tmp_path: Path, layout: ParallelLayout
) -> None:
    """Against transformers in float64, which rounds nothing that shows here."""
    settings = families.odd_settings(case)
    families.write_reward_model(tmp_path / "hf", case, torch.float32, **settings)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo")
    where = {"dtype": torch.float64, "attn_implementation": "eager"}
    exact_model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", **where)
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
    errors = {precision: float(np.abs(found - exact).max()) for precision, found in scores.items()}
    layers = exact_model.config.get_text_config().num_hidden_layers
    limit = choose_bars("fp32", layers, exact)[Compared.layout].reward
    assert errors[Precision.fp32] < limit / 4, (errors, limit)
    assert errors[Precision.bf16] > 10 * limit, (errors, limit)
