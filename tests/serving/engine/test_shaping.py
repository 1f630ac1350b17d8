"""Reward shaping: each rule by numbers computed by hand, and the settings that it rejects."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.serving import Combine, EnsembleConfig, ShapingConfig, Standardize
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.scorer import place_rows
from nemo_aligner.serving.engine.ensemble import RewardEnsemble, check_same_encoding
from nemo_aligner.serving.engine.shaping import RewardShaper, build_shaper
from nemo_aligner.serving.engine.token_scorer import TokenCounts
from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.utils.errors import ConfigError, SettingsError
from tests.evaluation.refusals import refusal
from tests.serving.fake_server import CONTRACT

ONE = dataclasses.replace(
    CONTRACT,
    attributes=("reward",),
    attribute_weights=(1.0,),
    label_means=(0.0,),
    reward_model_type="binary_ranking",
)
TWO = dataclasses.replace(CONTRACT, attributes=("help", "length"), attribute_weights=(1.0, 1.0))
HARM = dataclasses.replace(ONE, attribute_weights=(-1.0,), reward_model_type="regression")
RAW = np.array([[1.0], [-2.0], [4.0]], dtype=np.float32)


def shaper(
    contract: ScoringContract = ONE, ensemble: EnsembleConfig | None = None, **rules: Any
) -> RewardShaper:
    return RewardShaper(ShapingConfig(**rules), ensemble or EnsembleConfig(), [contract])


def shape(
    made: RewardShaper,
    raw: np.ndarray,
    reply_tokens: list[int] | None = None,
    spreads: np.ndarray | None = None,
) -> ScoredRows:
    rows = ScoredRows(raw, {}, np.zeros(len(raw), dtype=bool), spread=spreads)
    return made.shape(rows, reply_tokens)


def ensemble(combine: Combine, k: float = 1.0, **rules: Any) -> RewardShaper:
    return RewardShaper(ShapingConfig(**rules), EnsembleConfig(combine=combine, k=k), [ONE, ONE])


def test_shaping_by_each_rule() -> None:
    measured = ONE.with_statistics([1.0], [2.0], "heldout")
    given = {"standardize": Standardize.given, "mean": [1.0], "std": [2.0]}
    shapers = {
        "clip": (shaper(clip=[-1.0, 2.0]), [1.0, -1.0, 2.0]),
        "contract": (shaper(measured, standardize=Standardize.contract), [0.0, -1.5, 1.5]),
        "given": (shaper(**given), [0.0, -1.5, 1.5]),
        "penalty": (shaper(length_penalty=0.5, length_penalty_from=10), [1.0, -3.0, 4.0]),
        "threshold": (shaper(threshold=1.0), [1.0, -2.0, 4.0]),
    }
    for rule, (made, wanted) in shapers.items():
        shaped = shape(made, RAW, [10, 12, 3])
        assert shaped.rewards.tolist() == [[reward] for reward in wanted], rule
        assert shaped.rewards.dtype == np.float32
        assert shaped.deviation is None
        assert (shaped.passed is None) == (rule != "threshold")
    for threshold in (0.0, 1.0):
        passed = shape(shaper(threshold=threshold), RAW).passed
        assert passed is not None
        assert passed.tolist() == [True, False, True]
        assert np.isnan(place_rows(passed, [0, 1, 3], 4)[2])  # a rejected row has no verdict
    assert build_shaper(ShapingConfig(), EnsembleConfig(), [ONE]) is None


def test_sigmoid_follows_the_clip_and_scales_the_errors_by_its_slope() -> None:
    """By the closed form 1 / (1 + exp(-x)), also where exp would overflow."""
    raw = np.array([[0.0], [np.log(3.0)], [2000.0], [-2000.0]], dtype=np.float32)
    expected = [0.5, 0.75, 1.0, 0.0]
    made = shaper(sigmoid=True, threshold=0.75)
    shaped = shape(made, raw, spreads=np.ones_like(raw))
    assert shaped.rewards[:, 0].tolist() == pytest.approx(expected, abs=1e-7)
    assert shaped.passed is not None
    assert shaped.passed.tolist() == [0, 1, 1, 0]
    assert shaped.spread is not None
    slopes = [reward * (1 - reward) for reward in expected]
    assert shaped.spread[:, 0].tolist() == pytest.approx(slopes, abs=1e-7)
    clipped = shape(shaper(sigmoid=True, clip=[-1.0, 1.0]), raw).rewards[2:, 0]
    bounds = [1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(1.0))]
    assert clipped.tolist() == pytest.approx(bounds, abs=1e-7)
    assert (made.contract.reward_scale, made.keeps_steps) == ("score", True)
    models = shape(ensemble(Combine.mean, sigmoid=True), np.array([[0.0, 2.0]], dtype=np.float32))
    assert models.deviation is not None
    mean = 1 / (1 + np.exp(-1.0))
    assert models.deviation[0, 0] == pytest.approx(mean * (1 - mean), abs=1e-7)


def test_shaping_takes_a_multiple_of_the_uncertainty_off(caplog: pytest.LogCaptureFixture) -> None:
    """In units of the shaped reward; for crossing quantiles it is 0, which is logged once."""
    bins = Readout("bins", ((0.0, 4.0),) * 2).to_json()
    two = dataclasses.replace(TWO, readout=bins)
    given = {"standardize": Standardize.given, "mean": [0.0, 0.0], "std": [2.0, 1.0]}
    weights = {"help": 1.0, "length": -0.5}
    made = shaper(two, spread_penalty=2.0, attribute_weights=weights, **given)
    raw = np.array([[4.0, 2.0], [4.0, 2.0]], dtype=np.float32)
    spreads = np.array([[1.0, 0.5], [-3.0, 0.5]], dtype=np.float32)
    shaped = shape(made, raw, None, spreads)
    assert shaped.spread is not None
    assert shaped.spread.tolist() == [[0.75], [0.25]]
    assert shaped.rewards.tolist() == [[4 / 2 - 1 - 2 * 0.75], [4 / 2 - 1 - 2 * 0.25]]
    assert made.contract.readout is None
    assert shape(made, raw, None, spreads).rewards.tolist() == shaped.rewards.tolist()
    crossed = [each for each in caplog.messages if "cross" in each and "-3" in each]
    assert len(crossed) == len(caplog.messages) == 1
    models = [dataclasses.replace(ONE, readout=Readout("bins", ((0.0, 4.0),)).to_json())] * 2
    both = RewardShaper(ShapingConfig(spread_penalty=1.0), EnsembleConfig(), models)
    pair = shape(both, np.array([[1.0, 3.0]]), None, np.array([[0.5, 1.5]]))
    assert (pair.rewards.tolist(), pair.spread.tolist()) == ([[1.0]], [[1.0]])
    with pytest.raises(ConfigError, match=r"spread_penalty: got 2\.0.*quantiles"):
        shaper(ONE, spread_penalty=2.0)


def test_shaping_standardizes_by_all_rewards_so_far() -> None:
    running = shaper(standardize=Standardize.running)
    rng = np.random.default_rng(3)
    seen = rng.normal(5, 2, (100, 1)).astype(np.float32)
    for part in np.split(seen, [1, 2, 40]):
        shaped = shape(running, part)
    wanted = (seen[40:].astype(float) - seen.astype(float).mean()) / seen.astype(float).std()
    np.testing.assert_allclose(shaped.rewards, wanted, rtol=1e-6)
    # For the first reward there is no standard deviation to divide by.
    assert shape(shaper(standardize=Standardize.running), RAW[:1]).rewards.tolist() == [[0.0]]


def test_shaping_statistics_go_on_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file must be writable, which is checked before the first reward and at each save."""
    folder = tmp_path / "kept"
    file = folder / "seen.json"
    rules = {"standardize": Standardize.running, "statistics_file": str(file)}
    with pytest.raises(ConfigError, match=r"^shaping.statistics_file: .*seen.json: .*No such file"):
        shaper(**rules).check_file()
    folder.mkdir()
    first = shaper(**rules)
    first.check_file()
    shape(first, RAW)
    file.unlink()
    folder.rmdir()
    first.save()
    assert "shaping.statistics_file: " in caplog.messages[0]
    folder.mkdir()
    first.save()
    assert json.loads(file.read_text())["count"] == 3
    assert len(list(folder.iterdir())) == 1
    again, whole = shaper(**rules), shaper(standardize=Standardize.running)
    shape(whole, RAW)
    assert shape(again, RAW * 3).rewards.tolist() == shape(whole, RAW * 3).rewards.tolist()
    with pytest.raises(ConfigError, match="statistics of other models"):
        shaper(TWO, **rules)
    for content, reason in (("{", "Expecting"), ('{"count": 3}', "the key 'contracts' is missing")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=rf"statistics_file: .*seen.json: .*{reason}"):
            shaper(**rules)


BOTH = np.array([[1.0, 3.0], [2.0, -2.0]], dtype=np.float32)


def test_shaping_makes_several_models_one_reward_and_a_deviation() -> None:
    for made, wanted in (
        (ensemble(Combine.mean), [2.0, 0.0]),
        (ensemble(Combine.min), [1.0, -2.0]),
        (ensemble(Combine.lower_bound, k=0.5), [1.5, -1.0]),
    ):
        shaped = shape(made, BOTH)
        assert shaped.rewards[:, 0].tolist() == wanted
        assert shaped.deviation is not None
        assert shaped.deviation.tolist() == [[1.0], [2.0]]
    # Each model is standardized by its own statistics, or all by the configured ones.
    contracts = [ONE.with_statistics([1.0], [1.0], "x"), ONE.with_statistics([-1.0], [4.0], "x")]
    rules = ShapingConfig(standardize=Standardize.contract)
    shaped = shape(RewardShaper(rules, EnsembleConfig(), contracts), BOTH)
    assert shaped.rewards[:, 0].tolist() == [(0.0 + 1.0) / 2, (1.0 - 0.25) / 2]
    given = ensemble(Combine.mean, standardize=Standardize.given, mean=[1.0], std=[2.0])
    assert shape(given, BOTH).rewards[:, 0].tolist() == [0.5, -0.5]


def test_ensemble_of_models_that_read_a_text_otherwise_is_refused() -> None:
    check_same_encoding([TWO, TWO.with_label_means([1.0, 2.0])])
    for other in (
        dataclasses.replace(ONE, template="x"),
        dataclasses.replace(ONE, tokenizer_fingerprint="y"),
        dataclasses.replace(ONE, seq_length=32),
        TWO,
    ):
        with pytest.raises(
            ConfigError,
            match=r"ensemble.files: model 1 has another scoring contract than rm_model_file",
        ):
            check_same_encoding([ONE, other])


def test_ensemble_counts_the_tokens_of_a_request_once() -> None:
    members: list[Any] = [
        SimpleNamespace(contract=ONE, fingerprint="f", counts=TokenCounts(100, 60, cached))
        for cached in (30, 40)
    ]
    assert RewardEnsemble(members).counts == TokenCounts(100, 60, 35)


def test_shaping_applies_its_rules_in_their_order() -> None:
    measured = TWO.with_statistics([1.0, 10.0], [2.0, 5.0], "heldout")
    every = shaper(
        measured,
        standardize=Standardize.contract,
        attribute_weights={"help": 1.0, "length": 0.5},
        length_penalty=0.1,
        length_penalty_from=5,
        clip=[-1.0, 1.0],
        threshold=0.5,
    )
    assert every.contract.attributes == ("reward",)
    left_out = shaper(TWO, attribute_weights={"help": 2.0})
    assert shape(left_out, np.array([[1.0, 4.0]], dtype=np.float32)).rewards.tolist() == [[2.0]]
    raw = np.array([[3.0, 15.0], [9.0, 10.0], [-9.0, 10.0]], dtype=np.float32)
    shaped = shape(every, raw, [11, 0, 0])
    np.testing.assert_allclose(shaped.rewards[:, 0], [0.9, 1.0, -1.0], rtol=1e-6)
    assert shaped.passed is not None
    assert shaped.passed.tolist() == [True, True, False]


def test_shaping_rules_are_part_of_the_contract() -> None:
    clipped, penalised = shaper(clip=[-1.0, 1.0]), shaper(length_penalty=0.5)
    hashes = {ONE.hash, clipped.contract.hash, penalised.contract.hash}
    assert len(hashes) == 3
    assert json.loads(str(clipped.contract.shaping)) == {"clip": [-1.0, 1.0]}
    assert shaper(clip=[-1.0, 1.0]).contract.hash == clipped.contract.hash
    means = [ONE.with_statistics([mean], [1.0], "x") for mean in (1.0, 2.0)]
    by_mean = {shaper(each, standardize=Standardize.contract).contract.hash for each in means}
    assert len(by_mean) == 2
    rules = {"standardize": Standardize.running}
    filed = shaper(**rules, statistics_file="/no/such")
    assert filed.contract.hash == shaper(**rules).contract.hash
    assert "models" in json.loads(str(ensemble(Combine.min).contract.shaping))["ensemble"]


def test_shaping_that_does_not_fit_the_model_or_means_nothing_is_refused() -> None:
    given, unmeasured = Standardize.given, {"standardize": Standardize.contract}
    constant = ONE.with_statistics([1.0], [0.0], "x")
    one_for_two = {"standardize": given, "mean": [1.0], "std": [2.0]}
    wrong = {}
    for contract, rules, message in (
        (ONE, unmeasured, "no measured mean"),
        (constant, unmeasured, "of 0"),
        (TWO, one_for_two, "got 1 numbers, wanted 2"),
        (TWO, {"attribute_weights": {"kind": 1.0}}, "got kind, wanted attributes"),
        (TWO, {"length_penalty": 0.5}, "length_penalty: the model has the attribute weights {"),
        (TWO, {"threshold": 0.0}, "threshold: the model has the attribute weights"),
        (HARM, {"length_penalty": 0.5}, "attribute weights {'reward': -1.0}, wanted one reward"),
        (HARM, {"spread_penalty": 0.5}, "spread_penalty: the model has the attribute weights {"),
        (None, {"clip": [1.0]}, "shaping.clip: got [1.0], wanted [low, high]"),
        (None, {"clip": [2.0, 1.0]}, "shaping.clip"),
        (None, {"length_penalty": -1.0}, "shaping.length_penalty: got -1.0, wanted 0 or more"),
        (None, {"statistics_file": "x"}, "shaping.standardize=running"),
        (None, {"length_penalty_from": 9}, "shaping.length_penalty_from: got 9, wanted 0, or"),
        (None, {"mean": [1.0], "std": [1.0]}, "or shaping.standardize=given"),
        (None, {"standardize": given}, "shaping.std: got []"),
        (None, {"standardize": given, "mean": [1.0], "std": [0.0]}, "shaping.std: "),
    ):
        if contract is None:
            said = refusal(SettingsError, lambda rules=rules: ShapingConfig(**rules))
        else:
            made = (contract, rules)
            said = refusal(ConfigError, lambda made=made: shaper(made[0], **made[1]))
        if message not in said:
            wrong[str(rules), message] = said
    assert not wrong, wrong
