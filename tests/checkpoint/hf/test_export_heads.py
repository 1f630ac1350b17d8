"""Exports of every kind of head have the archive's rewards in every program that reads them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

import nemo_aligner as na
from nemo_aligner.api.reward_model import export_archive, release_models
from nemo_aligner.checkpoint.hf import gguf_out
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.utils.errors import AlignerError
from tests.checkpoint.hf.exporting import config_of
from tests.harness import families, tiny
from tests.harness.environments import kept_environment, make_environment, package, vllm_python
from tests.harness.heads import KINDS, TWO_LAYERS, write_archive

SENTENCE_TRANSFORMERS = "sentence-transformers==6.2.0"
CLIENTS = Path(__file__).parents[2] / "integrations" / "clients"
TEXTS = [
    tiny.chat("why", "thank you"),
    tiny.chat("who sings", "the bird sings in the tree"),
    tiny.chat("what is the river", "no"),
]
# A kind of head, options of the export, the class in its config, and a part of the summary.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("several attributes", {}, "LlamaForSequenceClassification", "Add {'helpfulness': 0.75"),
    ("a bias", {}, "LlamaForSequenceClassification", "WARNING: the logits are not the rewards"),
    (
        "a bias",
        {"head": "score.bias"},
        "LlamaForSequenceClassification",
        "WARNING: transformers ignores score.bias; vLLM and this package read it",
    ),
    ("one output and a bias", {"head": "v_head.summary"}, "LlamaForCausalLM", ""),
    ("several attributes", {"head": "v_head.summary", "merge": True}, "LlamaForCausalLM", ""),
    ("two layers of several attributes", {}, "LlamaForRewardModel", ""),
    ("quantiles", {}, "LlamaForSequenceClassification", "dropped: all quantiles except the median"),
    ("quantiles of two layers", {}, "LlamaForRewardModel", "dropped: all quantiles except the"),
    ("several heads", {}, "LlamaForSequenceClassification", "dropped: the single heads"),
    ("bins", {}, "LlamaForSequenceClassification", "WARNING: the logits are those of bins"),
    ("bins with a bias", {"head": "score.bias"}, "LlamaForSequenceClassification", "of bins"),
    ("probabilities", {"head": "score.bias"}, "LlamaForSequenceClassification", "are log-odds: a"),
]


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release_models()


def by_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, np.ndarray]:
    """Run the program in a model card; return its conversation and rewards."""
    _, _, program = (folder / "README.md").read_text().partition("```python\n")
    monkeypatch.chdir(folder.parent)
    variables: dict[str, Any] = {}
    exec(program.partition("```")[0], variables)
    return variables["conversation"], variables["rewards"].numpy()


NAMED = [" as ".join([name, *map(str, options)]) for name, options, *_ in CASES]


@pytest.mark.parametrize(("name", "options", "architecture", "message"), CASES, ids=NAMED)
def test_head_is_exported_with_its_rewards(
    name: str,
    options: dict[str, Any],
    architecture: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archive = write_archive(tmp_path / "rm.nemo", KINDS[name])
    ours = na.RewardModel.from_pretrained(archive)
    expected = ours.score(TEXTS)
    if options.get("merge"):
        expected = expected @ np.array(ours.contract().attribute_weights, np.float32)[:, None]
    assert expected.std(axis=0).min() > 0.01
    summary = ours.export(tmp_path / "out", **options)
    assert message in str(summary)
    assert config_of(tmp_path / "out")["architectures"] == [architecture]
    with na.RewardModel.from_pretrained(hf_model=tmp_path / "out") as theirs:
        np.testing.assert_allclose(theirs.score(TEXTS), expected, atol=1e-4)
        shown = theirs.score([TEXTS[0]])
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len({file.stat().st_mode for file in files}) == 1
    conversation, rewards = by_card(tmp_path / "out", monkeypatch)
    assert shown.shape == rewards.shape
    convert(tmp_path / "out", tmp_path / "again.nemo")
    again = na.RewardModel.from_pretrained(tmp_path / "again.nemo")
    np.testing.assert_allclose(again.score(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(rewards, again.score([conversation]), atol=1e-4)
    assert again.contract().attributes == (
        ("reward",) if options.get("merge") else ours.contract().attributes
    )
    if "head" in options:
        assert not any(again.contract().label_means) or KINDS[name].readout
    if options.get("head") == "v_head.summary":
        head = load_file(tmp_path / "out" / "value_head.safetensors")
        stored = load_file(tmp_path / "out" / "model.safetensors")
        assert sorted(head) == ["v_head.summary.bias", "v_head.summary.weight"]
        assert all(torch.equal(tensor, stored[key]) for key, tensor in head.items())


def test_card_of_a_model_on_the_hub_reads_it_there(
    hub: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, out = write_archive(tmp_path / "rm.nemo", KINDS["two layers"]), tmp_path / "out"
    options: dict[str, Any] = dict.fromkeys(("dtype", "head", "adapter_of", "max_shard_bytes"))
    export_archive(archive, out, **options, merge=False, base_license="mit", hub_name="org/rm")
    requests = hub(out)
    conversation, rewards = by_card(out, monkeypatch)
    assert requests == {"name": "org/rm"}
    expected = na.RewardModel.from_pretrained(archive).score([conversation])
    np.testing.assert_allclose(rewards, expected, atol=1e-4)


def test_head_that_has_no_such_form_is_refused(tmp_path: Path) -> None:
    for name, options, message in (
        (
            "several attributes",
            {"head": "v_head.summary"},
            "for 2 outputs, but a value head has only one",
        ),
        (
            "several attributes",
            {"head": "score.2"},
            "got 'score.2', but the model's head, which has one matrix",
        ),
        ("two layers", {"head": "score"}, "has two layers, can only be exported as score.2"),
        ("bins with a bias", {}, "head: got score, a form without biases, but"),
        (
            "probabilities",
            {"merge": True},
            "merge: the outputs of a head of sigmoid are not rewards",
        ),
        (
            "bins with a bias",
            {"merge": True},
            "merge: the outputs of a head of bins are not rewards",
        ),
        (
            "the mean of a reply",
            {"head": "score"},
            "a head that reads means can only be exported as score.bias",
        ),
    ):
        archive = tmp_path / f"{name}.nemo"
        if not archive.exists():
            write_archive(archive, KINDS[name])
        with pytest.raises(AlignerError) as caught:
            na.RewardModel.from_pretrained(archive).export(tmp_path / "out", **options)
        assert message in str(caught.value), str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def sentence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the test if sentence-transformers is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        folder = kept_environment(
            "sentence_transformers", (SENTENCE_TRANSFORMERS,), with_sentence_transformers
        )
        (packages,) = folder.glob("lib/python*/site-packages")
        monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])


def with_sentence_transformers(folder: Path) -> None:
    make_environment(folder, SENTENCE_TRANSFORMERS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_mean_of_a_reply_has_its_rewards_in_sentence_transformers(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence_transformers: None
) -> None:
    kind = KINDS["the mean of a reply"]
    if dtype == "bf16":
        kind = dataclasses.replace(kind, tensors=TWO_LAYERS)
    archive = write_archive(tmp_path / "rm.nemo", kind)
    ours = na.RewardModel.from_pretrained(archive)
    summary = str(ours.export(tmp_path / "out", dtype=dtype))
    assert "pass the text before a response as prompt" in summary
    assert config_of(tmp_path / "out")["architectures"] == ["LlamaModel"]
    with pytest.raises(AlignerError, match=r"reads steps or the mean of a response, .*convert"):
        na.RewardModel.from_pretrained(hf_model=tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again.nemo")
    again = na.RewardModel.from_pretrained(tmp_path / "again.nemo")
    assert again.contract().reply_marker == ours.contract().reply_marker
    # A bf16 archive computes in bf16; the card's program and the export's check compute in fp32.
    near = 1e-5 if dtype == "fp32" else 0.1
    np.testing.assert_allclose(again.score(TEXTS), ours.score(TEXTS), atol=near)
    conversation, rewards = by_card(tmp_path / "out", monkeypatch)
    np.testing.assert_allclose(rewards, again.score([conversation]), atol=near)


@pytest.mark.parametrize("name", ["one matrix", "several attributes"])
def test_logits_are_those_of_a_cross_encoder_given_messages(
    name: str, tmp_path: Path, sentence_transformers: None
) -> None:
    from sentence_transformers import CrossEncoder

    ours = na.RewardModel.from_pretrained(write_archive(tmp_path / "rm.nemo", KINDS[name]))
    ours.export(tmp_path / "out")
    model = CrossEncoder(str(tmp_path / "out"), device="cpu", local_files_only=True)
    logits = ours.score(TEXTS) - list(config_of(tmp_path / "out")["label_means"].values())
    predicted = np.reshape(model.predict(TEXTS), logits.shape)
    np.testing.assert_allclose(predicted, logits, atol=1e-5, rtol=0)
    # The model card warns of this.
    pairs = [tuple(turn["content"] for turn in text) for text in TEXTS]
    assert np.abs(np.reshape(model.predict(pairs), logits.shape) - logits).max() > 0.1
    card = (tmp_path / "out/README.md").read_text()
    assert 'CrossEncoder("out", model_kwargs={"dtype": torch.float32}).predict([conv' in card
    assert "Never pass a prompt and a reply as a pair of texts" in card


def ids_of(folder: Path, texts: Sequence[Any] = TEXTS) -> list[list[int]]:
    """Tokenize the texts like the program in the model card."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = written_by(tokenizer, texts)
    return [tokenizer(text, add_special_tokens=False).input_ids for text in written]


def written_by(tokenizer: Any, texts: Sequence[Any]) -> list[str]:
    return [tokenizer.apply_chat_template(text, tokenize=False) for text in texts]


def printed(python: str | Path, script: str, *arguments: Any, **environment: str) -> Any:
    """Run a script of another program, and return what it prints last, as JSON."""
    done = subprocess.run(
        [str(python), str(CLIENTS / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1200,
        env=tiny.environment(TOKENIZERS_PARALLELISM="false", **environment),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


# Models whose attention heads are wide enough for vLLM on a CPU.
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
# Sizes that all differ, so that a transposed or swapped axis is noticed.
ODD_AND_WIDE = {
    "vocab_size": 337,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "initializer_range": 0.06,
}
# vLLM has no decoder for these families, and cannot load transformers' class with a head by its
# name, so the option is needed.
CLASSIFY_OPTIONS = {
    name: {"convert": "classify", "hf_overrides": {"architectures": [f"{decoder}ForCausalLM"]}}
    for name, decoder in (("ministral", "Ministral"), ("helium", "Helium"))
}
VLLM: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        body: (body, "one matrix", {})
        for body in families.BODIES.values()
        # These exports have not been tried in vLLM.
        if families.CASES[body].keys().isdisjoint(("kv_lora_rank", "mamba_num_heads"))
    },
    "several attributes": ("llama", "several attributes", {}),
    "quantiles": ("gemma2", "quantiles", {}),
    "bias": ("llama", "a bias", {"head": "score.bias"}),
    "two layers": ("qwen2", "two layers", {}),
}


def test_exports_have_their_rewards_in_vllm(tmp_path: Path) -> None:
    """Exports of every family, and of every head that vLLM reads, have their rewards there."""
    python = vllm_python()
    requests: dict[str, dict[str, Any]] = {}
    expected = {}
    for name, (body, kind, options) in VLLM.items():
        archive = write_archive(tmp_path / f"{name}.nemo", KINDS[kind], body, **ODD_AND_WIDE)
        ours = na.RewardModel.from_pretrained(archive)
        scores = ours.score(TEXTS)
        folder = tmp_path / name
        ours.export(folder, **options)
        release_models()
        expected[name] = scores - list(config_of(folder)["label_means"].values())
        task = "token_classify" if kind == "two layers" else "classify"
        requests[name] = {"folder": str(folder), "ids": ids_of(folder), "task": task}
        requests[name]["options"] = CLASSIFY_OPTIONS.get(name, {})
    # Its scores of text pairs, which it concatenates, are logits, too.
    texts = written_by(AutoTokenizer.from_pretrained(tmp_path / "llama"), TEXTS)
    pairs = [(text[:cut], text[cut:]) for text in texts for cut in [text.rindex("<|im_start|>")]]
    requests["pairs"] = {**requests["llama"], "pairs": pairs}
    expected["pairs"] = expected["llama"]
    (tmp_path / "asked.json").write_text(json.dumps(list(requests.values())))
    actual = printed(python, "vllm_scores.py", tmp_path / "asked.json")
    for name, logits in zip(expected, actual, strict=True):
        np.testing.assert_allclose(logits, expected[name], atol=2e-5, rtol=0, err_msg=name)


def test_value_head_has_its_rewards_in_trl(tmp_path: Path, rewardbench_python: Path) -> None:
    archive = write_archive(tmp_path / "rm.nemo", KINDS["one output and a bias"])
    ours = na.RewardModel.from_pretrained(archive)
    expected = ours.score(TEXTS)
    ours.export(tmp_path / "out", head="v_head.summary")
    (tmp_path / "ids.json").write_text(json.dumps(ids_of(tmp_path / "out")))
    values = printed(rewardbench_python, "trl_values.py", tmp_path / "out", tmp_path / "ids.json")
    np.testing.assert_allclose(np.array(values)[:, None], expected, atol=1e-4, rtol=0)


XLLAMACPP = "xllamacpp==2026.10.11549"


def cut_by(regex: str) -> dict[str, Any]:
    """Build a byte-level pre-tokenizer that first splits by a regular expression."""
    cut = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, of_bytes])
    return json.loads(tokenizer.to_str())["pre_tokenizer"]


# The expression in Qwen2's tokenizer.json.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("dtype", "regex"),
    [("fp32", None), ("fp32", QWEN2), ("bf16", None)],
    ids=["fp32", "cut as Qwen2's", "bf16"],
)
def test_gguf_has_its_rewards_here_and_in_llama_cpp(
    dtype: str, regex: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    cut = None if regex is None else cut_by(regex)
    archive = write_archive(
        tmp_path / "rm.nemo", KINDS["one matrix"], "qwen3_untied", pre_tokenizer=cut
    )
    ours = na.RewardModel.from_pretrained(archive)
    summary = str(ours.export(tmp_path / "rm.gguf", dtype=dtype))
    assert "{query}" in summary
    assert "lacks the offset 0.75" in summary
    convert(tmp_path / "rm.gguf", tmp_path / "again.nemo")
    again = na.RewardModel.from_pretrained(tmp_path / "again.nemo")
    assert again.contract().label_means == (0.75,)
    texts = [*TEXTS, tiny.chat("It's  1234!\n\n don't", "\n\tthe bird, 56 (sings) 🙂é  ")]
    expected = again.score(texts)
    if dtype == "fp32":
        np.testing.assert_allclose(expected, ours.score(texts), atol=1e-5, rtol=0)
    pairs = [[turn["content"] for turn in text] for text in texts]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    scores = printed(
        sys.executable,
        "llamacpp_rerank.py",
        tmp_path / "rm.gguf",
        tmp_path / "pairs.json",
        PYTHONPATH=str(package(XLLAMACPP)),
    )
    log_odds = np.log(scores) - np.log1p(-np.array(scores))
    # llama.cpp multiplies bf16 matrices with activations in bf16.
    atol = 1e-5 if dtype == "fp32" else 0.05
    np.testing.assert_allclose(log_odds[:, None] + 0.75, expected, atol=atol, rtol=0)


def test_gguf_of_a_reranker_is_read_with_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's converter writes two rows and a prompt for Qwen3-Reranker, and both are read."""
    pytest.importorskip("gguf")
    archive = write_archive(tmp_path / "rm.nemo", KINDS["one matrix"], "qwen3")
    ours = na.RewardModel.from_pretrained(archive)
    monkeypatch.setattr(gguf_out, "CONTRACT_FIELD", "general.description")
    prompt = '<|im_start|>Is "{document}" good 🙂 for {query}?\n'
    monkeypatch.setattr(gguf_out._Writer, "_rerank_template", lambda self: prompt)
    ours.export(tmp_path / "rm.gguf")
    convert(tmp_path / "rm.gguf", tmp_path / "again.nemo")
    again = na.RewardModel.from_pretrained(tmp_path / "again.nemo")
    # In the rendered text BOS is there already.
    written = [prompt.format(query=q["content"], document=d["content"]) for q, d in TEXTS]
    np.testing.assert_allclose(again.score(TEXTS), ours.score(written) - 0.75, atol=1e-5)


def test_gguf_of_a_tokenizer_that_llama_cpp_cuts_otherwise_is_refused() -> None:
    bpe = {"type": "BPE", "byte_fallback": False, "ignore_merges": False}
    digits = {"type": "Digits", "individual_digits": True}
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    both = {"type": "Sequence", "pretokenizers": [digits, of_bytes]}
    llama3 = cut_by(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"))
    for model, pre_tokenizer, cut in (
        (bpe, of_bytes, "gpt-2"),
        (bpe, both, "smollm"),
        (bpe, cut_by(QWEN2), "qwen2"),
        ({**bpe, "ignore_merges": True}, llama3, "llama-bpe"),
    ):
        assert gguf_out.name_pre_tokenizer({"model": model, "pre_tokenizer": pre_tokenizer}) == cut
    for model, settings, message in (
        ({**bpe, "byte_fallback": True}, {}, "wanted BPE on bytes"),
        ({"type": "Unigram"}, {}, "got 'Unigram', wanted BPE on bytes"),
        (bpe, {"normalizer": {"type": "Lowercase"}}, "normalizer: got"),
        (bpe, {"pre_tokenizer": cut_by(r"\s+")}, "wanted that of GPT-2, SmolLM"),
        (bpe, {"pre_tokenizer": llama3}, "wanted that of GPT-2, SmolLM"),
        (bpe, {"pre_tokenizer": {**of_bytes, "add_prefix_space": True}}, "pre_tokenizer: got"),
        (bpe, {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}, "pre_tokenizer: got"),
        (bpe, {"pre_tokenizer": None}, "pre_tokenizer: got None, wanted that of GPT-2"),
    ):
        with pytest.raises(AlignerError) as caught:
            gguf_out.name_pre_tokenizer({"model": model, "pre_tokenizer": of_bytes, **settings})
        assert message in str(caught.value)


def test_gguf_of_what_llama_cpp_has_no_place_for_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    for body, kind, options, message in (
        ("llama", "one matrix", {}, "got a llama, wanted a qwen3, the only decoder"),
        ("qwen3", "several attributes", {}, "got 2 outputs (helpfulness, verbosity), but"),
        ("qwen3", "two layers", {}, "its head is two layers of 64 with bias, wanted one matrix"),
        ("qwen3", "bins", {}, "got 6 outputs"),
        ("qwen3", "one matrix", {"head": "score"}, "a .gguf file has neither a peft adapter"),
    ):
        archive = tmp_path / f"{body} {kind}.nemo"
        if not archive.exists():
            write_archive(archive, KINDS[kind], body)
        with pytest.raises(AlignerError) as caught:
            na.RewardModel.from_pretrained(archive).export(tmp_path / "rm.gguf", **options)
        assert message in str(caught.value), str(caught.value)
    assert not list(tmp_path.glob("*.gguf"))
