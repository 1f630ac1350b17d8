"""A second stage begins with a first stage's head, by the names of attributes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.nemo.first_head import check_first_head, load_first_head
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, read_text_rules
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import load_config
from nemo_aligner.config.model import HeadConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.errors import ConfigError, SettingsError
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.readout import Readout
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.training.build import _begin_head
from tests import tiny
from tests.once import Once


# Before there is a layout: it is made in one of its own.
@pytest.fixture(scope="module", autouse=True)
def first(once: Once) -> Path:
    """A reward model of helpfulness and verbosity."""
    return (
        once("first_stage", lambda folder: tiny.write_reward_nemo(folder / "rm.nemo")) / "rm.nemo"
    )


@pytest.fixture(scope="module")
def contract(first: Path) -> ScoringContract:
    _, found = read_text_rules(first)
    assert found is not None
    return found


def of(contract: ScoringContract, *names: str) -> ScoringContract:
    """The rules of a run of these attributes."""
    numbers = (1.0,) * len(names)
    return dataclasses.replace(
        contract, attributes=names, attribute_weights=numbers, label_means=numbers
    )


def new_model(first: Path, layout: Any, attributes: int, **options: Any) -> Any:
    given = {"num_attributes": attributes, "precision": Precision.fp32, "new_head": True}
    return load_pretrained(first, layout, **given, **options)


@pytest.mark.parametrize(
    ("attributes", "names", "rows"),
    [
        (("verbosity", "helpfulness"), {}, [1, 0]),
        (("reward",), {"reward": "helpfulness"}, [0]),
        (("verbosity",), {}, [1]),
    ],
)
def test_an_attribute_gets_the_row_of_its_name(
    attributes: tuple[str, ...],
    names: dict[str, str],
    rows: list[int],
    first: Path,
    contract: ScoringContract,
    layout: Any,
) -> None:
    loaded = new_model(first, layout, len(attributes))
    with open_nemo(first) as folder:
        wanted = folder.store.read("model.rm_head.weight")[rows]
        shape = ModelShape.from_config(folder.config)
    assert not torch.equal(loaded.model.rm_head.weight, wanted)
    load_first_head(loaded.model, first, of(contract, *attributes), shape, names)
    torch.testing.assert_close(loaded.model.rm_head.weight.detach(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("attributes", "names", "message"),
    [
        (("clear", "verbosity"), {}, "got the attributes helpfulness, verbosity, wanted clear, t"),
        (("reward",), {"reward": "clear"}, "wanted clear, too; pretrained_checkpoint.rm_head_n"),
        (("verbosity",), {"x": "verbosity"}, "rm_head_names: got x, wanted attributes of this ru"),
    ],
)
def test_a_name_that_is_not_there_is_an_error(
    attributes: tuple[str, ...],
    names: dict[str, str],
    message: str,
    first: Path,
    contract: ScoringContract,
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_first_head(first, of(contract, *attributes), names)


@pytest.mark.usefixtures("layout")
def test_a_head_that_is_read_otherwise_is_an_error(first: Path, contract: ScoringContract) -> None:
    bins = contract.with_readout(Readout("bins", ((0.0, 1.0),) * 2))
    with pytest.raises(ConfigError, match=r"got a head with one output .* wanted \('bins', "):
        check_first_head(first, bins, {})
    mean = dataclasses.replace(contract, scored_position="reply_mean", reply_marker=(1,))
    with pytest.raises(ConfigError, match="reads last_token, wanted reply_mean"):
        check_first_head(first, mean, {})


def test_a_head_that_is_made_otherwise_is_an_error(
    first: Path, contract: ScoringContract, layout: Any
) -> None:
    loaded = new_model(first, layout, 2, head=HeadConfig(bias=True))
    shape = ModelShape.from_config(loaded.config)
    with pytest.raises(ConfigError, match=r"a head that is linear, of 64 .* is linear with bias"):
        load_first_head(loaded.model, first, contract, shape, {})


def test_a_base_model_has_none(first: Path, contract: ScoringContract) -> None:
    with pytest.raises(ConfigError, match="it has no scoring contract, wanted a reward model"):
        check_first_head(first.with_suffix(".base"), contract, {})


def test_a_head_that_is_kept_is_not_replaced(first: Path, layout: Any) -> None:
    config = load_config(TrainConfig, [f"pretrained_checkpoint.load_rm_head_weights={first}"])
    kept = load_pretrained(first, layout, num_attributes=2, precision=Precision.fp32)
    with pytest.raises(ConfigError, match=r"wanted pretrained_checkpoint\.new_head=true, too"):
        _begin_head(config, SimpleNamespace(), kept)  # type: ignore[arg-type]


def test_names_without_a_model_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"rm_head_names: got .*, wanted {}, or load_rm"):
        load_config(TrainConfig, ["pretrained_checkpoint.rm_head_names={reward: help}"])


def test_a_ranking_begins_with_what_a_regression_has_learned(first: Path, tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 12)
    settings = [
        f"pretrained_checkpoint.restore_from_path={first}",
        "pretrained_checkpoint.new_head=true",
        f"pretrained_checkpoint.load_rm_head_weights={first}",
        f"model.data.data_prefix.train=[{pairs}]",
        f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
        "model.global_batch_size=4",
        "model.optim.lr=1e-9",
        "trainer.rm.max_steps=1",
    ]
    example = "examples/train_reward_model.py"
    refused = tiny.run_script(example, "--dry-run", *settings, check=False)
    assert "got the attributes helpfulness, verbosity, wanted reward, too" in refused.stderr
    done = tiny.run_script(
        example, *settings, "pretrained_checkpoint.rm_head_names={reward: verbosity}"
    )
    assert f"the head begins as that of {first}" in done.stdout
    (trained,) = (tmp_path / "run").rglob("megatron_gpt.nemo")
    with open_nemo(first) as one, open_nemo(trained) as other:
        rows, row = (each.store.read("model.rm_head.weight") for each in (one, other))
    torch.testing.assert_close(row, rows[1:], rtol=0, atol=1e-6)
