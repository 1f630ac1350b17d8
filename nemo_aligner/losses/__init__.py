"""Training objectives (losses), and ``OBJECTIVES``, their registry by name.

Data flows through the files in this order:

- ``base.py`` defines the interface: ``Objective``, its bases ``PairObjective`` and
  ``RatingObjective``, the checks of settings, and the metrics of a set of rewards.
- ``pairwise.py`` holds the losses on comparisons: Bradley-Terry and its variants, models of ties,
  and Plackett-Luce. ``length.py`` holds the terms of Bradley-Terry that depend on reply lengths,
  and ``multi_head.py`` an ensemble of heads.
- ``regression.py`` holds the losses on ratings, and one on ratings and pairs together.
- ``value.py`` holds PPO's value loss for critics, which is not an ``Objective``.

This module builds the objective that the settings name and completes the settings of older runs.
``model.objective`` names an entry of ``OBJECTIVES``, or ``package.module:Name`` for a class from
another package: a dataclass that inherits from ``PairObjective`` or ``RatingObjective``. Its fields
are its settings (``model.objective_kwargs``), except ``attributes``, ``has_steps`` and, if it has
them, the attributes' ``weights`` in the merged reward. By default
``model.reward_model_type`` chooses the objective.
"""

from __future__ import annotations

import difflib
import inspect
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
from nemo_aligner.utils.dotted import import_dotted
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
# Removed objectives: the version that removed them, and what to use instead.
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
# Fields of an objective that users do not set, because the scoring contract determines them.
_NO_SETTINGS = ("attributes", "has_steps", _WEIGHTS)
# Values of settings that older versions did not have, by objective: they give the behaviour of the
# older versions where the default of the setting does not.
_EARLIER_SETTINGS: dict[str, dict[str, Any]] = {"binary_cross_entropy": {"scale": LOG_ODDS}}


def build_objective(
    config: ModelConfig,
    attributes: Sequence[str],
    weights: Sequence[float] = (),
    has_steps: bool = False,
) -> Objective:
    """Build the objective of a model that predicts one reward for each of ``attributes``.

    Args:
        config: settings of the model, which name the objective and its settings.
        weights: weights of the attributes in the merged reward, for objectives that use them.
        has_steps: True if a sample has a reward for each of its turns or steps.

    Raises:
        ConfigError: the objective or one of its settings is unknown or out of range, or it learns
            from another kind of record than ``model.reward_model_type`` says.
    """
    name = objective_name(config)
    kind = _find_objective_class(name)
    expected_kind = config.reward_model_type.record_kind
    if kind.record_kind is not expected_kind:
        raise ConfigError(
            f"{_KEY}: got {name!r}, which learns from {kind.record_kind.value}s, but "
            f"model.reward_model_type={config.reward_model_type.value} needs an objective that "
            f"learns from {expected_kind.value}s"
        )
    _check_settings(name, kind, config.objective_kwargs)
    try:
        has_weights = any(field.name == _WEIGHTS for field in fields(kind))
        weight_field = {_WEIGHTS: tuple(weights)} if has_weights else {}
        return kind(
            tuple(attributes), has_steps=has_steps, **weight_field, **config.objective_kwargs
        )
    except (TypeError, ValueError, DataError) as error:
        raise ConfigError(f"{_SETTINGS_KEY}: {name}: {error}") from error


def default_objective(kind: RecordKind, attributes: Sequence[str]) -> Objective:
    """Build the objective whose loss and metrics evaluation reports for this kind of records.

    The model may have been trained with another objective.
    """
    model_type = next(
        model_type for model_type in RewardModelType if model_type.record_kind is kind
    )
    return OBJECTIVES[_DEFAULTS[model_type]](tuple(attributes))


def default_step_objective(
    readout: str | None, label_means: Sequence[float], attributes: Sequence[str]
) -> Objective:
    """Build the objective with which evaluation measures rewards of turns and steps.

    The head predicts labels if its labels were centred or if it has a readout; it predicts
    probabilities if it was trained with cross-entropy; otherwise it predicts log-odds.

    Args:
        readout: the scoring contract's readout, as JSON; None if outputs are rewards.
        label_means: means that were subtracted from the labels of each attribute.
    """
    if readout is not None and Readout.from_json(readout).kind == SIGMOID:
        return ProbabilityCrossEntropy(tuple(attributes), has_steps=True)
    if readout is not None or any(label_means):
        return MaskedMse(tuple(attributes), has_steps=True)
    return BinaryCrossEntropy(tuple(attributes), LOG_ODDS, has_steps=True)


def objective_name(config: ModelConfig) -> str:
    """Return the name of the objective: ``model.objective`` or the default of the model's type."""
    return config.objective or _DEFAULTS[config.reward_model_type]


def default_objective_name(model_type: str) -> str:
    """Return the name of the default objective of a ``model.reward_model_type``."""
    return _DEFAULTS[RewardModelType(model_type)]


def settings_of_run(config: ModelConfig, contract: ScoringContract) -> dict[str, Any]:
    """Return the objective's settings, completed for a run that an older version began.

    A run of a version that had fewer settings continues with the behaviour of that version.
    ``contract`` is the one that the run began with.
    """
    earlier = _EARLIER_SETTINGS.get(objective_name(config), {})
    is_earlier = contract.readout is None
    return {**(earlier if is_earlier else {}), **config.objective_kwargs}


def objective_settings(objective: Objective) -> dict[str, Any]:
    """Return all settings of an objective, by name, including those at their default."""
    settings = asdict(objective)
    return {name: settings[name] for name in _defaults(type(objective))}


def settings_with_defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the ``settings`` that an older version saved with a run.

    Missing settings get their defaults, which turn new behaviour off, or the values in
    ``_EARLIER_SETTINGS``. Settings of objectives from other packages stay unchanged.
    """
    if name not in OBJECTIVES:
        return dict(settings)
    return {**_defaults(OBJECTIVES[name]), **_EARLIER_SETTINGS.get(name, {}), **settings}


def describe_objective(config: ModelConfig, objective: Objective) -> str:
    """Describe an objective by its name and the settings that differ from their defaults."""
    defaults = _defaults(type(objective))
    changed = [
        f"{key}={value}"
        for key, value in objective_settings(objective).items()
        if value != defaults[key]
    ]
    return " ".join([objective_name(config), *changed])


def describe_removed(name: str) -> str | None:
    """Say which version removed an objective and what to use instead; None if it exists."""
    if name not in _REMOVED:
        return None
    version, advice = _REMOVED[name]
    return f"{name} was removed in nemo_aligner {version}; {advice}"


def _find_objective_class(name: str) -> type[Any]:
    """Return the class that ``model.objective`` names; raise ConfigError if there is none."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    removed = describe_removed(name)
    if removed is not None:
        raise ConfigError(f"{_KEY}: {removed}")
    expected = f"wanted one of {', '.join(OBJECTIVES)}, or package.module:Name"
    kind = import_dotted(name, _KEY, expected)
    if not _is_objective(kind):
        raise ConfigError(
            f"{_KEY}: {name}: wanted a dataclass that inherits from PairObjective or "
            "RatingObjective (nemo_aligner.losses.base), and defines what they leave abstract"
        )
    _check_fields(name, kind)
    return kind  # type: ignore[no-any-return]


def _is_objective(kind: Any) -> bool:
    """True if ``kind`` is a subclass of a base class of objectives, without abstract methods."""
    is_subclass = isinstance(kind, type) and issubclass(kind, PairObjective | RatingObjective)
    return is_subclass and not kind.__abstractmethods__


def _check_fields(name: str, kind: type[Any]) -> None:
    """Raise ConfigError if a field that the class ``kind`` annotates cannot be a setting.

    Without ``@dataclass`` on the class itself, its annotations define no fields. A field without a
    default that has the name of a base class's property takes the property as its default, and
    the property then makes the field read-only.
    """
    undecorated = _undecorated_fields(kind)
    if undecorated:
        raise ConfigError(
            f"{_KEY}: {name}: {', '.join(undecorated)} cannot be set, because the class that "
            "annotates them is not a dataclass. Put @dataclass(frozen=True) above it"
        )
    for field in fields(kind):
        if isinstance(field.default, property):
            raise ConfigError(
                f"{_KEY}: {name}: the field {field.name} has no default, and a base class has a "
                "property of that name. Give the field a default, so that it replaces the property"
            )


def _undecorated_fields(kind: type[Any]) -> list[str]:
    """List the fields that ``kind`` or a base class annotates although it is not a dataclass.

    Class variables are not fields. Without @dataclass, annotated names cannot be set.
    """
    return [
        name
        for base in kind.__mro__
        if issubclass(base, Objective) and "__dataclass_fields__" not in vars(base)
        for name, annotation in inspect.get_annotations(base).items()
        if "ClassVar" not in str(annotation)
    ]


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the default of each setting of the objective class ``kind``, by name."""
    return {field.name: field.default for field in fields(kind) if field.name not in _NO_SETTINGS}


def _check_settings(name: str, kind: type[Any], settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``settings`` has a key that is not a setting of the objective."""
    valid = list(_defaults(kind))
    for key in settings:
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1)
            hint = f"did you mean {close[0]}?" if close else f"{name} has {valid or 'none'}"
            raise ConfigError(f"{_SETTINGS_KEY}: unknown key {key}; {hint}")
