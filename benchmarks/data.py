"""How long a training run takes to load a large file of pairs, and how much memory that needs.

    python benchmarks/data.py --pairs 100000 1000000

The file is made from random words, in the format of HH-RLHF (about 3.6 kB a pair). Unless
``--tokenizer`` names a folder, a BPE tokenizer of 16,384 tokens is trained on the same words. The
file is then loaded twice, each time in a new process, as ``nemo-aligner train`` does before its
first step: the first start tokenizes the file and writes a token cache, the second start
memory-maps the cache. Columns of the table:

- ``pairs/s``: pairs divided by the seconds of the first start
- ``indexing, GB``: an upper bound of the memory of all processes of the first start: the peak of
  the main process, mapped files included, plus the largest peak of a worker times their number
- ``a rank, MB``: anonymous memory (not shared, not mapped from a file) after the second start
- ``a step's packs, ms``: time to pack the 512 records of a training step into micro-batches of
  8,192 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from common import machine, render, run_worker, start, write_json

_SYLLABLES = [
    "ba",
    "bre",
    "chi",
    "do",
    "feau",
    "gru",
    "hing",
    "lan",
    "mer",
    "nou",
    "pa",
    "ri",
    "stu",
    "the",
    "vo",
    "wan",
    "seer",
    "tol",
    "cu",
    "ging",
]
_WORDS, _SENTENCES = 20_000, 20_000
_VOCABULARY = 16_384
_GLOBAL_BATCH, _PACK_TOKENS, _QUERY_KEY_COST = 512, 8192, 1e-4
_STEPS = 8
_PAUSE_S = 0.5
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def main() -> None:
    arguments = _parse()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = arguments.tokenizer or _make_tokenizer(work / "tokenizer")
    rows, starts_by_pairs = [], {}
    for pairs in arguments.pairs:
        path = work / f"pairs_{pairs}.jsonl"
        if not path.is_file():
            _write_pairs(path, pairs)
        for index in work.glob(f"{path.name}.index-*"):
            shutil.rmtree(index)
        job = {"path": str(path), "tokenizer": str(tokenizer), "pairs": pairs}
        starts = [run_worker("data.py", "begin", job, arguments.threads) for _ in range(2)]
        starts_by_pairs[pairs] = starts
        rows.append(_summarize_starts(pairs, path, *starts))
    print(f"{machine()}, {arguments.threads} thread(s) of torch")
    print(render(rows))
    write_json(arguments.json, {"starts": starts_by_pairs})


def _summarize_starts(
    pairs: int, path: Path, first: dict[str, Any], second: dict[str, Any]
) -> dict[str, Any]:
    return {
        "pairs": pairs,
        "file, GB": path.stat().st_size / 1e9,
        "pairs/s": pairs / first["seconds"],
        "indexing, GB": first["all_bytes"] / 1e9,
        "a rank, MB": second["own_bytes"] / 1e6,
        "bytes a pair": second["own_growth"] / pairs,
        "second start, s": second["seconds"],
        "a step's packs, ms": second["pack_ms"],
    }


def _make_tokenizer(folder: Path) -> Path:
    """Train a byte-level BPE tokenizer with ChatML's tokens on random sentences.

    Returns:
        ``folder``, which transformers can load as a tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_make_sentences(random.Random(0)), trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _make_sentences(rng: random.Random) -> list[str]:
    words = ["".join(rng.choices(_SYLLABLES, k=rng.choice((1, 1, 2, 2, 3)))) for _ in range(_WORDS)]
    weights = [1 / (rank + 2) for rank in range(_WORDS)]
    return [
        " ".join(rng.choices(words, weights, k=rng.randint(6, 22))).capitalize() + rng.choice(".?!")
        for _ in range(_SENTENCES)
    ]


def _write_pairs(path: Path, pairs: int) -> None:
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(_generate_lines(pairs))
    part.rename(path)


def _generate_lines(pairs: int) -> Iterator[str]:
    rng = random.Random(1)
    sentences = _make_sentences(random.Random(0))

    def draw_text(max_sentences: int) -> str:
        return " ".join(rng.choices(sentences, k=rng.randint(1, max_sentences)))

    for number in range(pairs):
        turns = [
            f"\n\nHuman: {draw_text(4)}\n\nAssistant: {draw_text(9)}"
            for _ in range(rng.randint(0, 3))
        ]
        prompt = f"{''.join(turns)}\n\nHuman: {draw_text(4)} Number {number}.\n\nAssistant: "
        yield (
            json.dumps({"chosen": prompt + draw_text(8), "rejected": prompt + draw_text(8)}) + "\n"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument(
        "--tokenizer", type=Path, help="folder with a tokenizer; default: train one"
    )
    parser.add_argument(
        "--work", type=Path, help="folder that keeps the files; default: a temporary one"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="number of torch threads (default 1)"
    )
    parser.add_argument("--json", type=Path, help="JSON file to write the figures to")
    return parser.parse_args()


def start_run(job: dict[str, Any]) -> dict[str, Any]:
    """Do what a training run does from its settings to the packs of its first step.

    Returns:
        The seconds and the memory that it took.
    """
    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.model import DataConfig, DataPrefixConfig, ModelConfig
    from nemo_aligner.contract.from_settings import build_contract
    from nemo_aligner.contract.tokenizer import load_tokenizer
    from nemo_aligner.data.training_data import build_training_data

    tokenizer = load_tokenizer(job["tokenizer"])
    config = ModelConfig(
        data=DataConfig(
            data_prefix=DataPrefixConfig([job["path"]]), template="tokenizer", seq_length=2048
        ),
        micro_batch_tokens=_PACK_TOKENS,
        global_batch_size=_GLOBAL_BATCH,
    )
    contract = build_contract(config, tokenizer, Precision.fp32)
    bytes_at_start, begun = _anonymous_bytes(), time.perf_counter()
    data = build_training_data(config, contract, tokenizer)
    data.table()
    digest = data.train.digest
    loader = _build_loader(data)
    loader.plan(0)
    seconds = time.perf_counter() - begun
    bytes_at_end = _anonymous_bytes()
    return {
        "seconds": seconds,
        "own_bytes": bytes_at_end,
        "own_growth": bytes_at_end - bytes_at_start,
        "all_bytes": _peak_resident_bytes(),
        "pack_ms": 1e3 * median(_time_packing(data, step) for step in range(1, 1 + _STEPS)),
        "digest": digest,
    }


def _build_loader(data: Any) -> Any:
    from nemo_aligner.data.training_data import TrainLoader

    return TrainLoader(data.train, _GLOBAL_BATCH, _PACK_TOKENS, 1234, 0, 1, _QUERY_KEY_COST)


def _time_packing(data: Any, step: int) -> float:
    """Measure the seconds to pack the records of training step ``step`` into micro-batches.

    A new loader is used, because the background thread of an old one has packed this step already.
    """
    loader = _build_loader(data)
    begun = time.perf_counter()
    loader.plan(step)
    seconds = time.perf_counter() - begun
    time.sleep(_PAUSE_S)  # give the background thread time to pack the next step
    return seconds


def _anonymous_bytes() -> int:
    match = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert match is not None
    return int(match.group(1)) * 1024


def _peak_resident_bytes() -> int:
    this_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return 1024 * (this_process + len(os.sched_getaffinity(0)) * children)


if __name__ == "__main__":
    start(main, begin=start_run)
