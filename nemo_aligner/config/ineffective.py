"""Settings that have no effect because of the values of other settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter

from nemo_aligner.config.common import ANY, RANKS, IneffectiveRule, as_yaml
from nemo_aligner.config.evaluation import INEFFECTIVE_IN_EVALUATION, EvaluateConfig
from nemo_aligner.config.gateway import INEFFECTIVE_IN_GATEWAYS, GatewayRunConfig
from nemo_aligner.config.serving import (
    INEFFECTIVE_IN_CRITICS,
    INEFFECTIVE_IN_SERVING,
    ServeConfig,
    ServeCriticConfig,
)
from nemo_aligner.config.training import INEFFECTIVE_IN_TRAINING, TrainConfig

_INEFFECTIVE: Mapping[type, tuple[IneffectiveRule, ...]] = {
    TrainConfig: INEFFECTIVE_IN_TRAINING,
    ServeConfig: INEFFECTIVE_IN_SERVING,
    ServeCriticConfig: INEFFECTIVE_IN_CRITICS,
    EvaluateConfig: INEFFECTIVE_IN_EVALUATION,
    GatewayRunConfig: INEFFECTIVE_IN_GATEWAYS,
}


def find_ineffective_settings(config: object, ranks: int | None = None) -> dict[str, str]:
    """Return the settings that have no effect: key -> the settings that are the cause.

    Only settings that differ from their defaults are listed. For example, ``model.lora.alpha`` has
    no effect because of ``model.lora.rank=0``.

    Args:
        ranks: number of ranks that the verb runs on; None skips settings that depend on it.
    """
    defaults, idle = type(config)(), dict[str, str]()
    for causes, keys in _INEFFECTIVE.get(type(config), ()):
        values = {key: ranks if key == RANKS else attrgetter(key)(config) for key in causes}
        if all(_matches(values[key], expected) for key, expected in causes.items()):
            cause = " and ".join(f"{key}={as_yaml(value)}" for key, value in values.items())
            for key in keys:
                if _differs(key, config, defaults):
                    idle.setdefault(key, cause)
    return idle


def describe_ineffective_settings(
    config: object, ranks: int | None = None, reported: Collection[str] = ()
) -> Iterator[str]:
    """Yield the line that a verb prints for each of ``find_ineffective_settings``.

    Args:
        reported: keys whose lines were printed before; they are skipped.
    """
    for key, cause in find_ineffective_settings(config, ranks).items():
        if key not in reported:
            yield f"note: {key} does nothing\n  with {cause}"


def _matches(value: object, expected: object) -> bool:
    return value is not None if expected is ANY else value == expected


def _differs(key: str, config: object, defaults: object) -> bool:
    return bool(attrgetter(key)(config) != attrgetter(key)(defaults))
