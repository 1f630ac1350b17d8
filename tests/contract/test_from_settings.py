"""Which fields of a contract training may change, and the errors about differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nemo_aligner.config.common import Overlong, Precision, RecordKind
from nemo_aligner.contract.from_settings import (
    build_contract,
    continue_contract,
    describe_differences,
    with_aggregate,
)
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import ConfigError
from tests.contract.test_contract import FIXED
from tests.harness.contracts import Contracts


def test_start_decides_what_is_left_open(contracts: Contracts, tokenizer: Tokenizer) -> None:
    start = contracts(template="plain", add_bos=True, add_eos=True)
    config = contracts.config()
    contract = build_contract(config, tokenizer, Precision.fp32, start)
    assert (contract.template, contract.add_bos, contract.add_eos) == (start.template, True, True)
    assert continue_contract(contract, start, allow_change=False) == start
    limits = {"seq_length": 33, "overlong": "truncate_left"}
    short = dataclasses.replace(start, **limits)
    contract = build_contract(config, tokenizer, Precision.fp32, short)
    assert continue_contract(contract, short, allow_change=False) == short
    config.data.template, config.data.seq_length = "chatml", 77
    config.data.overlong = Overlong.error
    contract = build_contract(config, tokenizer, Precision.fp32, start)
    with pytest.raises(
        ConfigError, match=r"model.data.template: .*model.data.seq_length: 1024 -> 77"
    ) as caught:
        continue_contract(contract, start, allow_change=False)
    advice = (
        "To keep the contract of that model, set model.data.template=null model.data.overlong=drop "
        "model.data.seq_length=1024. Or set pretrained_checkpoint.allow_contract_change=true to "
    )
    assert advice in str(caught.value)
    assert continue_contract(contract, start, allow_change=True) == contract


HEAD = "pretrained_checkpoint.new_head=true"
CHANGE = "pretrained_checkpoint.allow_contract_change=true"


def test_advice_is_the_setting_that_works(contracts: Contracts) -> None:
    renamed = (
        f"set {HEAD} to train another model with a new head on its body; "
        f"to keep the head instead, set {CHANGE}"
    )
    cases: list[tuple[list[str], list[str] | None, dict[str, Any], str]] = [
        (["help", "depth"], None, {}, f"set {HEAD} to train another model"),
        (["help"], ["width"], {}, renamed),
        (["help", "depth"], ["help", "depth"], {"seq_length": 77}, f"set {CHANGE} to train"),
        (["help", "depth"], None, {"seq_length": 77}, f"set {HEAD} and {CHANGE} to train"),
    ]
    for started, attributes, changes, advice in cases:
        start = contracts(started).with_label_means([1.5] * len(started))
        asked = contracts(attributes, **changes)
        with pytest.raises(ConfigError) as caught:
            continue_contract(asked, start)
        said = str(caught.value)
        assert advice in said
        assert said.count("pretrained_checkpoint") == advice.count("pretrained_checkpoint")
        allowed = {"allow_change": CHANGE in advice, "new_head": HEAD in advice}
        assert continue_contract(asked, start, **allowed) is not None
    # One of the two settings does not imply the other.
    start = contracts(["help", "depth"])
    with pytest.raises(ConfigError, match=rf"set {HEAD} to train"):
        continue_contract(contracts(None), start, allow_change=True)
    with pytest.raises(ConfigError, match=rf"set {CHANGE}"):
        continue_contract(contracts(None, seq_length=77), start, new_head=True)


def test_start_of_another_rule_for_steps_is_kept_by_nobody(contracts: Contracts) -> None:
    """Otherwise the rewards of steps would silently be combined by another rule."""
    plain = dataclasses.replace(contracts(None), scored_position="turns")
    assert with_aggregate(plain, "last") == plain
    assert with_aggregate(contracts(None), "min") == contracts(None), "without steps"
    least = with_aggregate(plain, "min")
    assert least.aggregate == "min"
    assert with_aggregate(least, "last") == plain
    for contract, start in ((least, plain), (plain, least)):
        with pytest.raises(ConfigError, match=r"model\.objective_kwargs\.aggregate: ") as caught:
            continue_contract(contract, start)
        assert HEAD in str(caught.value)
        for allowed in ({"new_head": True}, {"allow_change": True}):
            assert continue_contract(contract, start, **allowed) == contract


def test_start_keeps_weights_label_means_and_readout(contracts: Contracts) -> None:
    """A kept head keeps its attribute weights, unless the settings have other ones."""
    readout = Readout("bins", ((0.0, 1.0),))
    start = contracts(["help"]).with_readout(readout)
    assert start.readout == readout.to_json()
    assert start.with_readout(None) == contracts(["help"])
    assert (start.outputs_per_attribute, contracts(["help"]).outputs_per_attribute) == (2, 1)
    assert (start.record_kind, contracts(None).record_kind) == (
        RecordKind.rating,
        RecordKind.comparison,
    )
    start = dataclasses.replace(start, attribute_weights=(0.5,), label_means=(2.0,))
    given = dataclasses.replace(contracts(["help"]), attribute_weights=(4.0,))
    assert continue_contract(given, start) == start
    other_weights = dataclasses.replace(start, attribute_weights=(4.0,))
    assert continue_contract(given, start, new_weights=True) == other_weights
    shorter = continue_contract(contracts(["help"], seq_length=77), start, allow_change=True)
    assert shorter == dataclasses.replace(start, seq_length=77)
    renamed = continue_contract(contracts(["width"]), start, allow_change=True)
    assert (renamed.label_means, renamed.readout) == ((0.0,), start.readout)
    new = continue_contract(contracts(["help"]), start, new_head=True)
    assert (new.attribute_weights, new.label_means, new.readout) == ((1.0,), (0.0,), None)


def test_differences_are_shown_as_settings_with_both_values() -> None:
    other = dataclasses.replace(
        FIXED, seq_length=512, dtype="bf16", reward_mean=(1.0, 1.0), template="{{ messages }}e"
    )
    assert FIXED.differences(FIXED) == {}
    assert FIXED.differences(other) == {
        "template": ("{{ messages }}é", "{{ messages }}e"),
        "seq_length": (1024, 512),
        "dtype": ("fp32", "bf16"),
    }
    assert describe_differences(FIXED.differences(other)) == (
        "model.data.template: '{{ messages }}é' -> '{{ messages }}e'; "
        "model.data.seq_length: 1024 -> 512; trainer.precision: 'fp32' -> 'bf16'"
    )


def test_differences_of_short_values_are_whole_and_of_long_ones_from_where_they_part() -> None:
    exact = "x" * 38  # 40 characters with its quotes
    assert describe_differences({"dtype": (exact, "y")}) == f"trainer.precision: '{exact}' -> 'y'"
    # A field without a setting is called by its name.
    one, two = "a" * 60 + "b" * 60, "a" * 60 + "c" * 60
    assert describe_differences({"bos_id": (one, two)}) == (
        f"bos_id: ...{'a' * 20}{'b' * 20}... -> ...{'a' * 20}{'c' * 20}..."
    )
    assert describe_differences({"bos_id": ("p" + one, "q" + one)}) == (
        f"bos_id: 'p{'a' * 38}... -> 'q{'a' * 38}..."
    )
