"""The settings that step_variants.py compares, and the choice of the fastest; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UP_TO = "up to"
"""The column "texts" of a row begins with this where lengths vary."""


@dataclass(frozen=True)
class Variant:
    """A combination of settings that step_variants.py measures.

    The fields are named like the settings under ``model.`` whose values they hold.
    """

    pointwise_kernels: str = "eager"
    attention_kernels: str = "torch"
    cuda_graphs: bool = False
    micro_batch_tokens: int = 16384


def fastest(rows: Sequence[Mapping[str, Any]]) -> Variant | None:
    """Return the variant with the most tokens/s on texts of varying lengths.

    None if no row has such texts.
    """
    measured = measured_on_spread(rows)
    if not measured:
        return None
    best = max(measured, key=lambda row: row["tokens/s"])
    return Variant(**{name: best[name] for name in Variant.__dataclass_fields__})


def measured_on_spread(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that have a speed on texts of varying lengths."""
    return [row for row in rows if row.get("tokens/s") and row["texts"].startswith(UP_TO)]


def fastest_so_far(output: Path) -> Variant | None:
    """Return the fastest variant in the output file of step_variants.py.

    None if the file does not exist yet, or has no variant on texts of varying lengths.
    """
    try:
        return fastest(json.loads(output.read_text()))
    except (OSError, ValueError):
        return None
