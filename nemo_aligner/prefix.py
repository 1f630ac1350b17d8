"""What two sequences of tokens begin with together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Fewer tokens are not worth a segment of their own.
_MIN_PREFIX = 8


Tokens: TypeAlias = "Sequence[int] | np.ndarray | Tensor"


def common_prefix(first: Tokens, second: Tokens) -> int:
    """How many tokens two sequences begin with together, where that is worth a segment, else 0.

    It is less than the shorter one's length, as every sequence needs a last token of its own. Lists
    are made arrays each time.
    """
    most = min(len(first), len(second)) - 1
    if most < _MIN_PREFIX:
        return 0
    differs = np.asarray(first[:most]) != np.asarray(second[:most])
    at = int(differs.argmax())
    prefix = at if differs[at] else most
    return prefix if prefix >= _MIN_PREFIX else 0


def prefix_of_all(sequences: Sequence[Tokens]) -> int:
    """How many tokens all of them begin with together, by the same rule; 0 for a lone one."""
    first, *others = sequences
    return min((common_prefix(first, other) for other in others), default=0)
