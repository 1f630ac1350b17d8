"""Training objectives, and ``OBJECTIVES``, their registry.

``model.objective`` names an entry, or ``package.module:Name`` for one from another package: a
dataclass that inherits from ``base.PairObjective`` or ``base.RatingObjective``. Its fields are
settings (``model.objective_kwargs``), except ``attributes`` and, if it has them, their ``weights``
in the merged reward. By default ``model.reward_model_type`` chooses.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from nemo_aligner.config.common import RecordKind, RewardModelType
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import LOG_ODDS, SIGMOID, Readout
from nemo_aligner.losses.base import Objective, PairObjective, RatingObjective
from nemo_aligner.losses.multi_head import HeadEnsemble
from nemo_aligner.losses.pairwise import BradleyTerry, Davidson, PlackettLuce, RaoKupper
from nemo_aligner.losses.regression import (
    BinaryCrossEntropy,
    Huber,
    MaskedMse,
    OrdinalBins,
    ProbabilityCrossEntropy,
    Quantiles,
    RankingAndRegression,
)
from nemo_aligner.utils.errors import ConfigError, DataError

OBJECTIVES: dict[str, type[Any]] = {
    "bradley_terry": BradleyTerry,
    "plackett_luce": PlackettLuce,
    "rao_kupper": RaoKupper,
    "davidson": Davidson,
    "head_ensemble": HeadEnsemble,
    "masked_mse": MaskedMse,
    "huber": Huber,
    "ordinal_bins": OrdinalBins,
    "quantiles": Quantiles,
    "ranking_and_regression": RankingAndRegression,
    "binary_cross_entropy": BinaryCrossEntropy,
}
# Objectives that this package had once: since which version they are gone, and what to use instead.
_REMOVED = {
    "odin": (
        "0.1.0",
        "use model.objective=bradley_terry with its settings against length, "
        "model.objective_kwargs.longer_chosen_weight, length_bias or length_correlation_penalty",
    ),
    "regularized_by_language": (
        "0.1.0",
        "use model.objective=bradley_terry, which reached the same accuracy",
    ),
}
_DEFAULTS = {
    RewardModelType.binary_ranking: "bradley_terry",
    RewardModelType.regression: "masked_mse",
}
_KEY = "model.objective"
_SETTINGS_KEY = "model.objective_kwargs"
_WEIGHTS = "weights"
# Not settings: the scoring contract has them.
_NO_SETTINGS = ("attributes", _WEIGHTS)
# What objectives did before they had a setting for it, where its default is something else.
_EARLIER_SETTINGS: dict[str, dict[str, Any]] = {"binary_cross_entropy": {"scale": LOG_ODDS}}


def build_objective(
    config: ModelConfig, attributes: Sequence[str], weights: Sequence[float] = ()
) -> Objective:
    """Build the objective for a model with a reward for each of ``attributes``.

    Args:
        weights: of the attributes in the merged reward, for objectives that use them.

    Raises:
        ConfigError: the objective or one of its settings is unknown or out of range, or it trains
            on other records than ``model.reward_model_type`` says.
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
        has_weights = any(field.name == _WEIGHTS for field in fields(kind))
        of_sum = {_WEIGHTS: tuple(weights)} if has_weights else {}
        return kind(tuple(attributes), **of_sum, **config.objective_kwargs)
    except (TypeError, ValueError, DataError) as error:
        raise ConfigError(f"{_SETTINGS_KEY}: {name}: {error}") from error


def default_objective(kind: RecordKind, attributes: Sequence[str]) -> Objective:
    """Objective that measures records of a kind where nothing is trained."""
    model_type = next(each for each in RewardModelType if each.record_kind is kind)
    return OBJECTIVES[_DEFAULTS[model_type]](tuple(attributes))


def default_step_objective(
    readout: str | None, label_means: Sequence[float], attributes: Sequence[str]
) -> Objective:
    """Objective that measures rewards of turns and steps where nothing is trained.

    A head whose labels were centred, or that has a readout, predicts labels, and one that was
    trained with cross-entropy their probability; any other, log-odds.
    """
    if readout is not None and Readout.from_json(readout).kind == SIGMOID:
        return ProbabilityCrossEntropy(tuple(attributes))
    if readout is not None or any(label_means):
        return MaskedMse(tuple(attributes))
    return BinaryCrossEntropy(tuple(attributes), LOG_ODDS)


def objective_name(config: ModelConfig) -> str:
    """Name of the objective that the settings ask for."""
    return config.objective or _DEFAULTS[config.reward_model_type]


def default_objective_name(model_type: str) -> str:
    """Name of the objective that a reward model type implies."""
    return _DEFAULTS[RewardModelType(model_type)]


def settings_of_run(config: ModelConfig, contract: ScoringContract) -> dict[str, Any]:
    """Settings of the objective, completed by what a run with this ``contract`` began with.

    Runs of versions that had fewer settings go on as they were.
    """
    earlier = _EARLIER_SETTINGS.get(objective_name(config), {})
    is_earlier = contract.readout is None
    return {**(earlier if is_earlier else {}), **config.objective_kwargs}


def objective_settings(objective: Objective) -> dict[str, Any]:
    """Settings of an objective, defaults included."""
    settings = asdict(objective)
    return {name: settings[name] for name in _defaults(type(objective))}


def settings_with_defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the ``settings`` of an earlier version's run with defaults.

    New settings are off by default, but for those of ``_EARLIER_SETTINGS``. Settings of objectives
    from other packages stay as they are.
    """
    if name not in OBJECTIVES:
        return dict(settings)
    return {**_defaults(OBJECTIVES[name]), **_EARLIER_SETTINGS.get(name, {}), **settings}


def describe_objective(config: ModelConfig, objective: Objective) -> str:
    """Describe an objective by its name and its settings that differ from the defaults."""
    defaults = _defaults(type(objective))
    changed = [
        f"{key}={value}"
        for key, value in objective_settings(objective).items()
        if value != defaults[key]
    ]
    return " ".join([objective_name(config), *changed])


def describe_removed(name: str) -> str | None:
    """Say since which version an objective is gone, and what to use instead; None if it is not."""
    if name not in _REMOVED:
        return None
    version, advice = _REMOVED[name]
    return f"{name} was removed in nemo_aligner {version}; {advice}"


def _find(name: str) -> type[Any]:
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    removed = describe_removed(name)
    if removed is not None:
        raise ConfigError(f"{_KEY}: {removed}")
    module, colon, attribute = name.partition(":")
    wanted = f"wanted one of {', '.join(OBJECTIVES)}, or package.module:Name"
    if not colon:
        raise ConfigError(f"{_KEY}: got {name!r}, {wanted}")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{_KEY}: got {name!r}, {wanted}: {error}") from error
    if not _is_objective(kind):
        raise ConfigError(
            f"{_KEY}: {name}: wanted a dataclass that inherits from PairObjective or "
            "RatingObjective (nemo_aligner.losses.base), and defines what they leave abstract"
        )
    return kind  # type: ignore[no-any-return]


def _is_objective(kind: Any) -> bool:
    """True for a subclass of the base classes that can be created and has its own fields."""
    is_subclass = isinstance(kind, type) and issubclass(kind, PairObjective | RatingObjective)
    return is_subclass and not kind.__abstractmethods__


def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind) if field.name not in _NO_SETTINGS}


def _check_settings(name: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    known = list(_defaults(kind))
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"{name} has {known or 'none'}"
            raise ConfigError(f"{_SETTINGS_KEY}: unknown key {key}; {hint}")
