"""Defaults < YAML < command line, and errors that name the key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.config.common import Overlong, Precision, RewardModelType
from nemo_aligner.config.critic import ServeCriticConfig
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.gateway import GatewayRunConfig
from nemo_aligner.config.load import config_to_dict, load_config, load_values, save_config
from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.errors import ConfigError, SettingsError
from tests.tiny import ROOT

SHIPPED = sorted((ROOT / "conf").glob("*.yaml"))


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_nothing_given_is_all_defaults() -> None:
    assert config_to_dict(load_config(TrainConfig, [])) == config_to_dict(TrainConfig())


def test_the_command_line_wins_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {global_batch_size: 8, micro_batch_tokens: 100}")
    config = load_config(TrainConfig, ["model.global_batch_size=16"], path)
    assert config.model.global_batch_size == 16
    assert config.model.micro_batch_tokens == 100
    assert config.model.seed == TrainConfig().model.seed


def test_values_have_the_types_of_the_schema() -> None:
    config = load_config(
        TrainConfig,
        [
            "trainer.precision=bf16",
            "model.data.overlong=truncate_left",
            "model.data.data_prefix.train=[a.jsonl, b c.jsonl]",
            "model.optim.lr=1e-4",
            "trainer.rm.max_steps=null",
            "model.data.add_eos=true",
            "exp_manager.wandb_logger_kwargs.project=demo",
        ],
    )
    assert config.trainer.precision is Precision.bf16
    assert config.model.data.overlong is Overlong.truncate_left
    assert config.model.data.data_prefix.train == ["a.jsonl", "b c.jsonl"]
    assert config.model.optim.lr == 1e-4
    assert config.trainer.rm.max_steps is None
    assert config.model.data.add_eos is True
    assert config.exp_manager.wandb_logger_kwargs == {"project": "demo"}


@pytest.mark.parametrize("mark", ["+", "++"])
def test_nemo_aligners_plus_signs_are_accepted(mark: str) -> None:
    config = load_config(TrainConfig, [f"{mark}model.tensor_model_parallel_size=4"])
    assert config.model.tensor_model_parallel_size == 4


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("model.global_batchsize=1", "did you mean model.global_batch_size?"),
        ("trainer.max_steps=1", "did you mean trainer.rm.max_steps?"),
        ("model.data.nonsense_xyz=1", "unknown key model.data.nonsense_xyz"),
        ("model.optim.lr=fast", "model.optim.lr: got 'fast', wanted a number"),
        ("trainer.precision=fp8", "trainer.precision: got 'fp8', wanted fp32 | bf16 | fp16"),
        ("model.global_batch_size=0", "model.global_batch_size: got 0, wanted a number above 0"),
        ("model.sequence_parallel=true", "model.tensor_model_parallel_size above 1"),
        ("model.reward_model_type=regression", "model.regression.attributes: got []"),
        (
            "model.regression.attribute_weights={help: 1}",
            "model.regression.attribute_weights: got {'help': 1.0}, wanted weights of no attribute",
        ),
        ("model.optim.sched.min_lr=1", "model.optim.sched.min_lr: got 1.0"),
        ("model.data.max_malformed=1.5", "max_malformed: got 1.5, wanted a number from 0 to 1"),
        ("model=5", "model: got 5, wanted keys under it"),
        ("model.data.data_prefix.train=[a", "model.data.data_prefix.train"),
        ("model.global_batch_size", "got 'model.global_batch_size', wanted section.key=value"),
        ("=3", "got '=3', wanted section.key=value"),
        ("model.seed=${model.sed}", "model.seed: Interpolation key 'model.sed' not found"),
    ],
)
def test_an_error_names_the_key_and_what_was_wanted(argument: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, [argument])
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {global_batchsize: 1}", "did you mean model.global_batch_size?"),
        ("- 1\n- 2\n", "wanted sections"),
        ("model: {a: [", "config.yaml"),
        ("model: [1, 2]", "model: got [1, 2], wanted keys under it"),
    ],
)
def test_an_error_in_yaml_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, file=path)
    assert expected in str(error.value)
    assert path in str(error.value)


@pytest.mark.parametrize("text", ["", "model:\n", "# nothing\n"])
def test_an_empty_file_or_section_is_all_defaults(tmp_path: Path, text: str) -> None:
    config = load_config(TrainConfig, file=write(tmp_path, text))
    assert config_to_dict(config) == config_to_dict(TrainConfig())


def test_a_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"no/such\.yaml"):
        load_config(TrainConfig, file="no/such.yaml")


def test_saved_settings_load_again(tmp_path: Path) -> None:
    config = load_config(
        TrainConfig,
        ["model.reward_model_type=regression", "model.regression.attributes=[help, brief]"],
    )
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(TrainConfig, file=tmp_path / "saved.yaml") == config


def test_settings_as_plain_data_have_no_enums() -> None:
    plain = config_to_dict(TrainConfig())
    assert plain["model"]["reward_model_type"] == RewardModelType.binary_ranking.value
    assert plain["trainer"]["precision"] == "fp32"


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    text = """
    trainer: {gadgets: 8, widgets: 8, precision: fp8, maxsteps: 3}
    model: {micro_batch_tokns: 1, optim: {sched: {name: Noam}}}
    """
    settings = ["model.global_batch_size=0", "model.freeze_layers=-1", "model.optim.eps=0", "x"]
    with pytest.raises(SettingsError) as error:
        load_config(TrainConfig, settings, write(tmp_path, text))
    path = tmp_path / "config.yaml"
    assert error.value.problems == (
        f"{path}: trainer.precision: got 'fp8', wanted fp32 | bf16 | fp16",
        f"{path}: unknown key trainer.maxsteps; did you mean trainer.rm.max_steps?",
        f"{path}: unknown key model.micro_batch_tokns; did you mean model.micro_batch_tokens?",
        f"{path}: model.optim.sched.name: got 'Noam', wanted cosine | linear | constant",
        f"{path}: unknown keys of trainer: gadgets, widgets",
        "got 'x', wanted section.key=value",
        "model.optim.eps: got 0.0, wanted a number above 0",
        "model.global_batch_size: got 0, wanted a number above 0",
        "model.freeze_layers: got -1, wanted 0 or more",
    )
    assert str(error.value).startswith("these settings cannot be used:\n  ")


def test_one_text_is_a_list_of_one(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {data: {data_prefix: {validation: b.jsonl}}}")
    config = load_config(TrainConfig, ["model.data.data_prefix.train=a.jsonl"], path)
    assert config.model.data.data_prefix.train == ["a.jsonl"]
    assert config.model.data.data_prefix.validation == ["b.jsonl"]


def test_a_setting_may_refer_to_another(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {seed: 7, data: {seq_length: '${model.seed}'}}")
    assert load_config(TrainConfig, file=path).model.data.seq_length == 7


SCHEMAS = {
    "train": TrainConfig,
    "serve": ServeConfig,
    "serve_critic": ServeCriticConfig,
    "evaluate": EvaluateConfig,
    "gateway": GatewayRunConfig,
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_yaml_loads(path: Path) -> None:
    schema = SCHEMAS.get(path.stem) or SCHEMAS[path.stem.partition("_")[0]]
    load_config(schema, file=path)


def test_settings_are_read_without_torch() -> None:
    program = (
        "import sys; from nemo_aligner.config.load import load_config;"
        "from nemo_aligner.config.training import TrainConfig; load_config(TrainConfig, []);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_settings_of_another_program_are_checked_as_those_of_a_file() -> None:
    config = load_values(EvaluateConfig, {"model": {"micro_batch_tokens": 9}}, "their settings")
    assert config.model.micro_batch_tokens == 9
    with pytest.raises(SettingsError, match="their settings: unknown key"):
        load_values(EvaluateConfig, {"model": {"micro_batch_tokes": 9}}, "their settings")
