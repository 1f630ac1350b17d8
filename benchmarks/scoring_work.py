"""Shared by scoring.py and invariance.py: sequences to score, our scorer, and time of matmuls."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import add_device_option

if TYPE_CHECKING:
    from nemo_aligner.models.reward_model import GPTRewardModel

Score = Callable[[list[list[int]]], np.ndarray]
SMALLEST_BUDGET = 8192
_ROWS = 16  # the number of rows of a matmul is rounded up to a multiple of this


@dataclass(frozen=True)
class Work:
    """One kind of work: sequences that are scored together.

    Attributes:
        name: name of the work in the table.
        token_lists: token ids of each sequence.
        is_sorted: True if transformers may sort the sequences by length, to pad less.
    """

    name: str
    token_lists: list[list[int]]
    is_sorted: bool


@dataclass(frozen=True)
class OurScorer:
    """A base model with a random head, and functions to score with it.

    Attributes:
        model: the model.
        score: computes the rewards of token lists.
        encode: converts a conversation to token ids.
        vocabulary: number of token ids.
    """

    model: GPTRewardModel
    score: Score
    encode: Callable[[Any], list[int]]
    vocabulary: int
    computed: Callable[[], int]
    """Returns the number of tokens that went through the model so far."""

    @property
    def head(self) -> np.ndarray:
        """The head's weights ``[1, hidden]``."""
        return self.model.rm_head.weight.detach().cpu().numpy()


class Matmuls:
    """Times only the matmuls of a model, as a bound on the speed of scoring.

    The matmuls use the same weight layout and threads as scoring.
    """

    def __init__(self, model: Any, dtype: Any = None) -> None:
        """Draw random weights with the shapes of ``model`` in ``dtype`` (default fp32)."""
        import torch

        from nemo_aligner.cpu.matmuls import linear_in_chunks, reordered_for_matmuls
        from nemo_aligner.models.layers import ColumnLinear, RowLinear

        linear = (ColumnLinear, RowLinear)
        shapes = [
            tuple(weight.weight.shape) for weight in model.modules() if isinstance(weight, linear)
        ]
        # Draw as many weights as the model has, although many have the same shape. If one weight
        # stood for all of a shape, it would stay in the CPU's caches, and the matmuls would be
        # faster than those of the model.
        self._dtype = dtype or torch.float32
        drawn = (torch.randn(shape, dtype=self._dtype) for shape in shapes)
        self._weights = [reordered_for_matmuls(weight) for weight in drawn]
        self._widths = {width for _, width in shapes}
        self._multiply = linear_in_chunks
        self._seconds: dict[int, float] = {}

    def seconds(self, tokens: int) -> float:
        """Time all matmuls for ``tokens`` tokens in one call, in seconds; the best of five runs."""
        rows = tokens + -tokens % _ROWS
        if rows not in self._seconds:
            self._seconds[rows] = min(self._measure(rows) for _ in range(5))
        return self._seconds[rows]

    def _measure(self, rows: int) -> float:
        import torch

        inputs = {width: torch.randn(rows, width, dtype=self._dtype) for width in self._widths}
        start = time.perf_counter()
        for weight in self._weights:
            self._multiply(inputs[weight.size(1)], weight)
        return time.perf_counter() - start


def our_scorer(
    nemo: Path,
    precision: Any,
    layout: Any,
    freeze: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> OurScorer:
    """Load a scorer that truncates samples to 2,048 tokens.

    It is batch invariant unless ``settings``, values of ``model.*``, say otherwise. ``freeze``
    prepares the weights as a server does.
    """
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
    from nemo_aligner.config.common import Overlong
    from nemo_aligner.config.model import DataConfig, ModelConfig
    from nemo_aligner.contract.from_settings import build_contract
    from nemo_aligner.models.batch_invariance import freeze_for_scoring, make_batch_invariant
    from nemo_aligner.serving.engine.scorer import RewardScorer

    data = DataConfig(seq_length=2048, overlong=Overlong.truncate_left)
    config = ModelConfig(data=data, **(settings or {}))
    pretrained = load_pretrained(
        nemo,
        layout,
        num_attributes=1,
        precision=precision,
        kernels=config.kernels,
    )
    model, tokenizer = pretrained.model.eval(), pretrained.tokenizer
    make_batch_invariant(model, config.invariant_rows)
    if config.cuda_graphs:
        model.use_cuda_graphs()
    if freeze:
        freeze_for_scoring(model)
    contract = build_contract(config, tokenizer, precision)
    scorer = RewardScorer(model, contract, tokenizer, layout, SMALLEST_BUDGET)

    def score(token_lists: list[list[int]]) -> np.ndarray:
        return scorer.score_token_lists(token_lists)[:, 0]

    def encode(text: Any) -> list[int]:
        return scorer.encode(text).token_ids

    return OurScorer(model, score, encode, tokenizer.vocab_size, lambda: scorer.counts.computed)


def encode_pairs(data: Path, pairs: int, encode: Callable[[Any], list[int]]) -> list[list[int]]:
    """Encode both replies of the first ``pairs`` pairs in a file; return their token ids."""
    from nemo_aligner.config.common import RecordKind
    from nemo_aligner.data.readers import ReaderConfig, read_records

    records = read_records(data, ReaderConfig(RecordKind.comparison)).records[:pairs]
    return [encode(text) for record in records for text in record.texts]


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model, the data and the number of turns."""
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="the base model: a .gguf file or a Hugging Face folder",
    )
    parser.add_argument("--data", type=Path, required=True, help="file of pairs")
    parser.add_argument("--pairs", type=int, default=24, help="number of pairs (default 24)")
    parser.add_argument(
        "--turns", type=int, default=3, help="number of runs of each side (default 3)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads that each side computes with (default 2)"
    )
    add_device_option(parser)
    parser.add_argument(
        "--work", help="folder that keeps the converted model; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, metavar="JSON")


def make_works(data: Path, pairs: int, ours: OurScorer) -> list[Work]:
    """Make the three kinds of work that scoring.py describes, for the tokenizer of ``ours``."""
    texts = encode_pairs(data, pairs, ours.encode)
    rng = np.random.RandomState(0)
    prompt = rng.randint(100, ours.vocabulary, 1024).tolist()
    replies = [rng.randint(100, ours.vocabulary, rng.randint(150, 251)).tolist() for _ in range(16)]
    return [
        Work("pairs, theirs sorted by length", texts, True),
        Work("single replies as they come", texts[::2], False),
        Work("a group of 16 replies", [[*prompt, *reply] for reply in replies], True),
    ]
