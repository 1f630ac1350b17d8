"""Pseudo-labels: the replies of a comparison in the order of a teacher's rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_aligner.data.formats.base import LABEL_MARGIN, PairKeys
from nemo_aligner.data.formats.pairs import MARGIN, has_margin
from nemo_aligner.data.formats.teacher import TEACHER_REWARDS
from nemo_aligner.data.readers import RecordFile
from nemo_aligner.utils.errors import ConfigError

# Formats in which the order of the replies can be rewritten: those with two fields for the replies,
# and those with a list of ranks.
_TWO_FIELDS = ("chat_pairs", "text_pairs", "hh", "alpaca_pairs", "sharegpt_pairs")
_RANKED = ("responses", "nemo_rl_preference")


def check_orderable(file: RecordFile) -> None:
    """Raise ConfigError if the order of a file's replies cannot be rewritten."""
    if file.format not in (*_TWO_FIELDS, *_RANKED):
        raise ConfigError(
            f"--pseudo-labels: not supported for the format {file.format}; it can rewrite the "
            f"order of {', '.join((*_TWO_FIELDS, *_RANKED))}. Omit the option, and train on the "
            "soft labels"
        )


def order_by_teacher(row: dict[str, Any], fmt: str, keys: PairKeys) -> tuple[dict[str, Any], bool]:
    """Rank the replies of a record by its ``teacher_rewards``; equal rewards keep their order.

    The margins of a record whose order changes are removed; its ``label_margin`` becomes null, so
    that none is derived from the exchanged scores either.

    Returns:
        The object, and whether its order has changed.
    """
    rewards = row[TEACHER_REWARDS]
    if fmt in _RANKED:
        return _rank_by_rewards(row, fmt, rewards)
    if rewards[0] >= rewards[1]:
        return row, False
    row = _without_margins(row)
    exchanged = _exchange_sides(row, keys)
    if isinstance(metadata := row.get("metadata"), dict):
        exchanged["metadata"] = _exchange_sides(metadata, keys)
    return {**exchanged, TEACHER_REWARDS: rewards[::-1]}, True


def _rank_by_rewards(
    row: dict[str, Any], fmt: str, rewards: list[float]
) -> tuple[dict[str, Any], bool]:
    """Do what ``order_by_teacher`` does to a record with ranks."""
    ranks = list(rank_by_rewards(rewards))
    if fmt == "responses":
        earlier_ranks = row.get("ranks") or [0] * len(ranks)
        ranked = {**row, "ranks": ranks}
    else:
        earlier_ranks = [item["rank"] for item in row["completions"]]
        items = zip(row["completions"], ranks, strict=True)
        ranked = {**row, "completions": [{**item, "rank": rank} for item, rank in items]}
    if _levels(earlier_ranks) == ranks:
        return ranked, False
    return _without_margins(ranked), True


def rank_by_rewards(rewards: Sequence[float]) -> tuple[int, ...]:
    """Rank replies by their rewards, the highest first as 0; equal rewards have equal ranks."""
    return tuple(_levels([-reward for reward in rewards]))


def _levels(standing: Sequence[float]) -> list[int]:
    """Number the different values of ``standing`` from the lowest, 0, on."""
    levels = sorted(set(standing))
    return [levels.index(value) for value in standing]


def _without_margins(row: dict[str, Any]) -> dict[str, Any]:
    """Remove the margins of a record and of its ``metadata``, as they hold for another order.

    A record that had one gets a null ``label_margin``, which is read as a margin that is not known.
    """
    kept = {key: value for key, value in row.items() if key != MARGIN}
    if isinstance(metadata := row.get("metadata"), dict):
        removed = (MARGIN, LABEL_MARGIN)
        kept["metadata"] = {key: metadata[key] for key in metadata if key not in removed}
    return {**kept, LABEL_MARGIN: None} if has_margin(row) else kept


def _exchange_sides(fields: dict[str, Any], keys: PairKeys) -> dict[str, Any]:
    """Exchange the fields of the chosen and the rejected reply."""
    return {key: fields.get(_other_side(key, keys), value) for key, value in fields.items()}


def _other_side(key: str, keys: PairKeys) -> str:
    """Return the field with the same content for the other reply, such as ``score_rejected``."""
    if key in (keys.chosen, keys.rejected):
        return keys.rejected if key == keys.chosen else keys.chosen
    sides = ("chosen", "rejected")
    for side, opposite in (sides, sides[::-1]):
        if side in key:
            return key.replace(side, opposite)
    return key
