"""What is opened as a checkpoint: folders, shards and the hub, or an error that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.errors import CheckpointError
from tests import tiny
from tests.checkpoint.hf.conversion import (
    convert,
    refused,
)

pytestmark = pytest.mark.usefixtures("layout")


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", r"config\.json"),
        ("model.safetensors", r"pickled weights \(\.bin\) are not read"),
        ("tokenizer.json", r"no tokenizer\.json"),
    ],
)
def test_a_missing_file_is_named(
    lost: str, message: str, changed_base: Path, tmp_path: Path
) -> None:
    (changed_base / lost).unlink()
    with pytest.raises(CheckpointError, match=message):
        convert(changed_base, tmp_path / "base.nemo")
    assert not (tmp_path / "base.nemo").exists()


def test_damaged_safetensors_are_named(changed_base: Path, tmp_path: Path) -> None:
    (changed_base / "model.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        convert(changed_base, tmp_path / "base.nemo")


def test_an_index_may_not_point_elsewhere(changed_base: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (changed_base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="wanted file names in the same folder"):
        convert(changed_base, tmp_path / "base.nemo")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.nemo", None, r"got a \.nemo, which training and serving take"),
        ("adapter", "adapter_config.json", r"got an adapter .*its base first"),
        ("nothing", "other.json", r"got no config\.json; wanted a checkpoint folder"),
    ],
)
def test_what_is_no_checkpoint_is_directed_elsewhere(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    source = tmp_path / name
    if content is None:
        source.touch()
    else:
        source.mkdir()
        (source / content).write_text("{}")
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(source, tmp_path / "base.nemo")
    assert str(caught.value).count(str(source)) == 1


def shard(folder: Path) -> Path:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder / "model.safetensors.index.json"


def test_shards_must_be_those_of_the_index(changed_reward: Path, tmp_path: Path) -> None:
    index = shard(changed_reward)
    convert(changed_reward, tmp_path / "rm.nemo")
    content = json.loads(index.read_text())
    first, second = sorted(set(content["weight_map"].values()))[:2]
    moved = next(name for name, file in content["weight_map"].items() if file == first)
    wrong = {**content, "weight_map": {**content["weight_map"], moved: second}}
    index.write_text(json.dumps(wrong))
    refused(changed_reward, tmp_path, rf"{second}: tensor {moved} is missing")
    index.write_text(json.dumps({"weight_map": [1]}))
    refused(changed_reward, tmp_path, r"index\.json: got no weight_map")
    index.write_text(json.dumps(content))
    (changed_reward / second).unlink()
    refused(changed_reward, tmp_path, second)


def test_a_truncated_shard_is_refused(changed_reward: Path, tmp_path: Path) -> None:
    path = changed_reward / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(changed_reward, tmp_path, r"model\.safetensors: ")


def test_a_hub_name_is_downloaded(
    hub: Callable[..., Any], reward_checkpoint: Path, tmp_path: Path
) -> None:
    asked = hub(reward_checkpoint)
    assert convert("some-org/Tiny-RM", tmp_path / "rm.nemo").contract is not None
    assert asked["name"] == "some-org/Tiny-RM"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


def test_without_a_network_the_hub_s_cache_is_read(reward_checkpoint: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "home/hub/models--some-org--Tiny-RM"
    shutil.copytree(reward_checkpoint, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit)
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    verb, output = "convert", str(tmp_path / "out/rm.nemo")
    lost = tiny.run_verb(
        verb, "--input", "some-org/Lost", "--output", output, env=environment, check=False
    )
    assert lost.returncode == 1
    assert "CheckpointError: some-org/Lost: there is no such folder, and the hub" in lost.stderr
    assert "Traceback" not in lost.stderr
    assert not (tmp_path / "out").exists()
    done = tiny.run_verb(verb, "--input", "some-org/Tiny-RM", "--output", output, env=environment)
    assert "llama reward model of reward" in done.stdout
