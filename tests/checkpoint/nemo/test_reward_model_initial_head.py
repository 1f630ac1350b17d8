"""Training can start from the head of another model, matched by the attributes' names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.initial_head import check_initial_head, init_head_from
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, read_text_rules
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import load_config
from nemo_aligner.config.model import HeadConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import Readout
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.training.build import _initialize_head
from nemo_aligner.utils.errors import ConfigError, SettingsError
from tests.checkpoint.refusals import refusals
from tests.harness import tiny
from tests.harness.once import Once


# Created before the layout fixture, because training initialises a layout itself.
@pytest.fixture(scope="module", autouse=True)
def first(once: Once) -> Path:
    """Archive of a reward model of helpfulness and verbosity."""
    return (
        once("first_stage", lambda folder: tiny.write_reward_nemo(folder / "rm.nemo")) / "rm.nemo"
    )


@pytest.fixture(scope="module")
def contract(first: Path) -> ScoringContract:
    _, contract_ = read_text_rules(first)
    assert contract_ is not None
    return contract_


def of(contract: ScoringContract, *names: str) -> ScoringContract:
    """Return the contract of a run with these attributes."""
    numbers = (1.0,) * len(names)
    return dataclasses.replace(
        contract, attributes=names, attribute_weights=numbers, label_means=numbers
    )


def new_model(first: Path, layout: Any, attributes: int, **options: Any) -> Any:
    required = {"num_attributes": attributes, "precision": Precision.fp32, "new_head": True}
    return load_pretrained(first, layout, **required, **options)


def test_initial_head_gives_an_attribute_the_row_of_its_name(
    first: Path, contract: ScoringContract, layout: Any
) -> None:
    with open_nemo(first) as folder:
        stored = folder.store.read("model.rm_head.weight")
        shape = ModelShape.from_config(folder.config)
    for attributes, names, rows in (
        (("verbosity", "helpfulness"), {}, [1, 0]),
        (("reward",), {"reward": "helpfulness"}, [0]),
        (("verbosity",), {}, [1]),
    ):
        model = new_model(first, layout, len(attributes)).model
        assert not torch.equal(model.rm_head.weight, stored[rows])
        init_head_from(model, first, of(contract, *attributes), shape, names)
        torch.testing.assert_close(model.rm_head.weight.detach(), stored[rows], rtol=0, atol=0)


def test_initial_head_that_does_not_fit_is_refused(
    first: Path, contract: ScoringContract, layout: Any
) -> None:
    bins = contract.with_readout(Readout("bins", ((0.0, 1.0),) * 2))
    mean = dataclasses.replace(contract, scored_position="reply_mean", reply_marker=(1,))
    missing, reward = of(contract, "clear", "verbosity"), of(contract, "reward")
    base = first.with_suffix(".base")
    with refusals(ConfigError) as refused:
        for path, run_contract, names, pattern in (
            (first, missing, {}, "has the attributes helpfulness, verbosity, and lacks clear"),
            (
                first,
                reward,
                {"reward": "clear"},
                "lacks clear.*pretrained_checkpoint.rm_head_names",
            ),
            (first, of(contract, "verbosity"), {"x": "verbosity"}, "rm_head_names: got x, wanted"),
            (first, bins, {}, r"got a head with one output .* wanted \('bins', "),
            (first, mean, {}, "reads last_token, wanted reply_mean"),
            (base, contract, {}, "it has no scoring contract"),
        ):
            with refused(pattern, pattern):
                check_initial_head(path, run_contract, names)
        loaded = new_model(first, layout, 2, head=HeadConfig(bias=True))
        shape = ModelShape.from_config(loaded.config)
        with refused("bias", r"a head that is linear with .* 64, wanted .* linear with bias"):
            init_head_from(loaded.model, first, contract, shape, {})


def test_initial_head_is_for_a_new_one_and_its_names_for_a_model(first: Path, layout: Any) -> None:
    config = load_config(TrainConfig, [f"pretrained_checkpoint.load_rm_head_weights={first}"])
    kept = load_pretrained(first, layout, num_attributes=2, precision=Precision.fp32)
    with pytest.raises(ConfigError, match=r"also set pretrained_checkpoint\.new_head=true"):
        _initialize_head(SimpleNamespace(config=config), kept)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"rm_head_names: got .*, wanted {}, or load_rm"):
        load_config(TrainConfig, ["pretrained_checkpoint.rm_head_names={reward: help}"])


def test_initial_head_of_a_ranking_is_that_of_a_regression(first: Path, tmp_path: Path) -> None:
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
    assert "has the attributes helpfulness, verbosity, and lacks reward" in refused.stderr
    done = tiny.run_script(
        example, *settings, "pretrained_checkpoint.rm_head_names={reward: verbosity}"
    )
    assert f"the head starts from the head of {first}" in done.stdout
    (trained,) = (tmp_path / "run").rglob("megatron_gpt.nemo")
    with open_nemo(first) as one, open_nemo(trained) as other:
        rows, row = (folder.store.read("model.rm_head.weight") for folder in (one, other))
    torch.testing.assert_close(row, rows[1:], rtol=0, atol=1e-6)
