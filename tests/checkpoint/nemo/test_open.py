"""What is opened is what was written; what is no archive is named."""

from __future__ import annotations

import gzip
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.nemo.write import write_nemo
from nemo_aligner.errors import CheckpointError
from tests.checkpoint.loading import Bomb
from tests.checkpoint.nemo.archives import CONFIG, check, write_tar


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
    ("config", "message"),
    [
        ("- a list", "got list, wanted a mapping"),
        ("a: [", r"model_config\.yaml"),
        ("a: !!python/object/apply:os.getcwd []", r"model_config\.yaml"),
    ],
)
def test_a_config_is_plain_data(config: str, message: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "bad.nemo", config=config)
    with pytest.raises(CheckpointError, match=message), open_nemo(path):
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
