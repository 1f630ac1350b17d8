"""Damaged and hostile folders of Hugging Face: each is converted to a model, or refused."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.checkpoint.fuzzing import (
    BOMB,
    NASTY,
    TEMPLATES,
    TINY,
    Files,
    Mutation,
    convert_hf,
    edited,
    files_of,
    some_bytes,
    with_nasty_value,
)

INDEX = "model.safetensors.index.json"
CONTRACT = "scoring_contract.json"
KEYS = [
    "quantization_config", "rope_scaling", "sliding_window", "layer_types", "id2label",
    "num_labels", "head_dim", "partial_rotary_factor", "attention_bias", "mlp_bias", "auto_map",
]  # fmt: skip
FAMILIES = ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "nemotron", "mixtral"]


def text_of(value: Any) -> bytes:
    return json.dumps(value).encode()


def change_json(name: str) -> Callable[[Files, random.Random], Files]:
    def nasty_json(files: Files, rng: random.Random) -> Files:
        return edited(files, name, lambda data: text_of(with_nasty_value(json.loads(data), rng)))

    nasty_json.__name__ += f" of {name}"
    return nasty_json


def bad_json(files: Files, rng: random.Random) -> Files:
    """A file that is hardly JSON any more."""
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
        lambda: data[:middle] + b"," + data.lstrip()[1:],  # every key twice
        lambda: text_of(rng.choice(NASTY)),
        lambda: data[:middle] + b', "x": ' + b"9" * 5000 + b"}",
        lambda: data[:middle] + b', "x": NaN}',
        lambda: data[:middle] + b', "x": "' + b"y" * 3_000_000 + b'"}',
        lambda: b"",
    ]
    return {**files, name: rng.choice(forms)()}


def config_key(files: Files, rng: random.Random) -> Files:
    """A key of the model's family, or another one, with a value that it should not have."""
    config = json.loads(files["config.json"])
    if rng.random() < 0.3:
        config["model_type"] = rng.choice(FAMILIES)
    for _ in range(rng.choice([1, 1, 2])):
        config[rng.choice([*config, *KEYS])] = rng.choice(NASTY)
    return {**files, "config.json": text_of(config)}


def weight_file(files: Files, rng: random.Random) -> str:
    return rng.choice([name for name in files if name.endswith(".safetensors")])


def weight_bytes(files: Files, rng: random.Random) -> Files:
    return edited(files, weight_file(files, rng), lambda data: some_bytes(data, rng))


def weight_header(files: Files, rng: random.Random) -> Files:
    """The header's JSON with a value changed, or in other bytes, or of another length."""

    def change(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        header, numbers = data[8 : 8 + size], data[8 + size :]
        how = rng.randrange(5)
        if how == 0:
            size = rng.choice([0, 1, size - 1, size + 8, len(data), 2**31, 2**63, 2**64 - 1])
            return struct.pack("<Q", size) + header + numbers
        if how == 1:
            header = some_bytes(header, rng)
        elif how == 2:
            header = text_of(with_nasty_value(json.loads(header), rng))
        else:
            header = text_of(other_entry(json.loads(header), rng))
        return struct.pack("<Q", len(header)) + header + numbers

    return edited(files, weight_file(files, rng), change)


def other_entry(header: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A tensor with another dtype, shape or offset, as if it were meant."""
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    how = rng.randrange(4)
    if how == 0:
        kinds = ["F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "I64"]
        entry["dtype"] = rng.choice(kinds)
    elif how == 1:
        entry["shape"] = rng.choice(
            [entry["shape"][::-1], [1, *entry["shape"]], [], [0], [2**40, 2**40], [2**62, 2]]
        )
    elif how == 2:
        other = header[rng.choice([name for name in header if name != "__metadata__"])]
        entry["data_offsets"] = other["data_offsets"]
    else:
        start, end = entry["data_offsets"]
        shift = rng.choice([-4, 4, 2**20, 2**62])
        entry["data_offsets"] = rng.choice([[start + shift, end + shift], [end, start]])
    return header


def index(files: Files, rng: random.Random) -> Files:
    """Where the index says that tensors are."""
    content = json.loads(files[INDEX])
    names = content["weight_map"]
    where = rng.choice(sorted(names))
    how = rng.randrange(5)
    if how == 0:
        names[where] = rng.choice(
            [
                "../theirs/model-00001-of-00002.safetensors", "/etc/hostname", "..", "", ".",
                "config.json", "missing.safetensors", "a/b", "a\x00b", "\ud800", "x" * 300, "a\nb",
                *names.values(), *NASTY,
            ]
        )  # fmt: skip
    elif how == 1:
        names[rng.choice(["x", "", "\ud800", "lm_head.weight", "score.bias"])] = names[where]
    elif how == 2:
        del names[where]
    elif how == 3:
        content["weight_map"] = rng.choice(NASTY)
    else:
        return {name: data for name, data in files.items() if name != names[where]}
    return {**files, INDEX: text_of(content)}


def two_files(files: Files, rng: random.Random) -> Files:
    """Files lost, doubled under another name, or with each other's content."""
    first, second = rng.sample(sorted(files), 2)
    how = rng.randrange(3)
    if how == 0:
        return {name: data for name, data in files.items() if name != first}
    if how == 1:
        return {**files, first: files[second], second: files[first]}
    other = rng.choice(["x.safetensors", "model.safetensors", "special_tokens_map.json", "x.py"])
    return {**files, other: files[first]}


def template(files: Files, rng: random.Random) -> Files:
    """A chat template that does not end, is huge, fails, or reaches for code."""
    text = rng.choice(TEMPLATES)
    if rng.random() < 0.5:
        return {**files, "chat_template.jinja": text.encode("utf-8", "surrogatepass")}
    config = json.loads(files["tokenizer_config.json"])
    named = [{"name": "default", "template": text}, {"name": "x"}, None]
    config["chat_template"] = rng.choice([text, named, rng.choice(NASTY)])
    kept = {name: data for name, data in files.items() if name != "chat_template.jinja"}
    return {**kept, "tokenizer_config.json": text_of(config)}


def code(files: Files, rng: random.Random) -> Files:
    """Names of code that other programs would run."""
    bomb = f"open({BOMB!r}, 'w')\nclass A:\n    from_pretrained = print\n".encode()
    name = rng.choice(["config.json", "tokenizer_config.json"])
    classes = ["x.A", "x.A"]
    auto = {"AutoConfig": "x.A", "AutoModel": "x.A", "AutoTokenizer": classes}
    content = {**json.loads(files[name]), "auto_map": auto, "tokenizer_class": "x.A"}
    return {**files, name: text_of(content), "x.py": bomb}


def contract(files: Files, rng: random.Random) -> Files:
    """Fields of our own export's contract, the hash put right again."""
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
    Mutation(weight_bytes, ("weights", "config")),
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


def base(folder: Path) -> tuple[Files, list[Mutation]]:
    """In two files and an index."""
    from transformers import LlamaForCausalLM

    tiny.write_hf_checkpoint(folder / "whole", tie_word_embeddings=False, **TINY)
    model = LlamaForCausalLM.from_pretrained(folder / "whole")
    model.save_pretrained(folder / "parts", max_shard_size="30KB")
    tiny.write_tokenizer(folder / "parts")
    return files_of(folder / "parts"), BASE


def reward(folder: Path) -> tuple[Files, list[Mutation]]:
    tiny.write_hf_reward_model(folder / "reward", **TINY)
    return files_of(folder / "reward"), REWARD


def ours(folder: Path) -> tuple[Files, list[Mutation]]:
    """With a contract, as an export writes it."""
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    tiny.write_hf_reward_model(folder / "ours", **TINY)
    made = convert_hf_to_nemo(folder / "ours", folder / "reward.nemo").contract
    assert made is not None
    (folder / "ours" / CONTRACT).write_text(json.dumps(made.to_dict()))
    return files_of(folder / "ours"), OURS


@pytest.mark.parametrize("kind", [base, reward, ours])
def test_a_folder_is_converted_or_refused(
    kind: Callable[[Path], tuple[Files, list[Mutation]]],
    seeds: range,
    fuzz: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files, mutations = kind(tmp_path_factory.mktemp("made"))
    fuzz(files, mutations, seeds, convert_hf)
