"""docs/settings.md: ``python -m nemo_aligner.cli.reference > docs/settings.md`` writes it anew."""

from __future__ import annotations

import os

from nemo_aligner.cli.main import VERBS, load

_HEADING = """# Every verb and every setting

What `nemo-aligner VERB --help` prints. This page is made by
`python -m nemo_aligner.cli.reference > docs/settings.md`, and a test compares it.
"""


def render() -> str:
    """The page."""
    # argparse wraps by the terminal's width.
    os.environ["COLUMNS"] = "80"
    parts = [_HEADING]
    for verb in VERBS:
        help_text = load(verb).new_parser().format_help().rstrip()
        parts.append(f"## {verb}\n\n```\n{help_text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(render(), end="")
