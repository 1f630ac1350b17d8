"""Damaged and hostile GGUF files: each is converted to a model, or refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import families, tiny
from tests.checkpoint.fuzzing import (
    TINY,
    Files,
    Mutation,
    convert_hf,
    edited,
    files_of,
    some_bytes,
)
from tests.checkpoint.hf.gguf.writing import LLAMA3, write_gguf, write_sentencepiece

gguf = pytest.importorskip("gguf")

NAME = "tiny.gguf"
NUMBERS = [0, 1, 2, 3, 31, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7
OTHER_VALUES = [
    (UINT32, struct.pack("<I", 0)),
    (UINT32, struct.pack("<I", 2**32 - 1)),
    (UINT32, struct.pack("<I", 7)),
    (10, struct.pack("<Q", 2**63)),
    (11, struct.pack("<q", -1)),
    (6, struct.pack("<f", float("nan"))),
    (12, struct.pack("<d", 1e308)),
    (BOOL, b"\x02"),
    (STRING, struct.pack("<Q", 1) + b"x"),
    (STRING, struct.pack("<Q", 2) + b"\xff\xfe"),
    (STRING, struct.pack("<Q", 2**62)),
    (ARRAY, struct.pack("<IQ", UINT32, 0)),
    (ARRAY, struct.pack("<IQ", STRING, 0)),
    (ARRAY, struct.pack("<IQI", UINT32, 1, 5)),
    (ARRAY, struct.pack("<IQ", UINT32, 2**62)),
    (ARRAY, struct.pack("<IQ", ARRAY, 2**40)),
    (ARRAY, struct.pack("<IQ", 99, 1)),
    (77, b""),
]


class Parts:
    """A file by fields and tensors' entries, with where in it the numbers of the header are."""

    def __init__(self, data: bytes, folder: Path) -> None:
        path = folder / NAME
        path.write_bytes(data)
        reader = gguf.GGUFReader(path)
        start = reader.data.ctypes.data
        self.data = data
        self.fields: dict[str, tuple[int, int]] = {}
        self.numbers: list[tuple[int, int]] = []
        self.tensors_from = 0
        for name, field in reader.fields.items():
            bounds = [(part.ctypes.data - start, part.nbytes) for part in field.parts]
            end = bounds[-1][0] + bounds[-1][1]
            if not name.startswith("GGUF."):
                self.fields[name] = (field.offset, end)
            self.tensors_from = max(self.tensors_from, end)
            self._note(bounds[:6])
        for tensor in reader.tensors:
            bounds = [(part.ctypes.data - start, part.nbytes) for part in tensor.field.parts]
            self._note(bounds)
            self.tensors_to = bounds[-1][0] + bounds[-1][1]
        self.data_from = reader.data_offset

    def _note(self, bounds: list[tuple[int, int]]) -> None:
        for offset, size in bounds:
            if size in (4, 8):
                self.numbers.append((offset, size))
            elif size in (16, 24):
                self.numbers += [(offset + step, 8) for step in range(0, size, 8)]


def header_of(folder: Path, data: bytes) -> list[Mutation]:
    parts = Parts(data, folder)

    def number(files: Files, rng: random.Random) -> Files:
        """A count, length, type, size or offset in the header, or a field's value."""

        def change(data: bytes) -> bytes:
            offset, size = rng.choice(parts.numbers)
            old = int.from_bytes(data[offset : offset + size], "little")
            new = rng.choice([*NUMBERS, old + 1, old - 1, old * 2, old + 32, rng.randrange(40)])
            new %= 2 ** (8 * size)
            return data[:offset] + new.to_bytes(size, "little") + data[offset + size :]

        return edited(files, NAME, change)

    def header_bytes(files: Files, rng: random.Random) -> Files:
        split = parts.data_from
        return edited(files, NAME, lambda data: some_bytes(data[:split], rng) + data[split:])

    def field(files: Files, rng: random.Random) -> Files:
        """A field lost, doubled, of another name or of another type."""

        def change(data: bytes) -> bytes:
            name = rng.choice(sorted(parts.fields))
            start, end = parts.fields[name]
            value_from = start + 8 + len(name.encode())
            how = rng.randrange(6)
            if how == 0:
                new, count = b"", -1
            elif how == 1:
                new, count = data[start:end] * 2, 1
            elif how == 2:
                other = rng.choice(["x", "llama.x", "", "general.alignment", "tokenizer.ggml.pre"])
                named = struct.pack("<Q", len(other)) + other.encode()
                new, count = named + data[value_from:end], 0
            else:
                kind, value = rng.choice(OTHER_VALUES)
                new, count = data[start:value_from] + struct.pack("<I", kind) + value, 0
            header = data[:16] + struct.pack("<Q", len(parts.fields) + count) + data[24:start]
            entries = header + new + data[end : parts.tensors_from]
            return aligned(entries, data, parts)

        return edited(files, NAME, change)

    return [
        Mutation(number, ("config", "weights", "tokenizer")),
        Mutation(field, ("config", "weights", "tokenizer")),
        Mutation(header_bytes, ("config", "weights", "tokenizer")),
        Mutation(whole_file, ("config", "weights", "tokenizer")),
    ]


def aligned(fields: bytes, data: bytes, parts: Parts) -> bytes:
    """A file of other fields, its tensors where they are looked for."""
    header = fields + data[parts.tensors_from : parts.tensors_to]
    return header + b"\x00" * (-len(header) % 32) + data[parts.data_from :]


def whole_file(files: Files, rng: random.Random) -> Files:
    return edited(files, NAME, lambda data: some_bytes(data, rng))


def made(folder: Path, **options: Any) -> tuple[Files, list[Mutation], str]:
    (folder / "made").mkdir(parents=True, exist_ok=True)
    path = write_gguf(folder / "made" / NAME, folder / "hf", **options)
    return files_of(path.parent), header_of(folder, path.read_bytes()), NAME


def byte_level(folder: Path) -> tuple[Files, list[Mutation], str]:
    """A Llama with GPT-2's kind of tokenizer."""
    tiny.write_hf_checkpoint(folder / "hf", **TINY)
    return made(folder)


def quantised(folder: Path) -> tuple[Files, list[Mutation], str]:
    """A Gemma 2, whose weights are packed, with sentencepiece's kind of tokenizer."""
    _, write_tokenizer = write_sentencepiece(["<pad>", "<mask>", "<eos>", "<bos>", "<unk>"])
    families.write_hf_checkpoint(folder / "hf", "gemma2")
    kind = gguf.GGMLQuantizationType.Q8_0
    return made(folder, kind=kind, write_tokenizer=write_tokenizer)


def scaled(folder: Path) -> tuple[Files, list[Mutation], str]:
    """A Llama 3.1, whose rotation is a tensor."""
    tiny.write_hf_checkpoint(folder / "hf", rope_parameters=LLAMA3, **TINY)
    return made(folder)


@pytest.mark.parametrize("kind", [byte_level, quantised, scaled])
def test_a_gguf_is_converted_or_refused(
    kind: Callable[[Path], tuple[Files, list[Mutation], str]],
    seeds: range,
    fuzz: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files, mutations, source = kind(tmp_path_factory.mktemp("made"))
    fuzz(files, mutations, seeds, convert_hf, source)
