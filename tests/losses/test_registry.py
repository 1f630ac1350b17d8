"""Which objective the settings ask for, also from outside the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.config.common import RecordKind, RewardModelType
from nemo_aligner.config.model import ModelConfig, RegressionConfig
from nemo_aligner.losses import (
    OBJECTIVES,
    build_objective,
    default_objective,
    default_objective_name,
    describe_objective,
    objective_name,
    objective_settings,
    settings_with_defaults,
)
from nemo_aligner.losses.base import PairObjective
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.losses.regression import BinaryCrossEntropy, MaskedMse
from nemo_aligner.utils.errors import ConfigError
from tests.harness import tiny


@dataclass(frozen=True)
class Hinge(PairObjective):
    margin: float = 1.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.alpha > 1:
            raise ValueError(f"got alpha {self.alpha}, wanted at most 1")

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        chosen, rejected = records.pairs().of(rewards[:, 0])
        losses = (self.margin - (chosen - rejected)).clamp(min=0)
        return losses.sum(), torch.tensor(len(losses))


def local_config(name: str, **settings: object) -> ModelConfig:
    """Settings that name an objective of this file."""
    return ModelConfig(objective=f"{__name__}:{name}", objective_kwargs=settings)


def regression(**settings: object) -> ModelConfig:
    return ModelConfig(
        reward_model_type=RewardModelType.regression,
        regression=RegressionConfig(["help"]),
        **settings,  # type: ignore[arg-type]
    )


class PlainHinge:
    """Some members of an objective, and no base class that has the others."""

    record_kind, main_metric, columns = RecordKind.comparison, "accuracy", ()
    learns_from_ties, lowest_label = False, None
    loss = step_metrics = report = None


@dataclass(frozen=True)
class Half(PairObjective):
    """Without a loss."""


@dataclass(frozen=True)
class HidesProperty(Hinge):
    """``aggregate`` is a property of the base class, and the field has no default."""

    aggregate: str  # type: ignore[assignment, misc]


class Undecorated(Hinge):
    """An annotation that is no field, as the class itself is no dataclass."""

    is_annotated: ClassVar[bool] = True
    scale: float = 1.0


class OtherMetric(Hinge):
    """A subclass without fields needs no decorator."""

    main_metric: ClassVar[str] = "loss"


def test_objective_is_built_by_its_name() -> None:
    for name, kind in OBJECTIVES.items():
        config = ModelConfig(objective=name)
        if kind.record_kind is RecordKind.rating:
            config = regression(objective=name)
        objective = build_objective(config, ["help"])
        assert type(objective) is kind
        assert objective.main_metric in ("accuracy", "pearson_mean", "loss")
        assert describe_objective(config, objective) == name
    changed = ModelConfig(objective_kwargs={"label_smoothing": 0.1, "focal_gamma": 0})
    described = describe_objective(changed, build_objective(changed, ["reward"]))
    assert described == "bradley_terry label_smoothing=0.1"


def test_settings_that_a_run_lacks_had_their_defaults() -> None:
    """And docs/objectives.md has every objective with its settings."""
    defaults = objective_settings(BradleyTerry())
    assert settings_with_defaults("bradley_terry", {}) == defaults
    assert settings_with_defaults("bradley_terry", {"ties": "half"}) == {**defaults, "ties": "half"}
    assert settings_with_defaults("my:Loss", {"x": 1}) == {"x": 1}
    page = (tiny.ROOT / "docs" / "objectives.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line[:2] == "| "}
    # Runs from before its rewards were probabilities.
    earlier = settings_with_defaults("binary_cross_entropy", {})
    assert earlier == {"scale": "log_odds"} != objective_settings(BinaryCrossEntropy(("a",)))
    undocumented = []
    for name in OBJECTIVES:
        row = rows.get(f"`{name}`")
        if row is None:
            undocumented.append(f"docs/objectives.md: no row of a table begins with `{name}`")
            continue
        undocumented += [
            f"docs/objectives.md: the row of `{name}` does not name `{key}`"
            for key in settings_with_defaults(name, {})
            if f"`{key}`" not in row
        ]
    assert not undocumented, "\n".join(undocumented)


def test_objective_by_default_is_that_of_the_type_of_model() -> None:
    assert build_objective(ModelConfig(), ["reward"]) == BradleyTerry()
    assert build_objective(regression(), ["help"]) == MaskedMse(("help",))
    assert default_objective(RecordKind.rating, ["x"]) == MaskedMse(("x",))
    assert default_objective(RecordKind.comparison, ["reward"]) == BradleyTerry()
    assert objective_name(ModelConfig(objective="plackett_luce")) == "plackett_luce"
    assert objective_name(regression()) == default_objective_name("regression") == "masked_mse"
    assert (
        default_objective_name("binary_ranking") == objective_name(ModelConfig()) == "bradley_terry"
    )


def test_custom_objective_is_named_by_its_module() -> None:
    config = local_config("Hinge", margin=2.0)
    objective = build_objective(config, ["reward"])
    total, count = objective.loss(torch.tensor([[1.0], [0.5]]), Records.of([0], [2]))
    assert (float(total), int(count)) == (1.5, 1)
    assert objective_settings(objective) == {"margin": 2.0, "alpha": 1.0}
    assert objective_settings(MaskedMse(("help",))) == {}
    assert describe_objective(config, objective) == f"{__name__}:Hinge margin=2.0"
    assert build_objective(local_config("OtherMetric"), ["reward"]).main_metric == "loss"


def test_unfit_objective_is_rejected() -> None:
    settings = "^model.objective_kwargs: "
    inherits = "wanted a dataclass that inherits from PairObjective or RatingObjective"
    wrong = {}
    for config, message in (
        (ModelConfig(objective="bradley"), "got 'bradley', wanted one of bradley_terry, "),
        (
            ModelConfig(objective="odin"),
            r"^model\.objective: odin was removed in nemo_aligner .*; use .*longer_chosen_weight",
        ),
        (
            ModelConfig(objective="regularized_by_language"),
            r"regularized_by_language was removed in nemo_aligner .*; use .*=bradley_terry",
        ),
        (ModelConfig(objective="no_module:X"), "got 'no_module:X', wanted .*No module named"),
        (local_config("Gone"), "has no attribute 'Gone'"),
        (ModelConfig(objective="builtins:object"), inherits),
        (local_config("PlainHinge"), inherits),
        (local_config("Half"), f"{inherits}.*, and defines what they leave abstract$"),
        (
            local_config("HidesProperty", aggregate="min"),
            r"^model\.objective: .*:HidesProperty: the field aggregate has no default",
        ),
        (local_config("Undecorated"), r"^model\.objective: .*:Undecorated: scale cannot be set"),
        (ModelConfig(objective="masked_mse"), "from ratings, .*=binary_ranking .* comparisons$"),
        (regression(objective="bradley_terry"), "comparisons, .*=regression .* ratings$"),
        (regression(objective_kwargs={"x": 1}), "unknown key x; masked_mse has none"),
        (
            local_config("Hinge", margn=1),
            r"objective_kwargs: unknown key margn; did you mean margin\?",
        ),
        # A key that is near no setting is answered with all of them.
        (
            local_config("Hinge", attributes=1),
            r"key attributes; .*:Hinge has \['margin', 'alpha'\]",
        ),
        (local_config("Hinge", zzz=1), r"unknown key zzz; .*:Hinge has \['margin', 'alpha'\]"),
        (
            local_config("Hinge", alpha=2.0),
            f"{settings}{__name__}:Hinge: got alpha 2.0, wanted at most 1",
        ),
        (local_config("Hinge", alpha="much"), f"{settings}{__name__}:Hinge: "),
        (
            ModelConfig(objective_kwargs={"label_smoothing": 0.7}),
            f"{settings}bradley_terry: label_smoothing: got 0.7, wanted a number of",
        ),
        (ModelConfig(objective_kwargs={"label_smoothing": -0.1}), "label_smoothing: got -0.1, "),
        (
            ModelConfig(objective="rao_kupper", objective_kwargs={"tie_parameter": 1}),
            f"{settings}rao_kupper: tie_parameter: got 1, wanted a number above 1",
        ),
    ):
        try:
            wrong[message] = str(build_objective(config, ["reward"]))
        except ConfigError as error:
            if not re.search(message, str(error)):
                wrong[message] = str(error)
    assert not wrong
