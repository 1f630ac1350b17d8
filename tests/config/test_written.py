"""Text is what was written, although YAML reads numbers, truths and comments in it."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from nemo_aligner.config.load import load_config, load_with_notes, save_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.errors import SettingsError

FOLDER = "exp_manager.explicit_log_dir"
TRAIN = "model.data.data_prefix.train"
NAMES = "model.regression.attributes"
LOOKS_LIKE_MORE = ["2024_10_01", "007", "12:30", "1e3", "1_000", "yes", "0x1F", "2024-10-01", ".5"]


def found(setting: str) -> object:
    key = setting.lstrip("+").partition("=")[0]
    return attrgetter(key)(load_config(TrainConfig, [setting]))


@pytest.mark.parametrize("mark", ["", "+", "++"])
@pytest.mark.parametrize(
    "text", [*LOOKS_LIKE_MORE, "results/run #2", "#2", "{a: 1}", "a: b", "[a", "'a'b", "a=b"]
)
def test_text_is_what_stands_behind_the_equals_sign(text: str, mark: str) -> None:
    assert found(f"{mark}{FOLDER}={text}") == text
    assert found(f"{mark}model.data.chosen_key={text}") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'a b'", "a b"),
        ('"a #2"', "a #2"),
        ('"a\\nb"', "a\nb"),
        ('"null"', "null"),
        ("null", None),
        ("~", None),
        ("", None),
        ("${model.seed}", "1234"),
        ("a/${model.seed}", "a/1234"),
    ],
)
def test_quotes_null_and_references_stay_what_they_are(text: str, expected: str | None) -> None:
    assert found(f"model.data.prompt_key={text}") == expected


@pytest.mark.parametrize("key", ["trainer.max_time", "exp_manager.max_time_per_run"])
def test_a_time_limit_needs_no_quotes(key: str) -> None:
    assert load_config(TrainConfig, [f"{key}=12:00:00:00"]).trainer.max_time == "12:00:00:00"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (f"{NAMES}=[yes, no, 007]", ["yes", "no", "007"]),
        (f"{NAMES}=[a, 'b, c']", ["a", "b, c"]),
        (f"{NAMES}=yes", ["yes"]),
        (f"{TRAIN}=x #1.jsonl", ["x #1.jsonl"]),
        (f"{TRAIN}=a: b.jsonl", ["a: b.jsonl"]),
        (f"{TRAIN}='x #1.jsonl'", ["x #1.jsonl"]),
        (f"{TRAIN}=['x #1.jsonl']", ["x #1.jsonl"]),
        (f"{TRAIN}=2024_10_01", ["2024_10_01"]),
        (f"{TRAIN}=a.jsonl", ["a.jsonl"]),
    ],
)
def test_lists_of_text(setting: str, expected: list[str]) -> None:
    assert found(setting) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (f"{TRAIN}=[a: b.jsonl]", f"{TRAIN}: got [{{'a': 'b.jsonl'}}], wanted [text, ...]"),
        (f"{TRAIN}=[[a.jsonl]]", f"{TRAIN}: got [['a.jsonl']], wanted [text, ...]"),
        (
            f"{TRAIN}=[a.jsonl] #2",
            f"{TRAIN}=[a.jsonl] #2: got '#', behind which YAML",
        ),
        (f"{TRAIN}=[x #1.jsonl]", TRAIN),
        ("model.data.data_prefix.train_weights=[a: 1]", "got [{'a': 1}], wanted [a number, ...]"),
        (f"{NAMES}=['']", f"{NAMES}: got [''], wanted names, none of them empty"),
    ],
)
def test_what_is_no_list_of_text_is_one_error(setting: str, expected: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(TrainConfig, [setting])
    assert expected in str(error.value)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("text", LOOKS_LIKE_MORE)
def test_text_of_a_file_is_what_was_written(text: str, tmp_path: Path) -> None:
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


def test_sections_that_a_file_takes_from_another_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("""
model:
  data: {<<: {chosen_key: yes}, rejected_key: &no no, seq_length: 99, prompt_key: *no}
""")
    data = load_config(TrainConfig, file=path).model.data
    assert (data.chosen_key, data.rejected_key, data.prompt_key) == ("yes", "no", "no")
    assert data.seq_length == 99


def test_names_of_attributes_are_text() -> None:
    settings = [
        "model.reward_model_type=regression",
        f"{NAMES}=[yes, no]",
        "model.regression.attribute_weights={yes: 1, no: 0.5}",
    ]
    config, notes = load_with_notes(TrainConfig, settings)
    assert config.model.regression.attribute_weights == {"yes": 1.0, "no": 0.5}
    assert notes == []
