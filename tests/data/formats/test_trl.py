"""Data sets of TRL's RewardTrainer get the same token ids as in TRL."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.config.common import Precision
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.data.records import PAIR_COLUMNS
from nemo_aligner.evaluation.run import evaluate
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data import files
from tests.harness import tiny
from tests.harness.contracts import Contracts

USER = {"role": "user", "content": "who is it?"}
SYSTEM = {"role": "system", "content": "be good"}
CHOSEN, REJECTED = ({"role": "assistant", "content": text} for text in ("the cat", "no"))
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}],
}
EXPLICIT = {"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]}
RAW = [
    {"prompt": "the sky is", "chosen": " blue", "rejected": " green"},
    {"prompt": "who?\n", "chosen": "a cat", "rejected": "no\n"},
]
# Data that is raw text in TRL, and here only with format=trl.
STRINGS: dict[str, list[dict[str, Any]]] = {
    "standard, explicit prompt": RAW,
    "standard, implicit prompt": [
        {key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in RAW
    ],
}
# EOS is not added to a text that ends with it.
WITH_EOS = [{"prompt": "who?", "chosen": "a cat<|im_end|>", "rejected": "no"}]
# Data that the chat template renders, as in TRL.
CHATS: dict[str, list[dict[str, Any]]] = {
    "conversational, explicit prompt": [EXPLICIT],
    "conversational, implicit prompt": [{"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]}],
    "several turns": [{**EXPLICIT, "prompt": [SYSTEM, USER, CHOSEN, USER]}],
    "a margin": [{**EXPLICIT, "margin": 0.5}],
    "tools": [{**EXPLICIT, "chosen": [CALL], "tools": [TOOL]}],
    "tools as JSON": [{**EXPLICIT, "chosen": [CALL], "tools": json.dumps([TOOL])}],
}
# Data that the scoring contract cannot describe, and why.
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a row's own variables": (
        [{**EXPLICIT, "chat_template_kwargs": {"enable_thinking": True}}],
        r"chat_template_kwargs of single records.* model.data.chat_template_kwargs",
    ),
    "token ids": (
        [{"chosen_ids": [5, 6], "rejected_ids": [7]}],
        "These are token ids of a data set that TRL has tokenized. Pass the texts",
    ),
    "token ids of earlier names": (
        [{"chosen_input_ids": [5, 6], "rejected_input_ids": [7]}],
        "These are token ids of a data set that TRL has tokenized. Pass the texts",
    ),
}


class OfTrl(NamedTuple):
    """A tokenizer, and the token ids that TRL makes with it by data set."""

    tokenizer: Tokenizer
    ids: dict[str, Any]


def write_tokenizer(folder: Path, adds_bos: bool) -> Path:
    """The tiny tokenizer with a template that renders tools; it may add BOS."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tiny.write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = BUILT_IN_TEMPLATES["chatml"]
    if adds_bos:
        begun = [("<|im_start|>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=begun
        )
    tokenizer.save_pretrained(folder)
    return folder


def read_ids(
    folder: Path, contracts: Contracts, rows: list[dict[str, Any]], **data: Any
) -> list[list[list[int]]]:
    path = files.write(folder / "rows.jsonl", *rows)
    train = files.build(contracts, [path], seq_length=512, **data).train
    return [[ids.tolist() for ids in train.record(number)] for number in range(len(train))]


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory, trl_python: Path) -> dict[bool, OfTrl]:
    """Tokenizers that add BOS, or not, and TRL's token ids of all data sets with each."""
    work = tmp_path_factory.mktemp("trl")
    folders = {adds: write_tokenizer(work / f"adds_bos_{adds}", adds) for adds in (False, True)}
    data = work / "data.json"
    data.write_text(json.dumps({**STRINGS, **CHATS, "EOS": WITH_EOS}))
    script = tiny.ROOT / "tests/data/formats/trl_ids.py"
    command = [trl_python, script, data, work / "work", *folders.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("IDS ")]
    ids = [json.loads(line.removeprefix("IDS ")) for line in lines]
    found = zip(folders.items(), ids, strict=True)
    return {adds: OfTrl(load_tokenizer(folder), theirs) for (adds, folder), theirs in found}


@pytest.mark.parametrize("adds_bos", [False, True])
def test_data_sets_of_trl_have_its_token_ids(
    adds_bos: bool, tmp_path: Path, of_trl: dict[bool, OfTrl]
) -> None:
    """All data sets with format=trl; without it, strings become turns, or have no EOS."""
    contracts, theirs = Contracts(of_trl[adds_bos].tokenizer), of_trl[adds_bos].ids
    assert read_ids(tmp_path, contracts, WITH_EOS, format="trl") == theirs["EOS"]
    for name, rows in {**STRINGS, **CHATS}.items():
        assert read_ids(tmp_path, contracts, rows, format="trl") == theirs[name], name
        assert (read_ids(tmp_path, contracts, rows) == theirs[name]) == (name in CHATS), name


def test_data_sets_of_trl_that_no_contract_covers_are_refused(
    tmp_path: Path, contracts: Contracts
) -> None:
    for name, (rows, reason) in REFUSED.items():
        with pytest.raises(DataError, match=reason):
            read_ids(tmp_path, contracts, rows)
        with pytest.raises(DataError):
            read_ids(tmp_path, contracts, rows, format="trl")
        assert name
    mixed = {"prompt": "a", "chosen": [CHOSEN], "rejected": [REJECTED]}
    with pytest.raises(DataError, match="chosen: got prompt and reply as str and list, wanted two"):
        read_ids(tmp_path, contracts, [mixed], format="trl")


def test_format_of_trl_decides_on_eos_unless_the_settings_do(
    tmp_path: Path, tokenizer_folder: Path, contracts: Contracts
) -> None:
    """Also if training starts from a model whose contract does not add EOS."""
    start = contracts()
    assert not start.add_eos
    config = contracts.config(format="trl")
    assert build_contract(config, contracts.tokenizer, Precision.fp32, start).add_eos
    for path in tokenizer_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    without = Contracts(load_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=r"model.data.format: got trl, but the tokenizer has no"):
        without(format="trl")
    assert not without(format="trl", add_eos=False).add_eos


def test_model_of_trl_is_evaluated_on_the_token_ids_that_it_learned_from(tmp_path: Path) -> None:
    """A Hugging Face model has no scoring contract that adds EOS."""
    tiny.write_hf_reward_model(tmp_path / "hf")
    path, rewards = files.write(tmp_path / "rows.jsonl", *RAW), tmp_path / "rewards.jsonl"
    settings = [f"hf_model={tmp_path / 'hf'}", f"data.path={path}", f"output_rewards={rewards}"]
    evaluate(load_config(EvaluateConfig, [*settings, "data.format=trl"]))
    contracts = Contracts(load_tokenizer(tmp_path / "hf"))
    ids = read_ids(tmp_path, contracts, RAW, format="trl")
    model = load_hf_reward_model(str(tmp_path / "hf"), Precision.fp32, batch_tokens=512)
    wanted = model._score([tokens for pair in ids for tokens in pair]).reshape(-1, 2)
    found = [[row["rewards"][side] for side in PAIR_COLUMNS] for row in files.rows_of(rewards)]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
