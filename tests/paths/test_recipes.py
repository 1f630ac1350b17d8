"""Every recipe runs as its comment says, with a tiny model; pairs are made from rated replies."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.data.readers import ReaderConfig, read_records
from tests.data.files import write
from tests.harness import tiny

RECIPES = tiny.ROOT / "conf" / "recipes"
HELPSTEER2 = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
# Settings of a recipe that need what a laptop does not have: GPUs, and hours.
SMALL = (
    "trainer.precision=fp32",
    "trainer.rm.max_steps=2",
    "model.tensor_model_parallel_size=1",
    "model.pipeline_model_parallel_size=1",
    "model.context_parallel_size=1",
    "model.activations_checkpoint_num_layers=null",
    "model.sequence_parallel=false",
    "model.global_batch_size=8",
    "model.micro_batch_tokens=512",
    "model.data.seq_length=128",
    "exp_manager.create_tensorboard_logger=false",
)
Record = dict[str, Any]


def chat_pair(rng: random.Random) -> Record:
    """Records in the form of UltraFeedback (binarized) and Skywork."""
    question = {"role": "user", "content": tiny.sentence(rng)}
    chosen, rejected = (
        [question, {"role": "assistant", "content": tiny.sentence(rng)}] for _ in range(2)
    )
    scores = {"score_chosen": 8.5, "score_rejected": 4.0}
    return {"prompt": question["content"], "chosen": chosen, "rejected": rejected, **scores}


def rated(rng: random.Random) -> Record:
    labels = {name: rng.randrange(5) for name in HELPSTEER2}
    return {"prompt": tiny.sentence(rng), "response": tiny.sentence(rng), **labels}


def preference(rng: random.Random) -> Record:
    texts = {name: tiny.sentence(rng) for name in ("prompt", "response_1", "response_2")}
    return {**texts, "preference_strength": rng.choice((-3, -2, -1, 1, 2, 3))}


def solution(rng: random.Random) -> Record:
    """Records in the form of TRL's stepwise supervision."""
    steps = [tiny.sentence(rng) for _ in range(rng.randrange(1, 5))]
    labels = [rng.choice((True, False)) for _ in steps]
    return {"prompt": tiny.sentence(rng), "completions": steps, "labels": labels}


LADDER = ("helpsteer2_preference_1_regression", "helpsteer2_preference_2_scaled_bt")
RECORDS: dict[str, Callable[[random.Random], Record]] = {
    "ultrafeedback_ranking": chat_pair,
    "helpsteer2_regression": rated,
    LADDER[0]: rated,
    LADDER[1]: preference,
    "skywork_8b": chat_pair,
    "lora_one_gpu": chat_pair,
    "lora_24gb": chat_pair,
    "moe_30b_a3b": chat_pair,
    "long_dialogues_8b": chat_pair,
    "process_reward_model": solution,
}


def train(name: str, start: Path, folder: Path) -> Path:
    """Run the recipe; return its model."""
    folder.mkdir()
    rng = random.Random(0)
    data, heldout = (
        write(folder / f"{part}.jsonl", *(RECORDS[name](rng) for _ in range(count)))
        for part, count in (("train", 24), ("heldout", 8))
    )
    tiny.run_verb(
        "train",
        "--config",
        str(RECIPES / f"{name}.yaml"),
        f"pretrained_checkpoint.restore_from_path={start}",
        f"model.data.data_prefix.train={data}",
        f"model.data.data_prefix.validation={heldout}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        *SMALL,
    )
    return folder / "run" / "checkpoints" / "megatron_gpt.nemo"


def evaluate(model: Path, heldout: Path) -> dict[str, float]:
    report = heldout.with_suffix(".report.json")
    tiny.run_verb("evaluate", f"rm_model_file={model}", f"data.path={heldout}", f"output={report}")
    return json.loads(report.read_text())["metrics"]


def test_every_recipe_is_run_here() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(RECORDS)


@pytest.mark.parametrize("name", [name for name in RECORDS if name not in LADDER])
def test_a_recipe_gives_a_model_that_is_evaluated(name: str, base: Path, tmp_path: Path) -> None:
    model = train(name, base, tmp_path / "first")
    metrics = evaluate(model, tmp_path / "first" / "heldout.jsonl")
    assert metrics["loss"] > 0


def test_the_ladder_goes_on_from_rung_to_rung(base: Path, tmp_path: Path) -> None:
    first = train(LADDER[0], base, tmp_path / "first")
    second = train(LADDER[1], first, tmp_path / "second")
    third = tmp_path / "expo.nemo"
    options = ("--extrapolate", "0.5", "--output", str(third))
    tiny.run_verb("merge", *options, "--input", str(first), str(second))
    heldout = tmp_path / "second" / "heldout.jsonl"
    losses = [evaluate(model, heldout)["loss"] for model in (second, third)]
    assert losses[0] != losses[1]


SCRIPT = tiny.ROOT / "examples/data/pairs_from_ratings.py"
RATINGS = (5, 1, None, 3, 3)


def test_the_better_rated_reply_is_the_chosen_one(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"prompt\u2028{number}", "response": f"{rating}", "helpfulness": rating}
        for number, rating in enumerate(RATINGS)
    ]
    source, output = tmp_path / "ratings.jsonl", tmp_path / "pairs.jsonl"
    source.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    command = [sys.executable, str(SCRIPT), str(source), "--attribute=helpfulness"]
    done = subprocess.run(
        [*command, f"--output={output}", "--each=3"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{output}: 10 pairs by helpfulness\n"
    records = read_records(output, ReaderConfig()).records
    # Three other replies have a rating other than 5 or 1, two one other than 3.
    assert len(records) == 3 + 3 + 2 + 2
    for record in records:
        chosen, rejected = (int(text[-1]["content"]) for text in record.texts)
        assert chosen > rejected
