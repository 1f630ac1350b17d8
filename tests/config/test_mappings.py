"""A mapping that is given as a whole replaces the one before; a key of it adds to that."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_aligner.config.load import load_config
from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.config.training import TrainConfig

WEIGHTS = "model.regression.attribute_weights"
FILE = """
model:
  reward_model_type: regression
  regression: {attributes: [a, b], attribute_weights: {a: 0.8, b: -0.2}}
exp_manager: {wandb_logger_kwargs: {project: rm, name: one}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([f"{WEIGHTS}={{}}"], {}),
        ([f"++{WEIGHTS}=null"], {}),
        ([f"{WEIGHTS}={{a: 1}}"], {"a": 1.0}),
        ([f"++{WEIGHTS}={{b: 2}}"], {"b": 2.0}),
        ([f"{WEIGHTS}.a=1"], {"a": 1.0, "b": -0.2}),
        ([f"++{WEIGHTS}.b=1"], {"a": 0.8, "b": 1.0}),
        ([f"{WEIGHTS}={{b: 1}}", f"{WEIGHTS}.a=2"], {"a": 2.0, "b": 1.0}),
        ([f"{WEIGHTS}={{a: 1}}", f"{WEIGHTS}.a=2"], {"a": 2.0}),
        ([f"{WEIGHTS}.a=2", f"{WEIGHTS}={{b: 1}}"], {"b": 1.0}),
        (["model.regression={attribute_weights: {b: 1}}"], {"b": 1.0}),
        (["model.regression={loss_mask_val: -1}"], {"a": 0.8, "b": -0.2}),
    ],
)
def test_weights(settings: list[str], expected: dict[str, float], file: Path) -> None:
    assert load_config(TrainConfig, settings, file).model.regression.attribute_weights == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("exp_manager.wandb_logger_kwargs={project: two}", {"project": "two"}),
        ("exp_manager.wandb_logger_kwargs=null", {}),
        ("exp_manager.wandb_logger_kwargs.name=two", {"project": "rm", "name": "two"}),
    ],
)
def test_keywords_of_others(setting: str, expected: dict[str, str], file: Path) -> None:
    found = load_config(TrainConfig, [setting], file).exp_manager.wandb_logger_kwargs
    assert found == expected


def test_the_server_may_take_its_weights_back(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("shaping: {attribute_weights: {a: 1}}")
    settings = ["shaping.attribute_weights=null"]
    assert load_config(ServeConfig, settings, path).shaping.attribute_weights == {}
