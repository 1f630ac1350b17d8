"""Numbers in a file that somebody else wrote: the number, or an error that says where it stands.

Here, on the lowest floor, because a model's shape and its files of every format are read by it.
"""

from __future__ import annotations

from nemo_aligner.errors import CheckpointError, shown

# Far past any model: what is larger would only be found out by what it overflows.
MOST = 2**31
LEAST_NUMBER, MOST_NUMBER = 1e-12, 1e12


def read_count(value: object, where: str, wanted: str, least: int = 1, most: int = MOST) -> int:
    """``value``, a whole number from ``least`` to ``most``.

    Raises:
        CheckpointError: it is none; ``wanted`` are the words for what it should be.
    """
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(f"{where}: got {shown(value)}, wanted {wanted}")
    return value


def read_number(
    value: object,
    where: str,
    wanted: str,
    least: float = LEAST_NUMBER,
    most: float = MOST_NUMBER,
) -> float:
    """``value``, an int or a float from ``least`` to ``most``, and so neither infinite nor nan.

    Raises:
        CheckpointError: it is none; ``wanted`` are the words for what it should be.
    """
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise CheckpointError(f"{where}: got {shown(value)}, wanted {wanted}")
    return value  # type: ignore[return-value]
