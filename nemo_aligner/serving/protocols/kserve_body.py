"""Tensors as HTTP bodies: KServe v2 with its extension for binary data.

A body is JSON, whose length a header gives, and then the tensors' bytes in its order,
little-endian; an item of BYTES has its length before it in 4 bytes. Texts as JSON would be escaped
and parsed once more on each side. The client and the HTTP front read and write the same form.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from nemo_aligner.utils.errors import ServingError, short, shown

Tensors = dict[str, np.ndarray]

HEADER_LENGTH = "Inference-Header-Content-Length"
# Parameter of a request whose rewards are nobody's, such as the one by which ``/verify`` finds out
# who is at fault.
_PROBE = "probe"
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
# Types that the elements of a datatype have as JSON.
_JSON_TYPES: dict[str, set[type]] = {
    _BYTES: {str},
    "BOOL": {bool},
    **{name: {int} for name in _TYPES if "INT" in name},
    **{name: {int, float, type(None)} for name in _TYPES if name.startswith("FP")},
}
_LENGTH = struct.Struct("<I")
_MOST_DIMENSIONS = 32  # of an array of numpy 1
# Of a dimension. Far more than a body can hold, and numpy's sizes do not overflow.
_MOST_ITEMS = 2**31


def datatype_of(dtype: Any) -> str:
    """The datatype of tensors whose arrays have this dtype; ``bytes`` and objects are BYTES."""
    return _NAMES.get(np.dtype(dtype), _BYTES)


def pack_tensor(array: np.ndarray) -> bytes:
    """The binary data of a tensor."""
    if datatype_of(array.dtype) == _BYTES:
        return b"".join(_LENGTH.pack(len(item)) + item for item in array.reshape(-1))
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def encode_body(
    inputs: Mapping[str, np.ndarray], is_probe: bool = False
) -> tuple[bytes, dict[str, str]]:
    """Encode a request: its body and headers; arrays of ``bytes`` become BYTES.

    ``is_probe``: the server shall not count it. Servers that do not know the parameter ignore it.
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
    parameters = {"binary_data_output": True, **({_PROBE: True} if is_probe else {})}
    header = json.dumps({"inputs": listed, "parameters": parameters}).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return b"".join([header, *pieces]), headers


def is_probe(request: Mapping[str, Any]) -> bool:
    """Tell whether the JSON of a request says that it shall not be counted."""
    parameters = request.get("parameters")
    return isinstance(parameters, dict) and parameters.get(_PROBE) is True


def decode_body(body: bytes, headers: Mapping[str, str]) -> Tensors:
    """Decode the outputs of an answer, whether they are binary or JSON.

    Raises:
        ServingError: it is no answer of KServe v2.
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
    """Decode the tensors of a request or an answer of KServe v2, whoever sent them.

    No size is trusted: shape, datatype and data have to agree before an array is made. The binary
    data has to be used up, as sizes that lie about one tensor would shift all that follow.

    Args:
        listed: ``inputs`` or ``outputs`` of its JSON.
        binary: the bytes behind its JSON.

    Raises:
        ServingError: it names the tensor and what is wrong with it.
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
            f"got {len(binary)} bytes of binary data, of which the tensors' binary_data_size has "
            f"{start}; the sizes have to add up to all of it"
        )
    return tensors


def _binary_size(entry: Mapping[str, Any], most: int) -> int:
    """Bytes of a tensor in the binary data, of which ``most`` are left; 0 if it has JSON data."""
    parameters = entry.get("parameters")
    if parameters is None:  # of clients that write every field
        parameters = {}
    if not isinstance(parameters, dict):
        raise ServingError(f"parameters: got {shown(parameters)}, wanted an object")
    if "shared_memory_region" in parameters:
        raise ServingError("parameters: shared memory is not supported; send the data itself")
    has_size, has_data = "binary_data_size" in parameters, "data" in entry
    if has_size == has_data:
        got = "both data and" if has_data else "neither data nor"
        raise ServingError(f"got {got} binary_data_size, wanted one of them")
    size = parameters.get("binary_data_size", 0)
    if not _is_size(size) or size > most:
        raise ServingError(f"binary_data_size: got {shown(size)}, wanted 0 to {most}, what is left")
    return size


def _decode_tensor(entry: Mapping[str, Any], raw: bytes) -> np.ndarray:
    shape, datatype = _shape(entry.get("shape")), entry.get("datatype")
    if not isinstance(datatype, str) or datatype not in _JSON_TYPES:
        known = ", ".join(_JSON_TYPES)
        got = "nothing" if datatype is None else shown(datatype)
        raise ServingError(f"datatype: got {got}, wanted one of {known}")
    items = prod(shape)
    if "data" in entry:
        data = _flattened(entry["data"], shape)
        _check_count(len(data), items, shape)
        values = _from_json(data, datatype)
    elif datatype == _BYTES:
        values = _from_packed(raw, items, shape)
    else:
        dtype = np.dtype(_TYPES[datatype]).newbyteorder("<")
        size = items * dtype.itemsize
        if len(raw) != size:
            what = f"shape {shape} of {datatype}"
            raise ServingError(f"got {len(raw)} bytes of binary data, wanted {size} for {what}")
        # A byte that is neither 0 nor 1 would make a bool that numpy takes for neither.
        is_bool = datatype == "BOOL"
        values = np.frombuffer(raw, np.uint8) != 0 if is_bool else np.frombuffer(raw, dtype)
    try:
        return values.reshape(shape)
    except ValueError:  # a 0 among sizes whose product numpy cannot hold
        raise ServingError(f"shape: got {shape}, which is too large") from None


def _shape(sizes: Any) -> list[int]:
    is_list = isinstance(sizes, list) and len(sizes) <= _MOST_DIMENSIONS
    if not is_list or not all(_is_size(size) and size <= _MOST_ITEMS for size in sizes):
        got = "nothing" if sizes is None else shown(sizes)
        raise ServingError(f"shape: got {got}, wanted a list of sizes")
    return sizes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_count(count: int, wanted: int, shape: Sequence[int]) -> None:
    if count != wanted:
        raise ServingError(f"data: got {count} elements, wanted {wanted} for shape {shape}")


def _flattened(data: Any, shape: Sequence[int]) -> list[Any]:
    """Elements in JSON in row-major order: sent flat, or as lists in lists by the shape."""
    if not isinstance(data, list):
        raise ServingError(f"data: got {shown(data)}, wanted a list")
    if not data or not isinstance(data[0], list):
        return data
    _check_count(len(data), shape[0] if shape else 1, shape)
    for size in shape[1:]:
        if not all(isinstance(row, list) and len(row) == size for row in data):
            raise ServingError(f"data: got lists that do not fit shape {shape}")
        data = [*chain.from_iterable(data)]
    return data


def _from_json(data: list[Any], datatype: str) -> np.ndarray:
    allowed = _JSON_TYPES[datatype]
    # By their types first: numpy would make numbers of texts, and integers of fractions.
    if not {*map(type, data)} <= allowed:
        row = next(row for row, value in enumerate(data) if type(value) not in allowed)
        raise ServingError(f"data, element {row}: got {shown(data[row])}, wanted {datatype}")
    if datatype == _BYTES:
        return np.array([_encoded(row, text) for row, text in enumerate(data)], dtype=np.object_)
    dtype = np.dtype(_TYPES[datatype])
    if dtype.kind in "iu" and data:
        limits = np.iinfo(datatype.lower())
        outside = next((x for x in (min(data), max(data)) if not limits.min <= x <= limits.max), 0)
        if outside:
            raise ServingError(f"data: got {shown(outside)}, which no {datatype} can hold")
    if dtype.kind != "f":
        return np.array(data, dtype)
    try:
        # JSON has no NaN: a server writes null, if anything.
        wide = np.array([np.nan if value is None else value for value in data], np.float64)
    except OverflowError:
        raise ServingError(f"data: got a number that no {datatype} can hold") from None
    with np.errstate(over="ignore"):
        values = wide.astype(dtype)
    if (np.isinf(values) & ~np.isinf(wide)).any():
        raise ServingError(f"data: got a number that no {datatype} can hold")
    return values


def _encoded(row: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ServingError(
            f"data, element {row}: got half of a surrogate pair, wanted a text that UTF-8 can hold"
        ) from None


def _from_packed(raw: bytes, count: int, shape: Sequence[int]) -> np.ndarray:
    """Items of BYTES, each behind its length; ``count`` of them use up ``raw``."""
    # Each item has 4 bytes at least, so that no more memory is used than the body has.
    if count * _LENGTH.size > len(raw):
        raise ServingError(f"got {len(raw)} bytes of binary data, too few for shape {shape}")
    values = np.empty(count, dtype=np.object_)
    start = 0
    for row in range(count):
        begin = start + _LENGTH.size
        end = begin + _LENGTH.unpack_from(raw, start)[0] if begin <= len(raw) else begin
        if end > len(raw):
            raise ServingError(
                f"item {row}: it ends at byte {end} of {len(raw)} bytes of binary data"
            )
        values[row] = raw[begin:end]
        start = end
    if start != len(raw):
        raise ServingError(
            f"got {len(raw)} bytes of binary data, of which {count} items for shape {shape} use "
            f"{start}"
        )
    return values
