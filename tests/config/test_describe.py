"""Every setting says its type, its default, and what it is for."""

from __future__ import annotations

import pytest

from nemo_aligner.config.describe import list_keys, render_keys
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.config.training import TrainConfig

every_schema = pytest.mark.parametrize("schema", [TrainConfig, EvaluateConfig, ServeConfig])


@every_schema
def test_every_key_has_one_line(schema: type) -> None:
    for key in list_keys(schema):
        assert 0 < len(key.about) <= 72, key.name
        assert "\n" not in key.about


@every_schema
def test_defaults_are_settings_as_they_are_shown(schema: type) -> None:
    shown = [f"{key.name}={key.default}" for key in list_keys(schema)]
    assert load_config(schema, [text for text in shown if not text.endswith("={}")]) == schema()


def test_types_and_choices() -> None:
    keys = {key.name: key for key in list_keys(TrainConfig)}
    assert keys["trainer.precision"].kind == "fp32 | bf16 | fp16"
    assert keys["trainer.precision"].choices == ("fp32", "bf16", "fp16")
    assert keys["model.data.add_eos"].choices == ("true", "false", "null")
    assert keys["trainer.rm.max_steps"].kind == "a whole number | null"
    assert keys["model.optim.betas"].default == "[0.9, 0.98]"
    assert keys["model.data.data_prefix.train"].kind == "[text, ...]"
    assert keys["model.objective_kwargs"].kind == "key=value"


@every_schema
def test_they_fit_a_terminal(schema: type) -> None:
    assert max(map(len, render_keys(schema).splitlines())) <= 80
