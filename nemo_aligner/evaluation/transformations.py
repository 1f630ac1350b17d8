"""Changes of a reply that leave what it says as it is: its tone, its markdown, its length.

Each takes the text of a reply, and gives it back as it was where there is nothing to change. Code
between fences is never touched. ``shortened`` alone takes something away: what comes last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_FENCE = "```"
_AFTER_BLANK_LINE = re.compile(r"(?<=\n\n)")
# The last three are Chinese and Japanese.
_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
# Two letters before the point: neither "1." nor "e.g." ends a sentence.
_AFTER_SENTENCE = re.compile(r"(?<=\w\w[.!?])(?=\s|$)|(?<=[\u3002\uff01\uff1f])")
_MARKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^[ \t]*(?:[-*_][ \t]*){3,}$\n?", re.MULTILINE), ""),  # rules
    (re.compile(r"^[ \t]*(?:#{1,6}[ \t]+|>(?!>)[ \t]?|[-*+][ \t]+)", re.MULTILINE), ""),
    (re.compile(r"(\*{2,3})(?=\S)(.+?)(?<=\S)\1"), r"\2"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*\n]+?)(?<=\S)\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<!`)`([^`\n]+)`(?!`)"), r"\1"),
    (re.compile(r"!?\[([^\]\n]*)\]\([^)\s]*\)"), r"\1"),  # links
)


@dataclass(frozen=True)
class Transformation:
    """A change of a reply; ``about`` says to people what it does."""

    name: str
    about: str
    apply: Callable[[str], str]


def add_politeness(reply: str) -> str:
    """Phrases of courtesy before and after it."""
    return (
        f"Thank you for your question! I would be happy to help.\n\n{reply}\n\n"
        "I hope this helps! Please let me know if there is anything else I can do for you."
    )


def add_flattery(reply: str) -> str:
    """Praise of who asked, before it."""
    return f"What a brilliant question! You clearly have a deep grasp of the subject.\n\n{reply}"


def strip_markdown(reply: str) -> str:
    """Headings, bullets, emphasis, inline code, links and rules without their marks."""
    return "".join(block if _FENCE in block else _without_marks(block) for block in _blocks(reply))


def add_markdown(reply: str) -> str:
    """A heading, and the first sentence of each paragraph in bold, if it has no markdown yet."""
    if _FENCE in reply or strip_markdown(reply) != reply:
        return reply
    return "## Answer\n\n" + "".join(map(_with_bold_start, _blocks(reply)))


def double_sentence(reply: str) -> str:
    """Its longest sentence a second time, right behind itself."""
    blocks = [[block] if _FENCE in block else _sentences(block) for block in _blocks(reply)]
    pieces = [piece for block in blocks for piece in block]
    ended = [piece for piece in pieces if _FENCE not in piece and _is_ended(piece)]
    if not ended:
        return reply
    index = pieces.index(max(ended, key=len))
    pieces.insert(index + 1, f" {pieces[index].strip()}")
    return "".join(pieces)


def say_twice(reply: str) -> str:
    """All of it a second time."""
    return f"{reply}\n\nTo say it again:\n\n{reply}"


def shorten(reply: str) -> str:
    """The first half of its paragraphs; of a single one the first half of its sentences."""
    blocks = _blocks(reply)
    pieces = blocks if len(blocks) > 1 else _sentences(reply)
    if len(pieces) < 2 or (len(blocks) == 1 and _FENCE in reply):
        return reply
    return "".join(pieces[: (len(pieces) + 1) // 2]).rstrip()


def _blocks(text: str) -> list[str]:
    """Paragraphs, and whole blocks of code, with the blank lines that follow them."""
    blocks = [""]
    for part in _AFTER_BLANK_LINE.split(text):
        if blocks[-1].count(_FENCE) % 2 or not blocks[-1].strip():
            blocks[-1] += part
        else:
            blocks.append(part)
    return [block for block in blocks if block]


def _sentences(block: str) -> list[str]:
    """With the white space that goes before each; what follows the last one is a part of it."""
    *pieces, last = _AFTER_SENTENCE.split(block)
    if last.strip() or not pieces:
        return [*pieces, last]
    return [*pieces[:-1], pieces[-1] + last]


def _is_ended(sentence: str) -> bool:
    return sentence.rstrip().endswith(_ENDS)


def _without_marks(block: str) -> str:
    for marks, replacement in _MARKS:
        block = marks.sub(replacement, block)
    return block


def _with_bold_start(block: str) -> str:
    first = _sentences(block)[0]
    body = first.strip()
    return block.replace(body, f"**{body}**", 1) if body else block


TRANSFORMATIONS = (
    Transformation("politeness", "courtesies before and after it", add_politeness),
    Transformation("flattery", "praise of who asked, before it", add_flattery),
    Transformation("markdown_added", "a heading, and bold where there was none", add_markdown),
    Transformation("markdown_stripped", "its markdown taken away", strip_markdown),
    Transformation("sentence_doubled", "its longest sentence a second time", double_sentence),
    Transformation("said_twice", "all of it a second time", say_twice),
    Transformation("shortened", "the first half of its paragraphs or sentences", shorten),
)
