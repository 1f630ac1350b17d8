"""The demo sets: preference pairs that anyone can judge, and sums in steps."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from nemo_aligner.data.records import write_lines
from nemo_aligner.data.report import longer_wins
from nemo_aligner.utils.errors import DataError

# The demo set: small preference pairs that anyone can judge, balanced and split by what they ask.
#
# Pairs of an item (a question, a sum, a word) all fall on the same side of the split, so held-out
# prompts ask what no training prompt asks. In exactly half of the pairs of every kind the better
# reply is the shorter one, so that length tells nothing.


def write_demo(folder: Path, pairs: int = 2400, heldout: float = 0.1, seed: int = 1) -> str:
    """Write ``train.jsonl`` and ``heldout.jsonl``; how many of each kind they have, and why.

    Raises:
        DataError: see ``build_demo_pairs``.
    """
    train, held = build_demo_pairs(pairs, heldout, seed)
    sides = {"train": train, "heldout": held}
    written = [
        write_lines(folder / f"{name}.jsonl", demo_lines(side)) for name, side in sides.items()
    ]
    kinds = {name: Counter(pair.kind for pair in side) for name, side in sides.items()}
    rows = [f"{'kind':<12}{'train':>7}{'heldout':>9}  the better reply is better because"]
    for kind, reason in REASONS.items():
        rows.append(f"{kind:<12}{kinds['train'][kind]:>7}{kinds['heldout'][kind]:>9}  {reason}")
    wins = longer_wins([(len(pair.chosen), len(pair.rejected)) for pair in held])
    rows.append(f"written: {', '.join(written)}")
    rows.append(f"always taking the longer reply (in characters) is right in {wins:.1%} of heldout")
    return "\n".join(rows)


def demo_lines(pairs: Iterable[DemoPair]) -> list[str]:
    """The pairs as lines of a file of preference data."""
    return [
        json.dumps(
            {"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected, "kind": p.kind},
            ensure_ascii=False,
        )
        for p in pairs
    ]


def build_demo_pairs(
    pairs: int, heldout: float, seed: int
) -> tuple[list[DemoPair], list[DemoPair]]:
    """About ``pairs`` pairs, as many of each kind: those to train on, and those held out.

    Raises:
        DataError: more pairs are wanted than there are different ones.
    """
    train: list[DemoPair] = []
    held: list[DemoPair] = []
    for kind, make in KINDS.items():
        rng = random.Random(f"{seed}/{kind}")
        candidates = list(dict.fromkeys(make(rng)))
        wanted = pairs // len(KINDS)
        wanted_held = round(wanted * heldout)
        held_items = _held_items(candidates, heldout, seed)
        held += _balanced(
            [pair for pair in candidates if pair.item in held_items], wanted_held, rng
        )
        train += _balanced(
            [pair for pair in candidates if pair.item not in held_items], wanted - wanted_held, rng
        )
    random.Random(f"{seed}/train").shuffle(train)
    random.Random(f"{seed}/held").shuffle(held)
    return train, held


def _held_items(candidates: list[DemoPair], heldout: float, seed: int) -> set[str]:
    """Items drawn from the names alone: kinds of the same questions hold out the same ones."""
    items = sorted({pair.item for pair in candidates})
    random.Random(f"{seed}/items").shuffle(items)
    return set(items[: max(1, round(len(items) * heldout))])


def _balanced(candidates: list[DemoPair], wanted: int, rng: random.Random) -> list[DemoPair]:
    """``wanted`` pairs; in half of them the chosen reply is the shorter one."""
    shorter = [pair for pair in candidates if len(pair.chosen) < len(pair.rejected)]
    longer = [pair for pair in candidates if len(pair.chosen) > len(pair.rejected)]
    half = wanted // 2
    if half > len(shorter) or wanted - half > len(longer):
        raise DataError(
            f"{candidates[0].kind}: got {len(shorter)} pairs with the shorter reply better and "
            f"{len(longer)} with the longer one; wanted {half} and {wanted - half}"
        )
    return rng.sample(shorter, half) + rng.sample(longer, wanted - half)


# The ten kinds of pairs of the demo set, each with a reason that a reader can see.


@dataclass(frozen=True)
class DemoPair:
    """One pair; ``item`` is what it asks about, whatever the wording."""

    kind: str
    item: str
    prompt: str
    chosen: str
    rejected: str


def _read_tables() -> dict[str, list[list[str]]]:
    """The tables of ``demo_tables.txt`` by their names, as rows of cells."""
    text = files("nemo_aligner.data").joinpath("demo_tables.txt").read_text(encoding="utf-8")
    tables = {}
    for block in text.split("\n\n"):
        heading, *rows = block.strip().splitlines()
        name = heading.strip("[]").partition(":")[0]
        tables[name] = [[cell.strip() for cell in row.split("|")] for row in rows]
    return tables


_TABLES = _read_tables()
_QUESTIONS, _PHRASES = _TABLES["questions"], _TABLES["phrases"]
# fact question | beginning of its answer | right answer | group that wrong answers come from
_FACTS = [
    (f"What is the {kind} of {word}?", f"the {kind} of {word} is", answer, kind)
    for kind, rows in (("capital", _TABLES["capitals"]), ("opposite", _TABLES["opposites"]))
    for word, answer in rows
]
_LANGUAGES = ("Spanish", "French", "German", "Italian")
_CATEGORIES = {category: words.split() for category, words in _TABLES["categories"]}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


def _sum_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for left, right in product(range(2, 20), repeat=2):
        total = left + right
        sum_text = f"{left} + {right}"
        prompt = rng.choice(["What is {}?", "Compute {}.", "How much is {}?"]).format(sum_text)
        wrong = total + rng.choice([step for step in (-10, -5, -3, 3, 5, 10) if total + step > 0])
        for short, long in (("{}.", "The answer is {}."), ("It is {}.", f"{sum_text} = {{}}.")):
            for right_form, wrong_form in ((short, long), (long, short)):
                yield DemoPair("sum", sum_text, prompt, *_two(right_form, wrong_form, total, wrong))


def _two(right_form: str, wrong_form: str, right: object, wrong: object) -> tuple[str, str]:
    return right_form.format(right), wrong_form.format(wrong)


def _fact_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for question, stem, right, group in _FACTS:
        others = [fact[2] for fact in _FACTS if fact[3] == group and fact[2] != right]
        sentence = f"{stem[0].upper()}{stem[1:]} {{}}."
        for wrong in rng.sample(others, 5):
            yield DemoPair("fact", question, question, *_two("It is {}.", sentence, right, wrong))
            yield DemoPair("fact", question, question, *_two(sentence, "It is {}.", right, wrong))


def _language_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for (english, *words), index in product(_PHRASES, range(len(_LANGUAGES))):
        language = _LANGUAGES[index]
        short, long = "You say '{}'.", f"In {language} you say '{{}}'."
        prompts = (f"How do you say '{english}' in {language}?", f"Say '{english}' in {language}.")
        for prompt, other in product(prompts, [word for word in words if word != words[index]]):
            for right_form, wrong_form in ((short, long), (long, short)):
                yield DemoPair("language", f"{english} {language}", prompt,
                           *_two(right_form, wrong_form, words[index], other))  # fmt: skip


def _count_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for (category, words), wanted in product(_CATEGORIES.items(), range(2, 6)):
        prompt = f"Name exactly {_NUMBERS[wanted]} {category}."
        for turn in range(10):
            given = rng.choice(range(1, wanted) if turn % 2 else range(wanted + 1, 7))
            right, wrong = rng.sample(words, wanted), rng.sample(words, given)
            yield DemoPair("count", f"{category} {wanted}", prompt, _list(right), _list(wrong))


def _list(words: list[str]) -> str:
    return f"{words[0][0].upper()}{words[0][1:]}{''.join(f', {word}' for word in words[1:])}."


def _format_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for category, words in _CATEGORIES.items():
        for word in words:
            other, another = rng.sample([name for name in words if name != word], 2)
            for prompt, chosen, rejected in (
                (
                    f"In one word: name one of the {category}, but not '{word}'.",
                    f"{other[0].upper()}{other[1:]}.",
                    f"One of the {category} is '{other}', for example.",
                ),
                (
                    f"In a full sentence: is '{word}' one of the {category}?",
                    f"Yes, '{word}' is one of the {category}.",
                    "Yes.",
                ),
                (
                    f"Write '{word}' in capital letters, and nothing else.",
                    word.upper(),
                    f"Sure, here is the word: {word}",
                ),
                (
                    f"List '{word}' and two more {category}, one per line, with dashes.",
                    f"- {word}\n- {other}\n- {another}",
                    _list([word, other, another]),
                ),
            ):
                yield DemoPair("format", f"{category} {word}", prompt, chosen, rejected)


# Kinds about a whole reply: all ask the questions above.

_GREETINGS = ("", "Hi! ", "Please tell me: ")
_POLITE = ("Happy to help! {}", "Good question! {}", "Sure. {}", "{} I hope that helps!")
_RUDE = (
    "What a stupid question. {}", "Ugh. {}", "{} Even a child knows that.", "{} Now go away.",
    "Look it up yourself.", "Stop wasting my time with this.",
)  # fmt: skip
_REFUSALS = (
    "I can't help with that.", "No comment.", "I'm sorry, but I cannot answer that question.",
    "As an assistant I am not able to talk about this, so please ask somebody else.",
)  # fmt: skip


def _question_pairs(
    kind: str, make: Callable[..., Iterator[tuple[str, str]]]
) -> Callable[..., Iterator[DemoPair]]:
    def pairs(rng: random.Random) -> Iterator[DemoPair]:
        for number, (question, short, long) in enumerate(_QUESTIONS):
            for chosen, rejected in make(rng, number, short, long):
                for greeting in rng.sample(_GREETINGS, 2):
                    yield DemoPair(kind, question, greeting + question, chosen, rejected)

    return pairs


def _tone(rng: random.Random, _: int, short: str, long: str) -> Iterator[tuple[str, str]]:
    for polite, rude in product(_POLITE, _RUDE):
        yield polite.format(rng.choice([short, long])), rude.format(rng.choice([short, long]))


def _topic(rng: random.Random, number: int, short: str, long: str) -> Iterator[tuple[str, str]]:
    others = [row for index, row in enumerate(_QUESTIONS) if index != number]
    for _, other_short, other_long in rng.sample(others, 6):
        yield short, other_long
        yield long, other_short


def _whole(rng: random.Random, _: int, short: str, long: str) -> Iterator[tuple[str, str]]:
    words = long.split()
    for kept in range(len(words) // 2, len(words) - 1):
        cut = " ".join(words[:kept]).rstrip(",")
        yield short, cut
        yield long, cut


def _helpful(rng: random.Random, _: int, short: str, long: str) -> Iterator[tuple[str, str]]:
    yield from product((short, long), _REFUSALS)


def _repetition(rng: random.Random, _: int, short: str, long: str) -> Iterator[tuple[str, str]]:
    words = long.rstrip(".").split()
    for size, times in ((1, 4), (1, 6), (2, 2), (2, 5), (3, 2), (3, 4)):
        start = rng.randrange(min(4, len(words) - size))
        stuck = " ".join(words[: start + 1] + words[start + 1 : start + 1 + size] * times)
        yield short, stuck
        yield long, stuck


REASONS = {
    "sum": "the sum is right",
    "fact": "the fact is right",
    "language": "the word is in the language asked for",
    "count": "it names as many as asked for",
    "format": "it has the form asked for",
    "tone": "it is polite",
    "topic": "it answers this question and not another",
    "whole": "it is not cut off",
    "helpful": "it does not refuse a harmless question",
    "repetition": "it does not get stuck",
}

KINDS: dict[str, Callable[[random.Random], Iterator[DemoPair]]] = {
    "sum": _sum_pairs,
    "fact": _fact_pairs,
    "language": _language_pairs,
    "count": _count_pairs,
    "format": _format_pairs,
    "tone": _question_pairs("tone", _tone),
    "topic": _question_pairs("topic", _topic),
    "whole": _question_pairs("whole", _whole),
    "helpful": _question_pairs("helpful", _helpful),
    "repetition": _question_pairs("repetition", _repetition),
}


# The demo set of steps: chains of sums, in half of which one step is wrong.

_FEWEST, _MOST = 3, 6
# Of one digit: a small model learns to add these within minutes; numbers of two it does not.
_LARGEST = 9
# How far a wrong result is off.
_OFF = (-10, -2, -1, 1, 2, 10)


def write_step_demo(folder: Path, chains: int, heldout: float, seed: int) -> str:
    """Write ``train.jsonl`` and ``heldout.jsonl`` of ``stepwise`` records; what they have.

    No question of one file is in the other.
    """
    rng = random.Random(f"{seed}/steps")
    made = list(_chains(rng, chains))
    held = made[: round(chains * heldout)]
    sides = {"train": made[len(held) :], "heldout": held}
    lines = [f"{'':<12}{'chains':>8}{'with an error':>15}{'steps':>8}"]
    for name, rows in sides.items():
        path = write_lines(folder / f"{name}.jsonl", map(json.dumps, rows))
        wrong = sum(False in row["labels"] for row in rows)
        steps = sum(len(row["labels"]) for row in rows)
        lines.append(f"{name:<12}{len(rows):>8}{wrong:>15}{steps:>8}  {path}")
    lines.append("a step is right if its sum is; steps behind a wrong one have no label")
    return "\n".join(lines)


def _chains(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Chains of different questions, every second one with an error."""
    seen: set[str] = set()
    while len(seen) < count:
        numbers = [rng.randint(1, _LARGEST) for _ in range(rng.randint(_FEWEST, _MOST) + 1)]
        question = f"What is {' + '.join(map(str, numbers))}?"
        if question in seen:
            continue
        is_wrong = len(seen) % 2 == 1
        seen.add(question)
        yield _solved(rng, question, numbers, is_wrong)


def _solved(
    rng: random.Random, question: str, numbers: list[int], is_wrong: bool
) -> dict[str, Any]:
    first, *others = numbers
    wrong_at = rng.randrange(len(others)) if is_wrong else len(others)
    steps, labels = [], list[bool | None]()
    total = first
    for number, other in enumerate(others):
        result = total + other + (rng.choice(_OFF) if number == wrong_at else 0)
        steps.append(f"{total} + {other} = {result}")
        labels.append(None if number > wrong_at else number < wrong_at)
        total = result
    return {"prompt": question, "completions": steps, "labels": labels}
