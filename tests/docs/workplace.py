"""A folder with tiny versions of everything that the pages mention: models, data, a run."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.evaluation.tasks import find_task
from tests.checkpoint.hf.gguf_writing import write_gguf
from tests.config.nemo_aligner_files import write_file
from tests.harness import families, tiny
from tests.harness.launching import ROOT

HEADS = 8  # and as many query groups, for as many ranks
PAIRS = 16
HUB_PAIRS = 80  # split at 0.1, they still fill one batch of the default 64
RUN = ("model.global_batch_size=8", "model.optim.sched.warmup_steps=1")
JUST_EVAL = ("helpfulness", "clarity", "factuality", "depth", "engagement")
HELPSTEER2 = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
OF_PAIRS = (
    "chat", "heldout", "pairs", "preference_heldout", "preference_train", "safety", "test", "train",
)  # fmt: skip
HUB_DATA = ("Anthropic/hh-rlhf", "nvidia/HelpSteer3", "nvidia/HelpSteer3:validation")
HF_FOLDERS = (
    "FOLDER_OR_HUB_NAME", "OpenRLHF/Llama-3-8b-sft-mixture",
    "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct", "path/to/hf_folder",
)  # fmt: skip
REWARD_MODELS = (
    "a.nemo", "b.nemo", "c.nemo", "megatron_gpt.nemo", "ranking.nemo", "regression.nemo",
    "reward.nemo", "results/quickstart/run/checkpoints/megatron_gpt.nemo",
    "results/rm/checkpoints/megatron_gpt.nemo",
)  # fmt: skip


def build_workplace(folder: Path) -> None:
    """Make everything that a page assumes to exist, under the page's names."""
    for name in ("conf", "examples", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    _write_data(folder)
    base = tiny.write_base_nemo(
        folder / "base.nemo",
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=8192,
    )
    source = base.with_suffix(".hf")
    for name in HF_FOLDERS:
        shutil.copytree(source, folder / name)
    for name in ("SmolLM2-135M-Instruct.gguf", "path/to/hf_folder_or_file.gguf"):
        write_gguf(folder / name, source)
    for name in ("smollm2.nemo", "results/quickstart/base.nemo"):
        _copy(base, folder / name)
    families.write_base_nemo(folder / "qwen3-30b-a3b.nemo", "qwen3_moe")
    tiny.write_hf_reward_model(folder / "Skywork/Skywork-Reward-V2-Qwen3-0.6B")
    tiny.write_tokenizer(folder / "FOLDER")
    tiny.write_reward_nemo(folder / "first.nemo")
    tiny.run_verb("train", *first_run("results/second"), *RUN, folder=folder)
    for name in REWARD_MODELS:
        _copy(folder / "results/second/checkpoints/megatron_gpt.nemo", folder / name)
    for name in ("training_rm.yaml", "inference_rm.yaml", "gpt_ppo_critic.yaml"):
        write_file(folder, name)


def first_run(results: str) -> list[str]:
    """Settings of a training on the files here."""
    return [
        "pretrained_checkpoint.restore_from_path=base.nemo",
        "model.data.data_prefix.train=train.jsonl",
        "model.data.data_prefix.validation=heldout.jsonl",
        f"exp_manager.explicit_log_dir={results}",
    ]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _write_data(folder: Path) -> None:
    for seed, name in enumerate(OF_PAIRS):
        path = tiny.write_pairs(folder / f"{name}.jsonl", PAIRS, seed)
        _write(path, [{**pair, "label_margin": 1.0} for pair in read_rows(path)])
    tiny.write_ratings(folder / "ratings.jsonl", PAIRS, ("helpfulness", "verbosity"))
    _write(folder / "rewardbench.jsonl", [find_task("rewardbench").sample] * 2)
    pairs, heldout = read_rows(folder / "pairs.jsonl"), read_rows(folder / "heldout.jsonl")
    keys = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    _write(folder / "questions.jsonl", [{keys[key]: pair[key] for key in keys} for pair in pairs])
    _write(folder / "helpful-base-test.jsonl.gz", [_as_hh(pair) for pair in pairs])
    scores = {"score_chosen": 8.0, "score_rejected": 5.5}
    for name, rows in (("train", pairs), ("heldout", heldout)):
        rated = [{**row, "metadata": scores} for row in rows]
        _write(folder / f"ultrafeedback_{name}.jsonl.gz", rated)
    rated = read_rows(tiny.write_ratings(folder / "rated.tmp", 2 * PAIRS, HELPSTEER2))
    _write(folder / "helpsteer2_train.jsonl", rated[:PAIRS])
    _write(folder / "helpsteer2_validation.jsonl", rated[PAIRS:])
    just = tiny.write_ratings(folder / "just.tmp", PAIRS, JUST_EVAL)
    (folder / "just_eval_5attr.jsonl.gz").write_bytes(gzip.compress(just.read_bytes()))
    responses = [
        {"prompt": row["prompt"], "responses": [row["chosen"], row["rejected"]]} for row in pairs
    ]
    _write(folder / "responses.jsonl", responses)
    for seed, name in enumerate(HUB_DATA):
        (folder / name).parent.mkdir(exist_ok=True)
        tiny.write_pairs(folder / name, HUB_PAIRS, seed)
    answers = [_answers(random.Random(seed)) for seed in range(PAIRS)]
    (folder / "dev_feedback.json.gz").write_bytes(gzip.compress(json.dumps(answers).encode()))


def _as_hh(pair: dict[str, str]) -> dict[str, str]:
    prompt = f"\n\nHuman: {pair['prompt']}\n\nAssistant: "
    return {key: prompt + pair[key] for key in ("chosen", "rejected")}


def _answers(rng: random.Random) -> dict[str, Any]:
    """A question of QA-Feedback with four answers, best first."""
    return {
        "question": tiny.sentence(rng),
        "passages": [[tiny.sentence(rng), tiny.sentence(rng)]],
        **{f"prediction {number}": tiny.sentence(rng) for number in range(1, 5)},
        "preference": [1] * 6,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
