"""A reward model's scoring contract, made of its folder or brought by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.errors import CheckpointError
from tests import tiny
from tests.checkpoint.hf.conversion import (
    NAMES,
    convert,
    edit,
    refused,
)
from tests.checkpoint.hf.exporting import (
    export,
)

pytestmark = pytest.mark.usefixtures("layout")


def test_the_contract_is_made_of_the_folder(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions
    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules

    tiny.write_hf_reward_model(tmp_path / "one")
    summary = convert(tmp_path / "one", tmp_path / "one.nemo", dtype=torch.bfloat16)
    _, contract = read_text_rules(tmp_path / "one.nemo")
    assert contract == summary.contract
    assert contract.attributes == ("reward",)
    assert (contract.reward_model_type, contract.dtype) == ("binary_ranking", "bf16")
    assert (contract.attribute_weights, contract.label_means) == ((1.0,), (0.0,))
    assert (contract.template, contract.seq_length) == (tiny.CHATML, 256)
    assert f"reward model of reward, {summary.parameters:,} parameters in bf16" in str(summary)
    assert contract.hash in str(summary)
    with open_nemo(tmp_path / "one.nemo") as folder:
        dtypes = {key: dtype for key, (_, dtype) in folder.store.tensors.items()}
        assert folder.config["reward_model_type"] == "binary_ranking"
    assert dtypes.pop("model.rm_head.weight") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}

    named = {"id2label": dict(enumerate(NAMES)), "max_position_embeddings": 9000}
    tiny.write_hf_reward_model(tmp_path / "three", labels=3, **named)
    three = convert(tmp_path / "three", tmp_path / "three.nemo").contract
    assert (three.attributes, three.reward_model_type) == (NAMES, "regression")
    assert three.seq_length == 4096
    options = ContractOptions("plain", 77)
    other = convert(tmp_path / "three", tmp_path / "other.nemo", options=options).contract
    assert other.seq_length == 77
    assert other.template != three.template


def test_outputs_without_names_can_be_given_some(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    tiny.write_hf_reward_model(tmp_path / "hf", labels=2)
    given = ContractOptions(attributes=("helpful", "honest"))
    contract = convert(tmp_path / "hf", tmp_path / "rm.nemo", options=given).contract
    assert contract.attributes == ("helpful", "honest")
    wrong = ContractOptions(attributes=("helpful",))
    with pytest.raises(CheckpointError, match=r"attributes: got \['helpful'\], wanted 2"):
        convert(tmp_path / "hf", tmp_path / "other.nemo", options=wrong)


def test_a_template_has_to_write_the_conversation(changed_reward: Path, tmp_path: Path) -> None:
    """Else every reply would be the same text, and have the same reward."""
    (changed_reward / "chat_template.jinja").write_text("hello world")
    refused(
        changed_reward,
        tmp_path,
        r"it writes 'hello world', without the conversation's 'a question'",
    )


def test_without_a_chat_template_only_raw_texts_are_scored(
    changed_reward: Path, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    (changed_reward / "chat_template.jinja").unlink()
    assert "raw texts only" in str(convert(changed_reward, tmp_path / "rm.nemo"))
    options = ContractOptions(template="tokenizer")
    with pytest.raises(CheckpointError, match=r"template: got 'tokenizer', but the tokenizer"):
        convert(changed_reward, tmp_path / "other.nemo", options=options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"got shape \[1, 64\], wanted \[2, 64\]"),
        ({"id2label": {"zero": "a"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"id2label": None, "num_labels": "two"}, r"num_labels: got 'two' and 1 rows"),
        ({"id2label": None, "num_labels": 2}, r"num_labels: got 2 and 1 rows"),
        ({"architectures": {"a": "b"}}, r"architectures: got .*, wanted a list"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: got"),
        ({"model_type": "mamba"}, r"model_type: got 'mamba'"),
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label: got .*, wanted names for the numbers"),
        ({"problem_type": "single_label_classification"}, r"a classifier are no rewards"),
        ({"architectures": None}, r"architectures: got \[''\] beside score\.weight"),
        ({"is_causal": False}, r"is_causal: got False, which is not supported"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict, message: str, changed_reward: Path, tmp_path: Path
) -> None:
    edit(changed_reward, **changes)
    refused(changed_reward, tmp_path, message)


def test_a_template_with_a_date_is_refused_and_another_can_be_given(
    changed_reward: Path, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    dated = "{{ strftime_now('%d %b %Y') }}" + tiny.CHATML
    (changed_reward / "chat_template.jinja").write_text(dated)
    refused(changed_reward, tmp_path, "depends on the date")
    summary = convert(
        changed_reward, tmp_path / "rm.nemo", options=ContractOptions(template="chatml")
    )
    assert "strftime" not in summary.contract.template


def test_options_for_a_contract_need_a_model_without_one(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    tiny.write_hf_checkpoint(tmp_path / "base")
    options = ContractOptions(seq_length=100)
    refused(tmp_path / "base", tmp_path, "a base model has none", options=options)


def test_its_own_contract_is_checked_on_the_way_back(
    three: Path, layout: Any, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.hf.contract import ContractOptions

    export(three, tmp_path / "out", layout)
    with pytest.raises(CheckpointError, match="it brings its own"):
        convert(tmp_path / "out", tmp_path / "rm.nemo", options=ContractOptions(seq_length=9))

    def changed(name: str, change: Callable[[dict], None], message: str) -> None:
        folder = Path(shutil.copytree(tmp_path / "out", tmp_path / "changed"))
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            convert(folder, tmp_path / "rm.nemo")
        assert not (tmp_path / "rm.nemo").exists()
        shutil.rmtree(folder)

    changed("scoring_contract.json", lambda c: c.update(seq_length=9), "was changed after")
    changed("config.json", lambda c: c["id2label"].update({"0": "other"}), "id2label: got")
    changed("tokenizer.json", lambda c: c.update(normalizer={"type": "NFC"}), "fingerprint: got")
