"""Decoders of bodies get random input: they accept it, or reject it with a one-line message."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.front.app import ROUTES
from nemo_aligner.serving.protocols import kserve_body
from nemo_aligner.serving.protocols.base import Body, decompress, parse_body
from nemo_aligner.serving.protocols.strict_json import read_json
from nemo_aligner.utils.errors import ServingError

FUZZED = settings(max_examples=300, derandomize=True, database=None, deadline=None)
ITEM_SIZES = {"BOOL": 1, "INT8": 1, "UINT16": 2, "INT32": 4, "FP32": 4, "INT64": 8, "FP64": 8}


class AnyBody(Body):
    """A model that every JSON object fits."""


def outcome(decode: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Return (result, None) of a decoder, or (None, its one-line message)."""
    try:
        return decode(*args), None
    except (ServingError, RequestError) as error:
        refusal = str(error)
    assert refusal
    assert len(refusal) < 1000
    assert "\n" not in refusal
    refusal.encode()  # an answer must be able to carry it
    return None, refusal


numbers = st.integers(-(2**70), 2**70) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=9)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def is_same(left: Any, right: Any) -> bool:
    """Compare two JSON values, with NaN equal to NaN, and including their types."""
    return repr(left) == repr(right)


@FUZZED
@given(st.dictionaries(st.text(max_size=3), values, max_size=3))
def test_object_of_json_is_read_as_the_standard_library_reads_it(value: dict[str, Any]) -> None:
    text = json.dumps(value)
    assert is_same(read_json(text), json.loads(text))
    assert is_same(parse_body(AnyBody, text.encode()).model_extra, json.loads(text))


# Objects as lists of pairs, so that keys may be duplicate, also by different JSON escapes.
keys = st.sampled_from(["a", "b", "\\u0061", "", "é", "\\u00e9"])
pairs = st.recursive(
    st.just("1"),
    lambda inner: (
        st.lists(st.tuples(keys, inner), max_size=3).map(
            lambda each: "{" + ", ".join(f'"{key}": {value}' for key, value in each) + "}"
        )
        | st.lists(inner, max_size=3).map(lambda each: f"[{', '.join(each)}]")
    ),
    max_leaves=10,
)


def has_duplicates(text: str) -> bool:
    found = []
    json.loads(text, object_pairs_hook=lambda each: found.append(len(each) != len(dict(each))))
    return any(found)


@FUZZED
@given(pairs)
def test_object_is_refused_where_a_key_comes_twice_and_nowhere_else(text: str) -> None:
    body = f'{{"body": {text}}}'
    for read in (read_json, lambda text: parse_body(AnyBody, text.encode())):
        if has_duplicates(body):
            with pytest.raises(ServingError, match=r'got the key "[abé]?" twice in one object'):
                read(body)
        else:
            read(body)


@FUZZED
@given(st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
def test_bytes_at_any_route_are_its_request_or_refused_in_a_line(body: bytes) -> None:
    for route in ROUTES:
        outcome(lambda each: each.read(each.parse(body)), route)


@FUZZED
@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate"]), st.data())
def test_packed_body_that_was_changed_is_refused_or_within_the_limit(
    content: bytes, encoding: str, data: st.DataObject
) -> None:
    packed = bytearray((gzip.compress if encoding == "gzip" else zlib.compress)(content))
    assert decompress(bytes(packed), encoding, len(content)) == content
    for place in data.draw(st.lists(st.integers(0, len(packed) - 1), min_size=1, max_size=3)):
        packed[place] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.integers(0, len(packed)))
    unpacked, refusal = outcome(decompress, bytes(packed[:end]), encoding, 100)
    assert refusal or len(unpacked) <= 100


# Tensors, most of which have a false size.
hostile = st.sampled_from([None, True, -1, 0, 1, 2, 3, 2**31, 2**63, 10**30, 1.5, "1", [], {}])
datatypes = st.sampled_from([*ITEM_SIZES, "BYTES"])
tensors = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "y", "z"]) | hostile,
        "shape": st.lists(st.integers(0, 4), max_size=3) | st.lists(hostile, max_size=3) | hostile,
        "datatype": datatypes | hostile,
    },
    optional={
        "data": values | st.lists(scalars, max_size=6),
        "parameters": st.fixed_dictionaries(
            {}, optional={"binary_data_size": st.integers(0, 40) | hostile, "other": hostile}
        )
        | hostile,
    },
)


@FUZZED
@given(st.lists(tensors | hostile, max_size=3) | hostile, st.binary(max_size=40))
def test_tensors_that_lie_are_refused_in_a_line_or_have_their_shape(
    listed: Any, binary: bytes
) -> None:
    decoded, refusal = outcome(kserve_body.decode_tensors, listed, binary)
    if refusal:
        return
    assert [*decoded] == [entry["name"] for entry in listed]
    for entry, array in zip(listed, decoded.values(), strict=True):
        assert [*array.shape] == entry["shape"]


def as_sent(datatype: str, shape: list[int], content: bytes) -> tuple[np.ndarray, bytes]:
    """Build an array, and the same in binary form."""
    count = int(np.prod(shape))
    if datatype == "BYTES":
        items = [content[row : row + row % 5] for row in range(count)]
        array = np.array([*items, None], np.object_)[:-1]
        return array, b"".join(struct.pack("<I", len(item)) + item for item in items)
    names = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}
    dtype = np.dtype(names.get(datatype, datatype.lower()))
    raw = (content * 64)[: count * dtype.itemsize].ljust(count * dtype.itemsize, b"\0")
    if datatype == "BOOL":
        raw = bytes(byte % 2 for byte in raw)
    return np.frombuffer(raw, dtype), raw


@FUZZED
@given(
    st.lists(st.tuples(datatypes, st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=3),
    st.binary(max_size=40),
    st.data(),
)
def test_tensors_are_those_that_were_sent_and_none_if_one_size_is_changed(
    sent: list[tuple[str, list[int]]], content: bytes, data: st.DataObject
) -> None:
    arrays, raws = zip(*[as_sent(*each, content) for each in sent], strict=True)
    listed: list[dict[str, Any]] = [
        {
            "name": str(number),
            "shape": shape,
            "datatype": datatype,
            "parameters": {"binary_data_size": len(raw)},
        }
        for number, ((datatype, shape), raw) in enumerate(zip(sent, raws, strict=True))
    ]
    decoded = kserve_body.decode_tensors(listed, b"".join(raws))
    for array, entry, tensor in zip(arrays, listed, decoded.values(), strict=True):
        np.testing.assert_array_equal(tensor, array.reshape(entry["shape"]))
        assert tensor.dtype == array.dtype
    entry = data.draw(st.sampled_from(listed))
    entry["parameters"]["binary_data_size"] += data.draw(st.integers(-9, 9).filter(bool))
    assert outcome(kserve_body.decode_tensors, listed, b"".join(raws))[1]


@FUZZED
@given(st.binary(max_size=80), st.none() | st.integers(-5, 90).map(str) | st.text(max_size=3))
def test_bytes_in_place_of_an_answer_of_kserve_are_refused(body: bytes, length: str | None) -> None:
    headers = {} if length is None else {kserve_body.HEADER_LENGTH: length}
    _, refusal = outcome(kserve_body.decode_body, body, headers)
    assert refusal
    assert refusal.endswith("wanted an answer of KServe v2")
