"""Heads of every layout keep the source's rewards in evaluation, training and export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import (
    check_refused,
    config_edits,
    config_of,
    edit,
    edit_tensors,
)
from tests.checkpoint.refusals import overwrite
from tests.harness import families, tiny
from tests.harness.families import internlm2_names, write_hf_checkpoint
from tests.harness.heads import served

HIDDEN = tiny.SHAPE["hidden_size"]
NAMES = ("helpfulness", "verbosity")
PAIRS = [
    {"prompt": "why", "chosen": "thank you", "rejected": "the cat sings"},
    {"prompt": "who sleeps", "chosen": "a bird sleeps", "rejected": "no"},
    {"prompt": "what", "chosen": "stone", "rejected": "yes please"},
    {"prompt": "the river", "chosen": "is blue", "rejected": "is quick"},
]
RATINGS = [
    {"prompt": pair["prompt"], "response": pair["chosen"], NAMES[0]: 3, NAMES[1]: number}
    for number, pair in enumerate(PAIRS)
]
TEXTS = [tiny.chat(pair["prompt"], pair[side]) for side in ("chosen", "rejected") for pair in PAIRS]
SETTINGS: dict[str, Any] = {
    "model.data.seq_length": 256,
    "model.data.allow_prompt_overlap": True,
    "model.micro_batch_tokens": 512,
    "model.global_batch_size": len(PAIRS),
    "model.optim.lr": 1e-3,
    "trainer.rm.max_epochs": 2,
    "exp_manager.create_tensorboard_logger": False,
}
REGRESSION = {
    "model.reward_model_type": "regression",
    "model.regression.attributes": list(NAMES),
}
Reward = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def linear(hidden: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Apply the layer ``name`` like torch's Linear, with its bias if there is one."""
    return hidden @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(1))


def one_layer(name: str) -> Reward:
    return lambda hidden, tensors: linear(hidden, tensors, name)


def two_layers(first: str, last: str) -> Reward:
    return lambda hidden, tensors: linear(linear(hidden, tensors, first).relu(), tensors, last)


@dataclass(frozen=True)
class Case:
    """A layout: its tensors beside a decoder, and its reward from the last token's hidden state.

    Attributes:
        sizes: of its tensors, by name.
        reward: as the code that is named above the case computes it.
        summary_line: in the summary of the conversion.
        architecture: in its ``config.json``.
        exported: ``architectures`` of its export; None is not compared.
        body: see ``tests/harness/families.py``.
        shape: settings of the body beside those of ``tests/harness/families.py``.
        file: where its tensors are.
        precision: of training.
    """

    sizes: dict[str, tuple[int, ...]]
    reward: Reward
    summary_line: str
    architecture: str
    exported: str | None = "LlamaForSequenceClassification"
    config: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    body: str = "llama"
    shape: dict[str, Any] = field(default_factory=dict)
    file: str = "model.safetensors"
    precision: str = "fp32"


CASES = {
    # transformers: GenericForSequenceClassification
    "score": Case(
        {"score.weight": (1, HIDDEN)},
        one_layer("score"),
        "head: score (linear; written by ForSequenceClassification",
        "LlamaForSequenceClassification",
    ),
    "score with a bias": Case(
        {"score.weight": (1, HIDDEN), "score.bias": (1,)},
        one_layer("score"),
        "head: score (linear with bias; written by",
        "LlamaForSequenceClassification",
    ),
    "score of two outputs with biases": Case(
        {"score.weight": (2, HIDDEN), "score.bias": (2,)},
        one_layer("score"),
        "reward model with the outputs helpfulness, verbosity",
        "LlamaForSequenceClassification",
        config={"id2label": dict(enumerate(NAMES)), "problem_type": "regression"},
        outputs=2,
    ),
    # vLLM: model_executor/models/qwen2_rm.py, after Qwen2.5-Math-RM-72B's modeling_qwen2_rm.py
    "Qwen2ForRewardModel": Case(
        {
            "score.0.weight": (HIDDEN, HIDDEN),
            "score.0.bias": (HIDDEN,),
            "score.2.weight": (1, HIDDEN),
            "score.2.bias": (1,),
        },
        two_layers("score.0", "score.2"),
        "head: score.2 (two layers of 64 with bias; written by Qwen2ForRewardModel",
        "Qwen2ForRewardModel",
        "Qwen2ForRewardModel",
        body="qwen2",
    ),
    # reward-bench: rewardbench/models/inform.py
    "INF-ORM": Case(
        {
            "score.0.weight": (HIDDEN, HIDDEN),
            "score.0.bias": (HIDDEN,),
            "score.2.weight": (1, HIDDEN),
            "score.2.bias": (1,),
        },
        two_layers("score.0", "score.2"),
        "head: score.2 (two layers of 64 with bias; written by Qwen2ForRewardModel, INF-ORM)",
        "INFORMForSequenceClassification",
        "LlamaForRewardModel",
    ),
    # TRL 0.11: trl/models/modeling_value_head.py, ValueHead; it has a bias, and dropout in training
    "TRL's value head": Case(
        {"v_head.summary.weight": (1, HIDDEN), "v_head.summary.bias": (1,)},
        one_layer("v_head.summary"),
        "head: v_head.summary (linear with bias; written by TRL's value head",
        "LlamaForCausalLM",
        body="llama_untied",
    ),
    # LLaMA-Factory: src/llamafactory/model/model_utils/valuehead.py, train/rm/trainer.py
    "LLaMA-Factory's file": Case(
        {"v_head.summary.weight": (1, HIDDEN), "v_head.summary.bias": (1,)},
        one_layer("v_head.summary"),
        "head: v_head.summary (linear with bias; written by TRL's value head, LLaMA-Factory)",
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        body="qwen3",
        file="value_head.safetensors",
    ),
    # reward-bench: rewardbench/models/grm.py
    "GRM": Case(
        {
            "v_head.summary.0.weight": (32, HIDDEN),
            "v_head.summary.0.bias": (32,),
            "v_head.summary.2.weight": (1, 32),
            "v_head.summary.2.bias": (1,),
        },
        two_layers("v_head.summary.0", "v_head.summary.2"),
        "head: v_head.summary.2 (two layers of 32 with bias; written by GRM)",
        "GRewardModel",
        "Gemma2ForRewardModel",
        body="gemma2",
    ),
    # OpenRLHF: openrlhf/models/model.py; without --normalize_reward mean and std are not applied
    "OpenRLHF": Case(
        {"the_head.weight": (1, HIDDEN)},
        one_layer("the_head"),
        "head: the_head (linear; written by OpenRLHF)",
        "RewardModel",
        config={"value_head_prefix": "the_head", "mean": 0.25, "std": 1.5},
    ),
    # UltraRM's and Eurus-RM's model cards: LlamaRewardModel, EurusRewardModel
    "regression_head": Case(
        {"regression_head.weight": (1, HIDDEN)},
        one_layer("regression_head"),
        "head: regression_head (linear; written by UltraRM, Eurus-RM)",
        "EurusRewardModel",
        "MistralForSequenceClassification",
        body="mistral_untied_window",
    ),
}


def draw(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()}


def write(case: Case, folder: Path) -> dict[str, Tensor]:
    """Write a decoder with the head of ``case``, and return the head."""
    write_hf_checkpoint(folder, case.body, **case.shape)
    head = draw(case.sizes)
    if case.file == "model.safetensors":
        edit_tensors(folder, head)
    else:
        save_file(head, folder / case.file)
    edit(folder, architectures=[case.architecture], pad_token_id=0, **case.config)
    return head


def token_lists(tokenizer: Any) -> list[Tensor]:
    """Token ids ``[1, T]`` of every text, by the chat template of the folder."""
    rendered = [tokenizer.apply_chat_template(text, tokenize=False) for text in TEXTS]
    id_lists = [tokenizer(text, add_special_tokens=False).input_ids for text in rendered]
    return [torch.tensor([ids]) for ids in id_lists]


def hidden_of(folder: Path) -> Tensor:
    """Hidden states ``[N, hidden]`` of the last token of every text, by transformers."""
    body = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        lists = token_lists(AutoTokenizer.from_pretrained(folder))
        # A fresh one for each: a dynamic rotation remembers the longest text.
        return torch.stack([deepcopy(body)(ids).last_hidden_state[0, -1] for ids in lists])


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release_models()


# Tolerance of the first step's loss; bf16 may choose other experts.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 0.15}


@pytest.mark.parametrize("name", CASES)
def test_head_has_the_rewards_of_its_source_and_is_kept(name: str, tmp_path: Path) -> None:
    check_the_whole_way(CASES[name], tmp_path)


# RoPE that depends on the length; TEXTS have 23 to 33 tokens, so the limits lie between.
BY_LENGTH = {
    "llama_dynamic": {"max_position_embeddings": 26},
    "phi3_longrope": {"original_max_position_embeddings": 26},
}


# Decoders with each kind of attention, norm and feed-forward layer. For every decoder, families/
# and tests/models compare the conversion, rewards, gradients and export.
KINDS = [
    "gpt_neox", "gemma2", "gemma3_text", "mixtral", "gpt_oss", "glm4_moe_lite",
    "qwen3_5_moe_text", "nemotron_h", "gemma4_text",
]  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, *BY_LENGTH])
def test_decoder_goes_the_whole_way(kind: str, tmp_path: Path) -> None:
    """A decoder keeps its rewards on the whole path, in bf16 training, too."""
    body = families.BODIES.get(kind, kind)
    shape = families.odd_settings(body)
    case = replace(
        CASES["score"],
        sizes={"score.weight": (1, shape["hidden_size"])},
        exported=None,
        config=BY_LENGTH.get(kind, {}),
        body=body,
        shape=shape,
        precision="bf16",
    )
    check_the_whole_way(case, tmp_path)


def check_the_whole_way(case: Case, tmp_path: Path) -> None:
    """Convert, score, evaluate, train, serve, export and convert again; compare all rewards."""
    head = write(case, tmp_path / "hf")
    expected = case.reward(hidden_of(tmp_path / "hf"), head).numpy()
    assert expected.std(axis=0).min() > 0.1

    summary = str(convert(tmp_path / "hf", tmp_path / "rm.nemo", seq_length=256))
    assert case.summary_line in summary
    assert "reads the last token of a sample, kept" in summary
    # In fp32 both programs are about 4e-6 away from fp64 with linear attention.
    near = 3 if case.body.startswith(("qwen3_5", "qwen3_next")) else 1
    close = partial(
        np.testing.assert_allclose, desired=expected, atol=1e-5 * near, rtol=5e-6 * near
    )
    ours = na.RewardModel.from_pretrained(tmp_path / "rm.nemo")
    close(ours.score(TEXTS))
    with na.RewardModel.from_pretrained(hf_model=tmp_path / "hf") as theirs:
        close(theirs.score(TEXTS))

    chosen, rejected = np.split(expected, 2)
    records, settings, loss = PAIRS, {}, float(np.logaddexp(0, rejected - chosen).mean())
    if case.outputs == 1:
        metrics = ours.evaluate(PAIRS).metrics
        assert metrics["reward_chosen_mean"] == pytest.approx(chosen.mean(), abs=1e-5 * near)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5 * near)
        exchanged = ours.evaluate(PAIRS, swapped=True).metrics["accuracy"]
        assert exchanged == pytest.approx(1 - metrics["accuracy"])
    else:
        records, settings = RATINGS, REGRESSION
        labels = [[rating[name] for name in NAMES] for rating in RATINGS]
        loss = float(((chosen - np.array(labels)) ** 2).mean())
    if "mean" in case.config:
        contract = ours.contract()
        assert (contract.reward_mean, contract.reward_std) == ((0.25,), (1.5,))
    logged: dict[str, float] = {}
    trained = na.train(
        tmp_path / "rm.nemo",
        records,
        validation=records,
        output=tmp_path / "run",
        # The first logged value is kept.
        callback=lambda progress: logged.update({**progress.metrics, **logged}),
        **SETTINGS,
        **{"trainer.precision": case.precision},
        **{"pretrained_checkpoint.allow_contract_change": case.precision != "fp32"},
        **settings,
    )
    assert logged["train/loss"] == pytest.approx(loss, rel=LOSS_TOLERANCES[case.precision])
    after = trained.score(TEXTS)
    assert np.abs(after - expected).max() > 1e-3
    trained.export(tmp_path / "out")
    if case.exported is not None:
        assert config_of(tmp_path / "out")["architectures"] == [case.exported]
    # transformers computes in fp32, so the archive is scored in fp32, too.
    archive = tmp_path / "run/checkpoints/megatron_gpt.nemo"
    exact = na.RewardModel.from_pretrained(archive, precision="fp32").score(TEXTS)
    with na.RewardModel.from_pretrained(hf_model=tmp_path / "out") as theirs:
        np.testing.assert_allclose(theirs.score(TEXTS), exact, atol=1e-4)
    convert(tmp_path / "out", tmp_path / "again.nemo")
    again = na.RewardModel.from_pretrained(tmp_path / "again.nemo")
    assert again.contract().dtype == case.precision
    np.testing.assert_allclose(again.score(TEXTS), after, atol=1e-5)
    release_models()
    np.testing.assert_array_equal(served(archive, TEXTS)["rewards"], after)


def test_head_that_is_not_alone_or_reads_no_text_is_refused(tmp_path: Path) -> None:
    write(CASES["score"], tmp_path / "hf")
    other = {"score.0.weight": torch.ones(8, HIDDEN), "score.2.weight": torch.ones(1, 8)}
    half = {"score.weight": None, "score.2.weight": torch.ones(1, 8)}
    damages = [
        (partial(edit_tensors, changes=other), "got several reward heads: score, score.2. Choose"),
        (partial(edit_tensors, changes=half), r"score\.2\.weight: .* score\.0\.weight, is missing"),
        (overwrite("value_head.bin", "a pickle"), "pickled reward heads are not supported"),
        *config_edits(
            (
                {"value_head_prefix": "a.b"},
                "value_head_prefix: got 'a.b', wanted the name of a layer",
            ),
            (
                {"architectures": ["Qwen2ForProcessRewardModel"]},
                "step_separator: it is not set, and the",
            ),
        ),
    ]
    check_refused(tmp_path / "hf", damages)
    unknown = [(lambda folder: None, "head: got 'value', wanted one of none, lm_head:ROW, ")]
    check_refused(tmp_path / "hf", unknown, head="value")
    edit_tensors(tmp_path / "hf", other)
    summary = str(convert(tmp_path / "hf", tmp_path / "two.nemo", head="score.2"))
    assert "head: score.2 (two layers of 8; written by" in summary
    assert summary.splitlines()[1].endswith("kept; dropped: score.weight")
    body = convert(tmp_path / "hf", tmp_path / "base.nemo", head="none")
    assert body.contract is None
    assert "head: none as requested; dropped: score.0.weight, score.2.weight, score.weight" in str(
        body
    )
    with open_nemo(tmp_path / "base.nemo") as folder:
        assert not [name for name in folder.tensors if name.startswith("rm_head")]


def test_head_of_an_unsupported_layout_is_named_and_can_be_dropped(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path / "hf", "llama_untied")
    edit_tensors(tmp_path / "hf", {"lm_head.weight": None})
    # Of ArmoRM, URM and QRM, and of beaver.
    armo = "LlamaForRewardModelWithGating", "gating.layers.0.weight"
    for architecture, name in (armo, ("LlamaModelForScore", "score_head.weight")):
        source = Path(shutil.copytree(tmp_path / "hf", tmp_path / architecture))
        edit(source, architectures=[architecture])
        edit_tensors(source, {name: torch.zeros(HIDDEN)})
        message = f"got a {architecture} whose reward head has no supported layout: {name}. To"
        check_refused(source, [(lambda folder: None, message)])
        body = convert(source, source / "base.nemo", head="none")
        assert body.head.startswith(f"none as requested; dropped: {name};")
        edit_tensors(source, {"model.extra.weight": torch.zeros(1)})
        check_refused(source, [(lambda folder: None, "1 tensors do not belong")], head="none")


# Chat template with the prompt for a query and a document in Qwen3-Reranker's model card.
RERANKER = (
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Query>: {{ messages[0].content }}"
    "\n<Document>: {{ messages[1].content }}<|im_end|>\n<|im_start|>assistant\n"
)
# The option --head, or the config; the decoder; and the reward from the logits of all tokens.
ROWS: dict[str, tuple[str | None, dict[str, Any], str, Callable[[Tensor, Any], Tensor]]] = {
    # Llama-3.1-Nemotron-70B-Reward-HF's card: the first score of the first generated token
    "row 0": ("lm_head:0", {}, "llama_untied", lambda logits, token: logits[..., 0]),
    # Qwen3-Reranker's card: log odds of the softmax of two tokens' logits. The tiny vocabulary has
    # no "yes" and "no".
    "y less n": (
        "lm_head:y,n",
        {},
        "qwen3",
        lambda logits, token: torch.logit(
            logits[..., [token("n"), token("y")]].double().softmax(dim=-1)[..., 1]
        ).float(),
    ),
    # vLLM: model_executor/models/adapters.py, load_weights_using_from_2_way_softmax
    "classifier_from_token": (
        None,
        {"classifier_from_token": ["n", "y"], "method": "from_2_way_softmax"},
        "qwen3_untied",
        lambda logits, token: logits[..., token("y")] - logits[..., token("n")],
    ),
    # vLLM: the same file, load_weights_no_post_processing
    "one token": (
        None,
        {"classifier_from_token": ["1"], "method": "no_post_processing", "num_labels": 2},
        "gemma",
        lambda logits, token: logits[..., token("1")],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_head_of_rows_has_the_logits_of_the_output_layer(name: str, tmp_path: Path) -> None:
    choice, config, body, reward = ROWS[name]
    write_hf_checkpoint(tmp_path / "hf", body)
    (tmp_path / "hf" / "chat_template.jinja").write_text(RERANKER)
    edit(tmp_path / "hf", **config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    expected = []
    for ids in token_lists(tokenizer):
        with torch.no_grad():
            expected.append(reward(model(ids).logits[0, -1], tokenizer.convert_tokens_to_ids))
    summary = convert(tmp_path / "hf", tmp_path / "rm.nemo", head=choice)
    assert "minus row" in summary.head or name in ("row 0", "one token")
    assert "reads the last token of a sample, kept" in summary.head
    close = partial(np.testing.assert_allclose, desired=np.array(expected)[:, None], atol=1e-4)
    ours = na.RewardModel.from_pretrained(tmp_path / "rm.nemo")
    close(ours.score(TEXTS))
    options = {} if choice is None else {"source.head": choice}
    with na.RewardModel.from_pretrained(hf_model=tmp_path / "hf", **options) as theirs:
        close(theirs.score(TEXTS))
    ours.export(tmp_path / "out")
    with na.RewardModel.from_pretrained(hf_model=tmp_path / "out") as theirs:
        close(theirs.score(TEXTS))


def test_head_of_rows_that_are_no_logits_is_refused(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path / "llama", "llama_untied")
    write_hf_checkpoint(tmp_path / "gemma2", "gemma2")
    write_hf_checkpoint(tmp_path / "granite", "granite")
    write_hf_checkpoint(tmp_path / "cohere2", "cohere2")
    rows = tiny.SHAPE["vocab_size"]
    for source, choice, config, message in (
        ("llama", "lm_head:", {}, "wanted lm_head:ROW or lm_head:ROW,ROW"),
        ("llama", "lm_head:0,1,2", {}, "wanted lm_head:ROW or lm_head:ROW,ROW"),
        (
            "llama",
            f"lm_head:{rows}",
            {},
            f"lm_head.weight: it has {rows} rows, so there is no row {rows}",
        ),
        (
            "llama",
            "lm_head:thank the",
            {},
            "token 'thank the': the tokenizer splits it into 6 tokens",
        ),
        ("llama", None, {"classifier_from_token": ["a", "b", "c"]}, "wanted two tokens with"),
        ("gemma2", "lm_head:0", {}, "final_logit_softcapping: got 30.0. This setting changes"),
        ("granite", "lm_head:0", {}, "logits_scaling: got 4.0. This setting changes"),
        ("cohere2", "lm_head:0", {}, "logit_scale: got 0.0625. This setting changes"),
    ):
        edit(tmp_path / source, **{"classifier_from_token": None, **config})
        with pytest.raises(CheckpointError) as caught:
            convert(tmp_path / source, tmp_path / "rm.nemo", head=choice)
        assert message in str(caught.value), str(caught.value)


def test_head_of_rows_of_two_different_tensors_is_refused(tmp_path: Path) -> None:
    """A tied output layer that is stored, too, may have been trained apart from the embedding."""
    tiny.write_hf_checkpoint(tmp_path / "hf")
    rows = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"].clone()
    rows[7] += 1
    edit_tensors(tmp_path / "hf", {"lm_head.weight": rows})
    convert(tmp_path / "hf", tmp_path / "same.nemo", head="lm_head:6")
    message = r"tie_word_embeddings: got true, but lm_head\.weight and .* in the rows 7 .*to false"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "hf", tmp_path / "rm.nemo", head="lm_head:7")
    edit(tmp_path / "hf", tie_word_embeddings=False)
    convert(tmp_path / "hf", tmp_path / "rm.nemo", head="lm_head:7")
    with open_nemo(tmp_path / "rm.nemo") as folder:
        assert torch.equal(folder.store.read("model.rm_head.weight")[0], rows[7])


def test_head_of_a_class_that_appends_a_token_needs_that_token(tmp_path: Path) -> None:
    """Athene's class has the id of its token in its code, not in config.json."""
    write_hf_checkpoint(tmp_path / "hf", "llama_untied")
    edit_tensors(tmp_path / "hf", {"v_head.weight": torch.ones(1, HIDDEN), "lm_head.weight": None})
    name = "AtheneForSequenceClassification"
    edit(tmp_path / "hf", architectures=[name], auto_map={"AutoModel": f"modeling_athene.{name}"})
    message = r"reward_token_id: it is missing .* with v_head\.weight append .*--reward-token"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "hf", tmp_path / "rm.nemo")
    with pytest.raises(CheckpointError, match=message):
        na.RewardModel.from_pretrained(hf_model=tmp_path / "hf")
    for number, token in enumerate(("<|endoftext|>", "0")):
        summary = convert(tmp_path / "hf", tmp_path / f"{number}.nemo", reward_token=token)
        assert summary.contract is not None
        assert summary.contract.reward_token_id == 0
    for token, problem in (("320", "reward_token: got 320"), ("no such", "splits it into")):
        with pytest.raises(CheckpointError, match=problem):
            convert(tmp_path / "hf", tmp_path / "rm.nemo", reward_token=token)
    edit_tensors(tmp_path / "hf", {"v_head.weight": None, "score.weight": torch.ones(1, HIDDEN)})
    unknown = f"note: this package does not know the class {name}. It reads the reward at the last"
    assert unknown in str(convert(tmp_path / "hf", tmp_path / "unknown.nemo"))
    edit(tmp_path / "hf", architectures=["LlamaForSequenceClassification"])
    assert "note" not in str(convert(tmp_path / "hf", tmp_path / "known.nemo"))


def test_head_of_internlm2_reads_the_reward_token(tmp_path: Path) -> None:
    """As in get_score of InternLM2's code: the reward token follows the rendered conversation."""
    write_hf_checkpoint(tmp_path / "llama", "llama_untied")
    theirs = internlm2_names(load_file(tmp_path / "llama/model.safetensors"))
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5)) * 0.3
    token_id = 0
    shutil.copytree(tmp_path / "llama", tmp_path / "hf")
    save_file(
        {**theirs, "v_head.weight": head}, tmp_path / "hf/model.safetensors", {"format": "pt"}
    )
    edit(
        tmp_path / "hf",
        architectures=["InternLM2ForRewardModel"],
        model_type="internlm2",
        bias=False,
        rope_scaling={"type": "dynamic", "factor": 2.0},
        reward_token_id=token_id,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    body = AutoModel.from_pretrained(tmp_path / "llama").eval()
    raw = tokenizer("the cat sings", add_special_tokens=False, return_tensors="pt").input_ids
    lists = [*token_lists(tokenizer), raw]
    with torch.no_grad():
        ends = [body(F.pad(ids, (0, 1), value=token_id)).last_hidden_state[0, -1] for ids in lists]
    expected = (torch.stack(ends) @ head.T).numpy()

    summary = convert(tmp_path / "hf", tmp_path / "rm.nemo")
    description = (
        "v_head (linear; written by InternLM2ForRewardModel), reads token 0, which is appended"
    )
    assert summary.head.startswith(description)
    ours = na.RewardModel.from_pretrained(tmp_path / "rm.nemo")
    np.testing.assert_allclose(ours.score([*TEXTS, "the cat sings"]), expected, atol=1e-5)
    trained = na.train(
        tmp_path / "rm.nemo", PAIRS, validation=PAIRS, output=tmp_path / "run", **SETTINGS
    )
    assert trained.contract().reward_token_id == token_id
    after = trained.score([*TEXTS, "the cat sings"])
    assert np.abs(after - expected).max() > 1e-3
    trained.export(tmp_path / "exported")
    assert config_of(tmp_path / "exported")["architectures"] == ["LlamaForSequenceClassification"]
    with na.RewardModel.from_pretrained(hf_model=tmp_path / "exported") as exported:
        np.testing.assert_allclose(exported.score([*TEXTS, "the cat sings"]), after, atol=1e-4)
    written = AutoTokenizer.from_pretrained(tmp_path / "exported").apply_chat_template(
        TEXTS[0], tokenize=False
    )
    assert written.endswith("<|endoftext|>")
    again = convert(tmp_path / "exported", tmp_path / "again.nemo")
    assert again.contract == trained.contract()
    refused = [
        (partial(edit, reward_token_id=400), "reward_token_id: got 400, wanted a token id below"),
        (partial(edit, reward_token_id="a"), "reward_token_id: got 'a', wanted a token's id"),
        (partial(edit, bias=True), "bias: got True, which is not supported"),
    ]
    check_refused(tmp_path / "hf", refused)
