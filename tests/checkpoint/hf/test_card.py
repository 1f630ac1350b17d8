"""The model card says what there is, and its program gives the rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.checkpoint.hf.card import _training
from tests.checkpoint.hf.conversion import (
    NAMES,
)
from tests.checkpoint.hf.exporting import (
    MEANS,
    config_of,
    export,
)

pytestmark = pytest.mark.usefixtures("layout")


def test_the_config_and_the_card_say_what_there_is(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    summary = export(three, tmp_path / "out", layout, base_license="apache-2.0")
    config = config_of(tmp_path / "out")
    assert config["id2label"] == {str(number): name for number, name in enumerate(NAMES)}
    assert config["label2id"] == {name: number for number, name in enumerate(NAMES)}
    assert (config["num_labels"], config["problem_type"]) == (3, "regression")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["label_means"] == dict(zip(NAMES, MEANS, strict=True))
    assert config["scoring_contract_hash"] == summary.contract.hash
    assert "WARNING: the logits are not yet the rewards" in str(summary)
    card = (tmp_path / "out/README.md").read_text()
    for said in ("license: apache-2.0", "logits alone are not the rewards", *NAMES, "| 1 | 1 |"):
        assert said in card, said
    contract = json.loads((tmp_path / "out/scoring_contract.json").read_text())
    assert contract == summary.contract.to_dict()


def test_metrics_of_the_run_are_a_table_and_one_without_a_value_is_empty(
    tmp_path: Path,
) -> None:
    archive = tmp_path / "run" / "rm.nemo"
    archive.parent.mkdir()
    prefix = {"train": ["data/train.jsonl"], "validation": []}
    config = {
        "pretrained_checkpoint": {"restore_from_path": "base.nemo"},
        "model": {"data": {"data_prefix": prefix}},
    }
    for step, found in ((5, {"v/loss": 0.5}), (10, {"v/loss": 0.25, "v/temperature": None})):
        state = {"step": step, "consumed_samples": step, "metrics": found, "config": config}
        folder = archive.parent / f"step_{step:08d}"
        folder.mkdir()
        (folder / "run_state.json").write_text(json.dumps(state))
    assert list(_training(archive)) == [
        "- train data: `train.jsonl`",
        "- validation data: none",
        "- trained from `base.nemo`, 10 records",
        "",
        "| | after step 5 | after step 10 |",
        "|---|---|---|",
        "| v/loss | 0.5 | 0.25 |",
        "| v/temperature |  |  |",
    ]


def test_the_card_s_program_gives_the_rewards(
    three: Path, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_aligner.scoring.scorer import load_scorer

    export(three, tmp_path / "out", layout)
    _, _, program = (tmp_path / "out/README.md").read_text().partition("```python\n")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(program.partition("```")[0], variables)
    wanted = load_scorer(three, layout).score([variables["conversation"]])
    np.testing.assert_allclose(variables["rewards"].numpy(), wanted, atol=1e-4, rtol=0)
    assert np.abs(variables["logits"].numpy() - wanted).max() > 1
