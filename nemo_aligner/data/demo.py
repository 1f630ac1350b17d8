"""Generate the demo sets: preference pairs that anyone can judge, and sums solved step by step.

``nemo-aligner data demo`` and the quickstart write them.
"""

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

from nemo_aligner.data.records import write_parts
from nemo_aligner.data.report import longer_wins
from nemo_aligner.utils.errors import DataError

# The demo set of pairs: it is balanced, and split by what the prompts ask about.
#
# All pairs of an item (a question, a sum, a word) are either training or held-out pairs, so that
# held-out prompts ask about nothing that a training prompt asks about. In exactly half of the pairs
# of each kind the better reply is the shorter one, so that length does not hint at the label.


def write_demo(folder: Path, pairs: int = 2400, heldout: float = 0.1, seed: int = 1) -> str:
    """Write the demo pairs to ``train.jsonl`` and ``heldout.jsonl`` in ``folder``.

    ``build_demo_pairs`` describes the other arguments.

    Returns:
        A table to print, with the number of pairs of each kind in both files.

    Raises:
        DataError: the demo set has fewer different pairs than ``pairs``, or one of the files would
            have no pairs of a kind.
    """
    train, heldout_pairs = build_demo_pairs(pairs, heldout, seed)
    sides = {"train": train, "heldout": heldout_pairs}
    written = write_parts(folder, {name: demo_lines(side) for name, side in sides.items()})
    kinds = {name: Counter(pair.kind for pair in side) for name, side in sides.items()}
    rows = [f"{'kind':<12}{'train':>7}{'heldout':>9}  the better reply is better because"]
    for kind, reason in REASONS.items():
        rows.append(f"{kind:<12}{kinds['train'][kind]:>7}{kinds['heldout'][kind]:>9}  {reason}")
    wins = longer_wins([(len(pair.chosen), len(pair.rejected)) for pair in heldout_pairs])
    rows.append(f"written: {', '.join(map(str, written.values()))}")
    rows.append(f"always taking the longer reply (in characters) is right in {wins:.1%} of heldout")
    return "\n".join(rows)


def demo_lines(pairs: Iterable[DemoPair]) -> list[str]:
    """Convert pairs to lines of JSON with prompt, chosen and rejected reply, and kind."""
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
    """Build about ``pairs`` pairs, equally many of each kind; the same seed gives the same pairs.

    Returns:
        The training pairs, and the held-out pairs, which are the fraction ``heldout`` of all.

    Raises:
        DataError: there are fewer different pairs than requested, or so few are requested that a
            file would have none of a kind.
    """
    train: list[DemoPair] = []
    heldout_pairs: list[DemoPair] = []
    for kind, make in KINDS.items():
        rng = random.Random(f"{seed}/{kind}")
        candidates = list(dict.fromkeys(make(rng)))
        count = pairs // len(KINDS)
        heldout_count = _count_heldout(count, heldout, f"pairs of the kind {kind!r}")
        items = _draw_items(candidates, heldout, seed)
        heldout_pairs += _draw_balanced(
            [pair for pair in candidates if pair.item in items], heldout_count, rng
        )
        train += _draw_balanced(
            [pair for pair in candidates if pair.item not in items], count - heldout_count, rng
        )
    random.Random(f"{seed}/train").shuffle(train)
    random.Random(f"{seed}/held").shuffle(heldout_pairs)
    return train, heldout_pairs


def _count_heldout(count: int, heldout: float, records: str) -> int:
    """Return how many of ``count`` records to hold out; DataError if either file would be empty."""
    held_out = round(count * heldout)
    if not 0 < held_out < count:
        raise DataError(
            f"--pairs, --heldout: got {count} {records}, of which the fraction {heldout} is "
            f"{held_out}, wanted at least one for each file. Ask for more pairs"
        )
    return held_out


def _draw_items(candidates: list[DemoPair], heldout: float, seed: int) -> set[str]:
    """Draw the fraction ``heldout`` of the items that ``candidates`` ask about.

    The draw depends on nothing but the items and the seed, so two kinds of pairs that ask about the
    same items hold out the same ones.
    """
    items = sorted({pair.item for pair in candidates})
    random.Random(f"{seed}/items").shuffle(items)
    return set(items[: max(1, round(len(items) * heldout))])


def _draw_balanced(candidates: list[DemoPair], count: int, rng: random.Random) -> list[DemoPair]:
    """Draw ``count`` pairs; in half of them the chosen reply is the shorter one."""
    shorter = [pair for pair in candidates if len(pair.chosen) < len(pair.rejected)]
    longer = [pair for pair in candidates if len(pair.chosen) > len(pair.rejected)]
    half = count // 2
    if half > len(shorter) or count - half > len(longer):
        raise DataError(
            f"{candidates[0].kind}: the demo set has {len(shorter)} different pairs whose better "
            f"reply is shorter and {len(longer)} where it is longer; {half} and {count - half} "
            "were requested. Ask for fewer pairs, or hold out another fraction"
        )
    return rng.sample(shorter, half) + rng.sample(longer, count - half)


# The ten kinds of pairs, for each of which a reader sees why the chosen reply is better.


@dataclass(frozen=True)
class DemoPair:
    """One pair of the demo set.

    ``item`` names what the prompt asks about. Pairs with the same item, even if their prompts are
    worded differently, are all training pairs or all held-out pairs.
    """

    kind: str
    item: str
    prompt: str
    chosen: str
    rejected: str


def _read_tables() -> dict[str, list[list[str]]]:
    """Read ``demo_tables.txt``; return the rows of each table, as lists of cells, by its name."""
    text = files("nemo_aligner.data").joinpath("demo_tables.txt").read_text(encoding="utf-8")
    tables = {}
    for block in text.split("\n\n"):
        heading, *rows = block.strip().splitlines()
        name = heading.strip("[]").partition(":")[0]
        tables[name] = [[cell.strip() for cell in row.split("|")] for row in rows]
    return tables


_TABLES = _read_tables()
_QUESTIONS, _PHRASES = _TABLES["questions"], _TABLES["phrases"]
# For each fact: the question about it, the beginning of the answer, the right answer, and the name
# of the group of facts from which wrong answers are drawn.
_FACTS = [
    (f"What is the {kind} of {word}?", f"the {kind} of {word} is", answer, kind)
    for kind, rows in (("capital", _TABLES["capitals"]), ("opposite", _TABLES["opposites"]))
    for word, answer in rows
]
_LANGUAGES = ("Spanish", "French", "German", "Italian")
_CATEGORIES = {category: words.split() for category, words in _TABLES["categories"]}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


def _sum_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for first, second in product(range(2, 20), repeat=2):
        total = first + second
        sum_text = f"{first} + {second}"
        prompt = rng.choice(["What is {}?", "Compute {}.", "How much is {}?"]).format(sum_text)
        wrong = total + rng.choice([step for step in (-10, -5, -3, 3, 5, 10) if total + step > 0])
        for short, long in (("{}.", "The answer is {}."), ("It is {}.", f"{sum_text} = {{}}.")):
            for right_form, wrong_form in ((short, long), (long, short)):
                replies = _fill_both(right_form, wrong_form, total, wrong)
                yield DemoPair("sum", sum_text, prompt, *replies)


def _fill_both(right_form: str, wrong_form: str, right: object, wrong: object) -> tuple[str, str]:
    return right_form.format(right), wrong_form.format(wrong)


def _fact_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for question, stem, right, group in _FACTS:
        wrong_answers = [fact[2] for fact in _FACTS if fact[3] == group and fact[2] != right]
        short, long = "It is {}.", f"{stem[0].upper()}{stem[1:]} {{}}."
        for wrong in rng.sample(wrong_answers, 5):
            for right_form, wrong_form in ((short, long), (long, short)):
                replies = _fill_both(right_form, wrong_form, right, wrong)
                yield DemoPair("fact", question, question, *replies)


def _language_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for (english, *words), index in product(_PHRASES, range(len(_LANGUAGES))):
        language = _LANGUAGES[index]
        short, long = "You say '{}'.", f"In {language} you say '{{}}'."
        prompts = (f"How do you say '{english}' in {language}?", f"Say '{english}' in {language}.")
        for prompt, wrong in product(prompts, [word for word in words if word != words[index]]):
            for right_form, wrong_form in ((short, long), (long, short)):
                yield DemoPair("language", f"{english} {language}", prompt,
                           *_fill_both(right_form, wrong_form, words[index], wrong))  # fmt: skip


def _count_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for (category, words), right_count in product(_CATEGORIES.items(), range(2, 6)):
        prompt = f"Name exactly {_NUMBERS[right_count]} {category}."
        item = f"{category} {right_count}"
        for number in range(10):
            fewer, more = range(1, right_count), range(right_count + 1, 7)
            wrong_count = rng.choice(fewer if number % 2 else more)
            right, wrong = rng.sample(words, right_count), rng.sample(words, wrong_count)
            yield DemoPair("count", item, prompt, _list_words(right), _list_words(wrong))


def _list_words(words: list[str]) -> str:
    return f"{words[0][0].upper()}{words[0][1:]}{''.join(f', {word}' for word in words[1:])}."


def _format_pairs(rng: random.Random) -> Iterator[DemoPair]:
    for category, words in _CATEGORIES.items():
        for word in words:
            second_word, third_word = rng.sample([name for name in words if name != word], 2)
            for prompt, chosen, rejected in (
                (
                    f"In one word: name one of the {category}, but not '{word}'.",
                    f"{second_word[0].upper()}{second_word[1:]}.",
                    f"One of the {category} is '{second_word}', for example.",
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
                    f"- {word}\n- {second_word}\n- {third_word}",
                    _list_words([word, second_word, third_word]),
                ),
            ):
                yield DemoPair("format", f"{category} {word}", prompt, chosen, rejected)


# Kinds of pairs that are about the whole reply. All of them ask the questions in ``_QUESTIONS``.

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


def _tone_replies(rng: random.Random, _: int, short: str, long: str) -> Iterator[tuple[str, str]]:
    for polite, rude in product(_POLITE, _RUDE):
        yield polite.format(rng.choice([short, long])), rude.format(rng.choice([short, long]))


def _topic_replies(
    rng: random.Random, number: int, short: str, long: str
) -> Iterator[tuple[str, str]]:
    other_questions = [row for index, row in enumerate(_QUESTIONS) if index != number]
    for _, other_short, other_long in rng.sample(other_questions, 6):
        yield short, other_long
        yield long, other_short


def _whole_replies(rng: random.Random, _: int, short: str, long: str) -> Iterator[tuple[str, str]]:
    words = long.split()
    for count in range(len(words) // 2, len(words) - 1):
        cut = " ".join(words[:count]).rstrip(",")
        yield short, cut
        yield long, cut


def _helpful_replies(
    rng: random.Random, _: int, short: str, long: str
) -> Iterator[tuple[str, str]]:
    yield from product((short, long), _REFUSALS)


def _repetition_replies(
    rng: random.Random, _: int, short: str, long: str
) -> Iterator[tuple[str, str]]:
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
    "tone": _question_pairs("tone", _tone_replies),
    "topic": _question_pairs("topic", _topic_replies),
    "whole": _question_pairs("whole", _whole_replies),
    "helpful": _question_pairs("helpful", _helpful_replies),
    "repetition": _question_pairs("repetition", _repetition_replies),
}


# The demo set of steps: sums of several numbers, with one addition a step. Half of the records have
# a wrong step.

_MIN_STEPS, _MAX_STEPS = 3, 6
# The largest number to add. A small model learns to add one-digit numbers within minutes, but not
# two-digit numbers.
_LARGEST = 9
# A wrong result is the right one plus one of these numbers.
_ERRORS = (-10, -2, -1, 1, 2, 10)


def write_step_demo(folder: Path, chains: int, heldout: float, seed: int) -> str:
    """Write the demo set of steps to ``train.jsonl`` and ``heldout.jsonl`` in ``folder``.

    The records have the format ``stepwise``. The two files have different questions.

    Args:
        chains: number of records in both files together. A record is a question such as "What is 3
            + 5 + 2?", answered with one addition a step.
        heldout: fraction of the records to hold out.

    Returns:
        A table to print, with the numbers of records, wrong steps and all steps.

    Raises:
        DataError: one of the files would be empty.
    """
    rng = random.Random(f"{seed}/steps")
    records = list(_make_chains(rng, chains))
    count = _count_heldout(chains, heldout, "answers in steps")
    sides = {"train": records[count:], "heldout": records[:count]}
    lines = [f"{'':<12}{'chains':>8}{'with an error':>15}{'steps':>8}"]
    paths = write_parts(folder, {name: [*map(json.dumps, rows)] for name, rows in sides.items()})
    for name, rows in sides.items():
        wrong = sum(False in row["labels"] for row in rows)
        steps = sum(len(row["labels"]) for row in rows)
        lines.append(f"{name:<12}{len(rows):>8}{wrong:>15}{steps:>8}  {paths[name]}")
    lines.append("a step is right if its sum is; steps after a wrong one have no label")
    return "\n".join(lines)


def _make_chains(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield ``count`` sums, answered with one addition a step, as ``stepwise`` records.

    All questions differ. Every second record has a wrong step.
    """
    questions: set[str] = set()
    while len(questions) < count:
        numbers = [rng.randint(1, _LARGEST) for _ in range(rng.randint(_MIN_STEPS, _MAX_STEPS) + 1)]
        question = f"What is {' + '.join(map(str, numbers))}?"
        if question in questions:
            continue
        is_wrong = len(questions) % 2 == 1
        questions.add(question)
        yield _make_chain(rng, question, numbers, is_wrong)


def _make_chain(
    rng: random.Random, question: str, numbers: list[int], is_wrong: bool
) -> dict[str, Any]:
    total, *addends = numbers
    wrong_at = rng.randrange(len(addends)) if is_wrong else len(addends)
    steps, labels = [], list[bool | None]()
    for number, addend in enumerate(addends):
        result = total + addend + (rng.choice(_ERRORS) if number == wrong_at else 0)
        steps.append(f"{total} + {addend} = {result}")
        labels.append(None if number > wrong_at else number < wrong_at)
        total = result
    return {"prompt": question, "completions": steps, "labels": labels}
