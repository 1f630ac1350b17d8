"""Reward shaping: from a model's raw rewards to the reward that a trainer learns from.

Each step is off by default. Their order: standardize every attribute of every model, merge the
attributes into one reward, subtract a multiple of its uncertainty, combine the models' rewards,
subtract a length penalty, clip, map to (0, 1) by the logistic function, and compare with a
threshold. The rules are part of the contract that a server publishes, so a client that expects
other rules rejects its rewards.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.config.serving import Combine, EnsembleConfig, ShapingConfig, Standardize
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.utils.errors import ConfigError, short, shown
from nemo_aligner.utils.writing import replacing

logger = logging.getLogger(__name__)

# Seconds between saves of the statistics; a server that is killed loses at most this much of them.
_SAVE_SECS = 30.0
_MERGED = "reward"


class RewardShaper:
    """Shapes the raw rewards of M models with A attributes each; use it from one thread at a time.

    ``contract`` describes the shaped rewards: it is the first model's contract, with the shaping
    rules and the attributes that remain after merging.
    """

    def __init__(
        self,
        shaping: ShapingConfig,
        ensemble: EnsembleConfig,
        contracts: Sequence[ScoringContract],
    ) -> None:
        """Check that the shaping rules fit the models.

        Args:
            shaping: rules for the rewards of each model.
            ensemble: how to combine the models.
            contracts: contracts of M models that score the same token ids.

        Raises:
            ConfigError: a rule does not fit the models, or the statistics file is for other models.
        """
        self._shaping = shaping
        self._ensemble = ensemble
        self._shape = (len(contracts), len(contracts[0].attributes))
        self._weights = _attribute_weights(shaping, contracts[0])
        self._check_weights(contracts[0])
        if shaping.spread_penalty and contracts[0].output_readout is None:
            raise ConfigError(
                f"shaping.spread_penalty: got {shaping.spread_penalty}, but the model has one "
                "output for each attribute and no uncertainty; wanted 0, or a model of the "
                "objective ordinal_bins, quantiles or head_ensemble"
            )
        self._fixed = _fixed_statistics(shaping, contracts)
        hashes = [contract.hash for contract in contracts]
        self._has_crossed = False
        self._running = None
        if shaping.standardize is Standardize.running:
            self._running = RunningStatistics(shaping.statistics_file, hashes, self._shape)
        self.contract = self._build_contract(contracts[0], hashes)

    @property
    def needs_lengths(self) -> bool:
        """True if ``shape`` needs the lengths of the replies."""
        return self._shaping.length_penalty > 0

    @property
    def keeps_steps(self) -> bool:
        """True if rewards of single turns or steps can be shaped.

        They cannot with a length penalty, which is for a whole reply, or with running statistics,
        which are computed from one reward per sample.
        """
        return not self.needs_lengths and self._running is None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that shaping adds to a result, except ``raw_rewards``.

        ``deviation`` is added for several models, ``passed`` with a threshold.
        """
        is_present = {
            "deviation": self._shape[0] > 1,
            "passed": self._shaping.threshold is not None,
        }
        return tuple(name for name, present in is_present.items() if present)

    def shape(
        self,
        scored: ScoredRows,
        reply_tokens: Sequence[int] | None = None,
        *,
        counts: bool = True,
    ) -> ScoredRows:
        """Shape raw rewards ``[N, M * A]``, model after model; the result keeps the raw ones.

        Args:
            scored: the raw rewards.
            reply_tokens: ``[N]`` lengths of the replies, for the length penalty.
            counts: whether to add these rewards to the running statistics.

        Returns:
            The rows with shaped rewards. ``deviation`` is the standard deviation over the models of
            an ensemble. ``spread`` (the models' uncertainty, if they have one) is scaled like the
            reward, and averaged over models.
        """
        raw, spreads = scored.rewards, scored.spread
        # Computed in float64, because differences of large means lose digits. Answers are float32.
        values = raw.astype(np.float64).reshape(len(raw), *self._shape)
        spread = None
        if spreads is not None:
            self._note_crossing(spreads)
            spread = spreads.astype(np.float64).reshape(values.shape).clip(0)
        values, std = self._standardize(values, counts)
        if spread is not None:
            spread = spread / std
        if self._weights is not None:
            values = values @ self._weights[:, None]
            # The attributes' errors are added as if fully correlated, which gives an upper bound of
            # the spread.
            spread = None if spread is None else spread @ np.abs(self._weights)[:, None]
        if spread is not None and self._shaping.spread_penalty:
            values = values - self._shaping.spread_penalty * spread
        deviation = values.std(axis=1)
        # The models are combined before the length penalty, because it is equal for all of them and
        # adds no uncertainty.
        rewards = self._penalize(self._combine(values, deviation), reply_tokens)
        if self._shaping.sigmoid:
            rewards, slope = _squash(rewards)
            deviation = deviation * slope
            spread = None if spread is None else spread * slope[:, None]
        # Compared in float32, because clients see float32 rewards.
        shaped, threshold = rewards.astype(np.float32), self._shaping.threshold
        passed = None if threshold is None else shaped[:, 0] >= np.float32(threshold)
        return replace(
            scored,
            rewards=shaped,
            raw_rewards=raw,
            deviation=deviation.astype(np.float32) if "deviation" in self.outputs else None,
            # Float instead of bool, because rows that the server rejected get NaN here.
            passed=None if passed is None else passed.astype(np.float32),
            spread=None if spread is None else spread.mean(axis=1).astype(np.float32),
        )

    def _standardize(
        self, values: np.ndarray, counts: bool
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """Standardize rewards ``[N, M, A]``.

        Return them, and the deviations by which they were divided.
        """
        std: np.ndarray | float = 1.0
        if self._running is not None:
            # Rewards are added before they are standardized: the first ones would otherwise have no
            # deviation to be divided by.
            if counts:
                self._running.add(values)
            values, std = self._running.standardize(values), self._running.std
        if self._fixed is not None:
            mean, std = self._fixed
            values = (values - mean) / std
        return values, std

    def _penalize(self, rewards: np.ndarray, reply_tokens: Sequence[int] | None) -> np.ndarray:
        """Subtract the length penalty from rewards ``[N, A]``, then clip them."""
        shaping = self._shaping
        if self.needs_lengths:
            excess = np.asarray(reply_tokens, dtype=np.float64) - shaping.length_penalty_from
            rewards = rewards - shaping.length_penalty * excess.clip(0)[:, None]
        if shaping.clip:
            low, high = shaping.clip
            rewards = np.minimum(np.maximum(rewards, low), high)
        return rewards

    def check_file(self) -> None:
        """Check that statistics can be saved; called once, on rank 0.

        Raises:
            ConfigError: the file of running statistics cannot be written.
        """
        if self._running is not None:
            self._running.check_file()

    def save(self) -> None:
        """Save running statistics for the next start, if a file is configured."""
        if self._running is not None:
            self._running.save()

    def _note_crossing(self, spreads: np.ndarray) -> None:
        """Log a warning at the first negative spread, which happens if a model's quantiles cross.

        The penalty counts a negative spread as 0, so that it does not become a bonus.
        """
        if self._has_crossed or not self._shaping.spread_penalty or not (spreads < 0).any():
            return
        self._has_crossed = True
        logger.warning(
            "shaping.spread_penalty: the quantiles of a reward cross (spread %.4g); such rewards "
            "get no penalty (logged only once)",
            spreads.min(),
        )

    def _combine(self, values: np.ndarray, deviation: np.ndarray) -> np.ndarray:
        """Combine the models' rewards ``[N, M, A]`` into ``[N, A]`` by the ensemble's rule.

        ``deviation [N, A]`` is the standard deviation over the models.
        """
        if self._ensemble.combine is Combine.min:
            return values.min(axis=1)
        mean = values.mean(axis=1)
        if self._ensemble.combine is Combine.lower_bound:
            return mean - self._ensemble.k * deviation
        return mean

    def _check_weights(self, contract: ScoringContract) -> None:
        """Raise ConfigError for rules that do not fit weights which clients apply afterwards.

        Clients multiply attributes that shaping leaves separate by the contract's weights, so a
        weight below 0 would turn a penalty into a bonus.
        """
        if self._weights is not None or contract.attribute_weights == (1.0,):
            return
        is_inverted = min(contract.attribute_weights) < 0
        is_pessimistic = self._shape[0] > 1 and self._ensemble.combine is not Combine.mean
        needs_one_reward = {
            "shaping.length_penalty": self.needs_lengths,
            "shaping.threshold": self._shaping.threshold is not None,
        }
        needs_no_inversion = {
            "shaping.spread_penalty": is_inverted and bool(self._shaping.spread_penalty),
            "ensemble.combine": is_inverted and is_pessimistic,
        }
        weights = dict(zip(contract.attributes, contract.attribute_weights, strict=True))
        for rules, accepted_weights in (
            (needs_one_reward, "one reward of weight 1"),
            (needs_no_inversion, "none below 0"),
        ):
            for rule, is_violated in rules.items():
                if is_violated:
                    raise ConfigError(
                        f"{rule}: the model has the attribute weights {shown(weights)}, wanted "
                        f"{accepted_weights}; set shaping.attribute_weights"
                    )

    def _build_contract(self, contract: ScoringContract, hashes: list[str]) -> ScoringContract:
        rules = _list_rules(self._shaping, self._ensemble, hashes)
        if self._fixed is not None:
            rules["mean"], rules["std"] = (statistics.tolist() for statistics in self._fixed)
        if self._weights is not None:
            contract = replace(
                contract,
                attributes=(_MERGED,),
                attribute_weights=(1.0,),
                label_means=(0.0,),
                # ``readout`` has a row of numbers for each attribute of the model, but the merged
                # reward is a single attribute.
                readout=contract.readout if len(contract.attributes) == 1 else None,
            )
        return replace(
            contract,
            # These fields describe raw rewards, so they are wrong for shaped ones.
            reward_mean=None,
            reward_std=None,
            measured_on=None,
            shaping=json.dumps(rules, sort_keys=True),
        )


class RunningStatistics:
    """Mean and standard deviation of all rewards so far, for each model and attribute.

    A server saves them to a file, if one is configured, so that a restart does not lose them. Means
    and sums of squared differences are updated as in Chan, Golub and LeVeque (1983).
    """

    def __init__(self, file: str | None, contracts: list[str], shape: tuple[int, int]) -> None:
        """Load the statistics, if the file exists.

        Args:
            file: path of the saved statistics; None to keep them only in memory.
            contracts: contract hashes of the models; the file must have the same.
            shape: ``(M, A)``: number of models and of attributes.

        Raises:
            ConfigError: the file cannot be read, or has the statistics of other models.
        """
        self._file = None if file is None else Path(file)
        self._contracts = contracts
        self.count = 0
        self.mean = np.zeros(shape)
        self._squares = np.zeros(shape)
        self._saved = time.monotonic()
        if self._file is not None and self._file.exists():
            self._load(self._file)

    @property
    def std(self) -> np.ndarray:
        """Standard deviations ``[M, A]``; 1 where all rewards so far were equal."""
        std = np.sqrt(self._squares / max(self.count, 1))
        return np.where(std > 0, std, 1.0)

    def add(self, values: np.ndarray) -> None:
        """Update means and deviations with N more rewards ``[N, M, A]``."""
        # Squared differences from the mean are summed, not the squares: a difference of sums of
        # squares loses all digits if the mean is large.
        count = len(values)
        mean, squares = values.mean(axis=0), values.var(axis=0) * count
        difference, total = mean - self.mean, self.count + count
        self.mean = self.mean + difference * count / total
        self._squares = self._squares + squares + difference**2 * self.count * count / total
        self.count = total
        if time.monotonic() - self._saved > _SAVE_SECS:
            self.save()

    def standardize(self, values: np.ndarray) -> np.ndarray:
        """Subtract the mean of ``[N, M, A]`` rewards, and divide by the standard deviation."""
        return (values - self.mean) / self.std

    def check_file(self) -> None:
        """Raise ConfigError if the file cannot be written."""
        if self._file is None:
            return
        try:
            self._write(self._file)
        except OSError as error:
            raise ConfigError(
                f"shaping.statistics_file: {self._file}: it cannot be written: {short(error)}"
            ) from error

    def save(self) -> None:
        """Save the statistics, if there is a file; a failure is only logged."""
        self._saved = time.monotonic()
        if self._file is None:
            return
        try:
            self._write(self._file)
        except OSError as error:  # e.g. a full disk, which must not stop a server
            logger.warning(
                "shaping.statistics_file: %s: the statistics were not saved: %s",
                *(self._file, short(error)),
            )

    def _write(self, file: Path) -> None:
        """Write the statistics to ``file``, which is replaced atomically."""
        content = {
            "contracts": self._contracts,
            "count": self.count,
            "mean": self.mean.tolist(),
            "squares": self._squares.tolist(),
        }
        with replacing(file) as partial:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _load(self, file: Path) -> None:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            contracts, count = content["contracts"], int(content["count"])
            mean, squares = (np.array(content[name], dtype=float) for name in ("mean", "squares"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"shaping.statistics_file: {file}: it cannot be read: {short(error)}"
            ) from error
        if contracts != self._contracts or {mean.shape, squares.shape} != {self.mean.shape}:
            raise ConfigError(
                f"shaping.statistics_file: {file} has the statistics of other models (scoring "
                f"contracts {short(contracts)}), wanted {self._contracts}. Choose another file"
            )
        self.count, self.mean, self._squares = count, mean, squares


def _squash(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the logistic function of rewards ``[N, A]``, and its slope there.

    A bounded reward keeps a policy from chasing ever higher ones ("Reward Shaping to Mitigate
    Reward Hacking in RLHF", arXiv 2502.18770). The slope scales the errors of the rewards. tanh is
    used because exp overflows.
    """
    squashed = 0.5 + 0.5 * np.tanh(0.5 * rewards)
    return squashed, squashed * (1 - squashed)


def build_shaper(
    shaping: ShapingConfig, ensemble: EnsembleConfig, contracts: Sequence[ScoringContract]
) -> RewardShaper | None:
    """Build the shaper from the settings; None if no setting shapes rewards.

    Raises:
        ConfigError: a rule does not fit the models, or the statistics file is for other models.
    """
    if len(contracts) == 1 and shaping == ShapingConfig():
        return None
    return RewardShaper(shaping, ensemble, contracts)


def _attribute_weights(shaping: ShapingConfig, contract: ScoringContract) -> np.ndarray | None:
    """Return the weights ``[A]`` that merge the attributes into one reward.

    None if the attributes stay separate.
    """
    weights = shaping.attribute_weights
    if not weights:
        return None
    unknown = set(weights) - set(contract.attributes)
    if unknown:
        raise ConfigError(
            f"shaping.attribute_weights: got {', '.join(sorted(unknown))}, wanted attributes of "
            f"the model: {', '.join(contract.attributes)}"
        )
    return np.array([weights.get(name, 0.0) for name in contract.attributes])


def _fixed_statistics(
    shaping: ShapingConfig, contracts: Sequence[ScoringContract]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the means and standard deviations ``[M, A]`` with which rewards are standardized.

    They come from the models' contracts or from the settings. None if rewards are standardized by
    running statistics, or not at all.
    """
    if shaping.standardize is Standardize.contract:
        return _contract_statistics(contracts)
    if shaping.standardize is not Standardize.given:
        return None
    num_attributes = len(contracts[0].attributes)
    if len(shaping.mean) != num_attributes:
        raise ConfigError(
            f"shaping.mean: got {len(shaping.mean)} numbers, wanted {num_attributes}, one for each "
            f"attribute: {', '.join(contracts[0].attributes)}"
        )
    rows = (len(contracts), 1)
    return np.tile(np.array(shaping.mean), rows), np.tile(np.array(shaping.std), rows)


def _contract_statistics(contracts: Sequence[ScoringContract]) -> tuple[np.ndarray, np.ndarray]:
    """Return the means and standard deviations ``[M, A]`` that training has measured."""
    for number, contract in enumerate(contracts):
        if contract.reward_mean is None or contract.reward_std is None:
            raise ConfigError(
                f"shaping.standardize=contract: model {number} has no measured mean and deviation "
                "of its rewards; set shaping.standardize=running"
            )
        if not all(contract.reward_std):
            raise ConfigError(
                f"shaping.standardize=contract: the rewards of model {number} had a deviation of "
                "0; set shaping.standardize=running"
            )
    return (
        np.array([contract.reward_mean for contract in contracts]),
        np.array([contract.reward_std for contract in contracts]),
    )


def _list_rules(
    shaping: ShapingConfig, ensemble: EnsembleConfig, hashes: list[str]
) -> dict[str, Any]:
    """List the rules that differ from their defaults, for the contract that is published.

    ``hashes``, the contract hashes of the models, are listed for an ensemble. The path of the
    statistics file is not a rule.
    """
    rules: dict[str, Any] = {
        item.name: getattr(shaping, item.name)
        for item in fields(shaping)
        if item.name != "statistics_file"
        and getattr(shaping, item.name) != getattr(ShapingConfig(), item.name)
    }
    if "standardize" in rules:
        rules["standardize"] = shaping.standardize.value
    if len(hashes) > 1:
        rules["ensemble"] = {"combine": ensemble.combine.value, "k": ensemble.k, "models": hashes}
    return rules
