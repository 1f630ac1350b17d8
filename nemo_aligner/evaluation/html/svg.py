"""Figures as SVG that stands inside a page: small, without scripts, the text kept as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Wong 2011, "Color blindness": told apart by colour-blind people, and in print. Eight, as a figure
# of more lines cannot be read.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999933")
# In inches; the page scales it, and at these sizes its text is readable from 360 pixels on.
WIDTH, HEIGHT = 4.4, 2.9
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nemo_aligner",
    "text.parse_math": False,  # a name of the data may have dollar signs
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
_REMOVED = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.S
)
_POINTED_AT = re.compile(r'(?:href="#|url\(#)([^")]+)')
_SIZE = re.compile(r' (?:width|height)="[^"]*pt"')


class Canvas:
    """Axes to draw on, and what the pointer is told over some of what is drawn."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained")
        self.axes = self.figure.add_subplot()
        self.told: dict[str, str] = {}

    def tell(self, artist: Any, text: str) -> None:
        """Show ``text`` while the pointer is over an artist."""
        name = f"told_{len(self.told)}"
        artist.set_gid(name)
        self.told[name] = text


def draw(name: str, alt: str, on: Callable[[Canvas], None], height: float = HEIGHT) -> str:
    """The SVG of what ``on`` draws, equal for equal numbers.

    ``name`` is unlike that of other figures of the page; ``alt`` says what it shows, for those who
    do not see it.
    """
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        canvas = Canvas(height)
        on(canvas)
        written = StringIO()
        canvas.figure.savefig(written, format="svg", metadata={"Date": None})
    return _for_page(written.getvalue(), name, alt, canvas.told)


def _for_page(svg: str, name: str, alt: str, told: dict[str, str]) -> str:
    svg = _REMOVED.sub("", svg).strip()
    svg = _SIZE.sub("", svg, count=2)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    for own, text in told.items():
        svg = svg.replace(f'<g id="{own}">', f"<g><title>{escape(text)}</title>", 1)
    # Other figures of the page have the same names.
    for kept in sorted(set(_POINTED_AT.findall(svg))):
        own = rf'(id="|href="#|url\(#){re.escape(kept)}(?=[")])'
        svg = re.sub(own, rf"\g<1>{name}-{kept}", svg)
    svg = re.sub(rf' id="(?!{re.escape(name)}-)[^"]*"', "", svg)
    return re.sub(r"\n\s*", "\n", svg)
