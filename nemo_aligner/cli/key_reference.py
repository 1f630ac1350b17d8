"""docs/migration/nemo_aligner_keys.md: what becomes of every key of NeMo-Aligner's files.

``python -m nemo_aligner.cli.key_reference > docs/migration/nemo_aligner_keys.md`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.config.nemo_aligner_keys import FILES, RULES
from nemo_aligner.config.translate import KeyRule, as_yaml

_HEADING = """# Every key of NeMo-Aligner's files

What becomes of the keys of three files of NeMo-Aligner 0.7, by the table that they are read with:
`nemo_aligner/config/nemo_aligner_keys.py`. This page is made of it by
`python -m nemo_aligner.cli.key_reference`, and a test compares it.

*only* means that another value is an error, as results would be others. *As* another key means that
both must say the same.
"""


def render() -> str:
    """The page."""
    parts = [_HEADING]
    for file, schema in FILES.items():
        parts.append(f"## {file}\n\n{_table(RULES[schema])}\n")
    return "\n".join(parts)


def _table(rules: Sequence[KeyRule]) -> str:
    rows = [f"| `{rule.key}` | {describe(rule)} | {rule.why} |" for rule in rules]
    return "\n".join(["| key | here | |", "|---|---|---|", *rows])


def describe(rule: KeyRule) -> str:
    """What a key is here, in a few words."""
    if rule.only:
        return "only " + " or ".join(f"`{value}`" for value in rule.only)
    if rule.same_as:
        return f"as `{rule.same_as}`"
    if not rule.to:
        return "ignored"
    here = "the same" if rule.to == rule.key else f"`{rule.to}`"
    if rule.adds:
        return f"added to {here}"
    changed = [f"`{value}` is `{as_yaml(ours)}`" for value, ours in rule.values.items()]
    return ": ".join([here, ", ".join(changed)]) if changed else here


if __name__ == "__main__":
    print(render(), end="")
