"""Tensors as the body of an HTTP message, by KServe v2 with its extension for binary data."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_aligner.errors import ServingError, shown

Tensors = dict[str, np.ndarray]

HEADER_LENGTH = "Inference-Header-Content-Length"
_BYTES = "BYTES"
_TYPES = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}


def encode_body(inputs: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, str]]:
    """A request's body, and the headers that say how to read it; BYTES are arrays of ``bytes``."""
    listed, pieces = [], []
    for name, array in inputs.items():
        datatype = _NAMES.get(array.dtype, _BYTES)
        raw = _packed(array) if datatype == _BYTES else np.ascontiguousarray(array).tobytes()
        listed.append(
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype,
                "parameters": {"binary_data_size": len(raw)},
            }
        )
        pieces.append(raw)
    header = json.dumps({"inputs": listed, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return b"".join([header, *pieces]), headers


def decode_body(body: bytes, headers: Mapping[str, str]) -> Tensors:
    """The outputs of an answer, whether they are binary or JSON.

    Raises:
        ServingError: it is no answer of KServe v2.
    """
    try:
        length = int(headers.get(HEADER_LENGTH, len(body)))
        return dict(_outputs(json.loads(body[:length])["outputs"], body[length:]))
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError) as error:
        raise ServingError(f"got {shown(body[:80])}, wanted an answer of KServe v2") from error


def _outputs(listed: list[dict[str, Any]], binary: bytes) -> Iterator[tuple[str, np.ndarray]]:
    start = 0
    for output in listed:
        shape, datatype = output["shape"], output["datatype"]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            values = _from_json(output["data"], datatype)
        else:
            values = _from_binary(binary[start : start + size], datatype)
            start += size
        yield output["name"], values.reshape(shape)


def _from_json(data: list[Any], datatype: str) -> np.ndarray:
    if datatype == _BYTES:
        return np.array([str(text).encode() for text in data], dtype=np.object_)
    # JSON has no NaN: a server writes null, if anything.
    return np.array([np.nan if value is None else value for value in data], _TYPES[datatype])


def _from_binary(raw: bytes, datatype: str) -> np.ndarray:
    if datatype == _BYTES:
        return np.array(list(_unpacked(raw)), dtype=np.object_)
    return np.frombuffer(raw, _TYPES[datatype])


def _packed(array: np.ndarray) -> bytes:
    return b"".join(struct.pack("<I", len(item)) + item for item in array.reshape(-1))


def _unpacked(raw: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(raw):
        (size,) = struct.unpack_from("<I", raw, start)
        start += 4
        yield raw[start : start + size]
        start += size
