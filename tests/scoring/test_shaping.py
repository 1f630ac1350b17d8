"""What a server makes of rewards: each rule by numbers made by hand, and by what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.shaping import Combine, EnsembleConfig, ShapingConfig, Standardize
from nemo_aligner.errors import ConfigError, SettingsError
from nemo_aligner.scoring.shaping import RewardShaper, build_shaper
from nemo_aligner.text.contract import ScoringContract

ONE = ScoringContract(
    template="",
    add_bos=False,
    add_eos=True,
    bos_id=None,
    eos_id=None,
    overlong="error",
    seq_length=64,
    attributes=("reward",),
    attribute_weights=(1.0,),
    label_means=(0.0,),
    dtype="fp32",
    tokenizer_fingerprint="x",
    reward_model_type="binary_ranking",
)
TWO = dataclasses.replace(
    ONE,
    attributes=("help", "length"),
    attribute_weights=(1.0, 1.0),
    label_means=(0.0, 0.0),
    reward_model_type="regression",
)
RAW = np.array([[1.0], [-2.0], [4.0]], dtype=np.float32)


def shaper(
    contract: ScoringContract = ONE, ensemble: EnsembleConfig | None = None, **rules: Any
) -> RewardShaper:
    return RewardShaper(ShapingConfig(**rules), ensemble or EnsembleConfig(), [contract])


def ensemble(combine: Combine, k: float = 1.0, **rules: Any) -> RewardShaper:
    return RewardShaper(ShapingConfig(**rules), EnsembleConfig(combine=combine, k=k), [ONE, ONE])


def test_without_a_rule_there_is_nothing_to_shape() -> None:
    assert build_shaper(ShapingConfig(), EnsembleConfig(), [ONE]) is None


def test_clipped() -> None:
    shaped = shaper(clip=[-1.0, 2.0]).shape(RAW)
    assert shaped.rewards.tolist() == [[1.0], [-1.0], [2.0]]
    assert shaped.rewards.dtype == np.float32
    assert shaped.deviation is None
    assert shaped.passed is None


def test_standardized_by_what_training_measured() -> None:
    measured = ONE.with_statistics([1.0], [2.0], "heldout")
    shaped = shaper(measured, standardize=Standardize.contract).shape(RAW)
    assert shaped.rewards.tolist() == [[0.0], [-1.5], [1.5]]


def test_standardized_by_numbers_that_are_given() -> None:
    rules = {"standardize": Standardize.given, "mean": [1.0], "std": [2.0]}
    assert shaper(**rules).shape(RAW).rewards.tolist() == [[0.0], [-1.5], [1.5]]
    several = RewardShaper(ShapingConfig(**rules), EnsembleConfig(), [ONE, ONE])
    assert several.shape(np.tile(RAW, (1, 2))).rewards.tolist() == [[0.0], [-1.5], [1.5]]


def test_standardized_by_all_rewards_so_far() -> None:
    running = shaper(standardize=Standardize.running)
    rng = np.random.default_rng(3)
    seen = rng.normal(5, 2, (100, 1)).astype(np.float32)
    for part in np.split(seen, [1, 2, 40]):
        shaped = running.shape(part)
    wanted = (seen[40:].astype(float) - seen.astype(float).mean()) / seen.astype(float).std()
    np.testing.assert_allclose(shaped.rewards, wanted, rtol=1e-6)


def test_the_first_reward_of_all_has_no_deviation_to_be_over() -> None:
    assert shaper(standardize=Standardize.running).shape(RAW[:1]).rewards.tolist() == [[0.0]]


def test_running_statistics_go_on_after_a_restart(tmp_path: Path) -> None:
    def rules() -> dict[str, Any]:
        return {"standardize": Standardize.running, "statistics_file": str(tmp_path / "seen.json")}

    first = shaper(**rules())
    first.shape(RAW)
    first.save()
    again, whole = shaper(**rules()), shaper(standardize=Standardize.running)
    whole.shape(RAW)
    assert again.shape(RAW * 3).rewards.tolist() == whole.shape(RAW * 3).rewards.tolist()
    with pytest.raises(ConfigError, match="statistics of other models"):
        shaper(TWO, **rules())
    (tmp_path / "seen.json").write_text("{")
    with pytest.raises(ConfigError, match=r"statistics_file: .*seen.json"):
        shaper(**rules())


def test_a_file_of_statistics_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"
    rules = {"standardize": Standardize.running, "statistics_file": str(folder / "seen.json")}
    with pytest.raises(ConfigError, match=r"^shaping.statistics_file: .*seen.json: .*No such file"):
        shaper(**rules).check_file()
    folder.mkdir()
    running = shaper(**rules)
    running.check_file()
    running.shape(RAW)
    (folder / "seen.json").unlink()
    folder.rmdir()
    running.save()
    assert "shaping.statistics_file: " in caplog.messages[0]
    folder.mkdir()
    running.save()
    assert json.loads((folder / "seen.json").read_text())["count"] == 3
    assert len(list(folder.iterdir())) == 1


def test_weighed_attributes_are_one_reward() -> None:
    merged = shaper(TWO, attribute_weights={"help": 2.0, "length": -0.5})
    shaped = merged.shape(np.array([[1.0, 4.0], [0.0, 1.0]], dtype=np.float32))
    assert shaped.rewards.tolist() == [[0.0], [-0.5]]
    assert merged.contract.attributes == ("reward",)
    left_out = shaper(TWO, attribute_weights={"help": 2.0})
    assert left_out.shape(np.array([[1.0, 4.0]], dtype=np.float32)).rewards.tolist() == [[2.0]]


def test_a_reply_pays_for_each_token_beyond_a_length() -> None:
    shaped = shaper(length_penalty=0.5, length_penalty_from=10).shape(RAW, [10, 12, 3])
    assert shaped.rewards.tolist() == [[1.0], [-3.0], [4.0]]


def test_passed_is_at_least_the_threshold() -> None:
    shaped = shaper(threshold=1.0).shape(RAW)
    assert shaped.rewards.tolist() == RAW.tolist()
    assert shaped.passed is not None
    assert shaped.passed.tolist() == [True, False, True]
    zero = shaper(threshold=0.0).shape(RAW)
    assert zero.passed is not None
    assert zero.passed.tolist() == [True, False, True]


BOTH = np.array([[1.0, 3.0], [2.0, -2.0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (ensemble(Combine.mean), [2.0, 0.0]),
        (ensemble(Combine.min), [1.0, -2.0]),
        (ensemble(Combine.lower_bound, k=0.5), [1.5, -1.0]),
    ],
    ids=["mean", "min", "lower_bound"],
)
def test_several_models_are_one_reward_and_a_deviation(
    made: RewardShaper, wanted: list[float]
) -> None:
    shaped = made.shape(BOTH)
    assert shaped.rewards[:, 0].tolist() == wanted
    assert shaped.deviation is not None
    assert shaped.deviation.tolist() == [[1.0], [2.0]]


def test_models_of_an_ensemble_are_standardized_each_by_its_own() -> None:
    contracts = [ONE.with_statistics([1.0], [1.0], "x"), ONE.with_statistics([-1.0], [4.0], "x")]
    rules = ShapingConfig(standardize=Standardize.contract)
    shaped = RewardShaper(rules, EnsembleConfig(), contracts).shape(BOTH)
    assert shaped.rewards[:, 0].tolist() == [(0.0 + 1.0) / 2, (1.0 - 0.25) / 2]


def test_the_rules_are_applied_in_their_order() -> None:
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
    raw = np.array([[3.0, 15.0], [9.0, 10.0], [-9.0, 10.0]], dtype=np.float32)
    shaped = every.shape(raw, [11, 0, 0])
    np.testing.assert_allclose(shaped.rewards[:, 0], [0.9, 1.0, -1.0], rtol=1e-6)
    assert shaped.passed is not None
    assert shaped.passed.tolist() == [True, True, False]


def test_rules_are_part_of_the_contract() -> None:
    clipped, penalised = shaper(clip=[-1.0, 1.0]), shaper(length_penalty=0.5)
    hashes = {ONE.hash, clipped.contract.hash, penalised.contract.hash}
    assert len(hashes) == 3
    assert json.loads(str(clipped.contract.shaping)) == {"clip": [-1.0, 1.0]}
    assert shaper(clip=[-1.0, 1.0]).contract.hash == clipped.contract.hash
    means = [ONE.with_statistics([mean], [1.0], "x") for mean in (1.0, 2.0)]
    by_mean = [shaper(each, standardize=Standardize.contract).contract.hash for each in means]
    assert len(set(by_mean)) == 2
    rules = {"standardize": Standardize.running}
    assert (
        shaper(**rules, statistics_file="/no/such").contract.hash == shaper(**rules).contract.hash
    )
    assert "models" in json.loads(str(ensemble(Combine.min).contract.shaping))["ensemble"]


@pytest.mark.parametrize(
    ("contract", "rules", "message"),
    [
        (ONE, {"standardize": Standardize.contract}, "no measured mean"),
        (ONE.with_statistics([1.0], [0.0], "x"), {"standardize": Standardize.contract}, "of 0"),
        (TWO, {"standardize": Standardize.given, "mean": [1.0], "std": [2.0]}, "got 1 .* wanted 2"),
        (TWO, {"attribute_weights": {"kind": 1.0}}, "got kind, wanted attributes .* help, length"),
        (TWO, {"length_penalty": 0.5}, "length_penalty: the model has 2 attributes"),
        (TWO, {"threshold": 0.0}, "threshold: the model has 2 attributes"),
    ],
)
def test_rules_that_do_not_fit_the_model(
    contract: ScoringContract, rules: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shaper(contract, **rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"clip": [1.0]}, r"shaping.clip: got \[1.0\], wanted \[low, high\]"),
        ({"clip": [2.0, 1.0]}, "shaping.clip"),
        ({"length_penalty": -1.0}, "shaping.length_penalty: got -1.0, wanted 0 or more"),
        ({"statistics_file": "x"}, "shaping.standardize=running"),
        ({"length_penalty_from": 9}, "shaping.length_penalty_from: got 9, wanted 0, or"),
        ({"mean": [1.0], "std": [1.0]}, "or shaping.standardize=given"),
        ({"standardize": Standardize.given}, r"shaping.std: got \[\]"),
        (
            {"standardize": Standardize.given, "mean": [1.0], "std": [0.0]},
            "shaping.std: ",
        ),
    ],
)
def test_settings_that_mean_nothing(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ShapingConfig(**rules)
