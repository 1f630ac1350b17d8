"""Code shared by the formats of quantized weights: options, and tensors that store a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.config.dtypes import named_dtypes
from nemo_aligner.utils.errors import CheckpointError, short, shown

WHAT_TO_DO = "Use the checkpoint in the precision in which it was trained"

Tensors = dict[str, LazyTensor]


@dataclass(frozen=True)
class UnreadableTensor(LazyTensor):
    """A stored tensor whose values cannot be read, which is an error only if the model needs it.

    Checkpoints contain such tensors in parts that a conversion drops: masks of bools, positions,
    or quantized layers of another part. Its ``dtype`` is bool, which no readable tensor has.

    Attributes:
        problem: why it cannot be read, for the error.
    """

    problem: str = ""

    @classmethod
    def of(cls, shape: tuple[int, ...], problem: str) -> UnreadableTensor:
        """Build a tensor whose ``read`` raises a CheckpointError with the text ``problem``."""

        def refuse(*part: int) -> Tensor:
            raise CheckpointError(problem)

        return cls(shape, torch.bool, refuse, refuse, problem)


@dataclass(frozen=True)
class QuantizedFormat:
    """How the weights of a checkpoint are quantized.

    Attributes:
        name: the format, for the user.
        dtypes: torch dtypes by their names in safetensors files, in addition to those of
            unquantized checkpoints.
        dequantize: replaces the stored tensors of each quantized weight by one lazy tensor, in
            place, and returns the names of these weights. Raises a CheckpointError if a weight's
            tensors are incomplete or do not fit each other.
    """

    name: str
    dtypes: Mapping[str, torch.dtype]
    dequantize: Callable[[Tensors], list[str]]


@dataclass(frozen=True)
class Options:
    """The options in a ``quantization_config``.

    Attributes:
        fields: the options by name.
        place: where they are, for errors.
    """

    fields: Mapping[str, Any]
    place: str = "quantization_config"

    def choose(self, name: str, *supported: Any, default: Any = None) -> Any:
        """Return the option ``name``, which must be one of ``supported``.

        An option that is missing or null has the value ``default``.

        Raises:
            CheckpointError: it has another value.
        """
        value = self.fields.get(name)
        value = default if value is None else value
        if any(type(value) is type(choice) and value == choice for choice in supported):
            return value
        choices = " or ".join(map(repr, supported))
        raise CheckpointError(
            f"{self.place}: got {name}={shown(value)}, wanted {choices}. {WHAT_TO_DO}"
        )

    def inside(self, name: str, fields: object) -> Options:
        """Return the options ``fields``, which are called ``name`` in errors.

        Raises:
            CheckpointError: they are not a mapping.
        """
        if isinstance(fields, dict):
            return Options(fields, f"{self.place}: {name}")
        raise CheckpointError(
            f"{self.place}: got {name}={shown(fields)}, wanted a mapping. {WHAT_TO_DO}"
        )

    def count(self, name: str, default: int | None = None) -> int:
        """Return the option ``name``, which must be a positive number.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.fields.get(name, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{self.place}: got {name}={shown(value)}, wanted a positive number. {WHAT_TO_DO}"
            )
        return value


def find_dtype(name: object) -> torch.dtype | None:
    """Return the dtype of this name, such as ``"bfloat16"``; None if no weight has it."""
    return named_dtypes().get(name.removeprefix("torch.")) if isinstance(name, str) else None


def pop_tensor(
    tensors: Tensors, name: str, dtypes: torch.dtype | tuple[torch.dtype, ...], *sizes: int
) -> LazyTensor:
    """Remove and return a tensor of the shape ``sizes``.

    Args:
        dtypes: the dtype that it must have, or several of which it must have one.

    Raises:
        CheckpointError: there is no such tensor, or it has another shape or dtype.
    """
    tensor = tensors.pop(name, None)
    expected = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor is None or tensor.shape != sizes or tensor.dtype not in expected:
        actual = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(
            f"tensor {short(name)}: got {actual}, wanted {' or '.join(map(str, expected))} "
            f"{list(sizes)}, which a quantized weight needs. Download the checkpoint again"
        )
    return tensor


def put_weight(tensors: Tensors, name: str, weight: LazyTensor) -> None:
    """Add a dequantized weight.

    Raises:
        CheckpointError: the checkpoint has this weight unquantized, too.
    """
    if name in tensors:
        raise CheckpointError(
            f"tensor {short(name)}: the checkpoint has it quantized and unquantized, wanted one of "
            "the two. Download the checkpoint again"
        )
    tensors[name] = weight


def compute_lazily(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, compute: Callable[[], Tensor]
) -> LazyTensor:
    """Return the lazy weight ``compute()``, rounded to ``dtype``, whose values must be finite."""

    def read_weight() -> Tensor:
        weight = compute().to(dtype)
        check_finite(weight, name)
        return weight

    return LazyTensor(shape, dtype, read_weight)
