"""Comparison of another library's kernels with torch's, before a model uses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

_MAX_DEVIATION = 0.05  # relative to the root mean square; rounding to bf16 causes about 0.006


def relative_deviations(
    names: Iterable[str], expected: Sequence[Tensor], results: Sequence[Tensor]
) -> dict[str, float]:
    """Return the root mean square of each difference, relative to that of ``expected``, by name."""
    return {
        name: float((result.float() - reference.float()).norm() / reference.float().norm())
        for name, reference, result in zip(names, expected, results, strict=True)
    }


def check_deviations(deviations: Mapping[str, float]) -> None:
    """Check ``relative_deviations`` from torch's results.

    Raises:
        RuntimeError: one of them is larger than rounding explains, or NaN.
    """
    for name, deviation in deviations.items():
        if not deviation <= _MAX_DEVIATION:  # also if it is NaN
            raise RuntimeError(
                f"its {name} deviates from torch's by {deviation:.2g} of the root mean square, "
                f"more than {_MAX_DEVIATION}"
            )
