"""A report for people: one HTML file that asks for nothing, has no script, and can be printed.

Whatever stands in it is untrusted: the template escapes all of it, and the page forbids the browser
to run or to load anything, in case it ever did not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.evaluation.html import (
    of_heldout,
    of_overview,
    of_robustness,
    of_settings,
    of_training,
)
from nemo_aligner.evaluation.html.judged import Mistake
from nemo_aligner.evaluation.html.reported import Reported, name_apart, read_reported
from nemo_aligner.evaluation.html.sections import PageSection, heldout_sets
from nemo_aligner.evaluation.html.svg import COLOURS
from nemo_aligner.text.messages import Text, messages_of, prompt_of, reply_of, said

MOST_REPORTED = len(COLOURS)
# Of all mistakes together; escaped, in UTF-8, it is still below the 3 MB of a page.
_MOST_CHARACTERS = 400_000
_MOST_OF_A_TEXT = 20_000
# Those that would not be seen, or would turn what stands around them.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True)
class ShownTurn:
    """Who says what; ``is_cut`` where it is longer than the page has room for."""

    role: str
    text: str
    is_cut: bool


@dataclass(frozen=True)
class ShownMistake:
    """A mistake as the page has it: the prompt once, and below it the replies."""

    mistake: Mistake
    prompt: Sequence[ShownTurn]
    replies: Sequence[ShownTurn]


def write_page(paths: Sequence[Path], output: Path) -> Path:
    """Write the report of runs and evaluations, which are overlaid where there are several.

    Raises:
        DataError: one of them is neither.
        ConfigError: there are too many, or ``output`` cannot be written.
    """
    return save_page([read_reported(path) for path in paths], output)


def save_page(reported: Sequence[Reported], output: Path) -> Path:
    """``write_page`` of what has been read; where it is."""
    content = render_page(reported)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # A text may have half of a surrogate pair.
        output.write_bytes(content.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"output: got {output}, wanted a file to write: {error}") from error
    return output


def render_page(reported: Sequence[Reported]) -> str:
    """The HTML.

    Raises:
        ConfigError: there are more than colours can tell apart.
    """
    if not 1 <= len(reported) <= MOST_REPORTED:
        raise ConfigError(f"runs: got {len(reported)}, wanted 1 to {MOST_REPORTED} in a report")
    reported = name_apart(reported)
    parts = build_sections(reported)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"svg": Markup, "seen": seen}
    names = " and ".join(each.name for each in reported)
    how_many = sum(len(some) for part in parts for _, some in part.mistakes)
    return environment.get_template("page.html.jinja").render(
        title=f"Report of {names}",
        parts=parts,
        show=lambda mistake: show_mistake(mistake, how_many),
    )


def build_sections(reported: Sequence[Reported]) -> list[PageSection]:
    """All sections, in their order; those without content say why."""
    sets = heldout_sets(reported)
    for each in sets:
        if len(each.judged.lengths) == 0:
            raise DataError(f"{each.key.name}: it has no record, wanted at least one")
    return [
        of_overview.overview(reported, sets),
        of_settings.summary(reported, sets),
        of_training.learning_curves(reported),
        of_heldout.accuracy(sets, reported),
        of_heldout.rewards(sets),
        of_heldout.reliability(sets),
        of_heldout.reward_and_length(sets),
        of_robustness.robustness(reported),
        of_heldout.mistakes(sets),
        of_settings.data(reported),
        of_settings.contract(reported),
        of_settings.settings(reported),
        of_settings.versions(reported),
        of_training.throughput(reported),
    ]


def show_mistake(mistake: Mistake, how_many: int) -> ShownMistake:
    """The texts of one of ``how_many``: each whole, unless it is very long."""
    most = min(_MOST_OF_A_TEXT, _MOST_CHARACTERS // (4 * max(1, how_many)))
    prompts = [prompt_of(text) for _, text in mistake.texts]
    is_common = all(prompt == prompts[0] for prompt in prompts)
    prompt = [_turn(each["role"], said(each), most) for each in prompts[0] * is_common]
    # Where there is no common prompt a text stands whole.
    shown = reply_of if is_common else _whole
    replies = [_turn(side, shown(text), most) for side, text in mistake.texts]
    return ShownMistake(mistake, prompt, replies)


def _turn(role: str, text: str, most: int) -> ShownTurn:
    return ShownTurn(role, text[:most], len(text) > most)


def _whole(text: Text) -> str:
    if isinstance(text, str):
        return text
    return "\n\n".join(f"{turn['role']}: {said(turn)}" for turn in messages_of(text))


def seen(text: str) -> str:
    """With characters that nobody would see, or that turn the text around, as ``\\u202e``."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
