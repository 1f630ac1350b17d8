"""A real server around a scorer without a model: ``python fake_server.py key=value ...``.

The reward of a token list is its sum; texts become one id per character. Special ids: 666 fails on
every rank, 667 kills the last rank, 668 fails only on the last rank, 700 takes 3 seconds, 701 gives
NaN, 702 hangs in C code. Every call is logged as ``BATCH sequences tokens`` on stdout.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.distributed.launch import launch
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.token_scorer import TokenCounts
from nemo_aligner.utils.errors import DataError
from nemo_aligner.utils.host_transfer import Arriving
from nemo_aligner.utils.processes import report

SEQ_LENGTH = 64


CONTRACT = ScoringContract(
    template="",
    add_bos=False,
    add_eos=True,
    bos_id=None,
    eos_id=None,
    overlong="truncate_left",
    seq_length=SEQ_LENGTH,
    attributes=("sum", "minus"),
    attribute_weights=(1.0, 0.5),
    label_means=(0.0, 0.0),
    dtype="fp32",
    tokenizer_fingerprint="ä",
    reward_model_type="regression",
)


def total(text: str) -> float:
    """Return the reward of a text."""
    return float(sum(map(ord, text)))


def hang() -> None:
    """Wait forever in C code, where no signal handler in Python is called."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


FINGERPRINT = "feed" * 8


class FakeScorer:
    contract = CONTRACT
    fingerprint = FINGERPRINT
    counts = TokenCounts()
    tokens_per_call = 256
    prefix_cache_bytes = 0

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def encode(self, text: str | list[dict[str, str]]) -> EncodedText:
        if text == "explode":
            raise TypeError("a bug in the tokenizer")
        whole = text if isinstance(text, str) else "".join(turn["content"] for turn in text)
        ids = [ord(letter) for letter in whole]
        if not ids:
            raise DataError("the text is empty")
        return EncodedText(ids[-SEQ_LENGTH:], len(ids) > SEQ_LENGTH)

    def adds_special_tokens(self, text: str) -> bool:
        return not text.endswith("$")  # stands for EOS

    def encode_tokens(self, token_ids: Sequence[int]) -> EncodedText:
        if len(token_ids) > SEQ_LENGTH:
            raise DataError(f"got {len(token_ids)} tokens, wanted at most {SEQ_LENGTH}")
        if min(token_ids) < 0:
            raise DataError(f"got token id {min(token_ids)}, wanted 0 or more")
        return EncodedText(list(token_ids), False)

    def count_reply_tokens(self, texts: Sequence[str | list[dict[str, str]]]) -> list[int]:
        return [len(text if isinstance(text, str) else text[-1]["content"]) for text in texts]

    def reset_cache(self) -> None:
        print("FORGET", flush=True)

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, None]:
        return outputs, None

    def begin(self, rows: Sequence[Row]) -> Arriving[list[np.ndarray]]:
        return Arriving.now(self.compute(rows))

    def compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        token_lists = [row.ids.tolist() for row in rows]
        tokens = sum(len(ids) for ids in token_lists)
        # In one piece: a flush by another thread between two parts let another rank's line in.
        print(f"BATCH {len(token_lists)} {tokens}\n", end="", flush=True)
        marks = {ids[0] for ids in token_lists}
        last = self._rank == self._world_size - 1
        if 666 in marks or (668 in marks and last):
            raise RuntimeError("token 666 cannot be scored" if 666 in marks else "alone")
        if 667 in marks and last:
            os._exit(9)
        if 700 in marks:
            time.sleep(3)
        if 702 in marks:
            hang()
        # Each rank sums a part, like in a tensor parallel model.
        mine = [float(sum(ids[self._rank :: self._world_size])) for ids in token_lists]
        rewards = torch.tensor(mine)
        if self._world_size > 1:
            dist.all_reduce(rewards)
        rewards[[ids[0] == 701 for ids in token_lists]] = torch.nan
        columns = np.stack([rewards.numpy(), -rewards.numpy()], axis=1).astype(np.float32)
        return np.split(columns, len(rows))


def main(arguments: Sequence[str]) -> int:
    # Imported here, because tests import this file only for its contract.
    from nemo_aligner.serving.reward import RewardBackend
    from nemo_aligner.serving.server import ServerSocket, serve

    kinds = {field.name: field.type for field in fields(ServerConfig)}
    config = ServerConfig(port=0)
    for argument in arguments:
        key, value = argument.split("=", 1)
        kind = {"int": int, "float": float}.get(str(kinds[key]).removesuffix(" | None"), str)
        setattr(config, key, kind(value))
    with launch() as run, ServerSocket(config) as port:
        scorer: Any = FakeScorer(run.rank, run.world_size)
        return serve([RewardBackend(scorer, config)], config, port)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:
        sys.exit(report(error))
