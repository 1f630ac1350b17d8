"""Damaged records of every format are read, or malformed with their line, without a crash."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given

from nemo_aligner.config.common import Overlong
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.readers import ReaderConfig, open_file
from nemo_aligner.data.texts import labelled_texts
from nemo_aligner.data.tokenize import TokenRules, tokenize_block
from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import TASKS
from nemo_aligner.serving.protocols import StepRewards
from nemo_aligner.utils.errors import DataError
from tests.data.files import pair_with_call
from tests.harness.contracts import Contracts
from tests.harness.fuzzing import Faults, damaged, fuzz_settings
from tests.harness.scorers import source_of

RECORDS, ITEMS, IN_A_BATCH = 10_000, 2_000, 20
ANSWER = {"role": "assistant", "content": "b"}
CALLING = pair_with_call(query="a word", limit="10")
# Added to each format's sample: tool calls, text parts, documents, reasoning, metadata.
MORE: dict[str, list[list[dict[str, Any]]]] = {
    "chat_pairs": [
        [CALLING],
        [{**CALLING, "tools": json.dumps(CALLING["tools"]), "documents": [{"text": "a"}]}],
        [
            {
                "chosen": [
                    {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
                    {"role": "user", "content": "why", "name": "Ann"},
                    {"role": "assistant", "content": "so", "reasoning_content": "hm"},
                ],
                "rejected": [{"role": "user", "content": "why"}, ANSWER],
                "metadata": {"score_chosen": 9.0, "score_rejected": 7},
                "source": "a set",
            }
        ],
    ],
    "hh": [
        [{"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": " b", "rejected": " c", "margin": 1.5}]
    ],
}
SAMPLES = {name: [list(known.sample), *MORE.get(name, [])] for name, known in FORMATS.items()}
BENCHMARKS = {name: [[task.sample]] for name, task in TASKS.items()}
ATTRIBUTES = {"rated_text": ("a", "b")}
READS = {
    **dict.fromkeys(("stepwise", "math_shepherd", "prm800k"), "step_ends"),
    "labelled_turns": "turns",
}


def write_json(path: Path, records: Any) -> Path:
    """Write lines in ASCII: half of a surrogate pair, which UTF-8 cannot encode, is escaped."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@dataclass(frozen=True)
class Reading:
    """The rules that read a format by name, and by ``auto``, which has to recognize it."""

    how: ReaderConfig
    contract: ScoringContract
    tokenizer: Tokenizer

    @classmethod
    def of(cls, name: str, contract: ScoringContract, tokenizer: Tokenizer) -> list[Reading]:
        """By name, and by ``auto``, with labels of pairs."""
        position = READS.get(name, "last_token")
        separator = "\n" if position == "step_ends" else None
        contract = replace(contract, scored_position=position, step_separator=separator)
        named = ReaderConfig(
            FORMATS[name].kind, name, attributes=ATTRIBUTES.get(name, ("helpfulness",))
        )
        recognized = replace(named, format="auto", pair_columns=("label_margin",), ties=True)
        return [cls(each, contract, tokenizer) for each in (named, recognized)]

    def read(self, path: Path) -> Counter[str]:
        """What happened to the records of a file, up to their tokens."""
        rules, blocks = open_file(path, self.how)
        counts: Counter[str] = Counter()
        for block in blocks:
            tokenized = tokenize_block(block, TokenRules(rules, self.contract, self.tokenizer))
            counts.update(tokenized.counts, kept=len(tokenized.sources))
            # Messages about them must be printable.
            for said in (*tokenized.sources, *map(str, tokenized.malformed)):
                said.encode()
            assert len(tokenized.malformed) == tokenized.counts["malformed"]
        return counts


def test_damaged_record_of_any_format_is_read_or_malformed(
    contracts: Contracts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    contract = contracts(template="chatml", seq_length=64, overlong=Overlong.truncate_left)
    readings = {name: Reading.of(name, contract, tokenizer) for name in FORMATS}
    counts: Counter[str] = Counter()
    path = tmp_path / "data.jsonl"

    faults = Faults(DataError)  # for the whole file, which has one record

    @fuzz_settings(RECORDS // IN_A_BATCH)
    @given(damaged(SAMPLES, IN_A_BATCH))
    def read_batch(batch: list[tuple[str, Any]]) -> None:
        for number, (name, records) in enumerate(batch):
            write_json(path, records)
            with faults.noting((name, records)):
                counts.update(readings[name][number % 2].read(path))

    read_batch()
    faults.check()
    assert faults.tries == RECORDS
    # Each kind of outcome occurs.
    assert min(counts[each] for each in ("kept", "malformed", "truncated", "empty_reply")) > 20


def test_damaged_item_of_any_benchmark_is_scored_or_refused(tmp_path: Path) -> None:
    faults = Faults(DataError)

    def score(texts: Sequence[Text]) -> np.ndarray:
        return np.array([[float(len(reply_of(text)))] for text in texts], dtype=np.float32)

    def score_steps(texts: Sequence[Text]) -> list[StepRewards]:
        counts = [len(reply_of(text)) for text in texts]
        return [StepRewards(np.arange(count, dtype=np.float32)[:, None]) for count in counts]

    @fuzz_settings(ITEMS // IN_A_BATCH)
    @given(damaged(BENCHMARKS, IN_A_BATCH))
    def run_batch(batch: list[tuple[str, Any]]) -> None:
        for name, records in batch:
            path = write_json(tmp_path / "items.jsonl", records)
            with faults.noting((name, records)):
                result = run_task(TASKS[name], path, source_of(score, score_steps))
                result.render({}).encode()
            with faults.noting(("score", records)):
                list(labelled_texts(path))

    run_batch()
    faults.check()
