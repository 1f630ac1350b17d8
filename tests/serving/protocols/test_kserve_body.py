"""Tensors of KServe v2 with false sizes, types or data: one error that names the tensor."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from nemo_aligner.serving.protocols import kserve_body
from nemo_aligner.utils.errors import ServingError
from tests.serving.protocols.bodies import not_refused

# One tensor of each dtype, and BYTES items that are empty or not UTF-8.
ARRAYS = {
    "BOOL": np.array([[True], [False]]),
    "INT8": np.array([[-(2**7)], [2**7 - 1]], np.int8),
    "INT16": np.array([[-(2**15)], [2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31)], [2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63)], [2**63 - 1]], np.int64),
    "UINT8": np.array([[0], [2**8 - 1]], np.uint8),
    "UINT16": np.array([[0], [2**16 - 1]], np.uint16),
    "UINT32": np.array([[0], [2**32 - 1]], np.uint32),
    "UINT64": np.array([[0], [2**64 - 1]], np.uint64),
    "FP16": np.array([[65504.0], [-0.5]], np.float16),
    "FP32": np.array([[0.1], [-3.4028234663852886e38]], np.float32),
    "FP64": np.array([[0.1], [1.7976931348623157e308]], np.float64),
    "BYTES": np.array([["Grüße".encode()], [b""]], np.object_),
}


def listed(datatype: str, shape: Any, **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, **more}


def packed(datatype: str, shape: Any, size: Any) -> dict[str, Any]:
    return listed(datatype, shape, parameters={"binary_data_size": size})


def test_tensors_come_back_as_they_were_sent_in_binary_and_in_json() -> None:
    body, headers = kserve_body.encode_body(ARRAYS)
    length = int(headers[kserve_body.HEADER_LENGTH])
    sent = json.loads(body[:length])["inputs"]
    assert [entry["datatype"] for entry in sent] == [*ARRAYS]
    found = kserve_body.decode_tensors(sent, body[length:])
    as_json = {
        name: [item.decode() for item in array.reshape(-1)]
        if name == "BYTES"
        else array.reshape(-1).tolist()
        for name, array in ARRAYS.items()
    }
    flat = [{**listed(kind, [2, 1], data=data), "name": kind} for kind, data in as_json.items()]
    nested = [{**each, "data": [[item] for item in each["data"]]} for each in flat]
    assert json.loads(json.dumps(flat)) == flat
    for tensors in (
        found,
        kserve_body.decode_tensors(flat, b""),
        kserve_body.decode_tensors(nested, b""),
    ):
        for name, array in ARRAYS.items():
            assert tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(tensors[name], array, err_msg=name)


def test_null_in_json_is_no_number_and_a_bool_is_any_byte_but_0() -> None:
    values = kserve_body.decode_tensors([listed("FP32", [2], data=[None, 1])], b"")["x"]
    np.testing.assert_array_equal(values, [np.nan, 1.0])
    flags = kserve_body.decode_tensors([packed("BOOL", [3], 3)], b"\0\1\2")["x"]
    assert (flags == True).tolist() == [False, True, True]  # noqa: E712


ITEMS = struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0)
LIES: list[tuple[Any, bytes, str]] = [
    (None, b"", "got None, wanted a list of tensors"),
    ([5], b"", "tensor 0: got 5, wanted an object with a name"),
    ([{"name": 5}], b"", "tensor 0: .*wanted an object with a name"),
    ([listed("INT8", [1], data=[1])] * 2, b"", "x: got two tensors of this name"),
    ([listed("INT8", [1])], b"", "x: got neither data nor binary_data_size"),
    ([{**packed("INT8", [1], 1), "data": [1]}], b"a", "x: got both data and binary_data_size"),
    ([listed("INT8", [1], parameters=5)], b"", "x: parameters: got 5, wanted an object"),
    (
        [listed("INT8", [1], parameters={"shared_memory_region": "a"})],
        b"",
        "x: parameters: shared memory is not supported",
    ),
    # Wrong sizes of the binary data.
    ([packed("INT8", [1], -1)], b"a", "x: binary_data_size: got -1, wanted 0 to 1"),
    ([packed("INT8", [1], True)], b"a", "x: binary_data_size: got True, wanted 0 to 1"),
    ([packed("INT8", [1], "1")], b"a", "x: binary_data_size: got '1', wanted 0 to 1"),
    ([packed("INT8", [1], 10**30)], b"a", "x: binary_data_size: got 10+, wanted 0 to 1"),
    ([packed("INT8", [2], 2)], b"abc", "got 3 bytes of binary data, but .* add up to 2"),
    ([packed("INT32", [2], 7)], b"a" * 7, "x: got 7 bytes of binary data, wanted 8 for shape"),
    (
        [packed("INT32", [2**31, 2**31], 8)],
        b"a" * 8,
        "x: got 8 bytes .*wanted 18446744073709551616",
    ),
    # Wrong items of BYTES.
    ([packed("BYTES", [3], 10)], ITEMS, "x: got 10 bytes of binary data, too few for shape"),
    ([packed("BYTES", [1], 10)], ITEMS, "x: got 10 bytes .*but the 1 items .* have only 6"),
    ([packed("BYTES", [2], 9)], ITEMS[:9], "x: item 1: .*ends at byte 10, but .* only 9 bytes"),
    ([packed("BYTES", [1], 8)], b"\xff" * 8, "x: item 0: .*ends at byte 4294967299"),
    ([packed("BYTES", [2**31], 8)], b"\0" * 8, "x: got 8 bytes .*too few for shape"),
    # Wrong shapes.
    ([listed("INT8", None, data=[])], b"", "x: shape: got nothing, wanted a list of sizes"),
    ([listed("INT8", [-1], data=[1])], b"", r"x: shape: got \[-1\], wanted"),
    ([listed("INT8", [1.0], data=[1])], b"", r"x: shape: got \[1.0\], wanted"),
    ([listed("INT8", [True], data=[1])], b"", r"x: shape: got \[True\], wanted"),
    ([listed("INT8", [0, 2**64], data=[])], b"", "x: shape: got .*, wanted a list of sizes"),
    ([listed("INT8", [0, *[2**31] * 9], data=[])], b"", "x: shape: got .*, which is too large"),
    ([listed("INT8", [1] * 33, data=[1])], b"", "x: shape: got .*, wanted a list of sizes"),
    ([listed("INT8", [2**31, 2**31], data=[1])], b"", "x: data: got 1 elements, wanted 46116860"),
    ([listed("INT8", [2], data=[1])], b"", r"x: data: got 1 elements, wanted 2 for shape \[2\]"),
    ([listed("INT8", [], data=[])], b"", r"x: data: got 0 elements, wanted 1 for shape \[\]"),
    # Wrong JSON data.
    ([listed("INT8", [1], data=5)], b"", "x: data: got 5, wanted a list"),
    ([listed("INT8", [1, 2], data=[[1], [2]])], b"", "x: data: got 2 elements, wanted 1"),
    ([listed("INT8", [2, 1], data=[[1, 2], []])], b"", "x: data: got nested lists that do not fit"),
    ([listed("INT8", [2, 1], data=[[1], 2])], b"", "x: data: got nested lists that do not fit"),
    ([listed("INT8", [1, 1], data=[[[1]]])], b"", r"x: data, element 0: got \[1\], wanted INT8"),
    ([listed("INT64", [1], data=["1"])], b"", "x: data, element 0: got '1', wanted INT64"),
    ([listed("INT64", [2], data=[1, 1.5])], b"", "x: data, element 1: got 1.5, wanted INT64"),
    ([listed("INT64", [1], data=[True])], b"", "x: data, element 0: got True, wanted INT64"),
    ([listed("INT64", [1], data=[None])], b"", "x: data, element 0: got None, wanted INT64"),
    ([listed("BOOL", [1], data=[1])], b"", "x: data, element 0: got 1, wanted BOOL"),
    ([listed("BYTES", [1], data=[1])], b"", "x: data, element 0: got 1, wanted BYTES"),
    ([listed("BYTES", [1], data=["\ud800"])], b"", "x: data, element 0: got half of a surrogate"),
    ([listed("INT8", [1], data=[128])], b"", "x: data: got 128, which does not fit INT8"),
    ([listed("UINT64", [1], data=[-1])], b"", "x: data: got -1, which does not fit UINT64"),
    ([listed("FP32", [1], data=[1e39])], b"", "x: data: got a number that does not fit FP32"),
    ([listed("FP64", [1], data=[10**400])], b"", "x: data: got a number that does not fit FP64"),
    ([listed("BF16", [1], data=[1])], b"", "x: datatype: got 'BF16', wanted one of BYTES, BOOL,"),
    ([listed([], [1], data=[1])], b"", r"x: datatype: got \[\], wanted one of"),  # type: ignore[arg-type]
]


def test_tensors_whose_sizes_lie_are_refused_by_name() -> None:
    assert not not_refused(kserve_body.decode_tensors, LIES)


@pytest.mark.parametrize("length", ["-1", "9", "a", ""])
def test_length_of_the_json_that_is_none_is_refused(length: str) -> None:
    with pytest.raises(ServingError, match=r"KServe v2|Inference-Header-Content-Length: got"):
        kserve_body.decode_body(b'{"a": 1}', {kserve_body.HEADER_LENGTH: length})
