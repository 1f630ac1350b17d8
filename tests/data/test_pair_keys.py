"""Pairs whose fields are named by settings, as NeMo RL's ``BinaryPreferenceDataset`` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.config.data import DataConfig, DataPrefixConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.malformed import MalformedRule
from nemo_aligner.data.training_data import build_training_data
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.tokenizer import Tokenizer
from tests.contracts import Contracts
from tests.data.conftest import Run
from tests.data.files import read, rows_of, write
from tests.text.refusals import assert_refused

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "why"}
GOOD = {"role": "assistant", "content": "because"}
BAD = {"role": "assistant", "content": "no"}
LEFT_OUT = MalformedRule(Malformed.drop, most=0.5)
NAMED = PairKeys.of("question", "better", None)
PAIR = {"prompt": "why", "chosen": "because", "rejected": "no"}
BY_NAME = {"question": "why", "better": "because", "rejected": "no", "prompt": "unread"}


def test_pair_keys_name_the_fields(tmp_path: Path) -> None:
    messages = {**BY_NAME, "question": [SYSTEM, USER], "better": [GOOD], "score_chosen": 3}
    file = read(
        tmp_path, BY_NAME, {**messages, "score_rejected": 1}, {**BY_NAME, "label_margin": None},
        pair_keys=NAMED, rule=LEFT_OUT, pair_columns=("label_margin",),
    )  # fmt: skip
    assert (file.format, file.counts["malformed"]) == ("chat_pairs", 1)
    assert file.records[0].texts == ([SYSTEM, USER, GOOD], [SYSTEM, USER, BAD])
    assert file.records[1].texts == ([USER, GOOD], [USER, BAD])
    assert [pair.labels for pair in file.records] == [(2.0,), (None,)]


def test_pair_keys_of_other_fields_are_refused(tmp_path: Path) -> None:
    cases = [
        (PAIR, r":1: got keys 'prompt', .*wants 'question', 'better' and"),
        ({**BY_NAME, "better": 3}, r":1: better: got 3, wanted a string or a list"),
        ({**BY_NAME, "question": 3}, r":1: question: got 3, wanted a string or a list"),
    ]
    assert_refused(lambda record: read(tmp_path, record, pair_keys=NAMED), cases, DataError)


def test_pair_keys_are_for_chat_pairs_alone(tmp_path: Path) -> None:
    assert PairKeys.of(None, None, None) is None
    assert PairKeys.of(None, None, "worse") == PairKeys("prompt", "chosen", "worse")
    assert read(tmp_path, BY_NAME, pair_keys=NAMED, format="chat_pairs").counts["kept"] == 1
    with pytest.raises(ConfigError, match=r"data.format: got 'hh', wanted auto or chat_pairs, who"):
        read(tmp_path, BY_NAME, pair_keys=NAMED, format="hh")
    with pytest.raises(ConfigError, match=r"data.prompt_key: got 'question', wanted null, and ch"):
        read(tmp_path, BY_NAME, pair_keys=NAMED, kind=RecordKind.rating)


def test_pair_keys_of_a_run(tmp_path: Path, contracts: Contracts, tokenizer: Tokenizer) -> None:
    files = DataPrefixConfig(train=[str(write(tmp_path / "named.jsonl", BY_NAME))])
    data = DataConfig(data_prefix=files, prompt_key="question", chosen_key="better")
    found = build_training_data(ModelConfig(data=data), contracts(), tokenizer)
    assert len(found.train.records) == 1
    ratings = contracts.config(["help"], data_prefix=files, prompt_key="question")
    with pytest.raises(ConfigError, match=r"model.data.prompt_key: got 'question', wanted null"):
        build_training_data(ratings, contracts(["help"]), tokenizer)


def test_pair_keys_of_inspect_and_split(tmp_path: Path, run: Run) -> None:
    rows = [{**BY_NAME, "question": f"why {number}"} for number in range(4)]
    path = write(tmp_path / "named.jsonl", *rows)
    flags = ("--prompt-key=question", "--chosen-key=better")
    shown = run("data inspect", path, *flags).stdout
    assert "why 0" in shown
    assert "unread" not in shown
    run("data split", path, f"--output={tmp_path}", "--heldout=0.5", *flags)
    parts = [row for name in ("train", "heldout") for row in rows_of(tmp_path / f"{name}.jsonl")]
    assert sorted(parts, key=lambda row: row["question"]) == rows
