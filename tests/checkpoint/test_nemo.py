"""The archive: what goes in comes out, nothing hostile does, and it appears whole or not at all."""

from __future__ import annotations

import gzip
import io
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from nemo_aligner.checkpoint.nemo import archive as archive_module
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.nemo.write import write_nemo
from nemo_aligner.errors import CheckpointError
from tests import tiny

CONFIG = {"vocab_size": 320, "num_layers": 2, "layernorm_epsilon": 1e-5, "precision": "bf16"}
CONTRACT = {"version": 1, "template": "{{ messages }} é"}


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """Folders that stand for weights and tokenizer; the archive does not look into them."""
    weights, tokenizer = tmp_path / "w", tmp_path / "t"
    for folder, name in ((weights, "__0_0.distcp"), (tokenizer, "tokenizer.json")):
        folder.mkdir()
        (folder / name).write_bytes(name.encode() * 1000)
    return weights, tokenizer


@pytest.fixture
def archive(tmp_path: Path, parts: tuple[Path, Path]) -> Path:
    path = tmp_path / "model.nemo"
    write_nemo(path, CONFIG, *parts, CONTRACT)
    return path


def check(path: Path) -> Path:
    """Open an archive, compare its content, and give the folder it was unpacked to."""
    with open_nemo(path) as folder:
        assert folder.config == {
            **CONFIG,
            "tokenizer": {"library": "huggingface", "type": "nemo:tokenizer"},
        }
        assert folder.contract == CONTRACT
        assert (folder.weights / "__0_0.distcp").read_bytes() == b"__0_0.distcp" * 1000
        assert [file.name for file in folder.tokenizer.iterdir()] == ["tokenizer.json"]
        return folder.root


def test_what_goes_in_comes_out(archive: Path) -> None:
    assert not check(archive).exists()
    with tarfile.open(archive, "r:") as tar:
        assert all(name.startswith("./") for name in tar.getnames())


def test_a_gzipped_archive_and_an_unpacked_folder_open_too(archive: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "zipped.nemo"
    zipped.write_bytes(gzip.compress(archive.read_bytes(), 1))
    check(zipped)
    shutil.unpack_archive(archive, tmp_path / "folder", "tar")
    assert check(tmp_path / "folder") == tmp_path / "folder"
    assert (tmp_path / "folder").is_dir()


def test_an_archive_without_a_contract_has_none(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    write_nemo(tmp_path / "base.nemo", CONFIG, *parts)
    with open_nemo(tmp_path / "base.nemo") as folder:
        assert folder.contract is None


def test_linked_source_files_are_stored_as_files(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    """A hub cache is made of links; an archive must not be."""
    source = parts[1] / "tokenizer.json"
    source.rename(tmp_path / "blob")
    source.symlink_to(tmp_path / "blob")
    write_nemo(tmp_path / "linked.nemo", CONFIG, *parts, CONTRACT)
    check(tmp_path / "linked.nemo")


def write_tar(path: Path, *members: tuple[str, dict], config: str = "vocab_size: 320") -> Path:
    """An otherwise good archive with the given extra members (name, TarInfo attributes)."""
    with tarfile.open(path, "w") as tar:
        for name, attributes in (*members, ("./model_weights", {"type": tarfile.DIRTYPE})):
            member = tarfile.TarInfo(name)
            data = attributes.pop("data", b"")
            member.size = len(data)
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data))
        member = tarfile.TarInfo("./model_config.yaml")
        member.size = len(config.encode())
        tar.addfile(member, io.BytesIO(config.encode()))
    return path


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("../escaped", {"data": b"x"}),
        ("./a/../../escaped", {"data": b"x"}),
        ("{outside}/escaped", {"data": b"x"}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "/etc/hostname"}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "model_config.yaml"}),
        ("hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/hostname"}),
        ("pipe", {"type": tarfile.FIFOTYPE}),
        ("device", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
    ],
    ids=[
        "dotdot",
        "inner_dotdot",
        "absolute",
        "symlink",
        "symlink_inside",
        "hardlink",
        "fifo",
        "device",
    ],
)
def test_hostile_members_are_refused(
    name: str, attributes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    scratch.mkdir()
    outside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    path = write_tar(tmp_path / "bad.nemo", (name.format(outside=outside), dict(attributes)))
    with pytest.raises(CheckpointError, match=r"bad\.nemo"), open_nemo(path):
        pass
    assert not list(scratch.iterdir())
    assert not list(outside.iterdir())
    assert not (tmp_path / "escaped").exists()


def test_a_setuid_member_loses_the_bit(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.nemo", ("./tool", {"data": b"x", "mode": 0o4777}))
    with open_nemo(path, with_weights=False) as folder:
        assert (folder.root / "tool").stat().st_mode & 0o7022 == 0


def test_too_much_for_the_disk_is_refused_before_it_is_written(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "_SPARE_BYTES", 10**18)
    with pytest.raises(CheckpointError, match="does not fit"), open_nemo(archive):
        pass


def test_too_many_members_are_refused(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_MAX_MEMBERS", 3)
    with pytest.raises(CheckpointError, match="more than 3 members"), open_nemo(archive):
        pass


class Bomb:
    """Unpickling one creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


@pytest.mark.parametrize(
    "name", ["model_weights.ckpt", "mp_rank_00/model_weights.ckpt", "tp_rank_00_pp_rank_000/w.ckpt"]
)
def test_legacy_weights_are_refused_unread(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    (folder / name).parent.mkdir(parents=True)
    (folder / "model_config.yaml").write_text("vocab_size: 320")
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match="legacy weights"), open_nemo(folder):
        pass
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("- a list", "got list, wanted a mapping"),
        ("a: [", r"model_config\.yaml"),
        ("a: !!python/object/apply:os.getcwd []", r"model_config\.yaml"),
    ],
)
def test_a_config_is_plain_data(config: str, complaint: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "bad.nemo", config=config)
    with pytest.raises(CheckpointError, match=complaint), open_nemo(path):
        pass


def test_a_tokenizer_outside_the_archive_is_refused(tmp_path: Path) -> None:
    config = yaml.safe_dump({"vocab_size": 3, "tokenizer": {"type": "nemo:../../etc"}})
    path = write_tar(tmp_path / "bad.nemo", config=config)
    with (
        pytest.raises(CheckpointError, match="no tokenizer folder"),
        open_nemo(path, with_weights=False) as folder,
    ):
        _ = folder.tokenizer


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\x1f\x8b\x08\x00broken"])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.nemo").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.nemo"), open_nemo(tmp_path / "x.nemo"):
        pass


def test_a_cut_archive_is_refused(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match=r"model\.nemo"), open_nemo(archive):
        pass


def test_a_missing_archive_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.nemo: no such"), open_nemo("nowhere.nemo"):
        pass


def test_a_killed_write_leaves_nothing_under_the_name(
    tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    path = tmp_path / "out" / "model.nemo"
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from nemo_aligner.checkpoint.nemo.write import write_nemo\n"
        "os.fsync = lambda stream: os.kill(os.getpid(), 9)\n"
        "write_nemo(sys.argv[1], {}, Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    done = subprocess.run([sys.executable, "-c", script, path, *parts], cwd=tiny.ROOT)
    assert done.returncode == -9
    assert [file.name for file in path.parent.iterdir()] == [".model.nemo.partial"]
    write_nemo(path, CONFIG, *parts, CONTRACT)
    check(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("existing", [False, True])
def test_a_write_that_fails_leaves_what_was_there(
    existing: bool, tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "model.nemo"
    if existing:
        write_nemo(path, CONFIG, *parts, CONTRACT)

    def fail(stream: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_nemo(path, {"vocab_size": 3}, *parts)
    assert list(path.parent.iterdir()) == ([path] if existing else [])
    if existing:
        check(path)
