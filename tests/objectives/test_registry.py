"""Which objective the settings ask for, also from outside the package."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.config.common import RecordKind, RewardModelType
from nemo_aligner.config.data import RegressionConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.errors import ConfigError
from nemo_aligner.objectives import (
    OBJECTIVES,
    build_objective,
    default_name,
    default_objective,
    describe_objective,
    objective_name,
    objective_settings,
    settings_with_defaults,
)
from nemo_aligner.objectives.base import PairObjective
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.masked_mse import MaskedMse
from tests import tiny


@dataclass(frozen=True)
class Hinge(PairObjective):
    margin: float = 1.0

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        chosen, rejected = records.pairs().of(rewards[:, 0])
        losses = (self.margin - (chosen - rejected)).clamp(min=0)
        return losses.sum(), torch.tensor(len(losses))


class NoDataclass:
    pass


def regression(**settings: object) -> ModelConfig:
    return ModelConfig(
        reward_model_type=RewardModelType.regression,
        regression=RegressionConfig(["help"]),
        **settings,  # type: ignore[arg-type]
    )


def test_the_type_of_model_decides_where_nobody_else_does() -> None:
    assert build_objective(ModelConfig(), ["reward"]) == BradleyTerry()
    assert build_objective(regression(), ["help"]) == MaskedMse(("help",))
    assert default_objective(RecordKind.rating, ["x"]) == MaskedMse(("x",))


def test_an_objective_of_ones_own_is_named_by_its_module() -> None:
    config = ModelConfig(objective=f"{__name__}:Hinge", objective_kwargs={"margin": 2.0})
    objective = build_objective(config, ["reward"])
    total, count = objective.loss(torch.tensor([[1.0], [0.5]]), Records.of([0], [2]))
    assert (float(total), int(count)) == (1.5, 1)
    assert objective_settings(objective) == {"margin": 2.0}
    assert objective_settings(MaskedMse(("help",))) == {}
    assert describe_objective(config, objective) == f"{__name__}:Hinge margin=2.0"
    assert describe_objective(ModelConfig(), BradleyTerry()) == "bradley_terry"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(objective="bradley"), r"got 'bradley', wanted one of bradley_terry, plackett"),
        (ModelConfig(objective="no_module:X"), r"got 'no_module:X', wanted .*No module named"),
        (ModelConfig(objective=f"{__name__}:Gone"), r"has no attribute 'Gone'"),
        (ModelConfig(objective=f"{__name__}:NoDataclass"), r"wanted a dataclass .* it lacks rec"),
        (ModelConfig(objective="masked_mse"), r"learns from ratings, wanted .* from comparisons"),
        (regression(objective="bradley_terry"), r"wanted one that learns from ratings, as model"),
        (
            ModelConfig(objective=f"{__name__}:Hinge", objective_kwargs={"margn": 1}),
            r"objective_kwargs: unknown key margn; did you mean margin\?",
        ),
        (regression(objective_kwargs={"x": 1}), r"unknown key x; masked_mse has none"),
        (
            ModelConfig(objective_kwargs={"label_smoothing": 0.7}),
            r"^model.objective_kwargs: bradley_terry: label_smoothing: got 0.7, wanted a number of",
        ),
        (
            ModelConfig(objective="rao_kupper", objective_kwargs={"tie_parameter": 1}),
            r"^model.objective_kwargs: rao_kupper: tie_parameter: got 1, wanted a number above 1",
        ),
    ],
)
def test_what_cannot_be_learned_by_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_objective(config, ["reward"])


@dataclass(frozen=True)
class Picky(Hinge):
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.alpha > 1:
            raise ValueError(f"got alpha {self.alpha}, wanted at most 1")


class PlainHinge:
    """All members of an objective, and yet not one: its settings are not known."""

    record_kind, main_metric, columns = RecordKind.comparison, "accuracy", ()
    learns_from_ties, lowest_label = False, None
    loss = step_metrics = report = None


@dataclass(frozen=True)
class Half:
    record_kind = RecordKind.comparison
    main_metric = "accuracy"

    def loss(self) -> None: ...


def test_a_value_that_an_objective_refuses_is_an_error_of_its_settings() -> None:
    name = f"{__name__}:Picky"
    kept = ModelConfig(objective=name, objective_kwargs={"alpha": 0.5, "margin": 2.0})
    assert objective_settings(build_objective(kept, ["reward"])) == {"margin": 2.0, "alpha": 0.5}
    refused = ModelConfig(objective=name, objective_kwargs={"alpha": 2.0})
    message = rf"^model.objective_kwargs: {name}: got alpha 2.0, wanted at most 1"
    with pytest.raises(ConfigError, match=message):
        build_objective(refused, ["reward"])
    of_another_type = ModelConfig(objective=name, objective_kwargs={"alpha": "much"})
    with pytest.raises(ConfigError, match=rf"^model.objective_kwargs: {name}: "):
        build_objective(of_another_type, ["reward"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PlainHinge", r"wanted a dataclass like nemo_aligner\.objectives\.base\.Objective$"),
        ("Half", r"Objective; it lacks columns, learns_from_ties, lowest_label, step_metrics"),
    ],
)
def test_what_is_no_objective_is_told_what_it_lacks(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_objective(ModelConfig(objective=f"{__name__}:{name}"), ["reward"])


def test_every_objective_is_built_by_its_name() -> None:
    for name, kind in OBJECTIVES.items():
        config = ModelConfig(objective=name)
        if kind.record_kind is RecordKind.rating:
            config = regression(objective=name)
        objective = build_objective(config, ["help"])
        assert type(objective) is kind
        assert objective.main_metric in ("accuracy", "pearson_mean", "loss")
        assert describe_objective(config, objective) == name


def test_a_run_that_lacks_a_setting_had_its_default() -> None:
    defaults = objective_settings(BradleyTerry())
    assert settings_with_defaults("bradley_terry", {}) == defaults
    assert settings_with_defaults("bradley_terry", {"ties": "half"}) == {**defaults, "ties": "half"}
    assert settings_with_defaults("my:Loss", {"x": 1}) == {"x": 1}


def test_the_page_of_training_has_every_objective_and_setting() -> None:
    page = (tiny.ROOT / "docs" / "training.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line[:2] == "| "}
    for name in OBJECTIVES:
        settings = settings_with_defaults(name, {})
        assert [key for key in settings if f"`{key}`" not in rows[f"`{name}`"]] == []


def test_people_are_told_the_settings_that_were_changed() -> None:
    config = ModelConfig(objective_kwargs={"label_smoothing": 0.1, "focal_gamma": 0})
    objective = build_objective(config, ["reward"])
    assert describe_objective(config, objective) == "bradley_terry label_smoothing=0.1"


def test_a_key_that_is_near_no_setting_is_answered_with_all_of_them() -> None:
    for key in ("attributes", "zzz"):
        config = ModelConfig(objective=f"{__name__}:Picky", objective_kwargs={key: 1})
        message = rf"unknown key {key}; {__name__}:Picky has \['margin', 'alpha'\]"
        with pytest.raises(ConfigError, match=message):
            build_objective(config, ["reward"])


def test_what_a_kind_of_records_is_measured_by() -> None:
    assert default_objective(RecordKind.comparison, ["reward"]) == BradleyTerry()
    assert objective_name(ModelConfig(objective="bradley_terry")) == "bradley_terry"
    assert objective_name(regression()) == default_name("regression") == "masked_mse"
    assert default_name("binary_ranking") == objective_name(ModelConfig()) == "bradley_terry"
