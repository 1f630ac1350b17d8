"""Compressed bodies: how they are unpacked, what is rejected, and the memory of a zip bomb."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib

import pytest

pytest.importorskip("pydantic")
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols.base import decompress, is_packed, unpack_body
from tests.serving.protocols.bodies import not_refused

MOST = 2**20
# Compressible and random bytes, below, at and above the buffer's size, up to the limit.
BODIES = [
    *(b"", b"a", b"ab" * 2**15, b"a" * (2**16 + 1), bytes(MOST)),
    random.Random(1).randbytes(700_000),
]


@pytest.mark.parametrize("level", [0, 1, 9])
def test_body_is_the_same_packed_by_gzip_by_deflate_or_not_at_all(level: int) -> None:
    for body in BODIES:
        packed = gzip.compress(body, level), zlib.compress(body, level)
        for content, encoding in (
            (body, ""),
            (body, " Identity"),
            (packed[0], "gzip"),
            (packed[0], "X-GZIP "),
            (packed[0], ""),  # some clients send no header
            (packed[1], "deflate"),
        ):
            assert decompress(content, encoding, MOST) == body, (len(body), encoding)
            assert is_packed(content, encoding) == (content != body)


ZIPPED, DEFLATED = gzip.compress(b"a b c" * 99), zlib.compress(b"a b c" * 99)
BEHIND = "body: its compressed data is incomplete"
DAMAGED = [
    (b"a", "gzip", "Content-Encoding: got gzip, but the body is not"),
    (DEFLATED, "gzip", "Content-Encoding: got gzip, but the body is not"),
    (b"a", "br", "Content-Encoding: got 'br', wanted gzip, deflate or none"),
    (ZIPPED, "gzip, gzip", "Content-Encoding: got 'gzip, gzip', wanted gzip, deflate or none"),
    (b"ab", "deflate", "body: its compressed data cannot be read: .*incorrect header check"),
    (b"", "deflate", BEHIND),
    (ZIPPED + ZIPPED, "gzip", BEHIND),
    (ZIPPED + b"a", "gzip", BEHIND),
    (DEFLATED + b"a", "deflate", BEHIND),
    (ZIPPED[:2], "gzip", BEHIND),
    (ZIPPED[:-1], "gzip", BEHIND),
    (DEFLATED[:-1], "deflate", BEHIND),
    (ZIPPED[:-8] + bytes(8), "gzip", "body: its compressed data cannot be read: .*incorrect data"),
    (gzip.compress(b"a", 0) + bytes(10**6), "gzip", BEHIND),
]


def test_packed_body_that_is_damaged_is_refused() -> None:
    def read(content: bytes, encoding: str) -> bytes:
        return decompress(content, encoding, MOST)

    assert not not_refused(read, DAMAGED)


def test_json_begins_behind_its_mark_and_is_no_utf_16() -> None:
    marked = gzip.compress(b"\xef\xbb\xbf{}")
    assert unpack_body(marked, "gzip", MOST) == unpack_body(b"{}", "", MOST) == b"{}"
    utf16 = [(gzip.compress("{}".encode("utf-16")), "body: got text in UTF-16")]
    assert not not_refused(lambda body: unpack_body(body, "gzip", MOST), utf16)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bomb_holds_no_more_than_the_limit_and_a_buffer(encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    bomb = pack(bytes(100 * MOST), 9)
    assert len(bomb) < 2**17
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=f"more than {MOST} bytes") as caught:
            decompress(bomb, encoding, MOST)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.kind is FailureKind.too_large
    # The limit, a piece beyond it, and the slices of the bomb that are being read.
    assert peak < MOST + 2**19
