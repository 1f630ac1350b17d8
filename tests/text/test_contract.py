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
from nemo_aligner.text.contract import (
    EncodedText,
    OverlongError,
    ScoringContract,
    build_contract,
    check_expected,
    continue_contract,
    describe_differences,
)
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
        "tokenizer_fingerprint": "c", "reward_model_type": "binary_ranking",
    }  # fmt: skip
    told: dict[str, Any] = {"reward_mean": (1.0,), "reward_std": (1.0,), "measured_on": "x"}
    fields = {field.name for field in dataclasses.fields(FIXED)} - {"scored_position"}
    assert set(changes) | set(told) == fields  # that one has only one value
    for name, value in changes.items():
        assert dataclasses.replace(FIXED, **{name: value}).hash != FIXED.hash, name
    assert dataclasses.replace(FIXED, **told).hash == FIXED.hash


def test_a_contract_survives_json() -> None:
    measured = FIXED.with_statistics([0.5, 1.0], [1.0, 2.0], "heldout.jsonl")
    for contract in (FIXED, measured):
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
