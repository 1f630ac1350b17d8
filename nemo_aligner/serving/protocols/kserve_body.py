"""Encode and decode tensors as HTTP bodies, as in KServe v2 and its binary data extension.

A body is a JSON object, whose length is in a header, followed by the tensors' bytes in the order in
which the JSON lists them, little-endian. Each element of a BYTES tensor is preceded by its length
in 4 bytes. With binary data, neither side has to escape or parse texts as JSON. The client and the
HTTP front both use this module.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from nemo_aligner.utils.errors import ServingError, short, shown

Tensors = dict[str, np.ndarray]

HEADER_LENGTH = "Inference-Header-Content-Length"
# Request parameters of this package, which other servers ignore. The first marks a probe, a request
# whose rewards nobody uses: NeMo Gym's ``/verify`` sends one to find out whether the prompt or the
# reply is at fault. With the second, a row that is rejected does not fail the request.
PROBE, ROW_ERRORS = "probe", "row_errors"
# Key of a gateway's error: the name of a ``FailureKind`` whose status is also that of another kind.
KIND = "kind"
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
# Python types that JSON elements may have, for each KServe datatype.
_JSON_TYPES: dict[str, set[type]] = {
    _BYTES: {str},
    "BOOL": {bool},
    **{name: {int} for name in _TYPES if "INT" in name},
    **{name: {int, float, type(None)} for name in _TYPES if name.startswith("FP")},
}
_LENGTH = struct.Struct("<I")
# Maximum number of dimensions of a tensor, which is the limit of numpy 1.
_MOST_DIMENSIONS = 32
# Largest size of one dimension: far more than a body can hold, and small enough for numpy not to
# overflow.
_MOST_ITEMS = 2**31


def datatype_of(dtype: Any) -> str:
    """Return the KServe datatype for a numpy dtype; for ``bytes`` and objects it is BYTES."""
    return _NAMES.get(np.dtype(dtype), _BYTES)


def pack_tensor(array: np.ndarray) -> bytes:
    """Encode the elements of a tensor, in row-major order, as binary data."""
    if datatype_of(array.dtype) == _BYTES:
        return b"".join(_LENGTH.pack(len(item)) + item for item in array.reshape(-1))
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def encode_body(
    inputs: Mapping[str, np.ndarray], marks: Collection[str] = ()
) -> tuple[bytes, dict[str, str]]:
    """Encode a request as body and headers.

    Arrays of ``bytes`` objects become BYTES tensors. ``marks`` are parameters that are set to true:
    ``PROBE`` and ``ROW_ERRORS``.
    """
    listed, pieces = [], []
    for name, array in inputs.items():
        raw = pack_tensor(array)
        listed.append(
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype_of(array.dtype),
                "parameters": {"binary_data_size": len(raw)},
            }
        )
        pieces.append(raw)
    parameters = {"binary_data_output": True, **dict.fromkeys(marks, True)}
    header = json.dumps({"inputs": listed, "parameters": parameters}).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return b"".join([header, *pieces]), headers


def has_mark(request: Mapping[str, Any], mark: str) -> bool:
    """Return whether the JSON of a request has the parameter ``PROBE`` or ``ROW_ERRORS``."""
    parameters = request.get("parameters")
    return isinstance(parameters, dict) and parameters.get(mark) is True


def decode_body(body: bytes, headers: Mapping[str, str]) -> Tensors:
    """Decode the output tensors of an answer; their data may be binary or JSON.

    Raises:
        ServingError: the body is not an answer of KServe v2.
    """
    try:
        length = int(headers.get(HEADER_LENGTH, len(body)))
        if not 0 <= length <= len(body):
            raise ServingError(f"{HEADER_LENGTH}: got {length} for a body of {len(body)} bytes")
        return decode_tensors(json.loads(body[:length])["outputs"], body[length:])
    except ServingError as error:
        raise ServingError(f"{error}; wanted an answer of KServe v2") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ServingError(f"got {shown(body[:80])}, wanted an answer of KServe v2") from error


def decode_tensors(listed: object, binary: bytes) -> Tensors:
    """Decode the tensors of a request or an answer of KServe v2.

    The sender is not trusted: shape, datatype and data must agree before an array is created. All
    of the binary data must be used, because a wrong size of one tensor would shift all that follow.

    Args:
        listed: the JSON list ``inputs`` of a request, or ``outputs`` of an answer.
        binary: the bytes after the JSON.

    Raises:
        ServingError: a tensor is invalid; the message has its name and what is wrong with it.
    """
    if not isinstance(listed, list):
        raise ServingError(f"inputs: got {shown(listed)}, wanted a list of tensors")
    tensors: Tensors = {}
    start = 0
    for number, entry in enumerate(listed):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise ServingError(f"tensor {number}: got {shown(entry)}, wanted an object with a name")
        if name in tensors:
            raise ServingError(f"{short(name)}: got two tensors of this name; send it once")
        try:
            end = start + _binary_size(entry, len(binary) - start)
            tensors[name] = _decode_tensor(entry, binary[start:end])
        except ServingError as error:
            raise ServingError(f"{short(name)}: {error}") from error
        start = end
    if start != len(binary):
        raise ServingError(
            f"got {len(binary)} bytes of binary data, but the tensors' binary_data_size add up to "
            f"{start}; the sizes must add up to all of the data"
        )
    return tensors


def _binary_size(entry: Mapping[str, Any], remaining: int) -> int:
    """Return how many of the ``remaining`` bytes of binary data belong to this tensor.

    0 if the tensor's data is in the JSON.
    """
    parameters = entry.get("parameters")
    if parameters is None:  # None: some clients send null
        parameters = {}
    if not isinstance(parameters, dict):
        raise ServingError(f"parameters: got {shown(parameters)}, wanted an object")
    if "shared_memory_region" in parameters:
        raise ServingError("parameters: shared memory is not supported; send the data itself")
    has_size, has_data = "binary_data_size" in parameters, "data" in entry
    if has_size == has_data:
        state = "both data and" if has_data else "neither data nor"
        raise ServingError(f"got {state} binary_data_size, wanted one of them")
    size = parameters.get("binary_data_size", 0)
    if not _is_size(size) or size > remaining:
        raise ServingError(
            f"binary_data_size: got {shown(size)}, wanted 0 to {remaining}, the bytes that are left"
        )
    return size


def _decode_tensor(entry: Mapping[str, Any], raw: bytes) -> np.ndarray:
    shape, datatype = _check_shape(entry.get("shape")), entry.get("datatype")
    if not isinstance(datatype, str) or datatype not in _JSON_TYPES:
        actual = "nothing" if datatype is None else shown(datatype)
        raise ServingError(f"datatype: got {actual}, wanted one of {', '.join(_JSON_TYPES)}")
    items = prod(shape)
    if "data" in entry:
        data = _flatten_data(entry["data"], shape)
        _check_count(len(data), items, shape)
        values = _from_json(data, datatype)
    elif datatype == _BYTES:
        values = _from_packed(raw, items, shape)
    else:
        dtype = np.dtype(_TYPES[datatype]).newbyteorder("<")
        size = items * dtype.itemsize
        if len(raw) != size:
            tensor = f"shape {shape} of {datatype}"
            raise ServingError(f"got {len(raw)} bytes of binary data, wanted {size} for {tensor}")
        # Compare instead of casting: numpy would misread a bool whose byte is neither 0 nor 1.
        is_bool = datatype == "BOOL"
        values = np.frombuffer(raw, np.uint8) != 0 if is_bool else np.frombuffer(raw, dtype)
    try:
        return values.reshape(shape)
    except ValueError:  # ValueError: the product of the sizes overflows, e.g. next to a size of 0
        raise ServingError(
            f"shape: got {shape}, which is too large: without the zeros, its sizes must multiply "
            "to less than 2**63 bytes. Send an empty tensor with smaller sizes"
        ) from None


def _check_shape(sizes: Any) -> list[int]:
    is_list = isinstance(sizes, list) and len(sizes) <= _MOST_DIMENSIONS
    if not is_list or not all(_is_size(size) and size <= _MOST_ITEMS for size in sizes):
        actual = "nothing" if sizes is None else shown(sizes)
        raise ServingError(
            f"shape: got {actual}, wanted a list of sizes: at most {_MOST_DIMENSIONS} integers "
            f"from 0 to {_MOST_ITEMS}"
        )
    return sizes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_count(count: int, expected: int, shape: Sequence[int]) -> None:
    if count != expected:
        raise ServingError(f"data: got {count} elements, wanted {expected} for shape {shape}")


def _flatten_data(data: Any, shape: Sequence[int]) -> list[Any]:
    """Return JSON elements in row-major order; clients send them flat, or nested like the shape."""
    if not isinstance(data, list):
        raise ServingError(f"data: got {shown(data)}, wanted a list")
    if not data or not isinstance(data[0], list):
        return data
    _check_count(len(data), shape[0] if shape else 1, shape)
    for size in shape[1:]:
        if not all(isinstance(row, list) and len(row) == size for row in data):
            raise ServingError(f"data: got nested lists that do not fit shape {shape}")
        data = [*chain.from_iterable(data)]
    return data


def _from_json(data: list[Any], datatype: str) -> np.ndarray:
    allowed = _JSON_TYPES[datatype]
    # Check the types first: numpy would convert strings to numbers, and truncate fractions.
    if not {*map(type, data)} <= allowed:
        row = next(row for row, value in enumerate(data) if type(value) not in allowed)
        raise ServingError(f"data, element {row}: got {shown(data[row])}, wanted {datatype}")
    if datatype == _BYTES:
        return np.array([_encode_item(row, text) for row, text in enumerate(data)], np.object_)
    dtype = np.dtype(_TYPES[datatype])
    if dtype.kind in "iu" and data:
        limits = np.iinfo(datatype.lower())
        outside = next((x for x in (min(data), max(data)) if not limits.min <= x <= limits.max), 0)
        if outside:
            raise ServingError(f"data: got {shown(outside)}, which does not fit {datatype}")
    if dtype.kind != "f":
        return np.array(data, dtype)
    try:
        # None becomes NaN: JSON has no NaN, so servers write null.
        wide = np.array([np.nan if value is None else value for value in data], np.float64)
    except OverflowError:
        raise ServingError(f"data: got a number that does not fit {datatype}") from None
    with np.errstate(over="ignore"):
        values = wide.astype(dtype)
    if (np.isinf(values) & ~np.isinf(wide)).any():
        raise ServingError(f"data: got a number that does not fit {datatype}")
    return values


def _encode_item(row: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ServingError(
            f"data, element {row}: got half of a surrogate pair; wanted a string that UTF-8 can "
            "encode"
        ) from None


def _from_packed(raw: bytes, count: int, shape: Sequence[int]) -> np.ndarray:
    """Decode BYTES elements, each preceded by its length.

    Raises:
        ServingError: the elements do not use up exactly all of ``raw``.
    """
    # Check before allocating memory: each element has at least the 4 bytes of its length.
    if count * _LENGTH.size > len(raw):
        raise ServingError(f"got {len(raw)} bytes of binary data, too few for shape {shape}")
    values = np.empty(count, dtype=np.object_)
    start = 0
    for row in range(count):
        begin = start + _LENGTH.size
        end = begin + _LENGTH.unpack_from(raw, start)[0] if begin <= len(raw) else begin
        if end > len(raw):
            raise ServingError(
                f"item {row}: by its length it ends at byte {end}, but the binary data has only "
                f"{len(raw)} bytes"
            )
        values[row] = raw[begin:end]
        start = end
    if start != len(raw):
        raise ServingError(
            f"got {len(raw)} bytes of binary data, but the {count} items of shape {shape} have "
            f"only {start}"
        )
    return values
