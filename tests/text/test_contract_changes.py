"""What of a scoring contract training may change, and how people are told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.errors import ConfigError
from nemo_aligner.readout import Readout
from nemo_aligner.text.contract_changes import continue_contract, describe_differences
from nemo_aligner.text.contract_settings import build_contract
from nemo_aligner.text.tokenizer import Tokenizer
from tests.contracts import Contracts


def test_the_reward_model_to_start_from_decides_what_is_left_open(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    start = contracts(template="plain", add_bos=True, add_eos=True)
    config = contracts.config()
    contract = build_contract(config, tokenizer, Precision.fp32, start)
    assert (contract.template, contract.add_bos, contract.add_eos) == (start.template, True, True)
    assert continue_contract(contract, start, allow_change=False) == start
    config.data.template, config.data.seq_length = "chatml", 77
    contract = build_contract(config, tokenizer, Precision.fp32, start)
    with pytest.raises(
        ConfigError, match=r"model.data.template: .*model.data.seq_length: 1024 -> 77"
    ):
        continue_contract(contract, start, allow_change=False)
    assert continue_contract(contract, start, allow_change=True) == contract


def test_training_on_keeps_the_label_means(contracts: Contracts, tokenizer: Tokenizer) -> None:
    start = contracts(["help", "depth"]).with_label_means([1.5, 2.5])
    contract = continue_contract(contracts(["help", "depth"]), start, allow_change=False)
    assert contract.label_means == (1.5, 2.5)
    renamed = continue_contract(contracts(["help", "width"]), start, allow_change=True)
    assert renamed.label_means == (0.0, 0.0)


HEAD = "pretrained_checkpoint.new_head=true"
CHANGE = "pretrained_checkpoint.allow_contract_change=true"


@pytest.mark.parametrize(
    ("attributes", "changes", "advice"),
    [
        ((), {}, f"set {HEAD} to train another model"),
        (("width",), {}, f"set {HEAD} to train another model on its body; {CHANGE} keeps the head"),
        (("help", "depth"), {"seq_length": 77}, f"set {CHANGE} to train another model"),
        ((), {"seq_length": 77}, f"set {HEAD} and {CHANGE} to train another model"),
    ],
)
def test_the_advice_is_the_setting_that_works(
    contracts: Contracts, attributes: tuple[str, ...], changes: dict[str, Any], advice: str
) -> None:
    started = ["help"] if attributes == ("width",) else ["help", "depth"]
    start = contracts(started).with_label_means([1.5] * len(started))
    asked = contracts(list(attributes) or None, **changes)
    with pytest.raises(ConfigError) as caught:
        continue_contract(asked, start)
    assert advice in str(caught.value)
    assert str(caught.value).count("pretrained_checkpoint") == advice.count("pretrained_checkpoint")
    allowed = {"allow_change": CHANGE in advice, "new_head": HEAD in advice}
    assert continue_contract(asked, start, **allowed) is not None


def test_a_head_is_kept_for_as_many_attributes_only(contracts: Contracts) -> None:
    start = contracts(["help", "depth"])
    with pytest.raises(ConfigError, match=r"set pretrained_checkpoint\.new_head=true to train"):
        continue_contract(contracts(None), start, allow_change=True)
    with pytest.raises(ConfigError, match=r"set pretrained_checkpoint\.allow_contract_change=true"):
        continue_contract(contracts(None, seq_length=77), start, new_head=True)


def test_a_new_head_begins_without_label_means_and_weights(contracts: Contracts) -> None:
    start = dataclasses.replace(contracts(["help"]), attribute_weights=(0.5,), label_means=(2.0,))
    contract = continue_contract(contracts(["help"]), start, new_head=True)
    assert (contract.attribute_weights, contract.label_means) == ((1.0,), (0.0,))


def test_a_start_that_is_allowed_to_change_gives_what_fits(contracts: Contracts) -> None:
    start = dataclasses.replace(contracts(["help"]), attribute_weights=(0.5,), label_means=(2.0,))
    contract = continue_contract(contracts(["help"], seq_length=77), start, allow_change=True)
    assert (contract.attribute_weights, contract.label_means) == ((0.5,), (2.0,))
    assert contract.seq_length == 77


def test_short_values_are_shown_whole_and_long_ones_from_where_they_part() -> None:
    exact = "x" * 38  # with its quotes 40 characters
    assert describe_differences({"dtype": (exact, "y")}) == f"trainer.precision: '{exact}' -> 'y'"
    # A field without a setting goes by its own name.
    one, two = "a" * 60 + "b" * 60, "a" * 60 + "c" * 60
    assert describe_differences({"bos_id": (one, two)}) == (
        f"bos_id: ...{'a' * 20}{'b' * 20}... -> ...{'a' * 20}{'c' * 20}..."
    )
    assert describe_differences({"bos_id": ("p" + one, "q" + one)}) == (
        f"bos_id: 'p{'a' * 38}... -> 'q{'a' * 38}..."
    )


def test_weights_of_a_model_to_start_from_are_kept_unless_others_are_given(
    contracts: Contracts,
) -> None:
    names = ["help", "depth"]
    start = dataclasses.replace(contracts(names), attribute_weights=(1.0, -0.5))
    given = dataclasses.replace(contracts(names), attribute_weights=(0.0, 1.0))
    assert continue_contract(given, start).attribute_weights == (1.0, -0.5)
    assert continue_contract(given, start, new_weights=True).attribute_weights == (0.0, 1.0)


def test_a_head_that_is_kept_is_read_as_before_and_a_new_one_is_not(contracts: Contracts) -> None:
    start = contracts(["help"]).with_readout(Readout("bins", ((0.0, 1.0),)))
    assert continue_contract(contracts(["help"]), start) == start
    renamed = continue_contract(contracts(["x"]), start, allow_change=True)
    assert renamed.readout == start.readout
    assert continue_contract(contracts(["help"]), start, new_head=True).readout is None
