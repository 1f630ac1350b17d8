"""Dtypes of weights, by the names that files give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_aligner.config.common import Precision
from nemo_aligner.utils.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# torch is imported only when a dtype of it is needed: planning works without it.


@dataclass(frozen=True)
class NumberFormat:
    """A precision, as torch and the files call it.

    Attributes:
        torch_name: of torch's dtype, and in a ``config.json`` of Hugging Face.
        num_bytes: that one number takes.
        nemo: ``precision`` in NeMo's ``model_config.yaml``.
        safetensors: the dtype in a header of safetensors.
        zarr: the dtype in an array's ``.zarray``.
    """

    precision: Precision
    torch_name: str
    num_bytes: int
    nemo: int | str
    safetensors: str
    zarr: str

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.torch_name)


_FORMATS = (
    NumberFormat(Precision.fp32, "float32", 4, 32, "F32", "<f4"),
    NumberFormat(Precision.fp16, "float16", 2, 16, "F16", "<f2"),
    NumberFormat(Precision.bf16, "bfloat16", 2, "bf16", "BF16", "bfloat16"),
)
ELEMENT_BYTES = {each.precision: each.num_bytes for each in _FORMATS}


def torch_dtype(precision: Precision) -> torch.dtype:
    """The dtype of a setting."""
    (found,) = (each for each in _FORMATS if each.precision is precision)
    return found.dtype


def format_of(dtype: torch.dtype | None) -> NumberFormat:
    """Return the names that files give a dtype.

    Raises:
        CheckpointError: weights of such numbers are not read; whoever asked has to say whose.
    """
    for each in _FORMATS:
        if f"torch.{each.torch_name}" == str(dtype):
            return each
    raise CheckpointError(f"got {dtype}, wanted fp32, bf16 or fp16")


def safetensors_dtypes() -> dict[str, torch.dtype]:
    """torch's dtypes by the names of safetensors."""
    return {each.safetensors: each.dtype for each in _FORMATS}


def zarr_dtypes() -> dict[str, torch.dtype]:
    """torch's dtypes by the names of zarr."""
    return {each.zarr: each.dtype for each in _FORMATS}
