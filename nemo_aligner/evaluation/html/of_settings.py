"""What a report says of the making of a model: summary, data, contract, settings, versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_aligner.console import show_number
from nemo_aligner.evaluation.html.judged import HeldoutSet, JudgedPairs
from nemo_aligner.evaluation.html.of_heldout import longer_baseline
from nemo_aligner.evaluation.html.of_training import MAIN_METRICS, validation_sets
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.html.sections import Heldout, PageSection, PageTable, of_pairs
from nemo_aligner.metrics.by_source import BY_SOURCE
from nemo_aligner.metrics.table import Better, better_values, find_metric


def summary(reported: Sequence[Reported], sets: Sequence[Heldout]) -> PageSection:
    """What each is, its best validation, and the last value of every metric."""
    rows = [
        ["what it is", *(each.kind for each in reported)],
        *_rows("steps", [_steps(each) for each in reported]),
        *_rows("best validation", [_best(each) for each in reported]),
        *_rows("held-out accuracy", [_accuracy(each, sets) for each in reported]),
        *_rows("always the longer reply", [_longer(each, sets) for each in reported]),
        *_side_by_side([dict(_described(each)) for each in reported]),
    ]
    told = [line for each in reported for line in _drawn(each, len(reported) > 1)]
    header = ["", *(each.name for each in reported)]
    tables = [PageTable(header, rows)]
    metrics = _metrics(reported)
    if metrics.rows:
        tables.append(metrics)
    return PageSection("summary", "Summary", tables=tables, notes=told)


def _rows(name: str, values: Sequence[str]) -> Iterator[list[str]]:
    if any(values):
        yield [name, *values]


def _steps(run: Reported) -> str:
    steps = [steps[-1] for steps, _ in run.curves.values()]
    return str(max(steps)) if steps else ""


def _best(run: Reported) -> str:
    """Of each set the best value of its main metric, of equal ones that with the lowest loss."""
    found = []
    for name in validation_sets(run):
        main = next((each for each in MAIN_METRICS if f"{name}/{each}" in run.curves), None)
        if main is not None:
            steps, values = run.curves[f"{name}/{main}"]
            losses = dict(zip(*run.curves.get(f"{name}/loss", ((), ())), strict=True))
            sign = 1 if better_values(main) is Better.lower else -1
            _, _, at, best = min(
                (sign * value, losses.get(step, 0.0), step, value)
                for step, value in zip(steps, values, strict=True)
            )
            found.append(f"{main} {show_number(best)} at step {at} ({name})")
    return "; ".join(found)


def _accuracy(each: Reported, sets: Sequence[Heldout]) -> str:
    found = []
    for _, judged in of_pairs([one for one in sets if one.reported is each]):
        share = judged.shares()[0]
        interval = f"{share.low:.3f} to {share.high:.3f}"
        found.append(f"{share.accuracy:.3f} ({interval}), {share.pairs} pairs")
    return "; ".join(found)


def _longer(each: Reported, sets: Sequence[Heldout]) -> str:
    own = (longer_baseline(one) for one in sets if one.reported is each)
    return "; ".join(filter(None, own))


def _described(each: Reported) -> Iterator[tuple[str, str]]:
    """What its start said, as ``model: 143.4M parameters``."""
    for line in each.facts.get("described", []):
        what, _, said = line.partition(": ")
        yield (what, said) if said else ("note", what)


def _drawn(each: Reported, is_one_of_many: bool) -> list[str]:
    prefix, lines = f"{each.name}: " * is_one_of_many, []
    for name, judged in each.judged.items():
        total, kept = each.facts.get("validation_records", {}).get(name, 0), _count(judged)
        if total > kept:
            lines.append(f"{prefix}{name}: figures are of {kept} of {total} records, drawn once")
    return lines


def _count(judged: HeldoutSet) -> int:
    """Records, of which some may have several pairs."""
    if isinstance(judged, JudgedPairs):
        return len({each.record.partition(", pair ")[0] for each in judged.verdicts})
    return len(judged.records)


def _metrics(reported: Sequence[Reported]) -> PageTable:
    columns: dict[str, dict[str, str]] = {}
    for each in reported:
        for name in validation_sets(each):
            title = f"{each.name}, {name.removeprefix('validation-')}"
            columns[title] = {
                key.removeprefix(f"{name}/"): show_number(values[-1])
                for key, (_, values) in each.curves.items()
                if key.startswith(f"{name}/")
            }
        if each.metrics:
            columns[each.name] = {
                key: "" if value is None else show_number(value)
                for key, value in each.metrics.items()
            }
    names = [
        name
        for name in dict.fromkeys(name for column in columns.values() for name in column)
        if not name.startswith(BY_SOURCE)
    ]
    rows = [
        [name, *(column.get(name, "") for column in columns.values()), _meaning(name)]
        for name in names
    ]
    header = ["", *columns, "meaning"]
    return PageTable(header, rows, "Metrics of the last validation, or of the evaluation")


def _meaning(name: str) -> str:
    row = find_metric(name)
    return row.meaning if row else ""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return show_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def data(reported: Sequence[Reported]) -> PageSection:
    """What became of every file."""
    tables = []
    for each in reported:
        for file in each.facts.get("data", []) if isinstance(each.facts.get("data"), list) else []:
            rows = [*file["rows"], *(["malformed", line] for line in file["malformed"])]
            title = f"{each.name}, {file['name']}: {file['path']} ({file['format']})"
            tables.append(PageTable(["", ""], rows, title))
        if isinstance(each.facts.get("data"), str):
            counts = [[key, str(value)] for key, value in each.facts.get("counts", {}).items()]
            tables.append(PageTable(["", ""], counts, f"{each.name}: {each.facts['data']}"))
    return PageSection("data", "Data", tables=tables, nothing="Nothing is known of it here.")


def contract(reported: Sequence[Reported]) -> PageSection:
    """By which rules texts were scored."""
    hashes = [_hash(each) for each in reported]
    tables = []
    if any(hashes):
        header = ["", *(each.name for each in reported)]
        fields = [_as_mapping(each.facts.get("contract")) for each in reported]
        tables = [PageTable(header, [["hash", *hashes], *_side_by_side(fields)])]
    notes = []
    if len({each for each in hashes if each}) > 1:
        notes = ["The contracts differ: these rewards are not of the same texts by the same rules."]
    nothing = "It is not known here."
    return PageSection("contract", "Scoring contract", (), tables, (), notes, nothing)


def _hash(each: Reported) -> str:
    found = each.facts.get("contract_hash", each.facts.get("contract", ""))
    return found if isinstance(found, str) else ""


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def settings(reported: Sequence[Reported]) -> PageSection:
    """Of one run all; of several what differs first."""
    having = [each for each in reported if each.settings]
    tables = []
    header = ["", *(each.name for each in having)]
    rows = list(_side_by_side([each.settings for each in having]))
    if len(having) > 1:
        differing = [row for row in rows if len(set(row[1:])) > 1]
        tables.append(PageTable(header, differing, f"{len(differing)} settings differ"))
    if having:
        tables.append(PageTable(header, rows, "All settings"))
    nothing = "There are none here."
    return PageSection("settings", "Settings", tables=tables, nothing=nothing)


def versions(reported: Sequence[Reported]) -> PageSection:
    """What computed it."""
    having = [each for each in reported if each.facts.get("versions")]
    rows = list(_side_by_side([each.facts["versions"] for each in having]))
    ranks = [str(each.facts.get("ranks", "")) for each in having]
    if any(ranks):
        rows.append(["ranks", *ranks])
    header = ["", *(each.name for each in having)]
    tables = [PageTable(header, rows)] if rows else []
    return PageSection("versions", "Versions", tables=tables, nothing="They are not known here.")


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for key in dict.fromkeys(key for column in columns for key in column):
        yield [key, *(_cell(column[key]) if key in column else "" for column in columns)]
