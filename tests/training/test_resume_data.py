"""A run goes on with the same data, whatever version has written its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.checkpoint.runs import Saved
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.training_data import TrainingData, build_training_data
from nemo_aligner.errors import CheckpointError
from nemo_aligner.training.resume import find_latest, new_state
from tests import tiny
from tests.contracts import Contracts

SHAPE = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 64, "make_vocab_size_divisible_by": 16,
}  # fmt: skip


def data_of(contracts: Contracts, *paths: Path) -> TrainingData:
    config = contracts.config()
    config.data.data_prefix.train = [str(path) for path in paths]
    return build_training_data(config, contracts(), contracts.tokenizer)


def test_resume_knows_several_files_of_a_version_without_digests_by_their_tokens(
    tmp_path: Path, contracts: Contracts
) -> None:
    files = [tiny.write_pairs(tmp_path / f"{seed}.jsonl", 9, seed) for seed in range(2)]
    data, config = data_of(contracts, *files), TrainConfig()
    fresh = new_state(config, SHAPE, data)
    assert fresh.fingerprint["training data"] == data.train.digest != data.train.measure_digest()

    def go_on(digest: str) -> Any:
        state = replace(fresh, fingerprint={**fresh.fingerprint, "training data": digest})
        checkpoints = SimpleNamespace(latest=lambda: Saved(tmp_path, state), folder=tmp_path)
        return find_latest(checkpoints, config, fresh, data)  # type: ignore[arg-type]

    assert go_on(data.train.digest)
    assert go_on(data.train.measure_digest())
    with pytest.raises(CheckpointError, match="training data: the checkpoint has"):
        go_on(data_of(contracts, *files[::-1]).train.measure_digest())
