"""Text is what was written, although YAML reads numbers, truths and comments in it."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

from nemo_aligner.config.load import load_config, load_with_notes, save_config
from nemo_aligner.config.training import TrainConfig
from tests.config.refusals import not_refused

FOLDER = "exp_manager.explicit_log_dir"
TRAIN = "model.data.data_prefix.train"
NAMES = "model.regression.attributes"
LOOKS_LIKE_MORE = ["2024_10_01", "007", "12:30", "1e3", "1_000", "yes", "0x1F", "2024-10-01", ".5"]


def found(setting: str) -> object:
    key = setting.lstrip("+").partition("=")[0]
    return attrgetter(key)(load_config(TrainConfig, [setting]))


def unlike(wanted: dict[str, object]) -> dict[str, object]:
    """Of settings those that are read as something else."""
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
