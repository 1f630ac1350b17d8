"""Rewards are bit-identical in any batch: in process, over HTTP, and at any layout."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
from nemo_aligner.config.common import Precision
from nemo_aligner.cpu import kernel_attention, matmuls
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention import packed
from nemo_aligner.models.attention.backends import BACKENDS
from nemo_aligner.models.step import infer
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.tools.invariance import score_alone, score_calls
from tests.harness import families, tiny
from tests.harness.once import Once
from tests.harness.scorers import score_tokens
from tests.serving.engine.batch_invariance import (
    BUDGET,
    LONGEST,
    PRECISIONS,
    VERY_LONG,
    Case,
    alone,
    calls,
    compare,
    count_changed,
    draw,
    draw_texts,
    scorers_of,
    write_cases,
)
from tests.serving.servers import SERVE, running

SCRIPT = "tests/serving/engine/batch_invariance.py"
NOTHING = {"fp32": 0, "bf16": 0}


@pytest.fixture(scope="module", autouse=True)
def folder(once: Once) -> Path:
    """Archives of a tiny reward model for short and for long samples.

    The fixture runs before ``layout``, because writing an archive needs its own process group.
    """

    def write(folder: Path) -> None:
        for longest in (LONGEST, VERY_LONG):
            tiny.write_reward_nemo(folder / f"{longest}.nemo", seq_length=longest)

    return once("company", write)


@pytest.fixture(scope="module")
def short(folder: Path) -> Case:
    return Case(str(folder / f"{LONGEST}.nemo"), draw_texts(100, LONGEST, 90), orders=6)


@pytest.fixture(scope="module")
def very_long(folder: Path) -> Case:
    texts = draw_texts(5, VERY_LONG, 90)
    return Case(str(folder / f"{VERY_LONG}.nemo"), texts, orders=2, budget=VERY_LONG)


def test_rewards_have_the_same_bits_in_any_company(
    short: Case, very_long: Case, layout: ParallelLayout
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # three threads split rows less evenly than one or two
    assert compare(short, layout) == NOTHING
    assert compare(very_long, layout) == NOTHING
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "case",
    [
        "smollm3_untied_window", "gemma3", "olmo2", "granite", "phi3_window", "glm4",
        "qwen2_moe", "gpt_oss", "llama_dynamic", "phi3_longrope",
    ],
)  # fmt: skip
def test_rewards_of_other_decoders_have_the_same_bits_in_any_company(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    """Decoders with norms, windows, RoPE scalings, factors and experts that Llama does not have.

    The last two use another RoPE for most samples than for short ones with the same prefix.
    """
    assert compare(replace(of_family(tmp_path, case), orders=4), layout) == NOTHING


def of_family(folder: Path, case: str, longest: int = LONGEST) -> Case:
    families.write_reward_model(folder / case, case, torch.float32)
    convert_hf_to_nemo(folder / case, folder / f"{case}.nemo", seq_length=longest)
    return Case(str(folder / f"{case}.nemo"), draw_texts(28, longest, 90), orders=3)


@pytest.mark.parametrize(
    "case",
    ["qwen3_next", "gpt_oss", "deepseek_v3", "nemotron_h", "gemma4_moe"],
)
def test_rewards_with_shared_prefixes_of_every_length_are_those_alone(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    """Packs of four pairs with 140 equal tokens, of which each pair shares another number.

    The decoders are those with linear or latent attention, Mamba-2, attention sinks, heads of two
    sizes, clamped experts with biases, and routers with groups of experts or a bias for their
    choice.
    """
    rng = random.Random(0)
    prefixes = [draw(rng, 140) for _ in range(4)]
    samples = [[*prefix, *draw(rng, rng.randint(1, 60))] for prefix in prefixes for _ in range(2)]
    archive = of_family(tmp_path, case, longest=200).archive
    for precision in PRECISIONS:
        model = load_scorer(archive, layout, precision=precision, micro_batch_tokens=2048).model
        packs = [PackedBatch.pack([sample]) for sample in samples] + [PackedBatch.pack(samples)]
        for shortest in range(1, 36):
            lengths = range(shortest, 141, 35)
            packs.append(PackedBatch.pack(samples, groups=[Group(2, it) for it in lengths]))
            assert packs[-1].num_tokens == sum(map(len, samples)) - sum(lengths)
        rewards = infer(model, packs, layout)
        assert rewards is not None
        alone, *together = rewards.split(len(samples))
        assert alone.std() > 0.1
        changed = [number for number, it in enumerate(together) if not torch.equal(it, alone)]
        assert not changed, precision


def test_rewards_have_the_same_bits_in_any_company_at_any_layout(
    short: Case, very_long: Case, tmp_path: Path
) -> None:
    """With one thread per rank. The statistics of OLMo 2's norms span both ranks."""
    cases = {
        "short": replace(short, texts=short.texts[:30], orders=4),
        "very long": very_long,
        "olmo2": of_family(tmp_path, "olmo2"),
    }
    layouts = ("TP=2", "PP=2", "TP=2+SP", "CP=2")
    arguments = (str(write_cases(tmp_path / "cases.json", cases)), *layouts)
    done = tiny.run_script(SCRIPT, *arguments, processes=2, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {layout: dict.fromkeys(cases, NOTHING) for layout in layouts}


def test_rewards_of_shared_texts_have_the_bits_of_one_process(
    short: Case, very_long: Case, layout: ParallelLayout, tmp_path: Path
) -> None:
    """Attention by spans, in windows, with softcaps, and of samples shorter than a rank's rows.

    Two ranks split the work by pipeline stages, or by chunks of each sample; also means of replies.
    """
    loaded, means = load_reward_model(Path(short.archive), layout), tmp_path / "means.nemo"
    contract = replace(loaded.contract, scored_position="reply_mean", reply_marker=(5,))
    save_reward_model(means, loaded.model, loaded.config, loaded.tokenizer, contract)
    cases = {
        "means": replace(short, archive=str(means), texts=short.texts[:30]),
        "short": replace(short, texts=[*short.texts[:20], [5], [7, 8], [9, 8, 7]]),
        "very long": very_long,
        "gemma2": of_family(tmp_path, "gemma2"),
    }
    arguments = (str(write_cases(tmp_path / "cases.json", cases)), "--alone", "CP=2", "PP=2")
    done = tiny.run_script(SCRIPT, *arguments, processes=2, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = {name: alone(case, layout) for name, case in cases.items()}
    assert found == {"CP=2": wanted, "PP=2": wanted}


def test_rewards_of_a_mixture_have_the_same_bits_in_any_company_at_any_layout(
    tmp_path: Path,
) -> None:
    """With expert parallelism, matmuls have rows from the samples of both ranks."""
    cases = {case: of_family(tmp_path, case) for case in ("glm4_moe", "gpt_oss")}
    layouts = ("EP=2", "TP=2+SP")
    arguments = (str(write_cases(tmp_path / "cases.json", cases)), *layouts)
    done = tiny.run_script(SCRIPT, *arguments, processes=2)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {layout: dict.fromkeys(cases, NOTHING) for layout in layouts}


def test_rewards_have_the_same_bits_in_any_company_over_http(
    short: Case, layout: ParallelLayout, tmp_path: Path
) -> None:
    from nemo_aligner.serving.client.reward import RewardClient

    texts = draw_texts(80, LONGEST, 90, seed=1)
    scorer = scorers_of(short, layout, Precision.bf16, rows=256)[0]
    alone = score_alone(partial(score_tokens, scorer), texts)
    settings = (f"rm_model_file={short.archive}", "precision=bf16", "server.port=0")
    more = (f"model.micro_batch_tokens={BUDGET}", "server.prefix_cache_tokens=512")
    with (
        running(tmp_path, SERVE, *settings, *more) as server,
        RewardClient(server.url, timeout_s=60, wait_s=60) as client,
    ):
        for seed in range(6):
            got = score_calls(client.score_tokens, texts, calls(len(texts), seed))
            np.testing.assert_array_equal(got, alone)


def test_rewards_on_a_cpu_without_avx512(short: Case, tmp_path: Path) -> None:
    """On such a CPU, oneDNN does not run bf16 matmuls."""
    few = replace(short, texts=short.texts[:30], orders=2)
    cases = str(write_cases(tmp_path / "cases.json", {"few": few}))
    least = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = tiny.run_script(SCRIPT, cases, "one", env=least, fresh=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"one": {"few": NOTHING}}


def few_changed(short: Case, layout: ParallelLayout, rows: int | None = 256) -> int:
    scorers = scorers_of(short, layout, Precision.fp32, rows)
    return count_changed(scorers, short.texts[:30], 4)


def test_rewards_by_products_that_depend_on_their_rows(
    short: Case, layout: ParallelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate matmuls of other processors, and show that this test would notice them."""
    product = matmuls._any_matmul

    def by_company(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(rows, weight, bias) * (1 + 2**-20 * (rows.size(0) % 96))

    monkeypatch.setattr(matmuls, "_any_matmul", by_company)
    monkeypatch.setattr(matmuls, "_TRIED", {})
    assert few_changed(short, layout) == 0
    monkeypatch.setattr(matmuls, "_TRIED", {})
    monkeypatch.setattr(matmuls.Trials, "has_same_bits", lambda *unused: True)
    assert few_changed(short, layout) > 10
    monkeypatch.undo()

    training = next(backend for backend in BACKENDS if backend.name == "CPU training")
    monkeypatch.setattr(kernel_attention, "can_attend", lambda *unused: False)
    # It cuts sequences where their segments are.
    monkeypatch.setattr(packed, "choose_backend", lambda case: training)
    assert few_changed(short, layout) > 10
