"""Archives with LoRA: read with every bit, and refused where settings and matrices do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_aligner.checkpoint.nemo.archive import CHECKSUMS_NAME, unpack
from nemo_aligner.checkpoint.nemo.reward_model import (
    load_pretrained,
    load_reward_model,
    save_reward_model,
)
from nemo_aligner.config.common import Precision
from nemo_aligner.config.lora import LORA_TARGETS
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.lora import LoraShape, is_of_adapter
from nemo_aligner.text.contract_settings import build_contract
from tests import tiny
from tests.contracts import Contracts

LORA = LoraShape(3, 6.0, LORA_TARGETS)


@pytest.fixture(scope="module")
def folder(layout: Any, contracts: Contracts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a reward model with LoRA, all of whose matrices have numbers."""
    place = tmp_path_factory.mktemp("lora")
    base = tiny.write_base_nemo(place / "base.nemo")
    loaded = load_pretrained(base, layout, num_attributes=1, precision=Precision.fp32, lora=LORA)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if is_of_adapter(name):
                parameter.normal_()
    contract = build_contract(contracts.config(), loaded.tokenizer, Precision.fp32)
    path = place / "rm.nemo"
    save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, contract)
    unpacked = unpack(path, lambda name: True)
    shutil.copytree(unpacked, place / "rm")
    shutil.rmtree(unpacked)
    (place / "rm" / CHECKSUMS_NAME).unlink()  # it would be the first to know of a change
    return place


def with_section(folder: Path, target: Path, change: Any) -> Path:
    """The model with another section of LoRA; None is without one."""
    shutil.copytree(folder / "rm", target)
    path = target / "model_config.yaml"
    config = yaml.safe_load(path.read_text())
    config["lora"] = change
    path.write_text(yaml.safe_dump({key: v for key, v in config.items() if v is not None}))
    return target


def test_what_was_saved_is_loaded_with_every_bit(folder: Path, layout: Any, tmp_path: Path) -> None:
    loaded = load_reward_model(folder / "rm.nemo", layout)
    save_reward_model(
        tmp_path / "again.nemo", loaded.model, loaded.config, loaded.tokenizer, loaded.contract
    )
    again = load_reward_model(tmp_path / "again.nemo", layout)
    found, wanted = (dict(each.model.named_parameters()) for each in (again, loaded))
    assert found.keys() == wanted.keys()
    assert sum(map(is_of_adapter, found)) == 4 * 2 * 4  # layers, A and B, linear layers
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(wanted[name].any() for name in wanted if is_of_adapter(name))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({**LORA.to_config(), "rank": 4}, r"adapter\.linear_in\.weight: got 4 layers of shape"),
        ({**LORA.to_config(), "rank": 2**31}, r"its settings want 4 of \[2147483648, 64\]"),
        ({**LORA.to_config(), "rank": "3"}, r"rm.*: model_config\.yaml: lora\.rank: got '3'"),
        ({**LORA.to_config(), "targets": ["linear_qkv"]}, "tensors have no place in the model"),
        ({}, "model_config.yaml: lora: got {}, wanted rank, alpha and targets"),
        (None, "tensors have no place in the model that its settings describe"),
    ],
)
def test_settings_that_the_matrices_do_not_fit_are_refused(
    folder: Path, layout: Any, tmp_path: Path, section: Any, said: str
) -> None:
    changed = with_section(folder, tmp_path / "rm", section)
    with pytest.raises(CheckpointError, match=said):
        load_reward_model(changed, layout)


def test_settings_without_matrices_are_refused(folder: Path, layout: Any, tmp_path: Path) -> None:
    base = unpack(folder / "base.nemo", lambda name: True)
    (base / CHECKSUMS_NAME).unlink()
    path = base / "model_config.yaml"
    path.write_text(path.read_text() + yaml.safe_dump({"lora": LORA.to_config()}))
    with pytest.raises(CheckpointError, match=r"linear_in\.weight: got 0 layers of shape"):
        load_pretrained(base, layout, num_attributes=1, precision=Precision.fp32, lora=LORA)
    shutil.rmtree(base)
