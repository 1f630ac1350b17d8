"""One rule from a text to ids, the same in every process, and guarded by its hash."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import Overlong, Precision
from nemo_aligner.errors import CheckpointError, ConfigError, DataError
from nemo_aligner.readout import Readout
from nemo_aligner.text.contract import (
    EncodedText,
    OverlongError,
    ScoringContract,
)
from nemo_aligner.text.contract_changes import check_expected, describe_differences
from nemo_aligner.text.contract_settings import build_contract
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer
from tests.contracts import Contracts

CHAT = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the cat sings"}]
FIXED = ScoringContract(
    template="{{ messages }}é",
    add_bos=True,
    add_eos=False,
    bos_id=1,
    eos_id=None,
    overlong="drop",
    seq_length=1024,
    attributes=("help", "depth"),
    attribute_weights=(1.0, 0.5),
    label_means=(0.1, 3.3333333333333335),
    dtype="fp32",
    tokenizer_fingerprint="ab" * 32,
    reward_model_type="regression",
)
READ = Readout("bins", ((0.0, 1.0, 2.0),) * 2).to_json()
FIXED_HASH = "53aeaabacc5eb9764553adf9bf9028fbf740e80021ec9c2cf2be11ce772d86ec"


def test_the_hash_never_changes() -> None:
    """Archives in the world carry it: a new hash of old fields needs a new VERSION."""
    assert FIXED.hash == FIXED_HASH
    code = (
        "import json, sys; from nemo_aligner.text.contract import ScoringContract; "
        "print(ScoringContract.from_dict(json.load(sys.stdin)).hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(FIXED.to_dict()),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == FIXED_HASH


def test_every_field_that_changes_a_score_changes_the_hash() -> None:
    changes: dict[str, Any] = {
        "template": "x", "add_bos": False, "add_eos": True, "bos_id": 2, "eos_id": 2,
        "overlong": "error", "seq_length": 2, "attributes": ("depth", "help"),
        "attribute_weights": (1.0, 1.0), "label_means": (0.1, 3.3333333333333), "dtype": "bf16",
        "tokenizer_fingerprint": "c", "reward_model_type": "binary_ranking", "shaping": "{}",
        "readout": READ,
    }  # fmt: skip
    told: dict[str, Any] = {"reward_mean": (1.0,), "reward_std": (1.0,), "measured_on": "x"}
    together = {"scored_position": "reply_mean", "reply_marker": (1, 2)}
    fields = {field.name for field in dataclasses.fields(FIXED)}
    assert set(changes) | set(told) | set(together) == fields
    assert dataclasses.replace(FIXED, **together).hash != FIXED.hash
    for name, value in changes.items():
        assert dataclasses.replace(FIXED, **{name: value}).hash != FIXED.hash, name
    assert dataclasses.replace(FIXED, **told).hash == FIXED.hash


def test_a_contract_survives_json() -> None:
    measured = FIXED.with_statistics([0.5, 1.0], [1.0, 2.0], "heldout.jsonl")
    shaped = dataclasses.replace(FIXED, shaping='{"clip": [-1.0, 1.0]}')
    assert "shaping" not in FIXED.to_dict()  # nor in those of before there was any
    assert FIXED.differences(shaped) == {"shaping": (None, shaped.shaping)}
    assert shaped.differences(FIXED) == {"shaping": (shaped.shaping, None)}
    read = dataclasses.replace(FIXED, readout=READ)
    assert "readout" not in FIXED.to_dict()
    for contract in (FIXED, measured, shaped, read):
        assert ScoringContract.from_dict(json.loads(json.dumps(contract.to_dict()))) == contract


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 2}, "changed after it was written"),
        ({"version": 9}, "got version 9, wanted 1"),
        ({"surprise": 1}, "unknown or missing fields: surprise"),
        ({"hash": "0"}, "changed after it was written"),
        ({"label_means": None}, "scoring contract: "),
        ({"label_means": [1.0]}, "2 attributes, 2 weights and 1 label means"),
        ({"readout": Readout("bins", ((0.0, 1.0),)).to_json()}, "got 1 attributes, wanted 2"),
        ({"readout": "[1]"}, "readout: got"),
    ],
)
def test_a_changed_contract_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ScoringContract.from_dict({**FIXED.to_dict(), **change})


def test_a_conversation_gets_what_the_template_writes(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    for add in (None, True):
        encoded = contracts(add_bos=add, add_eos=add).encode(tokenizer, CHAT)
        assert tokenizer.decode(encoded.token_ids) == (
            "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nthe cat sings<|im_end|>\n"
        )


def test_raw_text_gets_bos_and_eos_once(contracts: Contracts, tokenizer: Tokenizer) -> None:
    bare = tokenizer.encode("the cat")
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert contracts().encode(tokenizer, "the cat").token_ids == bare
    both = contracts(add_bos=True, add_eos=True)
    assert both.encode(tokenizer, "the cat").token_ids == [bos, *bare, eos]
    written = "<|im_start|>the cat<|im_end|>"
    assert both.encode(tokenizer, written).token_ids == [bos, *bare, eos]


def test_null_follows_the_tokenizers_own_habit(tokenizer_folder: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    habitual = load_tokenizer(tokenizer_folder)
    habitual._backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", habitual.bos_id)]
    )
    contract = Contracts(habitual)()
    assert (contract.add_bos, contract.add_eos) == (True, False)
    assert contract.encode(habitual, "a").token_ids == [habitual.bos_id, *habitual.encode("a")]
    assert not Contracts(habitual)(add_bos=False).add_bos


def test_a_double_bos_is_refused(
    contracts: Contracts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="begins with BOS twice"):
        contracts().encode(tokenizer, "<|im_start|><|im_start|>a")
    path = tmp_path / "double.jinja"
    path.write_text("{{ bos_token }}<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"model.data.template: .*it writes BOS .* twice"):
        contracts(template=str(path))


@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_truncation_keeps_the_end(contracts: Contracts, tokenizer: Tokenizer, length: int) -> None:
    contract = contracts(seq_length=length, overlong=Overlong.truncate_left, template="plain")
    whole = contract.tokenize(tokenizer, [CHAT])[0]
    assert whole[0] != contract.bos_id
    assert contract.encode(tokenizer, CHAT) == EncodedText(whole[-length:], True)
    with_bos = contract.fit([contract.bos_id or 0, *whole])
    kept = [contract.bos_id, *whole[-(length - 1) :]] if length > 1 else whole[-1:]
    assert with_bos == EncodedText(kept, True)  # type: ignore[arg-type]


def test_other_rules_refuse_what_is_too_long(contracts: Contracts, tokenizer: Tokenizer) -> None:
    size = len(contracts().encode(tokenizer, CHAT).token_ids)
    for rule in (Overlong.drop, Overlong.error):
        assert not contracts(seq_length=size, overlong=rule).encode(tokenizer, CHAT).truncated
        with pytest.raises(OverlongError, match=f"got {size} tokens, wanted at most {size - 1}"):
            contracts(seq_length=size - 1, overlong=rule).encode(tokenizer, CHAT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tokens"),
        ([], "got an empty conversation"),
        (
            [{"role": "judge", "content": "a"}, CHAT[1]],
            "message 1: got role 'judge', wanted one of",
        ),
        ([CHAT[0]], "got role 'user', wanted 'assistant'"),
        ([CHAT[0], {"role": "assistant", "content": "a<|im_end|>\n"}], "message 2 ends with"),
        (None, "wanted a text or a list of messages"),
        (CHAT[:1], "wanted 'assistant'"),
        ([{"role": "assistant", "content": "x", "name": "y"}], "exactly 'role' and 'content'"),
        ("\ud800", "valid Unicode"),
    ],
)
def test_malformed_texts_are_data_errors(
    contracts: Contracts, tokenizer: Tokenizer, text: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        contracts().encode(tokenizer, text)  # type: ignore[arg-type]


def test_without_a_template_conversations_are_refused_with_the_way_out(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = dataclasses.replace(contracts(), template="")
    assert contract.encode(tokenizer, "the cat").token_ids
    with pytest.raises(DataError, match=r"model.data.template=chatml"):
        contract.encode(tokenizer, CHAT)


def test_build_contract_reads_the_config(contracts: Contracts, tokenizer: Tokenizer) -> None:
    ranking = contracts()
    assert (ranking.attributes, ranking.label_means) == (("reward",), (0.0,))
    config = contracts.config(["help", "depth"])
    contract = build_contract(config, tokenizer, Precision.bf16)
    assert contract.attributes == ("help", "depth")
    assert (contract.dtype, contract.reward_model_type) == ("bf16", "regression")
    assert contract.tokenizer_fingerprint == tokenizer.fingerprint
    assert contract.with_label_means([1, 2.5]).label_means == (1.0, 2.5)


def test_asking_for_a_token_that_is_not_there_is_an_error(tokenizer_folder: Path) -> None:
    bare = load_tokenizer(tokenizer_folder)
    bare.bos_id = None
    with pytest.raises(ConfigError, match=r"model.data.add_bos: got true.*no BOS token"):
        Contracts(bare)(add_bos=True)


def test_differences_name_settings_and_both_values() -> None:
    other = dataclasses.replace(
        FIXED, seq_length=512, dtype="bf16", reward_mean=(1.0, 1.0), template="{{ messages }}e"
    )
    assert FIXED.differences(FIXED) == {}
    assert FIXED.differences(other) == {
        "template": ("{{ messages }}é", "{{ messages }}e"),
        "seq_length": (1024, 512),
        "dtype": ("fp32", "bf16"),
    }
    shown = describe_differences(FIXED.differences(other))
    assert shown == (
        "model.data.template: '{{ messages }}é' -> '{{ messages }}e'; "
        "model.data.seq_length: 1024 -> 512; trainer.precision: 'fp32' -> 'bf16'"
    )
    long = dataclasses.replace(FIXED, template="x" * 300 + "one")
    longer = dataclasses.replace(FIXED, template="x" * 300 + "two")
    shown = describe_differences(long.differences(longer))
    assert "xxxone'" in shown
    assert "xxxtwo'" in shown
    assert len(shown) < 150


def test_another_precision_is_another_contract() -> None:
    assert FIXED.with_dtype(None) is FIXED
    assert FIXED.with_dtype(Precision.fp32).hash == FIXED.hash
    assert FIXED.with_dtype(Precision.bf16).hash != FIXED.hash


def test_an_expected_contract_is_named_with_the_one_that_came() -> None:
    check_expected(FIXED, None, "expect_contract")
    check_expected(FIXED, FIXED_HASH, "expect_contract")
    with pytest.raises(ConfigError, match=rf"expect_contract: got .* {FIXED_HASH}, wanted ab12"):
        check_expected(FIXED, "ab12", "expect_contract")


def test_whole_numbers_and_fractions_are_the_same_rule() -> None:
    changes: dict[str, Any] = {"attribute_weights": (1, 2), "label_means": (0, 3)}
    whole = dataclasses.replace(FIXED, **changes)
    same = {name: tuple(map(float, value)) for name, value in changes.items()}
    assert whole.hash == dataclasses.replace(FIXED, **same).hash
    assert [type(value) for value in (*whole.attribute_weights, *whole.label_means)] == [float] * 4
    assert FIXED.with_label_means([1, 2]).label_means == (1.0, 2.0)


@pytest.mark.parametrize("change", ["attributes", "attribute_weights", "label_means"])
def test_attributes_weights_and_means_are_of_one_number_and_at_least_one(change: str) -> None:
    one_more = {change: (*getattr(FIXED, change), "more" if change == "attributes" else 1.0)}
    with pytest.raises(DataError, match="wanted the same number, at least 1"):
        dataclasses.replace(FIXED, **one_more)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="got 0 attributes, 0 weights and 0 label means"):
        dataclasses.replace(FIXED, attributes=(), attribute_weights=(), label_means=())


def test_a_contract_as_a_dict_is_plain_json_and_cannot_be_changed_in_place() -> None:
    content = FIXED.to_dict()
    assert json.loads(json.dumps(content)) == content
    with pytest.raises(dataclasses.FrozenInstanceError):
        FIXED.seq_length = 2  # type: ignore[misc]


def test_a_missing_field_is_named_beside_an_unknown_one() -> None:
    content = {**FIXED.to_dict(), "surprise": 1}
    del content["dtype"]
    with pytest.raises(CheckpointError, match="unknown or missing fields: dtype, surprise"):
        ScoringContract.from_dict(content)
    with pytest.raises(CheckpointError, match="got version None, wanted 1"):
        ScoringContract.from_dict({})


def test_statistics_are_kept_and_change_no_score() -> None:
    measured = FIXED.with_statistics([0.5, 1.0], [1.0, 2.0], "heldout.jsonl")
    assert (measured.reward_mean, measured.reward_std) == ((0.5, 1.0), (1.0, 2.0))
    assert measured.measured_on == "heldout.jsonl"
    assert measured.hash == FIXED_HASH
    assert measured.differences(FIXED) == {}


def test_only_a_reply_is_counted(contracts: Contracts, tokenizer: Tokenizer) -> None:
    contract = contracts(add_bos=True, seq_length=2)
    counts = contract.count_reply_tokens(tokenizer, [CHAT, "the cat", ""])
    assert counts == [len(tokenizer.encode(text)) for text in ("the cat sings", "the cat", "")]


def test_a_template_that_does_not_end_is_refused_where_it_is_read(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = contracts()
    contract.check_template_ends(tokenizer)
    dataclasses.replace(contract, template="").check_template_ends(tokenizer)
    broken = dataclasses.replace(contract, template="{% for %}")
    with pytest.raises(DataError, match="the chat template cannot write this conversation"):
        broken.check_template_ends(tokenizer)


@pytest.mark.parametrize("rule", [Overlong.drop, Overlong.truncate_left])
def test_what_fits_exactly_is_left_alone(rule: Overlong) -> None:
    contract = dataclasses.replace(FIXED, overlong=rule.value, seq_length=3)
    assert contract.fit([1, 2, 3]) == EncodedText([1, 2, 3], False)
    if rule is Overlong.truncate_left:
        # BOS is 1: it stays, unless there is no space beside it.
        assert contract.fit([1, 2, 3, 4]) == EncodedText([1, 3, 4], True)
        assert contract.fit([5, 1, 2, 3, 4]) == EncodedText([2, 3, 4], True)
        none = dataclasses.replace(contract, bos_id=None)
        assert none.fit([1, 2, 3, 4]) == EncodedText([2, 3, 4], True)
        two = dataclasses.replace(contract, seq_length=2)
        assert two.fit([1, 2, 3, 4]) == EncodedText([1, 4], True)


def test_two_bos_inside_a_text_are_its_own(contracts: Contracts, tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_id
    text = "a<|im_start|><|im_start|>"
    ids = contracts(add_bos=True).encode(tokenizer, text).token_ids
    assert ids == [bos, *tokenizer.encode("a"), bos, bos]
    assert contracts().encode(tokenizer, "<|im_start|>").token_ids == [bos]


def test_an_end_of_turn_inside_a_message_may_stay(
    contracts: Contracts, tokenizer: Tokenizer
) -> None:
    inside = [CHAT[0], {"role": "assistant", "content": "a<|im_end|>b"}]
    assert contracts().encode(tokenizer, inside).token_ids
    with pytest.raises(DataError, match=r"message 1 ends with '<\|im_end\|>', which the chat"):
        contracts().encode(tokenizer, [{"role": "user", "content": "a<|im_end|>"}, CHAT[1]])


@pytest.mark.parametrize(("add", "token"), [("add_bos", "BOS"), ("add_eos", "EOS")])
def test_a_token_that_is_not_there_may_be_left_out(
    add: str, token: str, tokenizer_folder: Path
) -> None:
    bare = load_tokenizer(tokenizer_folder)
    bare.bos_id = bare.eos_id = None
    for setting in (None, False):
        assert not getattr(Contracts(bare)(**{add: setting}), add)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"model.data.{add}: got true.*no {token} token"):
        Contracts(bare)(**{add: True})  # type: ignore[arg-type]
