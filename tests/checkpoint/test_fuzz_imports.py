"""Damaged and hostile folders of NeMo and Megatron: each is imported, or refused."""

from __future__ import annotations

import io
import json
import os
import random
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import tiny
from tests.checkpoint import foreign
from tests.checkpoint.fuzzing import (
    BOMB,
    LAUGHS,
    NASTY,
    TEMPLATES,
    Files,
    Mutation,
    edited,
    files_of,
    some_bytes,
    with_nasty_value,
)

ALL = ("config", "weights", "tokenizer")
TRACKER = "latest_checkpointed_iteration.txt"
LINES = [
    f"x: !!python/object/apply:os.mknod [{BOMB}]", "x: !!python/name:os.system", "x: !y z",
    "x: &x [*x]", LAUGHS, "x: " + "[" * 3000, "<<: [{num_layers: 9}]", "num_layers: 9", "x: *y",
    "? [a, b]\n: c", "%YAML 9.9", "---", "x: 0x" + "f" * 5000, "x: 2001-99-99", "x: 1:99:99",
    "x: !!binary '#'", "x: !!float x", "\tx: y", "x: !!set {a, [b]}", "x: \x00", "1e999: {}",
]  # fmt: skip
KEYS = [
    "override_vocab_size", "vocab_size", "window_size", "num_moe_experts", "tokenizer",
    "rope_scaling", "scale_factor", "reward_model_type", "regression", "_target_",
]  # fmt: skip
HEADERS = {
    "shape": [[], [0], [2**40, 2**40], [1], "x", [-1], [1.0], [4, 64], 2**40],
    "chunks": [[], [0], [1], [2**40, 1], [1, 1], [3, 3], [10**12], "x", [True]],
    "dtype": ["<f2", "bfloat16", "<f8", ">f4", "|O", "<U9", [["a", "<f4"]], None, "<i4"],
    "compressor": [{"id": "zlib"}, {"id": "blosc"}, {"id": "pickle"}, {"id": "x"}, "gzip", []],
    "filters": [[], [{"id": "pickle"}], "x"],
    "fill_value": [0, "NaN", "x", [1], 10**400, {}],
    "order": ["F", "x", None, []],
    "zarr_format": [3, 1, "2", 2.0, None],
    "dimension_separator": ["/", ".", "", None, 1],
}


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mknod, (BOMB,)


def change_yaml(name: str) -> list[Mutation]:
    def settings(files: Files, rng: random.Random) -> Files:
        """A value, key or item that is another one, or lost."""
        content = yaml.safe_load(files[name])
        if rng.random() < 0.5:
            content = with_nasty_value(content, rng)
        else:
            inner = content.get("config", content.get("model", content))
            inner[rng.choice([*inner, *KEYS])] = rng.choice(NASTY)
        return {**files, name: yaml.safe_dump(content).encode()}

    def yaml_text(files: Files, rng: random.Random) -> Files:
        """Lines of YAML that are more than values."""

        def change(data: bytes) -> bytes:
            lines = data.decode().splitlines()
            index = rng.randrange(len(lines))
            how = rng.randrange(4)
            if how == 0:
                return some_bytes(data, rng)
            if how == 1:
                return rng.choice([data.decode().encode("utf-16"), b"\xff" + data, b"", data * 2])
            if how == 2:
                key, _, _ = lines[index].partition(":")
                lines[index] = f"{key}: {rng.choice(LINES).partition(': ')[2]}"
            else:
                lines.insert(index, rng.choice(LINES))
            return "\n".join(lines).encode()

        return edited(files, name, change)

    return [Mutation(settings, ("config", "tokenizer", "weights")), Mutation(yaml_text, ALL)]


def weights(files: Files, rng: random.Random) -> Files:
    """Bytes of the weights, their index or what lies beside it."""
    names = [name for name in files if name.endswith((".distcp", ".metadata", ".pt"))]
    names += [name for name in files if name.endswith("metadata.json")]
    return edited(files, rng.choice(names), lambda data: some_bytes(data, rng))


def two_files(files: Files, rng: random.Random) -> Files:
    """A file lost, or two with each other's content."""
    first, second = rng.sample(sorted(files), 2)
    if rng.random() < 0.5:
        return {name: data for name, data in files.items() if name != first}
    return {**files, first: files[second], second: files[first]}


def tracker(files: Files, rng: random.Random) -> Files:
    texts = [
        "", "10\n", "release", "../x", "-1", "9" * 5000, "1e3", "\x00", "10 10", "x" * 10**7, "0",
        "\u0661\u0660", "\ufeff10", "/etc", "99999999999999999999",
    ]  # fmt: skip
    return {**files, TRACKER: rng.choice([rng.choice(texts).encode(), b"\xff\xfe"])}


def arguments(files: Files, rng: random.Random) -> Files:
    """What Megatron-LM was called with, in other types; or another object, or one that is code."""
    name = next(name for name in files if name.endswith("common.pt"))
    content = torch.load(io.BytesIO(files[name]), weights_only=False)
    values = [*NASTY, torch.zeros(2), torch.float16, Namespace(a=1), (1, 2), b"x", Bomb(), {1: 2}]
    how = rng.randrange(10)
    if how == 0:
        content = rng.choice(values)
    elif how == 1:
        content["args"] = rng.choice(values)
    else:
        given = vars(content["args"])
        given[rng.choice([*given, *KEYS])] = rng.choice(values)
    stream = io.BytesIO()
    torch.save(content, stream)
    return {**files, name: stream.getvalue()}


def array_of(files: Files, rng: random.Random) -> str:
    return rng.choice([name for name in files if name.endswith(".zarray")])


def zarr_header(files: Files, rng: random.Random) -> Files:
    def change(data: bytes) -> bytes:
        header = json.loads(data)
        how = rng.randrange(5)
        if how == 0:
            return some_bytes(data, rng)
        if how == 1:
            return json.dumps(with_nasty_value(header, rng)).encode()
        key = rng.choice(sorted(HEADERS))
        header[key] = rng.choice(HEADERS[key])
        return json.dumps(header).encode()

    return edited(files, array_of(files, rng), change)


def zarr_piece(files: Files, rng: random.Random) -> Files:
    """A piece lost, cut, added, or under another name; or zarr's other files beside."""
    array = array_of(files, rng).rpartition("/")[0]
    pieces = [name for name in files if name.startswith(f"{array}/") and "zarray" not in name]
    piece = rng.choice(pieces)
    how = rng.randrange(5)
    if how == 0:
        return {name: data for name, data in files.items() if name != piece}
    if how == 1:
        return edited(files, piece, lambda data: some_bytes(data, rng))
    if how == 2:
        return {**files, f"{array}/{rng.choice(['9', '9.9', '.zgroup', '.zattrs', 'x'])}": b"{"}
    if how == 3:
        return {**files, piece: files[rng.choice(sorted(files))]}
    other = f"{array}/{rng.choice(['-1.0', '00', '0.0.0.0.0', '1e9'])}"
    return {other if name == piece else name: data for name, data in files.items()}


def megatron_settings(name: str) -> list[Mutation]:
    return [*change_yaml(name), Mutation(weights, ALL), Mutation(two_files, ALL)]


def nemo2(folder: Path, *parts: Any) -> list[Mutation]:
    foreign.nemo2(folder, *parts)
    return megatron_settings("context/model.yaml")


def bridge(folder: Path, *parts: Any) -> list[Mutation]:
    inner = foreign.bridge(folder, *parts)
    return [*megatron_settings(f"{inner.name}/run_config.yaml"), Mutation(tracker)]


def megatron_lm(folder: Path, *parts: Any) -> list[Mutation]:
    foreign.megatron_lm(folder, *parts)
    return [
        Mutation(arguments, ALL),
        Mutation(tracker),
        Mutation(arguments, ALL),
        Mutation(weights, ALL),
        Mutation(two_files, ALL),
    ]


def zarr(folder: Path, *parts: Any) -> list[Mutation]:
    pytest.importorskip("zarr")
    pytest.importorskip("ml_dtypes")
    foreign.nemo1(folder, *parts)
    for path in (folder / "model_weights").iterdir():
        path.unlink()
    (folder / "model_weights").rmdir()
    foreign.write_zarr(folder / "model_weights", parts[0])
    return [
        Mutation(zarr_header, ("weights",)),
        Mutation(zarr_piece, ("weights",)),
        *change_yaml("model_config.yaml"),
        Mutation(two_files, ALL),
    ]


def convert(source: Path, output: Path, template: str | None = None) -> str:
    from nemo_aligner.checkpoint.importing import ImportOptions, import_checkpoint

    return import_checkpoint(source, output, ImportOptions(template=template))


def written(kind: Callable[..., list[Mutation]], folder: Path) -> tuple[Files, list[Mutation]]:
    base = folder / "base.nemo"
    tiny.write_base_nemo(base, tie_word_embeddings=False, rope_parameters=foreign.ROPE)
    (folder / "tokenizer").mkdir()
    for path in [*(folder / "base.hf").glob("*token*"), folder / "base.hf/chat_template.jinja"]:
        (folder / "tokenizer" / path.name).write_bytes(path.read_bytes())
    mutations = kind(folder / "theirs", foreign.tensors_of(base), folder / "tokenizer")
    return files_of(folder / "theirs"), mutations


def aligner(folder: Path, tensors: Any, tokenizer: Path) -> list[Mutation]:
    """A reward model of NeMo-Aligner, merged and standardized."""
    generator = torch.Generator().manual_seed(5)
    head = {
        "rm_head.weight": torch.randn(2, 64, generator=generator) * 0.1,
        "rm_head.bias": torch.randn(2, generator=generator),
    }
    settings = {
        "reward_model_type": "regression",
        "regression": {
            "num_attributes": 2,
            "merge_attributes": True,
            "attribute_weights": [0.3, 0.7],
        },
        "reward_standardization": {"enable": True, "mean": 0.5, "std": 2.0},
        "output_sequence": False,
    }
    foreign.nemo1(folder, {**tensors, **head}, tokenizer, **settings)
    tokens = f"{foreign.HEX}_tokenizer"

    def head_settings(files: Files, rng: random.Random) -> Files:
        content = yaml.safe_load(files["model_config.yaml"])
        for key in settings:
            content[key] = with_nasty_value({key: content[key]}, rng).get(key)
        return {**files, "model_config.yaml": yaml.safe_dump(content).encode()}

    def template(files: Files, rng: random.Random) -> Files:
        text = rng.choice(TEMPLATES).encode("utf-8", "surrogatepass")
        return {**files, f"{tokens}/chat_template.jinja": text}

    return [
        *change_yaml("model_config.yaml"),
        Mutation(head_settings, ("config", "weights")),
        Mutation(template, ("config",)),
        Mutation(weights, ALL),
    ]


@pytest.mark.parametrize("kind", [nemo2, bridge, megatron_lm, zarr, aligner])
def test_a_folder_is_imported_or_refused(
    kind: Callable[..., list[Mutation]],
    seeds: range,
    fuzz: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    files, mutations = written(kind, tmp_path_factory.mktemp("made"))
    import_it = partial(convert, template="tokenizer" if kind is aligner else None)
    fuzz(files, mutations, seeds, import_it)
