"""The report of gpu_first_hour.py as Markdown, with a table for each part (measurement)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import format_cell
from first_hour_summary import goals, recommended_settings


def render_page(content: Mapping[str, Any]) -> str:
    """Render the content of ``first_hour.json`` as Markdown."""
    facts = [f"- {key}: {value}" for key, value in content.items() if key != "parts"]
    states = [
        {
            "part": part["part"],
            "what it shows": part["about"],
            "state": part["state"],
            "seconds": round(part["seconds"]),
            "why": part["why"],
        }
        for part in content["parts"]
    ]
    rows = {part["part"]: part["rows"] for part in content["parts"]}
    pieces = ["# The first hour", "\n".join(facts), table(states)]
    pieces += ["## Goals, for one H100", table(goals(rows))]
    if content.get("device") == "cpu":
        pieces.append("This was a rehearsal on a CPU with tiny models, so no goal means anything.")
    settings = recommended_settings(rows)
    if settings:
        pieces += ["## The fastest settings", table(settings)]
    for part in content["parts"]:
        pieces += _section(part)
    return "\n\n".join(pieces) + "\n"


def _section(part: Mapping[str, Any]) -> list[str]:
    pieces = [f"## {part['part']}: {part['about']}"]
    if part["state"] != "done":
        pieces.append(f"{part['state']}: {part['why']}")
    if part["rows"]:
        pieces.append(table(part["rows"]))
    return [*pieces, *(f"```\n{remark}\n```" for remark in part["remarks"])]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render rows as a Markdown table; columns without any content are dropped."""
    every = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in every if any(row.get(name) not in (None, "") for row in rows)]
    numbers = {
        name for name in names if any(isinstance(row.get(name), int | float) for row in rows)
    }
    rule = ["---:" if name in numbers else "---" for name in names]
    body = [[format_cell(row.get(name)) for name in names] for row in rows]
    lines = [
        [cell.replace("|", "\\|").replace("\n", "<br>") for cell in line]
        for line in [names, rule, *body]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
