"""Supported dtypes of weights, and their names in torch, NeMo, safetensors and zarr files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_aligner.config.common import Precision
from nemo_aligner.utils.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# torch is imported only when a torch.dtype is needed, because ``plan`` must run without torch.


@dataclass(frozen=True)
class NumberFormat:
    """The names of one precision in torch and in files.

    Attributes:
        torch_name: name of the torch dtype, also in Hugging Face's ``config.json``.
        num_bytes: size of one element.
        nemo: ``precision`` in NeMo's ``model_config.yaml``.
        safetensors: dtype in the header of a safetensors file.
        zarr: dtype in the ``.zarray`` of an array.
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
ELEMENT_BYTES = {number_format.precision: number_format.num_bytes for number_format in _FORMATS}


def torch_dtype(precision: Precision) -> torch.dtype:
    """Return the torch dtype of a ``Precision``."""
    (number_format,) = (candidate for candidate in _FORMATS if candidate.precision is precision)
    return number_format.dtype


def format_of(dtype: torch.dtype | None) -> NumberFormat:
    """Return the ``NumberFormat`` of a torch dtype.

    Raises:
        CheckpointError: the dtype is not supported. The message does not name the file; the caller
            adds it.
    """
    for number_format in _FORMATS:
        if f"torch.{number_format.torch_name}" == str(dtype):
            return number_format
    raise CheckpointError(f"dtype: got {dtype}, wanted fp32, bf16 or fp16")


def named_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtypes by their names in torch, such as ``"bfloat16"``."""
    return {number_format.torch_name: number_format.dtype for number_format in _FORMATS}


def safetensors_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtypes by their names in safetensors files."""
    return {number_format.safetensors: number_format.dtype for number_format in _FORMATS}


def zarr_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtypes by their names in zarr files."""
    return {number_format.zarr: number_format.dtype for number_format in _FORMATS}
