"""Scoring against transformers: the same weights and tokens, turn by turn.

    python benchmarks/scoring.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl

Three kinds of work: both replies of pairs from ``--data``; single replies in the order in which
they come; and a group of 16 replies of about 200 tokens to one prompt of 1,024, as GRPO asks for
it. transformers gets padded batches of ``--batch`` texts, sorted by length or as they come. Both
run in fp32 on the CPU, in bf16 on a GPU. Real tokens are those of the texts, each time they are
asked for.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    add_device_option,
    choose_device,
    machine,
    median_of_ratios,
    prepare_model,
    render,
    write_json,
)

Score = Callable[[list[list[int]]], np.ndarray]
SMALLEST_BUDGET = 8192


@dataclass(frozen=True)
class Work:
    """Token lists to score, and whether transformers may sort them by length."""

    name: str
    token_lists: list[list[int]]
    is_sorted: bool


def main() -> None:
    arguments = _parse()
    device = choose_device(arguments.device)
    import torch

    from nemo_aligner.config.common import Overlong, Precision
    from nemo_aligner.config.data import DataConfig
    from nemo_aligner.config.model import ModelConfig
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout

    torch.set_num_threads(arguments.threads)
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    hf, nemo = prepare_model(arguments.model, work)
    gpu = device == "cuda"
    precision = Precision.bf16 if gpu else Precision.fp32
    data = DataConfig(seq_length=2048, overlong=Overlong.truncate_left)
    with launch():
        ours, encode, vocabulary = _our_scorer(
            nemo, ModelConfig(data=data), precision, initialize_layout()
        )
        theirs = _their_scorer(hf, ours.weights, arguments.batch, gpu)
        rows = []
        for each in _works(arguments, encode, vocabulary):
            rows += _compare(each, ours.score, theirs, arguments.turns)
            print(f"\n{render(rows)}", flush=True)
    about = {"machine": machine(), "model": str(arguments.model), "precision": precision.value}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows})


@dataclass(frozen=True)
class _Ours:
    score: Score
    weights: np.ndarray


def _our_scorer(
    nemo: Path, config: Any, precision: Any, layout: Any
) -> tuple[_Ours, Callable[[Any], list[int]], int]:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
    from nemo_aligner.scoring.scorer import RewardScorer
    from nemo_aligner.text.contract import build_contract

    pretrained = load_pretrained(nemo, layout, num_attributes=1, precision=precision)
    tokenizer = pretrained.tokenizer
    contract = build_contract(config, tokenizer, precision)
    scorer = RewardScorer(pretrained.model.eval(), contract, tokenizer, layout, SMALLEST_BUDGET)
    head = pretrained.model.rm_head.weight.detach().cpu().numpy()

    def score(token_lists: list[list[int]]) -> np.ndarray:
        return scorer.score_token_lists(token_lists)[:, 0]

    def encode(text: Any) -> list[int]:
        return scorer.encode(text).token_ids

    return _Ours(score, head), encode, tokenizer.vocab_size


def _their_scorer(hf: Path, head: np.ndarray, batch: int, gpu: bool) -> Callable[[bool], Score]:
    """``(is_sorted) -> score``: padded batches through AutoModelForSequenceClassification."""
    import torch
    from transformers import AutoModelForSequenceClassification

    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(hf, num_labels=1, dtype=dtype)
    model = model.to(device).eval()
    model.config.pad_token_id = 0
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(head))

    @torch.no_grad()
    def rewards(token_lists: Sequence[list[int]]) -> list[float]:
        longest = max(map(len, token_lists))
        ids = torch.zeros(len(token_lists), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        # On the left, so that the last column is every text's last token.
        for row, tokens in enumerate(token_lists):
            ids[row, longest - len(tokens) :] = torch.tensor(tokens)
            mask[row, longest - len(tokens) :] = 1
        places = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = model.model(
            ids.to(device), attention_mask=mask.to(device), position_ids=places.to(device)
        ).last_hidden_state[:, -1]
        return model.score(hidden).float()[:, 0].tolist()

    def scorer(is_sorted: bool) -> Score:
        def score(token_lists: list[list[int]]) -> np.ndarray:
            order = list(range(len(token_lists)))
            if is_sorted:
                order.sort(key=lambda place: len(token_lists[place]))
            found = np.empty(len(order), dtype=np.float32)
            for start in range(0, len(order), batch):
                part = order[start : start + batch]
                found[part] = rewards([token_lists[place] for place in part])
            return found

        return score

    return scorer


def _works(
    arguments: argparse.Namespace, encode: Callable[[Any], list[int]], vocabulary: int
) -> list[Work]:
    from nemo_aligner.config.common import RecordKind
    from nemo_aligner.data.reading import read_records

    records = read_records(arguments.data, RecordKind.comparison).records[: arguments.pairs]
    pairs = [encode(text) for record in records for text in record.texts]
    rng = np.random.RandomState(0)
    prompt = rng.randint(100, vocabulary, 1024).tolist()
    replies = [rng.randint(100, vocabulary, rng.randint(150, 251)).tolist() for _ in range(16)]
    return [
        Work("pairs, theirs sorted by length", pairs, True),
        Work("single replies as they come", pairs[::2], False),
        Work("a group of 16 replies", [[*prompt, *reply] for reply in replies], True),
    ]


def _compare(
    work: Work, ours: Score, their_scorer: Callable[[bool], Score], turns: int
) -> list[dict[str, Any]]:
    theirs = their_scorer(work.is_sorted)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    difference = 0.0
    for _ in range(turns):
        found = {}
        for name, score in (("ours", ours), ("theirs", theirs)):
            start = time.perf_counter()
            found[name] = score(work.token_lists)
            seconds[name].append(time.perf_counter() - start)
        difference = max(difference, float(np.abs(found["ours"] - found["theirs"]).max()))
    tokens = sum(map(len, work.token_lists))
    ratio = median_of_ratios(seconds["ours"], seconds["theirs"])
    labels = {"ours": "nemo_aligner", "theirs": "transformers"}
    return [
        {
            "work": work.name,
            "scorer": labels[name],
            "rewards/s": len(work.token_lists) / median(seconds[name]),
            "real tokens/s": tokens / median(seconds[name]),
            "largest |difference|": difference if name == "theirs" else "",
            "ours is faster by": ratio if name == "theirs" else "",
        }
        for name in ("ours", "theirs")
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a .gguf, or a folder")
    parser.add_argument("--data", type=Path, required=True, help="pairs")
    parser.add_argument("--pairs", type=int, default=24, help="how many (default 24)")
    parser.add_argument("--batch", type=int, default=8, help="of transformers (default 8)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default 2)")
    add_device_option(parser)
    parser.add_argument("--work", help="a folder to keep the converted model in")
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
