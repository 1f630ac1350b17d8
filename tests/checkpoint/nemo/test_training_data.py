"""The files that a model was trained on, after further training and in a merged model."""

from __future__ import annotations

from nemo_aligner.checkpoint.nemo.training_data import (
    merge_training_data,
    training_data_of,
    with_training_data,
)

FIRST, SECOND = {"name": "a.jsonl", "sha256": "1"}, {"name": "b.jsonl", "sha256": "2"}


def test_files_of_all_runs_are_listed_once() -> None:
    assert training_data_of({"num_layers": 2}) is None
    assert training_data_of({"training_data": "of another program"}) is None
    config = with_training_data(with_training_data({"num_layers": 2}, [FIRST]), [SECOND, FIRST])
    assert config["num_layers"] == 2
    assert training_data_of(config) == [FIRST, SECOND]


def test_merged_model_has_the_files_of_all_or_says_nothing() -> None:
    first, second = (with_training_data({"num_layers": 2}, [file]) for file in (FIRST, SECOND))
    assert training_data_of(merge_training_data(second, [first, first])) == [SECOND, FIRST]
    assert merge_training_data(second, [{}]) == {"num_layers": 2}
