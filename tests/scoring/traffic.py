"""Calls as a server gets them, for tests of what is kept between them."""

from __future__ import annotations

import random


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(90) for _ in range(count)]


def traffic(rng: random.Random, calls: int) -> list[list[list[int]]]:
    """Groups, dialogues that go on, texts again, and beginnings of texts."""
    known = [draw(rng, 70) for _ in range(4)]
    made = []
    for _ in range(calls):
        texts = []
        for _ in range(rng.randint(1, 5)):
            before = rng.choice(known)
            text = before[: rng.choice([0, 1, 15, 16, 17, 32, 50, 64, len(before)])]
            text = (text + draw(rng, rng.choice([0, 1, 5, 16, 30])))[:200] or [1]
            known[rng.randrange(4)] = text
            texts += [text, [*text, 7]][: rng.randint(1, 2)]
        made.append(texts)
    return made
