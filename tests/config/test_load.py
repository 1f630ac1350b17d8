"""Loading: defaults, YAML, command line; text stays text; errors name the key."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from nemo_aligner.config.common import Overlong, Precision
from nemo_aligner.config.describe import (
    PEER_NAMES,
    list_keys,
    render_keys,
    suggest_setting,
    suggestion,
)
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.gateway import GatewayRunConfig
from nemo_aligner.config.load import (
    config_to_dict,
    load_config,
    load_values,
    load_with_notes,
    save_config,
)
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.utils.errors import ConfigError, SettingsError
from tests.config.refusals import not_refused
from tests.harness.tiny import ROOT

SCHEMAS = {
    "train": TrainConfig,
    "serve": ServeConfig,
    "serve_critic": ServeCriticConfig,
    "evaluate": EvaluateConfig,
    "gateway": GatewayRunConfig,
}


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_settings_of_the_command_line_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {global_batch_size: 8, micro_batch_tokens: 100}")
    config = load_config(TrainConfig, ["model.global_batch_size=16"], path)
    assert config.model.global_batch_size == 16
    assert config.model.micro_batch_tokens == 100
    assert config.model.seed == TrainConfig().model.seed
    for text in ("", "model:\n", "# nothing\n"):
        assert load_config(TrainConfig, file=write(tmp_path, text)) == TrainConfig()


def test_settings_have_the_types_of_the_schema() -> None:
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
            "+model.tensor_model_parallel_size=4",  # as in NeMo-Aligner's commands
            "++model.pipeline_model_parallel_size=2",
        ],
    )
    assert config.trainer.precision is Precision.bf16
    assert config.model.data.overlong is Overlong.truncate_left
    assert config.model.data.data_prefix.train == ["a.jsonl", "b c.jsonl"]
    assert config.model.optim.lr == 1e-4
    assert config.trainer.rm.max_steps is None
    assert config.model.data.add_eos is True
    assert config.exp_manager.wandb_logger_kwargs == {"project": "demo"}
    sizes = config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size
    assert sizes == (4, 2)
    assert config_to_dict(config)["trainer"]["precision"] == "bf16"


def test_settings_refused_name_the_key_and_what_was_wanted() -> None:
    refusals = {
        "model.global_batchsize=1": "did you mean model.global_batch_size?",
        "trainer.max_steps=1": "did you mean trainer.rm.max_steps?",
        "model.data.nonsense_xyz=1": "unknown key model.data.nonsense_xyz",
        "model.optim.lr=fast": "model.optim.lr: got 'fast', wanted a number",
        "trainer.precision=fp8": "trainer.precision: got 'fp8', wanted fp32 | bf16 | fp16 | null",
        "model.global_batch_size=0": "model.global_batch_size: got 0, wanted a number above 0",
        "model.sequence_parallel=true": "model.tensor_model_parallel_size above 1",
        "model.reward_model_type=regression": "model.regression.attributes: got []",
        "model.regression.attribute_weights={help: 1}": (
            "model.regression.attribute_weights: got {'help': 1.0}, wanted weights of no attribute"
        ),
        "model.optim.sched.min_lr=1": "model.optim.sched.min_lr: got 1.0",
        "model.data.max_malformed=1.5": "max_malformed: got 1.5, wanted a number from 0 to 1",
        "model=5": "model: got 5, wanted a section with keys",
        "model.data.data_prefix.train=[a": "model.data.data_prefix.train",
        "model.data.data_prefix.train=[${model.seed}/a, b]": "wanted quotes around the item",
        "model.global_batch_size": "got 'model.global_batch_size', wanted section.key=value",
        "=3": "got '=3', wanted section.key=value",
        "model.data.data_prefix.validation=null": (
            "validation: got null, wanted a file or a list of files; [] for none"
        ),
        "model.seed=${model.sed}": "model.seed: Interpolation key 'model.sed' not found",
    }
    assert not_refused(TrainConfig, refusals) == {}


def test_mistakes_on_a_command_line_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.nemo", "pairs.jsonl", "run.yaml"):
        Path(name).touch()
    cases: list[tuple[type, list[str], str]] = [
        (ServeConfig, ["a.nemo"], "wanted section.key=value; did you mean rm_model_file=a.nemo?"),
        (EvaluateConfig, ["pairs.jsonl"], "did you mean data.path=pairs.jsonl?"),
        (TrainConfig, ["a.nemo"], "did you mean pretrained_checkpoint.restore_from_path=a.nemo?"),
        (TrainConfig, ["pairs.jsonl"], "did you mean model.data.data_prefix.train=pairs.jsonl?"),
        (TrainConfig, ["run.yaml"], "did you mean --config run.yaml?"),
        (
            TrainConfig,
            ["model.seed", "=", "3", "model.optim.lr=1", "model.seed", "=4"],
            "got model.seed = 3, model.seed =4, wanted no spaces around =: model.seed=3",
        ),
        (TrainConfig, ["model.seed=", "3"], "got model.seed= 3, wanted no spaces around ="),
    ]
    for schema, settings, message in cases:
        with pytest.raises(SettingsError) as error:
            load_config(schema, settings)
        assert len(error.value.problems) == 1, settings
        assert message in str(error.value)
    Path("pairs.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    for file, message in (("pairs.jsonl", "not a YAML file of settings"), (".", "is a folder")):
        with pytest.raises(ConfigError, match=message):
            load_config(TrainConfig, [], file)


@pytest.mark.parametrize("schema", [TrainConfig, ServeCriticConfig])
def test_settings_refused_are_what_no_optimizer_or_generator_takes(schema: type) -> None:
    refusals = {
        "model.seed=-1": "model.seed: got -1, wanted a whole number from 0 to 4294967295",
        "model.seed=4294967296": "model.seed: got 4294967296, wanted a whole number from 0",
        "model.optim.betas=[0.9]": "model.optim.betas: got (0.9,), wanted two numbers",
        "model.optim.betas=[]": "model.optim.betas: got (), wanted two numbers",
        "model.optim.betas=[0.9,0.98,0.99]": "got (0.9, 0.98, 0.99), wanted two numbers",
        "model.optim.betas=[0.9,1]": "got (0.9, 1.0), wanted two numbers, each 0 or more and",
        "model.optim.betas=[-0.1,0.9]": "got (-0.1, 0.9), wanted two numbers",
        "model.optim.betas=[.nan,0.9]": "got (nan, 0.9), wanted two numbers",
        "model.optim.lr=.inf": "model.optim.lr: got inf, wanted a finite number",
        "model.optim.lr=-.inf": "model.optim.lr: got -inf, wanted a number above 0",
        "model.optim.lr=.nan": "model.optim.lr: got nan, wanted a number above 0",
        "model.optim.weight_decay=.inf": "model.optim.weight_decay: got inf, wanted a finite",
        "model.optim.eps=.inf": "model.optim.eps: got inf, wanted a finite number",
        "model.optim.sched.min_lr=.nan": "model.optim.sched.min_lr: got nan, wanted 0 or more",
    }
    # An invalid lr does not also make min_lr invalid.
    assert not_refused(schema, refusals, most_problems=2) == {}
    for setting in ("model.seed=0", "model.seed=4294967295", "model.optim.betas=[0, 0.999]"):
        load_config(schema, [setting])


def test_settings_refused_beside_a_ring() -> None:
    ring = ["model.context_parallel_size=2", "model.cp_comm_type=p2p"]
    with pytest.raises(SettingsError, match=r"'p2p', wanted all_gather, or model\.batch_invariant"):
        load_config(TrainConfig, ring)
    variant = "model.batch_invariant=false"
    for schema, more in (
        (ServeConfig, ()),
        (ServeCriticConfig, ("server.prefix_cache_tokens=99",)),
    ):
        with pytest.raises(SettingsError, match=r"server\.prefix_cache_tokens: got .*, wanted 0"):
            load_config(schema, [*ring, variant, *more])


def test_kernels_whose_bits_may_depend_on_the_pack_are_refused_with_batch_invariance() -> None:
    for kernels in ("compile", "liger"):
        setting = f"model.pointwise_kernels={kernels}"
        for schema in (TrainConfig, ServeConfig):
            with pytest.raises(SettingsError, match=rf"pointwise_kernels: got .*{kernels}"):
                load_config(schema, [setting])
            load_config(schema, [setting, "model.batch_invariant=false"])


def test_settings_refused_of_several_models() -> None:
    names = "wanted names of letters, digits and -_. that begin with a letter or digit, and none of"
    refusals = {
        "models.reward_model=a.nemo": f"models: got {{'reward_model': 'a.nemo'}}, {names} reward_m",
        "models.contract=a.nemo": f"models: got {{'contract': 'a.nemo'}}, {names}",
        "models.stats=a.nemo": names,
        "models.local=a.nemo": names,
        "models={a.contract: a.nemo}": f"{names} reward_model, contract, stats, local, NAME.con",
        "models={a/b: a.nemo}": f"models: got {{'a/b': 'a.nemo'}}, {names}",
        "models={.a: a.nemo}": names,
    }
    assert not_refused(ServeConfig, refusals) == {}
    plain = ["models.harmless=a.nemo"]
    assert load_config(ServeConfig, plain).models == {"harmless": "a.nemo"}
    for setting in ("shaping.sigmoid=true", "ensemble.files=[b.nemo]"):
        with pytest.raises(SettingsError, match=r"wanted none with shaping or ensemble\.files"):
            load_config(ServeConfig, [*plain, setting])


def test_settings_refused_of_the_time_after_which_a_model_hangs() -> None:
    longer = "wanted 0 (never), or more than server.max_call_secs"
    refusals = {
        f"server.max_stuck_secs={number}": f"server.max_stuck_secs: got {number}, {longer}"
        for number in ("-1.0", "1.0", "nan")
    }
    for schema in (ServeConfig, ServeCriticConfig):
        assert not_refused(schema, refusals) == {}
    off = ["server.max_stuck_secs=0", "server.max_call_secs=5"]
    assert load_config(ServeConfig, off).server.max_stuck_secs == 0


def test_settings_refused_by_the_gateway() -> None:
    refusals = {
        "gateway.port=70000": "gateway.port: got 70000, wanted 0",
        "gateway.max_request_bytes=0": "gateway.max_request_bytes: got 0, wanted a number above",
        "gateway.retry_s=-1": "gateway.retry_s: got -1.0, wanted 0 or more",
        "gateway.key_file=k.pem": "gateway.key_file: got 'k.pem', wanted a key_file with a cert",
        "backends=[]": "backends: got [], wanted the URL of a server",
        "gateway.token=secret": "unknown key gateway.token",
        "function_threads=0": "function_threads: got 0, wanted a number above 0",
        # The gateway does not tokenize, so only its backends can limit tokens.
        "gateway.max_request_tokens=5": "unknown key gateway.max_request_tokens",
    }
    assert not_refused(GatewayRunConfig, refusals) == {}
    with pytest.raises(SettingsError, match="token_file or a token_variable, not both"):
        load_config(GatewayRunConfig, ["gateway.token_file=t", "gateway.token_variable=T"])
    # By default it listens only on this machine.
    assert load_config(GatewayRunConfig, []).gateway.host == "127.0.0.1"
    config = load_config(GatewayRunConfig, ["backends=[http://a:1,http://b:2]"])
    assert config.backends == ["http://a:1", "http://b:2"]


def test_settings_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    refusals = {
        "model: {global_batchsize: 1}": "did you mean model.global_batch_size?",
        "- 1\n- 2\n": "wanted sections",
        "model: {a: [": "config.yaml",
        "model: [1, 2]": "model: got [1, 2], wanted a section with keys",
    }
    for text, wanted in refusals.items():
        path = write(tmp_path, text)
        with pytest.raises(ConfigError) as error:
            load_config(TrainConfig, file=path)
        assert wanted in str(error.value)
        assert path in str(error.value)
    with pytest.raises(ConfigError, match=r"no/such\.yaml"):
        load_config(TrainConfig, file="no/such.yaml")


def test_settings_saved_load_again(tmp_path: Path) -> None:
    config = load_config(
        TrainConfig,
        ["model.reward_model_type=regression", "model.regression.attributes=[help, brief]"],
    )
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(TrainConfig, file=tmp_path / "saved.yaml") == config


def test_settings_refused_are_in_one_error(tmp_path: Path) -> None:
    text = """
    trainer: {gadgets: 8, widgets: 8, precision: fp8, maxsteps: 3}
    model: {micro_batch_tokns: 1, optim: {sched: {name: Noam}}}
    """
    settings = ["model.global_batch_size=0", "model.freeze_layers=-1", "model.optim.eps=0", "x"]
    with pytest.raises(SettingsError) as error:
        load_config(TrainConfig, settings, write(tmp_path, text))
    path = tmp_path / "config.yaml"
    assert error.value.problems == (
        f"{path}: trainer.precision: got 'fp8', wanted fp32 | bf16 | fp16 | null",
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


def test_settings_may_be_one_text_for_a_list_and_refer_to_others(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: {seed: 7, data: {seq_length: '${model.seed}', data_prefix: {validation: b.jsonl}}}",
    )
    data = load_config(TrainConfig, ["model.data.data_prefix.train=a.jsonl"], path).model.data
    assert data.data_prefix.train == ["a.jsonl"]
    assert data.data_prefix.validation == ["b.jsonl"]
    assert data.seq_length == 7


def test_settings_shipped_load() -> None:
    shipped = sorted((ROOT / "conf").glob("*.yaml"))
    assert shipped
    for path in shipped:
        load_config(SCHEMAS.get(path.stem) or SCHEMAS[path.stem.partition("_")[0]], file=path)


def test_settings_of_another_program_are_checked_as_those_of_a_file() -> None:
    config = load_values(EvaluateConfig, {"model": {"micro_batch_tokens": 9}}, "their settings")
    assert config.model.micro_batch_tokens == 9
    with pytest.raises(SettingsError, match="their settings: unknown key"):
        load_values(EvaluateConfig, {"model": {"micro_batch_tokes": 9}}, "their settings")


WEIGHTS = "model.regression.attribute_weights"
KEYWORDS = "exp_manager.wandb_logger_kwargs"
VARIABLES = "model.data.chat_template_kwargs"
MAPPINGS = """
model:
  reward_model_type: regression
  regression: {attributes: [a, b], attribute_weights: {a: 0.8, b: -0.2}}
exp_manager: {wandb_logger_kwargs: {project: rm, name: one}}
"""


def test_settings_mapping_given_as_a_whole_replaces_and_a_key_of_it_adds(tmp_path: Path) -> None:
    wanted: dict[tuple[str, ...], dict[str, float]] = {
        (f"{WEIGHTS}={{}}",): {},
        (f"++{WEIGHTS}=null",): {},
        (f"{WEIGHTS}={{a: 1}}",): {"a": 1.0},
        (f"++{WEIGHTS}={{b: 2}}",): {"b": 2.0},
        (f"{WEIGHTS}.a=1",): {"a": 1.0, "b": -0.2},
        (f"++{WEIGHTS}.b=1",): {"a": 0.8, "b": 1.0},
        (f"{WEIGHTS}={{b: 1}}", f"{WEIGHTS}.a=2"): {"a": 2.0, "b": 1.0},
        (f"{WEIGHTS}={{a: 1}}", f"{WEIGHTS}.a=2"): {"a": 2.0},
        (f"{WEIGHTS}.a=2", f"{WEIGHTS}={{b: 1}}"): {"b": 1.0},
        ("model.regression={attribute_weights: {b: 1}}",): {"b": 1.0},
        ("model.regression={loss_mask_val: -1}",): {"a": 0.8, "b": -0.2},
    }
    file = write(tmp_path, MAPPINGS)
    found = {
        settings: load_config(TrainConfig, settings, file).model.regression.attribute_weights
        for settings in wanted
    }
    assert found == wanted
    keywords = {
        f"{KEYWORDS}={{project: two}}": {"project": "two"},
        f"{KEYWORDS}=null": {},
        f"{KEYWORDS}.name=two": {"project": "rm", "name": "two"},
    }
    for setting, expected in keywords.items():
        config = load_config(TrainConfig, [setting], file)
        assert config.exp_manager.wandb_logger_kwargs == expected, setting
    variables: dict[tuple[str, ...], dict[str, int] | None] = {
        (f"{VARIABLES}.a=1", f"{VARIABLES}.b=2"): {"a": 1, "b": 2},
        (f"{VARIABLES}.a=1", f"{VARIABLES}={{yes: 2}}"): {"yes": 2},
        (f"{VARIABLES}.a=1", f"{VARIABLES}=null"): None,
    }
    for settings, values in variables.items():
        data = load_config(TrainConfig, settings).model.data
        assert data.chat_template_kwargs == values, settings
    served = write(tmp_path, "shaping: {attribute_weights: {a: 1}}")
    config = load_config(ServeConfig, ["shaping.attribute_weights=null"], served)
    assert config.shaping.attribute_weights == {}


@pytest.mark.parametrize("schema", [TrainConfig, EvaluateConfig, ServeConfig])
def test_help_of_settings_is_a_line_each_with_a_default_that_loads(schema: type) -> None:
    keys = list_keys(schema)
    assert [
        key.name for key in keys if "\n" in key.help_text or not 0 < len(key.help_text) <= 72
    ] == []
    shown = [f"{key.name}={key.default}" for key in keys]
    assert load_config(schema, [text for text in shown if not text.endswith("={}")]) == schema()
    assert max(map(len, render_keys(schema).splitlines())) <= 80


def test_help_of_settings_has_types_and_choices() -> None:
    keys = {key.name: key for key in list_keys(TrainConfig)}
    assert keys["trainer.precision"].kind == "fp32 | bf16 | fp16 | null"
    assert keys["trainer.precision"].choices == ("fp32", "bf16", "fp16", "null")
    assert keys["model.data.add_eos"].choices == ("true", "false", "null")
    assert keys["trainer.rm.max_steps"].kind == "a whole number | null"
    assert keys["model.optim.betas"].default == "[0.9, 0.98]"
    assert keys["model.data.data_prefix.train"].kind == "[text, ...]"
    assert keys["model.objective_kwargs"].kind == "key=value"


def test_suggestion_says_where_another_trainers_unit_differs() -> None:
    refusals = {
        "per_device_train_batch_size=4": (
            "did you mean model.micro_batch_tokens, which counts tokens, not records?"
        ),
        "model.gradient_accumulation_steps=4": (
            "did you mean model.global_batch_size, which counts the records of a step"
        ),
        "warmup_ratio=0.1": "warmup_steps, which counts steps, not a fraction of them?",
        "train_mb_tokens=4096": "did you mean model.micro_batch_tokens?",
        "trainer.logging_steps=1": "unknown key trainer.logging_steps: every step is logged",
    }
    assert not_refused(TrainConfig, refusals) == {}


def test_suggestion_is_only_what_is_near() -> None:
    wanted = {
        "model.global_batchsize": "model.global_batch_size",
        "trainer.max_steps": "trainer.rm.max_steps",
        "model.lr": "model.optim.lr",
        "lr": "model.optim.lr",
        "model.precision": "trainer.precision",
        "model.data.add_eoss": "model.data.add_eos",
        "model.data.num_workers": None,
        "trainer.devices": None,
        "exp_manager.name": None,
        "exp_manager.checkpoint_callback_params.model_parallel_size": None,
        "model.output_sequence": None,
        "model.optm.lr": "model.optim.lr",
        "model.optim.rl": "model.optim.lr",
        "trainer.lr": "model.optim.lr",
        "model.optim.learning_rate": "model.optim.lr",
        "learning_rate": "model.optim.lr",
        "batch_size": "model.global_batch_size",
        "model.lora.r": "model.lora.rank",
        "policy.train_micro_batch_size": "model.micro_batch_tokens",
        "mdel.data.data_prefix.tran": "model.data.data_prefix.train",
        "steps": "trainer.rm.max_steps",
        "trainer.save_steps": "trainer.rm.save_interval",
        "trainer.eval_steps": "trainer.rm.val_check_interval",
        "model.max_seq_len": "model.data.seq_length",
        "model.max_seq_length": "model.data.seq_length",
        "warmup_ratio": "model.optim.sched.warmup_steps",
        "beta": None,
        "base": None,
        "report_to": None,
    }
    known = [key.name for key in list_keys(TrainConfig)]
    assert {key: suggest_setting(key, known) for key in wanted} == wanted
    assert set(PEER_NAMES.values()) <= {*known, *(key.name for key in list_keys(EvaluateConfig))}
    assert suggest_setting("model", ["data.path", "rm_model_file"]) == "rm_model_file"
    assert suggestion("trian", ["train", "plan"]) == "train"
    assert suggestion("deploy", ["train", "plan"]) is None


FOLDER = "exp_manager.explicit_log_dir"
TRAIN = "model.data.data_prefix.train"
NAMES = "model.regression.attributes"
LOOKS_LIKE_MORE = ["2024_10_01", "007", "12:30", "1e3", "1_000", "yes", "0x1F", "2024-10-01", ".5"]


def found(setting: str) -> object:
    key = setting.lstrip("+").partition("=")[0]
    return attrgetter(key)(load_config(TrainConfig, [setting]))


def unlike(wanted: dict[str, object]) -> dict[str, object]:
    """Return the settings that are read as another value than expected."""
    read = {setting: found(setting) for setting in wanted}
    return {setting: read[setting] for setting in wanted if read[setting] != wanted[setting]}


def test_text_is_what_stands_behind_the_equals_sign() -> None:
    texts = [*LOOKS_LIKE_MORE, "results/run #2", "#2", "{a: 1}", "a: b", "[a", "'a'b", "a=b"]
    for text in texts:
        for mark in ("", "+", "++"):
            settings = [f"{mark}{FOLDER}={text}", f"{mark}model.data.chosen_key={text}"]
            config = load_config(TrainConfig, settings)
            assert config.exp_manager.explicit_log_dir == text, settings
            assert config.model.data.chosen_key == text, settings
    for key in ("trainer.max_time", "exp_manager.max_time_per_run"):
        config = load_config(TrainConfig, [f"{key}=12:00:00:00"])
        assert config.trainer.max_time == "12:00:00:00", key


def test_text_in_quotes_null_and_references_stay_what_they_are() -> None:
    wanted = {
        "'a b'": "a b",
        '"a #2"': "a #2",
        '"a\\nb"': "a\nb",
        '"null"': "null",
        "null": None,
        "~": None,
        "": None,
        "\n": "\n",
        "${model.seed}": "1234",
        "a/${model.seed}": "a/1234",
    }
    assert unlike({f"model.data.prompt_key={text}": read for text, read in wanted.items()}) == {}


def test_text_in_lists() -> None:
    wanted: dict[str, object] = {
        f"{NAMES}=[yes, no, 007]": ["yes", "no", "007"],
        f"{NAMES}=[a, 'b, c']": ["a", "b, c"],
        f"{NAMES}=yes": ["yes"],
        f"{TRAIN}=x #1.jsonl": ["x #1.jsonl"],
        f"{TRAIN}=a: b.jsonl": ["a: b.jsonl"],
        f"{TRAIN}='x #1.jsonl'": ["x #1.jsonl"],
        f"{TRAIN}=['x #1.jsonl']": ["x #1.jsonl"],
        f"{TRAIN}=2024_10_01": ["2024_10_01"],
        f"{TRAIN}=a.jsonl": ["a.jsonl"],
    }
    assert unlike(wanted) == {}
    refusals = {
        f"{TRAIN}=[a: b.jsonl]": f"{TRAIN}: got [{{'a': 'b.jsonl'}}], wanted [text, ...]",
        f"{TRAIN}=[[a.jsonl]]": f"{TRAIN}: got [['a.jsonl']], wanted [text, ...]",
        f"{TRAIN}=[a.jsonl] #2": f"{TRAIN}=[a.jsonl] #2: got '#', which begins a comment",
        f"{TRAIN}=[x #1.jsonl]": TRAIN,
        "model.data.data_prefix.train_weights=[a: 1]": "got [{'a': 1}], wanted [a number, ...]",
        f"{TRAIN}=['${{oc.env:NO_SUCH}}/a']": f"{TRAIN}: KeyError raised while resolving",
        f"{TRAIN}=['${{oc.env:HOME}}/a', b": "while parsing a flow sequence",
        f"{TRAIN}=${{model.seed}}": f"{TRAIN}: got 1234, wanted [text, ...]",
        f"{NAMES}=['']": f"{NAMES}: got [''], wanted names, none of them empty",
    }
    assert not_refused(TrainConfig, refusals) == {}


def test_text_of_a_file_is_what_was_written(tmp_path: Path) -> None:
    for text in LOOKS_LIKE_MORE:
        path = tmp_path / "config.yaml"
        path.write_text(f"""
model:
  data: {{chosen_key: {text}}}
  regression: {{attributes: [{text}, b]}}
  lora: {{targets: linear_qkv}}
pretrained_checkpoint: {{load_rm_head_weights: a, rm_head_names: {{{text}: {text}}}}}
exp_manager:
  explicit_log_dir: {text}  # the first of them
""")
        config = load_config(TrainConfig, file=path)
        assert config.exp_manager.explicit_log_dir == text
        assert config.model.data.chosen_key == text
        assert config.model.regression.attributes == [text, "b"]
        assert config.model.lora.targets == ["linear_qkv"]
        assert config.pretrained_checkpoint.rm_head_names == {text: text}
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(TrainConfig, file=tmp_path / "saved.yaml") == config


def test_text_of_sections_that_a_file_takes_from_another(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("""
model:
  data: {<<: {chosen_key: yes}, rejected_key: &no no, seq_length: 99, prompt_key: *no}
""")
    data = load_config(TrainConfig, file=path).model.data
    assert (data.chosen_key, data.rejected_key, data.prompt_key) == ("yes", "no", "no")
    assert data.seq_length == 99


def test_text_of_attribute_names() -> None:
    settings = [
        "model.reward_model_type=regression",
        f"{NAMES}=[yes, no]",
        "model.regression.attribute_weights={yes: 1, no: 0.5}",
    ]
    config, notes = load_with_notes(TrainConfig, settings)
    assert config.model.regression.attribute_weights == {"yes": 1.0, "no": 0.5}
    assert notes == []
    settings = [setting.replace("yes", "quality.v1") for setting in settings]
    config = load_config(TrainConfig, settings)
    assert config.model.regression.attribute_weights == {"quality.v1": 1.0, "no": 0.5}
