"""What serving.py asks for: token ids that no turn has asked for before."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import WorkerFailed
from serving_servers import SEQ_LENGTH, Clients, Load, Recipe, Server

PROMPT, REPLY = 512, 100
_MEAN = 224
_SPREAD = 0.8  # of the logarithm of a length
_LOWEST_ID = 100  # below are special tokens


@dataclass(frozen=True)
class Requests:
    """Token ids to ask for, in this order, after those of ``seen``, which are not timed."""

    token_lists: list[list[int]]
    seen: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_lists))

    @property
    def new_tokens(self) -> list[int]:
        """Of each text, those behind the longest beginning that a text before it has, too."""
        counts = []
        for number, text in enumerate(self.token_lists):
            before = [*self.seen, *self.token_lists[:number]]
            known = max((_in_common(text, each) for each in before), default=0)
            counts.append(max(1, len(text) - known))
        return counts


def _in_common(text: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))


@dataclass(frozen=True)
class Work:
    """One kind of requests; ``draw`` makes those of a turn, and ``peers`` are asked beside ours."""

    name: str
    clients: int
    draw: Callable[[int], Requests]
    servers: tuple[str, ...]


class Pairs:
    """Both sides of pairs as token ids, each pair given out once."""

    def __init__(self, data: Path, encode: Callable[[Any], list[int]]) -> None:
        self._data = data
        self._encode = encode
        self._records = self._read()

    def take(self, count: int) -> list[list[int]]:
        """``count`` texts, the two sides of a pair one after the other."""
        found: list[list[int]] = []
        while len(found) < count:
            record = next(self._records, None)
            if record is None:
                raise SystemExit(f"{self._data}: too few pairs for so many requests and turns")
            found += [self._encode(text) for text in record.texts]
        return found[:count]

    def _read(self) -> Iterator[Any]:
        from nemo_aligner.config.common import RecordKind
        from nemo_aligner.data.readers import ReaderConfig, read_records

        yield from read_records(self._data, ReaderConfig(RecordKind.comparison)).records


class Draw:
    """Random token ids, others for every kind of work, number of clients and turn."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def uniform(self, count: int, clients: int, turn: int) -> Requests:
        """Lengths that are equally likely between 64 and 384 tokens."""
        rng = _random("uniform", clients, turn)
        lengths = rng.randint(64, 2 * _MEAN - 64 + 1, count).tolist()
        return Requests(self._ids(rng, lengths), [])

    def lognormal(self, count: int, clients: int, turn: int) -> Requests:
        """Lengths of the same mean, most of them below it, and some far above."""
        rng = _random("lognormal", clients, turn)
        median = np.log(_MEAN) - _SPREAD**2 / 2
        lengths = np.exp(rng.normal(median, _SPREAD, count)).clip(8, SEQ_LENGTH)
        return Requests(self._ids(rng, lengths.astype(int).tolist()), [])

    def shared(self, count: int, clients: int, turn: int) -> Requests:
        """Replies to one prompt, to which another reply has been scored before."""
        rng = _random("shared", clients, turn)
        (prompt,) = self._ids(rng, [PROMPT])
        texts = [[*prompt, *reply] for reply in self._ids(rng, [REPLY] * (count + 1))]
        return Requests(texts[1:], texts[:1])

    def _ids(self, rng: np.random.RandomState, lengths: Sequence[int]) -> list[list[int]]:
        lowest = min(_LOWEST_ID, self._vocabulary // 2)
        return [rng.randint(lowest, self._vocabulary, length).tolist() for length in lengths]


def _random(kind: str, clients: int, turn: int) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(f"{kind} {clients} {turn}".encode()))


class Contestants:
    """The servers by name, each started when it is first asked; a peer that fails is not again.

    ``rest_s`` passes before each load: a server may compute on after its last answer.
    """

    def __init__(
        self, recipes: Sequence[Recipe], work: Path, clients: Clients, rest_s: float = 0.0
    ) -> None:
        self._recipes = {recipe.name: recipe for recipe in recipes}
        self._work = work
        self._clients = clients
        self._rest_s = rest_s
        self._running: dict[str, tuple[Server, str]] = {}
        self.failures: dict[str, str] = {}

    def ask(
        self, name: str, token_lists: Sequence[list[int]], clients: int, limit_s: float
    ) -> Load | None:
        """What the server answered; None where it is left out, or has failed.

        Raises:
            WorkerFailed: ours has failed.
        """
        if name in self.failures or name not in self._recipes:
            return None
        recipe = self._recipes[name]
        log = self._work / f"{name.replace(' ', '_')}.log"
        try:
            if name not in self._running:
                print(f"starting {name} ...", flush=True)
                self._running[name] = recipe.start(log)
            requests = [recipe.request(token_ids) for token_ids in token_lists]
            url = self._running[name][1]
            time.sleep(self._rest_s)
            load = self._clients.put(url, requests, clients, limit_s, len(requests))
            if load.refused:
                said = load.said[0] if load.said else f"no answer within {limit_s:g} s"
                raise WorkerFailed(f"{load.refused} requests have no reward: {said}")
        except WorkerFailed as error:
            if recipe.is_ours:
                raise WorkerFailed(f"{error}\nits log: {log}") from None
            self.failures[name] = str(error)
            self._stop(name)
            return None
        return load

    def close(self) -> None:
        """End all servers."""
        for name in list(self._running):
            self._stop(name)

    def _stop(self, name: str) -> None:
        if name in self._running:
            self._running.pop(name)[0].stop()
