"""NeMo-Aligner's settings files are translated, and no key is dropped silently."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.config.compat import FILES, RULES
from nemo_aligner.config.describe import list_keys
from nemo_aligner.config.load import load_config, load_with_notes
from nemo_aligner.config.model import Recompute, Schedule
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig, Standardize
from nemo_aligner.config.training import MonitorMode, TrainConfig
from nemo_aligner.utils.errors import ConfigError
from tests.config.nemo_aligner_files import SETTINGS, write_file
from tests.config.refusals import not_refused


@pytest.mark.parametrize("name", FILES)
def test_nemo_aligner_file_loads_and_every_key_of_it_has_a_rule(name: str, tmp_path: Path) -> None:
    load_config(FILES[name], file=write_file(tmp_path, name))
    keys = {setting.partition("=")[0] for setting in SETTINGS[name]}
    rules = {rule.key for rule in RULES[FILES[name]]}
    # A rule for a section applies to all keys below it.
    sections = (
        "exp_manager.wandb_logger_kwargs",
        "model.overwrite_base_config",
        "model.data.data_prefix",
    )
    assert not {key for key in keys - rules if not key.startswith(sections)}


def test_nemo_aligner_keys_lead_to_settings_or_say_why_not() -> None:
    for schema, rules in RULES.items():
        known = {key.name for key in list_keys(schema)}
        for rule in rules:
            assert rule.target in {"", *known}, rule.key
            assert rule.reason or rule.target, rule.key
            if rule.same_as:
                attrgetter(rule.same_as)(schema())
        keys = [rule.key for rule in rules]
        assert sorted(keys) == sorted(set(keys))


def test_nemo_aligner_training_file(tmp_path: Path) -> None:
    config = load_config(TrainConfig, file=write_file(tmp_path, "training_rm.yaml"))
    assert config.trainer.rm.max_steps is None
    assert config.trainer.precision is Precision.bf16
    assert config.model.data.seq_length == 4096
    assert config.model.optim.sched.name is Schedule.cosine
    assert config.model.optim.sched.constant_steps == 1000
    assert config.pretrained_checkpoint.new_head
    callback = config.exp_manager.checkpoint_callback_params
    assert (callback.monitor, callback.mode, callback.save_top_k) == ("loss", MonitorMode.min, 3)
    assert config.exp_manager.wandb_logger_kwargs == {"project": "rm", "name": "rm_2b"}


def test_nemo_aligner_training_file_with_settings_of_the_command_line(tmp_path: Path) -> None:
    file = write_file(tmp_path, "training_rm.yaml")
    settings = [
        "++model.encoder_seq_length=512",
        "trainer.precision=32",
        "exp_manager.max_time_per_run=00:03:50:00",
        "++model.activations_checkpoint_granularity=null",
    ]
    config = load_config(TrainConfig, settings, file)
    assert config.model.data.seq_length == 512
    assert config.trainer.precision is Precision.fp32
    assert config.trainer.max_time == "00:03:50:00"
    assert config.model.activations_checkpoint_granularity is Recompute.none


def test_nemo_aligner_validation_sets_are_all_taken(tmp_path: Path) -> None:
    prefix = "{train: [a.jsonl], validation: [b.jsonl], validation_two: [c.jsonl], test: [d.jsonl]}"
    found = load_config(TrainConfig, [f"model.data.data_prefix={prefix}"]).model.data.data_prefix
    assert found.train == ["a.jsonl"]
    assert found.validation == ["b.jsonl", "c.jsonl"]
    assert found.test == ["d.jsonl"]
    file = tmp_path / "training_rm.yaml"
    sets = "{validation: [a.jsonl], validation_b: [b.jsonl]}"
    file.write_text(f"model: {{data: {{data_prefix: {sets}}}}}")
    settings = ["++model.data.data_prefix.validation_c=[c.jsonl]"]
    found = load_config(TrainConfig, settings, file).model.data.data_prefix
    assert found.validation == ["a.jsonl", "b.jsonl", "c.jsonl"]
    # Whatever the file has first, and also beside what replaces the file's own list.
    file.write_text("model: {data: {data_prefix: {validation_b: [b], validation: [a]}}}")
    for settings, wanted in (
        ([], ["a", "b"]),
        (["model.data.data_prefix.validation=[c]"], ["c", "b"]),
        (["++model.data.data_prefix.validation_b=null"], ["a"]),
    ):
        config, notes = load_with_notes(TrainConfig, settings, file)
        assert config.model.data.data_prefix.validation == wanted
        assert len(notes) == len(wanted) - 1


def test_nemo_aligner_key_is_taken_beside_our_name_for_it(tmp_path: Path) -> None:
    """The order in the file does not count; a later setting wins, and then no note says other."""
    theirs, ours = "exp_manager: {max_time_per_run: '00:03:50:00'}", "trainer: {max_time: null}"
    file = tmp_path / "training_rm.yaml"
    for lines in ((theirs, ours), (ours, theirs)):
        file.write_text("\n".join(lines))
        config, notes = load_with_notes(TrainConfig, [], file)
        assert config.trainer.max_time == "00:03:50:00"
        assert len(notes) == 1
        for setting, wanted in (("=null", None), ("=00:01:00:00", "00:01:00:00")):
            config, notes = load_with_notes(TrainConfig, [f"trainer.max_time{setting}"], file)
            assert (config.trainer.max_time, notes) == (wanted, [])


def test_nemo_aligner_server_file_standardizes_as_asked(tmp_path: Path) -> None:
    file = write_file(tmp_path, "inference_rm.yaml")
    settings = [
        f"model.reward_standardization.{each}" for each in ("enable=true", "mean=2", "std=3")
    ]
    config = load_config(ServeConfig, [*settings, "inference.port=1424"], file)
    assert config.shaping.standardize is Standardize.given
    assert (config.shaping.mean, config.shaping.std) == ([2.0], [3.0])
    assert (config.server.port, config.precision) == (1424, Precision.bf16)


def test_nemo_aligner_critic_file_has_the_port_of_the_server(tmp_path: Path) -> None:
    file = write_file(tmp_path, "gpt_ppo_critic.yaml")
    config = load_config(ServeCriticConfig, ["trainer.ppo.port=1425"], file)
    assert config.server.port == 1425
    assert config.trainer.ppo.combine_rm_and_critic_server


def test_nemo_aligner_settings_that_would_change_results_are_refused() -> None:
    refusals = {
        "trainer.rm.limit_val_batches=1": "got 1, wanted 1.0: set trainer.rm.limit_val_records",
        "trainer.rm.train_random_sampler=false": "got False, wanted true",
        "trainer.rm.val_check_interval=0.5": "got 0.5, wanted a whole number",
        "model.use_avg_pool=true": "model.head.reads=reply_mean",
        "model.regression.loss_func=scaled_bt": "model.reward_model_type=binary_ranking",
        "model.regression.num_attributes=9": "wanted the same as model.num_attributes (1)",
        "model.encoder_seq_length=2048": "wanted the same as model.data.seq_length (null)",
        "model.optim.name=adafactor": "wanted distributed_fused_adam",
        "model.optim.sched.name=NoamAnnealing": "wanted cosine | linear | constant",
        "model.data.dataloader_type=cyclic": "got 'cyclic', wanted single",
        "model.data.data_impl=mmap": "model.data.data_impl: got 'mmap', wanted jsonl",
        "model.data.data_prefix.train=[0.3,a.jsonl,0.7,b.jsonl]": "go into train_weights",
        "exp_manager.exp_dir=/here": "set exp_manager.explicit_log_dir",
        "defaults=[base]": "defaults: got ['base']",
    }
    assert not_refused(TrainConfig, refusals) == {}


def test_keys_of_earlier_files_of_nemo_aligner_are_read() -> None:
    load_config(TrainConfig, ["model.data.dataloader_type=single"])
    _, notes = load_with_notes(ServeConfig, ["inference.micro_batch_size=2"])
    assert notes[0].startswith("inference.micro_batch_size: ignored: ")


def test_nemo_aligner_notes_name_each_key_once_with_what_became_of_it(tmp_path: Path) -> None:
    file = write_file(tmp_path, "training_rm.yaml")
    _, notes = load_with_notes(TrainConfig, ["trainer.devices=2"], file)
    (launch,) = [note for note in notes if "trainer.devices" in note]
    assert launch.startswith("trainer.num_nodes, trainer.devices: ignored: the launcher says")
    assert "trainer.rm.max_steps=-1 is taken as trainer.rm.max_steps=null" in notes
    # No note for a value that is always so here.
    assert not any("mcore_gpt" in note for note in notes)
    ours = ["trainer.rm.max_steps=5", "model.optim.sched.name=cosine", "trainer.precision=bf16"]
    # If a key is set twice, the last value wins.
    twice = ["trainer.rm.limit_val_batches=5", "trainer.rm.limit_val_batches=1.0"]
    for settings in (ours, twice):
        assert load_with_notes(TrainConfig, settings)[1] == []


def test_schedule_with_steps_at_the_lowest_rate_has_some_to_go_down_in() -> None:
    schedule = load_config(TrainConfig, ["model.optim.sched.constant_steps=1000"]).model.optim.sched
    assert schedule.last_decay_step(5000) == 4000
    with pytest.raises(ConfigError, match="got 1000, wanted at most 789, as the run has 800 steps"):
        schedule.check_decay(800)
