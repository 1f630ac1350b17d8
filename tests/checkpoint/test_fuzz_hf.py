"""Damaged and hostile Hugging Face folders and GGUF files are converted or refused."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from tests.checkpoint.fuzzing import (
    ALL,
    BOMB,
    NASTY,
    TEMPLATES,
    TINY,
    Damaged,
    Files,
    Make,
    Mutation,
    damage,
    edited,
    files_of,
    some_bytes,
    text_of,
    two_files,
    with_nasty_value,
)
from tests.checkpoint.hf.gguf_writing import LLAMA3, write_gguf, write_sentencepiece
from tests.harness import families, tiny

gguf = pytest.importorskip("gguf")

INDEX = "model.safetensors.index.json"
CONTRACT = "scoring_contract.json"
KEYS = [
    "quantization_config", "rope_scaling", "sliding_window", "layer_types", "id2label",
    "num_labels", "head_dim", "partial_rotary_factor", "attention_bias", "mlp_bias", "auto_map",
]  # fmt: skip
FAMILIES = ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "nemotron", "mixtral"]


def change_json(name: str) -> Make:
    def nasty_json(files: Files, rng: random.Random) -> Files:
        return edited(files, name, lambda data: text_of(with_nasty_value(json.loads(data), rng)))

    nasty_json.__name__ += f" of {name}"
    return nasty_json


def bad_json(files: Files, rng: random.Random) -> Files:
    """Damage the syntax of a JSON file."""
    names = [name for name in files if name.endswith(".json")]
    name = rng.choice(names)
    data = files[name]
    middle = data.rindex(b"}")
    forms = [
        lambda: some_bytes(data, rng),
        lambda: b"[" * rng.choice([100, 100_000]),
        lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        lambda: data.decode().encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: b"\xff" + data,
        lambda: data[:middle] + b"," + data.lstrip()[1:],  # every key occurs twice
        lambda: text_of(rng.choice(NASTY)),
        lambda: data[:middle] + b', "x": ' + b"9" * 5000 + b"}",
        lambda: data[:middle] + b', "x": NaN}',
        lambda: data[:middle] + b', "x": "' + b"y" * 3_000_000 + b'"}',
        lambda: b"",
    ]
    return {**files, name: rng.choice(forms)()}


def config_key(files: Files, rng: random.Random) -> Files:
    """Give a key of the family, or another key, a wrong value."""
    config = json.loads(files["config.json"])
    if rng.random() < 0.3:
        config["model_type"] = rng.choice(FAMILIES)
    for _ in range(rng.choice([1, 1, 2])):
        config[rng.choice([*config, *KEYS])] = rng.choice(NASTY)
    return {**files, "config.json": text_of(config)}


def weight_header(files: Files, rng: random.Random) -> Files:
    """Change a value, bytes or the length of a safetensors header."""

    def change(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        header, numbers = data[8 : 8 + size], data[8 + size :]
        action = rng.randrange(5)
        if action == 0:
            size = rng.choice([0, 1, size - 1, size + 8, len(data), 2**31, 2**63, 2**64 - 1])
            return struct.pack("<Q", size) + header + numbers
        if action == 1:
            header = some_bytes(header, rng)
        elif action == 2:
            header = text_of(with_nasty_value(json.loads(header), rng))
        else:
            header = text_of(other_entry(json.loads(header), rng))
        return struct.pack("<Q", len(header)) + header + numbers

    name = rng.choice([name for name in files if name.endswith(".safetensors")])
    return edited(files, name, change)


def other_entry(header: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Change dtype, shape or offset of a tensor consistently."""
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    action = rng.randrange(4)
    if action == 0:
        kinds = ["F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "I64"]
        entry["dtype"] = rng.choice(kinds)
    elif action == 1:
        entry["shape"] = rng.choice(
            [entry["shape"][::-1], [1, *entry["shape"]], [], [0], [2**40, 2**40], [2**62, 2]]
        )
    elif action == 2:
        other = header[rng.choice([name for name in header if name != "__metadata__"])]
        entry["data_offsets"] = other["data_offsets"]
    else:
        start, end = entry["data_offsets"]
        shift = rng.choice([-4, 4, 2**20, 2**62])
        entry["data_offsets"] = rng.choice([[start + shift, end + shift], [end, start]])
    return header


def index(files: Files, rng: random.Random) -> Files:
    """Change the file names in an index of shards."""
    content = json.loads(files[INDEX])
    names = content["weight_map"]
    tensor_name = rng.choice(sorted(names))
    action = rng.randrange(5)
    if action == 0:
        names[tensor_name] = rng.choice(
            [
                "../theirs/model-00001-of-00002.safetensors", "/etc/hostname", "..", "", ".",
                "config.json", "missing.safetensors", "a/b", "a\x00b", "\ud800", "x" * 300, "a\nb",
                *names.values(), *NASTY,
            ]
        )  # fmt: skip
    elif action == 1:
        names[rng.choice(["x", "", "\ud800", "lm_head.weight", "score.bias"])] = names[tensor_name]
    elif action == 2:
        del names[tensor_name]
    elif action == 3:
        content["weight_map"] = rng.choice(NASTY)
    else:
        return {name: data for name, data in files.items() if name != names[tensor_name]}
    return {**files, INDEX: text_of(content)}


def template(files: Files, rng: random.Random) -> Files:
    """Replace the chat template by one that does not end, is huge, fails, or reaches for code."""
    text = rng.choice(TEMPLATES)
    if rng.random() < 0.5:
        return {**files, "chat_template.jinja": text.encode("utf-8", "surrogatepass")}
    config = json.loads(files["tokenizer_config.json"])
    named = [{"name": "default", "template": text}, {"name": "x"}, None]
    config["chat_template"] = rng.choice([text, named, rng.choice(NASTY)])
    remaining = {name: data for name, data in files.items() if name != "chat_template.jinja"}
    return {**remaining, "tokenizer_config.json": text_of(config)}


def code(files: Files, rng: random.Random) -> Files:
    """Add names of code that other programs would run."""
    bomb = f"open({BOMB!r}, 'w')\nclass A:\n    from_pretrained = print\n".encode()
    name = rng.choice(["config.json", "tokenizer_config.json"])
    classes = ["x.A", "x.A"]
    auto = {"AutoConfig": "x.A", "AutoModel": "x.A", "AutoTokenizer": classes}
    content = {**json.loads(files[name]), "auto_map": auto, "tokenizer_class": "x.A"}
    return {**files, name: text_of(content), "x.py": bomb}


def contract(files: Files, rng: random.Random) -> Files:
    """Change fields of an export's scoring contract, and correct its hash."""
    content = json.loads(files[CONTRACT])
    names = rng.sample(sorted(content.keys() - {"hash"}), rng.choice([1, 1, 2]))
    for name in names:
        value = rng.choice([*NASTY, *TEMPLATES]) if name == "template" else rng.choice(NASTY)
        content[name] = [value] if rng.random() < 0.2 else value
    unhashed = ("hash", "reward_mean", "reward_std", "measured_on")
    hashed = {name: value for name, value in content.items() if name not in unhashed}
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    content["hash"] = hashlib.sha256(canonical.encode()).hexdigest()
    return {**files, CONTRACT: text_of(content)}


BASE = [
    Mutation(change_json("config.json"), ("config",)),
    Mutation(config_key, ("config",)),
    Mutation(bad_json, ("config", "tokenizer")),
    Mutation(damage(".safetensors"), ("weights", "config")),
    Mutation(weight_header, ("weights", "config")),
    Mutation(index),
    Mutation(change_json(INDEX)),
    Mutation(change_json("tokenizer.json"), ("tokenizer",)),
    Mutation(change_json("tokenizer_config.json"), ("tokenizer",)),
    Mutation(two_files, ("tokenizer",)),
    Mutation(code),
]
REWARD = [
    Mutation(change_json("config.json"), ("config",)),
    Mutation(config_key, ("config", "tokenizer")),
    Mutation(bad_json, ("config", "tokenizer")),
    Mutation(weight_header, ("weights", "config")),
    Mutation(template, ("config",)),
    Mutation(change_json("tokenizer.json"), ("config", "tokenizer")),
    Mutation(change_json("tokenizer_config.json"), ("config", "tokenizer")),
    Mutation(two_files, ("config", "tokenizer")),
    Mutation(code),
]
OURS = [
    Mutation(contract, ("config",)),
    Mutation(change_json(CONTRACT), ("config",)),
    Mutation(config_key, ("config",)),
]


def base(folder: Path) -> Damaged:
    """A base model in two shards with an index."""
    tiny.write_hf_checkpoint(folder / "whole", tie_word_embeddings=False, **TINY)
    model = LlamaForCausalLM.from_pretrained(folder / "whole")
    model.save_pretrained(folder / "parts", max_shard_size="30KB")
    tiny.write_tokenizer(folder / "parts")
    return Damaged(files_of(folder / "parts"), BASE, convert_hf_to_nemo)


def reward(folder: Path) -> Damaged:
    tiny.write_hf_reward_model(folder / "reward", **TINY)
    return Damaged(files_of(folder / "reward"), REWARD, convert_hf_to_nemo)


def ours(folder: Path) -> Damaged:
    """An exported reward model with its scoring contract."""
    tiny.write_hf_reward_model(folder / "ours", **TINY)
    made = convert_hf_to_nemo(folder / "ours", folder / "reward.nemo").contract
    assert made is not None
    (folder / "ours" / CONTRACT).write_bytes(text_of(made.to_dict()))
    return Damaged(files_of(folder / "ours"), OURS, convert_hf_to_nemo)


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
    """Positions of the fields, tensor entries and numbers in a GGUF header."""

    def __init__(self, data: bytes, folder: Path) -> None:
        path = folder / NAME
        path.write_bytes(data)
        reader = gguf.GGUFReader(path)
        start = reader.data.ctypes.data
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
        """Change a count, length, type, size or offset in the header, or the value of a field."""

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
        """Remove, duplicate or rename a field, or change its type."""

        def change(data: bytes) -> bytes:
            name = rng.choice(sorted(parts.fields))
            start, end = parts.fields[name]
            value_from = start + 8 + len(name.encode())
            choice = rng.randrange(6)
            if choice == 0:
                new, count = b"", -1
            elif choice == 1:
                new, count = data[start:end] * 2, 1
            elif choice == 2:
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

    return [Mutation(make, ALL) for make in (number, field, header_bytes, damage(NAME))]


def aligned(fields: bytes, data: bytes, parts: Parts) -> bytes:
    """Return the file with a new header, with the tensors aligned behind it."""
    header = fields + data[parts.tensors_from : parts.tensors_to]
    return header + b"\x00" * (-len(header) % 32) + data[parts.data_from :]


def gguf_of(folder: Path, **options: Any) -> Damaged:
    """Write a checkpoint folder as a GGUF file."""
    data = write_gguf(folder / NAME, folder / "hf", **options).read_bytes()
    return Damaged({NAME: data}, header_of(folder, data), convert_hf_to_nemo, NAME)


def byte_level(folder: Path) -> Damaged:
    """A Llama with a byte-level tokenizer like GPT-2's."""
    tiny.write_hf_checkpoint(folder / "hf", **TINY)
    return gguf_of(folder)


def quantised(folder: Path) -> Damaged:
    """A Gemma 2 with quantized weights and a sentencepiece tokenizer."""
    _, write_tokenizer = write_sentencepiece(["<pad>", "<mask>", "<eos>", "<bos>", "<unk>"])
    families.write_hf_checkpoint(folder / "hf", "gemma2")
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf_of(folder, kind=kind, write_tokenizer=write_tokenizer)


def scaled(folder: Path) -> Damaged:
    """A Llama 3.1, whose RoPE factors are a tensor."""
    tiny.write_hf_checkpoint(folder / "hf", rope_parameters=LLAMA3, **TINY)
    return gguf_of(folder)


@pytest.mark.parametrize("kind", [base, reward, ours, byte_level, quantised, scaled])
def test_damaged_checkpoint_of_hugging_face_is_converted_or_refused(
    kind: Callable[[Path], Damaged],
    seeds: range,
    fuzz: Callable[[Damaged, range], None],
    tmp_path: Path,
) -> None:
    (tmp_path / "made").mkdir()
    fuzz(kind(tmp_path / "made"), seeds)
