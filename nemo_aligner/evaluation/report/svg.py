"""SVG to embed in a page: small, without scripts, with text as text.

Colours in the SVG are CSS variables, which the page defines for a light and a dark screen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Colours that colour-blind people can distinguish, even in print (Wong 2011, "Color blindness").
# Eight are enough, because a figure with more lines is not readable.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999933")
# Opacity of faint lines on a light screen.
FAINT = 0.45
# The same eight for a dark screen, where the blue is too dark and black is invisible.
DARK_COLOURS = (
    "#4FA3E0", "#F28E4B", "#2FC69B", "#DE9BC2", "#8ACBF2", "#F0B93A", "#E6E6E3", "#C2C25A",
)  # fmt: skip
# Colours of lines that belong to no model: names of CSS variables, by the colour for matplotlib.
INK, AXIS, TICKS, REFERENCE, GRID = "#222222", "#666666", "#444444", "#888888", "#e4e4e4"
_VARIABLES = {
    INK: "ink",
    AXIS: "axis",
    TICKS: "ticks",
    REFERENCE: "reference",
    GRID: "grid",
    **{colour.lower(): f"series-{number}" for number, colour in enumerate(COLOURS)},
}
# In inches. The page scales figures; with this size their text is readable from a width of 360
# pixels on.
WIDTH, HEIGHT = 4.4, 2.9
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nemo_aligner",
    "text.parse_math": False,  # Names in the data may contain dollar signs.
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": AXIS,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "xtick.color": TICKS,
    "ytick.color": TICKS,
}
_REMOVED = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.S
)
_REFERENCED_ID = re.compile(r'(?:href="#|url\(#)([^")]+)')
_COLOUR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")
_SIZE = re.compile(r' (?:width|height)="[^"]*pt"')


class Canvas:
    """Axes to draw on, and the tooltips of what is drawn.

    Attributes:
        figure, axes: of matplotlib.
        tooltips: text of each tooltip, by the id of its SVG element.
    """

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained")
        self.axes = self.figure.add_subplot()
        self.tooltips: dict[str, str] = {}

    def add_tooltip(self, artist: Any, text: str) -> None:
        """Show ``text`` while the pointer is over an artist of matplotlib."""
        element_id = f"tooltip_{len(self.tooltips)}"
        artist.set_gid(element_id)
        self.tooltips[element_id] = text


def draw(name: str, alt: str, draw_on: Callable[[Canvas], None], height: float = HEIGHT) -> str:
    """Render as SVG what ``draw_on`` draws; the same drawing always gives the same bytes.

    Args:
        name: identifier of the figure, unique on the page.
        alt: description for people who cannot see the figure.
        draw_on: draws on the canvas that it gets.
        height: height of the figure in inches.
    """
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        canvas = Canvas(height)
        draw_on(canvas)
        output = StringIO()
        canvas.figure.savefig(output, format="svg", metadata={"Date": None})
    return _clean_svg(output.getvalue(), name, alt, canvas.tooltips)


def _clean_svg(svg: str, name: str, alt: str, tooltips: dict[str, str]) -> str:
    """Prepare the SVG of matplotlib for a page.

    It removes the head and the sizes, makes ids unique, and replaces colours by CSS variables.
    """
    svg = _REMOVED.sub("", svg).strip()
    svg = svg.replace(f"stroke-opacity: {FAINT}", "stroke-opacity: var(--faint)")
    svg = re.sub(r'style="[^"]*"', lambda style: _COLOUR.sub(_theme, style[0]), svg)
    svg = _SIZE.sub("", svg, count=2)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    for element_id, text in tooltips.items():
        svg = svg.replace(f'<g id="{element_id}">', f"<g><title>{escape(text)}</title>", 1)
    # matplotlib uses the same ids in every figure. Prefix those that are referenced, and remove the
    # others.
    for referenced_id in sorted(set(_REFERENCED_ID.findall(svg))):
        pattern = rf'(id="|href="#|url\(#){re.escape(referenced_id)}(?=[")])'
        svg = re.sub(pattern, rf"\g<1>{name}-{referenced_id}", svg)
    svg = re.sub(rf' id="(?!{re.escape(name)}-)[^"]*"', "", svg)
    return re.sub(r"\n\s*", "\n", svg)


def css_colour(colour: str) -> str:
    """Return a colour of ``COLOURS`` or of the axes as the CSS variable that the page defines.

    Any other colour is returned unchanged.
    """
    name = _VARIABLES.get(colour.lower())
    return f"var(--{name})" if name else colour


def _theme(match: re.Match[str]) -> str:
    return css_colour(match[0])
