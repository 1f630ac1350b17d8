"""The model fingerprint depends on the weights, not the layout, and is read without weights."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.merge import merge_checkpoints
from nemo_aligner.checkpoint.nemo.archive import unpack
from nemo_aligner.checkpoint.nemo.checksums import CHECKSUMS_NAME
from nemo_aligner.checkpoint.nemo.fingerprint import (
    build_body_fingerprint,
    build_fingerprint,
    check_expected_fingerprint,
    fingerprint_of_ensemble,
    read_fingerprint,
)
from nemo_aligner.checkpoint.nemo.folder import FINGERPRINT_NAME
from nemo_aligner.checkpoint.nemo.reward_model import (
    LoadedRewardModel,
    load_reward_model,
    save_reward_model,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.harness import tiny

# Written before archives had fingerprints.
OLD = tiny.ROOT / "tests/paths/compatibility/files/regression.nemo"
Save = Callable[..., str]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_reward_nemo(tmp_path_factory.mktemp("fingerprint") / "rm.nemo")


@pytest.fixture
def loaded(archive: Path, layout: Any) -> LoadedRewardModel:
    return load_reward_model(archive, layout)


@pytest.fixture
def save(loaded: LoadedRewardModel, tmp_path: Path) -> Save:
    """Save the loaded model in its current state, and return the archive's fingerprint."""

    def save(name: str, **config: Any) -> str:
        path = tmp_path / f"{name}.nemo"
        config = {**loaded.config, **config}
        save_reward_model(path, loaded.model, config, loaded.tokenizer, loaded.contract)
        fingerprint = read_fingerprint(path)
        assert fingerprint is not None
        return fingerprint

    return save


def test_fingerprint_changes_with_any_weight_and_setting_but_not_by_saving(
    archive: Path, loaded: LoadedRewardModel, save: Save, layout: Any, tmp_path: Path
) -> None:
    """Weights and settings change the fingerprint; they do not change the contract."""
    first = read_fingerprint(archive)
    assert loaded.fingerprint == first == save("same")
    # Settings that do not define the model's shape, such as those of a run, do not count.
    assert save("settings", reward_model_type="binary_ranking") == first
    fingerprints = [first, save("eps", layernorm_epsilon=1e-6)]
    parameters = dict(loaded.model.named_parameters())
    for name in (
        "rm_head.weight",
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
    ):
        with torch.no_grad():
            parameters[name].view(-1)[3] += 2**-10
        fingerprints.append(save(name))
    assert len(set(fingerprints)) == len(fingerprints)
    assert load_reward_model(tmp_path / "rm_head.weight.nemo", layout).contract == loaded.contract
    # Archives that are written one tensor at a time have the same fingerprint.
    merge_checkpoints([archive, archive], [0.5, 0.5], tmp_path / "merged.nemo")
    assert read_fingerprint(tmp_path / "merged.nemo") == first


def test_fingerprint_is_read_without_the_weights(archive: Path, tmp_path: Path) -> None:
    """The fingerprint is read from a truncated archive and from a folder; damage is an error."""
    fingerprint = read_fingerprint(archive)
    with tarfile.open(archive) as tar:
        end = tar.getmember(f"./{FINGERPRINT_NAME}").offset_data + 512
        assert end < tar.getmember("./model_weights").offset
    cut = tmp_path / "cut.nemo"
    cut.write_bytes(archive.read_bytes()[:end])
    assert read_fingerprint(cut) == fingerprint
    folder = unpack(archive, lambda name: name.parts[0] != "model_weights")
    assert read_fingerprint(folder) == fingerprint
    (folder / FINGERPRINT_NAME).write_text('{"fingerprint": "ABC"}')
    with pytest.raises(CheckpointError, match="got 'ABC', wanted 32 hexadecimal characters"):
        read_fingerprint(folder)
    shutil.rmtree(folder)
    cut.write_bytes(b"no tar" * 1000)
    with pytest.raises(CheckpointError, match=r"cut\.nemo: cannot be read"):
        read_fingerprint(cut)
    with pytest.raises(CheckpointError, match=r"no/such\.nemo: there is no checkpoint"):
        read_fingerprint("no/such.nemo")


def test_older_archive_has_the_fingerprint_of_its_checksums(layout: Any, tmp_path: Path) -> None:
    """An archive without a fingerprint has one by its checksums, as a file and as a folder."""
    fingerprint = read_fingerprint(OLD)
    assert fingerprint == "0a7b1d90578b4d07fd8b835721dc7b42"
    shutil.copy(OLD, tmp_path / "copy.nemo")
    assert read_fingerprint(tmp_path / "copy.nemo") == fingerprint
    assert load_reward_model(OLD, layout).fingerprint == fingerprint
    shutil.unpack_archive(OLD, tmp_path / "folder", "tar")
    assert read_fingerprint(tmp_path / "folder") == fingerprint
    (tmp_path / "folder" / CHECKSUMS_NAME).unlink()
    assert read_fingerprint(tmp_path / "folder") is None
    assert read_fingerprint(OLD.with_name("ranking.nemo")) not in (None, fingerprint)


def test_fingerprint_of_an_algorithm_never_changes() -> None:
    """Later versions compute the same fingerprint, so ``expect_fingerprint`` stays valid."""
    sums = {"model.decoder.a": ("float32", 3), "model.rm_head.weight": ("float32", 2**63)}
    assert build_fingerprint(sums, tiny.SMALLEST) == "6b9fbab85040989fc4374d11757732dd"


def test_fingerprint_of_a_body_covers_neither_adapters_nor_the_head() -> None:
    """It covers the other weights, the shape, and the precision of a quantized base."""
    lora = {"rank": 4, "alpha": 8.0, "targets": ["linear_qkv"]}
    adapter = "model.decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight"
    body = {"model.decoder.a": ("float32", 3)}
    plain = build_body_fingerprint(body, tiny.SMALLEST)
    with_adapter = {**body, adapter: ("float32", 4), "model.rm_head.weight": ("float32", 5)}
    config = {**tiny.SMALLEST, "lora": lora, "reward_head": {"bias": True}}
    assert build_body_fingerprint(with_adapter, config) == plain
    others = [
        build_body_fingerprint({"model.decoder.a": ("float32", 4)}, tiny.SMALLEST),
        build_body_fingerprint(body, {**tiny.SMALLEST, "layernorm_epsilon": 1e-6}),
        build_body_fingerprint(body, {**config, "lora": {**lora, "base_precision": "nf4"}}),
    ]
    assert len({plain, build_fingerprint(body, tiny.SMALLEST), *others}) == 5


def test_fingerprint_of_an_ensemble_is_of_its_members_in_order() -> None:
    one, two = "1" * 32, "2" * 32
    both = fingerprint_of_ensemble([one, two])
    assert both is not None
    assert len({one, two, both, fingerprint_of_ensemble([two, one])}) == 4
    assert fingerprint_of_ensemble([one]) == one
    assert fingerprint_of_ensemble([one, None]) is None


def test_another_fingerprint_than_the_expected_one_is_refused() -> None:
    check_expected_fingerprint("ab", None, "expect_fingerprint", "rm.nemo")
    check_expected_fingerprint("ab", "ab", "expect_fingerprint", "rm.nemo")
    for fingerprint, shown in (("ab", "ab"), (None, r"\(none\)")):
        with pytest.raises(
            ConfigError,
            match=rf"expect_fingerprint: got a model with the fingerprint {shown} \(rm.nemo\), "
            "wanted cd. Use the archive that has it",
        ):
            check_expected_fingerprint(fingerprint, "cd", "expect_fingerprint", "rm.nemo")
