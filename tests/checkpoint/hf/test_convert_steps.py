"""Converted process reward models keep the probabilities of their steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import nemo_aligner as na
from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import assert_same, config_of, edit_tensors, tensors_of
from tests.harness import tiny
from tests.harness.families import write_hf_checkpoint

HIDDEN = tiny.SHAPE["hidden_size"]
QUESTION = {"role": "user", "content": "why"}
STEPS = ("the cat", "sings two", "no")


def text(mark: str, *steps: str) -> list[dict[str, str]]:
    return [QUESTION, {"role": "assistant", "content": "".join(step + mark for step in steps)}]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size[0])) * 0.1


def test_qwen_process_reward_model_has_its_probability_at_every_step(tmp_path: Path) -> None:
    """As in its class: score.2(relu(score.0(hidden))), softmax[:, 1] at every <extra_0>."""
    folder = tmp_path / "hf"
    write_hf_checkpoint(folder, "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_0>"]})
    tokenizer.save_pretrained(folder)
    mark = tokenizer.convert_tokens_to_ids("<extra_0>")
    language_model = AutoModelForCausalLM.from_pretrained(folder)
    language_model.resize_token_embeddings(max(language_model.config.vocab_size, mark + 1))
    language_model.save_pretrained(folder)
    body = AutoModel.from_pretrained(folder)
    hidden_size = body.config.hidden_size
    head = {
        "score.0.weight": drawn(hidden_size, hidden_size),
        "score.0.bias": drawn(hidden_size),
        "score.2.weight": drawn(2, hidden_size),
        "score.2.bias": drawn(2),
    }
    edit_tensors(folder, head)
    edit_config(folder, architectures=["Qwen2ForProcessRewardModel"], num_labels=2)
    summary = str(convert(folder, tmp_path / "prm.nemo", seq_length=64))
    assert "reads the end of '<extra_0>' after each step" in summary
    chats = [text("<extra_0>", *STEPS), text("<extra_0>", "yes")]
    with na.RewardModel.from_pretrained(tmp_path / "prm.nemo") as model:
        assert model.contract().scored_position == "step_marks"
        scored = model.score(chats, steps=True)
    for chat, reply in zip(chats, scored, strict=True):
        written = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = torch.tensor([tokenizer(written, add_special_tokens=False).input_ids])
        with torch.no_grad():
            states = body(ids).last_hidden_state
        layer = states @ head["score.0.weight"].T + head["score.0.bias"]
        logits = layer.relu() @ head["score.2.weight"].T + head["score.2.bias"]
        expected = logits.softmax(-1)[..., 1][ids == mark]
        assert len(expected) == len(reply.rewards) == len(reply.spans)
        np.testing.assert_allclose(reply.rewards[:, 0], expected.numpy(), atol=1e-5)
    exported = check_comes_back(tmp_path, head)
    assert exported["architectures"] == ["Qwen2ForProcessRewardModel"]
    assert exported["step_tag_id"] == mark


def check_comes_back(folder: Path, head: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Export ``prm.nemo`` and convert it again; check head and contract, and return the config."""
    summary = na.RewardModel.from_pretrained(folder / "prm.nemo").export(folder / "out")
    written = tensors_of(folder / "out")
    assert_same({name: tensor for name, tensor in written.items() if "score" in name}, head)
    again = convert(folder / "out", folder / "again.nemo").contract
    assert again is not None
    assert again.hash == summary.contract.hash
    with na.RewardModel.from_pretrained(folder / "prm.nemo") as source:
        assert again == source.contract()
    return config_of(folder / "out")


@pytest.mark.parametrize(
    ("body", "labels", "decoder"),
    [("llama", 1, "Llama"), ("llama", 2, "Llama"), ("qwen3_next", 2, "Qwen3Next")],
)
def test_token_classifier_has_its_output_behind_every_step(
    body: str, labels: int, decoder: str, tmp_path: Path
) -> None:
    """As TRL trains it: a separator after each step, and the second of two labels means right."""
    folder = tmp_path / "hf"
    write_hf_checkpoint(folder, body)
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=labels).eval()
    torch.nn.init.normal_(model.score.weight, std=0.1)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder)
    assert set(load_file(folder / "model.safetensors")) >= {"score.weight", "score.bias"}
    with pytest.raises(
        CheckpointError, match="step_separator: it is not set, and the tokenizer has no"
    ):
        convert(folder, tmp_path / "none.nemo")
    options: dict[str, Any] = {"step_separator": "\n", "seq_length": 64, "attributes": ["right"]}
    convert(folder, tmp_path / "prm.nemo", **options)
    chat = text("\n", *STEPS)
    with na.RewardModel.from_pretrained(tmp_path / "prm.nemo") as ours:
        (scored,) = ours.score([chat], steps=True)
        assert ours.attributes == ("right",)
        # Token ids of the steps, joined like in TRL.
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False)
        pieces = [f"{prompt}<|im_start|>assistant\n{STEPS[0]}", *STEPS[1:]]
        ids: list[int] = []
        places = []
        for piece in pieces:
            for part in (piece, "\n"):
                ids += tokenizer(part, add_special_tokens=False).input_ids
            places.append(len(ids) - 1)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, places]
    expected = logits[:, 0] if labels == 1 else logits.softmax(-1)[:, 1]
    np.testing.assert_allclose(scored.rewards[:, 0], expected.numpy(), atol=1e-5)
    head = {"score.weight": model.score.weight.data, "score.bias": model.score.bias.data}
    if labels == 1:  # the softmax of 0 and the reward is the reward's sigmoid
        head = {
            name: torch.cat([torch.zeros_like(tensor), tensor]) for name, tensor in head.items()
        }
    exported = check_comes_back(tmp_path, head)
    assert exported["architectures"] == [f"{decoder}ForTokenClassification"]
    assert exported["problem_type"] is None, "vLLM takes the softmax of both outputs"
    with pytest.raises(
        CheckpointError, match=r"its head reads steps or the mean of a response, .*convert"
    ):
        load_hf_reward_model(str(folder), None, 512)


def test_two_rows_of_the_output_layer_are_a_probability_at_every_step(tmp_path: Path) -> None:
    """As in math-shepherd-mistral-7b-prm's model card: logits[:, [+, -]].softmax(-1)[:, 0]."""
    folder = tmp_path / "hf"
    write_hf_checkpoint(folder, "llama_untied")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right, wrong = tokenizer.convert_tokens_to_ids(["y", "n"])
    options: dict[str, Any] = {"head": "lm_head:y,n", "step_separator": "!", "seq_length": 64}
    summary = str(convert(folder, tmp_path / "prm.nemo", **options, attributes=["right"]))
    assert f"row {right} ('y') against row {wrong} ('n'), reads the end of '!'" in summary
    chat = text("!", *STEPS)
    with na.RewardModel.from_pretrained(tmp_path / "prm.nemo") as ours:
        (scored,) = ours.score([chat], steps=True)
    ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt")
    tokens = ids.input_ids[0]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens[None]).logits[0]
    at_marks = tokens == tokenizer.convert_tokens_to_ids("!")
    expected = logits[:, [right, wrong]].softmax(-1)[at_marks, 0]
    assert expected.std() > 1e-3
    np.testing.assert_allclose(scored.rewards[:, 0], expected.numpy(), atol=1e-5)
    rows = load_file(folder / "model.safetensors")["lm_head.weight"][[wrong, right]]
    check_comes_back(tmp_path, {"score.weight": rows, "score.bias": torch.zeros(2)})


def test_answers_to_steps_are_a_probability_of_each(tmp_path: Path) -> None:
    """As in RLHFlow's prm_evaluate.py: P(+) against P(-) at the token before each answer."""
    folder = tmp_path / "hf"
    write_hf_checkpoint(folder, "llama_untied")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plus, minus = tokenizer.convert_tokens_to_ids(["+", "-"])
    options: dict[str, Any] = {"head": "lm_head:+,-", "attributes": ["right"], "seq_length": 128}
    reads = ScoredPosition.step_answers
    summary = str(convert(folder, tmp_path / "prm.nemo", **options, reads=reads))
    assert f"row {plus} ('+') against row {minus} ('-'), reads its step_answers, kept" in summary
    chat = [QUESTION, {"role": "assistant", "content": "\n\n".join(STEPS)}]
    with na.RewardModel.from_pretrained(tmp_path / "prm.nemo") as ours:
        (scored,) = ours.score([chat], steps=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    turns: list[dict[str, str]] = []
    expected = []
    for step in (f"why {STEPS[0]}", *STEPS[1:]):
        turns += [{"role": "user", "content": step}, {"role": "assistant", "content": "+"}]
        written = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(written, add_special_tokens=False).input_ids
        place = len(ids) - 1 - ids[::-1].index(plus)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, place - 1, [plus, minus]]
        expected.append(float(logits.softmax(-1)[0]))
    assert np.std(expected) > 1e-3
    np.testing.assert_allclose(scored.rewards[:, 0], expected, atol=1e-5)
    rows = load_file(folder / "model.safetensors")["lm_head.weight"][[minus, plus]]
    check_comes_back(tmp_path, {"score.weight": rows, "score.bias": torch.zeros(2)})


def test_value_head_is_a_probability_at_every_step(tmp_path: Path) -> None:
    """As in Skywork-o1-Open-PRM: BOS, problem, line break, a step token after each step."""
    folder = tmp_path / "hf"
    write_hf_checkpoint(folder, "qwen2")
    body = AutoModel.from_pretrained(folder)
    size = body.config.hidden_size
    head = {"v_head.summary.weight": drawn(1, size) * 5, "v_head.summary.bias": drawn(1)}
    edit_tensors(folder, head)
    edit_config(folder, architectures=["Qwen2ForPrmModel"])
    with pytest.raises(
        CheckpointError, match="step_separator: it is not set, and the tokenizer has no"
    ):
        convert(folder, tmp_path / "none.nemo")
    # Nothing is read after the last step token.
    template = tmp_path / "template.jinja"
    written = "{{ bos_token }}{{ messages[0].content }}\n{{ messages[1].content }}{{ eos_token }}"
    template.write_text(written)
    options: dict[str, Any] = {"step_separator": "\n", "template": str(template), "seq_length": 64}
    convert(folder, tmp_path / "prm.nemo", **options)
    with na.RewardModel.from_pretrained(tmp_path / "prm.nemo") as ours:
        (scored,) = ours.score([text("\n", *STEPS)], steps=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(f"{tokenizer.bos_token}why\n", add_special_tokens=False).input_ids
    places = []
    for step in STEPS:
        ids += tokenizer(step, add_special_tokens=False).input_ids
        ids += tokenizer("\n", add_special_tokens=False).input_ids[-1:]
        places.append(len(ids) - 1)
    with torch.no_grad():
        states = body(torch.tensor([ids])).last_hidden_state[0, places]
    logits = states @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"]
    np.testing.assert_allclose(scored.rewards[:, 0], logits.sigmoid().numpy(), atol=1e-5)
    rows = {name.split(".")[-1]: tensor for name, tensor in head.items()}
    both = {f"score.{name}": torch.cat([tensor * 0, tensor]) for name, tensor in rows.items()}
    check_comes_back(tmp_path, both)


def test_class_of_many_labels_reads_no_rewards(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    tiny.write_hf_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "score.weight": drawn(3, HIDDEN)}, folder / "model.safetensors")
    edit_config(folder, architectures=["LlamaForTokenClassification"])
    with pytest.raises(CheckpointError, match=r"score.weight: got 3 rows, wanted 2 .* or 1 for"):
        convert(folder, tmp_path / "rm.nemo", step_separator="\n")
    edit_tensors(folder, {"score.weight": drawn(1, HIDDEN)})
    convert(folder, tmp_path / "rm.nemo", step_separator="\n", seq_length=64)
