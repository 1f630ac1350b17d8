"""Damaged and hostile checkpoints of NeMo and Megatron: each loads as it may, or is refused.

Nothing else may happen: no other exception, no hang, no file outside, nothing left behind. An
archive of ours knows its content by checksums. In those of others settings, tokenizer and
index may be changed into others that are just as good, but a damaged weight is found.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import tarfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_aligner.checkpoint.importing import import_checkpoint as import_nemo
from tests.checkpoint import foreign
from tests.checkpoint.fuzzing import (
    ALL,
    BOMB,
    LAUGHS,
    NASTY,
    TEMPLATES,
    Damaged,
    Files,
    Mutation,
    damage,
    edited,
    files_of,
    some_bytes,
    two_files,
    with_nasty_value,
)
from tests.checkpoint.loading import Bomb, Theirs, head_of

ARCHIVE = "base.nemo"
CONFIG = "model_config.yaml"
TRACKER = "latest_checkpointed_iteration.txt"
BOMBS = Bomb(Path(BOMB))
Member = tuple[tarfile.TarInfo, bytes]
Members = list[Member]
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


def members_of(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        read = [(member, archive.extractfile(member)) for member in archive]
        return [(member, b"" if file is None else file.read()) for member, file in read]


def pack(members: Members, kind: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.TarFile(fileobj=stream, mode="w", format=kind) as archive:
        for member, data in members:
            sized = copy.copy(member)
            sized.size = len(data)
            archive.addfile(sized, io.BytesIO(data))
    return stream.getvalue()


def with_member(
    members: Members,
    change: Callable[[bytes], bytes] | None = None,
    index: int | None = None,
    rng: random.Random | None = None,
    **attributes: Any,
) -> Members:
    """Change content or header of the member at ``index``, or of a random file."""
    if index is None:
        assert rng is not None
        index = rng.choice([i for i, (member, _) in enumerate(members) if member.isreg()])
    member, data = copy.copy(members[index][0]), members[index][1]
    for key, value in attributes.items():
        setattr(member, key, value)
    return [*members[:index], (member, change(data) if change else data), *members[index + 1 :]]


def flip_archive(members: Members, rng: random.Random) -> bytes:
    return some_bytes(pack(members), rng)


def flip_header(members: Members, rng: random.Random) -> bytes:
    """Change bytes of a header, and correct its checksum."""
    data = bytearray(pack(members))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        start = rng.choice([member.offset for member in archive])
    for _ in range(rng.choice([1, 1, 3])):
        data[start + rng.randrange(148)] = rng.choice([0, 32, 46, 47, 48, 55, 128, 255])
    if rng.random() < 0.5:
        data[start + 156] = rng.choice(b"0123456789xgLKSVDAM\x00")
    header = bytes(data[start : start + 512])
    total = sum(header[:148]) + sum(header[156:]) + 8 * 32
    data[start + 148 : start + 156] = b"%06o\x00 " % total
    return bytes(data)


def flip_member(members: Members, rng: random.Random) -> bytes:
    return pack(with_member(members, lambda data: some_bytes(data, rng), rng=rng))


def change_named(members: Members, name: str, change: Callable[[bytes], bytes]) -> bytes:
    (index,) = (i for i, member in enumerate(members) if member[0].name.endswith(f"/{name}"))
    return pack(with_member(members, change, index))


def flip_index(members: Members, rng: random.Random) -> bytes:
    """Damage the index of the weights, or the plain data next to it."""
    name = rng.choice([".metadata", ".metadata", "common.pt", "metadata.json"])
    return change_named(members, f"model_weights/{name}", lambda data: some_bytes(data, rng))


def rename(members: Members, rng: random.Random) -> bytes:
    name = rng.choice(
        [
            "../escaped", "/escaped", "./a/../../escaped", "model_config.yaml", "tokenizer",
            "model_weights/.metadata", "a\nb", "a\\b", "\x00", "é" * 200, "x" * 300, ".", "",
            "checksums.json", "model_weights/model_weights.ckpt", "a/" * 600 + "b",
        ]
    )  # fmt: skip

    kind = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    return pack(with_member(members, rng=rng, name=name), kind)


def retype(members: Members, rng: random.Random) -> bytes:
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE]
    target = rng.choice(["/etc/hostname", "model_config.yaml", "../../x", ""])
    changes = {"type": rng.choice(kinds), "linkname": target}
    return pack(with_member(members, lambda data: b"", rng=rng, **changes))


def rearrange(members: Members, rng: random.Random) -> bytes:
    """Remove, duplicate or move a member, or swap the contents of two files."""
    changed = list(members)
    files = [i for i, (member, _) in enumerate(members) if member.isreg()]
    first, second = rng.sample(files, 2)
    action = rng.randrange(4)
    if action == 0:
        del changed[first]
    elif action == 1:
        changed.insert(second, changed[first])
    elif action == 2:
        changed.insert(second, changed.pop(first))
    else:
        (one, a), (two, b) = changed[first], changed[second]
        changed[first], changed[second] = (one, b), (two, a)
    return pack(changed)


def edit_config(members: Members, rng: random.Random) -> bytes:
    make = rng.choice(change_yaml(CONFIG)).make
    return change_named(members, CONFIG, lambda data: make({CONFIG: data}, rng)[CONFIG])


# In archives without checksums these changes may give a valid checkpoint.
HARMLESS = (flip_member, flip_index, rename, rearrange, edit_config)
MUTATIONS = (flip_archive, flip_header, retype, *HARMLESS)


def archive_of(members: Members, alters: Callable[[Any], tuple[str, ...]]) -> Damaged:
    def mutation(change: Callable[[Members, random.Random], bytes]) -> Mutation:
        def make(files: Files, rng: random.Random) -> Files:
            data = change(members_of(files[ARCHIVE]), rng)
            return {ARCHIVE: gzip.compress(data, 1) if rng.random() < 0.2 else data}

        make.__name__ = change.__name__
        return Mutation(make, alters(change))

    return Damaged({ARCHIVE: pack(members)}, [*map(mutation, MUTATIONS)], None, ARCHIVE)


def ours(theirs: Theirs, archive: Path) -> Damaged:
    return archive_of(members_of(archive.read_bytes()), lambda change: ())


def others(theirs: Theirs, archive: Path) -> Damaged:
    members = members_of(archive.read_bytes())
    unchecked = [member for member in members if not member[0].name.endswith("checksums.json")]
    unchecked_parts = ("config", "tokenizer")
    return archive_of(unchecked, lambda change: ALL if change in HARMLESS else unchecked_parts)


def change_yaml(name: str) -> list[Mutation]:
    def settings(files: Files, rng: random.Random) -> Files:
        """Change or remove a value, key or item of the settings."""
        content = yaml.safe_load(files[name])
        if rng.random() < 0.5:
            content = with_nasty_value(content, rng)
        else:
            inner = content.get("config", content.get("model", content))
            inner[rng.choice([*inner, *KEYS])] = rng.choice(NASTY)
        return {**files, name: yaml.safe_dump(content).encode()}

    def yaml_text(files: Files, rng: random.Random) -> Files:
        """Change or insert lines of YAML with tags, aliases and other syntax."""

        def change(data: bytes) -> bytes:
            lines = data.decode().splitlines()
            index = rng.randrange(len(lines))
            choice = rng.randrange(4)
            if choice == 0:
                return some_bytes(data, rng)
            if choice == 1:
                return rng.choice([data.decode().encode("utf-16"), b"\xff" + data, b"", data * 2])
            if choice == 2:
                key, _, _ = lines[index].partition(":")
                lines[index] = f"{key}: {rng.choice(LINES).partition(': ')[2]}"
            else:
                lines.insert(index, rng.choice(LINES))
            return "\n".join(lines).encode()

        return edited(files, name, change)

    return [Mutation(settings, ALL), Mutation(yaml_text, ALL)]


WEIGHTS = Mutation(damage(".distcp", ".metadata", ".pt", "metadata.json"), ALL)
TWO_FILES = Mutation(two_files, ALL)


def tracker(files: Files, rng: random.Random) -> Files:
    texts = [
        "", "10\n", "release", "../x", "-1", "9" * 5000, "1e3", "\x00", "10 10", "x" * 10**7, "0",
        "\u0661\u0660", "\ufeff10", "/etc", "99999999999999999999",
    ]  # fmt: skip
    return {**files, TRACKER: rng.choice([rng.choice(texts).encode(), b"\xff\xfe"])}


def arguments(files: Files, rng: random.Random) -> Files:
    """Change Megatron-LM's arguments: other types, other objects, or pickled code."""
    name = next(name for name in files if name.endswith("common.pt"))
    content = torch.load(io.BytesIO(files[name]), weights_only=False)
    values = [*NASTY, torch.zeros(2), torch.float16, Namespace(a=1), (1, 2), b"x", BOMBS, {1: 2}]
    action = rng.randrange(10)
    if action == 0:
        content = rng.choice(values)
    elif action == 1:
        content["args"] = rng.choice(values)
    else:
        settings = vars(content["args"])
        settings[rng.choice([*settings, *KEYS])] = rng.choice(values)
    stream = io.BytesIO()
    torch.save(content, stream)
    return {**files, name: stream.getvalue()}


def array_of(files: Files, rng: random.Random) -> str:
    return rng.choice([name for name in files if name.endswith(".zarray")])


def zarr_header(files: Files, rng: random.Random) -> Files:
    def change(data: bytes) -> bytes:
        header = json.loads(data)
        action = rng.randrange(5)
        if action == 0:
            return some_bytes(data, rng)
        if action == 1:
            return json.dumps(with_nasty_value(header, rng)).encode()
        key = rng.choice(sorted(HEADERS))
        header[key] = rng.choice(HEADERS[key])
        return json.dumps(header).encode()

    return edited(files, array_of(files, rng), change)


def zarr_piece(files: Files, rng: random.Random) -> Files:
    """Remove, cut, add or rename a chunk, or add other files of zarr."""
    array = array_of(files, rng).rpartition("/")[0]
    pieces = [name for name in files if name.startswith(f"{array}/") and "zarray" not in name]
    piece = rng.choice(pieces)
    action = rng.randrange(5)
    if action == 0:
        return {name: data for name, data in files.items() if name != piece}
    if action == 1:
        return edited(files, piece, lambda data: some_bytes(data, rng))
    if action == 2:
        return {**files, f"{array}/{rng.choice(['9', '9.9', '.zgroup', '.zattrs', 'x'])}": b"{"}
    if action == 3:
        return {**files, piece: files[rng.choice(sorted(files))]}
    other = f"{array}/{rng.choice(['-1.0', '00', '0.0.0.0.0', '1e9'])}"
    return {other if name == piece else name: data for name, data in files.items()}


def nemo2(theirs: Theirs, archive: Path) -> Damaged:
    mutations = [*change_yaml("context/model.yaml"), WEIGHTS, TWO_FILES]
    return Damaged(files_of(theirs(foreign.nemo2)), mutations, import_nemo)


def bridge(theirs: Theirs, archive: Path) -> Damaged:
    inner = theirs(foreign.bridge)
    settings = change_yaml(f"{inner.name}/run_config.yaml")
    mutations = [*settings, WEIGHTS, TWO_FILES, Mutation(tracker)]
    return Damaged(files_of(inner.parent), mutations, import_nemo)


def megatron_lm(theirs: Theirs, archive: Path) -> Damaged:
    called = Mutation(arguments, ALL)
    mutations = [called, Mutation(tracker), called, WEIGHTS, TWO_FILES]
    return Damaged(files_of(theirs(foreign.megatron_lm)), mutations, import_nemo)


def zarr(theirs: Theirs, archive: Path) -> Damaged:
    pytest.importorskip("zarr")
    pytest.importorskip("ml_dtypes")
    arrays = [Mutation(zarr_header, ("weights",)), Mutation(zarr_piece, ("weights",))]
    mutations = [*arrays, *change_yaml(CONFIG), TWO_FILES]
    return Damaged(files_of(theirs(foreign.zarr_folder)), mutations, import_nemo)


def aligner(theirs: Theirs, archive: Path) -> Damaged:
    """A reward model of NeMo-Aligner with merged attributes and standardized rewards."""
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
    source = theirs(foreign.nemo1, "theirs", head_of(2), **settings)
    tokens = f"{foreign.HEX}_tokenizer"

    def head_settings(files: Files, rng: random.Random) -> Files:
        content = yaml.safe_load(files["model_config.yaml"])
        for key in settings:
            content[key] = with_nasty_value({key: content[key]}, rng).get(key)
        return {**files, "model_config.yaml": yaml.safe_dump(content).encode()}

    def template(files: Files, rng: random.Random) -> Files:
        text = rng.choice(TEMPLATES).encode("utf-8", "surrogatepass")
        return {**files, f"{tokens}/chat_template.jinja": text}

    mutations = [
        *change_yaml(CONFIG),
        Mutation(head_settings, ("config", "weights")),
        Mutation(template, ("config",)),
        WEIGHTS,
    ]
    return Damaged(files_of(source), mutations, partial(import_nemo, template="tokenizer"))


KINDS = [ours, others, nemo2, bridge, megatron_lm, zarr, aligner]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_checkpoint_loads_as_it_may_or_is_refused(
    kind: Callable[[Theirs, Path], Damaged],
    seeds: range,
    theirs: Theirs,
    tiny_archive: Path,
    fuzz: Callable[[Damaged, range], None],
) -> None:
    fuzz(kind(theirs, tiny_archive), seeds)
