"""Damaged and hostile archives: each loads as it was, or is refused by an error of ours.

Nothing else may happen: no other exception, no hang, no file outside, nothing left behind. An
archive of ours knows its content by checksums. In those of others settings, tokenizer and
index may be changed into others that are just as good, but a damaged weight is found.
"""

from __future__ import annotations

import copy
import gzip
import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.errors import CheckpointError, ConfigError, DataError
from tests import tiny
from tests.checkpoint.fuzzing import TINY, Content, limited, load, some_bytes

NASTY = [
    "1000000000000", "-1", "0", "1e400", ".nan", "null", "[1, 2]", "{a: b}", "true", "'text'", "3",
    "!!python/object/apply:os.getcwd []", "&a [*a]", "9" * 5000, "2.5", "0x41", "4096",
]  # fmt: skip
Member = tuple[tarfile.TarInfo, bytes]
Members = list[Member]


@pytest.fixture(scope="module")
def members(layout: Any, tmp_path_factory: pytest.TempPathFactory) -> Members:
    path = tiny.write_base_nemo(tmp_path_factory.mktemp("fuzz") / "base.nemo", **TINY)
    with tarfile.open(path) as archive:
        found = []
        for member in archive:
            file = archive.extractfile(member)
            found.append((member, b"" if file is None else file.read()))
        return found


def pack(members: Members, kind: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.TarFile(fileobj=stream, mode="w", format=kind) as archive:
        for member, data in members:
            sized = copy.copy(member)
            sized.size = len(data)
            archive.addfile(sized, io.BytesIO(data))
    return stream.getvalue()


def edited(
    members: Members,
    change: Callable[[bytes], bytes] | None = None,
    index: int | None = None,
    rng: random.Random | None = None,
    **attributes: Any,
) -> Members:
    """With the content, or the header, of the member at ``index`` changed; default: of any file."""
    if index is None:
        assert rng is not None
        index = rng.choice([i for i, (member, _) in enumerate(members) if member.isreg()])
    member, data = copy.copy(members[index][0]), members[index][1]
    for key, value in attributes.items():
        setattr(member, key, value)
    return [*members[:index], (member, change(data) if change else data), *members[index + 1 :]]


def index_of(members: Members, name: str) -> int:
    return next(i for i, (member, _) in enumerate(members) if member.name.endswith("/" + name))


def flip_archive(members: Members, rng: random.Random) -> bytes:
    return some_bytes(pack(members), rng)


def flip_header(members: Members, rng: random.Random) -> bytes:
    """Bytes of a header, its checksum put right again."""
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
    return pack(edited(members, lambda data: some_bytes(data, rng), rng=rng))


def flip_index(members: Members, rng: random.Random) -> bytes:
    """The pickle that says where the weights are, or what lies beside it."""
    name = rng.choice([".metadata", ".metadata", "common.pt", "metadata.json"])
    index = index_of(members, name)
    return pack(edited(members, lambda data: some_bytes(data, rng), index))


def rename(members: Members, rng: random.Random) -> bytes:
    name = rng.choice(
        [
            "../escaped", "/escaped", "./a/../../escaped", "model_config.yaml", "tokenizer",
            "model_weights/.metadata", "a\nb", "a\\b", "\x00", "é" * 200, "x" * 300, ".", "",
            "checksums.json", "model_weights/model_weights.ckpt", "a/" * 600 + "b",
        ]
    )  # fmt: skip

    kind = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    return pack(edited(members, rng=rng, name=name), kind)


def retype(members: Members, rng: random.Random) -> bytes:
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE]
    target = rng.choice(["/etc/hostname", "model_config.yaml", "../../x", ""])
    changes = {"type": rng.choice(kinds), "linkname": target}
    return pack(edited(members, lambda data: b"", rng=rng, **changes))


def rearrange(members: Members, rng: random.Random) -> bytes:
    """A member lost, doubled or moved, or two files with each other's content."""
    changed = list(members)
    files = [i for i, (member, _) in enumerate(members) if member.isreg()]
    first, second = rng.sample(files, 2)
    how = rng.randrange(4)
    if how == 0:
        del changed[first]
    elif how == 1:
        changed.insert(second, changed[first])
    elif how == 2:
        changed.insert(second, changed.pop(first))
    else:
        (one, a), (two, b) = changed[first], changed[second]
        changed[first], changed[second] = (one, b), (two, a)
    return pack(changed)


def edit_config(members: Members, rng: random.Random) -> bytes:
    """A setting's value, or a line, made something else."""

    def change(data: bytes) -> bytes:
        lines = data.decode().splitlines()
        index = rng.randrange(len(lines))
        key, _, _ = lines[index].partition(":")
        how = rng.randrange(4)
        if how == 0:
            del lines[index]
        elif how == 1:
            lines.insert(index, lines[rng.randrange(len(lines))])
        else:
            lines[index] = f"{key}: {rng.choice(NASTY)}"
        return "\n".join(lines).encode()

    return pack(edited(members, change, index_of(members, "model_config.yaml")))


MUTATIONS = [
    flip_archive, flip_header, flip_member, flip_index, rename, retype, rearrange, edit_config,
]  # fmt: skip
# Of others' archives, these change what is as good as it was.
HARMLESS = (flip_member, flip_index, rename, rearrange, edit_config)


@pytest.mark.parametrize("has_checksums", [True, False], ids=["ours", "others"])
def test_an_archive_loads_as_it_was_or_is_refused(
    seeds: range, has_checksums: bool, members: Members, layout: Any, scratch: Path, tmp_path: Path
) -> None:
    if not has_checksums:
        members = [found for found in members if not found[0].name.endswith("checksums.json")]
    path = tmp_path / "archive.nemo"
    path.write_bytes(pack(members))
    wanted = load(path, layout)
    outcomes = {"loaded": 0, "refused": 0}
    for seed in seeds:
        rng = random.Random(seed)
        mutation = MUTATIONS[seed % len(MUTATIONS)]
        data = mutation(members, rng)
        path.write_bytes(gzip.compress(data, 1) if rng.random() < 0.2 else data)
        try:
            with limited():
                got = refused_or_loaded(path, layout)
        except BaseException as error:
            what = f"{mutation.__name__}, seed {seed}: {type(error).__name__}: {error}"
            raise AssertionError(what) from error
        if got is None:
            outcomes["refused"] += 1
        else:
            outcomes["loaded"] += 1
            assert has_checksums is False or got == wanted, (mutation.__name__, seed)
            if mutation not in HARMLESS:
                assert got.weights == wanted.weights, (mutation.__name__, seed)
        assert not list(scratch.iterdir()), (mutation.__name__, seed)
        assert sorted(tmp_path.iterdir()) == [path, scratch], (mutation.__name__, seed)
    assert min(outcomes.values()) > len(seeds) // 50, outcomes


def refused_or_loaded(path: Path, layout: Any) -> Content | None:
    try:
        return load(path, layout)
    except (CheckpointError, ConfigError, DataError):
        return None
