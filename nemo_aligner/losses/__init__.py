"""Ways to learn, one file each; ``OBJECTIVES`` is the registry.

``model.objective`` names one of them, or as ``package.module:Name`` one from outside the package: a
dataclass with the members of ``base.Objective``, whose fields but these two are settings: the
``attributes``, and their ``weights`` in the one reward, if it has those
(``model.objective_kwargs``). Without it ``model.reward_model_type`` decides.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from nemo_aligner.config.common import RecordKind, RewardModelType
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.losses.base import Objective
from nemo_aligner.losses.listwise import PlackettLuce
from nemo_aligner.losses.pairwise import BradleyTerry, Davidson, RaoKupper
from nemo_aligner.losses.ranking_and_regression import RankingAndRegression
from nemo_aligner.losses.regression import Huber, MaskedMse, OrdinalBins, Quantiles
from nemo_aligner.utils.errors import ConfigError, DataError

OBJECTIVES: dict[str, type[Any]] = {
    "bradley_terry": BradleyTerry,
    "plackett_luce": PlackettLuce,
    "rao_kupper": RaoKupper,
    "davidson": Davidson,
    "masked_mse": MaskedMse,
    "huber": Huber,
    "ordinal_bins": OrdinalBins,
    "quantiles": Quantiles,
    "ranking_and_regression": RankingAndRegression,
}
_DEFAULTS = {
    RewardModelType.binary_ranking: "bradley_terry",
    RewardModelType.regression: "masked_mse",
}
_KEY = "model.objective"
_SETTINGS_KEY = "model.objective_kwargs"
_WEIGHTS = "weights"
# The scoring contract has them.
_NO_SETTINGS = ("attributes", _WEIGHTS)


def build_objective(
    config: ModelConfig, attributes: Sequence[str], weights: Sequence[float] = ()
) -> Objective:
    """What a model with a reward for each of ``attributes`` is trained by.

    ``weights`` are those of the attributes in the one reward, for objectives that have such.

    Raises:
        ConfigError: there is no such objective, it learns from other records than
            ``model.reward_model_type`` says, or it has no setting of that name.
    """
    name = objective_name(config)
    kind = _find(name)
    wanted = config.reward_model_type.record_kind
    if kind.record_kind is not wanted:
        raise ConfigError(
            f"{_KEY}: got {name!r}, which learns from {kind.record_kind.value}s, wanted one that "
            f"learns from {wanted.value}s, as model.reward_model_type is "
            f"{config.reward_model_type.value}"
        )
    _check_settings(name, kind, config.objective_kwargs)
    try:
        of_sum = {_WEIGHTS: tuple(weights)} if _WEIGHTS in _field_names(kind) else {}
        return kind(tuple(attributes), **of_sum, **config.objective_kwargs)
    except (TypeError, ValueError, DataError) as error:
        raise ConfigError(f"{_SETTINGS_KEY}: {name}: {error}") from error


def default_objective(kind: RecordKind, attributes: Sequence[str]) -> Objective:
    """What records of a kind are measured by where nothing is trained."""
    model_type = next(each for each in RewardModelType if each.record_kind is kind)
    return OBJECTIVES[_DEFAULTS[model_type]](tuple(attributes))


def objective_name(config: ModelConfig) -> str:
    """The name of the objective that the settings ask for."""
    return config.objective or _DEFAULTS[config.reward_model_type]


def default_name(model_type: str) -> str:
    """The objective of a model whose settings name none."""
    return _DEFAULTS[RewardModelType(model_type)]


def objective_settings(objective: Objective) -> dict[str, Any]:
    """The settings of an objective, defaults included."""
    return {name: getattr(objective, name) for name in _setting_names(type(objective))}


def settings_with_defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` of a run, and the defaults of those that its version did not have.

    A setting that is new is off by default. Of an objective from outside the package they are as
    they are.
    """
    if name not in OBJECTIVES:
        return dict(settings)
    return {**_defaults(OBJECTIVES[name]), **settings}


def describe_objective(config: ModelConfig, objective: Objective) -> str:
    """Its name, and the settings that are not their defaults, for people."""
    defaults = _defaults(type(objective))
    changed = [
        f"{key}={value}"
        for key, value in objective_settings(objective).items()
        if value != defaults[key]
    ]
    return " ".join([objective_name(config), *changed])


def _find(name: str) -> type[Any]:
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module, colon, attribute = name.partition(":")
    wanted = f"wanted one of {', '.join(OBJECTIVES)}, or package.module:Name"
    if not colon:
        raise ConfigError(f"{_KEY}: got {name!r}, {wanted}")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{_KEY}: got {name!r}, {wanted}: {error}") from error
    lacking = [member for member in _MEMBERS if not hasattr(kind, member)]
    if not is_dataclass(kind) or lacking:
        raise ConfigError(
            f"{_KEY}: {name}: wanted a dataclass like nemo_aligner.losses.base.Objective"
            + (f"; it lacks {', '.join(lacking)}" if lacking else "")
        )
    return kind  # type: ignore[return-value]


_MEMBERS = (
    "record_kind",
    "main_metric",
    "columns",
    "learns_from_ties",
    "lowest_label",
    "loss",
    "step_metrics",
    "report",
)


def _setting_names(kind: type[Any]) -> list[str]:
    return list(_defaults(kind))


def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind) if field.name not in _NO_SETTINGS}


def _field_names(kind: type[Any]) -> set[str]:
    return {field.name for field in fields(kind)}


def _check_settings(name: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    known = _setting_names(kind)
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"{name} has {known or 'none'}"
            raise ConfigError(f"{_SETTINGS_KEY}: unknown key {key}; {hint}")
