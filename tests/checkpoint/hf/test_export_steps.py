"""Exports of models with rewards per turn or step have the archive's rewards."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.utils.errors import AlignerError, CheckpointError
from tests.checkpoint.hf.exporting import config_of
from tests.checkpoint.hf.test_export_heads import WIDE, printed
from tests.harness.environments import vllm_python
from tests.harness.heads import KINDS, write_archive

QUESTION = {"role": "user", "content": "why"}
QUICK = ("bins with a bias", "step_ends", "\n", "llama", "LlamaForTokenClassification")
# A kind of head, its position, the step separator, the decoder and the exported class.
CASES = [
    ("one matrix", "step_ends", "\n\n", "llama", "LlamaForTokenClassification"),
    ("one output and a bias", "step_marks", "\n", "qwen3", "Qwen3ForTokenClassification"),
    ("several attributes", "turns", None, "llama", "LlamaForTokenClassification"),
    QUICK,
    ("quantiles", "step_marks", "\n", "llama", "LlamaForTokenClassification"),
    ("one matrix", "step_answers", "\n\n", "qwen3", "Qwen3ForTokenClassification"),
    # transformers has the decoder, but no class with this head.
    ("one matrix", "step_ends", "\n", "granite", "GraniteForTokenClassification"),
    ("one matrix", "step_ends", "\n", "qwen3_5", "Qwen3_5ForTokenClassification"),
    ("one output and a bias", "step_marks", "\n", "qwen3_next", "Qwen3NextForTokenClassification"),
    ("two layers", "step_marks", "\n", "qwen2", "Qwen2ForProcessRewardModel"),
    ("a probability", "step_ends", "\n\n", "llama", "LlamaForTokenClassification"),
    ("probabilities", "step_ends", "\n\n", "qwen3", "Qwen3ForTokenClassification"),
]


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release_models()


def stepped(name: str, position: str, separator: str | None) -> Any:
    rules = (("scored_position", position), ("step_separator", separator))
    return dataclasses.replace(KINDS[name], rules=rules)


def texts(separator: str | None) -> list[Any]:
    steps = ["the cat", "sings two", "no"]
    if separator is None:
        turns = [[QUESTION, {"role": "assistant", "content": step}] for step in steps]
        return [turns[0], [message for turn in turns for message in turn]]
    contents = ["the bird", separator.join(steps), separator.join([*steps, ""])]
    return [[QUESTION, {"role": "assistant", "content": content}] for content in contents]


def by_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the program in a model card, and return its variables."""
    _, _, program = (folder / "README.md").read_text().partition("```python\n")
    monkeypatch.chdir(folder.parent)
    variables: dict[str, Any] = {}
    exec(program.partition("```")[0], variables)
    return variables


NAMED = [f"{name} of a {body}" for name, _, _, body, _ in CASES]


@pytest.mark.parametrize(
    ("name", "position", "separator", "body", "architecture"),
    [pytest.param(*case, marks=[pytest.mark.smoke] * (case is QUICK)) for case in CASES],
    ids=NAMED,
)
def test_head_of_steps_is_exported_with_its_rewards(
    name: str,
    position: str,
    separator: str | None,
    body: str,
    architecture: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = stepped(name, position, separator)
    ours = na.RewardModel.from_pretrained(write_archive(tmp_path / "rm.nemo", kind, body))
    expected = ours.score(texts(separator), steps=True)
    summary = ours.export(tmp_path / "out")
    assert "where the model card says" in str(summary)
    config = config_of(tmp_path / "out")
    assert config["architectures"] == [architecture]
    assert (config["scored_position"], config.get("step_separator")) == (position, separator)
    assert "sentence_transformers" not in config  # vLLM would not apply the softmax
    convert(tmp_path / "out", tmp_path / "again.nemo")
    again = na.RewardModel.from_pretrained(tmp_path / "again.nemo")
    assert again.contract() == summary.contract
    rules: dict[str, Any] = {"label_means": (0.0,) * len(kind.attributes), "readout": None}
    rules = {} if kind.readout in ("bins", "sigmoid") else rules
    assert again.contract() == dataclasses.replace(ours.contract(), **rules)
    for expected_reply, actual in zip(
        expected, again.score(texts(separator), steps=True), strict=True
    ):
        assert expected_reply.spans == actual.spans
        np.testing.assert_allclose(actual.rewards, expected_reply.rewards, atol=1e-5)
    shown = by_card(tmp_path / "out", monkeypatch)
    (actual,) = again.score([shown["conversation"]], steps=True)
    assert len(actual.rewards) > 1
    np.testing.assert_allclose(shown["rewards"].numpy(), actual.rewards, atol=1e-4)
    if len(kind.attributes) == 1:
        right = shown["logits"].softmax(-1)[:, 1:].numpy()
        is_probability = kind.readout == "sigmoid"
        sigmoids = actual.rewards if is_probability else 1 / (1 + np.exp(-actual.rewards))
        np.testing.assert_allclose(right, sigmoids, atol=1e-4)


@pytest.mark.parametrize("aggregate", ["min", "mean", "product"])
def test_export_says_how_steps_become_one_reward_of_a_text(
    aggregate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs do not aggregate rewards of steps: summary and card tell how."""
    kind = stepped("one matrix", "step_ends", ";")
    kind = dataclasses.replace(kind, rules=(*kind.rules, ("aggregate", aggregate)))
    ours = na.RewardModel.from_pretrained(write_archive(tmp_path / "rm.nemo", kind, "llama"))
    rewards = ours.score(texts(";"))
    summary = str(ours.export(tmp_path / "out"))
    assert f"WARNING: the reward of a sample is the {aggregate} of its steps' rewards" in summary
    assert config_of(tmp_path / "out")["aggregate"] == aggregate
    convert(tmp_path / "out", tmp_path / "again.nemo")
    again = na.RewardModel.from_pretrained(tmp_path / "again.nemo")
    assert again.contract().aggregate == aggregate
    np.testing.assert_allclose(again.score(texts(";")), rewards, atol=1e-5)
    shown = by_card(tmp_path / "out", monkeypatch)
    (by_archive,) = again.score([shown["conversation"]])
    np.testing.assert_allclose(shown["reward_of_text"].numpy(), by_archive, atol=1e-4)
    assert "**The reward of a text is the " in (tmp_path / "out" / "README.md").read_text()
    if aggregate != "mean":
        with pytest.raises(
            AlignerError, match=f"the reward of a sample is the {aggregate} of its steps"
        ):
            ours.export(tmp_path / "merged", merge=True)


# Heads, positions, separators and decoders; vLLM finds the token of a step mark itself.
VLLM = [
    ("one matrix", "step_ends", "\n\n", "llama"),
    ("one output and a bias", "step_marks", "!", "qwen3"),
    ("several attributes", "turns", None, "qwen2"),
    ("two layers", "step_marks", "!", "qwen2"),
]


def test_exports_of_steps_have_their_rewards_in_vllm(tmp_path: Path) -> None:
    python = vllm_python()
    requests, expected = [], []
    for number, (name, position, separator, body) in enumerate(VLLM):
        archive = tmp_path / f"{number}.nemo"
        write_archive(archive, stepped(name, position, separator), body, **WIDE)
        ours, chats = na.RewardModel.from_pretrained(archive), texts(separator)
        expected.append([reply.rewards for reply in ours.score(chats, steps=True)])
        folder = tmp_path / f"out{number}"
        ours.export(folder)
        tokenizer, contract = read_text_rules(archive)
        assert contract is not None
        encoded = [contract.encode(tokenizer, chat) for chat in chats]
        ask: dict[str, Any] = {"folder": str(folder), "task": "token_classify"}
        requests.append({**ask, "ids": [reply.token_ids for reply in encoded]})
        if body == "qwen2" and position == "step_marks":
            requests[-1]["step_tag_id"] = config_of(folder)["step_tag_id"]
        else:
            requests[-1]["reads"] = [reply.reads for reply in encoded]
    (tmp_path / "asked.json").write_text(json.dumps(requests))
    answers = printed(python, "vllm_scores.py", tmp_path / "asked.json")
    for (name, *_), ask, theirs, ours in zip(VLLM, requests, answers, expected, strict=True):
        for rows, rewards in zip(theirs, ours, strict=True):
            logits = np.array(rows)
            if "step_tag_id" in ask:  # the softmax of 0 and the reward
                logits = np.log(logits[:, 1:] / logits[:, :1])
            elif rewards.shape[1] == 1:
                logits = logits[:, 1:]
            np.testing.assert_allclose(logits, rewards, atol=1e-5, rtol=0, err_msg=name)


def test_head_of_steps_without_a_reader_is_refused(tmp_path: Path) -> None:
    for name, body, options, message in (
        ("two layers", "llama", {}, "only on a qwen2, with 64 units and one reward"),
        ("two layers of several attributes", "qwen2", {}, "units and 2 outputs"),
        (
            "one matrix",
            "llama",
            {"head": "score"},
            "a head that reads steps can only be exported as score.bias",
        ),
    ):
        archive = tmp_path / f"{name}.nemo"
        write_archive(archive, stepped(name, "step_ends", "\n"), body)
        with pytest.raises(AlignerError) as caught:
            na.RewardModel.from_pretrained(archive).export(tmp_path / "out", **options)
        assert message in str(caught.value), str(caught.value)
    assert not (tmp_path / "out").exists()
    contract = na.RewardModel.from_pretrained(archive).export(tmp_path / "out").contract
    plain = dataclasses.replace(contract, scored_position="last_token", step_separator=None)
    (tmp_path / "out" / "scoring_contract.json").write_text(json.dumps(plain.to_dict()))
    with pytest.raises(
        CheckpointError, match=r"which reads steps, but scoring_contract.json does not"
    ):
        convert(tmp_path / "out", tmp_path / "again.nemo")
